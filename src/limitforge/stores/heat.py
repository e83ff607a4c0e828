"""Which buckets are asked for most: a sketch of bounded size, from a sample of the checks.

Keys are counted until there are too many of them; then the most frequent stay and the rest is forgotten. So a key with
more than one in `SIZE` of all questions is always found, and counted too low by at most that much. Two turns of ten
seconds are kept.
"""

from collections.abc import Callable
from operator import itemgetter

import msgspec

from limitforge.core.check import Check
from limitforge.core.clock import Clock

SIZE = 128
ROOM = 8 * SIZE  # sorting out pays for many new keys at once
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
        self._began_us = self._before_us = self._now_us()
        self._counts: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def note(self, check: Check) -> None:
        """Call it for one of `SAMPLED` checks."""
        if self._now_us() - self._began_us > TURN_US:
            self._turn()
        counts = self._counts
        for _, key, *_ in check.takes:
            counts[key] = counts.get(key, 0) + 1
        if len(counts) > ROOM:
            self._counts = dict(sorted(counts.copy().items(), key=itemgetter(1))[-SIZE:])

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
