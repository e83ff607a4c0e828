"""Waits and resets against a model that finds them by search: from what was taken and when, in exact fractions.

The engine derives a wait and an admission from the same formula, so each can hide a mistake in the other.
`contract/test_model.py` asks the same of Redis.
"""

from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limitforge import LeakyBucket, TokenBucket
from tests.properties.oracles import Oracle, build_oracle
from tests.properties.search import reset_us, round_up_to_ms, search_first_us, wait_us
from tests.properties.simulation import Simulation
from tests.properties.strategies import ALGORITHMS, History, costs, histories, pauses
from tests.properties.test_admission import bucket_key

SHARES = {"P1": 90, "P2": 33, "P3": 0}
EXAMPLES = 40

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def replayed(history: History) -> tuple[Simulation, Oracle]:
    """The engine and the model after the same history, with no room left."""
    simulation, oracle = Simulation(history.start_us), build_oracle(history.limit, bucket_key(history.limit))
    for step in history.steps:
        simulation.clock.advance_us(step.after_us)
        simulation.check(history.limit, step.cost)
        oracle.check(simulation.now_us, step.cost)
    left = simulation.peek(history.limit).remaining or 0
    simulation.check(history.limit, left)
    oracle.check(simulation.now_us, left)
    return simulation, oracle


@every_algorithm
@settings(max_examples=EXAMPLES)
@given(data=st.data(), priority=st.sampled_from(["P0", "P0", "P1", "P2", "P3"]))
def test_a_wait_is_the_first_instant_at_which_the_definition_has_room(
    algorithm: str, priority: str, data: st.DataObject
) -> None:
    history = data.draw(histories(algorithm, {"shares": data.draw(st.sampled_from([{}, SHARES]))}))
    simulation, oracle = replayed(history)
    simulation.clock.advance_us(data.draw(pauses(history.limit)))
    cost = data.draw(costs(history.limit, least=1))
    share = oracle.size * history.limit.shares.get(priority, 100) // 100
    expected = wait_us(oracle, simulation.now_us, cost, share)
    [row] = simulation.evaluate(history.limit, cost, priority).rows
    assert row[3] == (-1 if expected is None else expected)
    decision = simulation.fork_later(0).check(history.limit, cost, priority=priority)
    assert decision.allowed == (expected == 0)
    assert decision.retry_after_ms == (None if expected is None else round_up_to_ms(expected))
    if expected:
        assert not simulation.fork_later(expected - 1).check(history.limit, cost, priority=priority).allowed
        assert simulation.fork_later(expected).check(history.limit, cost, priority=priority).allowed


@every_algorithm
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_reset_is_the_first_instant_at_which_nothing_is_in_use(algorithm: str, data: st.DataObject) -> None:
    history = data.draw(histories(algorithm))
    simulation, oracle = replayed(history)
    simulation.clock.advance_us(data.draw(pauses(history.limit)))
    peek, expected = simulation.peek(history.limit), reset_us(oracle, simulation.now_us)
    assert simulation.reset_us(history.limit) == expected
    assert peek.reset_after_ms == round_up_to_ms(expected)
    assert peek.reset_at == ceil(Fraction(simulation.now_us + expected, 10**6))
    assert peek.remaining == max(int((oracle.size - oracle.used(simulation.now_us)) // 1), 0)


@settings(max_examples=EXAMPLES)
@given(history=histories("leaky_bucket", {"count_denied": True}))
def test_what_a_leaky_bucket_takes_waits_until_what_came_before_has_drained(history: History) -> None:
    simulation, oracle = Simulation(history.start_us), build_oracle(history.limit, bucket_key(history.limit))
    for step in history.steps:
        simulation.clock.advance_us(step.after_us)
        delay_us = search_first_us(lambda at: not oracle.used(at), simulation.now_us)
        decision = simulation.check(history.limit, step.cost)
        allowed = oracle.check(simulation.now_us, step.cost)
        assert decision.delay_ms == (round_up_to_ms(delay_us) if allowed and step.cost else None)


RATES = [(7, "2.333333"), (1, "0.000003"), (10, 7), (3, 100 / 60), (5, 2.5), (1_000_000, 999_983)]


@pytest.mark.parametrize("kind", [TokenBucket, LeakyBucket])
@pytest.mark.parametrize(("capacity", "rate"), RATES)
def test_a_bucket_has_room_for_one_more_not_a_microsecond_before_it_has_refilled(
    kind: Any, capacity: int, rate: float | str
) -> None:
    """Rates that do not divide a token evenly: where a wait that is rounded down admits too early."""
    name = "refill_rate_per_sec" if kind is TokenBucket else "leak_rate_per_sec"
    limit = kind(bucket_capacity=capacity, **{name: rate})
    exact = Fraction(5, 3) if rate == 100 / 60 else Fraction(str(rate))
    simulation = Simulation(1_700_000_000_000_000)
    assert simulation.check(limit, capacity).allowed
    for cost in range(1, min(capacity, 5) + 1):
        wait = ceil(cost / exact * 10**6)
        assert simulation.wait_us(limit, cost) == wait
        assert not simulation.fork_later(wait - 1).check(limit, cost).allowed
        assert simulation.fork_later(wait).check(limit, cost).allowed
