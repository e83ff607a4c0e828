"""Redis against the model of the property tests: admissions, remaining cost, waits and resets, to the microsecond.

The differential compares two engines that one author wrote; this compares one of them with the definitions.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limitforge import (
    Decision,
    FixedWindow,
    LeakyBucket,
    Limit,
    ManualClock,
    SlidingWindowCounter,
    SyncLimiter,
    TokenBucket,
)
from tests.contract.conftest import PATIENT
from tests.properties.oracles import Oracle, build_oracle
from tests.properties.search import reset_us, round_up_to_ms, wait_us
from tests.properties.simulation import RESOURCE, SUBJECT
from tests.properties.strategies import ALGORITHMS, History, costs, histories, pauses
from tests.properties.test_admission import bucket_key

# A priority with a share takes the general path through the script, one without a share the short path.
SHARES = {"P1": 90, "P2": 33}
EXAMPLES = 20
WINDOWS: list[Limit] = [
    FixedWindow(name="clock", limit=10, window_seconds=60),
    FixedWindow(name="first-hit", limit=10, window_seconds=60, align="first_hit"),
]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def limiter(redis_url: str, clock: ManualClock) -> Iterator[SyncLimiter]:
    limiter = SyncLimiter.connect(redis_url, clock=clock, options=PATIENT)
    yield limiter
    limiter.close()


class Twins:
    """One limit on Redis, and its model."""

    def __init__(self, limiter: SyncLimiter, clock: ManualClock, story: History) -> None:
        self.limiter, self.clock, self.limit = limiter, clock, story.limit
        clock.set_us(story.start_us)
        limiter.reset(RESOURCE, SUBJECT, limits=story.limit)
        self.oracle: Oracle = build_oracle(story.limit, bucket_key(story.limit))

    def share(self, priority: str) -> int:
        return self.oracle.size * self.limit.shares.get(priority, 100) // 100

    def check(self, cost: int, priority: str) -> Decision:
        """Check on both, and compare all that they report."""
        oracle, now_us, share = self.oracle, self.clock.now_us(), self.share(priority)
        wait = wait_us(oracle, now_us, cost, share)
        delay = reset_us(oracle, now_us) if isinstance(self.limit, LeakyBucket) and cost and wait == 0 else None
        if wait == 0:
            oracle.take(now_us, cost)
        decision = self.limiter.check(RESOURCE, SUBJECT, limits=self.limit, cost=cost, priority=priority)
        reset = reset_us(oracle, now_us)
        assert decision.allowed == (wait == 0)
        assert decision.retry_after_ms == (None if wait is None else round_up_to_ms(wait))
        assert decision.remaining == max(int((share - oracle.used(now_us)) // 1), 0)
        assert decision.reset_after_ms == round_up_to_ms(reset)
        assert decision.reset_at == ceil(Fraction(now_us + reset, 10**6))
        assert decision.delay_ms == (None if delay is None else round_up_to_ms(delay))
        return decision


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_redis_keeps_to_the_definition(
    algorithm: str, limiter: SyncLimiter, clock: ManualClock, data: st.DataObject
) -> None:
    shares = data.draw(st.sampled_from([{}, SHARES]))
    story = data.draw(histories(algorithm, {"shares": shares}))
    priorities = st.sampled_from(["P0", "P1", "P2"] if shares else ["P0"])
    twins = Twins(limiter, clock, story)
    for step in story.steps:
        clock.advance_us(step.after_us)
        twins.check(step.cost, data.draw(priorities))
    twins.check(twins.check(0, "P0").remaining or 0, "P0")  # full
    clock.advance_us(data.draw(pauses(story.limit)))
    priority, cost = data.draw(priorities), data.draw(costs(story.limit, least=1))
    wait = wait_us(twins.oracle, clock.now_us(), cost, twins.share(priority)) or 0
    # Waits are reported in milliseconds. At a whole millisecond and a microsecond before it, every microsecond shows.
    for left in sorted({1, wait // 1_000 * 1_000, (wait - 1) // 1_000 * 1_000 + 1}, reverse=True):
        if 0 < left <= wait:
            clock.advance_us(wait - left)
            assert not twins.check(cost, priority).allowed
            wait = left
    clock.advance_us(wait)
    twins.check(cost, priority)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "concurrency"])
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_redis_counts_denials_as_the_definition_says(
    algorithm: str, limiter: SyncLimiter, clock: ManualClock, data: st.DataObject
) -> None:
    story = data.draw(histories(algorithm, {"count_denied": True}, long=True))
    twins = Twins(limiter, clock, story)
    for step in story.steps:
        clock.advance_us(step.after_us)
        allowed = twins.oracle.check(clock.now_us(), step.cost)
        decision = limiter.check(RESOURCE, SUBJECT, limits=story.limit, cost=step.cost)
        assert decision.allowed == allowed
        assert decision.remaining == max(int((twins.oracle.size - twins.oracle.used(clock.now_us())) // 1), 0)
        wait = wait_us(twins.oracle, clock.now_us(), step.cost, twins.oracle.size)
        if not allowed:
            assert decision.retry_after_ms == (None if wait is None else round_up_to_ms(wait))


@pytest.mark.parametrize("limit", WINDOWS, ids=lambda limit: limit.name)
def test_a_window_is_over_with_its_last_microsecond(limiter: SyncLimiter, clock: ManualClock, limit: Limit) -> None:
    clock.set_us(1_700_006_400_000_000)  # on a minute
    taken = limiter.check(RESOURCE, SUBJECT, limits=limit, cost=3)
    clock.advance_us(60_000_000 - 1)
    assert limiter.check(RESOURCE, SUBJECT, limits=limit, cost=3).remaining == 4
    clock.advance_us(1)
    assert limiter.check(RESOURCE, SUBJECT, limits=limit, cost=3).remaining == 7
    assert taken.reset_after_ms == 60_000


def test_a_leaky_bucket_rounds_a_delay_up_to_milliseconds(limiter: SyncLimiter) -> None:
    limit = LeakyBucket(bucket_capacity=10, leak_rate_per_sec="999.999999")  # a token per 1000.000001 microseconds
    assert [limiter.check(RESOURCE, SUBJECT, limits=limit).delay_ms for _ in range(2)] == [0, 2]


@pytest.mark.parametrize("takes", [1, 2])  # the first check of a bucket takes another path than the next
def test_a_bucket_is_not_full_a_microsecond_before_it_has_refilled(
    limiter: SyncLimiter, clock: ManualClock, takes: int
) -> None:
    limit = TokenBucket(bucket_capacity=10, refill_rate_per_sec=3)  # a token per 333,333.3 microseconds
    for _ in range(takes):
        limiter.check(RESOURCE, SUBJECT, limits=limit)
    clock.advance_us(takes * 1_000_000 // 3)
    assert limiter.check(RESOURCE, SUBJECT, limits=limit, cost=0).remaining == 9
    clock.advance_us(1)
    assert limiter.check(RESOURCE, SUBJECT, limits=limit, cost=0).remaining == 10


@pytest.mark.parametrize("taken", [2**41, 2**41 - 1, 2**40 + 12_345, 1_234_567_890_123])
def test_an_estimate_is_exact_where_its_products_are_larger_than_a_double_can_hold(
    limiter: SyncLimiter, clock: ManualClock, taken: int
) -> None:
    window_us = 50 * 86_400 * 10**6
    start = 1_700_006_400_000_000 // window_us * window_us
    limit = SlidingWindowCounter(limit=2**41, window_seconds=50 * 86_400)
    clock.set_us(start)
    limiter.check(RESOURCE, SUBJECT, limits=limit, cost=taken)
    for elapsed in (0, 1, 7, 10**9 + 7, window_us // 3, window_us - 10**6 - 1, window_us - 1):
        clock.set_us(start + window_us + elapsed)
        used = taken * (window_us - elapsed) // window_us
        denied = limiter.check(RESOURCE, SUBJECT, limits=limit, cost=2**41 - used + 1) if used else None
        assert limiter.check(RESOURCE, SUBJECT, limits=limit, cost=0).remaining == 2**41 - used
        if denied is not None:
            wait = next(at for at in range(elapsed, elapsed + 9) if taken * (window_us - at) // window_us < used)
            assert denied.retry_after_ms == round_up_to_ms(wait - elapsed)
