"""Which buckets are asked for most: a sketch of bounded size, from a sample of the checks.

Keys are counted until there are too many of them; then the most frequent stay and the rest is forgotten. So a key with
more than one in `SIZE` of all questions is always found, and counted too low by at most that much. Two turns of ten
seconds are kept.
"""

from collections.abc import Callable
from operator import itemgetter

from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.stores.protocol import HotKey

CAPACITY = 128
PRUNE_ABOVE = 8 * CAPACITY  # sorting out pays for many new keys at once
SAMPLE_EVERY = 8  # every so many checks are looked at
WINDOW_US = 10_000_000
MAX_REPORTED = 10


class HotKeys:
    """Counts buckets. Several threads may use it: one that is in the other's way costs a count at most."""

    def __init__(self, clock: Clock) -> None:
        self._now_us: Callable[[], int] = clock.now_us
        self._window_start_us = self._previous_start_us = self._now_us()
        self._counts: dict[str, int] = {}
        self._previous: dict[str, int] = {}

    def record(self, check: Check) -> None:
        """Call it for one of `SAMPLED` checks."""
        if self._now_us() - self._window_start_us > WINDOW_US:
            self._rotate()
        counts = self._counts
        for _, key, *_ in check.debits:
            counts[key] = counts.get(key, 0) + 1
        if len(counts) > PRUNE_ABOVE:
            self._counts = dict(sorted(counts.copy().items(), key=itemgetter(1))[-CAPACITY:])

    def top(self) -> list[HotKey]:
        """The most frequent first."""
        now_us = self._now_us()
        if now_us - self._window_start_us > WINDOW_US:
            self._rotate()
        counts = dict(self._previous)
        for key, count in list(self._counts.items()):
            counts[key] = counts.get(key, 0) + count
        total, seconds = sum(counts.values()), max(now_us - self._previous_start_us, 1_000_000) / 1e6
        ranked = sorted(counts.items(), key=lambda item: -item[1])[:MAX_REPORTED]
        return [HotKey(key, SAMPLE_EVERY * count / seconds, count / total) for key, count in ranked]

    def _rotate(self) -> None:
        """What is older than two turns is forgotten."""
        now_us = self._now_us()
        is_old = now_us - self._window_start_us > 2 * WINDOW_US
        self._previous = {} if is_old else self._counts
        self._previous_start_us = now_us if is_old else self._window_start_us
        self._counts, self._window_start_us = {}, now_us
