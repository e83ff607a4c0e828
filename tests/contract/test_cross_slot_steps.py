"""A check over several slots, step by step: each limit is in a slot of its own, and any message may be lost."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis as redis_py

from limitforge import Concurrency, FixedWindow, LeakyBucket, Limit, StoreUnavailable, TokenBucket, TooManyReservations
from limitforge.core.check import Check, Hold
from limitforge.core.decision import Outcome
from limitforge.core.limits import Mode
from limitforge.stores.redis.codec import check_flow
from limitforge.stores.redis.multi_step.cross_slot import (
    TENTATIVE_TTL_US,
    CrossSlotResult,
    FinishHold,
    HoldAction,
    Step,
    cross_slot_steps,
    is_cross_slot,
)
from limitforge.stores.redis.topology.hash_slots import SlotOf
from tests.contract.script_client import NOW_US, TOKEN, ScriptClient, check_for, key_of

MINUTE_US = 60_000_000
A, B, C = (FixedWindow(name=name, limit=10, window_seconds=86_400) for name in "abc")
GLOBAL = FixedWindow(name="global", limit=10, window_seconds=86_400, scope="global")
SMALL = FixedWindow(name="small", limit=1, window_seconds=86_400)
SLOTS = Concurrency(name="slots", max_concurrent=10, lease_ttl_seconds=600)
MONITORED = FixedWindow(name="monitored", limit=1, window_seconds=86_400, mode=Mode.MONITOR)

Fate = Callable[[Step], StoreUnavailable | None]
NOT_SENT, UNSURE = StoreUnavailable("not sent"), StoreUnavailable("no answer", maybe_counted=True)


@pytest.fixture
def script(redis_url: str) -> Iterator[ScriptClient]:
    with redis_py.Redis.from_url(redis_url) as client:
        yield ScriptClient(client)


def slot_of(key: str | bytes) -> int:
    return zlib.crc32(key if isinstance(key, bytes) else key.encode())


def deliver(_: Step) -> None: ...


def run_check(
    script: ScriptClient,
    *limits: Limit,
    cost: int = 2,
    hold: Hold | None = None,
    fate: Fate = deliver,
    slot_of: SlotOf = slot_of,
) -> CrossSlotResult:
    """Run each step of a check, or lose it. An unsent step does not arrive. For any other fate, the reply is lost."""
    check = check_for(*limits, cost=cost)
    check.hold = hold
    flow = cross_slot_steps(check, slot_of)
    answers: list[Any] = []
    try:
        steps = next(flow)
        while True:
            answers = [run_step(script, step, fate(step)) for step in steps]
            steps = flow.send(answers)
    except StopIteration as done:
        ended: CrossSlotResult = done.value
        return ended


def run_step(script: ScriptClient, step: Step, lost: StoreUnavailable | None) -> Any:
    if lost is NOT_SENT:
        return lost
    if isinstance(step, FinishHold):
        (reply,) = script.finish(step)
    else:
        (reply,) = script.run(check_flow([step], script.now_us, script.now_us))
    return lost or reply


def lose(limit: Limit, kind: type[Check] | HoldAction, how: StoreUnavailable) -> Fate:
    """Lose the message to one slot: its check, or the end of its hold."""

    def fate(step: Step) -> StoreUnavailable | None:
        if isinstance(step, FinishHold):
            return how if step.action is kind and step.keys == [key_of(limit)] else None
        is_its = kind is Check and any(take[1] == key_of(limit) for take in step.debits)
        return how if is_its else None

    return fate


def remaining(script: ScriptClient, *limits: Limit) -> list[int]:
    return [script.remaining(limit) for limit in limits]


def test_a_check_with_room_in_all_slots_stays_charged(script: ScriptClient) -> None:
    outcome, undone = run_check(script, A, B, C)
    assert isinstance(outcome, Outcome)
    assert (outcome.allowed, [row[1] for row in outcome.rows], undone) == (True, [8, 8, 8], [])
    script.now_us += TENTATIVE_TTL_US
    assert remaining(script, A, B, C) == [8, 8, 8]


def test_a_denial_of_one_slot_refunds_all_others_at_once(script: ScriptClient) -> None:
    outcome, undone = run_check(script, A, SMALL, SLOTS)
    assert isinstance(outcome, Outcome)
    assert (outcome.allowed, [row[1] for row in outcome.rows], undone) == (False, [10, 1, 10], [])
    assert remaining(script, A, SMALL, SLOTS) == [10, 1, 10]


def test_a_monitored_limit_of_another_slot_denies_nothing(script: ScriptClient) -> None:
    outcome, undone = run_check(script, A, MONITORED)
    assert isinstance(outcome, Outcome)
    assert (outcome.allowed, undone) == (True, [])
    script.now_us += TENTATIVE_TTL_US
    assert remaining(script, A, MONITORED) == [8, 1]


def test_a_hold_without_a_confirmation_is_refunded_after_five_seconds(script: ScriptClient) -> None:
    run_check(script, A, B, fate=lose(B, HoldAction.CONFIRM, NOT_SENT))
    script.now_us = NOW_US + 5_000_000 - 1
    assert script.remaining(B) == 8
    script.now_us += 1
    assert script.remaining(B) == 10


def test_each_limit_is_reported_in_its_position_and_would_be_denials_are_kept(script: ScriptClient) -> None:
    """Two limits share a slot: one had room, one is only monitored. A third one denies."""
    home = slot_of(key_of(A))
    outcome, _ = run_check(
        script, A, SMALL, MONITORED, slot_of=lambda key: home if key == key_of(MONITORED) else slot_of(key)
    )
    assert isinstance(outcome, Outcome)
    assert [(row[0], row[1], row[3]) for row in outcome.rows] == [(10, 10, 0), (1, 1, -1), (1, 1, -1)]


def test_the_longest_delay_and_the_latest_time_of_all_slots_count(script: ScriptClient) -> None:
    leaky = LeakyBucket(name="leaky", bucket_capacity=10, leak_rate_per_sec=1)

    def takes_time(_: Step) -> None:
        script.now_us += 1

    script.check(leaky, cost=3)
    for limits in ((leaky, A), (A, leaky)):
        script.now_us = NOW_US
        outcome, _ = run_check(script, *limits, cost=1, fate=takes_time)
        assert isinstance(outcome, Outcome)
        assert outcome.now_us == NOW_US + 2
        assert outcome.delay_us > 2_000_000


def test_slots_need_no_confirmation(script: ScriptClient) -> None:
    other = Concurrency(name="other", max_concurrent=10, lease_ttl_seconds=600)
    steps: list[Step] = []
    outcome, _ = run_check(script, SLOTS, other, fate=steps.append)
    assert isinstance(outcome, Outcome)
    assert (outcome.allowed, [type(step) for step in steps]) == (True, [Check, Check])


def test_a_monitored_limit_whose_hold_lapsed_does_not_fail_the_check(script: ScriptClient) -> None:
    monitored = FixedWindow(name="monitored", limit=10, window_seconds=86_400, mode=Mode.MONITOR)

    def ahead(step: Step) -> None:
        if isinstance(step, FinishHold) and step.keys == [key_of(monitored)]:
            script.now_us = NOW_US + TENTATIVE_TTL_US
            script.check(monitored)
            script.now_us = NOW_US

    outcome, undone = run_check(script, A, monitored, fate=ahead)
    assert isinstance(outcome, Outcome)
    assert (outcome.allowed, undone) == (True, [])


def test_a_hold_that_was_evicted_with_its_bucket_is_confirmed_and_never_refunded(script: ScriptClient) -> None:
    bucket = TokenBucket(name="bucket", bucket_capacity=10, refill_rate_per_sec="0.001")

    unconfirmed = lose(A, HoldAction.CONFIRM, NOT_SENT)

    def forgets(step: Step) -> None:
        if isinstance(step, FinishHold) and step.keys == [key_of(bucket)]:
            script.redis.delete(key_of(bucket))

    def forgets_and_loses(step: Step) -> StoreUnavailable | None:
        forgets(step)
        return unconfirmed(step)

    outcome, _ = run_check(script, A, bucket, fate=forgets)
    assert isinstance(outcome, Outcome)
    assert outcome.allowed

    _, undone = run_check(script, A, bucket, fate=forgets_and_loses)
    script.check(bucket, cost=5)
    script.finish(*undone)
    assert script.remaining(bucket) == 5


def test_a_peek_holds_nothing(script: ScriptClient) -> None:
    outcome, undone = run_check(script, A, B, cost=0)
    assert isinstance(outcome, Outcome)
    assert (outcome.allowed, undone, script.redis.keys()) == (True, [], [])


@pytest.mark.parametrize("how", [NOT_SENT, UNSURE], ids=["not sent", "unsure"])
def test_a_check_that_one_slot_did_not_answer_is_undecided_and_refunded(
    script: ScriptClient, how: StoreUnavailable
) -> None:
    outcome, undone = run_check(script, A, B, fate=lose(B, Check, how))
    assert outcome is how
    assert len(undone) == (1 if how is NOT_SENT else 2)
    script.finish(*undone)
    assert remaining(script, A, B) == [10, 10]


def test_a_denial_is_final_although_another_slot_did_not_answer(script: ScriptClient) -> None:
    outcome, undone = run_check(script, A, SMALL, B, fate=lose(B, Check, UNSURE))
    assert isinstance(outcome, Outcome)
    assert not outcome.allowed
    assert remaining(script, A, B) == [10, 8]
    script.finish(*undone)
    assert remaining(script, A, B) == [10, 10]


@pytest.mark.parametrize("how", [NOT_SENT, UNSURE], ids=["not sent", "unsure"])
def test_a_check_that_one_slot_did_not_confirm_is_refunded_in_the_others(
    script: ScriptClient, how: StoreUnavailable
) -> None:
    outcome, undone = run_check(script, A, B, C, fate=lose(B, HoldAction.CONFIRM, how))
    assert outcome is how
    script.finish(*undone)
    assert remaining(script, A, C) == [10, 10]
    assert script.remaining(B) == (
        10 if how is NOT_SENT else 8
    )  # the one exception: the slot has confirmed, and the reply was lost


def test_a_check_whose_hold_lapsed_before_its_confirmation_is_undecided(script: ScriptClient) -> None:
    def late(step: Step) -> None:
        if isinstance(step, FinishHold) and step.keys == [key_of(B)]:
            script.now_us = NOW_US + TENTATIVE_TTL_US

    outcome, undone = run_check(script, A, B, fate=late)
    assert isinstance(outcome, StoreUnavailable)
    assert outcome.maybe_counted
    script.finish(*undone)
    assert remaining(script, A, B) == [10, 10]


@pytest.mark.parametrize("refund", [True, False])
def test_a_cross_slot_reservation_has_its_own_ttl_in_each_slot(script: ScriptClient, refund: bool) -> None:
    hold = Hold("lf:{t}:v:0", TOKEN, MINUTE_US, refund=refund)
    outcome, undone = run_check(script, A, GLOBAL, hold=hold)
    assert isinstance(outcome, Outcome)
    assert (outcome.allowed, undone, len(script.redis.keys("*:v:*"))) == (True, [], 2)
    script.now_us += MINUTE_US - 1
    assert remaining(script, A, GLOBAL) == [8, 8]
    script.now_us += 1
    assert remaining(script, A, GLOBAL) == ([10, 10] if refund else [8, 8])


def test_too_many_cross_slot_checks_make_the_store_unavailable_and_are_no_reservation_error(
    script: ScriptClient,
) -> None:
    def full(_: Step) -> Any:
        return TooManyReservations("full")

    outcome, _ = run_check(script, A, B, fate=full)
    assert isinstance(outcome, StoreUnavailable)
    outcome, _ = run_check(script, A, B, fate=full, hold=Hold("lf:{t}:v:0", TOKEN, MINUTE_US, refund=True))
    assert isinstance(outcome, TooManyReservations)


def test_a_check_is_cross_slot_if_any_of_its_limits_is_in_another_slot() -> None:
    for limits, spread in (((A,), False), ((A, B), True), ((A, A, B), True)):
        check = check_for(*dict.fromkeys(limits))
        assert is_cross_slot(check, slot_of) is spread
        check.hold = Hold(key_of(A), TOKEN, MINUTE_US, refund=True)
        assert is_cross_slot(check, slot_of) is spread
        check.hold = Hold(key_of(C), TOKEN, MINUTE_US, refund=True)
        assert is_cross_slot(check, slot_of)
    check = check_for(A)
    check.shadow = check_for(B)
    assert is_cross_slot(check, slot_of)
