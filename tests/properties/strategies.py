"""Random limits within their bounds, and random histories of checks that come close to them.

Numbers that depend on others are drawn as parts of a whole and scaled: strategies that are built on the fly are slow.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

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
from limitforge.core.algorithms.level import LevelAlgorithm
from limitforge.core.calendar import Period
from limitforge.core.limits import Align

ALGORITHMS = (
    "token_bucket",
    "leaky_bucket",
    "fixed_window",
    "sliding_window",
    "sliding_window_counter",
    "concurrency",
    "quota",
)
COUNTING = tuple(name for name in ALGORITHMS if name != "concurrency")

DAY_US = 86_400_000_000
TEN_YEARS_US = 3_650 * DAY_US
ZONES = ("UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Kolkata", "Pacific/Apia", "America/St_Johns")
PERIODS = {Period.DAY: DAY_US, Period.WEEK: 7 * DAY_US, Period.MONTH: 30 * DAY_US, Period.YEAR: 365 * DAY_US}

MAX_COST = 2**52 - 1

# Tests that run for each algorithm: together they see more examples than a test that draws one of them.
_EXAMPLES = settings().max_examples
fewer_examples = settings(max_examples=_EXAMPLES // 2 if _EXAMPLES < 1_000 else _EXAMPLES)  # all of them in soak

_WHOLE = 2**20


@dataclass(frozen=True)
class Step:
    """A pause, then a check of a cost."""

    after_us: int
    cost: int


@dataclass(frozen=True)
class History:
    """A limit, the time of its first check, and the steps that follow."""

    limit: Limit
    start_us: int
    steps: list[Step]


# -- parts of a whole that is not known yet: nothing, all, something between, and one beside each of them

_parts = st.tuples(
    st.one_of(st.sampled_from([0, _WHOLE]), st.integers(0, _WHOLE), st.integers(0, _WHOLE // 10)), st.integers(-1, 1)
)
_small_or_parts = st.one_of(st.integers(0, 3), _parts)


def _scaled(part: int | tuple[int, int], whole: int) -> int:
    if isinstance(part, int):
        return part
    return whole * part[0] // _WHOLE + part[1]


def _within(part: int | tuple[int, int], least: int, most: int) -> int:
    return min(max(_scaled(part, most), least), most)


def sizes(maximum: int) -> st.SearchStrategy[int]:
    """Small numbers, where rounding shows, and all others."""
    return st.one_of(st.integers(1, 10), st.integers(1, maximum))


def durations(maximum_us: int) -> st.SearchStrategy[str]:
    """Seconds as a decimal string, from a millisecond on."""
    micros = st.one_of(st.sampled_from([1_000, 1_000_000, 60_000_000]), st.integers(1_000, maximum_us))
    return micros.map(lambda us: f"{us // 1_000_000}.{us % 1_000_000:06}")


_counts = sizes(2**52 - 1)
_listed = sizes(1_000)
_windows = durations(TEN_YEARS_US)
_kinds = st.sampled_from([(Align.CLOCK, False), (Align.FIRST_HIT, False), (Align.CLOCK, True)])
_periods = st.sampled_from(list(Period))
_numerators = sizes(10**9)
_denominators = st.sampled_from([1, 10**6, 3, 7, 60, 3_600, 9_999])


@st.composite
def bucket_numbers(draw: st.DrawFn) -> tuple[int, int | float | str]:
    """A capacity and a rate that a level can hold exactly."""
    numerator, denominator = draw(_numerators), draw(_denominators)
    rate: int | float | str
    if denominator == 1:
        rate = numerator
    elif denominator == 10**6:
        rate = f"{numerator // 10**6}.{numerator % 10**6:06}"
    else:
        numerator = numerator % 100_000 + 1
        rate = numerator / denominator
    exact = Fraction(numerator, denominator)
    per_us = (exact / 10**6).denominator
    largest = min(2**52 // per_us, int(exact * TEN_YEARS_US / 10**6), 2**52 - 1)
    return _within(draw(_small_or_parts), 1, largest), rate


_buckets = bucket_numbers()


@st.composite
def limits(draw: st.DrawFn, algorithm: str, common: dict[str, Any] | None = None) -> Limit:
    """A limit with room for something; `common` are fields that all limits have."""
    fields = common or {}
    match algorithm:
        case "token_bucket":
            capacity, rate = draw(_buckets)
            return TokenBucket(bucket_capacity=capacity, refill_rate_per_sec=rate, **fields)
        case "leaky_bucket":
            capacity, rate = draw(_buckets)
            return LeakyBucket(bucket_capacity=capacity, leak_rate_per_sec=rate, **fields)
        case "fixed_window":
            align, spread = draw(_kinds)
            window = draw(_windows)
            return FixedWindow(limit=draw(_counts), window_seconds=window, align=align, spread=spread, **fields)
        case "sliding_window":
            return SlidingWindow(limit=draw(_listed), window_seconds=draw(_windows), **fields)
        case "sliding_window_counter":
            return SlidingWindowCounter(limit=draw(sizes(2**41)), window_seconds=draw(durations(50 * DAY_US)), **fields)
        case "concurrency":
            return Concurrency(max_concurrent=draw(_listed), lease_ttl_seconds=draw(_windows), **fields)
        case _:
            period = draw(_periods)
            anchor_day = draw(st.integers(1, 31)) if period in (Period.MONTH, Period.YEAR) else 1
            zone = draw(st.sampled_from(ZONES))
            return Quota(limit=draw(_counts), period=period, time_zone=zone, anchor_day=anchor_day, **fields)


def any_limits(**common: Any) -> st.SearchStrategy[Limit]:
    return st.one_of([limits(algorithm, common) for algorithm in ALGORITHMS])


# -- how they are used


def span_us(limit: Limit) -> int:
    """The time in which a limit renews itself, more or less."""
    if isinstance(limit, Quota):
        return PERIODS[Period(limit.period)]
    steps: Any = limit.compiled
    if isinstance(steps, LevelAlgorithm):
        return max(steps.limit, 1) * steps.per_us // steps.tokens + 1
    return int(steps.ttl_us if isinstance(limit, Concurrency) else steps.window_us)


def starts() -> st.SearchStrategy[int]:
    return st.integers(1_500_000_000_000_000, 1_900_000_000_000_000)


def pauses(limit: Limit) -> st.SearchStrategy[int]:
    """None, a moment, a part of the time in which the limit renews itself, or just about that."""
    span = span_us(limit)
    return _parts.map(lambda part: max(_scaled(part, span), 0))


def costs(limit: Limit, least: int = 0) -> st.SearchStrategy[int]:
    """Up to one more than could ever be had."""
    most = _most(limit)
    return _small_or_parts.map(lambda part: _within(part, least, most))


def _most(limit: Limit) -> int:
    return min((limit.size or 0) + 1, MAX_COST)


_steps = st.lists(st.tuples(_parts, _small_or_parts), max_size=20)
_few_steps = st.lists(st.tuples(_parts, _small_or_parts), max_size=8)


@st.composite
def histories(draw: st.DrawFn, algorithm: str, common: dict[str, Any] | None = None, *, long: bool = False) -> History:
    limit = draw(limits(algorithm, common))
    span, most = span_us(limit), _most(limit)
    drawn = draw(_steps if long else _few_steps)
    steps = [Step(max(_scaled(pause, span), 0), _within(cost, 0, most)) for pause, cost in drawn]
    return History(limit, draw(starts()), steps)


def any_histories(**common: Any) -> st.SearchStrategy[History]:
    return st.one_of([histories(algorithm, common) for algorithm in ALGORITHMS])


def counting_histories() -> st.SearchStrategy[History]:
    """Of limits that keep what is taken; a concurrency limit is untouched by settling."""
    return st.one_of([histories(algorithm) for algorithm in COUNTING])
