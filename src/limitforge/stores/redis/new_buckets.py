"""The budget of buckets that a tenant may begin in a minute: one tenant must not fill the store for all others.

Beyond it the tenant's new subjects share one overflow bucket for each limit and lane. Redis counts in the script
(`lua/new_buckets.lua`), the memory store here.
"""

import threading
from collections.abc import Collection, Iterable, Sequence

from limitforge.core.algorithms.base import UNLIMITED
from limitforge.core.algorithms.sliding_window_counter import Counter, SlidingWindowCounterAlgorithm
from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.decision import OVERFLOWED, LimitRow
from limitforge.core.evaluate import open_state
from limitforge.core.keys import is_overflow, lane_prefix_of, overflow_key
from limitforge.core.limits import Scope
from limitforge.stores.redis.key_hints import KeyHints

MINUTE_US = 60_000_000
BYTES_PER_BUCKET = 200  # what a bucket takes in Redis, with its key
MEMORY_DIVISOR = 20  # one tenant may begin buckets for a twentieth of Redis's memory in a minute
MIN_BUDGET = 1_000
MAX_LANES = 65_536  # beyond that all are counted afresh

EXEMPT_SCOPES = (Scope.TENANT, Scope.GLOBAL)
"""Scopes whose buckets are few: they begin in any case."""


class NewBucketBudget:
    """The budget of one store. `overflowing` has the lanes that lately could begin no more."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = self._configured = per_minute
        self.exhausted_lanes = KeyHints(clock)
        self.overflowed = 0
        self._lock = threading.Lock()

    def cap_by_memory(self, memory_bytes: int) -> None:
        """Lower the budget to what begins a twentieth of the memory a minute. Without a limit, any number fits."""
        fitting = (
            max(memory_bytes // (MEMORY_DIVISOR * BYTES_PER_BUCKET), MIN_BUDGET) if memory_bytes else self._configured
        )
        self.per_minute = min(self._configured, fitting)

    def count_overflow(self) -> None:
        """Count a check that an overflow bucket decided."""
        with self._lock:
            self.overflowed += 1


class InProcessBucketBudget:
    """Counts what begins in a memory store. Its store holds the lock."""

    def __init__(self, per_minute: int, enforced_from: int = 0) -> None:
        """It bounds nothing while the store has fewer than `since` buckets."""
        self.per_minute = per_minute
        self.overflowed = 0
        self._enforced_from = enforced_from
        self._steps = SlidingWindowCounterAlgorithm(per_minute, MINUTE_US)
        self._counters: dict[str, Counter] = {}

    def redirect(self, check: Check, states: Collection[str], now_us: int) -> list[int]:
        """Point takes that may begin no bucket at their overflow buckets; tells which."""
        redirected: list[int] = []
        keys: set[str] = set()
        begins = 0
        if len(states) < self._enforced_from:
            return redirected
        for at, (rule, key, *rest) in enumerate(check.debits):
            if key in states or rule.forced or rule.scope in EXEMPT_SCOPES:
                continue
            begins += 1
            shared = overflow_key(key, rule.overflow_suffix)
            if (
                self._left(lane_prefix_of(key), now_us) < begins and shared not in keys
            ):  # two takes can't share one bucket
                begins -= 1
                check.debits[at] = (rule.without_offset(), shared, *rest)  # type: ignore[assignment]
                redirected.append(at)
                keys.add(shared)
        return redirected

    def count_new(self, keys: Sequence[str], now_us: int) -> None:
        """Count buckets that were not there."""
        for key in keys:
            lane = lane_prefix_of(key)
            if is_overflow(key):
                continue
            counter = self._open_counter(lane, now_us)
            self._steps.take(counter, 1, b"")
            self._steps.seal(counter)
            if lane not in self._counters and len(self._counters) >= MAX_LANES:
                self._counters = {}
            self._counters[lane] = counter

    def mark_overflowed(self, rows: list[LimitRow], redirected: Iterable[int]) -> None:
        """Say of these rows that an overflow bucket decided; an unlimited one needs none."""
        overflowed = [at for at in redirected if rows[at][0] != UNLIMITED]
        for at in overflowed:
            *told, is_open = rows[at]
            rows[at] = (*told, is_open + OVERFLOWED)  # type: ignore[assignment]
        self.overflowed += bool(overflowed)

    def _left(self, lane: str, now_us: int) -> int:
        counter = self._open_counter(lane, now_us)
        self._steps.seal(counter)
        return self.per_minute - counter.used

    def _open_counter(self, lane: str, now_us: int) -> Counter:
        counter: Counter = open_state(self._counters.get(lane), self._steps, now_us)
        return counter
