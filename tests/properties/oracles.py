"""The algorithms again, as simply as possible: computed from what was taken and when, with exact fractions."""

import hashlib
from abc import ABC, abstractmethod
from calendar import monthrange
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

from limitforge import (
    Concurrency,
    FixedWindow,
    LeakyBucket,
    Limit,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    TokenBucket,
)
from limitforge.core.calendar import Period
from limitforge.core.limits import Align


class Oracle(ABC):
    """A simple model of an algorithm: it records what is taken and computes what is in use."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.size = limit.size or 0

    @abstractmethod
    def used(self, now_us: int) -> Fraction | int: ...

    @abstractmethod
    def take(self, now_us: int, cost: Fraction | int) -> None: ...

    def check(self, now_us: int, cost: int) -> bool:
        """Take a cost if it fits; return whether it did. A denial counts if the limit says so, up to twice its size."""
        used = self.used(now_us)
        if cost == 0 or used + cost <= self.size:
            self.take(now_us, cost)
            return True
        if self.limit.count_denied and used < 2 * self.size:
            self.take(now_us, min(cost, self.size, 2 * self.size - used))
        return False


class BucketOracle(Oracle):
    """The level of a leaky bucket, or what a token bucket lacks: it falls at a constant rate down to 0."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        assert isinstance(limit, TokenBucket | LeakyBucket)
        rate = limit.refill_rate_per_sec if isinstance(limit, TokenBucket) else limit.leak_rate_per_sec
        self.per_us = exact_rate(rate) / 10**6
        self.level = Fraction(0)
        self.last_us = 0

    def used(self, now_us: int) -> Fraction:
        return max(self.level - self.per_us * (now_us - self.last_us), Fraction(0))

    def take(self, now_us: int, cost: Fraction | int) -> None:
        self.level, self.last_us = self.used(now_us) + cost, now_us


class FixedWindowOracle(Oracle):
    """A count for each window."""

    def __init__(self, limit: FixedWindow | Quota, key: str) -> None:
        super().__init__(limit)
        self.counts: dict[object, Fraction | int] = {}
        self.window = _quota_window(limit) if isinstance(limit, Quota) else _clock_window(limit, key)

    def used(self, now_us: int) -> Fraction | int:
        return self.counts.get(self.window(now_us), 0)

    def take(self, now_us: int, cost: Fraction | int) -> None:
        self.counts[self.window(now_us)] = self.used(now_us) + cost


class FirstHitWindowOracle(Oracle):
    """A count in a window that begins with the first cost taken."""

    def __init__(self, limit: FixedWindow) -> None:
        super().__init__(limit)
        self.window_us: int = window_us(limit)
        self.ends_us = 0
        self.count: Fraction | int = 0

    def used(self, now_us: int) -> Fraction | int:
        return self.count if now_us < self.ends_us else 0

    def take(self, now_us: int, cost: Fraction | int) -> None:
        if cost and now_us >= self.ends_us:
            self.ends_us, self.count = now_us + self.window_us, 0
        self.count += cost


class SlidingLogOracle(Oracle):
    """Every cost counts until it is one window old."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.window_us = window_us(limit)
        self.taken: list[tuple[int, Fraction | int]] = []

    def used(self, now_us: int) -> Fraction | int:
        return sum(cost for at_us, cost in self.taken if at_us + self.window_us > now_us)

    def take(self, now_us: int, cost: Fraction | int) -> None:
        self.taken.append((now_us, cost))


class SlidingCounterOracle(Oracle):
    """The counts of this window and the one before, whose weight falls linearly."""

    def __init__(self, limit: SlidingWindowCounter) -> None:
        super().__init__(limit)
        self.window_us = window_us(limit)
        self.counts: dict[int, Fraction | int] = {}

    def used(self, now_us: int) -> Fraction | int:
        window, elapsed = divmod(now_us, self.window_us)
        fading = Fraction(self.window_us - elapsed, self.window_us) * self.counts.get(window - 1, 0)
        return fading.__floor__() + self.counts.get(window, 0)

    def take(self, now_us: int, cost: Fraction | int) -> None:
        window = now_us // self.window_us
        self.counts[window] = self.counts.get(window, 0) + cost


def build_oracle(limit: Limit, key: str) -> Oracle:
    """`key` is that of the bucket without its prefix: it spreads a window."""
    if isinstance(limit, SlidingWindowCounter):
        return SlidingCounterOracle(limit)
    if isinstance(limit, SlidingWindow | Concurrency):
        return SlidingLogOracle(limit)
    if isinstance(limit, FixedWindow) and limit.align is Align.FIRST_HIT:
        return FirstHitWindowOracle(limit)
    if isinstance(limit, FixedWindow | Quota):
        return FixedWindowOracle(limit, key)
    return BucketOracle(limit)


def exact_rate(per_second: object) -> Fraction:
    """The rate that a number means: its decimals if there are at most six, else the nearest fraction of 10,000."""
    exact = Fraction(str(per_second))
    return exact if (10**6 * exact).denominator == 1 else Fraction(per_second).limit_denominator(10_000)  # type: ignore[call-overload]


def window_us(limit: Limit) -> int:
    """The window, or the TTL of a lease, read from its seconds."""
    assert isinstance(limit, FixedWindow | SlidingWindow | SlidingWindowCounter | Concurrency)
    seconds = limit.lease_ttl_seconds if isinstance(limit, Concurrency) else limit.window_seconds
    return int(Fraction(str(seconds)) * 10**6)


def _clock_window(limit: FixedWindow, key: str) -> Any:
    hashed = hashlib.sha1(key.encode(), usedforsecurity=False).digest()
    offset = int.from_bytes(hashed[:6], "big") if limit.spread else 0
    return lambda now_us: (now_us + offset) // window_us(limit)


def _quota_window(limit: Quota) -> Any:
    tz = ZoneInfo(limit.time_zone)
    return lambda now_us: period_of(local_date(now_us, tz), Period(limit.period), int(limit.anchor_day))


def local_date(now_us: int, tz: ZoneInfo) -> date:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=now_us)).astimezone(tz).date()


def period_of(day: date, period: Period, anchor_day: int) -> int:
    """A number for the period that holds a day; later periods have larger ones."""
    match period:
        case Period.DAY:
            return day.toordinal()
        case Period.WEEK:
            return (day.toordinal() - 1) // 7  # the first day of all was a Monday
        case Period.MONTH:
            begun = day.day >= min(anchor_day, monthrange(day.year, day.month)[1])
            return day.year * 12 + day.month - (0 if begun else 1)
        case _:
            return day.year - (0 if day >= date(day.year, 1, anchor_day) else 1)
