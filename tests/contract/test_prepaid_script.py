"""Top-ups of prepaid shares and heartbeats in the script, to the microsecond."""

from collections.abc import Iterator

import pytest
import redis as redis_py

from limitforge import FixedWindow, Limits, ManualClock, SyncLimiter, TokenBucket
from limitforge.core.keys import Keys
from limitforge.stores.redis.multi_step.cross_slot import HoldAction
from limitforge.stores.redis.new_buckets import NewBucketBudget
from tests.contract.script_client import NOW_US, ScriptClient, ending, key_of, share_of

SECOND_US = 1_000_000
LAPSE_US = 20 * SECOND_US
BUCKET = TokenBucket(name="bucket", bucket_capacity=50, refill_rate_per_sec=10, consistency="prepaid")
WINDOW = FixedWindow(name="window", limit=50, window_seconds=60, consistency="prepaid")
ANOTHER = b"another."


@pytest.fixture
def script(redis_url: str) -> Iterator[ScriptClient]:
    with redis_py.Redis.from_url(redis_url) as client:
        yield ScriptClient(client)


def test_a_share_is_at_most_half_of_what_is_left(script: ScriptClient) -> None:
    for granted, left in ((25, 25), (12, 13), (6, 7), (3, 4), (2, 2), (1, 1), (0, 1)):
        grant = script.top_up(share_of(WINDOW), wanted=40)
        assert (grant.granted, grant.limit, grant.remaining) == (granted, 50, left)
    assert script.remaining(WINDOW) == 1


def test_a_bucket_does_not_refill_what_is_out(script: ScriptClient) -> None:
    script.top_up(share_of(BUCKET), wanted=20, lapse_us=LAPSE_US)
    script.top_up(share_of(BUCKET, ANOTHER), wanted=5, lapse_us=LAPSE_US)
    script.now_us += 10 * SECOND_US  # enough to be full again
    assert script.remaining(BUCKET) == 25
    script.check(BUCKET, cost=25)
    script.now_us += SECOND_US
    assert script.remaining(BUCKET) == 10


def test_what_is_brought_back_to_a_bucket_is_there_again_and_refills(script: ScriptClient) -> None:
    script.top_up(share_of(BUCKET), wanted=20, lapse_us=LAPSE_US)
    grant = script.top_up(share_of(BUCKET), returned=5, kept=10, lapse_us=LAPSE_US)
    assert (grant.granted, grant.remaining, grant.ends_us) == (0, 35, 0)
    script.now_us += 10 * SECOND_US
    assert script.remaining(BUCKET) == 40
    script.top_up(share_of(BUCKET), returned=10)
    assert script.remaining(BUCKET) == 50
    assert script.redis.exists(key_of(BUCKET)) == 1


def test_a_share_of_a_bucket_that_lapsed_is_neither_kept_nor_brought_back(script: ScriptClient) -> None:
    script.top_up(share_of(BUCKET), wanted=20, lapse_us=LAPSE_US)
    script.now_us += LAPSE_US - 1
    assert script.top_up(share_of(BUCKET), kept=20, lapse_us=LAPSE_US).ends_us == 0
    script.now_us += LAPSE_US
    grant = script.top_up(share_of(BUCKET), kept=20, returned=3, wanted=4, lapse_us=LAPSE_US)
    assert (grant.granted, grant.remaining, grant.ends_us) == (4, 26, -1)
    script.now_us += 10 * SECOND_US
    assert script.remaining(BUCKET) == 46  # only the 4 are prepaid


def test_a_bucket_is_remembered_until_what_is_out_has_lapsed_and_refilled(script: ScriptClient) -> None:
    script.top_up(share_of(BUCKET), wanted=20, lapse_us=LAPSE_US)
    script.top_up(share_of(BUCKET, ANOTHER), wanted=5, lapse_us=LAPSE_US + SECOND_US)
    assert script.reset_us(BUCKET) == LAPSE_US + SECOND_US + 2_500_000
    script.now_us += script.reset_us(BUCKET) - 1
    assert script.remaining(BUCKET) == 25
    script.now_us += 1
    assert script.remaining(BUCKET) == 50


def test_what_lapses_goes_back_up_to_what_is_not_out(script: ScriptClient) -> None:
    script.top_up(share_of(BUCKET), wanted=20, lapse_us=LAPSE_US)
    script.hold(BUCKET, cost=3)
    script.now_us += SECOND_US  # the bucket has refilled them
    script.finish(ending(HoldAction.REFUND, BUCKET))
    assert script.remaining(BUCKET) == 30


def test_a_share_is_one_of_the_overridden_limit(script: ScriptClient, redis_url: str) -> None:
    changes = {"window": {"limit": 20}, "bucket": "unlimited"}
    with SyncLimiter.connect(redis_url, clock=ManualClock(NOW_US)) as limiter:
        limiter.set_override("r", "s", changes, limits=Limits(WINDOW, BUCKET), ttl_seconds=60, tenant="t")
    grant = script.top_up(share_of(WINDOW), wanted=40)
    assert (grant.granted, grant.limit, grant.remaining) == (10, 20, 10)
    lifted = script.top_up(share_of(BUCKET), wanted=40, lapse_us=LAPSE_US)
    assert (lifted.granted, lifted.limit, lifted.ends_us) == (0, -1, -1)


def test_a_tenant_without_budget_is_granted_nothing_of_a_new_bucket(script: ScriptClient) -> None:
    one = NewBucketBudget(1, ManualClock(NOW_US))
    assert script.top_up(share_of(WINDOW), wanted=40, new_buckets=one).granted == 25
    assert script.top_up(share_of(BUCKET), wanted=40, new_buckets=one, lapse_us=LAPSE_US).granted == 0
    assert script.top_up(share_of(WINDOW), wanted=40, new_buckets=one).granted == 12
    assert script.redis.exists(key_of(BUCKET)) == 0


@pytest.mark.parametrize("off", [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1)])
def test_a_share_goes_back_to_its_own_window_only(script: ScriptClient, off: tuple[int, int]) -> None:
    grant = script.top_up(share_of(WINDOW), wanted=20)
    assert (grant.ends_us, grant.reset_us) == (NOW_US + 60 * SECOND_US, 60 * SECOND_US)
    window = (grant.starts_us + off[0], grant.ends_us + off[1])
    assert script.top_up(share_of(WINDOW, window=window), returned=20).remaining == (30 if any(off) else 50)
    assert script.remaining(WINDOW) == (30 if any(off) else 50)


def test_a_process_counts_until_its_last_heartbeat_has_expired(script: ScriptClient) -> None:
    assert script.heartbeat(b"one", 3 * SECOND_US) == 1
    script.now_us += 1
    assert script.heartbeat(b"two", 3 * SECOND_US) == 2
    script.now_us += 1_999_999
    assert script.heartbeat(b"two", 3 * SECOND_US) == 2
    script.now_us = NOW_US + 3 * SECOND_US - 1
    assert script.heartbeat(b"two", 3 * SECOND_US) == 2
    script.now_us += 1
    assert script.heartbeat(b"two", 3 * SECOND_US) == 1
    assert script.heartbeat(b"one", 3 * SECOND_US) == 2
    assert script.heartbeat(b"one", 0) == 1
    assert script.heartbeat(b"two", 0) == 0


def test_the_heartbeats_are_deleted_a_minute_after_the_last_one(script: ScriptClient) -> None:
    script.heartbeat(b"one", 1_000 * SECOND_US)
    assert 1_030_000 < script.redis.pttl(Keys().heartbeat_key()) <= 1_060_000
