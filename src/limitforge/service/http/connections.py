"""Bound what all connections of a process hold together, and choose which of them to close.

`bounded_connection.py` bounds each connection by itself, but a client may open any number of them.
"""

import asyncio
import resource
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from limitforge.service.checks.body_sizes import SMALL_BODY_BYTES

MAX_CONNECTIONS = 2_000  # an idle one takes about 8 KiB
MAX_BUFFERED_BYTES = 10 * 1_048_576  # bytes of incomplete requests and unread responses
MAX_LOOKUP_BYTES = 4 * 1_048_576  # bytes of requests that wait for the look-up of their key; small ones are exempt
MIN_BUFFERED_BYTES = 65_536  # bytes that each owner may always hold

MAX_STARTS = 2  # requests that are passed to ASGI in one iteration of the event loop
OTHER_FILES = 256  # files that a process may have open besides its connections


class StartQueue:
    """Starts requests for ASGI in order, a few in each iteration of the event loop.

    libuv accepts one connection in each iteration. If all waiting connections started a request in every iteration, the
    n-th client to be accepted would wait for n such rounds.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._starts_left = MAX_STARTS

    def add(self, start: Callable[[], None]) -> None:
        """Call `start` now or in a later iteration."""
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
    """What the registry needs to know of a connection."""

    buffered_bytes: int
    """Bytes that evicting it would free: an incomplete request, and responses that the client has not read."""
    owner: bytes
    """The key fingerprint of the last check whose head was parsed if this process had the key in memory, else empty."""

    @property
    def is_answering(self) -> bool:
        """True while a complete request waits for its response."""

    @property
    def quiet_since(self) -> float:
        """The time since which the connection waits for the client."""

    def evict(self) -> None:
        """Free everything that the connection holds, and close it."""


class PendingLookup(Protocol):
    """A request whose key has to be looked up."""

    size: int
    awaits_lookup: bool


class ConnectionRegistry:
    """All connections of one listening socket in this process. Clients without a known key count as one owner."""

    def __init__(self, max_connections: int = MAX_CONNECTIONS, max_buffered_bytes: int = MAX_BUFFERED_BYTES) -> None:
        self.starts = StartQueue()
        self._max_connections = max_connections
        self._max_buffered_bytes = max_buffered_bytes
        self._open: set[TrackedConnection] = set()
        self._buffered_bytes = 0
        self._lookup_bytes = 0

    def add(self, connection: TrackedConnection) -> None:
        """Add a connection. If there are now too many, close idle ones, or this one if there are none."""
        self._open.add(connection)
        if len(self._open) > self._max_connections:
            self._close_idle(connection)

    def remove(self, connection: TrackedConnection) -> None:
        self._open.discard(connection)

    def set_buffered(self, connection: TrackedConnection, buffered_bytes: int) -> None:
        """Record how many bytes a connection holds. If the sum is too large, evict connections of the largest owner."""
        growth = buffered_bytes - connection.buffered_bytes
        connection.buffered_bytes = buffered_bytes
        self._buffered_bytes += growth
        if growth > 0 and self._buffered_bytes > self._max_buffered_bytes:
            self._shed_buffers()

    def admit_lookup(self, request: PendingLookup) -> bool:
        """Return whether a request may wait for the look-up of its key. If so, call `release_lookup` afterwards."""
        if request.size > SMALL_BODY_BYTES and self._lookup_bytes + request.size > MAX_LOOKUP_BYTES:
            return False
        request.awaits_lookup = True
        self._lookup_bytes += request.size
        return True

    def release_lookup(self, request: PendingLookup) -> None:
        """End the wait of an admitted request; ignore any other. Call it before the request's size is reset."""
        if request.awaits_lookup:
            request.awaits_lookup = False
            self._lookup_bytes -= request.size

    def _close_idle(self, newest: TrackedConnection) -> None:
        """Close some connections of the owner with most idle ones, the longest idle first."""
        idle = [connection for connection in self._open if not connection.is_answering and connection is not newest]
        idle_counts = Counter(connection.owner for connection in idle)
        idle.sort(key=lambda connection: (-idle_counts[connection.owner], connection.quiet_since))
        for connection in idle[: max(self._max_connections // 16, 1)] or [newest]:
            self._open.discard(connection)  # now, because the transport may take a moment to close
            connection.evict()

    def _shed_buffers(self) -> None:
        """Evict connections until a quarter of the bytes is free, those of the largest owner first.

        Bytes of clients without a known key count double. Owners that hold little are exempt.
        """
        holding = [connection for connection in self._open if connection.buffered_bytes]
        totals: Counter[bytes] = Counter()
        for connection in holding:
            totals[connection.owner] += connection.buffered_bytes if connection.owner else 2 * connection.buffered_bytes
        holding = [
            each
            for each in holding
            if totals[each.owner] > MIN_BUFFERED_BYTES and each.buffered_bytes > SMALL_BODY_BYTES
        ]
        holding.sort(key=lambda each: (-totals[each.owner], -each.buffered_bytes))
        for connection in holding:
            if self._buffered_bytes <= self._max_buffered_bytes * 3 // 4:
                return
            self._open.discard(connection)
            connection.evict()


def raise_file_limit(max_connections: int) -> int:
    """Raise this process's limit of open files for so many connections.

    Return how many connections it allows: fewer, if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    return max(soft - OTHER_FILES, soft // 2)
