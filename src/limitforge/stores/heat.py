"""Which buckets are asked for most: a sketch of bounded size, from a sample of the checks.

Space-Saving (Metwally, Agrawal, El Abbadi, 2005) over two turns of ten seconds: a key that has more than one in `SIZE`
of all questions is always found, and counted too high by at most that much.
"""

from collections.abc import Callable

import msgspec

from limitforge.core.check import Check
from limitforge.core.clock import Clock

SIZE = 128
SAMPLED = 8  # every so many checks are looked at
TURN_US = 10_000_000
REPORTED = 10


class HotKey(msgspec.Struct, frozen=True):
    """A bucket, how often it was asked for lately, and which part of all questions that was."""

    key: str
    per_second: float
    share: float


class Heat:
    """Counts buckets. Several threads may use it: one that is in the other's way costs a count at most."""

    def __init__(self, clock: Clock) -> None:
        self._now_us: Callable[[], int] = clock.now_us
        self._seen = 0
        self._began_us = self._before_us = self._now_us()
        self._counts: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def note(self, check: Check) -> None:
        self._seen += 1
        if self._seen % SAMPLED:
            return
        if self._now_us() - self._began_us > TURN_US:
            self._turn()
        counts = self._counts
        for _, key, *_ in check.takes:
            known = counts.get(key)
            if known is not None:
                counts[key] = known + 1
            elif len(counts) < SIZE:
                counts[key] = 1
            else:
                rarest = min(counts, key=counts.__getitem__)
                counts[key] = counts.pop(rarest, 0) + 1

    def hottest(self) -> list[HotKey]:
        """The most frequent first."""
        now_us = self._now_us()
        if now_us - self._began_us > TURN_US:
            self._turn()
        counts = dict(self._before)
        for key, count in list(self._counts.items()):
            counts[key] = counts.get(key, 0) + count
        total, seconds = sum(counts.values()), max(now_us - self._before_us, 1_000_000) / 1e6
        ranked = sorted(counts.items(), key=lambda item: -item[1])[:REPORTED]
        return [HotKey(key, SAMPLED * count / seconds, count / total) for key, count in ranked]

    def _turn(self) -> None:
        """What is older than two turns is forgotten."""
        now_us = self._now_us()
        is_old = now_us - self._began_us > 2 * TURN_US
        self._before = {} if is_old else self._counts
        self._before_us = now_us if is_old else self._began_us
        self._counts, self._began_us = {}, now_us
