"""Bound how many buckets a tenant may create in a minute on Redis, so that one tenant can't fill it for all others.

The script counts new buckets (`lua/new_buckets.lua`). Above the budget, the tenant's new subjects
share one overflow bucket for each limit and lane.
"""

import threading

from limitforge.core.clock import Clock
from limitforge.stores.redis.key_hints import KeyHints

BYTES_PER_BUCKET = 200  # memory of one bucket in Redis, including its key
MEMORY_DIVISOR = 20  # buckets that one tenant creates in a minute may use 1/20 of the memory of Redis
MIN_BUDGET = 1_000


class NewBucketBudget:
    """The budget of one store. `exhausted_counters` holds the counters of the lanes that used it up lately."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = self._configured = per_minute
        self.exhausted_counters = KeyHints(clock)
        self.overflowed = 0
        self._lock = threading.Lock()

    def cap_by_memory(self, memory_bytes: int) -> None:
        """Lower the budget to 1/20 of the memory in a minute. 0 means that Redis has no memory limit."""
        affordable = max(memory_bytes // (MEMORY_DIVISOR * BYTES_PER_BUCKET), MIN_BUDGET)
        self.per_minute = min(self._configured, affordable) if memory_bytes else self._configured

    def count_overflow(self) -> None:
        """Count a check that an overflow bucket decided."""
        with self._lock:
            self.overflowed += 1
