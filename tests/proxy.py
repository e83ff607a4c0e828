"""A proxy on 127.0.0.1 between a client and its server that loses, delays, cuts and spoils what passes through it.

It runs on an event loop in a thread of its own; a test says what it does, at any time and from any thread:

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
    """As if it were not there."""


@dataclass(frozen=True, slots=True)
class DropRequests:
    """Connections stay open; what the client sends never arrives."""


@dataclass(frozen=True, slots=True)
class DropReplies:
    """Connections stay open; the server does what it is told, and its answers never arrive."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Every piece of a reply comes that much later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Truncate:
    """Of a reply that is longer, only the first bytes arrive; then the connection is closed."""

    after: int


@dataclass(frozen=True, slots=True)
class OneByteAtATime:
    """A reply comes byte by byte."""

    seconds: float  # between two bytes


@dataclass(frozen=True, slots=True)
class CloseConnections:
    """Every connection is accepted and closed at once; those that are open are closed too."""


@dataclass(frozen=True, slots=True)
class Garbage:
    """Each piece of a reply is replaced by something else."""

    reply: bytes = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


Mode = Forward | DropRequests | DropReplies | Delay | Truncate | OneByteAtATime | CloseConnections | Garbage


class Proxy:
    """Passes bytes to and from a server on 127.0.0.1, as its `mode` says. Listens from the start; close it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._mode: Mode = Forward()
        self.accepted = 0  # connections so far
        self.requests = 0  # pieces that clients have sent so far, whether they were passed on or not
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
        """In force once this returns, for all that is read from then on."""
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
        """How many clients are connected now."""
        return self._run(self._count())

    def close(self) -> None:
        """End all connections, and the thread."""
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
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # asyncio loses whom it is just accepting
            await asyncio.wait(others)
        self._server.close()
        await self._server.wait_closed()

    async def _end_all(self) -> None:
        serving = list(self._open.values())
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, from its connection to its end. It never fails: a lost connection is what this is for."""
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
            pass  # there is no server: the client's connection ends, as it would
        except asyncio.CancelledError:
            pass  # by `_end_all`, which waits for it
        finally:
            del self._open[writer]  # first: what closes is not to be cancelled
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
        """Byte by byte while the mode is that; returns what is left."""
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
    """The URL of a port where a connection is never made nor refused, as behind a firewall that drops packets."""
    waiting: list[socket.socket] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        try:
            while True:  # until the queue of those who wait to be accepted is full
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
