"""Building limits: what is accepted, what is refused, and the field and bound that the error names."""

import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import (
    Concurrency,
    FixedWindow,
    InvalidLimit,
    LeakyBucket,
    Limit,
    Limits,
    ManualClock,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    SyncLimiter,
    TokenBucket,
    limit_from_fields,
)
from limitforge.core.exact import Rate
from limitforge.core.limits import limit_to_fields
from tests.properties.strategies import any_limits

TEN_YEARS = 3_650 * 86_400
FIFTY_DAYS = 50 * 86_400
HUGE = 10**5_000  # more digits than Python likes to print

FIELDS: dict[str, dict[str, Any]] = {
    "token_bucket": {"bucket_capacity": 100, "refill_rate_per_sec": 20},
    "leaky_bucket": {"bucket_capacity": 100, "leak_rate_per_sec": 20},
    "fixed_window": {"limit": 100, "window_seconds": 60},
    "sliding_window": {"limit": 100, "window_seconds": 60},
    "sliding_window_counter": {"limit": 100, "window_seconds": 60},
    "concurrency": {"max_concurrent": 100, "lease_ttl_seconds": 60},
    "quota": {"limit": 100, "period": "month"},
}
SIZE = {name: next(iter(fields)) for name, fields in FIELDS.items()}
DURATION = {
    name: field
    for name, fields in FIELDS.items()
    for field in fields
    if field in ("window_seconds", "lease_ttl_seconds")
}
RATE = {"token_bucket": "refill_rate_per_sec", "leaky_bucket": "leak_rate_per_sec"}
UNNAMED = {
    "token_bucket": "bucket",
    "leaky_bucket": "leaky",
    "fixed_window": "minute",
    "sliding_window": "minute",
    "sliding_window_counter": "minute",
    "concurrency": "concurrency",
    "quota": "month",
}
KINDS: dict[str, type[Limit]] = {
    "token_bucket": TokenBucket,
    "leaky_bucket": LeakyBucket,
    "fixed_window": FixedWindow,
    "sliding_window": SlidingWindow,
    "sliding_window_counter": SlidingWindowCounter,
    "concurrency": Concurrency,
    "quota": Quota,
}

every_algorithm = pytest.mark.parametrize("algorithm", FIELDS)


def build(algorithm: str, **changes: Any) -> Limit:
    return limit_from_fields({"algorithm": algorithm, **FIELDS[algorithm], **changes})


def refusal(algorithm: str, **changes: Any) -> InvalidLimit:
    with pytest.raises(InvalidLimit) as refused:
        build(algorithm, **changes)
    return refused.value


def exact_rate(limit: Limit) -> Fraction:
    """Tokens a second."""
    steps: Any = limit.compiled
    return Fraction(steps.tokens, steps.per_us) * 10**6


# -- what can be built


@every_algorithm
def test_every_limit_can_be_built_from_its_fields_or_by_its_class(algorithm: str) -> None:
    limit = build(algorithm, name="mine")
    assert type(limit) is KINDS[algorithm]
    assert limit == KINDS[algorithm](name="mine", **FIELDS[algorithm])
    assert limit.size == 100


@every_algorithm
def test_a_limit_without_a_name_is_named_by_its_period(algorithm: str) -> None:
    assert build(algorithm).name == UNNAMED[algorithm]
    assert build(algorithm, **{SIZE[algorithm]: 7}).name == UNNAMED[algorithm]


@pytest.mark.parametrize(
    ("seconds", "name"),
    [
        (1, "second"),
        (60, "minute"),
        ("60.000000", "minute"),
        (90, "90-seconds"),
        (900, "15-minutes"),
        (3_600, "hour"),
        (86_400, "day"),
        (604_800, "7-days"),
        (90_000, "25-hours"),
        (0.25, "0.25-seconds"),
        (1.5, "1.5-seconds"),
        ("0.001", "0.001-seconds"),
        ("86400.000001", "86400.000001-seconds"),
    ],
)
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window", "sliding_window_counter"])
def test_a_window_is_named_by_the_largest_unit_that_it_is_whole_in(
    algorithm: str, seconds: float | str, name: str
) -> None:
    assert build(algorithm, window_seconds=seconds).name == name
    assert build(algorithm, window_seconds=seconds, name="mine").name == "mine"


@pytest.mark.parametrize("period", ["day", "week", "month", "year"])
def test_a_quota_is_named_by_its_period(period: str) -> None:
    assert build("quota", period=period).name == period


@every_algorithm
def test_a_limit_is_a_value(algorithm: str) -> None:
    one, two = build(algorithm, shares={"P2": 80}), build(algorithm, shares={"P2": 80})
    assert one == two
    assert hash(one) == hash(two)
    assert one != build(algorithm)
    with pytest.raises(FrozenInstanceError):
        one.name = "other"  # type: ignore[misc]


def test_the_shares_of_a_limit_cannot_be_changed_from_outside() -> None:
    given_shares = {"P2": 80}
    limit = build("fixed_window", shares=given_shares)
    given_shares["P2"] = 10
    assert limit.shares == {"P2": 80}
    with pytest.raises(TypeError):
        limit.shares["P2"] = 10  # type: ignore[index]


# -- sizes


@pytest.mark.parametrize(
    ("algorithm", "most", "more"),
    [
        ("token_bucket", 2**52 - 1, {"refill_rate_per_sec": 10**8}),
        ("leaky_bucket", 2**52 - 1, {"leak_rate_per_sec": 10**8}),
        ("fixed_window", 2**52 - 1, {}),
        ("sliding_window", 1_000, {}),
        ("sliding_window_counter", 2**41, {}),
        ("concurrency", 1_000, {}),
        ("quota", 2**52 - 1, {}),
    ],
)
def test_a_size_may_be_as_large_as_its_bound_and_no_larger(algorithm: str, most: int, more: dict[str, Any]) -> None:
    field = SIZE[algorithm]
    assert build(algorithm, **{field: most}, **more).size == most
    error = refusal(algorithm, **{field: most + 1}, **more)
    assert error.field == field
    assert str(most) in error.problem


@every_algorithm
def test_a_size_may_be_nothing_but_not_less(algorithm: str) -> None:
    field = SIZE[algorithm]
    assert build(algorithm, **{field: 0}).size == 0
    assert build(algorithm, **{field: None}).size is None
    error = refusal(algorithm, **{field: -1})
    assert error.field == field
    assert "0" in error.problem


@every_algorithm
def test_a_blocked_limit_denies_and_an_unlimited_one_does_not(algorithm: str, limiter: SyncLimiter) -> None:
    field = SIZE[algorithm]
    blocked, unlimited = build(algorithm, **{field: 0}), build(algorithm, **{field: None})
    denied = limiter.check("r", "s", limits=blocked)
    assert (denied.allowed, denied.limit, denied.remaining, denied.retry_after_ms) == (False, 0, 0, None)
    allowed = limiter.check("r", "s", limits=unlimited, cost=2**52 - 1)
    assert allowed.allowed
    assert allowed.limits[UNNAMED[algorithm]].limit is None
    assert allowed.limits[UNNAMED[algorithm]].remaining is None


@pytest.mark.parametrize("algorithm", RATE)
def test_an_unlimited_bucket_needs_no_rate_and_any_other_does(algorithm: str) -> None:
    assert limit_from_fields({"algorithm": algorithm, "bucket_capacity": None}).size is None
    with pytest.raises(InvalidLimit) as refused:
        limit_from_fields({"algorithm": algorithm, "bucket_capacity": 5})
    assert refused.value.field == RATE[algorithm]


@every_algorithm
@pytest.mark.parametrize("size", [100, "100", "100.0", 100.0, Decimal(100), Decimal("1E+2"), " 100 ", "+100"])
def test_a_size_may_be_an_integer_a_decimal_string_or_a_whole_float(algorithm: str, size: object) -> None:
    assert build(algorithm, **{SIZE[algorithm]: size}) == build(algorithm)


NO_NUMBERS = [
    float("nan"),
    float("inf"),
    float("-inf"),
    True,
    False,
    "abc",
    "",
    " ",
    "0x10",
    "1_000",
    "1,5",
    "--1",
    "\u0661",
    "nan",
    "inf",
    b"5",
    [5],
    {},
    5j,
    Decimal("NaN"),
    Decimal("Infinity"),
    "9" * 1_000,
    1e300,
    5e-324,
]


@every_algorithm
@pytest.mark.parametrize("number", [*NO_NUMBERS, 1.5, "1.5", 99.99999999])
def test_a_size_that_is_not_a_whole_number_is_refused(algorithm: str, number: object) -> None:
    assert refusal(algorithm, **{SIZE[algorithm]: number}).field == SIZE[algorithm]


@pytest.mark.parametrize("algorithm", DURATION)
@pytest.mark.parametrize("number", [None, *NO_NUMBERS])
def test_a_duration_that_is_not_a_number_is_refused(algorithm: str, number: object) -> None:
    assert refusal(algorithm, **{DURATION[algorithm]: number}).field == DURATION[algorithm]


@pytest.mark.parametrize("algorithm", RATE)
@pytest.mark.parametrize("number", [None, 0, -1, "-0.5", "0.0000001", *NO_NUMBERS])
def test_a_rate_that_is_not_a_number_above_0_is_refused(algorithm: str, number: object) -> None:
    assert refusal(algorithm, **{RATE[algorithm]: number}).field == RATE[algorithm]


@pytest.mark.parametrize(
    ("algorithm", "field"),
    [*SIZE.items(), *DURATION.items(), *RATE.items()],
)
def test_a_string_in_scientific_notation_is_refused(algorithm: str, field: str) -> None:
    assert refusal(algorithm, **{field: "1e2"}).field == field


@pytest.mark.parametrize(
    ("algorithm", "field"),
    [
        *SIZE.items(),
        *DURATION.items(),
        *RATE.items(),
        ("quota", "anchor_day"),
        ("quota", "period"),
        ("quota", "time_zone"),
        ("fixed_window", "align"),
        ("fixed_window", "spread"),
        *(("fixed_window", field) for field in ("name", "scope", "mode", "counts", "count_denied", "shares")),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_that_is_too_long_to_print_is_refused_like_any_other(algorithm: str, field: str, sign: int) -> None:
    assert refusal(algorithm, **{field: sign * HUGE}).field == field


# -- durations


@pytest.mark.parametrize("algorithm", DURATION)
def test_a_duration_may_be_as_short_and_as_long_as_its_bounds_and_no_more(algorithm: str) -> None:
    field = DURATION[algorithm]
    longest = FIFTY_DAYS if algorithm == "sliding_window_counter" else TEN_YEARS
    for fits in ("0.001", 0.001, longest, f"{longest}.000000"):
        build(algorithm, **{field: fits})
    for too_short in ("0.000999", 0, -1, 0.0005):
        error = refusal(algorithm, **{field: too_short})
        assert error.field == field
        assert "0.001" in error.problem
    error = refusal(algorithm, **{field: f"{longest}.000001"})
    assert error.field == field
    assert str(longest) in error.problem


@pytest.mark.parametrize("algorithm", DURATION)
@pytest.mark.parametrize("seconds", ["1.0000001", 1.0000001, 1 / 3, Decimal("0.1234567")])
def test_a_duration_has_at_most_6_decimals(algorithm: str, seconds: object) -> None:
    error = refusal(algorithm, **{DURATION[algorithm]: seconds})
    assert error.field == DURATION[algorithm]
    assert "6 decimals" in error.problem


@given(micros=st.integers(1_000, TEN_YEARS * 10**6))
def test_a_duration_with_up_to_6_decimals_is_exact(micros: int) -> None:
    text = f"{micros // 10**6}.{micros % 10**6:06}"
    assert build("fixed_window", window_seconds=text).compiled.window_us == micros  # type: ignore[attr-defined]
    assert build("fixed_window", window_seconds=Decimal(text)).compiled.window_us == micros  # type: ignore[attr-defined]
    if micros < 10**15:
        assert build("fixed_window", window_seconds=float(text)).compiled.window_us == micros  # type: ignore[attr-defined]


# -- rates


@pytest.mark.parametrize("algorithm", RATE)
@pytest.mark.parametrize(
    ("given_rate", "exact"),
    [
        (100 / 60, Fraction(5, 3)),
        (0.8333, Fraction(8_333, 10_000)),
        ("0.8333", Fraction(8_333, 10_000)),
        (Decimal("0.8333"), Fraction(8_333, 10_000)),
        (1 / 7, Fraction(1, 7)),
        (5_000 / 9_999, Fraction(5_000, 9_999)),
        (0.1, Fraction(1, 10)),
        (0.000001, Fraction(1, 10**6)),
        ("0.000001", Fraction(1, 10**6)),
        (1e6, Fraction(10**6)),
        (20, Fraction(20)),
        ("20", Fraction(20)),
        (0.1 + 0.2, Fraction(3, 10)),
    ],
)
def test_a_rate_is_the_exact_number_that_was_meant(algorithm: str, given_rate: object, exact: Fraction) -> None:
    assert exact_rate(build(algorithm, bucket_capacity=1, **{RATE[algorithm]: given_rate})) == exact


@given(count=st.integers(1, 10**5), seconds=st.integers(1, 10_000))
def test_a_float_rate_is_the_fraction_that_it_was_divided_from(count: int, seconds: int) -> None:
    limit = TokenBucket(bucket_capacity=1, refill_rate_per_sec=count / seconds)
    assert exact_rate(limit) == Fraction(count, seconds) or _has_6_decimals(count / seconds)


@given(millionths=st.integers(1, 10**12))
def test_a_rate_with_up_to_6_decimals_is_exact(millionths: int) -> None:
    text = f"{millionths // 10**6}.{millionths % 10**6:06}"
    limit = TokenBucket(bucket_capacity=1, refill_rate_per_sec=text)
    assert exact_rate(limit) == Fraction(millionths, 10**6)
    assert exact_rate(TokenBucket(bucket_capacity=1, refill_rate_per_sec=float(text))) == exact_rate(limit)


def _has_6_decimals(number: float) -> bool:
    """Then it is exactly that decimal."""
    return (Fraction(repr(number)) * 10**6).denominator == 1


@pytest.mark.parametrize("algorithm", RATE)
def test_a_string_rate_has_at_most_6_decimals(algorithm: str) -> None:
    error = refusal(algorithm, **{RATE[algorithm]: "0.3333333"})
    assert error.field == RATE[algorithm]
    assert "6 decimals" in error.problem


@pytest.mark.parametrize("algorithm", RATE)
def test_a_level_must_stay_exact(algorithm: str) -> None:
    """A rate of 999,999 per 10^12 microseconds leaves room for 2^52 / 10^12 tokens."""
    build(algorithm, bucket_capacity=4_503, **{RATE[algorithm]: "0.999999"})
    error = refusal(algorithm, bucket_capacity=4_504, **{RATE[algorithm]: "0.999999"})
    assert error.field == "bucket_capacity"
    assert "4503" in error.problem


@pytest.mark.parametrize("prefix", ["token", "leaky"])
def test_the_denominator_of_a_rate_has_a_bound(prefix: str) -> None:
    """Only a rate of N per window can have one above 10^12."""
    Limits.parse(f"{prefix}:1/4398046 seconds")
    with pytest.raises(InvalidLimit, match=str(2**42)):
        Limits.parse(f"{prefix}:1/4398047 seconds")


@pytest.mark.parametrize("algorithm", RATE)
def test_the_time_to_full_is_at_most_ten_years(algorithm: str) -> None:
    build(algorithm, bucket_capacity=TEN_YEARS, **{RATE[algorithm]: 1})
    error = refusal(algorithm, bucket_capacity=TEN_YEARS + 1, **{RATE[algorithm]: 1})
    assert error.field == RATE[algorithm]
    assert str(TEN_YEARS) in error.problem


# -- shares, modes and the rest


@every_algorithm
def test_shares_are_whole_percents_of_known_priorities(algorithm: str) -> None:
    limit = build(algorithm, shares={"P0": 100, "P1": 100, "P2": "80", "P3": 0})
    assert limit.shares == {"P0": 100, "P1": 100, "P2": 80, "P3": 0}


@pytest.mark.parametrize(
    ("shares", "field", "bound"),
    [
        ({"P1": 101}, "shares.P1", "100"),
        ({"P1": -1}, "shares.P1", "0"),
        ({"P1": 50.5}, "shares.P1", "whole"),
        ({"P1": None}, "shares.P1", "number"),
        ({"P1": True}, "shares.P1", "number"),
        ({"P0": 99}, "shares.P0", "100"),
        ({"P4": 50}, "shares", "P3"),
        ({1: 50}, "shares", "P3"),
        ([("P1", 50)], "shares", "map"),
        ("P1", "shares", "map"),
        (None, "shares", "map"),
    ],
)
def test_other_shares_are_refused(shares: object, field: str, bound: str) -> None:
    error = refusal("fixed_window", shares=shares)
    assert error.field == field
    assert bound in error.problem


@pytest.mark.parametrize("algorithm", [name for name in FIELDS if name != "concurrency"])
def test_counted_denials_and_shares_exclude_each_other(algorithm: str) -> None:
    build(algorithm, count_denied=True)
    assert refusal(algorithm, count_denied=True, shares={"P2": 80}).field == "count_denied"


def test_a_concurrency_limit_has_no_denials_to_count() -> None:
    assert refusal("concurrency", count_denied=True).field == "count_denied"


def test_a_window_that_a_hit_opens_cannot_be_spread() -> None:
    build("fixed_window", spread=True)
    build("fixed_window", align="first_hit")
    assert refusal("fixed_window", spread=True, align="first_hit").field == "spread"


@pytest.mark.parametrize("value", ["yes", 1, 0, None])
@pytest.mark.parametrize("field", ["count_denied", "spread"])
def test_a_switch_is_true_or_false(field: str, value: object) -> None:
    assert refusal("fixed_window", **{field: value}).field == field


@pytest.mark.parametrize(
    ("algorithm", "field", "choices"),
    [
        ("token_bucket", "scope", ["subject", "caller", "resource", "tenant", "global"]),
        ("token_bucket", "mode", ["off", "monitor", "on"]),
        ("token_bucket", "counts", ["cost", "requests"]),
        ("fixed_window", "align", ["clock", "first_hit"]),
        ("quota", "period", ["day", "week", "month", "year"]),
    ],
)
def test_a_choice_is_one_of_its_names(algorithm: str, field: str, choices: list[str]) -> None:
    for choice in choices:
        assert getattr(build(algorithm, **{field: choice}), field) == choice
    for wrong in ("other", "", None, 1, True, [], choices):
        error = refusal(algorithm, **{field: wrong})
        assert error.field == field
        assert all(choice in error.problem for choice in choices)


@pytest.mark.parametrize("period", ["month", "year"])
def test_an_anchor_day_is_a_day_of_a_month(period: str) -> None:
    for day in (1, 31, "15"):
        build("quota", period=period, anchor_day=day)
    for wrong in (0, 32, 1.5, None, "x"):
        assert refusal("quota", period=period, anchor_day=wrong).field == "anchor_day"


@pytest.mark.parametrize("period", ["day", "week"])
def test_a_day_or_a_week_has_no_anchor_day(period: str) -> None:
    build("quota", period=period, anchor_day=1)
    assert refusal("quota", period=period, anchor_day=2).field == "anchor_day"


@pytest.mark.parametrize(
    "name", ["Mars/Olympus", "", "Europe", "../UTC", "UTC\0", "\ud800", "x" * 10_000, 5, None, b"UTC"]
)
def test_an_unknown_time_zone_is_refused(name: object) -> None:
    assert refusal("quota", time_zone=name).field == "time_zone"


# -- names and fields


@pytest.mark.parametrize(
    "name", ["a", "x" * 64, "per-user.v2_burst/GET", "100/15minutes", "0.25-seconds", "fixed:100/minute"]
)
def test_a_name_has_letters_digits_and_a_few_signs(name: str) -> None:
    assert build("fixed_window", name=name).name == name


@pytest.mark.parametrize(
    "name",
    ["x" * 65, "a b", "a:b", "a;b", "a=b", "a{b}", "é", "a\n", "\0", "fixed:a b", b"a", 5, 0, True, False],
)
def test_any_other_name_is_refused(name: object) -> None:
    assert refusal("fixed_window", name=name).field == "name"


@every_algorithm
@pytest.mark.parametrize("field", ["capacity", "steps", "windows_seconds", "", 5])
def test_an_unknown_field_is_refused_by_name(algorithm: str, field: Any) -> None:
    with pytest.raises(InvalidLimit) as refused:
        limit_from_fields({"algorithm": algorithm, **FIELDS[algorithm], field: 1})
    assert refused.value.field == str(field)
    assert SIZE[algorithm] in refused.value.problem


@every_algorithm
def test_a_missing_field_is_refused_by_name(algorithm: str) -> None:
    for missing in FIELDS[algorithm]:
        given_fields = {field: value for field, value in FIELDS[algorithm].items() if field != missing}
        with pytest.raises(InvalidLimit) as refused:
            limit_from_fields({"algorithm": algorithm, **given_fields})
        assert refused.value.field == missing


@pytest.mark.parametrize("algorithm", ["gcra", "", None, 5, []])
def test_an_unknown_algorithm_is_refused(algorithm: object) -> None:
    with pytest.raises(InvalidLimit) as refused:
        limit_from_fields({"algorithm": algorithm, "limit": 5})
    assert refused.value.field == "algorithm"
    assert all(name in refused.value.problem for name in FIELDS)


@pytest.mark.parametrize("given_fields", [None, "100/minute", [], 5])
def test_fields_that_are_not_a_mapping_are_refused(given_fields: Any) -> None:
    with pytest.raises(InvalidLimit):
        limit_from_fields(given_fields)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.decimals(),
    st.sampled_from([[], {}, "0.0000001"]),
)


@given(
    algorithm=st.sampled_from(sorted(FIELDS)),
    changed=st.sampled_from(["size", "duration", "rate", "name", "scope", "shares", "anchor_day", "time_zone"]),
    value=ANYTHING,
)
def test_a_limit_with_any_value_of_a_field_is_built_or_refused_by_name(
    algorithm: str, changed: str, value: object
) -> None:
    named: Mapping[str, Mapping[str, str]] = {"size": SIZE, "duration": DURATION, "rate": RATE}
    field = named[changed].get(algorithm, "name") if changed in named else changed
    try:
        limit = build(algorithm, **{field: value})
    except InvalidLimit as refused:
        assert refused.field in (field, "bucket_capacity", *RATE.values())  # noqa: PT017
        assert len(str(refused)) < 500  # noqa: PT017
    else:
        limiter = SyncLimiter.connect("memory://", clock=ManualClock())
        for cost in (0, 1, 2**52 - 1):  # no limit that was built can fail later
            limiter.check("r", "s", limits=limit, cost=cost, priority="P2")


# -- there and back


@given(drawn=any_limits(scope="caller", mode="monitor", counts="requests"), shares=st.sampled_from([{}, {"P1": 5}]))
def test_a_limit_is_what_its_fields_say(drawn: Limit, shares: dict[str, int]) -> None:
    limit = replace(drawn, shares=shares)
    again = limit_from_fields(json.loads(json.dumps(limit_to_fields(limit))))
    assert again == limit
    assert again.compiled == limit.compiled


@every_algorithm
def test_the_fields_of_a_limit_leave_out_what_is_the_default(algorithm: str) -> None:
    assert limit_to_fields(build(algorithm)) == {
        "algorithm": algorithm,
        "name": UNNAMED[algorithm],
        **FIELDS[algorithm],
    }
    assert limit_to_fields(build(algorithm, **{SIZE[algorithm]: None}))[SIZE[algorithm]] is None


@pytest.mark.parametrize("text", ["100/minute", "fixed:5/second", "sliding:7/hour", "token:7/minute", "leaky:100/day"])
def test_the_fields_of_a_limit_that_was_text_are_plain_values(text: str) -> None:
    [limit] = Limits.parse(text)
    again = limit_from_fields(json.loads(json.dumps(limit_to_fields(limit))))
    assert again.compiled == limit.compiled
    assert again.name == limit.name


def test_the_finest_rate_that_a_level_can_be_kept_in_is_allowed_and_one_finer_is_not() -> None:
    finest = Rate.per_window("rate", 1, 2**42)
    assert TokenBucket(bucket_capacity=71, refill_rate_per_sec=finest).size == 71
    with pytest.raises(InvalidLimit, match="denominator may be at most 4398046511104"):
        Rate.per_window("rate", 1, 2**42 + 1)
