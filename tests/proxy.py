"""A proxy on 127.0.0.1 that loses, delays, truncates and corrupts the traffic between a client and its server.

It runs on an event loop in another thread. A test can change its mode at any time, from any thread:

    with Proxy(server.port) as proxy, proxy.doing(DropReplies()):
        SyncLimiter.connect(proxy.url).check(...)
"""

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

PATIENCE_SECONDS = 10.0
CHUNK = 65_536

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward everything."""


@dataclass(frozen=True, slots=True)
class DropRequests:
    """Keep connections open, and drop what clients send."""


@dataclass(frozen=True, slots=True)
class DropReplies:
    """Keep connections open, and drop what the server sends. It executes all requests."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Delay each chunk of a reply."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Truncate:
    """Close the connection after the first bytes of a longer reply."""

    after: int


@dataclass(frozen=True, slots=True)
class OneByteAtATime:
    """Send replies byte by byte."""

    seconds: float  # between two bytes


@dataclass(frozen=True, slots=True)
class CloseConnections:
    """Close all connections, and close new ones at once after accepting them."""


@dataclass(frozen=True, slots=True)
class Garbage:
    """Replace each chunk of a reply by other bytes."""

    reply: bytes = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


Mode = Forward | DropRequests | DropReplies | Delay | Truncate | OneByteAtATime | CloseConnections | Garbage


class Proxy:
    """Forwards bytes to and from a server on 127.0.0.1, as its `mode` says. It listens until it is closed."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._mode: Mode = Forward()
        self.accepted = 0  # connections so far
        self.requests = 0  # chunks that clients have sent so far, forwarded or not
        self._open: dict[asyncio.StreamWriter, asyncio.Task[Any]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._run(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        """Change the mode for all bytes that are read from now on."""
        self._run(self._switch(mode))

    @contextmanager
    def in_mode(self, mode: Mode) -> Iterator[None]:
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return self._run(self._count())

    def close(self) -> None:
        """Close all connections, and end the thread."""
        if self._thread.is_alive():
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE_SECONDS)
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _switch(self, mode: Mode) -> None:
        self._mode = mode
        if isinstance(mode, CloseConnections):
            await self._end_all()

    async def _count(self) -> int:
        return len(self._open)

    async def _close(self) -> None:
        await self._switch(CloseConnections())
        # asyncio does not track connections that it is just accepting.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        self._server.close()
        await self._server.wait_closed()

    async def _end_all(self) -> None:
        serving = list(self._open.values())
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until its connection ends. Connection errors are expected."""
        task = asyncio.current_task()
        assert task is not None
        self._open[writer] = task
        self.accepted += 1
        upstream: asyncio.StreamWriter | None = None
        try:
            if isinstance(self._mode, CloseConnections):
                return
            replies, upstream = await asyncio.open_connection("127.0.0.1", self._target)
            pumps = [
                asyncio.create_task(self._requests(reader, upstream)),
                asyncio.create_task(self._replies(replies, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the server is down: the connection of the client ends
        except asyncio.CancelledError:
            pass  # by `_end_all`, which waits for it
        finally:
            del self._open[writer]  # first, so that closing is not cancelled
            await _end(writer)
            if upstream is not None:
                await _end(upstream)

    async def _requests(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while sent := await reader.read(CHUNK):
            self.requests += 1
            if not isinstance(self._mode, DropRequests):
                server.write(sent)
                await server.drain()

    async def _replies(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while reply := await reader.read(CHUNK):
            match self._mode:
                case DropReplies() | CloseConnections():
                    continue
                case Delay(seconds):
                    await asyncio.sleep(seconds)
                case Truncate(after) if len(reply) > after:
                    client.write(reply[:after])
                    await client.drain()
                    return
                case OneByteAtATime() as drip:
                    reply = await self._drip(reply, drip, client)
                case Garbage(other):
                    reply = other
            client.write(reply)
            await client.drain()

    async def _drip(self, reply: bytes, mode: OneByteAtATime, client: asyncio.StreamWriter) -> bytes:
        """Send byte by byte while the mode stays the same. Return the rest."""
        at = 0
        while at < len(reply) and self._mode == mode:
            client.write(reply[at : at + 1])
            await client.drain()
            await asyncio.sleep(mode.seconds)
            at += 1
        return reply[at:]


async def _end(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.close()
        await writer.wait_closed()


@contextmanager
def unreachable_url() -> Iterator[str]:
    """Yield the URL of a port that neither accepts nor refuses connections, as a firewall that drops packets does."""
    waiting: list[socket.socket] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        try:
            while True:  # until the accept queue is full
                caller = socket.socket()
                waiting.append(caller)
                caller.settimeout(0.2)
                try:
                    caller.connect(listener.getsockname())
                except TimeoutError:
                    break
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        finally:
            for caller in waiting:
                caller.close()
