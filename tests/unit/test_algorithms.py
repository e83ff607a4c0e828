"""Each algorithm by example, at the edges where one microsecond or one token decides."""

import pytest

from limitforge import (
    FixedWindow,
    LeakyBucket,
    Limit,
    ManualClock,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    SyncLimiter,
    TokenBucket,
)
from limitforge.stores.memory import MemoryStore

NOW_US = 1_700_006_400_000_000  # a multiple of a minute and of an hour
MINUTE_US = 60_000_000


def remaining(limiter: SyncLimiter, limit: Limit, subject: str = "s") -> int | None:
    return limiter.check("r", subject, limits=limit, cost=0).remaining


# -- windows


def test_a_log_forgets_each_cost_one_window_after_it_was_taken(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = SlidingWindow(limit=3, window_seconds=60)
    for _ in range(3):
        limiter.check("r", "s", limits=limit)
        clock.advance_us(10)
    clock.set_us(NOW_US + MINUTE_US - 1)
    assert remaining(limiter, limit) == 0
    for forgotten in (1, 2, 3):
        clock.set_us(NOW_US + MINUTE_US + 10 * (forgotten - 1))
        assert remaining(limiter, limit) == forgotten
        clock.advance_us(9)
        assert remaining(limiter, limit) == forgotten


def test_a_large_cost_is_one_entry_of_the_log(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = SlidingWindow(limit=60, window_seconds=60)
    limiter.check("r", "s", limits=limit, cost=50)
    clock.advance_us(1_000_000)
    limiter.check("r", "s", limits=limit, cost=10)
    denied = limiter.check("r", "s", limits=limit, cost=1)
    assert denied.retry_after_ms == 59_000
    assert limiter.check("r", "s", limits=limit, cost=51).retry_after_ms == 60_000
    assert denied.reset_after_ms == 60_000


def test_aligned_windows_end_on_the_clock_also_when_nothing_is_counted(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    limit = FixedWindow(limit=1, window_seconds=60)
    clock.advance_us(20_000_000)
    assert limiter.check("r", "s", limits=limit, cost=0).reset_after_ms == 40_000
    assert limiter.check("r", "s", limits=limit).reset_after_ms == 40_000
    assert limiter.check("r", "s", limits=limit).retry_after_ms == 40_000
    clock.set_us(NOW_US + MINUTE_US - 1)
    assert not limiter.check("r", "s", limits=limit).allowed
    clock.advance_us(1)
    assert limiter.check("r", "s", limits=limit).allowed


def test_a_window_may_be_opened_by_its_first_hit(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = FixedWindow(limit=2, window_seconds=60, align="first_hit")
    clock.advance_us(20_000_000)
    assert limiter.check("r", "s", limits=limit, cost=0).reset_after_ms == 0
    assert limiter.check("r", "s", limits=limit, cost=3).reset_after_ms == 0
    assert limiter.check("r", "s", limits=limit).reset_after_ms == 60_000
    clock.advance_us(MINUTE_US - 1)
    assert limiter.check("r", "s", limits=limit).reset_after_ms == 1
    assert limiter.check("r", "s", limits=limit).retry_after_ms == 1
    clock.advance_us(1)
    assert limiter.check("r", "s", limits=limit, cost=2).reset_after_ms == 60_000


def test_spread_windows_end_at_different_times_for_different_keys(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = FixedWindow(limit=5, window_seconds=60, spread=True)
    resets = {}
    for n in range(50):
        decision = limiter.check("r", f"user:{n}", limits=limit)
        assert decision.reset_after_ms is not None
        assert 0 < decision.reset_after_ms <= 60_000
        resets[n] = decision.reset_after_ms
    assert len(set(resets.values())) > 40
    clock.advance_us(MINUTE_US)
    again = [limiter.check("r", f"user:{n}", limits=limit).reset_after_ms for n in range(50)]
    assert again == list(resets.values())  # each key keeps its phase


def test_a_counter_blends_the_window_before_into_this_one(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = SlidingWindowCounter(limit=10, window_seconds=60)
    limiter.check("r", "s", limits=limit, cost=10)
    denied = limiter.check("r", "s", limits=limit)
    assert denied.retry_after_ms == 60_001  # at the edge all ten still count; a microsecond later only nine
    clock.set_us(NOW_US + MINUTE_US)
    assert remaining(limiter, limit) == 0
    clock.advance_us(1)
    assert remaining(limiter, limit) == 1
    clock.set_us(NOW_US + MINUTE_US + MINUTE_US // 2)
    assert remaining(limiter, limit) == 5
    clock.advance_us(1)
    assert remaining(limiter, limit) == 6
    clock.set_us(NOW_US + 2 * MINUTE_US - MINUTE_US // 10)
    assert limiter.check("r", "s", limits=limit, cost=0).reset_after_ms == 1
    clock.advance_us(1)
    assert (remaining(limiter, limit), limiter.check("r", "s", limits=limit, cost=0).reset_after_ms) == (10, 0)


def test_what_a_counter_is_given_back_goes_to_the_window_it_came_from(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = SlidingWindowCounter(limit=100, window_seconds=60)
    reserved = limiter.reserve("r", "s", limits=limit, cost=80, ttl_seconds=3_600)
    clock.set_us(NOW_US + MINUTE_US)
    limiter.check("r", "s", limits=limit, cost=20)
    assert remaining(limiter, limit) == 0
    assert reserved.reservation_id is not None
    limiter.settle(reserved.reservation_id, 40)
    assert remaining(limiter, limit) == 40
    clock.set_us(NOW_US + MINUTE_US + MINUTE_US // 2)
    assert remaining(limiter, limit) == 60


# -- denials that count

COUNTING: dict[str, Limit] = {
    "token_bucket": TokenBucket(bucket_capacity=10, refill_rate_per_sec=1, count_denied=True),
    "leaky_bucket": LeakyBucket(bucket_capacity=10, leak_rate_per_sec=1, count_denied=True),
    "fixed_window": FixedWindow(limit=10, window_seconds=60, count_denied=True),
    "sliding_window": SlidingWindow(limit=10, window_seconds=60, count_denied=True),
    "sliding_window_counter": SlidingWindowCounter(limit=10, window_seconds=60, count_denied=True),
    "quota": Quota(limit=10, period="day", count_denied=True),
}


def in_use(store: MemoryStore) -> int:
    """What is in use of the only bucket, which a decision does not tell once that is over-full."""
    [state] = store._states.values()
    return state.used


@pytest.mark.parametrize("algorithm", COUNTING)
def test_counted_denials_stop_at_twice_the_limit(algorithm: str, limiter: SyncLimiter, store: MemoryStore) -> None:
    limit = COUNTING[algorithm]
    limiter.check("r", "s", limits=limit, cost=8)
    assert not limiter.check("r", "s", limits=limit, cost=3).allowed
    assert in_use(store) == 11
    for used in (14, 17, 20, 20, 20):
        assert not limiter.check("r", "s", limits=limit, cost=3).allowed
        assert in_use(store) == used


@pytest.mark.parametrize("algorithm", COUNTING)
def test_a_denied_cost_above_the_limit_counts_as_the_limit(
    algorithm: str, limiter: SyncLimiter, store: MemoryStore
) -> None:
    limit = COUNTING[algorithm]
    denied = limiter.check("r", "s", limits=limit, cost=1_000)
    assert (denied.allowed, denied.retry_after_ms, denied.remaining) == (False, None, 0)
    assert in_use(store) == 10


def test_the_wait_is_told_after_the_denial_was_counted(limiter: SyncLimiter) -> None:
    limit = COUNTING["token_bucket"]
    limiter.check("r", "s", limits=limit, cost=10)
    assert limiter.check("r", "s", limits=limit, cost=4).retry_after_ms == 8_000
    assert limiter.check("r", "s", limits=limit, cost=4).retry_after_ms == 12_000
    assert limiter.check("r", "s", limits=limit, cost=4).retry_after_ms == 14_000  # down to minus its capacity


def test_a_denial_is_counted_only_by_the_limit_that_had_no_room(limiter: SyncLimiter) -> None:
    roomy = FixedWindow(name="roomy", limit=100, window_seconds=60, count_denied=True)
    tight = FixedWindow(name="tight", limit=1, window_seconds=60)
    limiter.check("r", "s", limits=[roomy, tight])
    limiter.check("r", "s", limits=[roomy, tight])
    assert remaining(limiter, roomy) == 99


def test_a_monitored_limit_counts_no_denials(limiter: SyncLimiter, clock: ManualClock) -> None:
    watched = SlidingWindow(name="watched", limit=2, window_seconds=60, mode="monitor", count_denied=True)
    limiter.check("r", "s", limits=watched, cost=2)
    clock.advance_us(1_000_000)
    assert limiter.check("r", "s", limits=watched, cost=2).would_deny == ("watched",)
    assert limiter.check("r", "s", limits=watched).limits["watched"].retry_after_ms == 59_000
