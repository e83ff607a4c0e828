"""Which limit of a decision binds, and how its numbers are rounded."""

from typing import Any

from limitforge import (
    Concurrency,
    FixedWindow,
    LeakyBucket,
    Limit,
    ManualClock,
    SlidingWindow,
    SyncLimiter,
    TokenBucket,
)

NOW_US = 1_700_006_400_000_000  # a multiple of a minute and of an hour


def log(name: str, limit: int | None, seconds: float = 60, **fields: Any) -> Limit:
    return SlidingWindow(name=name, limit=limit, window_seconds=seconds, **fields)


def first_hit(name: str, limit: int) -> Limit:
    return FixedWindow(name=name, limit=limit, window_seconds=1, align="first_hit")


# -- denied


def test_of_limits_without_room_the_one_with_the_longest_wait_binds(limiter: SyncLimiter) -> None:
    limits = [log("minute", 1, 60), log("hour", 1, 3_600), log("second", 1, 1), log("roomy", 100, 86_400)]
    limiter.check("r", "s", limits=limits)
    denied = limiter.check("r", "s", limits=limits)
    assert (denied.allowed, denied.binding, denied.retry_after_ms) == (False, "hour", 3_600_000)
    assert {name: state.retry_after_ms for name, state in denied.limits.items()} == {
        "minute": 60_000,
        "hour": 3_600_000,
        "second": 1_000,
        "roomy": 0,
    }
    assert [state.allowed for state in denied.limits.values()] == [False, False, False, True]


def test_a_wait_that_never_ends_is_the_longest(limiter: SyncLimiter) -> None:
    limits = [log("year", 1, 365 * 86_400), log("small", 1), log("blocked", 0)]
    limiter.check("r", "s", limits=limits[:2])
    denied = limiter.check("r", "s", limits=limits[:2], cost=2)
    assert (denied.binding, denied.retry_after_ms) == ("year", None)
    denied = limiter.check("r", "s", limits=[limits[0], limits[2]])
    assert (denied.binding, denied.limit, denied.remaining, denied.retry_after_ms) == ("blocked", 0, 0, None)
    denied = limiter.check("r", "s", limits=[limits[2], limits[0]])
    assert denied.binding == "blocked"


def test_of_equal_waits_the_earlier_limit_binds(limiter: SyncLimiter) -> None:
    one, two = log("one", 1), log("two", 1)
    limiter.check("r", "s", limits=[one, two])
    assert limiter.check("r", "s", limits=[one, two]).binding == "one"
    assert limiter.check("r", "s", limits=[two, one]).binding == "two"
    assert limiter.check("r", "s", limits=[log("x", 0), log("y", 0)]).binding == "x"


def test_of_equal_waits_the_earlier_limit_binds_regardless_of_their_resets(limiter: SyncLimiter) -> None:
    window = first_hit("window", 2)
    bucket = TokenBucket(name="bucket", bucket_capacity=2, refill_rate_per_sec=1)
    limiter.check("r", "s", limits=[window, bucket], cost=2)
    denied = limiter.check("r", "s", limits=[window, bucket])
    assert (denied.binding, denied.retry_after_ms, denied.reset_after_ms) == ("window", 1_000, 1_000)
    assert denied.limits["bucket"].reset_after_ms == 2_000
    assert limiter.check("r", "s", limits=[bucket, window]).binding == "bucket"


def test_waits_are_compared_as_they_are_reported(limiter: SyncLimiter, clock: ManualClock) -> None:
    """The second would end 100 microseconds later; in milliseconds both are the same."""
    one, two = first_hit("one", 1), first_hit("two", 1)
    limiter.check("r", "s", limits=one)
    clock.advance_us(100)
    limiter.check("r", "s", limits=two)
    clock.advance_us(100)
    denied = limiter.check("r", "s", limits=[one, two])
    assert (denied.binding, denied.retry_after_ms) == ("one", 1_000)
    assert limiter.check("r", "s", limits=[two, one]).binding == "two"


# -- allowed


def test_of_limits_with_room_the_one_with_the_least_remaining_binds(limiter: SyncLimiter) -> None:
    allowed = limiter.check("r", "s", limits=[log("a", 10), log("b", 3, 1), log("c", 5, 3_600)])
    assert (allowed.binding, allowed.limit, allowed.remaining, allowed.reset_after_ms) == ("b", 3, 2, 1_000)
    assert allowed.retry_after_ms == 0


def test_of_equal_remaining_the_longest_reset_binds(limiter: SyncLimiter) -> None:
    allowed = limiter.check("r", "s", limits=[log("a", 3, 60), log("b", 3, 3_600), log("c", 3, 600)])
    assert (allowed.binding, allowed.reset_after_ms) == ("b", 3_600_000)


def test_of_equal_remaining_and_reset_the_earlier_limit_binds(limiter: SyncLimiter) -> None:
    one, two = log("one", 3), log("two", 3)
    assert limiter.check("r", "s", limits=[one, two]).binding == "one"
    assert limiter.check("r", "s", limits=[two, one]).binding == "two"


def test_resets_are_compared_as_they_are_reported(limiter: SyncLimiter, clock: ManualClock) -> None:
    one, two = first_hit("one", 9), first_hit("two", 9)
    limiter.check("r", "s", limits=one)
    clock.advance_us(100)
    limiter.check("r", "s", limits=two)
    clock.advance_us(100)
    assert limiter.check("r", "s", limits=[one, two]).binding == "one"
    assert limiter.check("r", "s", limits=[two, one]).binding == "two"


def test_remaining_is_compared_as_this_priority_sees_it(limiter: SyncLimiter) -> None:
    limits = [log("plain", 50), log("shared", 100, shares={"P2": 30})]
    assert limiter.check("r", "s", limits=limits).binding == "plain"
    low = limiter.check("r", "s", limits=limits, priority="P2")
    assert (low.binding, low.limit, low.remaining) == ("shared", 100, 28)


# -- what never binds


def test_monitored_and_unlimited_limits_never_bind(limiter: SyncLimiter) -> None:
    limits = [log("free", None), log("watched", 1, mode="monitor"), log("real", 5)]
    for left in (4, 3, 2):
        decision = limiter.check("r", "s", limits=limits)
        assert (decision.binding, decision.limit, decision.remaining) == ("real", 5, left)
    denied = limiter.check("r", "s", limits=limits, cost=3)
    assert (denied.allowed, denied.binding, denied.retry_after_ms) == (False, "real", 60_000)


def test_without_a_limit_that_can_bind_its_fields_are_none(limiter: SyncLimiter) -> None:
    for limits in ([log("free", None)], [log("watched", 0, mode="monitor")], []):
        decision = limiter.check("r", "s", limits=limits)
        assert decision.allowed
        assert decision.retry_after_ms == 0
        bound = (decision.binding, decision.limit, decision.remaining, decision.reset_after_ms, decision.reset_at)
        assert bound == (None,) * 5


def test_a_decision_has_every_limit_in_the_order_given(limiter: SyncLimiter) -> None:
    limits = [log("b", None), log("a", 1, mode="monitor"), log("c", 5)]
    states = limiter.check("r", "s", limits=limits, cost=2).limits
    assert list(states) == ["b", "a", "c"]
    assert [state.monitored for state in states.values()] == [False, True, False]
    assert [state.allowed for state in states.values()] == [True, False, True]
    assert [state.remaining for state in states.values()] == [None, 1, 3]
    assert [state.retry_after_ms for state in states.values()] == [0, None, 0]
    assert [state.reset_after_ms for state in states.values()] == [0, 0, 60_000]


def test_what_a_monitored_limit_would_have_denied_is_reported_on_denials_too(limiter: SyncLimiter) -> None:
    limits = [log("w1", 1, mode="monitor"), log("real", 2), log("w2", 2, mode="monitor"), log("w3", 9, mode="monitor")]
    assert limiter.check("r", "s", limits=limits).would_deny == ()
    allowed = limiter.check("r", "s", limits=limits)
    assert (allowed.allowed, allowed.would_deny) == (True, ("w1",))
    denied = limiter.check("r", "s", limits=limits)
    assert (denied.allowed, denied.would_deny) == (False, ("w1", "w2"))
    assert limiter.check("r", "s", limits=limits, cost=0).would_deny == ()


# -- rounding


def test_milliseconds_are_rounded_up(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = log("a", 1, 0.0025)
    taken = limiter.check("r", "s", limits=limit)
    assert taken.reset_after_ms == 3
    clock.advance_us(500)
    assert limiter.check("r", "s", limits=limit).retry_after_ms == 2
    clock.advance_us(1)
    assert limiter.check("r", "s", limits=limit).retry_after_ms == 2
    clock.advance_us(1_998)
    assert limiter.check("r", "s", limits=limit).retry_after_ms == 1
    clock.advance_us(1)
    assert limiter.check("r", "s", limits=limit).allowed


def test_the_reset_as_a_time_is_rounded_up_to_a_second(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = log("a", 1, 1)
    taken = limiter.check("r", "s", limits=limit)
    assert taken.reset_at == NOW_US // 10**6 + 1
    clock.set_us(NOW_US + 1_000_001)
    taken = limiter.check("r", "s", limits=limit)
    assert taken.reset_at == NOW_US // 10**6 + 3
    clock.set_us(NOW_US + 2_000_000)
    assert limiter.check("r", "s", limits=limit).reset_at == NOW_US // 10**6 + 3
    assert limiter.check("r", "other", limits=limit, cost=0).reset_at == NOW_US // 10**6 + 2


def test_the_reset_as_a_time_adds_up_before_it_rounds(limiter: SyncLimiter, clock: ManualClock) -> None:
    """0.9995 s and 0.0005 s later is a whole second, though half a millisecond is reported as one."""
    clock.set_us(NOW_US + 999_500)
    limit = TokenBucket(bucket_capacity=1, refill_rate_per_sec=2_000)
    taken = limiter.check("r", "s", limits=limit)
    assert (taken.reset_after_ms, taken.reset_at) == (1, NOW_US // 10**6 + 1)


def test_remaining_is_rounded_down_and_never_below_0(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = TokenBucket(bucket_capacity=2, refill_rate_per_sec=1, count_denied=True)
    limiter.check("r", "s", limits=limit, cost=2)
    clock.advance_us(1_999_999)
    assert limiter.check("r", "s", limits=limit, cost=0).remaining == 1
    limiter.check("r", "s", limits=limit, cost=2)
    peek = limiter.check("r", "s", limits=limit, cost=0)
    assert (peek.allowed, peek.remaining, peek.retry_after_ms) == (True, 0, 0)


# -- delays


def test_the_delay_of_a_leaky_bucket_is_the_time_until_earlier_costs_have_drained(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    limit = LeakyBucket(bucket_capacity=10, leak_rate_per_sec=4)
    assert [limiter.check("r", "s", limits=limit, cost=cost).delay_ms for cost in (2, 1, 3)] == [0, 500, 750]
    clock.advance_us(1_000_001)
    assert limiter.check("r", "s", limits=limit).delay_ms == 500  # of the 6, a little less than 2 are left


def test_only_what_is_taken_from_an_enforced_leaky_bucket_is_delayed(limiter: SyncLimiter) -> None:
    limit = LeakyBucket(bucket_capacity=4, leak_rate_per_sec=4)
    watched = LeakyBucket(name="watched", bucket_capacity=100, leak_rate_per_sec=1, mode="monitor")
    assert limiter.check("r", "s", limits=watched, cost=50).delay_ms is None
    assert limiter.check("r", "s", limits=limit, cost=0).delay_ms is None
    assert limiter.check("r", "s", limits=limit, cost=5).delay_ms is None
    assert limiter.check("r", "s", limits=[watched, limit], cost=4).delay_ms == 0
    assert limiter.check("r", "s", limits=[watched, limit], cost=1).delay_ms is None
    assert limiter.check("r", "s", limits=log("log", 5)).delay_ms is None


def test_the_largest_of_several_delays_is_reported(limiter: SyncLimiter) -> None:
    slow = LeakyBucket(name="slow", bucket_capacity=10, leak_rate_per_sec=1)
    fast = LeakyBucket(name="fast", bucket_capacity=10, leak_rate_per_sec=10)
    limiter.check("r", "s", limits=[slow, fast], cost=2)
    assert limiter.check("r", "s", limits=[slow, fast]).delay_ms == 2_000
    assert limiter.check("r", "s", limits=[fast, slow], costs={"slow": 0}).delay_ms == 300


# -- the rest


def test_a_lease_id_is_returned_only_for_slots_that_were_taken(limiter: SyncLimiter) -> None:
    slots = Concurrency(max_concurrent=1, lease_ttl_seconds=60)
    assert limiter.check("r", "s", limits=slots, cost=0).lease_id is None
    assert limiter.check("r", "s", limits=slots).lease_id is not None
    assert limiter.check("r", "s", limits=slots).lease_id is None
    assert limiter.check("r", "s", limits=log("log", 5)).lease_id is None


def test_a_decision_of_the_store_itself_is_not_degraded(limiter: SyncLimiter) -> None:
    decision = limiter.check("r", "s", limits="5/minute")
    assert (decision.degraded, decision.reservation_id, decision.shadow) == (None, None, None)


def test_a_shadow_plan_is_decided_beside_and_changes_nothing(limiter: SyncLimiter) -> None:
    live, candidate = log("a", 3), log("a", 1)
    allowed = [limiter.check("r", "s", limits=live, shadow=candidate) for _ in range(4)]
    assert [decision.allowed for decision in allowed] == [True, True, True, False]
    shadows = [decision.shadow for decision in allowed]
    assert [shadow.allowed for shadow in shadows if shadow] == [True, False, False, False]
    assert allowed[2].remaining == 0
