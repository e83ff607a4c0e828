"""Bound how many buckets a tenant may create in a minute in a memory store, so that one tenant can't fill it.

Above the budget, the tenant's new subjects share one overflow bucket for each limit and lane. `lua/new_buckets.lua`
does the same on Redis.
"""

from collections.abc import Collection, Iterable, Sequence

from limitforge.core.algorithms.base import UNLIMITED
from limitforge.core.algorithms.sliding_window_counter import Counter, SlidingWindowCounterAlgorithm
from limitforge.core.check import Check
from limitforge.core.decision import OVERFLOWED, LimitRow
from limitforge.core.evaluate import open_state
from limitforge.core.keys import is_overflow, lane_prefix_of, overflow_key
from limitforge.core.limits import UNBUDGETED_SCOPES

MINUTE_US = 60_000_000
MAX_LANE_COUNTERS = 65_536  # with more, the counters of all lanes restart


class InProcessBucketBudget:
    """Counts the buckets that are created in a memory store. The store holds the lock."""

    def __init__(self, per_minute: int, enforced_from: int = 0) -> None:
        """While the store has fewer than `enforced_from` buckets, the budget is not enforced."""
        self.per_minute = per_minute
        self.overflowed = 0
        self._enforced_from = enforced_from
        self._algorithm = SlidingWindowCounterAlgorithm(per_minute, MINUTE_US)
        self._counters: dict[str, Counter] = {}  # by lane prefix

    def use_overflow_buckets(self, check: Check, states: Collection[str], now_us: int) -> list[int]:
        """Point the debits that may not create a bucket at their overflow buckets; return their positions."""
        overflowed: list[int] = []
        keys: set[str] = set()
        begins = 0
        if len(states) < self._enforced_from:
            return overflowed
        for index, (rule, key, *rest) in enumerate(check.debits):
            if key in states or rule.forced or rule.scope in UNBUDGETED_SCOPES:
                continue
            begins += 1
            shared = overflow_key(key, rule.overflow_suffix)
            lane_is_full = self._remaining(lane_prefix_of(key), now_us) < begins
            if lane_is_full and shared not in keys:  # two debits of a check can't share one bucket
                begins -= 1
                check.debits[index] = (rule.for_overflow_bucket(), shared, *rest)  # type: ignore[assignment]
                overflowed.append(index)
                keys.add(shared)
        return overflowed

    def count_new(self, keys: Sequence[str], now_us: int) -> None:
        """Count buckets that were just created."""
        for key in keys:
            lane = lane_prefix_of(key)
            if is_overflow(key):
                continue
            counter = self._open_counter(lane, now_us)
            self._algorithm.take(counter, 1, b"")
            self._algorithm.seal(counter)
            if lane not in self._counters and len(self._counters) >= MAX_LANE_COUNTERS:
                self._counters = {}
            self._counters[lane] = counter

    def mark_overflowed(self, rows: list[LimitRow], overflowed: Iterable[int]) -> None:
        """Mark the rows that an overflow bucket decided. An unlimited row needs no bucket."""
        marked = [index for index in overflowed if rows[index][0] != UNLIMITED]
        for index in marked:
            *values, flags = rows[index]
            rows[index] = (*values, flags | OVERFLOWED)  # type: ignore[assignment]
        self.overflowed += bool(marked)

    def _remaining(self, lane: str, now_us: int) -> int:
        counter = self._open_counter(lane, now_us)
        self._algorithm.seal(counter)
        return self.per_minute - counter.used

    def _open_counter(self, lane: str, now_us: int) -> Counter:
        counter: Counter = open_state(self._counters.get(lane), self._algorithm, now_us)
        return counter
