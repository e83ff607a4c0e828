"""Where the windows of a calendar quota begin, in a time zone, across daylight-saving changes."""

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
    """How long a quota lasts. Weeks start on Monday."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    YEAR = "year"


@dataclass(frozen=True, slots=True)
class Calendar:
    """A period in a time zone. `anchor_day` is the day on which months begin, or that of January on which years do."""

    period: Period
    time_zone: str
    anchor_day: int

    @property
    def shape(self) -> int:
        """48 bits that tell this calendar from any other: a bucket counted under another one starts afresh."""
        text = f"{self.period} {self.anchor_day} {self.time_zone}"
        return int.from_bytes(hashlib.sha1(text.encode(), usedforsecurity=False).digest()[:6], "big")

    def windows_around(self, now_us: int) -> tuple[int, int, int, int]:
        """Three consecutive windows as four instants; the middle one holds `now_us`."""
        return _around(self, now_us // US_PER_SECOND // 3_600, now_us)


@lru_cache(maxsize=4_096)
def zone(name: str) -> ZoneInfo:
    """The zone, or an error that says what to do."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidLimit(
            "time_zone",
            f"no such time zone: {name[:64]!r}. Use an IANA name such as 'Europe/Berlin'; "
            "if those are missing too, pip install tzdata",
        ) from None


def zone_exists(name: str) -> bool:
    try:
        zone(name)
    except InvalidLimit:
        return False
    return True


def _around(calendar: Calendar, hour: int, now_us: int) -> tuple[int, int, int, int]:
    windows = _windows_of_hour(calendar, hour)
    at = next(i for i, start in enumerate(windows) if start > now_us)
    return windows[at - 2], windows[at - 1], windows[at], windows[at + 1]


@lru_cache(maxsize=4_096)
def _windows_of_hour(calendar: Calendar, hour: int) -> list[int]:
    """Every start that a moment of this hour may need; cached, since a quota is asked for with every check."""
    tz = zone(calendar.time_zone)
    today = datetime.fromtimestamp(hour * 3_600, tz).date()
    starts: list[int] = []
    for day in _days_around(calendar, today):
        instant = _first_instant(day, tz)
        if not starts or instant > starts[-1]:  # a day that a zone skipped altogether has no window
            starts.append(instant)
    return starts


def _days_around(calendar: Calendar, today: date) -> Iterator[date]:
    """The days on which periods begin, from three periods before `today` to three after."""
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
    """When `day` begins there: its midnight, or the end of the clock change that skipped it."""
    midnight = datetime.combine(day, time(), tz)
    instant = _micros(midnight)
    if _local(instant, tz) == midnight.replace(tzinfo=None):
        return instant
    after = _micros(midnight.replace(fold=1))  # the gap lies between the two readings of a midnight that is not there
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
