"""Decide a check whose limits lie in several slots of a Cluster, all or nothing, without one script that sees them all.

This is a two-phase commit. First each slot takes its part of the check and holds it. If every slot grants its part, all
holds are confirmed, and the check is allowed. Otherwise the holds are refunded. A hold that is neither confirmed nor
refunded, because a message was lost or a process died, lapses after 5 s and is refunded. So the store allows no check
that exceeds a limit. A check that is denied or fails is refunded, with one exception: if a slot confirmed and its reply
was lost, its cost stays there. The failure behaviour decides a check that fails.

Even on one server, this takes no multi-slot call, which only carries independent checks.
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
from limitforge.stores.redis.script_call import T
from limitforge.stores.redis.topology.hash_slots import SlotOf, group_by_slot

TENTATIVE_TTL_US = 5_000_000
UNKNOWN_ROW: LimitRow = (UNLIMITED, UNLIMITED, 0, 0, 0)
"""The row of a limit whose slot did not answer."""


class HoldAction(IntEnum):
    """How a hold ends. UNDO_CONFIRM refunds a hold that was confirmed before."""

    REFUND = 0
    CONFIRM = 1
    UNDO_CONFIRM = 2


class FinishHold(msgspec.Struct, gc=False):
    """A message that ends the hold of a check in one slot.

    The reply is the window of each amount. It is None if a confirmation found that the hold had lapsed, or if a state
    was corrupt.
    """

    action: HoldAction
    token: bytes
    keys: list[str]
    may_be_missing: list[bool]
    """True for each limit that may lack its hold: a monitored limit must not make a check fail."""
    ttl_us: int = 0
    refunds_on_lapse: bool = False
    """With a TTL, the hold becomes a reservation. This is what happens when the reservation lapses."""
    lapses_us: int = 0
    """When the hold lapses, in the store's time. Until then, a missing hold counts as confirmed: its bucket was evicted
    or has expired."""
    amounts: list[int] = []
    sources: list[tuple[int, int]] = []
    """The window of each amount, as its end and its start."""
    weight_us: int = BUCKET_US


Step = Check | FinishHold
CrossSlotResult = tuple[Outcome | LimitforgeError, list[FinishHold]]
"""The outcome of a check, and the refunds that are still to be sent."""
MultiStepFlow = Generator[list[Step], Sequence[Any], T]
"""Yields steps that can run side by side, receives their replies, and returns the final result."""
StepReplies = Sequence[Any]
"""The reply to each step: an outcome, the windows of a finished hold, or an error."""


class SlotCheck(msgspec.Struct, gc=False):
    """The part of a check in one slot, and the positions of its limits in the whole check."""

    check: Check
    positions: list[int]
    outcome: Outcome | None = None
    may_have_counted: bool = False
    """True if the reply was lost, and the part may have been taken."""

    def taken_debits(self) -> list[int]:
        """Return the indexes in `check.debits` of what took something, or may have."""
        outcome = self.outcome
        if outcome is None and self.may_have_counted:
            return [position for position, debit in enumerate(self.check.debits) if debit[2]]
        if outcome is None or not outcome.allowed:
            return []
        return [
            position
            for position, ((_, _, cost, *_), row) in enumerate(zip(self.check.debits, outcome.rows, strict=True))
            if cost and row[0] != UNLIMITED and not row[3]
        ]

    def held_debits(self) -> list[int]:
        """Return the indexes in `check.debits` of what needs a confirmation. Leases need none."""
        return [position for position in self.taken_debits() if not self.check.debits[position][0].holds_lease]


def routing_key(step: Step) -> str:
    """Return a key of a step, or any key if it has none. The slot of this key decides where the step goes."""
    if isinstance(step, FinishHold):
        return step.keys[0] if step.keys else "{}"
    for group in (step, step.shadow):
        if group is not None and group.debits:
            return group.debits[0][1]
    return "{}" if step.hold is None else step.hold.key


def is_cross_slot(check: Check, slot_of: SlotOf) -> bool:
    """Return True if the limits of a check, and those of its shadow plan, lie in several slots."""
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
    """Yield steps to send side by side, receive their replies, and return the result.

    The caller sends the refunds of the result without waiting for their replies.
    """
    parts = _split_by_slot(check, slot_of)
    replies = yield [part.check for part in parts]
    for part, reply in zip(parts, replies, strict=True):
        part.outcome = reply if isinstance(reply, Outcome) else None
        part.may_have_counted = isinstance(reply, StoreUnavailable) and reply.maybe_counted
    error = next((reply for reply in replies if isinstance(reply, LimitforgeError)), None)
    if any(isinstance(reply, Outcome) and not reply.allowed for reply in replies):
        yield from _refund(parts)  # one denial denies the check, even if other slots failed
        return _merge(check, parts), _refunds_of([part for part in parts if part.may_have_counted])
    if error is not None:
        return _as_failure(check, error), _refunds_of(parts)
    if len(parts) == 1:
        return replies[0], []
    return (yield from _confirm(check, parts))


def _split_by_slot(check: Check, slot_of: SlotOf) -> list[SlotCheck]:
    slots = group_by_slot(range(len(check.debits)), lambda position: slot_of(check.debits[position][1]))
    if len(slots) <= 1:
        part = msgspec.structs.replace(check, shadow=None, result_kind=ResultKind.PART)
        if check.hold is not None and check.debits:
            key = _reservation_key(check.hold, check.debits[0][1], slot_of)
            part.hold = msgspec.structs.replace(check.hold, key=key)
        return [SlotCheck(part, list(range(len(check.debits))))]
    token = (check.lease or os.urandom(TOKEN_BYTES)) if check.hold is None else check.hold.token
    parts = []
    for positions in slots:
        debits = [check.debits[position] for position in positions]
        parts.append(
            SlotCheck(
                Check(
                    debits,
                    names=tuple(check.names[position] for position in positions),
                    lease=check.lease,
                    is_dynamic=check.is_dynamic,
                    weight_us=check.weight_us,
                    hold=_hold(check, debits, token, slot_of),
                    result_kind=ResultKind.PART,
                ),
                positions,
            )
        )
    return parts


def _hold(check: Check, debits: list[Debit], token: bytes, slot_of: SlotOf) -> Hold | None:
    """Return the hold of a part. A reservation has a record in each slot, and gets its own TTL when confirmed."""
    if check.hold is None:
        return Hold("", token, TENTATIVE_TTL_US, refund=True) if any(debit[2] for debit in debits) else None
    key = _reservation_key(check.hold, debits[0][1], slot_of)
    return msgspec.structs.replace(check.hold, key=key, uses_tentative_ttl=True)


def _reservation_key(hold: Hold, bucket: str, slot_of: SlotOf) -> str:
    """Return the key of the record of a reservation in the slot of a bucket."""
    if slot_of(hold.key) == slot_of(bucket):
        return hold.key
    return Keys.reservation_key(lane_prefix_of(bucket), hold.token)


def _confirm(check: Check, parts: list[SlotCheck]) -> Generator[list[Step], StepReplies, CrossSlotResult]:
    holding = [part for part in parts if part.held_debits()]
    if not holding:
        return _merge(check, parts), []
    hold = check.hold
    confirmations = [_finish(part, HoldAction.CONFIRM, part.held_debits()) for part in holding]
    if hold is not None:
        confirmations = [
            msgspec.structs.replace(confirmation, ttl_us=hold.ttl_us, refunds_on_lapse=hold.refund)
            for confirmation in confirmations
        ]
    replies = yield list(confirmations)
    if all(isinstance(reply, list) for reply in replies):
        return _merge(check, parts), []
    refunds = _refunds_of(parts)
    if hold is None:
        refunds += [
            _undo_confirm(part, confirmation, reply)
            for part, confirmation, reply in zip(holding, confirmations, replies, strict=True)
            if isinstance(reply, list)
        ]
    error = next((reply for reply in replies if isinstance(reply, LimitforgeError)), None)
    lapsed = StoreUnavailable("a hold lapsed before all slots were confirmed", maybe_counted=True)
    return _as_failure(check, error or lapsed), refunds


def _refund(parts: list[SlotCheck]) -> Generator[list[Step], StepReplies, None]:
    """Refund the parts that were allowed, and peek at their limits afterwards to report their current state."""
    holding = [part for part in parts if part.outcome is not None and part.taken_debits()]
    refunds: list[Step] = [_finish(part, HoldAction.REFUND, part.taken_debits()) for part in holding]
    peeks: list[Step] = [_peek(part) for part in holding]
    if not holding:
        return
    replies = yield refunds + peeks
    for part, reply in zip(holding, replies[len(refunds) :], strict=True):
        if isinstance(reply, Outcome) and part.outcome is not None:
            pairs = zip(reply.rows, part.outcome.rows, strict=True)
            rows: list[LimitRow] = [(now[0], now[1], now[2], before[3], now[4]) for now, before in pairs]
            part.outcome = Outcome(reply.now_us, part.outcome.allowed, -1, rows)


def _peek(part: SlotCheck) -> Check:
    check = part.check
    debits: list[Debit] = [(rule, key, 0, *rest) for rule, key, _, *rest in check.debits]  # type: ignore[misc]
    return Check(
        debits,
        check.names,
        is_dynamic=check.is_dynamic,
        weight_us=check.weight_us,
        result_kind=ResultKind.PART,
    )


def _finish(part: SlotCheck, action: HoldAction, positions: list[int]) -> FinishHold:
    debits, outcome = part.check.debits, part.outcome
    return FinishHold(
        action,
        b"" if part.check.hold is None else part.check.hold.token,
        [debits[at][1] if outcome is None else deciding_key(debits[at], outcome.rows[at]) for at in positions],
        [not debits[at][0].enforced for at in positions],
        lapses_us=TENTATIVE_TTL_US + (0 if outcome is None else outcome.now_us),
        weight_us=BUCKET_US * len(positions),
    )


def _undo_confirm(part: SlotCheck, confirmation: FinishHold, sources: list[tuple[int, int]]) -> FinishHold:
    """Return the message that undoes a confirmation, because another slot could not confirm."""
    amounts = [part.check.debits[position][2] for position in part.held_debits()]
    kept = [index for index, (source, _) in enumerate(sources) if source >= 0]
    return msgspec.structs.replace(
        confirmation,
        action=HoldAction.UNDO_CONFIRM,
        keys=[confirmation.keys[index] for index in kept],
        may_be_missing=[False] * len(kept),
        amounts=[amounts[index] for index in kept],
        sources=[sources[index] for index in kept],
    )


def _refunds_of(parts: list[SlotCheck]) -> list[FinishHold]:
    """Return the refunds of all that was taken, or may have been taken."""
    return [_finish(part, HoldAction.REFUND, part.taken_debits()) for part in parts if part.taken_debits()]


def _merge(check: Check, parts: list[SlotCheck]) -> Outcome:
    rows: list[LimitRow] = [(0, 0, 0, 0, 0)] * len(check.debits)
    outcomes = [part.outcome for part in parts if part.outcome is not None]
    for part in parts:
        part_rows = part.outcome.rows if part.outcome else repeat(UNKNOWN_ROW)
        for position, row in zip(part.positions, part_rows, strict=False):
            rows[position] = row
    return Outcome(
        max(outcome.now_us for outcome in outcomes),
        len(outcomes) == len(parts) and all(outcome.allowed for outcome in outcomes),
        max(outcome.delay_us for outcome in outcomes),
        rows,
    )


def _as_failure(check: Check, error: LimitforgeError) -> LimitforgeError:
    """Translate an error about reservations, if the caller reserved nothing and can't settle anything."""
    if check.hold is None and isinstance(error, TooManyReservations):
        return StoreUnavailable("too many cross-slot checks of one bucket are in progress")
    return error
