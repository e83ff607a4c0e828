"""Bounds how often keys that may be made up are looked up: by client, and by all clients together.

Only keys with the old public checksum come here. A key with a keyed checksum was issued, so it is looked up at once.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, IPv6Network
from typing import TypeVar

import msgspec

from limitforge.core.clock import LONG_AGO_US, Clock, MonotonicClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import CatalogUnavailable, TooManyUnknownKeys, UnknownKey

MAX_SOURCES = 10_000
MAX_AT_ONCE = 2_000  # keys of all sources that are being looked up or wait for it
MAX_AT_ONCE_PER_SOURCE = 250  # for a source with recent failures: a proxy may bring the keys of many clients
MAX_READS = 4  # at once, of the five that a node makes; sources with recent failures leave one of them to the others
MAX_COPIES = 50  # reads of copies at once
FAILURE_US = 300 * US_PER_SECOND  # how long a wrong key is held against its source
RESERVE = 0.5  # the part of the common budget, and of the places, that is kept for sources without recent failures
IPV6_PREFIX = 64  # one client has at least that many addresses

Found = TypeVar("Found")
WaitQueue = deque[asyncio.Future[None]]


class ClientBudget(msgspec.Struct):
    """How many wrong keys a source may still present. Outlives its look-ups."""

    level: float
    written_us: int
    failed_us: int = LONG_AGO_US


class ClientLookups(msgspec.Struct):
    """The look-ups of a source that are under way, or wait for a token of its budget."""

    total: int = 0
    running: int = 0
    queue: WaitQueue = msgspec.field(default_factory=deque)


class LookupLimiter:
    """Charges look-ups that find nothing to their source and to a common budget.

    A look-up takes a token of both budgets before it starts, and returns them unless it finds nothing. So right keys
    use nothing up. A look-up without a token waits while another one may return its own. Sources with a recent failure
    leave a part of the common budget untouched: they can't use up what a source without one needs.
    """

    def __init__(
        self,
        *,
        per_second: float = 2,
        burst: int = 5,
        all_per_second: float = 20,
        max_reads: int = MAX_READS,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._max_reads = max_reads
        self._per_us, self._burst = per_second / US_PER_SECOND, float(burst)
        self._all_per_us, self._all_burst = all_per_second / US_PER_SECOND, 2 * all_per_second
        self._all = ClientBudget(self._all_burst, self._clock.now_us())
        self._budgets: dict[str, ClientBudget] = {}
        self._active: dict[str, ClientLookups] = {}
        self._total = self._under_way = 0
        self._clean_queue: WaitQueue = deque()
        self._failed_queue: WaitQueue = deque()

    @classmethod
    def for_copies(cls, clock: Clock | None = None) -> "LookupLimiter":
        """For reads of copies in Redis. One takes 0.3 ms of the node's CPU, so 200 a second take 6 % of a core."""
        return cls(per_second=50, burst=100, all_per_second=200, max_reads=MAX_COPIES, clock=clock)

    async def run(self, client: str, read: Callable[[], Awaitable[Found]], *, seconds: float | None = None) -> Found:
        """Return what `read` finds for a key that `source` presented; `UnknownKey` from it is charged.

        Raises `TooManyUnknownKeys` if the source must wait, and `CatalogUnavailable` after `seconds` without a token.
        """
        client = network_of(client)
        active = self._enter(client)
        try:
            try:
                async with asyncio.timeout(seconds):
                    await self._take(client, active)
            except TimeoutError:
                raise CatalogUnavailable("too many keys wait to be looked up: the database is slow") from None
            is_wrong = False
            try:
                return await read()
            except UnknownKey:
                is_wrong = True
                raise
            finally:
                self._give_back(client, active, is_wrong=is_wrong)
        finally:
            self._leave(client, active)

    def _enter(self, source: str) -> ClientLookups:
        active = self._active.get(source) or ClientLookups()
        if self._has_failed(source, self._clock.now_us()):
            is_full = active.total >= MAX_AT_ONCE_PER_SOURCE or self._total >= MAX_AT_ONCE * RESERVE
        else:
            is_full = self._total >= MAX_AT_ONCE
        if is_full:
            raise TooManyUnknownKeys("too many keys wait to be looked up: wait before trying another one", 1_000)
        self._active[source] = active
        active.total += 1
        self._total += 1
        return active

    def _leave(self, source: str, active: ClientLookups) -> None:
        active.total -= 1
        self._total -= 1
        if not active.total:
            del self._active[source]

    async def _take(self, source: str, active: ClientLookups) -> None:
        """Take a token of both budgets; `_give_back` must follow."""
        line: WaitQueue | None = None
        while True:
            now_us = self._clock.now_us()
            has_failed = self._has_failed(source, now_us)
            own = self._level(self._budgets.get(source), self._burst, self._per_us, now_us)
            together = self._level(self._all, self._all_burst, self._all_per_us, now_us)
            needed = 1 + (RESERVE * self._all_burst if has_failed else 0)
            has_slot = self._under_way < self._max_reads - (1 if has_failed else 0)
            if own >= 1 and together >= needed and has_slot:
                self._write(source, own - 1, now_us)
                self._all = ClientBudget(together - 1, now_us)
                active.running += 1
                self._under_way += 1
                return
            before = line
            line = active.queue if own < 1 else self._failed_queue if has_failed else self._clean_queue
            is_vain = not (active.running if own < 1 else self._under_way)
            if before is not None and (is_vain or line is not before):
                self._wake(active, before)  # what ends the wait for this one may end it for the next
            if is_vain:
                short, rate = (1 - own, self._per_us) if own < 1 else (needed - together, self._all_per_us)
                wait_ms = max(int(short / rate / 1_000), 1)
                raise TooManyUnknownKeys("too many unknown keys: wait before trying another one", wait_ms)
            await self._turn(active, line, is_first=line is before)

    def _give_back(self, source: str, active: ClientLookups, *, is_wrong: bool) -> None:
        """End a look-up: a wrong key has used up its tokens; a right one, or a database that failed, has not."""
        now_us = self._clock.now_us()
        active.running -= 1
        self._under_way -= 1
        own = self._level(self._budgets.get(source), self._burst, self._per_us, now_us)
        if is_wrong:
            self._write(source, own, now_us)
            self._budgets[source].failed_us = now_us
        else:
            self._write(source, min(own + 1, self._burst), now_us)
            together = self._level(self._all, self._all_burst, self._all_per_us, now_us)
            self._all = ClientBudget(min(together + 1, self._all_burst), now_us)
        self._wake(active, active.queue)
        self._wake(active, self._clean_queue)

    async def _turn(self, active: ClientLookups, line: WaitQueue, *, is_first: bool) -> None:
        turn = asyncio.get_running_loop().create_future()
        if is_first:
            line.appendleft(turn)
        else:
            line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(ValueError):  # `_wake` may have dropped it just before
                    line.remove(turn)
            else:  # it was woken just before
                self._wake(active, line)
            raise

    def _wake(self, active: ClientLookups, line: WaitQueue) -> None:
        """Wake the next one of a line. Those that wait for the common budget are two lines, failed sources last."""
        for each in (line,) if line is active.queue else (self._clean_queue, self._failed_queue):
            while each:
                turn = each.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return

    def _has_failed(self, source: str, now_us: int) -> bool:
        budget = self._budgets.get(source)
        return budget is not None and now_us - budget.failed_us < FAILURE_US

    def _write(self, source: str, level: float, now_us: int) -> None:
        budget = self._budgets.pop(source, None) or ClientBudget(level, now_us)
        budget.level, budget.written_us = level, now_us
        self._budgets[source] = budget  # at the end: the first of them is the one that was quiet for longest
        if len(self._budgets) > MAX_SOURCES:
            del self._budgets[next(iter(self._budgets))]

    @staticmethod
    def _level(known: ClientBudget | None, burst: float, per_us: float, now_us: int) -> float:
        return burst if known is None else min(burst, known.level + (now_us - known.written_us) * per_us)


def network_of(client: str) -> str:
    """Return the /64 network of an IPv6 address, since one client has all of it; any other source as it is."""
    if ":" not in client:
        return client
    try:
        address = IPv6Address(client.partition("%")[0])
    except ValueError:
        return client
    if address.ipv4_mapped is not None:  # as a socket for both families names IPv4 clients
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), IPV6_PREFIX), strict=False))
