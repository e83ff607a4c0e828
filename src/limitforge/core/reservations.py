"""Settle reservations: replace the estimated cost by the actual cost.

`lua/reservations.lua` is the twin of `settle`, and `lua/finish_holds.lua` that of `finish_holds`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from limitforge.core.algorithms.base import Algorithm, State
from limitforge.core.evaluate import CalendarMiss, ReservedAmount, effective_time_us, is_expired, open_state
from limitforge.errors import InvalidInput

RESULT_TTL_US = 24 * 3_600 * 1_000_000
"""How long the result of a settlement is kept, so that settling again is idempotent."""


class OnLapse(StrEnum):
    """What happens to a reservation that is not settled in time: its cost stays taken, or is refunded."""

    KEEP = "keep"
    REFUND = "refund"


class SettlementOutcome(StrEnum):
    """How a reservation ended: settled in time, or lapsed before."""

    SETTLED = "settled"
    LAPSED = "lapsed"


class Settlement(msgspec.Struct, frozen=True):
    """The result of settling a reservation. Settling again returns the same result.

    `cost` is the cost that counts. If the outcome is `lapsed`, the reservation had ended before: settling changed
    nothing, `cost` is 0, and the estimate was kept or refunded as `on_lapse` says.
    """

    outcome: SettlementOutcome
    cost: int


class ReservationRecord(msgspec.Struct):
    """The record of a reservation in a memory store."""

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
    """Settle at the store's time. Return the settlement and the states to store.

    `calendars` has the calendar windows of each quota, and an empty tuple for other limits.
    """
    if record.settled is not None:
        return Settlement(SettlementOutcome.SETTLED, record.settled), []
    last_writes = (states[reserved.key].last_us for reserved in record.reserved if reserved.key in states)
    if record.lapses_us <= max([now_us, *last_writes]):  # a bucket may be ahead of the clock
        return Settlement(SettlementOutcome.LAPSED, 0), []
    if len(amounts) != len(record.reserved):
        raise InvalidInput("reservation_id", "names other limits than those that were reserved")
    writes = []
    for index, (reserved, amount, windows) in enumerate(zip(record.reserved, amounts, calendars, strict=True)):
        if reserved.amount is None:
            continue
        state = states.get(reserved.key)
        # The plan may have changed since the reservation: a live bucket has the parameters of its last write.
        algorithm = _algorithm_now(reserved, windows) if state is None or is_expired(state, now_us) else state.algorithm
        opened = open_state(state, algorithm, now_us)
        if opened is None:
            return CalendarMiss(index, effective_time_us(state, now_us))
        if _adjust(opened, algorithm, record.token, amount - reserved.amount):
            algorithm.seal(opened)
            writes.append((reserved.key, opened))
    return Settlement(SettlementOutcome.SETTLED, cost), writes


def finish_holds(
    keys: Sequence[str], token: bytes, now_us: int, states: Mapping[str, Any], *, confirm: bool
) -> list[tuple[str, State]]:
    """Finish a hold on these buckets: confirm or refund what it took. Return the states to store."""
    writes = []
    for key in keys:
        state = states.get(key)
        if state is None or is_expired(state, now_us):
            continue
        opened = open_state(state, state.algorithm, now_us)
        pending = None if opened is None else next((p for p in opened.pending if p.reservation == token), None)
        if pending is not None:
            opened.pending = tuple(p for p in opened.pending if p is not pending)
            if not confirm:
                state.algorithm.give(opened, pending.amount, pending.source)
            state.algorithm.seal(opened)
            writes.append((key, opened))
    return writes


def _algorithm_now(reserved: ReservedAmount, windows: tuple[int, ...]) -> Algorithm:
    algorithm = reserved.algorithm
    return algorithm.with_parameters((*algorithm.parameters()[:2], *windows)) if windows else algorithm


def _adjust(opened: Any, algorithm: Any, token: bytes, more: int) -> bool:
    """Take `more`, or give back if it is negative and the amount is still held. Return whether the bucket changed."""
    pending = next((p for p in opened.pending if p.reservation == token), None)
    if pending is not None:
        opened.pending = tuple(p for p in opened.pending if p is not pending)
        if more < 0:
            algorithm.give(opened, -more, pending.source)
    return (algorithm.force(opened, more) if more > 0 else False) or pending is not None
