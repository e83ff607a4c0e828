"""Bound what all connections of a process hold together, and choose which of them give way.

`protocol.py` bounds each connection by itself, but a client may open any number of them.
"""

import asyncio
import resource
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from limitforge.service.checks.invalid_bodies import SMALL_BODY

MAX_CONNECTIONS = 2_000  # an idle one costs about 8 KiB
MAX_BUFFERED = 10 * 1_048_576  # bytes of requests that are not whole yet, and of answers that were not read
MAX_LOOKUP_BYTES = (
    4 * 1_048_576
)  # bytes of requests that wait until their key is looked up; small ones are always taken
MIN_BUFFERED = 65_536  # bytes that an owner may always hold

MAX_STARTS = 2  # of requests for ASGI, in one iteration of the event loop
OTHER_FILES = 256  # that a process may have open besides


class StartQueue:
    """Starts requests for ASGI, a few in each iteration of the event loop, in the order in which they came.

    libuv accepts one connection in each iteration. So if every waiting connection started its next request in the same
    iteration, a new client would wait for all of them once for each client before it.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._starts_left = MAX_STARTS

    def add(self, start: Callable[[], None]) -> None:
        """Call it now or soon."""
        if self._starts_left == MAX_STARTS:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        if self._starts_left and not self._waiting:
            self._starts_left -= 1
            start()
        else:
            self._waiting.append(start)

    def _begin_iteration(self) -> None:
        self._starts_left = MAX_STARTS
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        while self._waiting and self._starts_left:
            self._starts_left -= 1
            self._waiting.popleft()()


class TrackedConnection(Protocol):
    """What has to be known of a connection to choose."""

    buffered: int
    """Bytes that it would let go of: input that is not a whole request yet, and answers that were not read."""
    owner: bytes
    """The fingerprint of the key that it presented last, if this process knows that key; else empty."""

    @property
    def is_answering(self) -> bool:
        """Whether a whole request waits for its answer."""

    @property
    def quiet_since(self) -> float:
        """When it last began to wait for the client."""

    def evict(self) -> None:
        """Let go of everything that it holds, and close."""


class PendingLookup(Protocol):
    """A request whose key has to be looked up."""

    size: int
    awaits_lookup: bool


class ConnectionRegistry:
    """All connections of one listening socket, in one process. Clients without a known key count as one owner."""

    def __init__(self, max_connections: int = MAX_CONNECTIONS, max_buffered: int = MAX_BUFFERED) -> None:
        self.starts = StartQueue()
        self._max_connections = max_connections
        self._max_buffered = max_buffered
        self._open: set[TrackedConnection] = set()
        self._buffered = 0
        self._lookup_bytes = 0

    def add(self, connection: TrackedConnection) -> None:
        """Close others if there are too many now; or this one, if all others are being answered."""
        self._open.add(connection)
        if len(self._open) > self._max_connections:
            self._close_idle(connection)

    def remove(self, connection: TrackedConnection) -> None:
        self._open.discard(connection)

    def set_buffered(self, connection: TrackedConnection, buffered: int) -> None:
        """Write down how many bytes a connection holds; if that is too much in all, the largest owner gives way."""
        more = buffered - connection.buffered
        connection.buffered = buffered
        self._buffered += more
        if more > 0 and self._buffered > self._max_buffered:
            self._shed_buffers()

    def admit_lookup(self, request: PendingLookup) -> bool:
        """Return whether a request whose key is not known may wait for the look-up. `release_unknown` must follow."""
        if request.size > SMALL_BODY and self._lookup_bytes + request.size > MAX_LOOKUP_BYTES:
            return False
        request.awaits_lookup = True
        self._lookup_bytes += request.size
        return True

    def release_lookup(self, request: PendingLookup) -> None:
        """Call it before its size is forgotten; of other requests nothing is released."""
        if request.awaits_lookup:
            request.awaits_lookup = False
            self._lookup_bytes -= request.size

    def _close_idle(self, newest: TrackedConnection) -> None:
        """Close those of the owner with most connections that are quiet for longest."""
        quiet = [each for each in self._open if not each.is_answering and each is not newest]
        numbers = Counter(each.owner for each in quiet)
        quiet.sort(key=lambda each: (-numbers[each.owner], each.quiet_since))
        for connection in quiet[: max(self._max_connections // 16, 1)] or [newest]:
            self._open.discard(connection)  # the transport may need a moment
            connection.evict()

    def _shed_buffers(self) -> None:
        """Begin with the owner that holds most. Clients without a known key count double; who holds little stays."""
        holding = [each for each in self._open if each.buffered]
        totals: Counter[bytes] = Counter()
        for each in holding:
            totals[each.owner] += each.buffered if each.owner else 2 * each.buffered
        holding = [each for each in holding if totals[each.owner] > MIN_BUFFERED and each.buffered > SMALL_BODY]
        holding.sort(key=lambda each: (-totals[each.owner], -each.buffered))
        for connection in holding:
            if self._buffered <= self._max_buffered * 3 // 4:
                return
            self._open.discard(connection)
            connection.evict()


def raise_file_limit(max_connections: int) -> int:
    """Allow this process the open files that so many connections need. Return how many it may have: fewer, if the
    system allows fewer files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    return max(soft - OTHER_FILES, soft // 2)
