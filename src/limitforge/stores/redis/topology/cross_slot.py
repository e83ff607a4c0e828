"""A check whose limits lie in several slots of a Cluster: all or nothing, without a script that sees them all.

Each slot takes its part and holds it for a moment. Once all had room each is confirmed, and only then the check is
allowed; otherwise what was taken goes back. What nobody confirms or gives back, because a message was lost or a process
died, goes back by itself after 5 s. So nothing passes that not every limit had room for. What did not pass is not
charged for good, with one exception: where a slot confirmed and its answer was lost, the cost of that check stays.
"""

import os
from collections.abc import Generator, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any

import msgspec

from limitforge.core.algorithms.base import UNLIMITED
from limitforge.core.check import TOKEN_BYTES, Check, Debit, Hold, ResultKind
from limitforge.core.decision import LimitRow, Outcome, deciding_key
from limitforge.core.keys import Keys, lane_prefix_of
from limitforge.core.plan import BUCKET_US
from limitforge.errors import LimitforgeError, StoreUnavailable, TooManyReservations
from limitforge.stores.redis.topology.hash_slots import SlotOf, group_by_slot

HOLD_TTL_US = 5_000_000
UNKNOWN_ROW: LimitRow = (UNLIMITED, UNLIMITED, 0, 0, 0)
"""Of a limit that could not be asked."""


class HoldAction(IntEnum):
    """What becomes of what is held: it goes back, it stays; or what was to stay goes back after all."""

    REFUND = 0
    CONFIRM = 1
    UNDO_CONFIRM = 2


class FinishHold(msgspec.Struct, gc=False):
    """Ends what one part of a check holds in its slot. The answer is where it was taken from, or None if it was not
    held any more.
    """

    action: HoldAction
    token: bytes
    keys: list[str]
    optional: list[bool]
    """Whether a limit may have gone without: one that is only monitored must not hinder anybody."""
    ttl_us: int = 0
    refunds_on_lapse: bool = False
    """With a TTL it becomes a reservation, which lapses like this."""
    forgotten_before_us: int = 0
    """By the store's time: until then whatever is not found was forgotten with its bucket, not taken away."""
    amounts: list[int] = []
    sources: list[tuple[int, int]] = []
    """Where each amount was taken from: of a window its end and its start."""
    result_kind: ResultKind = ResultKind.PART
    weight_us: int = BUCKET_US


Step = Check | FinishHold
CrossSlotResult = tuple[Outcome | LimitforgeError, list[FinishHold]]
"""What a check came to, and what is still to be undone."""
StepReplies = Sequence[Any]
"""To each step its answer: an outcome, the sources of a finish, or an error."""


class SlotCheck(msgspec.Struct, gc=False):
    """What one slot is asked, and which places its limits have in the whole."""

    check: Check
    positions: list[int]
    outcome: Outcome | None = None
    may_have_counted: bool = False
    """Whether it may have taken what it was asked for, and nobody heard."""

    def taken_positions(self) -> list[int]:
        """Which of its takes took something."""
        outcome = self.outcome
        if outcome is None and self.may_have_counted:
            return [at for at, take in enumerate(self.check.debits) if take[2]]
        if outcome is None or not outcome.allowed:
            return []
        return [
            at
            for at, ((_, _, cost, *_), row) in enumerate(zip(self.check.debits, outcome.rows, strict=True))
            if cost and row[0] != UNLIMITED and not row[3]
        ]

    def held_positions(self) -> list[int]:
        """Which of them wait to be confirmed: the slots of a concurrency limit need not."""
        return [at for at in self.taken_positions() if not self.check.debits[at][0].holds_lease]


def routing_key(step: Step) -> str:
    """One of the keys that it needs, or any if it needs none."""
    if isinstance(step, FinishHold):
        return step.keys[0] if step.keys else "{}"
    for group in (step, step.shadow):
        if group is not None and group.debits:
            return group.debits[0][1]
    return "{}" if step.hold is None else step.hold.key


def is_cross_slot(check: Check, slot_of: SlotOf) -> bool:
    """Whether its limits, and those of the plan that is tried beside it, lie in several slots."""
    first = None if check.hold is None else slot_of(check.hold.key)
    for group in (check,) if check.shadow is None else (check, check.shadow):
        for _, key, *_ in group.debits:
            slot = slot_of(key)
            if first is None:
                first = slot
            elif slot != first:
                return True
    return False


def cross_slot_steps(check: Check, slot_of: SlotOf) -> Generator[list[Step], StepReplies, CrossSlotResult]:
    """Yields what to ask side by side, is sent the answers, and returns the outcome with what is still to be undone,
    which nobody waits for.
    """
    parts = _split_by_slot(check, slot_of)
    answers = yield [part.check for part in parts]
    for part, answer in zip(parts, answers, strict=True):
        part.outcome = answer if isinstance(answer, Outcome) else None
        part.may_have_counted = isinstance(answer, StoreUnavailable) and answer.maybe_counted
    error = next((answer for answer in answers if isinstance(answer, LimitforgeError)), None)
    if any(isinstance(answer, Outcome) and not answer.allowed for answer in answers):
        yield from _refund(parts)  # denied is denied, whatever became of the rest
        return _merge(check, parts), _refunds_of([part for part in parts if part.may_have_counted])
    if error is not None:
        return _as_failure(check, error), _refunds_of(parts)
    if len(parts) == 1:
        return answers[0], []
    return (yield from _confirm(check, parts))


def _split_by_slot(check: Check, slot_of: SlotOf) -> list[SlotCheck]:
    slots = group_by_slot(range(len(check.debits)), lambda place: slot_of(check.debits[place][1]))
    if len(slots) <= 1:
        part = msgspec.structs.replace(check, shadow=None, result_kind=ResultKind.PART)
        if check.hold is not None and check.debits:
            record = _reservation_key(check.hold, check.debits[0][1], slot_of)
            part.hold = msgspec.structs.replace(check.hold, key=record)
        return [SlotCheck(part, list(range(len(check.debits))))]
    token = (check.lease or os.urandom(TOKEN_BYTES)) if check.hold is None else check.hold.token
    parts = []
    for places in slots:
        takes = [check.debits[place] for place in places]
        parts.append(
            SlotCheck(
                Check(
                    takes,
                    names=tuple(check.names[place] for place in places),
                    lease=check.lease,
                    is_dynamic=check.is_dynamic,
                    weight_us=check.weight_us,
                    hold=_hold(check, takes, token, slot_of),
                    result_kind=ResultKind.PART,
                ),
                places,
            )
        )
    return parts


def _hold(check: Check, takes: list[Debit], token: bytes, slot_of: SlotOf) -> Hold | None:
    """A reservation of the caller's has a record in each slot, and its own terms once all parts are confirmed."""
    if check.hold is None:
        return Hold("", token, HOLD_TTL_US, refund=True) if any(take[2] for take in takes) else None
    return msgspec.structs.replace(
        check.hold, key=_reservation_key(check.hold, takes[0][1], slot_of), needs_confirmation=True
    )


def _reservation_key(hold: Hold, key: str, slot_of: SlotOf) -> str:
    """Where a reservation is noted beside that bucket."""
    return hold.key if slot_of(hold.key) == slot_of(key) else Keys.reservation(lane_prefix_of(key), hold.token)


def _confirm(check: Check, parts: list[SlotCheck]) -> Generator[list[Step], StepReplies, CrossSlotResult]:
    holding = [part for part in parts if part.held_positions()]
    if not holding:
        return _merge(check, parts), []
    hold = check.hold
    asked = [_finish(part, HoldAction.CONFIRM, part.held_positions()) for part in holding]
    if hold is not None:
        asked = [msgspec.structs.replace(one, ttl_us=hold.ttl_us, refunds_on_lapse=hold.refund) for one in asked]
    answers = yield list(asked)
    if all(isinstance(answer, list) for answer in answers):
        return _merge(check, parts), []
    confirmed = zip(holding, asked, answers, strict=True)
    undo = _refunds_of(parts)
    if hold is None:
        undo += [_undo_confirm(part, one, answer) for part, one, answer in confirmed if isinstance(answer, list)]
    error = next((answer for answer in answers if isinstance(answer, LimitforgeError)), None)
    lapsed = StoreUnavailable("what was held in several slots lapsed before all had room", maybe_counted=True)
    return _as_failure(check, error or lapsed), undo


def _refund(parts: list[SlotCheck]) -> Generator[list[Step], StepReplies, None]:
    """What had room where another had none. A look behind it tells how things are now."""
    holding = [part for part in parts if part.outcome is not None and part.taken_positions()]
    steps: list[Step] = [_finish(part, HoldAction.REFUND, part.taken_positions()) for part in holding]
    looks: list[Step] = [_peek(part) for part in holding]
    if not holding:
        return
    answers = yield steps + looks
    for part, answer in zip(holding, answers[len(steps) :], strict=True):
        if isinstance(answer, Outcome) and part.outcome is not None:
            pairs = zip(answer.rows, part.outcome.rows, strict=True)
            rows: list[LimitRow] = [(now[0], now[1], now[2], asked[3], now[4]) for now, asked in pairs]
            part.outcome = Outcome(answer.now_us, part.outcome.allowed, -1, rows)


def _peek(part: SlotCheck) -> Check:
    takes = [(rule, key, 0, *rest) for rule, key, _, *rest in part.check.debits]
    return Check(
        takes,  # type: ignore[arg-type]
        part.check.names,
        is_dynamic=part.check.is_dynamic,
        weight_us=part.check.weight_us,
        result_kind=ResultKind.PART,
    )


def _finish(part: SlotCheck, ending: HoldAction, places: list[int]) -> FinishHold:
    takes = part.check.debits
    return FinishHold(
        ending,
        b"" if part.check.hold is None else part.check.hold.token,
        [takes[at][1] if part.outcome is None else deciding_key(takes[at], part.outcome.rows[at]) for at in places],
        [not takes[at][0].enforced for at in places],
        forgotten_before_us=HOLD_TTL_US + (0 if part.outcome is None else part.outcome.now_us),
        weight_us=BUCKET_US * len(places),
    )


def _undo_confirm(part: SlotCheck, confirm: FinishHold, sources: list[tuple[int, int]]) -> FinishHold:
    """It was confirmed here, and not elsewhere."""
    amounts = [part.check.debits[at][2] for at in part.held_positions()]
    kept = [at for at, (source, _) in enumerate(sources) if source >= 0]
    return msgspec.structs.replace(
        confirm,
        action=HoldAction.UNDO_CONFIRM,
        keys=[confirm.keys[at] for at in kept],
        optional=[False] * len(kept),
        amounts=[amounts[at] for at in kept],
        sources=[sources[at] for at in kept],
    )


def _refunds_of(parts: list[SlotCheck]) -> list[FinishHold]:
    """What gives back all that was, or may have been, taken."""
    return [_finish(part, HoldAction.REFUND, part.taken_positions()) for part in parts if part.taken_positions()]


def _merge(check: Check, parts: list[SlotCheck]) -> Outcome:
    rows: list[LimitRow] = [(0, 0, 0, 0, 0)] * len(check.debits)
    outcomes = [part.outcome for part in parts if part.outcome is not None]
    for part in parts:
        for place, row in zip(part.positions, part.outcome.rows if part.outcome else repeat(UNKNOWN_ROW), strict=False):
            rows[place] = row
    return Outcome(
        max(outcome.now_us for outcome in outcomes),
        len(outcomes) == len(parts) and all(outcome.allowed for outcome in outcomes),
        max(outcome.delay_us for outcome in outcomes),
        rows,
    )


def _as_failure(check: Check, error: LimitforgeError) -> LimitforgeError:
    """A caller who reserved nothing can't settle anything either."""
    if check.hold is None and isinstance(error, TooManyReservations):
        return StoreUnavailable("too many checks of one bucket over several slots are under way")
    return error
