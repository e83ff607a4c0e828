"""The steps of a cross-slot check: what is refunded when a slot denies, fails or does not answer."""

from collections.abc import Sequence
from typing import Any

from limitforge import FixedWindow, Limits, StoreUnavailable
from limitforge.core.check import Check, build_check
from limitforge.core.decision import Outcome
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError
from limitforge.stores.redis.multi_step.cross_slot import FinishHold, HoldAction, Step, cross_slot_steps

LIMITS = Limits(*(FixedWindow(name=name, limit=9, window_seconds=60) for name in "abc"))
CHECK = build_check(Keys(), LIMITS, "r", "s", 1, None, "t", "P0")
KEYS = [key for _, key, *_ in CHECK.debits]
LOST = StoreUnavailable("lost", maybe_counted=True)
GONE = StoreUnavailable("no server")
ALLOWED = Outcome(1, allowed=True, delay_us=0, rows=[(9, 8, 60, 0, 0)])
DENIED = Outcome(1, allowed=False, delay_us=-1, rows=[(9, 0, 60, 60, 0)])
HELD = [(60, 0)]


def slot_of(key: str | bytes) -> int:
    """Put every limit in a slot of its own."""
    return [key == each for each in KEYS].index(True)


def run(*answers: Sequence[Any]) -> tuple[Outcome | LimitforgeError, list[FinishHold]]:
    """Run a check. Each round of steps gets the next of these replies."""
    flow = cross_slot_steps(CHECK, slot_of)
    steps: list[Step] = next(flow)
    try:
        for replies in answers:
            assert len(steps) == len(replies)
            steps = flow.send(replies)
    except StopIteration as done:
        ended: tuple[Outcome | LimitforgeError, list[FinishHold]] = done.value
        return ended
    raise AssertionError(f"it asks for more: {steps}")


def actions(undone: list[FinishHold]) -> list[tuple[HoldAction, list[str]]]:
    return [(one.action, one.keys) for one in undone]


def refunds(*places: int) -> list[tuple[HoldAction, list[str]]]:
    return [(HoldAction.REFUND, [KEYS[place]]) for place in places]


def test_each_slot_gets_its_own_limit() -> None:
    (first, second, third) = next(cross_slot_steps(CHECK, slot_of))
    assert isinstance(first, Check)
    assert [step.debits[0][1] for step in (first, second, third) if isinstance(step, Check)] == KEYS


def test_a_check_that_all_slots_confirmed_is_allowed_without_refunds() -> None:
    outcome, undone = run([ALLOWED] * 3, [HELD] * 3)
    assert isinstance(outcome, Outcome)
    assert outcome.allowed
    assert undone == []


def test_a_denial_refunds_the_others_and_reports_their_state_after_that() -> None:
    now = Outcome(2, allowed=True, delay_us=0, rows=[(9, 9, 50, 0, 0)])
    outcome, undone = run([DENIED, ALLOWED, ALLOWED], [None, None, now, GONE])
    assert isinstance(outcome, Outcome)
    assert not outcome.allowed
    assert (outcome.now_us, outcome.rows) == (2, [*DENIED.rows, *now.rows, *ALLOWED.rows])
    assert undone == []


def test_a_slot_that_did_not_answer_is_refunded_after_a_denial() -> None:
    """The slot may have taken its part. If the call was certainly not sent, there is nothing to refund."""
    outcome, undone = run([DENIED, LOST, GONE])
    assert isinstance(outcome, Outcome)
    assert not outcome.allowed
    assert actions(undone) == refunds(1)


def test_the_holds_of_others_are_refunded_when_a_slot_fails() -> None:
    outcome, undone = run([ALLOWED, GONE, LOST])
    assert outcome is GONE
    assert actions(undone) == refunds(0, 2)


def test_holds_are_refunded_when_a_slot_could_not_confirm() -> None:
    """Confirmations are undone, and all holds that may remain are refunded."""
    outcome, undone = run([ALLOWED] * 3, [HELD, LOST, None])
    assert outcome is LOST
    assert actions(undone) == [*refunds(0, 1, 2), (HoldAction.UNDO_CONFIRM, [KEYS[0]])]
