"""What all checks of a resource have in common is worked out once, and never for the wrong ones."""

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


def ask(limits: Any = HOUR, subject: Any = "s", **how: Any) -> Check:
    asked: dict[str, Any] = {"resource": "r", "tenant": "t", "priority": "P0", "keys": KEYS, "shadow": None, **how}
    return build_check(
        asked["keys"],
        limits,
        asked["resource"],
        subject,
        how.get("cost", 1),
        None,
        asked["tenant"],
        asked["priority"],
        asked["shadow"],
    )


def keys_of(check: Check) -> list[str]:
    return [key for _, key, *_ in check.debits]


def test_checks_differ_by_whatever_differs_between_them() -> None:
    limits = Limits(HOUR)
    first = ask(limits)
    assert keys_of(ask(limits)) == keys_of(first)
    others = [
        ask(limits, subject="t"),
        ask(limits, resource="q"),
        ask(limits, tenant="u"),
        ask(limits, keys=Keys("other")),
        ask(BURST),
    ]
    assert len({*keys_of(first), *(key for other in others for key in keys_of(other))}) == 6
    assert ask(limits, priority="P3").debits[0][0].percent != first.debits[0][0].percent
    assert ask(limits, cost=3).debits[0][2] == 3


def test_the_takes_of_a_check_are_the_same_whoever_writes_them_out() -> None:
    spread = Keys(lanes={"t": 2})  # goes the long way
    for limits in (HOUR, BURST, Limits(HOUR, TokenBucket(name="b", bucket_capacity=1, refill_rate_per_sec=1))):
        short, long = ask(limits), ask(limits, keys=spread)
        assert short.built_debits is None
        assert long.built_debits is not None
        tag = keys_of(long)[0].split("}")[0]
        assert [(take[0], take[2:4]) for take in short.debits] == [(take[0], take[2:4]) for take in long.debits]
        assert keys_of(short) == [key.replace(tag, "lf:{t") for key in keys_of(long)]
        assert short.routing_key == keys_of(short)[0]


@pytest.mark.parametrize(
    ("resource", "subject"), [("r", "s"), (b"r", b"s"), ("é", "ü"), (b"\xff", b"\xfe"), ("", ""), ("a:b", "1:c")]
)
def test_text_and_bytes_make_the_same_keys_the_first_time_and_later(resource: Any, subject: Any) -> None:
    first = keys_of(ask(resource=resource, subject=subject))
    assert keys_of(ask(resource=resource, subject=subject)) == first
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
def test_what_makes_no_sense_is_refused_each_time(wrong: dict[str, Any], field: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidInput) as refused:
            ask(**wrong)
        assert refused.value.field == field


def test_limits_that_are_made_anew_with_each_check_are_not_kept() -> None:
    known: Any = check_module._prepare_check_cached
    before = known.cache_info().currsize
    for _ in range(100):
        assert len(ask([HOUR, BURST]).debits) == 2
        assert ask(Limits(HOUR), shadow=[BURST], resource="once").shadow is not None
    assert known.cache_info().currsize == before


def test_a_candidate_that_changes_is_read_anew() -> None:
    class Candidate:
        limit = 5

        def __iter__(self) -> Iterator[Limit]:
            return iter([FixedWindow(name="w", limit=self.limit, window_seconds=1)])

    candidate, limits = Candidate(), Limits(HOUR)
    sizes = []
    for Candidate.limit in (5, 9):
        shadow = ask(limits, shadow=candidate).shadow
        assert shadow is not None
        sizes.append(shadow.debits[0][0].limit.size)
    assert sizes == [5, 9]
