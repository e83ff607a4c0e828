"""Edges of the script's arithmetic: a calendar that is off by a day, products beyond 2^53, other rates."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from limitforge import LeakyBucket, Limit, Quota, SlidingWindowCounter, StoreCorrupt, TokenBucket
from limitforge.stores.redis.codec import check_flow
from tests.contract.script_client import NOW_US, ScriptClient, check_for, key_of, share_of

SECOND_US = 1_000_000
DAY_US = 86_400 * SECOND_US
QUOTA = Quota(name="quota", limit=10, period="day")
BUCKET = TokenBucket(name="bucket", bucket_capacity=10, refill_rate_per_sec=1)
LEAKY = LeakyBucket(name="leaky", bucket_capacity=10, leak_rate_per_sec=1)


@pytest.fixture
def script(redis_url: str) -> Iterator[ScriptClient]:
    with redis_py.Redis.from_url(redis_url) as client:
        yield ScriptClient(client)


@pytest.mark.parametrize("off_us", [-1, 0, 1])
@pytest.mark.parametrize("day", range(-2, 4))
def test_a_quota_uses_the_day_of_the_store_not_of_the_process(script: ScriptClient, day: int, off_us: int) -> None:
    script.now_us = NOW_US + day * DAY_US + off_us
    reset_us = DAY_US - off_us % DAY_US
    for cost, left in ((1, 9), (1, 8), (0, 8)):
        row = script.check(QUOTA, cost=cost, calendar_us=NOW_US + DAY_US // 2).rows[0]
        assert (row[1], row[2]) == (left, reset_us)


@pytest.mark.parametrize("day", [-1, 0, 1])
def test_a_share_of_a_quota_uses_the_day_of_the_store(script: ScriptClient, day: int) -> None:
    script.now_us = NOW_US + day * DAY_US
    leased = dataclasses.replace(QUOTA, consistency="prepaid")
    grant = script.top_up(share_of(leased), wanted=4, calendar_us=NOW_US)
    assert (grant.starts_us, grant.ends_us) == (script.now_us, script.now_us + DAY_US)


def test_an_estimate_is_exact_where_its_product_is_not_a_double(script: ScriptClient) -> None:
    """The share of the window before is 3,999.9999999: its product is odd and above 2^53, and would round up."""
    elapsed_us, limit = 625_000_000, 4_001
    window_us = elapsed_us * limit - 1
    counter = SlidingWindowCounter(
        name="counter", limit=limit, window_seconds=f"{window_us // 10**6}.{window_us % 10**6}"
    )
    script.now_us = NOW_US - NOW_US % window_us
    script.check(counter, cost=limit)
    script.now_us += window_us + elapsed_us
    assert script.remaining(counter) == 2


@pytest.mark.parametrize("limit", [BUCKET, LEAKY], ids=lambda limit: limit.name)
def test_a_part_of_a_token_is_kept_when_the_rate_changes(script: ScriptClient, limit: Limit) -> None:
    script.check(limit, cost=9)
    script.now_us += SECOND_US // 4
    script.check(limit, cost=1)  # a quarter of a token is left
    slower: dict[str, Any] = {"refill_rate_per_sec" if limit is BUCKET else "leak_rate_per_sec": "0.5"}
    assert script.check(dataclasses.replace(limit, **slower)).rows[0][3] == 1_500_000


def test_a_bucket_is_full_again_not_a_microsecond_too_early(script: ScriptClient) -> None:
    thirds = dataclasses.replace(BUCKET, refill_rate_per_sec=3)
    assert [script.check(thirds).rows[0][2] for _ in range(2)] == [333_334, 666_667]
    script.now_us += 666_666
    assert script.remaining(thirds) == 9
    script.now_us += 1
    assert script.remaining(thirds) == 10


def test_a_debt_is_at_most_the_smaller_capacity(script: ScriptClient) -> None:
    counted = dataclasses.replace(BUCKET, count_denied=True)
    for _ in range(2):
        script.check(counted, cost=10)
    assert script.check(dataclasses.replace(BUCKET, bucket_capacity=2)).rows[0][3] == 3_000_000


@pytest.mark.parametrize("limit", [BUCKET, LEAKY], ids=lambda limit: limit.name)
@pytest.mark.parametrize("field", ["tokens", "per"])
def test_a_bucket_without_a_rate_is_a_foreign_value(script: ScriptClient, limit: Limit, field: str) -> None:
    script.check(limit)
    key, at = key_of(limit), {"tokens": slice(31, 38), "per": slice(38, 44)}[field]
    state = bytearray(script.redis.get(key))
    state[at] = bytes(at.stop - at.start)
    script.redis.set(key, bytes(state))
    (answer,) = script.run(check_flow([check_for(limit)], script.now_us, script.now_us))
    assert isinstance(answer, StoreCorrupt)
