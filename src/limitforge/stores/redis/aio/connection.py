"""One connection to Redis on one event loop: calls go out at once, answers come back in order.

Nothing is ever sent twice: when the connection is lost, what was on its way is answered with `StoreUnavailable`.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from limitforge.errors import StoreError, StoreUnavailable
from limitforge.stores.redis.codec import Reply, ScriptCall
from limitforge.stores.redis.resp import (
    ASKING,
    Address,
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

OnCallReply = Callable[[Reply | StoreError], None]
OnLost = Callable[["Connection", StoreUnavailable], None]


class Connection(asyncio.Protocol):
    """An open connection. `lost` is told once when it is no more, also after `abort`."""

    def __init__(self, address: Address, on_lost: "OnLost") -> None:
        self._address = address
        self._on_lost = on_lost
        self._reader = hiredis.Reader()
        self._reply_handlers: deque[Callable[[Any], None]] = deque()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, address: Address, on_lost: "OnLost", seconds: float) -> "Connection":
        """Connect and greet within that time, or raise StoreUnavailable."""
        wire: Connection | None = None
        try:
            async with asyncio.timeout(seconds):
                wire = await cls._connect(address, on_lost)
                replies = await wire.handshake(address)
        except (OSError, TimeoutError) as error:
            if wire is not None:
                wire.abort()
            raise connection_error(error) from error
        except BaseException:
            if wire is not None:
                wire.abort()
            raise
        refused = handshake_error(replies)
        if refused is not None:
            wire.abort()
            raise refused
        if wire._transport is None:  # noqa: SLF001 - it was lost in the turn in which it had greeted
            raise StoreUnavailable("the connection to Redis was closed at once")
        return wire

    @classmethod
    async def _connect(cls, address: Address, lost: "OnLost") -> "Connection":
        loop = asyncio.get_running_loop()
        if address.path is not None:
            _, wire = await loop.create_unix_connection(lambda: cls(address, lost), address.path)
        else:
            _, wire = await loop.create_connection(lambda: cls(address, lost), address.host, address.port)
        if address.tls is not None:
            await wire._start_tls(address.tls)  # noqa: SLF001
        return wire

    async def _start_tls(self, tls: ssl.SSLContext) -> None:
        """Begin TLS. In two steps, as asyncio leaves the socket open if its own single step is cancelled midway."""
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

    async def handshake(self, address: Address) -> list[Any]:
        """Say who we are; the replies tell whether we are welcome."""
        greeted: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        replies: list[Any] = []

        def heard(reply: Any) -> None:
            replies.append(reply)
            if not greeted.done() and (isinstance(reply, StoreError) or len(replies) == address.handshake_replies):
                greeted.set_result(replies)

        if not address.handshake_replies:
            return []
        self._send(address.handshake, *[heard] * address.handshake_replies)
        await greeted
        lost = next((reply for reply in replies if isinstance(reply, StoreError)), None)
        if lost is not None:
            raise handshake_error(replies) or lost
        return replies

    def call(self, call: ScriptCall, on_reply: OnCallReply, *, asking: bool = False) -> None:
        """Ask the script; `done` is called with its reply, or with what was wrong. A node that is only about to get a
        slot wants to hear that we know (`asking`).
        """
        if asking:
            self.call_many([(call, on_reply, True)])
        else:
            self._send(encode_call(call) + self._address.wait_command, *self._handlers_of(call, on_reply))

    def call_many(self, calls: Sequence[tuple[ScriptCall, OnCallReply, bool]]) -> None:
        """Several calls in one write, each with whether it is `asking`."""
        data: list[bytes] = []
        heard: list[Callable[[Any], None]] = []
        for call, done, asking in calls:
            if asking:
                data.append(ASKING)
                heard.append(_ignore_reply)
            data += (encode_call(call), self._address.wait_command)
            heard += self._handlers_of(call, done, asking=asking)
        self._send(b"".join(data), *heard)

    def send_command(self, command: tuple[str | int | bytes, ...], on_reply: Callable[[Any], None]) -> None:
        """Anything other than the script; `done` is called with whatever is said."""
        self._send(encode_command(*command), on_reply)

    def _handlers_of(self, call: ScriptCall, done: OnCallReply, *, asking: bool = False) -> list[Callable[[Any], None]]:
        """Who hears the answer to a call, and to the wait behind it if there is one."""
        answer: OnCallReply = done
        waits: list[Callable[[Any], None]] = []
        if self._address.wait_replicas:
            waiting = _ReplicatedReply(done, self._address.wait_replicas)
            answer, waits = waiting.on_reply, [waiting.on_wait_reply]

        def heard(reply: Any) -> None:
            if is_script_missing(reply):
                data, again = (
                    encode_call_with_script(call) + self._address.wait_command,
                    [lambda told: answer(_translate(told)), *waits],
                )
                if asking:
                    self._send(ASKING + data, _ignore_reply, *again)
                else:
                    self._send(data, *again)
            else:
                answer(_translate(reply))
                if is_no_longer_master(reply) and not self._address.is_cluster:
                    self.abort()

        return [heard, *waits]

    def publish(self, channel: bytes, message: bytes, on_reply: OnCallReply) -> None:
        self._send(encode_command("PUBLISH", channel, message), lambda reply: on_reply(_translate(reply)))

    def abort(self, error: StoreUnavailable | None = None) -> None:
        """Close at once. What is on its way is answered with this error."""
        if self._transport is not None:
            self._transport.abort()
            self._close(error or StoreUnavailable("the connection to Redis was given up", maybe_counted=True))

    def _send(self, data: bytes, *heard: Callable[[Any], None]) -> None:
        if self._transport is None:
            for each in heard:
                each(StoreUnavailable("the connection to Redis is closed"))
            return
        self._reply_handlers.extend(heard)
        self._transport.write(data)

    def _close(self, error: StoreUnavailable) -> None:
        if self._transport is None:
            return
        self._transport = None
        expecting, self._reply_handlers = self._reply_handlers, deque()
        for heard in expecting:
            heard(error)
        self._on_lost(self, error)

    # -- asyncio's side

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
                if not self._reply_handlers:  # Redis speaks first only to say that it takes no more clients
                    self.abort()
                    return
                self._reply_handlers.popleft()(reply)
        except hiredis.ProtocolError as error:
            self.abort(StoreUnavailable(f"what answers is no Redis: {error}", maybe_counted=True))

    def connection_lost(self, exc: Exception | None) -> None:
        self._close(connection_error(exc or ConnectionError("the connection was closed"), maybe_counted=True))


class _ReplicatedReply:
    """An answer that counts once enough replicas have what was written."""

    def __init__(self, done: OnCallReply, replicas: int) -> None:
        self._on_reply = done
        self._replicas = replicas
        self._reply: Reply | StoreError | None = None

    def on_reply(self, reply: Reply | StoreError) -> None:
        self._reply = reply

    def on_wait_reply(self, replicas: Any) -> None:
        reply, self._reply = self._reply, None
        if reply is None:  # it is asked once more, with the script
            return
        lost = isinstance(replicas, StoreError) and not isinstance(reply, StoreError)
        self._on_reply(replicas if lost else require_replicas(reply, replicas, self._replicas))


def _ignore_reply(_reply: Any) -> None:
    """Whatever is wrong shows in the next answer."""


def _translate(reply: Any) -> Reply | StoreError:
    return translate_error(reply) if isinstance(reply, hiredis.ReplyError) else reply
