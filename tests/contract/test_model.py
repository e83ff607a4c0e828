"""Redis against the model of the properties: what is admitted, what remains, waits and resets, to the microsecond.

The differential compares two engines that one author wrote; this compares one of them with the definitions.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limitforge import Decision, LeakyBucket, ManualClock, SyncLimiter
from tests.contract.conftest import PATIENT
from tests.properties.model import reset_us, shown_ms, wait_us
from tests.properties.oracles import Oracle, oracle_of
from tests.properties.strategies import ALGORITHMS, Story, costs, pauses, stories
from tests.properties.test_admission import key_of
from tests.properties.world import RESOURCE, SUBJECT

# A priority with a share takes the long way through the script, one without the short one.
SHARES = {"P1": 90, "P2": 33}
EXAMPLES = 20


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

    def __init__(self, limiter: SyncLimiter, clock: ManualClock, story: Story) -> None:
        self.limiter, self.clock, self.limit = limiter, clock, story.limit
        clock.set_us(story.start_us)
        limiter.reset(RESOURCE, SUBJECT, limits=story.limit)
        self.oracle: Oracle = oracle_of(story.limit, key_of(story.limit))

    def share(self, priority: str) -> int:
        return self.oracle.size * self.limit.shares.get(priority, 100) // 100

    def check(self, cost: int, priority: str) -> Decision:
        """Ask both, and compare all that is told."""
        oracle, now_us, share = self.oracle, self.clock.now_us(), self.share(priority)
        wait = wait_us(oracle, now_us, cost, share)
        delay = reset_us(oracle, now_us) if isinstance(self.limit, LeakyBucket) and cost and wait == 0 else None
        if wait == 0:
            oracle.take(now_us, cost)
        decision = self.limiter.check(RESOURCE, SUBJECT, limits=self.limit, cost=cost, priority=priority)
        reset = reset_us(oracle, now_us)
        assert decision.allowed == (wait == 0)
        assert decision.retry_after_ms == (None if wait is None else shown_ms(wait))
        assert decision.remaining == max(int((share - oracle.used(now_us)) // 1), 0)
        assert decision.reset_after_ms == shown_ms(reset)
        assert decision.reset_at == ceil(Fraction(now_us + reset, 10**6))
        assert decision.delay_ms == (None if delay is None else shown_ms(delay))
        return decision


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_redis_keeps_to_the_definition(
    algorithm: str, limiter: SyncLimiter, clock: ManualClock, data: st.DataObject
) -> None:
    shares = data.draw(st.sampled_from([{}, SHARES]))
    story = data.draw(stories(algorithm, {"shares": shares}))
    priorities = st.sampled_from(["P0", "P1", "P2"] if shares else ["P0"])
    twins = Twins(limiter, clock, story)
    for step in story.steps:
        clock.advance_us(step.after_us)
        twins.check(step.cost, data.draw(priorities))
    twins.check(twins.check(0, "P0").remaining or 0, "P0")  # full
    clock.advance_us(data.draw(pauses(story.limit)))
    priority, cost = data.draw(priorities), data.draw(costs(story.limit, least=1))
    wait = wait_us(twins.oracle, clock.now_us(), cost, twins.share(priority))
    if wait:
        clock.advance_us(wait - 1)
        assert not twins.check(cost, priority).allowed
        clock.advance_us(1)
    if wait is not None:
        assert twins.check(cost, priority).allowed


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "concurrency"])
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_redis_counts_denials_as_the_definition_says(
    algorithm: str, limiter: SyncLimiter, clock: ManualClock, data: st.DataObject
) -> None:
    story = data.draw(stories(algorithm, {"count_denied": True}, long=True))
    twins = Twins(limiter, clock, story)
    for step in story.steps:
        clock.advance_us(step.after_us)
        allowed = twins.oracle.check(clock.now_us(), step.cost)
        decision = limiter.check(RESOURCE, SUBJECT, limits=story.limit, cost=step.cost)
        assert decision.allowed == allowed
        assert decision.remaining == max(int((twins.oracle.size - twins.oracle.used(clock.now_us())) // 1), 0)
        wait = wait_us(twins.oracle, clock.now_us(), step.cost, twins.oracle.size)
        if not allowed:
            assert decision.retry_after_ms == (None if wait is None else shown_ms(wait))
