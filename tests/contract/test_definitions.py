"""Limits that are defined twice or change while in use: each definition keeps its own count and its own limit."""

import dataclasses
from typing import Any

import pytest

from limitforge import (
    FixedWindow,
    InvalidInput,
    LeakyBucket,
    Limit,
    Limits,
    ManualClock,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    SyncLimiter,
    TokenBucket,
)
from tests.contract.conftest import on_few_stores

HOUR, MINUTE = 3_600, 60
SHARED = ["caller", "tenant", "resource", "global"]
PAIRS: dict[str, tuple[type[Limit], dict[str, Any], dict[str, Any]]] = {
    "windows": (FixedWindow, {"window_seconds": HOUR}, {"window_seconds": MINUTE}),
    "first hit": (FixedWindow, {"window_seconds": HOUR}, {"window_seconds": HOUR, "align": "first_hit"}),
    "spread": (FixedWindow, {"window_seconds": HOUR}, {"window_seconds": HOUR, "spread": True}),
    "counters": (SlidingWindowCounter, {"window_seconds": HOUR}, {"window_seconds": MINUTE}),
    "zones": (Quota, {"period": "month"}, {"period": "month", "time_zone": "Asia/Tokyo"}),
    "periods": (Quota, {"period": "month"}, {"period": "day"}),
    "anchors": (Quota, {"period": "month"}, {"period": "month", "anchor_day": 3}),
}
CALLER = FixedWindow(name="w", limit=10, window_seconds=HOUR, scope="caller")


def resources(scope: str) -> tuple[str, str]:
    """Return the resources of two routes, or one resource that two places in a program check."""
    return ("GET:/a", "GET:/a") if scope == "resource" else ("GET:/a", "GET:/b")


def alternate(limiter: SyncLimiter, scope: str, one: Limit, two: Limit, times: int) -> tuple[int, int]:
    """Check two limits in turn at one moment; return how many checks of each are allowed."""
    admitted = [0, 0]
    for _ in range(times):
        for at, (resource, limit) in enumerate(zip(resources(scope), (one, two), strict=True)):
            admitted[at] += limiter.check(resource, "s", limits=limit).allowed
    return admitted[0], admitted[1]


# -- two definitions in alternation


@on_few_stores
@pytest.mark.parametrize("scope", SHARED)
def test_two_routes_with_unnamed_windows_each_keep_to_their_limit(limiter: SyncLimiter, scope: Any) -> None:
    hourly = FixedWindow(limit=10, window_seconds=HOUR, scope=scope)
    minutely = FixedWindow(limit=30, window_seconds=MINUTE, scope=scope)
    assert alternate(limiter, scope, hourly, minutely, 35) == (10, 30)


@on_few_stores
@pytest.mark.parametrize("pair", PAIRS)
def test_two_shapes_of_one_limit_each_keep_to_their_number(limiter: SyncLimiter, pair: str) -> None:
    kind, one, two = PAIRS[pair]
    for scope in SHARED:
        for name in ("", "same"):
            limits = [kind(name=name, limit=size, scope=scope, **fields) for size, fields in ((3, one), (8, two))]  # type: ignore[call-arg, arg-type]
            assert alternate(limiter, scope, limits[0], limits[1], 12) == (3, 8), (scope, name)


def test_a_rolling_deploy_to_another_window_admits_the_limit_of_each(limiter: SyncLimiter) -> None:
    before = FixedWindow(name="w", limit=10, window_seconds=HOUR)
    after = dataclasses.replace(before, window_seconds=2 * HOUR)
    assert alternate(limiter, "resource", before, after, 25) == (10, 10)


def test_a_log_and_buckets_of_one_name_share_what_they_have_counted(limiter: SyncLimiter) -> None:
    """Buckets have no shape: a stored level is converted and never restarts."""
    for one, two in (
        (SlidingWindow(name="l", limit=5, window_seconds=60), SlidingWindow(name="l", limit=5, window_seconds=90)),
        (
            TokenBucket(name="t", bucket_capacity=5, refill_rate_per_sec=1),
            TokenBucket(name="t", bucket_capacity=5, refill_rate_per_sec=2),
        ),
        (
            LeakyBucket(name="b", bucket_capacity=5, leak_rate_per_sec=1),
            LeakyBucket(name="b", bucket_capacity=5, leak_rate_per_sec=2),
        ),
    ):
        assert sum(alternate(limiter, "resource", one, two, 10)) == 5


# -- a changed number


def test_a_changed_number_in_the_text_keeps_the_count(limiter: SyncLimiter) -> None:
    limiter.check("r", "s", limits="100/minute", cost=70)
    look = limiter.check("r", "s", limits="80/minute", cost=0)
    assert (look.binding, look.limit, look.remaining) == ("minute", 80, 10)


def test_an_override_of_an_unnamed_limit_outlives_a_changed_number(limiter: SyncLimiter) -> None:
    limiter.set_override("r", "s", {"minute": {"limit": 500}}, limits="100/minute", ttl_seconds=60)
    assert limiter.check("r", "s", limits="80/minute").limit == 500


# -- overrides store what they name


def test_an_override_of_the_limit_follows_the_plans_window(limiter: SyncLimiter) -> None:
    plan = FixedWindow(name="w", limit=10, window_seconds=MINUTE, align="first_hit")
    limiter.set_override("r", "s", {"w": {"limit": 50}}, limits=plan, ttl_seconds=60)
    taken = limiter.check("r", "s", limits=dataclasses.replace(plan, window_seconds=HOUR))
    assert (taken.limit, taken.reset_after_ms) == (50, HOUR * 1_000)


def test_an_override_of_the_window_follows_the_plans_limit(limiter: SyncLimiter) -> None:
    plan = FixedWindow(name="w", limit=10, window_seconds=MINUTE, align="first_hit")
    limiter.set_override("r", "s", {"w": {"window_seconds": HOUR}}, limits=plan, ttl_seconds=60)
    taken = limiter.check("r", "s", limits=dataclasses.replace(plan, limit=20))
    assert (taken.limit, taken.reset_after_ms) == (20, HOUR * 1_000)


@on_few_stores
@pytest.mark.parametrize(
    ("kind", "rate"), [(TokenBucket, "refill_rate_per_sec"), (LeakyBucket, "leak_rate_per_sec")], ids=["token", "leaky"]
)
class TestBuckets:
    def test_an_override_of_the_capacity_follows_the_plans_rate(
        self, limiter: SyncLimiter, kind: Any, rate: str
    ) -> None:
        plan = kind(name="b", bucket_capacity=10, **{rate: 1})
        limiter.set_override("r", "s", {"b": {"limit": 50}}, limits=plan, ttl_seconds=60)
        taken = limiter.check("r", "s", limits=dataclasses.replace(plan, **{rate: 2}), cost=50)
        assert (taken.allowed, taken.limit, taken.reset_after_ms) == (True, 50, 25_000)

    def test_an_override_of_the_rate_follows_the_plans_capacity(
        self, limiter: SyncLimiter, kind: Any, rate: str
    ) -> None:
        plan = kind(name="b", bucket_capacity=10, **{rate: 1})
        limiter.set_override("r", "s", {"b": {rate: 5}}, limits=plan, ttl_seconds=60)
        taken = limiter.check("r", "s", limits=dataclasses.replace(plan, bucket_capacity=20), cost=20)
        assert (taken.allowed, taken.limit, taken.reset_after_ms) == (True, 20, 4_000)

    @pytest.mark.parametrize(
        ("size", "slower"), [(10**7, "12.345678"), (10**6, "0.002")], ids=["not exact", "over ten years"]
    )
    def test_an_override_that_the_changed_plan_can_not_carry_is_ignored(
        self, limiter: SyncLimiter, kind: Any, rate: str, size: int, slower: str
    ) -> None:
        plan = kind(name="b", bucket_capacity=10, **{rate: 100})
        limiter.set_override("r", "s", {"b": {"limit": size}}, limits=plan, ttl_seconds=60)
        assert limiter.check("r", "s", limits=plan, cost=0).limit == size
        assert limiter.check("r", "s", limits=dataclasses.replace(plan, **{rate: slower}), cost=0).limit == 10


# -- one window for a bucket that several resources share


@on_few_stores
@pytest.mark.parametrize(
    "limit",
    [
        CALLER,
        SlidingWindowCounter(name="w", limit=10, window_seconds=HOUR, scope="caller"),
        SlidingWindow(name="w", limit=10, window_seconds=HOUR, scope="caller"),
    ],
    ids=lambda limit: limit.algorithm,
)
def test_another_window_for_one_resource_of_a_caller_is_refused(limiter: SyncLimiter, limit: Limit) -> None:
    with pytest.raises(InvalidInput) as refused:
        limiter.set_override("GET:/a", "s", {"w": {"limit": 5, "window_seconds": 60}}, limits=limit, ttl_seconds=60)
    assert refused.value.field == "limits.w.window_seconds"
    assert "'*'" in refused.value.problem
    limiter.set_override("*", "s", {"w": {"window_seconds": 60}}, limits=limit, ttl_seconds=60)
    limiter.set_override("GET:/a", "s", {"w": {"limit": 5}}, limits=limit, ttl_seconds=60)
    own = dataclasses.replace(limit, scope="subject")
    limiter.set_override("GET:/a", "s", {"w": {"window_seconds": 60}}, limits=own, ttl_seconds=60)


def test_overrides_of_all_and_of_one_resource_never_switch_a_callers_window(limiter: SyncLimiter) -> None:
    limiter.set_override("*", "s", {"w": {"window_seconds": MINUTE}}, limits=CALLER, ttl_seconds=60)
    limiter.set_override("GET:/a", "s", {"w": {"limit": 10}}, limits=CALLER, ttl_seconds=60)
    assert sum(alternate(limiter, "caller", CALLER, CALLER, 15)) == 10


@on_few_stores
@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindowCounter], ids=["window", "counter"])
def test_an_override_that_is_older_than_the_scope_never_switches_a_callers_window(
    limiter: SyncLimiter, kind: type[FixedWindow]
) -> None:
    own = kind(name="w", limit=10, window_seconds=HOUR)
    limiter.set_override("GET:/a", "s", {"w": {"window_seconds": MINUTE}}, limits=own, ttl_seconds=60)
    wide = dataclasses.replace(own, scope="caller")
    assert sum(alternate(limiter, "caller", wide, wide, 15)) == 10


def test_an_override_that_is_older_than_the_scope_does_not_shorten_a_callers_log(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    own = SlidingWindow(name="w", limit=10, window_seconds=HOUR)
    limiter.set_override("GET:/a", "s", {"w": {"window_seconds": MINUTE}}, limits=own, ttl_seconds=HOUR)
    wide = dataclasses.replace(own, scope="caller")
    assert limiter.check("GET:/a", "s", limits=wide, cost=10).allowed
    clock.advance_us(2 * MINUTE * 1_000_000)
    assert not limiter.check("GET:/a", "s", limits=wide).allowed


def test_one_override_of_two_windows_changes_each(limiter: SyncLimiter) -> None:
    plan = Limits(*(FixedWindow(name=name, limit=10, window_seconds=HOUR) for name in "ab"))
    limiter.set_override("r", "s", {"a": {"limit": 5}, "b": {"limit": 6}}, limits=plan, ttl_seconds=60)
    taken = limiter.check("r", "s", limits=plan, cost=2)
    assert [(row.limit, row.remaining) for row in taken.limits.values()] == [(5, 3), (6, 4)]


def test_an_override_restarts_the_count_when_it_begins_and_when_it_ends(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    plan = Limits(FixedWindow(name="w", limit=10, window_seconds=HOUR))
    limiter.check("r", "s", limits=plan, cost=10)
    limiter.set_override("r", "s", {"w": {"window_seconds": 2 * HOUR}}, limits=plan, ttl_seconds=60)
    assert limiter.check("r", "s", limits=plan, cost=4).remaining == 6
    assert not limiter.check("r", "s", limits=plan, cost=7).allowed
    clock.advance_us(60_000_000)
    assert limiter.check("r", "s", limits=plan, cost=4).remaining == 6
    assert not limiter.check("r", "s", limits=plan, cost=7).allowed
