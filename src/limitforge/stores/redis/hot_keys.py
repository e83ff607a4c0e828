"""Find the buckets that are checked most often, from a sample of the checks and in bounded memory."""

from collections.abc import Callable

from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.heavy_hitters import HeavyHitters
from limitforge.stores.protocol import HotKey

CAPACITY = 1_024
SAMPLE_EVERY = 8
WINDOW_US = 10_000_000
MAX_REPORTED = 10
_GROUP = ""  # all keys compete with each other: a tenant has no share of its own


class Window:
    """The debits since a point in time."""

    __slots__ = ("keys", "start_us", "total")

    def __init__(self, start_us: int) -> None:
        self.start_us = start_us
        self.keys: HeavyHitters[str] = HeavyHitters(CAPACITY)
        self.total = 0


class HotKeys:
    """Counts the debits of each bucket in two windows of ten seconds.

    A bucket with more than one in 512 of the sampled debits is always found. Threads may share an instance without a
    lock: they may lose counts, which only makes the estimate lower.
    """

    def __init__(self, clock: Clock) -> None:
        self._now_us: Callable[[], int] = clock.now_us
        self._current = self._previous = Window(self._now_us())

    def record(self, check: Check) -> None:
        """Count the debits of a check. Call it for one in `SAMPLE_EVERY` checks."""
        now_us = self._now_us()
        if now_us - self._current.start_us > WINDOW_US:
            self._rotate(now_us)
        window = self._current
        window.total += len(check.debits)
        for _, key, *_ in check.debits:
            window.keys.add(_GROUP, key, 1, now_us)

    def top(self) -> list[HotKey]:
        """Return the most frequent keys of the last ten to twenty seconds, most frequent first."""
        now_us = self._now_us()
        if now_us - self._current.start_us > WINDOW_US:
            self._rotate(now_us)
        windows = [self._current] if self._previous is self._current else [self._previous, self._current]
        counts: dict[str, int] = {}
        for window in windows:
            for _, key, hits in window.keys.top(CAPACITY):
                counts[key] = counts.get(key, 0) + hits.count
        total = sum(window.total for window in windows)
        seconds = max(now_us - self._previous.start_us, 1_000_000) / 1e6
        ranked = sorted(counts.items(), key=lambda item: -item[1])[:MAX_REPORTED]
        return [HotKey(key, SAMPLE_EVERY * count / seconds, count / total) for key, count in ranked]

    def _rotate(self, now_us: int) -> None:
        """Start a window. The one before it is kept unless it ended more than a window ago."""
        is_stale = now_us - self._current.start_us > 2 * WINDOW_US
        current = Window(now_us)
        self._previous = current if is_stale else self._current
        self._current = current
