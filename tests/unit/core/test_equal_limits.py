"""Limits that mean the same are the same, however their numbers were written."""

from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest

from limitforge import Entry, FixedWindow, InvalidLimit, Limits, SyncLimiter, TokenBucket, limit_from_fields


def test_one_limit_in_two_spellings_is_one_bucket_of_a_check() -> None:
    limiter = SyncLimiter.connect("memory://")
    spellings = [
        (FixedWindow(limit=5, window_seconds=60), FixedWindow(limit="5", window_seconds="60.0")),
        (
            TokenBucket(bucket_capacity=5, refill_rate_per_sec=0.5),
            TokenBucket(bucket_capacity=5.0, refill_rate_per_sec=Decimal("0.50")),
        ),
    ]
    for one, other in spellings:
        assert one == other
        assert hash(one) == hash(other)
        assert limiter.check_entries([Entry(one, "r", "s"), Entry(other, "r", "s")]).remaining == 3


def test_limits_of_other_numbers_differ() -> None:
    assert FixedWindow(limit=5, window_seconds=60) != FixedWindow(limit=5, window_seconds=61)
    assert TokenBucket(bucket_capacity=5, refill_rate_per_sec=1) != TokenBucket(
        bucket_capacity=5, refill_rate_per_sec=2
    )


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket", "fixed_window", "concurrency", "quota"])
def test_a_limit_of_null_is_unlimited_in_the_words_of_any_algorithm(algorithm: str) -> None:
    fields: dict[str, dict[str, Any]] = {
        "fixed_window": {"window_seconds": 60},
        "concurrency": {"lease_ttl_seconds": 60},
        "quota": {"period": "day"},
    }
    limit = limit_from_fields({"algorithm": algorithm, "limit": None, **fields.get(algorithm, {})})
    assert limit.size is None
    assert SyncLimiter.connect("memory://").check("r", "s", limits=limit, cost=10**9).allowed


@pytest.mark.parametrize(
    "text", ["sliding:2000/day", "counter:50/60 days", "token:99991/day", "5/0 seconds", "a b=5/minute"]
)
def test_what_is_wrong_with_a_limit_of_a_text_is_pointed_at(text: str) -> None:
    with pytest.raises(InvalidLimit) as refused:
        Limits.parse(f"7/minute;  {text} ; 9/hour")
    line, carets = str(refused.value).splitlines()[-2:]
    assert line[carets.index("^") : carets.rindex("^") + 1] == text


def test_an_override_is_kept_as_plain_values() -> None:
    limiter = SyncLimiter.connect("memory://")
    limit = FixedWindow(name="w", limit=5, window_seconds=60)
    limiter.set_override("r", "s", {"w": MappingProxyType({"limit": 7})}, limits=limit, ttl_seconds=60)
    override = limiter.get_override("r", "s")
    assert override is not None
    assert override.limits == {"w": {"limit": 7}}
