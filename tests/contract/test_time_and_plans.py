"""Plan changes on live state, clocks that step back, calendars."""

import dataclasses
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from limitforge import (
    Decision,
    FixedWindow,
    LeakyBucket,
    ManualClock,
    Quota,
    Request,
    SlidingWindow,
    SlidingWindowCounter,
    SyncLimiter,
    TokenBucket,
)
from tests.contract.conftest import on_few_stores

SECOND = 1_000_000
BUCKET = TokenBucket(name="b", bucket_capacity=10, refill_rate_per_sec=1)


def left(limiter: SyncLimiter, limits: object) -> int | None:
    return limiter.check("r", "s", limits=limits, cost=0).remaining  # type: ignore[arg-type]


def test_a_smaller_capacity_clamps_the_level_and_a_larger_one_does_not_refill(limiter: SyncLimiter) -> None:
    limiter.check("r", "s", limits=BUCKET, cost=2)
    assert left(limiter, dataclasses.replace(BUCKET, bucket_capacity=100)) == 8
    smaller = dataclasses.replace(BUCKET, bucket_capacity=5)
    assert left(limiter, smaller) == 5
    assert limiter.check("r", "s", limits=smaller, cost=1).remaining == 4
    assert left(limiter, BUCKET) == 4


def test_a_new_rate_converts_the_level_and_refills_from_the_last_write(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    limiter.check("r", "s", limits=BUCKET, cost=10)
    clock.advance_us(3 * SECOND)
    faster = dataclasses.replace(BUCKET, refill_rate_per_sec=2)
    assert left(limiter, faster) == 6
    third = dataclasses.replace(BUCKET, refill_rate_per_sec=1 / 3)
    assert left(limiter, third) == 1


def test_an_over_full_leaky_bucket_stays_so_up_to_twice_the_smaller_capacity(limiter: SyncLimiter) -> None:
    leaky = LeakyBucket(name="l", bucket_capacity=10, leak_rate_per_sec=1)
    limiter.check("r", "s", limits=leaky, cost=10)
    smaller = dataclasses.replace(leaky, bucket_capacity=3)
    look = limiter.check("r", "s", limits=smaller, cost=0)
    assert (look.remaining, look.reset_after_ms) == (0, 6_000)


@on_few_stores
@pytest.mark.parametrize(
    "window",
    [
        FixedWindow(name="w", limit=10, window_seconds=60),
        SlidingWindow(name="w", limit=10, window_seconds=60),
        SlidingWindowCounter(name="w", limit=10, window_seconds=60),
        Quota(name="w", limit=10, period="day"),
    ],
    ids=lambda limit: limit.algorithm,
)
def test_a_changed_limit_keeps_the_count(limiter: SyncLimiter, window: FixedWindow) -> None:
    limiter.check("r", "s", limits=window, cost=8)
    assert left(limiter, dataclasses.replace(window, limit=20)) == 12
    lower = limiter.check("r", "s", limits=dataclasses.replace(window, limit=5))
    assert (lower.allowed, lower.remaining) == (False, 0)


@on_few_stores
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FixedWindow(name="w", limit=10, window_seconds=60), {"window_seconds": 61}),
        (FixedWindow(name="w", limit=10, window_seconds=60), {"align": "first_hit"}),
        (FixedWindow(name="w", limit=10, window_seconds=60), {"spread": True}),
        (SlidingWindowCounter(name="w", limit=10, window_seconds=60), {"window_seconds": 61}),
        (Quota(name="w", limit=10, period="month"), {"period": "year"}),
        (Quota(name="w", limit=10, period="month"), {"time_zone": "Europe/Berlin"}),
        (Quota(name="w", limit=10, period="month"), {"anchor_day": 2}),
    ],
)
def test_a_changed_window_starts_afresh(limiter: SyncLimiter, before: FixedWindow, after: dict[str, object]) -> None:
    limiter.check("r", "s", limits=before, cost=8)
    assert left(limiter, dataclasses.replace(before, **after)) == 10  # type: ignore[arg-type]


def test_log_entries_keep_the_end_that_they_were_taken_with(limiter: SyncLimiter, clock: ManualClock) -> None:
    log = SlidingWindow(name="w", limit=10, window_seconds=60)
    limiter.check("r", "s", limits=log, cost=8)
    brief = dataclasses.replace(log, window_seconds=1)
    limiter.check("r", "s", limits=brief, cost=2)
    clock.advance_us(SECOND)
    assert left(limiter, brief) == 2
    assert limiter.check("r", "s", limits=brief, cost=3).retry_after_ms == 59_000


def test_a_clock_that_steps_back_stands_still(limiter: SyncLimiter, clock: ManualClock) -> None:
    limiter.check("r", "s", limits=BUCKET, cost=10)
    clock.advance_us(-3_600 * SECOND)
    denied = limiter.check("r", "s", limits=BUCKET)
    assert (denied.allowed, denied.retry_after_ms) == (False, 1_000)
    clock.advance_us(3_601 * SECOND)
    assert limiter.check("r", "s", limits=BUCKET).allowed


def test_an_emptied_set_of_leases_keeps_its_last(limiter: SyncLimiter, clock: ManualClock) -> None:
    from limitforge import Concurrency

    slots = Concurrency(name="c", max_concurrent=1, lease_ttl_seconds=30)
    lease = limiter.check("r", "s", limits=slots).lease_id or ""
    limiter.release(lease)
    clock.advance_us(-10 * SECOND)
    limiter.check("r", "s", limits=slots)
    clock.advance_us(10 * SECOND + 30 * SECOND - 1)
    assert not limiter.check("r", "s", limits=slots).allowed


def at(clock: ManualClock, zone: str, *when: int) -> None:
    local = datetime(*when, tzinfo=ZoneInfo(zone))  # type: ignore[misc, arg-type]
    clock.set_us(int(local.astimezone(UTC).timestamp()) * SECOND)


@on_few_stores
@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", (2026, 3, 29), 23),
        ("Europe/Berlin", (2026, 10, 25), 25),
        ("America/New_York", (2026, 3, 8), 23),
        ("America/New_York", (2026, 11, 1), 25),
        ("Asia/Kolkata", (2026, 3, 29), 24),
    ],
)
def test_a_days_quota_lasts_as_long_as_the_day(
    limiter: SyncLimiter, clock: ManualClock, zone: str, day: tuple[int, int, int], hours: int
) -> None:
    quota = Quota(name="q", limit=1, period="day", time_zone=zone)
    at(clock, zone, *day, 0, 0, 0)
    assert limiter.check("r", "s", limits=quota).reset_after_ms == hours * 3_600_000
    clock.advance_us(hours * 3_600 * SECOND - 1)
    assert not limiter.check("r", "s", limits=quota).allowed
    clock.advance_us(1)
    assert limiter.check("r", "s", limits=quota).allowed


def test_a_quota_whose_bucket_is_far_ahead_of_the_clock_is_evaluated_again(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    quotas = [Quota(name=name, limit=5, period=name) for name in ("day", "week")]
    limiter.check("r", "s", limits=quotas[0])
    clock.advance_us(40 * 86_400 * SECOND)
    limiter.check("r", "s", limits=quotas[0])
    clock.advance_us(-35 * 86_400 * SECOND)
    decision = limiter.check("r", "s", limits=quotas)
    assert decision.allowed
    assert [state.remaining for state in decision.limits.values()] == [3, 4]


def test_a_batch_keeps_its_order_when_a_quota_is_evaluated_again(limiter: SyncLimiter, clock: ManualClock) -> None:
    day = Quota(name="day", limit=5, period="day")
    one = FixedWindow(name="one", limit=1, window_seconds=3_600)
    limiter.check("r", "s", limits=day)
    clock.advance_us(10 * 86_400 * SECOND)
    limiter.check("r", "s", limits=day)
    clock.advance_us(-10 * 86_400 * SECOND)
    requests = [
        Request(resource="r", subject="s", limits=limits)
        for limits in (FixedWindow(name="first", limit=1, window_seconds=60), [day, one], one, [day, one])
    ]
    answers = limiter.check_many(requests)
    assert [isinstance(answer, Decision) and answer.allowed for answer in answers] == [True, True, False, False]


def test_a_reset_reaches_limits_that_are_off(limiter: SyncLimiter) -> None:
    limiter.check("r", "s", limits=BUCKET, cost=10)
    limiter.reset("r", "s", limits=dataclasses.replace(BUCKET, mode="off"))
    assert left(limiter, BUCKET) == 10


@on_few_stores
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BUCKET, {"refill_rate_per_sec": "0.01"}),
        (BUCKET, {"bucket_capacity": 1_000}),
        (LeakyBucket(name="b", bucket_capacity=10, leak_rate_per_sec=1), {"leak_rate_per_sec": "0.01"}),
    ],
)
def test_the_wait_after_a_slower_plan_ends_when_the_old_bucket_is_forgotten(
    limiter: SyncLimiter, clock: ManualClock, before: TokenBucket, after: dict[str, object]
) -> None:
    limiter.check("r", "s", limits=before, cost=10)
    slower = dataclasses.replace(before, **after)  # type: ignore[arg-type]
    denied = limiter.check("r", "s", limits=slower, cost=10)
    assert (denied.retry_after_ms, denied.reset_after_ms) == (10_000, 10_000)
    clock.advance_us(10 * SECOND - 1)
    assert not limiter.check("r", "s", limits=slower, cost=10).allowed
    clock.advance_us(1)
    assert limiter.check("r", "s", limits=slower, cost=10).allowed


def test_a_full_bucket_that_is_ahead_of_the_clock_admits_no_more_than_it_holds(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    held = limiter.reserve("r", "s", limits=BUCKET, cost=5).reservation_id or ""
    limiter.settle(held, 0)  # full again, so that it expires at the moment of its last write
    clock.advance_us(-60 * SECOND)
    larger = dataclasses.replace(BUCKET, bucket_capacity=100)
    denied = limiter.check("r", "s", limits=larger, cost=50)
    assert (denied.allowed, denied.remaining, denied.retry_after_ms) == (False, 10, 1)
    assert limiter.check("r", "s", limits=larger, cost=10).allowed


def test_an_override_that_was_seen_to_expire_stays_so_when_the_clock_steps_back(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    limit = FixedWindow(name="w", limit=5, window_seconds=60)
    limiter.set_override("r", "s", {"w": {"limit": 9}}, limits=limit, ttl_seconds=0.001)
    clock.advance_us(1_000)
    assert limiter.list_overrides().overrides == []
    clock.advance_us(-1)
    assert not limiter.delete_override("r", "s")
    assert limiter.check("r", "s", limits=limit).limit == 5


@on_few_stores
@pytest.mark.parametrize(
    "limit",
    [
        FixedWindow(name="w", limit=10, window_seconds=60),
        FixedWindow(name="w", limit=10, window_seconds=60, align="first_hit"),
        SlidingWindowCounter(name="w", limit=10, window_seconds=60),
        Quota(name="w", limit=10, period="day"),
        BUCKET,
    ],
    ids=["window", "window by its first hit", "counter", "quota", "bucket"],
)
def test_after_the_clock_stepped_back_a_check_uses_the_time_of_its_bucket(
    limiter: SyncLimiter, clock: ManualClock, limit: FixedWindow
) -> None:
    clock.advance_us(40 * SECOND)
    for subject in ("a", "a", "b", "b"):
        assert limiter.check("r", subject, limits=limit).allowed
    there = limiter.check("r", "a", limits=limit)
    clock.set_us(clock.now_us() - 30 * SECOND)
    back = limiter.check("r", "b", limits=limit)
    assert (back.allowed, back.remaining, back.reset_after_ms) == (True, 7, there.reset_after_ms)
