"""A check over several slots, step by step: what is given back when a slot denies, fails or is not heard of."""

from collections.abc import Sequence
from typing import Any

from limitforge import FixedWindow, Limits, StoreUnavailable
from limitforge.core.check import Check, build_check
from limitforge.core.decision import Outcome
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError
from limitforge.stores.redis.topology.cross_slot import FinishHold, HoldAction, Step, cross_slot_steps

LIMITS = Limits(*(FixedWindow(name=name, limit=9, window_seconds=60) for name in "abc"))
CHECK = build_check(Keys(), LIMITS, "r", "s", 1, None, "t", "P0")
KEYS = [key for _, key, *_ in CHECK.debits]
LOST = StoreUnavailable("lost", maybe_counted=True)
GONE = StoreUnavailable("no server")
ALLOWED = Outcome(1, allowed=True, delay_us=0, rows=[(9, 8, 60, 0, 0)])
DENIED = Outcome(1, allowed=False, delay_us=-1, rows=[(9, 0, 60, 60, 0)])
HELD = [(60, 0)]


def slot_of(key: str | bytes) -> int:
    """Every limit is in a slot of its own."""
    return [key == each for each in KEYS].index(True)


def run(*answers: Sequence[Any]) -> tuple[Outcome | LimitforgeError, list[FinishHold]]:
    """Each round of steps gets the next of these answers."""
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


def test_each_slot_is_asked_for_its_own_limit() -> None:
    (first, second, third) = next(cross_slot_steps(CHECK, slot_of))
    assert isinstance(first, Check)
    assert [step.debits[0][1] for step in (first, second, third) if isinstance(step, Check)] == KEYS


def test_what_all_have_confirmed_is_allowed_and_nothing_is_undone() -> None:
    outcome, undone = run([ALLOWED] * 3, [HELD] * 3)
    assert isinstance(outcome, Outcome)
    assert outcome.allowed
    assert undone == []


def test_a_denial_gives_back_what_others_took_and_tells_how_they_are_then() -> None:
    now = Outcome(2, allowed=True, delay_us=0, rows=[(9, 9, 50, 0, 0)])
    outcome, undone = run([DENIED, ALLOWED, ALLOWED], [None, None, now, GONE])
    assert isinstance(outcome, Outcome)
    assert not outcome.allowed
    assert (outcome.now_us, outcome.rows) == (2, [*DENIED.rows, *now.rows, *ALLOWED.rows])
    assert undone == []


def test_a_slot_that_was_not_heard_of_gives_back_after_a_denial() -> None:
    """It may have taken its part. Where the store was surely not asked there is nothing to give back."""
    outcome, undone = run([DENIED, LOST, GONE])
    assert isinstance(outcome, Outcome)
    assert not outcome.allowed
    assert actions(undone) == refunds(1)


def test_what_others_hold_goes_back_when_a_slot_fails() -> None:
    outcome, undone = run([ALLOWED, GONE, LOST])
    assert outcome is GONE
    assert actions(undone) == refunds(0, 2)


def test_what_is_held_goes_back_when_a_slot_could_not_confirm() -> None:
    """What was confirmed is given back as such, and all that may still be held is refunded."""
    outcome, undone = run([ALLOWED] * 3, [HELD, LOST, None])
    assert outcome is LOST
    assert actions(undone) == [*refunds(0, 1, 2), (HoldAction.UNDO_CONFIRM, [KEYS[0]])]
