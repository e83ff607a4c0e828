"""Each algorithm by example, at the edges where one microsecond or one token decides."""

from typing import Any

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
    TooManyReservations,
)
from limitforge.core.algorithms.level import Level
from limitforge.core.algorithms.quota import QuotaAlgorithm
from limitforge.core.exact import Rate
from limitforge.stores.memory.store import MemoryStore

NOW_US = 1_700_006_400_000_000  # a multiple of a minute and of an hour
MINUTE_US = 60_000_000
RATES: dict[type[Limit], str] = {TokenBucket: "refill_rate_per_sec", LeakyBucket: "leak_rate_per_sec"}


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


def test_a_refund_of_a_counter_goes_to_the_window_it_was_taken_from(limiter: SyncLimiter, clock: ManualClock) -> None:
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


def test_the_wait_includes_the_denial_that_was_counted(limiter: SyncLimiter) -> None:
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


# -- calendars


def test_the_windows_of_a_quota_begin_with_their_first_microsecond_and_end_before_the_next() -> None:
    steps = QuotaAlgorithm(10, 0, first=100, second=200, third=300, end=400)
    ends = {now: window.until_us for now in (100, 199, 200, 299, 300, 399) if (window := steps.fresh(now))}
    assert ends == {100: 200, 199: 200, 200: 300, 299: 300, 300: 400, 399: 400}
    assert (steps.fresh(99), steps.fresh(400)) == (None, None)


# -- what a plan's change leaves behind


@pytest.mark.parametrize("kind", [TokenBucket, LeakyBucket])
def test_a_level_that_is_converted_to_another_rate_is_rounded_down(kind: Any) -> None:
    """A level is kept in parts of a token: 2 of 3 parts are 0 whole ones, and 1 of 2."""
    thirds, halves, wholes = (kind(bucket_capacity=9, **{RATES[kind]: Rate(1, parts)}).compiled for parts in (3, 2, 1))
    state = Level(0, 10**9, 0, thirds, (), 2)
    assert halves.converted(state, -100, 100) == 1
    assert wholes.converted(state, -100, 100) == 0
    assert wholes.converted(Level(0, 10**9, 0, thirds, (), -2), -100, 100) == -1


def test_a_faster_plan_refills_a_bucket_to_its_capacity_and_no_further(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    slow, fast = (TokenBucket(name="b", bucket_capacity=10, refill_rate_per_sec=rate) for rate in (1, 100))
    limiter.check("r", "s", limits=slow, cost=10)
    clock.advance_us(5_000_000)  # half full by the slow rate, 50 times full by the fast one
    assert remaining(limiter, fast) == 10


def test_a_delay_is_rounded_up_to_milliseconds(limiter: SyncLimiter) -> None:
    limit = LeakyBucket(bucket_capacity=10, leak_rate_per_sec="999.999999")  # a token in 1000.000001 microseconds
    assert limiter.check("r", "s", limits=limit).delay_ms == 0
    assert limiter.check("r", "s", limits=limit).delay_ms == 2


# -- what is given back


def test_no_more_is_given_back_than_was_taken_at_that_time(limiter: SyncLimiter) -> None:
    """Two reservations of one microsecond share an entry of the log: settling one gives back only its own amount."""
    limit = SlidingWindow(limit=10, window_seconds=60)
    _, large = (limiter.reserve("r", "s", limits=limit, cost=cost) for cost in (1, 6))
    limiter.settle(large.reservation_id or "", 1)
    assert remaining(limiter, limit) == 8


def test_a_refund_does_not_fill_a_bucket_beyond_its_capacity(limiter: SyncLimiter, clock: ManualClock) -> None:
    limit = TokenBucket(bucket_capacity=10, refill_rate_per_sec=1)
    reserved = limiter.reserve("r", "s", limits=limit, cost=8)
    limiter.check("r", "s", limits=limit, cost=2)
    clock.advance_us(5_000_000)
    limiter.settle(reserved.reservation_id or "", 1)  # 5 and 7 are more than 10
    assert remaining(limiter, limit) == 10
    assert not limiter.check("r", "s", limits=limit, cost=11).allowed
    assert limiter.check("r", "s", limits=limit, cost=10).remaining == 0
    assert not limiter.check("r", "s", limits=limit).allowed


def test_a_reservation_whose_cost_is_kept_gives_nothing_back_when_it_lapses(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    limit = FixedWindow(limit=10, window_seconds=3_600)
    for on_lapse in ("keep", "refund"):
        limiter.reserve("r", "s", limits=limit, cost=3, ttl_seconds=30, on_lapse=on_lapse)
    clock.advance_us(29_999_999)
    assert remaining(limiter, limit) == 4
    clock.advance_us(1)
    assert remaining(limiter, limit) == 7


def test_a_bucket_has_at_most_a_thousand_open_reservations(limiter: SyncLimiter) -> None:
    limit = FixedWindow(limit=2_000, window_seconds=3_600)
    for _ in range(1_000):
        limiter.reserve("r", "s", limits=limit, cost=1)
    with pytest.raises(TooManyReservations, match="1000 open reservations"):
        limiter.reserve("r", "s", limits=limit, cost=1)
    assert remaining(limiter, limit) == 1_000
    assert limiter.reserve("r", "other", limits=limit, cost=1).allowed


# -- what counts denials


def test_a_monitored_limit_counts_no_denials_of_another_limit_either(limiter: SyncLimiter) -> None:
    blocked = FixedWindow(name="blocked", limit=0, window_seconds=60)
    watched = FixedWindow(name="watched", limit=5, window_seconds=60, count_denied=True, mode="monitor")
    for _ in range(3):
        assert limiter.check("r", "s", limits=[blocked, watched], cost=6).would_deny == ("watched",)
    assert limiter.check("r", "s", limits=watched, cost=0).limits["watched"].remaining == 5
