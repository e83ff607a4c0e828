"""The budget of buckets that a tenant may begin in a minute: one tenant must not fill the store for all others.

Beyond it the tenant's new subjects share one overflow bucket for each limit and lane. Redis counts in the script
(`lua/new_buckets.lua`), the memory store here.
"""

import threading
from collections.abc import Collection, Iterable, Sequence

from limitforge.core.algorithms.sliding_window_counter import Counter, SlidingWindowCounterSteps
from limitforge.core.algorithms.steps import UNLIMITED
from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.decide import opened
from limitforge.core.decision import OVERFLOWED, Row
from limitforge.core.keys import is_overflow, overflow_key, own_of
from limitforge.core.limits import Scope
from limitforge.stores.hints import Hints

MINUTE_US = 60_000_000
BUCKET_BYTES = 200  # what a bucket takes in Redis, with its key
MEMORY_SHARE = 20  # one tenant may begin buckets for a twentieth of Redis's memory in a minute
LEAST_BUDGET = 1_000
MAX_LANES = 65_536  # beyond that all are counted afresh

SHARED_ALREADY = (Scope.TENANT, Scope.GLOBAL)
"""Scopes whose buckets are few: they begin in any case."""


class NewBuckets:
    """The budget of one store. `overflowing` has the lanes that lately could begin no more."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = self._most = per_minute
        self.overflowing = Hints(clock)
        self.overflowed = 0
        self._lock = threading.Lock()

    def fit(self, memory_bytes: int) -> None:
        """Lower the budget to what begins a twentieth of the memory a minute. Without a limit, any number fits."""
        fitting = max(memory_bytes // (MEMORY_SHARE * BUCKET_BYTES), LEAST_BUDGET) if memory_bytes else self._most
        self.per_minute = min(self._most, fitting)

    def count_overflow(self) -> None:
        """Count a check that an overflow bucket decided."""
        with self._lock:
            self.overflowed += 1


class MemoryBudget:
    """Counts what begins in a memory store. Its store holds the lock."""

    def __init__(self, per_minute: int, since: int = 0) -> None:
        """It bounds nothing while the store has fewer than `since` buckets."""
        self.per_minute = per_minute
        self.overflowed = 0
        self._since = since
        self._steps = SlidingWindowCounterSteps(per_minute, MINUTE_US)
        self._lanes: dict[str, Counter] = {}

    def redirect(self, check: Check, states: Collection[str], now_us: int) -> list[int]:
        """Point takes that may begin no bucket at their overflow buckets; tells which."""
        redirected: list[int] = []
        keys: set[str] = set()
        begins = 0
        if len(states) < self._since:
            return redirected
        for at, (rule, key, *rest) in enumerate(check.takes):
            if key in states or rule.forced or rule.scope in SHARED_ALREADY:
                continue
            begins += 1
            shared = overflow_key(key, rule.overflow_suffix)
            if self._left(own_of(key), now_us) < begins and shared not in keys:  # two takes can't share one bucket
                begins -= 1
                check.takes[at] = (rule.without_offset(), shared, *rest)  # type: ignore[assignment]
                redirected.append(at)
                keys.add(shared)
        return redirected

    def begin(self, keys: Sequence[str], now_us: int) -> None:
        """Count buckets that were not there."""
        for key in keys:
            lane = own_of(key)
            if is_overflow(key):
                continue
            counter = self._opened(lane, now_us)
            self._steps.take(counter, 1, b"")
            self._steps.seal(counter)
            if lane not in self._lanes and len(self._lanes) >= MAX_LANES:
                self._lanes = {}
            self._lanes[lane] = counter

    def mark(self, rows: list[Row], redirected: Iterable[int]) -> None:
        """Say of these rows that an overflow bucket decided; an unlimited one needs none."""
        overflowed = [at for at in redirected if rows[at][0] != UNLIMITED]
        for at in overflowed:
            *told, is_open = rows[at]
            rows[at] = (*told, is_open + OVERFLOWED)  # type: ignore[assignment]
        self.overflowed += bool(overflowed)

    def _left(self, lane: str, now_us: int) -> int:
        counter = self._opened(lane, now_us)
        self._steps.seal(counter)
        return self.per_minute - counter.used

    def _opened(self, lane: str, now_us: int) -> Counter:
        counter: Counter = opened(self._lanes.get(lane), self._steps, now_us)
        return counter
