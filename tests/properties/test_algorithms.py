"""Properties of every algorithm for random limits and histories: waits, remaining, reset and side effects."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from limitforge import Limit, Limits
from tests.properties.simulation import Simulation
from tests.properties.strategies import (
    ALGORITHMS,
    DAY_US,
    MAX_COST,
    TEN_YEARS_US,
    History,
    any_histories,
    any_limits,
    costs,
    counting_histories,
    fewer_examples,
    histories,
    pauses,
    starts,
)

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)

SHARES = {"P1": 90, "P2": 33, "P3": 0}
ONE, TWO, THREE = (any_limits(name=name) for name in ("one", "two", "three"))
MONITORED = any_limits(name="monitored", mode="monitor")
HISTORIES = any_histories(name="one")
MONITORED_HISTORIES = any_histories(name="monitored", mode="monitor")
SHARED_HISTORIES = any_histories(shares=SHARES)
COUNTING_HISTORIES = counting_histories()


def replayed(history: History, *, full: bool = False) -> Simulation:
    """Return a simulation after a history; `full` takes what is left."""
    simulation = Simulation(history.start_us)
    simulation.replay(history.limit, history.steps)
    if full:
        simulation.check(history.limit, simulation.peek(history.limit).remaining or 0)
    return simulation


# -- waits


@every_algorithm
@fewer_examples
@given(data=st.data())
def test_waiting_for_retry_after_is_enough_and_a_microsecond_less_is_not(algorithm: str, data: st.DataObject) -> None:
    history = data.draw(histories(algorithm))
    simulation = replayed(history, full=True)
    simulation.clock.advance_us(data.draw(pauses(history.limit)))
    cost = data.draw(costs(history.limit, least=1))
    decision = simulation.fork_later(0).check(history.limit, cost)
    wait_us = simulation.wait_us(history.limit, cost)
    if decision.allowed:
        assert (decision.retry_after_ms, wait_us) == (0, 0)
    elif decision.retry_after_ms is None:
        assert cost > (history.limit.size or 0)
        assert not simulation.fork_later(2 * TEN_YEARS_US).check(history.limit, cost).allowed
    else:
        assert decision.retry_after_ms == -(-wait_us // 1_000)
        assert simulation.fork_later(decision.retry_after_ms * 1_000).check(history.limit, cost).allowed
        assert simulation.fork_later(wait_us).check(history.limit, cost).allowed
        assert not simulation.fork_later(wait_us - 1).check(history.limit, cost).allowed


@given(data=st.data())
def test_limits_that_decide_together_wait_for_the_slowest_of_them(data: st.DataObject) -> None:
    drawn = [data.draw(ONE), data.draw(TWO), data.draw(THREE)]
    together = Limits(*drawn)
    least = min(limit.size or 0 for limit in drawn)
    simulation = Simulation(data.draw(starts()))
    for limit in drawn:  # each has a past of its own
        simulation.clock.advance_us(data.draw(pauses(limit)))
        simulation.check(limit, data.draw(st.integers(0, limit.size or 0)))
    cost = data.draw(st.integers(1, least))
    decision = simulation.fork_later(0).check(together, cost)
    wait_us = simulation.wait_us(together, cost)
    assert decision.allowed == (wait_us == 0)
    assert decision.retry_after_ms == -(-wait_us // 1_000)
    assert simulation.fork_later(wait_us).check(together, cost).allowed
    if wait_us:
        assert not simulation.fork_later(wait_us - 1).check(together, cost).allowed


@given(data=st.data(), priority=st.sampled_from(["P0", "P1", "P2", "P3"]))
def test_a_priority_with_a_share_waits_for_its_share(priority: str, data: st.DataObject) -> None:
    history = data.draw(SHARED_HISTORIES)
    simulation = replayed(history, full=True)
    cost = data.draw(costs(history.limit, least=1))
    decision = simulation.fork_later(0).check(history.limit, cost, priority=priority)
    wait_us = simulation.wait_us(history.limit, cost, priority)
    share = (history.limit.size or 0) * SHARES.get(priority, 100) // 100
    assert (decision.retry_after_ms is None) == (cost > share)
    assert decision.limit == history.limit.size
    if wait_us > 0:
        assert simulation.fork_later(wait_us).check(history.limit, cost, priority=priority).allowed
        assert not simulation.fork_later(wait_us - 1).check(history.limit, cost, priority=priority).allowed


# -- remaining


@every_algorithm
@fewer_examples
@given(data=st.data(), priority=st.sampled_from(["P0", "P1", "P2", "P3"]))
def test_what_remains_can_be_taken_and_one_more_cannot(algorithm: str, priority: str, data: st.DataObject) -> None:
    history = data.draw(histories(algorithm, {"shares": data.draw(st.sampled_from([{}, SHARES]))}))
    simulation = replayed(history)
    simulation.clock.advance_us(data.draw(pauses(history.limit)))
    remaining = simulation.peek(history.limit, priority=priority).remaining
    assert remaining is not None
    taken = simulation.fork_later(0).check(history.limit, remaining, priority=priority)
    assert taken.allowed
    assert taken.remaining == 0
    if remaining < MAX_COST:
        assert not simulation.fork_later(0).check(history.limit, remaining + 1, priority=priority).allowed


# -- reset


@every_algorithm
@fewer_examples
@given(data=st.data())
def test_after_its_reset_a_bucket_looks_untouched_and_a_microsecond_before_it_does_not(
    algorithm: str, data: st.DataObject
) -> None:
    history = data.draw(histories(algorithm))
    simulation = replayed(history)
    simulation.clock.advance_us(data.draw(pauses(history.limit)))
    peek, reset_us = simulation.peek(history.limit), simulation.reset_us(history.limit)
    assert peek.reset_after_ms == -(-reset_us // 1_000)
    assert peek.reset_at == -(-(simulation.now_us + reset_us) // 1_000_000)
    later = simulation.fork_later(reset_us)
    assert later.peek(history.limit) == Simulation(later.now_us).peek(history.limit)
    if peek.remaining != peek.limit:
        earlier = simulation.fork_later(reset_us - 1).peek(history.limit)
        assert earlier.remaining is not None
        assert earlier.remaining < (history.limit.size or 0)


# -- what leaves no trace


@every_algorithm
@fewer_examples
@given(data=st.data())
def test_a_denial_takes_nothing_from_any_limit(algorithm: str, data: st.DataObject) -> None:
    history = data.draw(histories(algorithm, {"name": "denies"}))
    roomy = data.draw(TWO)
    simulation = replayed(history, full=True)
    simulation.check(roomy, data.draw(st.integers(0, roomy.size or 0)))
    cost = data.draw(costs(history.limit, least=1))
    before, peeked = simulation.states(), simulation.peek([roomy, history.limit])
    decision = simulation.check([roomy, history.limit], cost)
    assume(not decision.allowed)
    assert simulation.store._states == before
    assert simulation.peek([roomy, history.limit]) == peeked
    assert decision.lease_id is None


@given(data=st.data())
def test_a_peek_is_always_allowed_and_changes_nothing(data: st.DataObject) -> None:
    history = data.draw(HISTORIES)
    simulation = replayed(history, full=data.draw(st.booleans()))
    before = simulation.states()
    peek = simulation.peek(history.limit)
    assert (peek.allowed, peek.retry_after_ms, peek.delay_ms, peek.lease_id) == (True, 0, None, None)
    assert simulation.store._states == before
    assert simulation.peek(history.limit) == peek


@given(data=st.data())
def test_a_clock_that_steps_back_stands_still(data: st.DataObject) -> None:
    history = data.draw(HISTORIES)
    simulation = replayed(history, full=True)
    assume(simulation.store._states)
    [state] = simulation.store._states.values()
    simulation.clock.set_us(state.last_us)
    cost = data.draw(costs(history.limit, least=1))
    back = simulation.fork_later(-data.draw(st.integers(1, 10**12)))
    then, now = back.check(history.limit, cost), simulation.check(history.limit, cost)
    assert (then.allowed, then.retry_after_ms, then.limits) == (now.allowed, now.retry_after_ms, now.limits)
    assert back.store._states.keys() == simulation.store._states.keys()
    assert all(state.last_us <= back.store._states[key].last_us for key in simulation.store._states)


# -- monitored limits


@given(data=st.data())
def test_a_monitored_limit_never_changes_what_the_enforced_ones_do(data: st.DataObject) -> None:
    history = data.draw(HISTORIES)
    other = data.draw(TWO)
    monitored = data.draw(MONITORED)
    with_it = data.draw(st.permutations([history.limit, other, monitored]))
    without = [limit for limit in with_it if limit is not monitored]
    one, two = Simulation(history.start_us), Simulation(history.start_us)
    for watched, plain in zip(one.replay(with_it, history.steps), two.replay(without, history.steps), strict=True):
        assert watched.allowed == plain.allowed
        assert watched.retry_after_ms == plain.retry_after_ms
        assert (watched.binding, watched.limit, watched.remaining) == (plain.binding, plain.limit, plain.remaining)
        assert (watched.reset_at, watched.delay_ms) == (plain.reset_at, plain.delay_ms)
        assert {name: watched.limits[name] for name in plain.limits} == plain.limits
        assert watched.would_deny == (() if watched.limits["monitored"].allowed else ("monitored",))


@given(data=st.data())
def test_a_monitored_limit_takes_only_what_was_allowed_and_had_room(data: st.DataObject) -> None:
    history = data.draw(MONITORED_HISTORIES)
    gate = Limits.parse("gate=fixed:7/second")["gate"]
    both: list[Limit] = [gate, history.limit]
    simulation = Simulation(history.start_us)
    for step in history.steps:
        simulation.clock.advance_us(step.after_us)
        room = simulation.peek(history.limit).limits["monitored"].remaining or 0
        decision = simulation.check(both, step.cost)
        taken = step.cost if decision.allowed and step.cost <= room else 0
        assert decision.limits["monitored"].remaining == room - taken
        assert decision.limits["monitored"].allowed == (step.cost <= room)


# -- settling


@given(data=st.data())
def test_settling_for_less_is_as_if_only_that_had_been_taken(data: st.DataObject) -> None:
    history = data.draw(COUNTING_HISTORIES)
    simulation = replayed(history)
    room = simulation.peek(history.limit).remaining or 0
    assume(room)
    estimate = data.draw(st.integers(1, room))
    real = data.draw(st.integers(1, estimate))
    other = simulation.fork_later(0)
    reserved = simulation.reserve(history.limit, estimate, ttl_seconds=TEN_YEARS_US // 10**6)
    other.check(history.limit, real)
    assert reserved.reservation_id is not None
    pause = min(data.draw(pauses(history.limit)), TEN_YEARS_US - 1)
    for each in (simulation, other):
        each.clock.advance_us(pause)
    settlement = simulation.limiter.settle(reserved.reservation_id, real)
    assert (settlement.outcome, settlement.cost) == ("settled", real)
    assert simulation.peek(history.limit) == other.peek(history.limit)
    assert simulation.limiter.settle(reserved.reservation_id, estimate) == settlement
    assert simulation.peek(history.limit) == other.peek(history.limit)


@given(data=st.data())
def test_settling_for_more_takes_the_rest_now_whether_or_not_there_is_room(data: st.DataObject) -> None:
    history = data.draw(COUNTING_HISTORIES)
    simulation = replayed(history)
    room = simulation.peek(history.limit).remaining or 0
    assume(room)
    estimate = data.draw(st.integers(1, room))
    more = data.draw(st.integers(1, 2 * (history.limit.size or 0)))
    other = simulation.fork_later(0)
    reserved = simulation.reserve(history.limit, estimate, ttl_seconds=TEN_YEARS_US // 10**6)
    other.check(history.limit, estimate)
    assert reserved.reservation_id is not None
    pause = min(data.draw(pauses(history.limit)), TEN_YEARS_US - 1)
    for each in (simulation, other):
        each.clock.advance_us(pause)
    simulation.limiter.settle(reserved.reservation_id, estimate + more)
    if other.check(history.limit, more).allowed:
        assert simulation.peek(history.limit) == other.peek(history.limit)
    else:
        assert simulation.peek(history.limit).remaining == 0


@given(data=st.data())
def test_a_reservation_that_lapses_by_refund_is_as_if_it_had_not_been_made(data: st.DataObject) -> None:
    history = data.draw(COUNTING_HISTORIES)
    simulation = replayed(history)
    room = simulation.peek(history.limit).remaining or 0
    assume(room > 1)
    other = simulation.fork_later(0)
    for each in (simulation, other):  # something else opens the same windows
        each.check(history.limit, 1)
    reserved = simulation.reserve(history.limit, data.draw(st.integers(1, room - 1)), ttl_seconds=1, on_lapse="refund")
    pause = 1_000_000 + data.draw(pauses(history.limit))
    for each in (simulation, other):
        each.clock.advance_us(pause)
    assert simulation.peek(history.limit) == other.peek(history.limit)
    if pause < DAY_US:  # longer than that no end of a reservation is remembered
        assert reserved.reservation_id is not None
        assert simulation.limiter.settle(reserved.reservation_id, 1).outcome == "lapsed"
        assert simulation.peek(history.limit) == other.peek(history.limit)


# -- blocked and unlimited


def resized(limit: Limit, size: int | None) -> Limit:
    changes: dict[str, Any] = {limit.size_field: size}
    return replace(limit, **changes)


@given(drawn=any_limits(), start_us=starts(), cost=st.integers(1, 2**52 - 1))
def test_a_blocked_limit_allows_nothing_ever_but_a_peek(drawn: Limit, start_us: int, cost: int) -> None:
    limit = resized(drawn, 0)
    simulation = Simulation(start_us)
    decision = simulation.check(limit, cost)
    assert (decision.allowed, decision.limit, decision.remaining, decision.retry_after_ms) == (False, 0, 0, None)
    peek = simulation.peek(limit)
    assert (peek.allowed, peek.limit, peek.remaining, peek.retry_after_ms) == (True, 0, 0, 0)
    assert len(simulation.store) == 0


@given(drawn=any_limits(), start_us=starts(), cost=st.integers(1, 2**52 - 1))
def test_an_unlimited_limit_allows_everything_and_keeps_nothing(drawn: Limit, start_us: int, cost: int) -> None:
    limit = resized(drawn, None)
    simulation = Simulation(start_us)
    decision = simulation.check(limit, cost)
    assert (decision.allowed, decision.retry_after_ms, decision.binding) == (True, 0, None)
    state = decision.limits[limit.name]
    assert (state.limit, state.remaining, state.allowed) == (None, None, True)
    assert len(simulation.store) == 0
