"""Limit how often keys that may be made up are looked up, for each client and for all clients together.

API keys pass through here only if they have the old public checksum: one with a keyed checksum was issued by us, so it
is looked up at once. Admin tokens with a keyed checksum are limited too once they are known to be revoked.
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

MAX_CLIENTS = 10_000
MAX_LOOKUPS = 2_000  # running and waiting, of all clients
MAX_LOOKUPS_PER_FAILED_CLIENT = 250  # more than one, since a proxy may send the keys of many users
MAX_LIMITED_READS = 4  # at once: fewer than BoundedReads allows; clients with recent failures may use three of them
MAX_COPIES = 50  # reads of copies at once
FAILURE_US = 300 * US_PER_SECOND  # how long an unknown key counts as a recent failure of its client
RESERVED_FRACTION = (
    0.5  # the part of the common budget, and of the lookups, that is kept for clients without recent failures
)
IPV6_PREFIX = 64  # one user usually has at least that many addresses

Found = TypeVar("Found")
WaitQueue = deque[asyncio.Future[None]]


class ClientBudget(msgspec.Struct):
    """A token bucket of failed lookups, as it was at `written_us`. It outlives the lookups of the client."""

    level: float
    written_us: int
    failed_us: int = LONG_AGO_US


class ClientLookups(msgspec.Struct):
    """The lookups of one client: the number of all, of the running ones, and those that wait for a token."""

    total: int = 0
    running: int = 0
    queue: WaitQueue = msgspec.field(default_factory=deque)


class LookupLimiter:
    """Charges failed lookups to their client and to a common budget.

    A lookup takes a token from both budgets before it starts, and returns them unless the key is unknown. So valid keys
    use no tokens. Without a token, a lookup waits while another one is running that may return its own. Clients with a
    recent failure can't use the whole common budget: a part is reserved for the others.
    """

    def __init__(
        self,
        *,
        per_second: float = 2,
        burst: int = 5,
        all_per_second: float = 20,
        max_reads: int = MAX_LIMITED_READS,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._max_reads = max_reads
        self._per_us, self._burst = per_second / US_PER_SECOND, float(burst)
        self._all_per_us, self._all_burst = all_per_second / US_PER_SECOND, 2 * all_per_second
        self._common_budget = ClientBudget(self._all_burst, self._clock.now_us())
        self._budgets: dict[str, ClientBudget] = {}
        self._active: dict[str, ClientLookups] = {}
        self._total = self._running = 0
        self._queue_without_failures: WaitQueue = (
            deque()
        )  # waiting for the common budget: clients without recent failures
        self._queue_with_failures: WaitQueue = deque()  # the same for clients with recent failures

    @classmethod
    def for_copies(cls, clock: Clock | None = None) -> "LookupLimiter":
        """Return a limiter for reads of copies: one takes 0.3 ms of CPU, so 200 a second take 6 % of a core."""
        return cls(per_second=50, burst=100, all_per_second=200, max_reads=MAX_COPIES, clock=clock)

    async def run(self, client: str, read: Callable[[], Awaitable[Found]], *, seconds: float | None = None) -> Found:
        """Return the result of `read`. If it raises `UnknownKey`, `client` is charged.

        Raises `TooManyUnknownKeys` if the client must wait, and `CatalogUnavailable` after `seconds` without a token.
        """
        client = network_of(client)
        active = self._register(client)
        try:
            try:
                async with asyncio.timeout(seconds):
                    await self._take_tokens(client, active)
            except TimeoutError:
                raise CatalogUnavailable("too many keys wait to be looked up: the database is slow") from None
            is_unknown = False
            try:
                return await read()
            except UnknownKey:
                is_unknown = True
                raise
            finally:
                self._finish(client, active, is_unknown=is_unknown)
        finally:
            self._unregister(client, active)

    def _register(self, client: str) -> ClientLookups:
        active = self._active.get(client) or ClientLookups()
        if self._has_failed(client, self._clock.now_us()):
            is_full = active.total >= MAX_LOOKUPS_PER_FAILED_CLIENT or self._total >= MAX_LOOKUPS * RESERVED_FRACTION
        else:
            is_full = self._total >= MAX_LOOKUPS
        if is_full:
            raise TooManyUnknownKeys("too many keys wait to be looked up: wait before trying another one", 1_000)
        self._active[client] = active
        active.total += 1
        self._total += 1
        return active

    def _unregister(self, client: str, active: ClientLookups) -> None:
        active.total -= 1
        self._total -= 1
        if not active.total:
            del self._active[client]

    async def _take_tokens(self, client: str, active: ClientLookups) -> None:
        """Take a token from both budgets, and a slot. `_finish` must follow."""
        queue: WaitQueue | None = None
        while True:
            now_us = self._clock.now_us()
            has_failed = self._has_failed(client, now_us)
            own = self._level(self._budgets.get(client), self._burst, self._per_us, now_us)
            common = self._level(self._common_budget, self._all_burst, self._all_per_us, now_us)
            needed = 1 + (RESERVED_FRACTION * self._all_burst if has_failed else 0)
            has_slot = self._running < self._max_reads - (1 if has_failed else 0)
            if own >= 1 and common >= needed and has_slot:
                self._store_budget(client, own - 1, now_us)
                self._common_budget = ClientBudget(common - 1, now_us)
                active.running += 1
                self._running += 1
                return
            previous = queue
            queue = (
                active.queue if own < 1 else self._queue_with_failures if has_failed else self._queue_without_failures
            )
            # Only a running lookup can return a token or a slot.
            is_hopeless = not (active.running if own < 1 else self._running)
            if previous is not None and (is_hopeless or queue is not previous):
                self._wake_next(active, previous)  # this one leaves the queue, so let the next one try
            if is_hopeless:
                missing, rate = (1 - own, self._per_us) if own < 1 else (needed - common, self._all_per_us)
                wait_ms = max(int(missing / rate / 1_000), 1)
                raise TooManyUnknownKeys("too many unknown keys: wait before trying another one", wait_ms)
            await self._wait(active, queue, at_front=queue is previous)

    def _finish(self, client: str, active: ClientLookups, *, is_unknown: bool) -> None:
        """End a lookup. Return its tokens unless the key is unknown: it may be valid, or the database has failed."""
        now_us = self._clock.now_us()
        active.running -= 1
        self._running -= 1
        own = self._level(self._budgets.get(client), self._burst, self._per_us, now_us)
        if is_unknown:
            self._store_budget(client, own, now_us)
            self._budgets[client].failed_us = now_us
        else:
            self._store_budget(client, min(own + 1, self._burst), now_us)
            common = self._level(self._common_budget, self._all_burst, self._all_per_us, now_us)
            self._common_budget = ClientBudget(min(common + 1, self._all_burst), now_us)
        self._wake_next(active, active.queue)
        self._wake_next(active, self._queue_without_failures)

    async def _wait(self, active: ClientLookups, queue: WaitQueue, *, at_front: bool) -> None:
        """Wait in a queue until `_wake_next`. One that was woken but got no token goes to the front (`is_first`)."""
        turn = asyncio.get_running_loop().create_future()
        if at_front:
            queue.appendleft(turn)
        else:
            queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with contextlib.suppress(ValueError):  # `_wake_next` may have removed it just before
                    queue.remove(turn)
            else:  # it was woken just before
                self._wake_next(active, queue)
            raise

    def _wake_next(self, active: ClientLookups, queue: WaitQueue) -> None:
        """Wake the next lookup of a queue. The queues for the common budget count as one, failed clients last."""
        for each in (queue,) if queue is active.queue else (self._queue_without_failures, self._queue_with_failures):
            while each:
                turn = each.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return

    def _has_failed(self, client: str, now_us: int) -> bool:
        budget = self._budgets.get(client)
        return budget is not None and now_us - budget.failed_us < FAILURE_US

    def _store_budget(self, client: str, level: float, now_us: int) -> None:
        budget = self._budgets.pop(client, None) or ClientBudget(level, now_us)
        budget.level, budget.written_us = level, now_us
        self._budgets[client] = budget  # at the end, so that the least recently used budget stays at the front
        if len(self._budgets) > MAX_CLIENTS:
            del self._budgets[next(iter(self._budgets))]

    @staticmethod
    def _level(budget: ClientBudget | None, burst: float, per_us: float, now_us: int) -> float:
        return burst if budget is None else min(burst, budget.level + (now_us - budget.written_us) * per_us)


def network_of(client: str) -> str:
    """Return the /64 network of an IPv6 address, since one client has all of it; any other address as it is."""
    if ":" not in client:
        return client
    try:
        address = IPv6Address(client.partition("%")[0])
    except ValueError:
        return client
    if address.ipv4_mapped is not None:  # a dual-stack socket reports IPv4 clients like this
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), IPV6_PREFIX), strict=False))
