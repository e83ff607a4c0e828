"""Where the windows of a quota begin: days, weeks, months and years in zones whose clocks change."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import ManualClock, Quota, SyncLimiter
from limitforge.core.calendar import Calendar, Period
from tests.properties.oracles import local_date, period_of

HOUR_US = 3_600_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def us(text: str) -> int:
    """Microseconds of an ISO time; UTC if it names no offset."""
    moment = datetime.fromisoformat(text)
    return (moment.replace(tzinfo=moment.tzinfo or UTC) - EPOCH) // timedelta(microseconds=1)


def starts(period: str, zone: str, at: str, *, anchor_day: int = 1) -> list[str]:
    """When the window that holds a time begins, and the next two, on the clocks of the zone."""
    _, *instants = Calendar(Period(period), zone, anchor_day).windows_around(us(at))
    return [
        (EPOCH + timedelta(microseconds=at_us)).astimezone(ZoneInfo(zone)).isoformat(timespec="minutes")
        for at_us in instants
    ]


def length_hours(period: str, zone: str, at: str, anchor_day: int = 1) -> float:
    _, begin, end, _ = Calendar(Period(period), zone, anchor_day).windows_around(us(at))
    return (end - begin) / HOUR_US


# -- days


def test_a_day_of_utc_begins_at_midnight_and_lasts_24_hours() -> None:
    assert starts("day", "UTC", "2024-02-28T23:59:59.999999") == [
        "2024-02-28T00:00+00:00",
        "2024-02-29T00:00+00:00",
        "2024-03-01T00:00+00:00",
    ]
    assert starts("day", "UTC", "2024-02-29T00:00")[0] == "2024-02-29T00:00+00:00"


@pytest.mark.parametrize(
    ("zone", "at", "hours"),
    [
        ("Europe/Berlin", "2024-03-31T12:00", 23),
        ("Europe/Berlin", "2024-10-27T12:00", 25),
        ("Europe/Berlin", "2024-06-01T12:00", 24),
        ("America/New_York", "2024-03-10T12:00", 23),
        ("America/New_York", "2024-11-03T12:00", 25),
        ("Australia/Lord_Howe", "2024-10-06T01:00", 23.5),
        ("Australia/Lord_Howe", "2024-04-07T01:00", 24.5),
        ("Asia/Kolkata", "2024-03-31T12:00", 24),
    ],
)
def test_a_day_on_which_clocks_change_is_shorter_or_longer(zone: str, at: str, hours: float) -> None:
    assert length_hours("day", zone, at) == hours


@pytest.mark.parametrize(
    ("zone", "at", "first_instant"),
    [
        ("America/Sao_Paulo", "2018-11-04T12:00", "2018-11-04T01:00-02:00"),
        ("Asia/Beirut", "2022-03-27T12:00", "2022-03-27T01:00+03:00"),
        ("Africa/Cairo", "2024-04-26T12:00", "2024-04-26T01:00+03:00"),
        ("America/Havana", "2024-03-10T12:00", "2024-03-10T01:00-04:00"),
        ("Antarctica/Casey", "2016-10-21T20:00", "2016-10-22T03:00+11:00"),
        ("America/Toronto", "1919-03-31T12:00", "1919-03-31T00:30-04:00"),  # 23:30 to 00:30
        ("America/Scoresbysund", "2025-03-30T12:00", "2025-03-30T00:00-01:00"),  # 23:00 to 00:00
    ],
)
def test_a_day_whose_midnight_is_skipped_begins_at_its_first_instant(zone: str, at: str, first_instant: str) -> None:
    assert starts("day", zone, at)[0] == first_instant
    begin = us(first_instant)
    calendar = Calendar(Period.DAY, zone, 1)
    assert calendar.windows_around(begin)[1] == begin
    assert calendar.windows_around(begin - 1)[2] == begin


def test_a_midnight_that_comes_twice_begins_the_day_the_first_time() -> None:
    """In Havana clocks go from 01:00 back to 00:00."""
    assert starts("day", "America/Havana", "2024-11-03T05:30")[:2] == [
        "2024-11-03T00:00-04:00",
        "2024-11-04T00:00-05:00",
    ]
    assert length_hours("day", "America/Havana", "2024-11-03T12:00") == 25


def test_a_day_that_a_clock_change_interrupts_has_one_window() -> None:
    """In St. John's clocks went from 00:01 back to 23:01 of the day before."""
    before, begin, end, after = Calendar(Period.DAY, "America/St_Johns", 1).windows_around(us("2007-11-04T03:00"))
    assert begin == us("2007-11-04T00:00-02:30")
    assert end == us("2007-11-05T00:00-03:30")
    assert (before, after) == (us("2007-11-03T00:00-02:30"), us("2007-11-06T00:00-03:30"))


@pytest.mark.parametrize(
    ("zone", "last", "skipped_to"),
    [
        ("Pacific/Apia", "2011-12-29T12:00-10:00", "2011-12-31T00:00+14:00"),
        ("Pacific/Kwajalein", "1993-08-20T12:00-12:00", "1993-08-22T00:00+12:00"),
    ],
)
def test_a_day_that_was_skipped_altogether_has_no_window(zone: str, last: str, skipped_to: str) -> None:
    today, tomorrow, _ = starts("day", zone, last)
    assert today[:10] == last[:10]
    assert tomorrow == skipped_to
    assert length_hours("day", zone, last) == 24
    around = Calendar(Period.DAY, zone, 1).windows_around(us(skipped_to))
    assert around[1] == us(skipped_to)
    assert [(b - a) // HOUR_US for a, b in pairwise(around)] == [24, 24, 24]


def test_a_year_that_begins_on_the_day_after_a_skipped_one() -> None:
    """Kiritimati had no 31 December 1994."""
    assert starts("year", "Pacific/Kiritimati", "1994-12-30T12:00-10:00")[:2] == [
        "1994-01-01T00:00-10:00",
        "1995-01-01T00:00+14:00",
    ]
    assert starts("month", "Pacific/Kiritimati", "1994-12-30T12:00-10:00", anchor_day=31)[:2] == [
        "1994-11-30T00:00-10:00",
        "1995-01-01T00:00+14:00",  # the first instant after what was skipped
    ]


# -- weeks, months, years


def test_weeks_begin_on_monday() -> None:
    assert starts("week", "Europe/Berlin", "2024-03-31T12:00") == [
        "2024-03-25T00:00+01:00",
        "2024-04-01T00:00+02:00",
        "2024-04-08T00:00+02:00",
    ]
    assert length_hours("week", "Europe/Berlin", "2024-03-31T12:00") == 7 * 24 - 1


def test_months_begin_on_the_anchor_day() -> None:
    assert starts("month", "UTC", "2024-03-14T23:59:59", anchor_day=15) == [
        "2024-02-15T00:00+00:00",
        "2024-03-15T00:00+00:00",
        "2024-04-15T00:00+00:00",
    ]


@pytest.mark.parametrize(
    ("anchor_day", "year", "days"),
    [
        (29, 2023, ["01-29", "02-28", "03-29", "04-29"]),
        (29, 2024, ["01-29", "02-29", "03-29", "04-29"]),
        (30, 2023, ["01-30", "02-28", "03-30", "04-30"]),
        (30, 2024, ["01-30", "02-29", "03-30", "04-30"]),
        (31, 2023, ["01-31", "02-28", "03-31", "04-30"]),
        (31, 2024, ["01-31", "02-29", "03-31", "04-30"]),
        (31, 2100, ["01-31", "02-28", "03-31", "04-30"]),
    ],
)
def test_an_anchor_day_that_a_month_lacks_is_its_last_day(anchor_day: int, year: int, days: list[str]) -> None:
    calendar = Calendar(Period.MONTH, "UTC", anchor_day)
    expected = tuple(us(f"{year}-{day}") for day in days)
    assert calendar.windows_around(expected[1]) == expected
    assert calendar.windows_around(expected[2] - 1) == expected


def test_years_begin_in_january_on_the_anchor_day() -> None:
    assert starts("year", "Asia/Tokyo", "2024-06-01T00:00") == [
        "2024-01-01T00:00+09:00",
        "2025-01-01T00:00+09:00",
        "2026-01-01T00:00+09:00",
    ]
    assert starts("year", "UTC", "2024-01-30T00:00", anchor_day=31)[0] == "2023-01-31T00:00+00:00"
    assert length_hours("year", "UTC", "2024-06-01T00:00") == 366 * 24


# -- any time, anywhere

ZONES = [
    "UTC",
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Asuncion",
    "America/Havana",
    "America/Nuuk",
    "America/Sao_Paulo",
    "America/Scoresbysund",
    "America/St_Johns",
    "Antarctica/Casey",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Gaza",
    "Asia/Kathmandu",
    "Asia/Tehran",
    "Australia/Lord_Howe",
    "Europe/Berlin",
    "Pacific/Apia",
    "Pacific/Chatham",
    "Pacific/Kiritimati",
    "Pacific/Kwajalein",
]
INSTANTS = st.integers(us("1990-01-01"), us("2040-01-01"))


@given(
    period=st.sampled_from(list(Period)),
    zone=st.sampled_from(ZONES),
    anchor_day=st.integers(1, 31),
    now_us=INSTANTS,
    beside=st.sampled_from([None, -1, 0]),
)
def test_the_windows_of_any_time_are_those_of_the_local_date(
    period: Period, zone: str, anchor_day: int, now_us: int, beside: int | None
) -> None:
    anchor_day = anchor_day if period in (Period.MONTH, Period.YEAR) else 1
    calendar = Calendar(period, zone, anchor_day)
    if beside is not None:  # the very edge of a window
        now_us = calendar.windows_around(now_us)[2] + beside
    before_us, begin_us, end_us, after_us = calendar.windows_around(now_us)
    assert before_us < begin_us <= now_us < end_us < after_us

    tz = ZoneInfo(zone)

    def period_at(at_us: int) -> int:
        return period_of(local_date(at_us, tz), period, anchor_day)

    number = period_at(begin_us)
    assert period_at(begin_us - 1) < number
    assert period_at(end_us - 1) == number
    assert period_at(end_us) > number
    minute_us = 60_000_000
    for passed in range(4 * 60):  # a date may come twice, never before its window
        assert period_at(begin_us - 1 - passed * minute_us) < number
        assert period_at(end_us - 1 - passed * minute_us) <= number
    for part in range(20):
        assert period_at(begin_us + (end_us - begin_us) * part // 20) <= number


@given(
    period=st.sampled_from(list(Period)),
    zone=st.sampled_from(ZONES),
    anchor_day=st.integers(1, 31),
    now_us=INSTANTS,
)
def test_windows_follow_each_other_without_a_gap(period: Period, zone: str, anchor_day: int, now_us: int) -> None:
    calendar = Calendar(period, zone, anchor_day if period in (Period.MONTH, Period.YEAR) else 1)
    around = calendar.windows_around(now_us)
    next_around = calendar.windows_around(around[2])
    assert next_around[:3] == around[1:]
    assert calendar.windows_around(around[2] - 1) == around
    assert calendar.windows_around(around[1]) == around


# -- in use


def test_a_quota_resets_when_the_local_month_does(clock: ManualClock, limiter: SyncLimiter) -> None:
    quota = Quota(limit=10, period="month", time_zone="America/Sao_Paulo", anchor_day=4)
    clock.set_us(us("2018-11-04T00:59:59.999999-02:00"))  # the last microsecond before clocks jump to 01:00
    taken = limiter.check("r", "s", limits=quota, cost=10)
    assert taken.allowed
    assert taken.reset_after_ms == 1
    denied = limiter.check("r", "s", limits=quota)
    assert (denied.allowed, denied.retry_after_ms) == (False, 1)
    clock.advance_us(1)
    renewed = limiter.check("r", "s", limits=quota)
    assert (renewed.allowed, renewed.remaining) == (True, 9)
    assert renewed.reset_at == us("2018-12-04T00:00-02:00") // 10**6


def test_another_zone_period_or_anchor_day_starts_afresh(limiter: SyncLimiter) -> None:
    def used(**changes: str | int) -> int:
        quota = Quota(limit=10, **{"period": "month", "time_zone": "UTC", "anchor_day": 1, **changes})  # type: ignore[arg-type]
        decision = limiter.check("r", "s", limits=quota)
        return 10 - (decision.remaining or 0)

    assert [used(), used()] == [1, 2]
    assert used(time_zone="Europe/Berlin") == 1
    assert used(time_zone="Europe/Berlin", anchor_day=2) == 1
    assert used(time_zone="Europe/Berlin", anchor_day=2, period="year") == 1
    assert used(time_zone="Europe/Berlin", anchor_day=2, period="year") == 2
