"""What is admitted: exactly what the definition of each algorithm says, and never more in any interval."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from limitforge import Concurrency, Limit, Limits, Quota, SlidingWindowCounter
from limitforge.core.calendar import Period
from limitforge.core.keys import Keys, Layer
from limitforge.core.limits import Scope
from tests.properties.oracles import build_oracle, local_date, period_of, window_us
from tests.properties.simulation import RESOURCE, SUBJECT, Simulation
from tests.properties.strategies import (
    ALGORITHMS,
    COUNTING,
    DAY_US,
    History,
    durations,
    fewer_examples,
    histories,
    limits,
    pauses,
    starts,
)

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def bucket_key(limit: Limit) -> str:
    keys = Keys()
    home = keys.tenant_keys("default")
    base = keys.bucket_prefix(Scope.SUBJECT, Layer.POLICY, home, home.tenant_prefix, RESOURCE, SUBJECT)
    return f"{base}{limit.name}:{limit.compiled.letter}{limit.shape}".removeprefix("lf:")


def holds_to_its_definition(history: History) -> None:
    simulation, oracle = Simulation(history.start_us), build_oracle(history.limit, bucket_key(history.limit))
    for step in history.steps:
        simulation.clock.advance_us(step.after_us)
        decision = simulation.check(history.limit, step.cost)
        assert decision.allowed == oracle.check(simulation.now_us, step.cost)
        assert decision.remaining == max(int((oracle.size - oracle.used(simulation.now_us)) // 1), 0)


@every_algorithm
@fewer_examples
@given(data=st.data())
def test_a_check_is_allowed_exactly_if_the_definition_has_room_for_it(algorithm: str, data: st.DataObject) -> None:
    holds_to_its_definition(data.draw(histories(algorithm, long=True)))


@pytest.mark.parametrize("algorithm", COUNTING)
@fewer_examples
@given(data=st.data())
def test_counted_denials_take_their_cost_up_to_twice_the_limit(algorithm: str, data: st.DataObject) -> None:
    holds_to_its_definition(data.draw(histories(algorithm, {"count_denied": True}, long=True)))


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window_counter", "quota"])
@fewer_examples
@given(data=st.data())
def test_two_definitions_of_one_name_in_alternation_each_hold_to_their_own(algorithm: str, data: st.DataObject) -> None:
    history = data.draw(histories(algorithm, {"name": "same"}, long=True))
    other = data.draw(limits(algorithm, {"name": "same"}))
    assume(other.shape != history.limit.shape)
    simulation = Simulation(history.start_us)
    both = [(limit, build_oracle(limit, bucket_key(limit))) for limit in (history.limit, other)]
    for step in history.steps:
        simulation.clock.advance_us(step.after_us)
        limit, oracle = data.draw(st.sampled_from(both))
        cost = min(step.cost, (limit.size or 0) + 1)
        assert simulation.check(limit, cost).allowed == oracle.check(simulation.now_us, cost)


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window_counter"])
@fewer_examples
@given(data=st.data())
def test_a_count_begins_anew_only_where_an_override_gives_it_another_window(
    algorithm: str, data: st.DataObject
) -> None:
    """The window of the last cost that was taken counts: an override without any check changes nothing."""
    history = data.draw(histories(algorithm, {"name": "same"}, long=True))
    plan, windows = history.limit, [None, *data.draw(st.lists(durations(DAY_US), min_size=1, max_size=2))]
    simulation, key = Simulation(history.start_us), bucket_key(plan)
    counted, oracle = plan, build_oracle(plan, key)
    for step in history.steps:
        simulation.clock.advance_us(step.after_us)
        window = data.draw(st.sampled_from(windows))
        if window is None:
            simulation.limiter.delete_override(RESOURCE, SUBJECT)
        else:
            change = {"same": {"window_seconds": window}}
            simulation.limiter.set_override(RESOURCE, SUBJECT, change, limits=plan, ttl_seconds=3 * 10**8)
        limit = plan if window is None else replace(plan, window_seconds=window)  # type: ignore[call-arg]
        expected = oracle if limit == counted else build_oracle(limit, key)
        allowed = expected.check(simulation.now_us, step.cost)
        assert simulation.check(plan, step.cost).allowed == allowed
        if allowed and step.cost:
            counted, oracle = limit, expected


# -- bounds over stretches of time


def greedy(data: st.DataObject, algorithm: str) -> tuple[Limit, list[tuple[int, int]]]:
    """Draw a limit, and what a caller gets who always takes some or all of what is left: (when, how much)."""
    history = data.draw(histories(algorithm, long=True))
    simulation = Simulation(history.start_us)
    admitted = []
    for step in history.steps:
        simulation.clock.advance_us(step.after_us)
        left = simulation.peek(history.limit).remaining or 0
        cost = min(step.cost, left)
        assert simulation.check(history.limit, cost).allowed
        admitted.append((simulation.now_us, cost))
    return history.limit, admitted


def stretches(admitted: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Every stretch of time from one admission to another: (first, last, what was admitted meanwhile)."""
    return [
        (admitted[i][0], admitted[j][0], sum(cost for _, cost in admitted[i : j + 1]))
        for i in range(len(admitted))
        for j in range(i, len(admitted))
    ]


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket"])
@fewer_examples
@given(data=st.data())
def test_a_bucket_admits_its_capacity_and_what_the_rate_adds(algorithm: str, data: st.DataObject) -> None:
    limit, admitted = greedy(data, algorithm)
    steps: Any = limit.compiled
    for first_us, last_us, total in stretches(admitted):
        assert total * steps.per_us <= steps.limit * steps.per_us + (last_us - first_us) * steps.tokens


@given(data=st.data())
def test_what_waits_its_delay_leaves_a_leaky_bucket_at_its_rate(data: st.DataObject) -> None:
    history = data.draw(histories("leaky_bucket", long=True))
    steps: Any = history.limit.compiled
    per_ms = Fraction(steps.tokens * 1_000, steps.per_us)
    simulation = Simulation(history.start_us)
    left: list[tuple[Fraction, int]] = []
    for step in history.steps:
        simulation.clock.advance_us(step.after_us)
        decision = simulation.check(history.limit, step.cost)
        assert (decision.delay_ms is not None) == (decision.allowed and step.cost > 0)
        if decision.delay_ms is not None:
            left.append((Fraction(simulation.now_us, 1_000) + decision.delay_ms, step.cost))
    for i in range(len(left)):
        for j in range(i + 1, len(left)):
            before = sum(cost for _, cost in left[i:j])
            assert left[j][0] - left[i][0] > before / per_ms - 1  # a delay is rounded up to a millisecond


@given(data=st.data())
def test_a_log_admits_its_limit_in_any_window(data: st.DataObject) -> None:
    limit, admitted = greedy(data, "sliding_window")
    for first_us, last_us, total in stretches(admitted):
        if last_us - first_us < window_us(limit):
            assert total <= (limit.size or 0)


@given(data=st.data())
def test_a_fixed_window_admits_its_limit_in_its_windows_and_twice_that_across_an_edge(data: st.DataObject) -> None:
    limit, admitted = greedy(data, "fixed_window")
    for first_us, last_us, total in stretches(admitted):
        if last_us - first_us < window_us(limit):
            assert total <= 2 * (limit.size or 0)


@given(data=st.data())
def test_a_quota_admits_its_limit_in_each_period_of_its_calendar(data: st.DataObject) -> None:
    limit, admitted = greedy(data, "quota")
    assert isinstance(limit, Quota)
    per_period: Counter[int] = Counter()
    for at_us, cost in admitted:
        day = local_date(at_us, ZoneInfo(limit.time_zone))
        per_period[period_of(day, Period(limit.period), int(limit.anchor_day))] += cost
    assert all(total <= (limit.size or 0) for total in per_period.values())


@given(data=st.data())
def test_a_counter_exceeds_its_limit_by_at_most_what_fades_meanwhile(data: st.DataObject) -> None:
    """Over a stretch of T within a window W: at most L + ceil(L * T / W). So twice the limit in a window at most."""
    limit, admitted = greedy(data, "sliding_window_counter")
    size, window = limit.size or 0, window_us(limit)
    per_window: Counter[int] = Counter()
    for at_us, cost in admitted:
        per_window[at_us // window] += cost
    assert all(total <= size for total in per_window.values())
    for first_us, last_us, total in stretches(admitted):
        if last_us - first_us < window:
            assert total <= size + ceil(Fraction(size * (last_us - first_us), window)) <= 2 * size


def test_a_counter_can_let_twice_its_limit_pass_within_one_window() -> None:
    limit = SlidingWindowCounter(limit=100, window_seconds=60)
    window = 60_000_000
    edge_us = 28_333_334 * window
    simulation = Simulation(edge_us - 1)
    assert simulation.check(limit, 100).allowed
    admitted = 0
    for elapsed_us in range(0, window - 1, 600_000):
        simulation.clock.set_us(edge_us + elapsed_us)
        admitted += sum(simulation.check(limit).allowed for _ in range(3))
    simulation.clock.set_us(edge_us + window - 2)
    admitted += sum(simulation.check(limit).allowed for _ in range(3))
    assert admitted == 100


@pytest.mark.parametrize("size", [1, 2, 100, 1_000_000])
def test_across_an_edge_a_counter_lets_only_one_more_pass_at_once(size: int) -> None:
    limit = SlidingWindowCounter(limit=size, window_seconds=60)
    edge_us = 28_333_334 * 60_000_000
    simulation = Simulation(edge_us - 1)
    assert simulation.check(limit, size).allowed
    simulation.clock.set_us(edge_us)
    assert not simulation.check(limit).allowed
    simulation.clock.set_us(edge_us + 1)
    assert simulation.check(limit).allowed
    assert not simulation.check(limit).allowed


# -- leases


@given(data=st.data())
def test_live_leases_never_hold_more_slots_than_there_are(data: st.DataObject) -> None:
    limit = data.draw(limits("concurrency"))
    assert isinstance(limit, Concurrency)
    ttl_us, size = window_us(limit), limit.size or 0
    simulation = Simulation(data.draw(starts()))
    held: dict[str, tuple[int, int]] = {}  # (stale from, slots)
    for _ in range(data.draw(st.integers(1, 25))):
        simulation.clock.advance_us(data.draw(pauses(limit)))
        live = {lease: slots for lease, (until_us, slots) in held.items() if until_us > simulation.now_us}
        action = data.draw(st.sampled_from(["take", "take", "release", "renew"]))
        if action == "take" or not held:
            cost = data.draw(st.integers(1, size))
            decision = simulation.check(limit, cost)
            assert decision.allowed == (sum(live.values()) + cost <= size)
            assert (decision.lease_id is not None) == decision.allowed
            if decision.lease_id is not None:
                held[decision.lease_id] = (simulation.now_us + ttl_us, cost)
        else:
            lease = data.draw(st.sampled_from(list(held)))
            if action == "release":
                simulation.limiter.release(lease)
                del held[lease]
            else:
                assert simulation.limiter.renew(lease) == (lease in live)
                if lease in live:
                    held[lease] = (simulation.now_us + ttl_us, live[lease])
        in_use = sum(slots for until_us, slots in held.values() if until_us > simulation.now_us)
        assert simulation.peek(limit).remaining == size - in_use


# -- shares


@every_algorithm
@fewer_examples
@given(data=st.data())
def test_a_priority_never_takes_use_above_its_share(algorithm: str, data: st.DataObject) -> None:
    shares = {"P1": data.draw(st.integers(0, 100)), "P2": data.draw(st.integers(0, 100))}
    history = data.draw(histories(algorithm, {"shares": shares}))
    simulation, oracle = Simulation(history.start_us), build_oracle(history.limit, bucket_key(history.limit))
    for step in history.steps:
        simulation.clock.advance_us(step.after_us)
        priority = data.draw(st.sampled_from(["P0", "P1", "P2", "P3"]))
        share = (history.limit.size or 0) * shares.get(priority, 100) // 100
        used = oracle.used(simulation.now_us)
        decision = simulation.check(history.limit, step.cost, priority=priority)
        assert decision.allowed == (step.cost == 0 or used + step.cost <= share)
        if decision.allowed:
            oracle.take(simulation.now_us, step.cost)
        assert decision.remaining == max(int((share - oracle.used(simulation.now_us)) // 1), 0)


def test_the_text_of_a_bucket_admits_exactly_its_number_per_window() -> None:
    for text in ("token:50/minute", "leaky:50/minute", "token:7/3 seconds"):
        [limit] = Limits.parse(text)
        window = {"token:7/3 seconds": 3_000_000}.get(text, 60_000_000)
        simulation = Simulation(1_700_006_400_000_000)
        assert simulation.check(limit, limit.size or 0).allowed
        admitted = 0
        for elapsed_us in range(0, 10 * window + 1, window // 200):
            simulation.clock.set_us(1_700_006_400_000_000 + elapsed_us)
            admitted += sum(simulation.check(limit).allowed for _ in range(2))
        assert admitted == 10 * (limit.size or 0)
