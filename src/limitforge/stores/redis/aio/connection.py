"""One connection to Redis on one event loop: calls are written at once, and replies are matched in order.

No call is ever sent twice. When the connection is lost, every call in flight gets a `StoreUnavailable`.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from limitforge.errors import StoreError, StoreUnavailable
from limitforge.stores.redis.address import Address
from limitforge.stores.redis.resp import (
    ASKING,
    connection_error,
    encode_call,
    encode_call_with_script,
    encode_command,
    handshake_error,
    is_no_longer_master,
    is_script_missing,
    require_replicas,
    translate_error,
)
from limitforge.stores.redis.script_call import Reply, ScriptCall

ReplyHandler = Callable[[Any], None]
OnCallReply = Callable[[Reply | StoreError], None]
OnLost = Callable[["Connection", StoreUnavailable], None]


class Connection(asyncio.Protocol):
    """An open connection. `on_lost` is called once when it ends, also after `abort`."""

    def __init__(self, address: Address, on_lost: "OnLost") -> None:
        self._address = address
        self._on_lost = on_lost
        self._reader = hiredis.Reader()
        self._reply_handlers: deque[ReplyHandler] = deque()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, address: Address, on_lost: "OnLost", seconds: float) -> "Connection":
        """Connect, and send the handshake. Raises StoreUnavailable if that fails or takes longer than `seconds`."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(seconds):
                connection = await cls._connect(address, on_lost)
                replies = await connection._handshake()  # noqa: SLF001
        except (OSError, TimeoutError) as error:
            if connection is not None:
                connection.abort()
            raise connection_error(error) from error
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        refused = handshake_error(replies)
        if refused is not None:
            connection.abort()
            raise refused
        if connection._transport is None:  # noqa: SLF001 - closed while the last handshake reply was processed
            raise StoreUnavailable("the connection to Redis was closed at once")
        return connection

    @classmethod
    async def _connect(cls, address: Address, on_lost: "OnLost") -> "Connection":
        loop = asyncio.get_running_loop()
        if address.path is not None:
            _, connection = await loop.create_unix_connection(lambda: cls(address, on_lost), address.path)
        else:
            _, connection = await loop.create_connection(lambda: cls(address, on_lost), address.host, address.port)
        if address.tls is not None:
            await connection._start_tls(address.tls)  # noqa: SLF001
        return connection

    async def _start_tls(self, tls: ssl.SSLContext) -> None:
        """Start TLS in a step of its own: asyncio leaks the socket if its combined step is cancelled."""
        plain = self._transport
        if plain is None:
            raise ConnectionResetError("the connection was closed at once")
        try:
            self._transport = await asyncio.get_running_loop().start_tls(
                plain, self, tls, server_hostname=self._address.host
            )
        except BaseException:
            plain.abort()
            raise

    async def _handshake(self) -> list[Any]:
        """Send the handshake, and return the replies to it."""
        address = self._address
        completed: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        replies: list[Any] = []

        def on_reply(reply: Any) -> None:
            replies.append(reply)
            if not completed.done() and (isinstance(reply, StoreError) or len(replies) == address.handshake_replies):
                completed.set_result(replies)

        if not address.handshake_replies:
            return []
        self._send(address.handshake, *[on_reply] * address.handshake_replies)
        await completed
        error = next((reply for reply in replies if isinstance(reply, StoreError)), None)
        if error is not None:
            raise handshake_error(replies) or error
        return replies

    def call(self, call: ScriptCall, on_reply: OnCallReply, *, asking: bool = False) -> None:
        """Call the script. `on_reply` receives the reply or an error.

        `asking` sends ASKING first, which a server needs while it imports the slot.
        """
        if asking:
            self.call_many([(call, on_reply, True)])
        else:
            self._send(encode_call(call) + self._address.wait_command, *self._handlers_of(call, on_reply))

    def call_many(self, calls: Sequence[tuple[ScriptCall, OnCallReply, bool]]) -> None:
        """Send several calls in one write, each with its callback and its `asking`."""
        data: list[bytes] = []
        handlers: list[ReplyHandler] = []
        for call, on_reply, asking in calls:
            if asking:
                data.append(ASKING)
                handlers.append(ignore_reply)
            data += (encode_call(call), self._address.wait_command)
            handlers += self._handlers_of(call, on_reply, asking=asking)
        self._send(b"".join(data), *handlers)

    def send_command(self, command: tuple[str | int | bytes, ...], on_reply: ReplyHandler) -> None:
        """Send a command other than the script. `on_reply` receives the raw reply."""
        self._send(encode_command(*command), on_reply)

    def _handlers_of(self, call: ScriptCall, on_reply: OnCallReply, *, asking: bool = False) -> list[ReplyHandler]:
        """Return the handlers of the reply to a call, and of the WAIT after it if there is one."""
        on_call_reply: OnCallReply = on_reply
        wait_handlers: list[ReplyHandler] = []
        if self._address.wait_replicas:
            replicated = _ReplicatedReply(on_reply, self._address.wait_replicas)
            on_call_reply, wait_handlers = replicated.on_reply, [replicated.on_wait_reply]

        def handle(reply: Any) -> None:
            if is_script_missing(reply):
                data = encode_call_with_script(call) + self._address.wait_command
                handlers = [lambda repeated: on_call_reply(_translate(repeated)), *wait_handlers]
                if asking:
                    self._send(ASKING + data, ignore_reply, *handlers)
                else:
                    self._send(data, *handlers)
            else:
                on_call_reply(_translate(reply))
                if is_no_longer_master(reply) and not self._address.is_cluster:
                    self.abort()

        return [handle, *wait_handlers]

    def publish(self, channel: bytes, message: bytes, on_reply: OnCallReply) -> None:
        self._send(encode_command("PUBLISH", channel, message), lambda reply: on_reply(_translate(reply)))

    def abort(self, error: StoreUnavailable | None = None) -> None:
        """Close at once. Calls in flight get this error."""
        if self._transport is not None:
            self._transport.abort()
            self._close(error or StoreUnavailable("the connection to Redis was aborted", maybe_counted=True))

    def _send(self, data: bytes, *handlers: ReplyHandler) -> None:
        if self._transport is None:
            for handle in handlers:
                handle(StoreUnavailable("the connection to Redis is closed"))
            return
        self._reply_handlers.extend(handlers)
        self._transport.write(data)

    def _close(self, error: StoreUnavailable) -> None:
        if self._transport is None:
            return
        self._transport = None
        handlers, self._reply_handlers = self._reply_handlers, deque()
        for handle in handlers:
            handle(error)
        self._on_lost(self, error)

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if not self._reply_handlers:  # an error without a call: Redis has reached maxclients
                    self.abort()
                    return
                self._reply_handlers.popleft()(reply)
        except hiredis.ProtocolError as error:
            self.abort(StoreUnavailable(f"the server does not speak the Redis protocol: {error}", maybe_counted=True))

    def connection_lost(self, exc: Exception | None) -> None:
        self._close(connection_error(exc or ConnectionError("the connection was closed"), maybe_counted=True))


class _ReplicatedReply:
    """Holds back the reply to a call until the reply to the WAIT after it has arrived."""

    def __init__(self, on_reply: OnCallReply, replicas: int) -> None:
        self._on_reply = on_reply
        self._replicas = replicas
        self._reply: Reply | StoreError | None = None

    def on_reply(self, reply: Reply | StoreError) -> None:
        self._reply = reply

    def on_wait_reply(self, replicas: Any) -> None:
        reply, self._reply = self._reply, None
        if reply is None:  # the script was missing: the call is repeated with another WAIT
            return
        is_wait_lost = isinstance(replicas, StoreError) and not isinstance(reply, StoreError)
        self._on_reply(replicas if is_wait_lost else require_replicas(reply, replicas, self._replicas))


def ignore_reply(_reply: Any) -> None:
    """Handle a reply that nothing depends on. An error in the reply to ASKING repeats in the reply to the call."""


def _translate(reply: Any) -> Reply | StoreError:
    return translate_error(reply) if isinstance(reply, hiredis.ReplyError) else reply
