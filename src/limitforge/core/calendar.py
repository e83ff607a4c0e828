"""Compute when the windows of a calendar quota begin, in a time zone and across daylight-saving changes."""

import hashlib
from calendar import monthrange
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import InvalidLimit

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Period(StrEnum):
    """The period of a quota. Weeks start on Monday."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    YEAR = "year"


@dataclass(frozen=True, slots=True)
class Calendar:
    """A period in a time zone. Months begin on `anchor_day`, and years on that day of January."""

    period: Period
    time_zone: str
    anchor_day: int

    @property
    def calendar_hash(self) -> int:
        """48 bits that identify this calendar. The count of a bucket starts afresh under another calendar."""
        text = f"{self.period} {self.anchor_day} {self.time_zone}"
        return int.from_bytes(hashlib.sha1(text.encode(), usedforsecurity=False).digest()[:6], "big")

    def windows_around(self, now_us: int) -> tuple[int, int, int, int]:
        """Return three consecutive windows as four instants. The middle window contains `now_us`."""
        return _around(self, now_us // US_PER_SECOND // 3_600, now_us)


@lru_cache(maxsize=4_096)
def zone(name: str) -> ZoneInfo:
    """Return the zone of an IANA name. Raise `InvalidLimit` if it is unknown."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidLimit(
            "time_zone",
            f"unknown time zone: {name[:64]!r}. Use an IANA name such as 'Europe/Berlin'; "
            "if the machine has no time zones, pip install tzdata",
        ) from None


def zone_exists(name: str) -> bool:
    try:
        zone(name)
    except InvalidLimit:
        return False
    return True


def _around(calendar: Calendar, hour: int, now_us: int) -> tuple[int, int, int, int]:
    windows = _windows_of_hour(calendar, hour)
    following = next(index for index, start in enumerate(windows) if start > now_us)
    return windows[following - 2], windows[following - 1], windows[following], windows[following + 1]


@lru_cache(maxsize=4_096)
def _windows_of_hour(calendar: Calendar, hour: int) -> list[int]:
    """Return the window starts around this hour. Cached, since every check of a quota needs them."""
    tz = zone(calendar.time_zone)
    today = datetime.fromtimestamp(hour * 3_600, tz).date()
    starts: list[int] = []
    for day in _days_around(calendar, today):
        instant = _first_instant(day, tz)
        if not starts or instant > starts[-1]:  # a day that the zone skipped has no window
            starts.append(instant)
    return starts


def _days_around(calendar: Calendar, today: date) -> Iterator[date]:
    """Yield the days on which periods begin, from three periods before `today` to four after."""
    for step in range(-3, 5):
        match calendar.period:
            case Period.DAY:
                yield today + timedelta(days=step)
            case Period.WEEK:
                yield today - timedelta(days=today.weekday()) + timedelta(weeks=step)
            case Period.MONTH:
                months = today.year * 12 + today.month - 1 + step
                yield _clamped(months // 12, months % 12 + 1, calendar.anchor_day)
            case Period.YEAR:
                yield _clamped(today.year + step, 1, calendar.anchor_day)


def _clamped(year: int, month: int, day: int) -> date:
    return date(year, month, min(day, monthrange(year, month)[1]))


def _first_instant(day: date, tz: ZoneInfo) -> int:
    """Return when `day` begins in a zone: at midnight, or at the end of the clock change that skipped midnight."""
    midnight = datetime.combine(day, time(), tz)
    instant = _micros(midnight)
    if _local(instant, tz) == midnight.replace(tzinfo=None):
        return instant
    after = _micros(midnight.replace(fold=1))  # the gap is between the two readings of the skipped midnight
    low, high = min(instant, after) - 1, max(instant, after)
    while high - low > 1:
        middle = (low + high) // 2
        if _local(middle, tz).date() >= day:
            high = middle
        else:
            low = middle
    return high


def _micros(moment: datetime) -> int:
    return (moment.astimezone(UTC) - _EPOCH) // _MICROSECOND


def _local(instant: int, tz: ZoneInfo) -> datetime:
    return (_EPOCH + timedelta(microseconds=instant)).astimezone(tz).replace(tzinfo=None)
