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
from limitforge.stores.codec import Call, Reply
from limitforge.stores.resp import (
    ASKING,
    Address,
    first_refusal,
    is_demoted,
    is_forgotten,
    pack,
    packed,
    packed_with_script,
    refusal,
    replicated,
    unreachable,
)

Done = Callable[[Reply | StoreError], None]
Lost = Callable[["Wire", StoreUnavailable], None]


class Wire(asyncio.Protocol):
    """An open connection. `lost` is told once when it is no more, also after `abort`."""

    def __init__(self, address: Address, lost: "Lost") -> None:
        self._address = address
        self._lost = lost
        self._reader = hiredis.Reader()
        self._expecting: deque[Callable[[Any], None]] = deque()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, address: Address, lost: "Lost", seconds: float) -> "Wire":
        """Connect and greet within that time, or raise StoreUnavailable."""
        wire: Wire | None = None
        try:
            async with asyncio.timeout(seconds):
                wire = await cls._connected(address, lost)
                replies = await wire.greet(address)
        except (OSError, TimeoutError) as error:
            if wire is not None:
                wire.abort()
            raise unreachable(error) from error
        except BaseException:
            if wire is not None:
                wire.abort()
            raise
        refused = first_refusal(replies)
        if refused is not None:
            wire.abort()
            raise refused
        if wire._transport is None:  # noqa: SLF001 - it was lost in the turn in which it had greeted
            raise StoreUnavailable("the connection to Redis was closed at once")
        return wire

    @classmethod
    async def _connected(cls, address: Address, lost: "Lost") -> "Wire":
        loop = asyncio.get_running_loop()
        if address.path is not None:
            _, wire = await loop.create_unix_connection(lambda: cls(address, lost), address.path)
        else:
            _, wire = await loop.create_connection(lambda: cls(address, lost), address.host, address.port)
        if address.tls is not None:
            await wire._encrypt(address.tls)  # noqa: SLF001
        return wire

    async def _encrypt(self, tls: ssl.SSLContext) -> None:
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

    async def greet(self, address: Address) -> list[Any]:
        """Say who we are; the replies tell whether we are welcome."""
        greeted: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        replies: list[Any] = []

        def heard(reply: Any) -> None:
            replies.append(reply)
            if not greeted.done() and (isinstance(reply, StoreError) or len(replies) == address.greetings):
                greeted.set_result(replies)

        if not address.greetings:
            return []
        self._send(address.greeting, *[heard] * address.greetings)
        await greeted
        lost = next((reply for reply in replies if isinstance(reply, StoreError)), None)
        if lost is not None:
            raise first_refusal(replies) or lost
        return replies

    def call(self, call: Call, done: Done, *, asking: bool = False) -> None:
        """Ask the script; `done` is called with its reply, or with what was wrong. A node that is only about to get a
        slot wants to hear that we know (`asking`).
        """
        if asking:
            self.call_all([(call, done, True)])
        else:
            self._send(packed(call) + self._address.wait, *self._heard(call, done))

    def call_all(self, calls: Sequence[tuple[Call, Done, bool]]) -> None:
        """Several calls in one write, each with whether it is `asking`."""
        data: list[bytes] = []
        heard: list[Callable[[Any], None]] = []
        for call, done, asking in calls:
            if asking:
                data.append(ASKING)
                heard.append(_ignore)
            data += (packed(call), self._address.wait)
            heard += self._heard(call, done, asking=asking)
        self._send(b"".join(data), *heard)

    def ask(self, command: tuple[str | int | bytes, ...], done: Callable[[Any], None]) -> None:
        """Anything other than the script; `done` is called with whatever is said."""
        self._send(pack(*command), done)

    def _heard(self, call: Call, done: Done, *, asking: bool = False) -> list[Callable[[Any], None]]:
        """Who hears the answer to a call, and to the wait behind it if there is one."""
        answer: Done = done
        waits: list[Callable[[Any], None]] = []
        if self._address.replicas:
            waiting = _Waiting(done, self._address.replicas)
            answer, waits = waiting.told, [waiting.waited]

        def heard(reply: Any) -> None:
            if is_forgotten(reply):
                data, again = packed_with_script(call) + self._address.wait, [lambda told: answer(_told(told)), *waits]
                if asking:
                    self._send(ASKING + data, _ignore, *again)
                else:
                    self._send(data, *again)
            else:
                answer(_told(reply))
                if is_demoted(reply) and not self._address.redirects:
                    self.abort()

        return [heard, *waits]

    def publish(self, channel: bytes, message: bytes, done: Done) -> None:
        self._send(pack("PUBLISH", channel, message), lambda reply: done(_told(reply)))

    def abort(self, error: StoreUnavailable | None = None) -> None:
        """Close at once. What is on its way is answered with this error."""
        if self._transport is not None:
            self._transport.abort()
            self._end(error or StoreUnavailable("the connection to Redis was given up", maybe_counted=True))

    def _send(self, data: bytes, *heard: Callable[[Any], None]) -> None:
        if self._transport is None:
            for each in heard:
                each(StoreUnavailable("the connection to Redis is closed"))
            return
        self._expecting.extend(heard)
        self._transport.write(data)

    def _end(self, error: StoreUnavailable) -> None:
        if self._transport is None:
            return
        self._transport = None
        expecting, self._expecting = self._expecting, deque()
        for heard in expecting:
            heard(error)
        self._lost(self, error)

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
                if not self._expecting:  # Redis speaks first only to say that it takes no more clients
                    self.abort()
                    return
                self._expecting.popleft()(reply)
        except hiredis.ProtocolError as error:
            self.abort(StoreUnavailable(f"what answers is no Redis: {error}", maybe_counted=True))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(unreachable(exc or ConnectionError("the connection was closed"), maybe_counted=True))


class _Waiting:
    """An answer that counts once enough replicas have what was written."""

    def __init__(self, done: Done, replicas: int) -> None:
        self._done = done
        self._replicas = replicas
        self._reply: Reply | StoreError | None = None

    def told(self, reply: Reply | StoreError) -> None:
        self._reply = reply

    def waited(self, replicas: Any) -> None:
        reply, self._reply = self._reply, None
        if reply is None:  # it is asked once more, with the script
            return
        lost = isinstance(replicas, StoreError) and not isinstance(reply, StoreError)
        self._done(replicas if lost else replicated(reply, replicas, self._replicas))


def _ignore(_reply: Any) -> None:
    """Whatever is wrong shows in the next answer."""


def _told(reply: Any) -> Reply | StoreError:
    return refusal(reply) if isinstance(reply, hiredis.ReplyError) else reply
