"""Settling: what was held is replaced by what it really cost. `lua/reserve.lua` is its twin."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from limitforge.core.algorithms.base import Algorithm, State
from limitforge.core.evaluate import CalendarMiss, ReservedAmount, effective_time_us, is_expired, open_state
from limitforge.errors import InvalidInput

RESULT_TTL_US = 24 * 3_600 * 1_000_000  # how long a result is remembered


class OnLapse(StrEnum):
    """What happens to a reservation that nobody settles in time: its cost stays taken, or goes back."""

    KEEP = "keep"
    REFUND = "refund"


class SettlementOutcome(StrEnum):
    SETTLED = "settled"
    LAPSED = "lapsed"


class Settlement(msgspec.Struct, frozen=True):
    """How a reservation ended. Settling it again changes nothing and answers the same: `cost` is the one that counted.

    `lapsed` means that its time was over: nothing was changed, and what it held was kept or refunded as it said.
    """

    outcome: SettlementOutcome
    cost: int


class ReservationRecord(msgspec.Struct):
    """A reservation as a store remembers it."""

    token: bytes
    lapses_us: int
    expires_us: int
    reserved: list[ReservedAmount]
    settled: int | None = None


def settle(
    record: ReservationRecord,
    cost: int,
    amounts: Sequence[int],
    calendars: Sequence[tuple[int, ...]],
    now_us: int,
    states: Mapping[str, Any],
) -> tuple[Settlement, list[tuple[str, State]]] | CalendarMiss:
    """Settle at the store's time; the states to store come back. `calendars` has each quota's windows, empty for the
    rest.
    """
    if record.settled is not None:
        return Settlement(SettlementOutcome.SETTLED, record.settled), []
    if record.lapses_us <= max([now_us, *(states[held.key].last for held in record.reserved if held.key in states)]):
        return Settlement(SettlementOutcome.LAPSED, 0), []  # by the clock, or by that of a bucket which is ahead of it
    if len(amounts) != len(record.reserved):
        raise InvalidInput("reservation_id", "names other limits than were reserved")
    writes = []
    for at, (held, amount, windows) in enumerate(zip(record.reserved, amounts, calendars, strict=True)):
        if held.amount is None:
            continue
        state = states.get(held.key)
        # A live bucket knows the numbers that it was last written with: the plan may have changed since the
        # reservation.
        steps = _steps_now(held, windows) if state is None or is_expired(state, now_us) else state.algorithm
        work = open_state(state, steps, now_us)
        if work is None:
            return CalendarMiss(at, effective_time_us(state, now_us))
        if _adjust(work, steps, record.token, amount - held.amount):
            steps.seal(work)
            writes.append((held.key, work))
    return Settlement(SettlementOutcome.SETTLED, cost), writes


def finish_tentative(
    keys: Sequence[str], token: bytes, now_us: int, states: Mapping[str, Any], *, confirm: bool
) -> list[tuple[str, State]]:
    """End what is held in these buckets for limits elsewhere: it stays taken, or goes back. The states to store."""
    writes = []
    for key in keys:
        state = states.get(key)
        if state is None or is_expired(state, now_us):
            continue
        work = open_state(state, state.algorithm, now_us)
        held = None if work is None else next((p for p in work.pending if p.reservation == token), None)
        if held is not None:
            work.pending = tuple(p for p in work.pending if p is not held)
            if not confirm:
                state.algorithm.give(work, held.amount, held.source)
            state.algorithm.seal(work)
            writes.append((key, work))
    return writes


def _steps_now(held: ReservedAmount, windows: tuple[int, ...]) -> Algorithm:
    return held.algorithm.with_numbers((*held.algorithm.numbers()[:2], *windows)) if windows else held.algorithm


def _adjust(work: Any, steps: Any, token: bytes, more: int) -> bool:
    """Take more, or give back what is still held; tells whether the bucket changed."""
    pending = next((p for p in work.pending if p.reservation == token), None)
    if pending is not None:
        work.pending = tuple(p for p in work.pending if p is not pending)
        if more < 0:
            steps.give(work, -more, pending.source)
    return (steps.force(work, more) if more > 0 else False) or pending is not None
