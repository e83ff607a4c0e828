"""Prepared checks: what checks of one resource have in common is cached, and never used for others."""

from collections.abc import Iterator
from typing import Any

import pytest

from limitforge import FixedWindow, InvalidInput, Limit, Limits, TokenBucket
from limitforge.core import check as check_module
from limitforge.core.check import Check, build_check
from limitforge.core.keys import Keys

HOUR = FixedWindow(name="hour", limit=5, window_seconds=3_600, shares={"P3": 50})
BURST = TokenBucket(name="burst", bucket_capacity=5, refill_rate_per_sec=1, scope="caller")
KEYS = Keys()


def check_of(limits: Any = HOUR, subject: Any = "s", **how: Any) -> Check:
    arguments: dict[str, Any] = {"resource": "r", "tenant": "t", "priority": "P0", "keys": KEYS, "shadow": None, **how}
    return build_check(
        arguments["keys"],
        limits,
        arguments["resource"],
        subject,
        how.get("cost", 1),
        None,
        arguments["tenant"],
        arguments["priority"],
        arguments["shadow"],
    )


def keys_of(check: Check) -> list[str]:
    return [key for _, key, *_ in check.debits]


def test_checks_differ_by_each_of_their_arguments() -> None:
    limits = Limits(HOUR)
    first = check_of(limits)
    assert keys_of(check_of(limits)) == keys_of(first)
    others = [
        check_of(limits, subject="t"),
        check_of(limits, resource="q"),
        check_of(limits, tenant="u"),
        check_of(limits, keys=Keys("other")),
        check_of(BURST),
    ]
    assert len({*keys_of(first), *(key for other in others for key in keys_of(other))}) == 6
    assert check_of(limits, priority="P3").debits[0][0].percent != first.debits[0][0].percent
    assert check_of(limits, cost=3).debits[0][2] == 3


def test_the_debits_of_a_check_are_the_same_on_the_fast_and_the_general_path() -> None:
    spread = Keys(lanes={"t": 2})  # takes the general path
    for limits in (HOUR, BURST, Limits(HOUR, TokenBucket(name="b", bucket_capacity=1, refill_rate_per_sec=1))):
        short, long = check_of(limits), check_of(limits, keys=spread)
        assert short.built_debits is None
        assert long.built_debits is not None
        tag = keys_of(long)[0].split("}")[0]
        assert [(debit[0], debit[2:4]) for debit in short.debits] == [(debit[0], debit[2:4]) for debit in long.debits]
        assert keys_of(short) == [key.replace(tag, "lf:{t") for key in keys_of(long)]
        assert short.denial_cache_key == keys_of(short)[0]


@pytest.mark.parametrize(
    ("resource", "subject"), [("r", "s"), (b"r", b"s"), ("é", "ü"), (b"\xff", b"\xfe"), ("", ""), ("a:b", "1:c")]
)
def test_text_and_bytes_make_the_same_keys_the_first_time_and_later(resource: Any, subject: Any) -> None:
    first = keys_of(check_of(resource=resource, subject=subject))
    assert keys_of(check_of(resource=resource, subject=subject)) == first
    assert first == [
        KEYS.bucket_prefix(HOUR_SCOPE, "p", KEYS.tenant_keys("t"), "lf:{t}:", _text(resource), _text(subject))
        + "hour:f3600"
    ]


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


HOUR_SCOPE = Limits(HOUR).plan("P0").rules[0].scope


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"resource": 5}, "resource"),
        ({"resource": []}, "resource"),
        ({"resource": "x" * 513}, "resource"),
        ({"tenant": {}}, "tenant"),
        ({"tenant": 5}, "tenant"),
        ({"priority": "P9"}, "priority"),
        ({"priority": []}, "priority"),
        ({"subject": 5}, "subject"),
        ({"subject": "x" * 513}, "subject"),
    ],
)
def test_an_invalid_argument_is_refused_each_time(wrong: dict[str, Any], field: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidInput) as refused:
            check_of(**wrong)
        assert refused.value.field == field


def test_limits_that_are_built_for_each_check_are_not_cached() -> None:
    known: Any = check_module._prepare_check_cached
    before = known.cache_info().currsize
    for _ in range(100):
        assert len(check_of([HOUR, BURST]).debits) == 2
        assert check_of(Limits(HOUR), shadow=[BURST], resource="once").shadow is not None
    assert known.cache_info().currsize == before


def test_a_shadow_plan_that_changes_is_read_again() -> None:
    class Candidate:
        limit = 5

        def __iter__(self) -> Iterator[Limit]:
            return iter([FixedWindow(name="w", limit=self.limit, window_seconds=1)])

    candidate, limits = Candidate(), Limits(HOUR)
    sizes = []
    for Candidate.limit in (5, 9):
        shadow = check_of(limits, shadow=candidate).shadow
        assert shadow is not None
        sizes.append(shadow.debits[0][0].limit.size)
    assert sizes == [5, 9]
