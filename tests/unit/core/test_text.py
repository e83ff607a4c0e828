"""The string form of limits: what it means, what it is called, and where an error points."""

import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import (
    FixedWindow,
    InvalidLimit,
    LeakyBucket,
    Limit,
    Limits,
    SlidingWindow,
    SlidingWindowCounter,
    TokenBucket,
)

SECONDS = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}
SHORT = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}
UNITS = SECONDS | {f"{unit}s": seconds for unit, seconds in SECONDS.items()} | SHORT
PREFIXES: dict[str, type[Limit]] = {
    "fixed:": FixedWindow,
    "sliding:": SlidingWindow,
    "counter:": SlidingWindowCounter,
    "token:": TokenBucket,
    "leaky:": LeakyBucket,
}


def parse_one(text: str) -> Any:
    [limit] = Limits.parse(text)
    return limit


# -- what it means


@pytest.mark.parametrize(("unit", "seconds"), UNITS.items())
def test_every_unit_is_understood(unit: str, seconds: int) -> None:
    for text in (f"5/{unit}", f"5 per {unit}", f"5/{unit.upper()}", f" 5 / {unit} ", f"5/1{unit}", f"5/1 {unit}"):
        assert parse_one(text).window_seconds == seconds
    assert parse_one(f"5 per 15 {unit}").window_seconds == 15 * seconds
    assert parse_one(f"5/15{unit}").window_seconds == 15 * seconds


@pytest.mark.parametrize(("prefix", "kind"), PREFIXES.items())
def test_every_prefix_names_an_algorithm(prefix: str, kind: type[Limit]) -> None:
    for text in (f"{prefix}30/minute", f"{prefix.upper()} 30 per minute", f"{prefix[:-1]} : 30/minute"):
        limit = parse_one(text)
        assert type(limit) is kind
        assert limit.size == 30


def test_without_a_prefix_a_small_limit_is_the_exact_log_and_a_large_one_the_counter() -> None:
    assert type(parse_one("20/minute")) is SlidingWindow
    assert type(parse_one("21/minute")) is SlidingWindowCounter


@pytest.mark.parametrize("prefix", ["token:", "leaky:"])
@given(count=st.integers(1, 10_000), seconds=st.integers(1, 100_000))
def test_a_bucket_moves_exactly_its_number_per_window(prefix: str, count: int, seconds: int) -> None:
    limit = parse_one(f"{prefix}{count}/{seconds}s")
    assert limit.size == count
    assert Fraction(limit.compiled.tokens, limit.compiled.per_us) == Fraction(count, seconds * 10**6)


@pytest.mark.parametrize("prefix", ["", *PREFIXES])
def test_a_number_of_0_blocks(prefix: str) -> None:
    assert parse_one(f"{prefix}0/minute").size == 0


def test_limits_are_separated_by_semicolons_and_keep_their_order() -> None:
    limits = Limits.parse("100/minute; 10/second;\n fixed:5 per 2 hours ;")
    assert [limit.name for limit in limits] == ["minute", "second", "2-hours"]
    assert len(limits) == 3
    assert limits["second"].size == 10


def test_a_name_comes_before_the_limit() -> None:
    limits = Limits.parse("burst=10/second; per-user.day = token:5 per day")
    assert [limit.name for limit in limits] == ["burst", "per-user.day"]
    assert [limit.algorithm for limit in limits] == ["sliding_window", "token_bucket"]


# -- what it is called


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("100/minute", "minute"),
        ("80/minute", "minute"),
        ("100 per 60 seconds", "minute"),
        ("0100/m", "minute"),
        ("100/3600s", "hour"),
        ("100/90 s", "90-seconds"),
        ("100/120 s", "2-minutes"),
        ("100 per 15 minutes", "15-minutes"),
        ("100/24 hours", "day"),
        ("100/7d", "7-days"),
        ("FIXED: 100 / min", "minute"),
        ("sliding:5/minute", "minute"),
        ("counter:5/minute", "minute"),
        ("token:10/second", "second"),
        ("leaky:0/minute", "minute"),
    ],
)
def test_an_unnamed_limit_is_named_by_its_period(text: str, name: str) -> None:
    assert parse_one(text).name == name


@given(
    prefix=st.sampled_from(["", *PREFIXES]),
    counts=st.tuples(st.integers(0, 1_000), st.integers(0, 1_000)),
    times=st.integers(1, 40),
    unit=st.sampled_from(sorted(UNITS)),
    per=st.sampled_from(["/", " per ", " / "]),
)
def test_only_the_period_is_in_the_name_of_an_unnamed_limit(
    prefix: str, counts: tuple[int, int], times: int, unit: str, per: str
) -> None:
    one, two = (parse_one(f"{prefix}{count}{per}{times}{unit}") for count in counts)
    built = FixedWindow(limit=1, window_seconds=times * UNITS[unit])
    other = FixedWindow(limit=1, window_seconds=(times + 1) * UNITS[unit])
    assert one.name == two.name == built.name != other.name


@pytest.mark.parametrize(
    ("text", "name"),
    [("5/minute; 5/minute", "minute"), ("fixed:5/minute; token:50/60 s", "minute"), ("5/2h; 6/2h", "2-hours")],
)
def test_two_unnamed_limits_of_one_period_are_refused_with_a_hint(text: str, name: str) -> None:
    with pytest.raises(InvalidLimit) as refused:
        Limits.parse(text)
    assert f"two limits are named {name!r}" in refused.value.problem
    hint = re.search(r"'(\w+=[^']+)'", refused.value.problem)
    assert hint is not None
    assert len(Limits.parse(f"{hint[1]}; {text.partition(';')[0]}")) == 2


@pytest.mark.parametrize("text", ["5/minute; 5/minute", "5/minute; 5 per 60 s", "a=5/minute; a=6/hour"])
def test_two_limits_of_one_name_are_refused(text: str) -> None:
    with pytest.raises(InvalidLimit, match="two limits"):
        Limits.parse(text)


# -- where an error points


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("100/fortnight", "fortnight"),
        ("100/minute; ten/second", "ten/second"),
        ("100 minute", "minute"),
        ("gauge:100/minute", "gauge:100/minute"),
        ("token 5/minute", "5/minute"),
        ("100/minute 5/second", "5/second"),
        ("100/minute, 5/second", ", "),
        ("1.5/second", ".5/second"),
        ("-5/second", "-5/second"),
        ("5/second; =5/minute", "=5/minute"),
        ("5/second; a=b=5/minute", "b=5/minute"),
        ("100/1.5 hours", ".5"),
        ("100//minute", "/minute"),
        ("5/second; 99999999999999999999/minute", "99999999999999999999"),
        ("00099999999999999999  / minute", "00099999999999999999"),
        ("5/second;\n 7/eon; 9/hour", "eon"),
        ("5/second;\t7/eon", "eon"),
    ],
)
def test_an_error_points_at_the_wrong_token(text: str, wrong: str) -> None:
    with pytest.raises(InvalidLimit) as refused:
        Limits.parse(text)
    assert refused.value.field == "limits"
    *_, shown, arrow = str(refused.value).splitlines()
    at = arrow.index("^")
    assert arrow.strip(" \t") == "^" * len(wrong.rstrip())
    assert shown[at:].startswith(wrong.rstrip())


@pytest.mark.parametrize("text", ["100/", "100", "100/5", "100 per", "fixed:", "a="])
def test_an_error_at_the_end_points_after_the_text(text: str) -> None:
    with pytest.raises(InvalidLimit, match="the end") as refused:
        Limits.parse(text)
    *_, shown, arrow = str(refused.value).splitlines()
    assert arrow.index("^") == len(shown)


@pytest.mark.parametrize("text", ["", " ", ";", " ; ;\n"])
def test_text_without_any_limit_is_refused(text: str) -> None:
    with pytest.raises(InvalidLimit, match="at least one"):
        Limits.parse(text)


def test_text_that_is_too_long_is_refused() -> None:
    Limits.parse("5/minute" + " " * (4_096 - 8))
    with pytest.raises(InvalidLimit, match="4096"):
        Limits.parse("5/minute" + " " * (4_097 - 8))


@pytest.mark.parametrize("text", [None, 5, b"5/minute", [], {}])
def test_an_argument_that_is_not_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidLimit):
        Limits.parse(text)


def test_a_check_takes_no_more_than_32_limits() -> None:
    assert len(Limits.parse("; ".join(f"5/{n} minutes" for n in range(1, 33)))) == 32
    with pytest.raises(InvalidLimit, match="32"):
        Limits.parse("; ".join(f"5/{n} minutes" for n in range(1, 34)))


# -- bounds


@pytest.mark.parametrize(
    ("fits", "too_much", "field", "bound"),
    [
        ("sliding:1000/minute", "sliding:1001/minute", "limit", "1000"),
        ("2199023255552/minute", "2199023255553/minute", "limit", "2199023255552"),
        ("fixed:4503599627370495/minute", "fixed:4503599627370496/minute", "limit", "4503599627370495"),
        ("100/50 days", "100/51 days", "window_seconds", "4320000"),
        ("5/3650 days", "5/3651 days", "window_seconds", "315360000"),
        ("5/1 second", "5/0 seconds", "window_seconds", "0.001"),
        ("fixed:5/1 second", "fixed:5/0 hours", "window_seconds", "0.001"),
        ("token:5000/3650 days", "token:5000/3651 days", "refill_rate_per_sec", "315360000"),
        ("leaky:5000/3650 days", "leaky:5000/3651 days", "leak_rate_per_sec", "315360000"),
    ],
)
def test_the_bounds_of_limits_hold_for_their_text(fits: str, too_much: str, field: str, bound: str) -> None:
    Limits.parse(fits)
    with pytest.raises(InvalidLimit) as refused:
        Limits.parse(too_much)
    assert refused.value.field == field
    assert bound in refused.value.problem


@pytest.mark.parametrize("text", ["token:5/0 seconds", "leaky:5/0 seconds", "token:0/0 days"])
def test_a_bucket_without_a_window_is_refused(text: str) -> None:
    with pytest.raises(InvalidLimit):
        Limits.parse(text)


@pytest.mark.parametrize("name", ["bad name", "a:b", "é", "x" * 65])
def test_a_wrong_name_is_refused_and_shown(name: str) -> None:
    with pytest.raises(InvalidLimit) as refused:
        Limits.parse(f"{name}=5/minute")
    assert name[:40] in str(refused.value)


# -- anything at all


ALMOST = st.lists(
    st.sampled_from(
        [
            *PREFIXES,
            *UNITS,
            "5",
            "100",
            "0",
            "99999999999999999999999",
            "/",
            ";",
            "=",
            " per ",
            " ",
            "\n",
            "x",
            "\u0663",
            "\u017f",
        ]
    ),
    max_size=12,
).map("".join)


@given(text=st.one_of(st.text(max_size=40), ALMOST))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        limits = Limits.parse(text)
    except InvalidLimit as refused:
        assert refused.problem  # noqa: PT017
    else:
        assert len(limits) >= 1
