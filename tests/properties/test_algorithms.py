"""What every algorithm promises for random numbers and histories: waits, remaining, reset, and what it leaves alone."""

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
STORIES = any_histories(name="one")
MONITORED_STORIES = any_histories(name="monitored", mode="monitor")
SHARED_STORIES = any_histories(shares=SHARES)
COUNTING_STORIES = counting_histories()


def lived(story: History, *, full: bool = False) -> Simulation:
    """The world after a story; `full` takes what is left."""
    world = Simulation(story.start_us)
    world.replay(story.limit, story.steps)
    if full:
        world.check(story.limit, world.peek(story.limit).remaining or 0)
    return world


# -- waits


@every_algorithm
@fewer_examples
@given(data=st.data())
def test_waiting_as_long_as_told_is_enough_and_a_microsecond_less_is_not(algorithm: str, data: st.DataObject) -> None:
    story = data.draw(histories(algorithm))
    world = lived(story, full=True)
    world.clock.advance_us(data.draw(pauses(story.limit)))
    cost = data.draw(costs(story.limit, least=1))
    decision = world.fork_later(0).check(story.limit, cost)
    wait_us = world.wait_us(story.limit, cost)
    if decision.allowed:
        assert (decision.retry_after_ms, wait_us) == (0, 0)
    elif decision.retry_after_ms is None:
        assert cost > (story.limit.size or 0)
        assert not world.fork_later(2 * TEN_YEARS_US).check(story.limit, cost).allowed
    else:
        assert decision.retry_after_ms == -(-wait_us // 1_000)
        assert world.fork_later(decision.retry_after_ms * 1_000).check(story.limit, cost).allowed
        assert world.fork_later(wait_us).check(story.limit, cost).allowed
        assert not world.fork_later(wait_us - 1).check(story.limit, cost).allowed


@given(data=st.data())
def test_limits_that_decide_together_wait_for_the_slowest_of_them(data: st.DataObject) -> None:
    drawn = [data.draw(ONE), data.draw(TWO), data.draw(THREE)]
    together = Limits(*drawn)
    least = min(limit.size or 0 for limit in drawn)
    world = Simulation(data.draw(starts()))
    for limit in drawn:  # each has a past of its own
        world.clock.advance_us(data.draw(pauses(limit)))
        world.check(limit, data.draw(st.integers(0, limit.size or 0)))
    cost = data.draw(st.integers(1, least))
    decision = world.fork_later(0).check(together, cost)
    wait_us = world.wait_us(together, cost)
    assert decision.allowed == (wait_us == 0)
    assert decision.retry_after_ms == -(-wait_us // 1_000)
    assert world.fork_later(wait_us).check(together, cost).allowed
    if wait_us:
        assert not world.fork_later(wait_us - 1).check(together, cost).allowed


@given(data=st.data(), priority=st.sampled_from(["P0", "P1", "P2", "P3"]))
def test_a_priority_with_a_share_waits_for_its_share(priority: str, data: st.DataObject) -> None:
    story = data.draw(SHARED_STORIES)
    world = lived(story, full=True)
    cost = data.draw(costs(story.limit, least=1))
    decision = world.fork_later(0).check(story.limit, cost, priority=priority)
    wait_us = world.wait_us(story.limit, cost, priority)
    share = (story.limit.size or 0) * SHARES.get(priority, 100) // 100
    assert (decision.retry_after_ms is None) == (cost > share)
    assert decision.limit == story.limit.size
    if wait_us > 0:
        assert world.fork_later(wait_us).check(story.limit, cost, priority=priority).allowed
        assert not world.fork_later(wait_us - 1).check(story.limit, cost, priority=priority).allowed


# -- remaining


@every_algorithm
@fewer_examples
@given(data=st.data(), priority=st.sampled_from(["P0", "P1", "P2", "P3"]))
def test_what_remains_can_be_taken_and_one_more_cannot(algorithm: str, priority: str, data: st.DataObject) -> None:
    story = data.draw(histories(algorithm, {"shares": data.draw(st.sampled_from([{}, SHARES]))}))
    world = lived(story)
    world.clock.advance_us(data.draw(pauses(story.limit)))
    remaining = world.peek(story.limit, priority=priority).remaining
    assert remaining is not None
    taken = world.fork_later(0).check(story.limit, remaining, priority=priority)
    assert taken.allowed
    assert taken.remaining == 0
    if remaining < MAX_COST:
        assert not world.fork_later(0).check(story.limit, remaining + 1, priority=priority).allowed


# -- reset


@every_algorithm
@fewer_examples
@given(data=st.data())
def test_after_its_reset_a_bucket_looks_untouched_and_a_microsecond_before_it_does_not(
    algorithm: str, data: st.DataObject
) -> None:
    story = data.draw(histories(algorithm))
    world = lived(story)
    world.clock.advance_us(data.draw(pauses(story.limit)))
    look, reset_us = world.peek(story.limit), world.reset_us(story.limit)
    assert look.reset_after_ms == -(-reset_us // 1_000)
    assert look.reset_at == -(-(world.now_us + reset_us) // 1_000_000)
    later = world.fork_later(reset_us)
    assert later.peek(story.limit) == Simulation(later.now_us).peek(story.limit)
    if look.remaining != look.limit:
        earlier = world.fork_later(reset_us - 1).peek(story.limit)
        assert earlier.remaining is not None
        assert earlier.remaining < (story.limit.size or 0)


# -- what leaves no trace


@every_algorithm
@fewer_examples
@given(data=st.data())
def test_a_denial_takes_nothing_from_any_limit(algorithm: str, data: st.DataObject) -> None:
    story = data.draw(histories(algorithm, {"name": "denies"}))
    roomy = data.draw(TWO)
    world = lived(story, full=True)
    world.check(roomy, data.draw(st.integers(0, roomy.size or 0)))
    cost = data.draw(costs(story.limit, least=1))
    before, looked = world.states(), world.peek([roomy, story.limit])
    decision = world.check([roomy, story.limit], cost)
    assume(not decision.allowed)
    assert world.store._states == before
    assert world.peek([roomy, story.limit]) == looked
    assert decision.lease_id is None


@given(data=st.data())
def test_a_look_is_always_allowed_and_changes_nothing(data: st.DataObject) -> None:
    story = data.draw(STORIES)
    world = lived(story, full=data.draw(st.booleans()))
    before = world.states()
    look = world.peek(story.limit)
    assert (look.allowed, look.retry_after_ms, look.delay_ms, look.lease_id) == (True, 0, None, None)
    assert world.store._states == before
    assert world.peek(story.limit) == look


@given(data=st.data())
def test_a_clock_that_steps_back_stands_still(data: st.DataObject) -> None:
    story = data.draw(STORIES)
    world = lived(story, full=True)
    assume(world.store._states)
    [state] = world.store._states.values()
    world.clock.set_us(state.last)
    cost = data.draw(costs(story.limit, least=1))
    back = world.fork_later(-data.draw(st.integers(1, 10**12)))
    then, now = back.check(story.limit, cost), world.check(story.limit, cost)
    assert (then.allowed, then.retry_after_ms, then.limits) == (now.allowed, now.retry_after_ms, now.limits)
    assert back.store._states.keys() == world.store._states.keys()
    assert all(state.last <= back.store._states[key].last for key in world.store._states)


# -- monitored limits


@given(data=st.data())
def test_a_monitored_limit_never_changes_what_the_enforced_ones_do(data: st.DataObject) -> None:
    story = data.draw(STORIES)
    other = data.draw(TWO)
    monitored = data.draw(MONITORED)
    with_it = data.draw(st.permutations([story.limit, other, monitored]))
    without = [limit for limit in with_it if limit is not monitored]
    one, two = Simulation(story.start_us), Simulation(story.start_us)
    for watched, plain in zip(one.replay(with_it, story.steps), two.replay(without, story.steps), strict=True):
        assert watched.allowed == plain.allowed
        assert watched.retry_after_ms == plain.retry_after_ms
        assert (watched.binding, watched.limit, watched.remaining) == (plain.binding, plain.limit, plain.remaining)
        assert (watched.reset_at, watched.delay_ms) == (plain.reset_at, plain.delay_ms)
        assert {name: watched.limits[name] for name in plain.limits} == plain.limits
        assert watched.would_deny == (() if watched.limits["monitored"].allowed else ("monitored",))


@given(data=st.data())
def test_a_monitored_limit_takes_only_what_was_allowed_and_had_room(data: st.DataObject) -> None:
    story = data.draw(MONITORED_STORIES)
    gate = Limits.parse("gate=fixed:7/second")["gate"]
    both: list[Limit] = [gate, story.limit]
    world = Simulation(story.start_us)
    for step in story.steps:
        world.clock.advance_us(step.after_us)
        room = world.peek(story.limit).limits["monitored"].remaining or 0
        decision = world.check(both, step.cost)
        taken = step.cost if decision.allowed and step.cost <= room else 0
        assert decision.limits["monitored"].remaining == room - taken
        assert decision.limits["monitored"].allowed == (step.cost <= room)


# -- settling


@given(data=st.data())
def test_settling_for_less_is_as_if_only_that_had_been_taken(data: st.DataObject) -> None:
    story = data.draw(COUNTING_STORIES)
    world = lived(story)
    room = world.peek(story.limit).remaining or 0
    assume(room)
    estimate = data.draw(st.integers(1, room))
    real = data.draw(st.integers(1, estimate))
    other = world.fork_later(0)
    reserved = world.reserve(story.limit, estimate, ttl_seconds=TEN_YEARS_US // 10**6)
    other.check(story.limit, real)
    assert reserved.reservation_id is not None
    pause = min(data.draw(pauses(story.limit)), TEN_YEARS_US - 1)
    for each in (world, other):
        each.clock.advance_us(pause)
    settlement = world.limiter.settle(reserved.reservation_id, real)
    assert (settlement.outcome, settlement.cost) == ("settled", real)
    assert world.peek(story.limit) == other.peek(story.limit)
    assert world.limiter.settle(reserved.reservation_id, estimate) == settlement
    assert world.peek(story.limit) == other.peek(story.limit)


@given(data=st.data())
def test_settling_for_more_takes_the_rest_now_whether_or_not_there_is_room(data: st.DataObject) -> None:
    story = data.draw(COUNTING_STORIES)
    world = lived(story)
    room = world.peek(story.limit).remaining or 0
    assume(room)
    estimate = data.draw(st.integers(1, room))
    more = data.draw(st.integers(1, 2 * (story.limit.size or 0)))
    other = world.fork_later(0)
    reserved = world.reserve(story.limit, estimate, ttl_seconds=TEN_YEARS_US // 10**6)
    other.check(story.limit, estimate)
    assert reserved.reservation_id is not None
    pause = min(data.draw(pauses(story.limit)), TEN_YEARS_US - 1)
    for each in (world, other):
        each.clock.advance_us(pause)
    world.limiter.settle(reserved.reservation_id, estimate + more)
    if other.check(story.limit, more).allowed:
        assert world.peek(story.limit) == other.peek(story.limit)
    else:
        assert world.peek(story.limit).remaining == 0


@given(data=st.data())
def test_a_reservation_that_lapses_by_refund_is_as_if_it_had_not_been_made(data: st.DataObject) -> None:
    story = data.draw(COUNTING_STORIES)
    world = lived(story)
    room = world.peek(story.limit).remaining or 0
    assume(room > 1)
    other = world.fork_later(0)
    for each in (world, other):  # something else opens the same windows
        each.check(story.limit, 1)
    reserved = world.reserve(story.limit, data.draw(st.integers(1, room - 1)), ttl_seconds=1, on_lapse="refund")
    pause = 1_000_000 + data.draw(pauses(story.limit))
    for each in (world, other):
        each.clock.advance_us(pause)
    assert world.peek(story.limit) == other.peek(story.limit)
    if pause < DAY_US:  # longer than that no end of a reservation is remembered
        assert reserved.reservation_id is not None
        assert world.limiter.settle(reserved.reservation_id, 1).outcome == "lapsed"
        assert world.peek(story.limit) == other.peek(story.limit)


# -- blocked and unlimited


def resized(limit: Limit, size: int | None) -> Limit:
    changes: dict[str, Any] = {limit.size_field: size}
    return replace(limit, **changes)


@given(drawn=any_limits(), start_us=starts(), cost=st.integers(1, 2**52 - 1))
def test_a_blocked_limit_allows_nothing_ever_but_a_look(drawn: Limit, start_us: int, cost: int) -> None:
    limit = resized(drawn, 0)
    world = Simulation(start_us)
    decision = world.check(limit, cost)
    assert (decision.allowed, decision.limit, decision.remaining, decision.retry_after_ms) == (False, 0, 0, None)
    look = world.peek(limit)
    assert (look.allowed, look.limit, look.remaining, look.retry_after_ms) == (True, 0, 0, 0)
    assert len(world.store) == 0


@given(drawn=any_limits(), start_us=starts(), cost=st.integers(1, 2**52 - 1))
def test_an_unlimited_limit_allows_everything_and_keeps_nothing(drawn: Limit, start_us: int, cost: int) -> None:
    limit = resized(drawn, None)
    world = Simulation(start_us)
    decision = world.check(limit, cost)
    assert (decision.allowed, decision.retry_after_ms, decision.binding) == (True, 0, None)
    state = decision.limits[limit.name]
    assert (state.limit, state.remaining, state.allowed) == (None, None, True)
    assert len(world.store) == 0
