"""The walk of one check over its buckets: probe all, then commit all or none. `lua/check.lua` is its twin."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from limitforge.core.algorithms.base import UNLIMITED, Algorithm, Pending, State
from limitforge.core.algorithms.concurrency import ConcurrencyAlgorithm
from limitforge.core.check import Check, Debit, Hold
from limitforge.core.decision import LimitRow, Outcome
from limitforge.core.exact import percent_of
from limitforge.core.plan import Rule
from limitforge.errors import TooManyReservations

MAX_PENDING = 1_000
CONCURRENCY = ConcurrencyAlgorithm.code

AlgorithmFor = Callable[[Rule, str, str], Algorithm]
"""The numbers that hold for a rule, a resource and where overrides may be: the rule's, or those of an override."""


class Evaluation(Outcome, gc=False):
    """What was decided, with the states to store. `held` is what each take took, for a reservation."""

    writes: list[tuple[str, State]]
    reserved: list["ReservedAmount"] | None
    lapses_us: int


class ReservedAmount(msgspec.Struct, frozen=True):
    """What a reservation took of one bucket; `amount` is None where it took nothing and never will."""

    key: str
    algorithm: Algorithm
    amount: int | None


class CalendarMiss(msgspec.Struct, frozen=True):
    """The windows of the quota at this place do not reach `now_us`: ask once more with those around it."""

    index: int
    now_us: int


def evaluate(  # noqa: C901, PLR0912, PLR0915 - the hot path: two loops, and no call that can be spared
    check: Check, now_us: int, states: Mapping[str, Any], steps_for: AlgorithmFor | None = None
) -> Evaluation | CalendarMiss:
    """Judge `check` at the store's time. `states` is only read."""
    hold = check.hold
    allowed = True
    probed: list[tuple[Debit, Any, Any, int, int]] = []
    for take in check.debits:
        rule, key, cost, resource, overrides = take
        steps = rule.algorithm if steps_for is None or overrides is None else steps_for(rule, resource, overrides)
        limit = steps.limit
        if limit == UNLIMITED:
            probed.append((take, steps, None, 0, 0))
            continue
        state = states.get(key)
        if state is None or (now_us >= state.until and now_us >= state.last):
            work = steps.fresh(now_us)
        else:
            work = steps.open(state, now_us if now_us > state.last else state.last)
            if work is not None and work.pending:
                lapse_reservations(work, steps)
        if work is None:
            return CalendarMiss(check.debits.index(take), effective_time_us(state, now_us))
        share = limit if rule.percent == 100 else percent_of(limit, rule.percent)
        wait = 0
        if cost:
            if hold is not None and len(work.pending) >= MAX_PENDING and rule.enforced:
                raise too_many_reservations(rule)
            wait = 0 if rule.forced else steps.wait(work, cost, share)
            if wait:
                if rule.is_bucket and wait > work.until - work.last:
                    wait = max(work.until - work.last, 1)  # forgotten before it is as full as that; 0 would be room
                if rule.enforced:
                    allowed = False
        probed.append((take, steps, work, share, wait))

    # A bucket may be ahead of the clock: a reservation lapses its TTL after the latest of them.
    lapses_us = 0 if hold is None else hold.ttl_us + max([now_us, *(work.last for _, _, work, _, _ in probed if work)])
    delay_us = -1
    rows: list[LimitRow] = []
    writes: list[tuple[str, State]] = []
    for (rule, key, cost, _, _), steps, work, share, probed_wait in probed:
        if work is None:
            rows.append((UNLIMITED, UNLIMITED, 0, 0, 0))
            continue
        wait, written = probed_wait, False
        if wait == 0:
            if allowed and cost:
                if rule.forced:
                    written = steps.force(work, cost)
                else:
                    if rule.delays:
                        delay_us = max(delay_us, steps.delay(work))
                    steps.take(work, cost, check.lease)
                    if hold is not None:
                        _reserve(work, steps, hold, cost, lapses_us)
                    written = True
        elif rule.count_denied and not allowed and steps.force(work, min(cost, steps.limit)):
            if wait > 0:
                wait = steps.wait(work, cost, share)
            written = True
        forgotten = work.until
        steps.seal(work)
        if written:
            writes.append((key, work))
        elif rule.is_bucket and work.until > forgotten:
            work.until = forgotten
        left = share - work.used
        is_open = 1 if work.pending or (rule.holds_lease and work.entries) else 0
        rows.append((steps.limit, left if left > 0 else 0, work.until - work.last, wait, is_open))
    held = [_held(hold, *judged) for judged in probed] if hold is not None and allowed else None
    return Evaluation(now_us, allowed, delay_us, rows, writes, held, lapses_us)


def open_state(state: State | None, steps: Algorithm, now_us: int) -> Any:
    """The bucket as it is now under `steps`; None if a calendar does not reach that far."""
    if state is None or is_expired(state, now_us):
        return steps.fresh(now_us)
    work = steps.open(state, effective_time_us(state, now_us))
    if work is not None and work.pending:
        lapse_reservations(work, steps)
    return work


def lapse_reservations(work: Any, steps: Algorithm) -> None:
    """Give back what was reserved for refund and is over; forget what was to be kept."""
    now = work.last
    if work.pending[0].lapses_us <= now:
        for pending in work.pending:
            if pending.lapses_us <= now and pending.refund:
                steps.give(work, pending.amount, pending.source)
        work.pending = tuple(pending for pending in work.pending if pending.lapses_us > now)


def is_expired(state: State | None, now_us: int) -> bool:
    """Whether a bucket no longer matters, and is treated as if it were not there."""
    return state is None or (now_us >= state.until and now_us >= state.last)


def effective_time_us(state: State | None, now_us: int) -> int:
    """A clock that steps back stands still, per bucket."""
    return now_us if state is None or now_us > state.last else state.last


def too_many_reservations(rule: Rule) -> TooManyReservations:
    return TooManyReservations(
        f"limit {rule.limit.name!r} holds {MAX_PENDING} open reservations of this bucket; settle some first"
    )


def _reserve(work: Any, steps: Algorithm, hold: Hold, amount: int, lapses_us: int) -> None:
    """In the order of their lapses, so that one look at the first tells whether any is due.

    Slots are not reserved. A monitored limit whose list is full goes without: it must not hinder anybody.
    """
    if steps.code != CONCURRENCY and len(work.pending) < MAX_PENDING:
        added = Pending(hold.token, lapses_us, amount, steps.source(work), hold.refund)
        work.pending = tuple(sorted((*work.pending, added), key=lambda pending: pending.lapses_us))


def _held(hold: Hold, take: Debit, steps: Algorithm, work: Any, _share: int, wait: int) -> ReservedAmount:
    _, key, cost, *_ = take
    noted = not cost or (work is not None and any(pending.reservation == hold.token for pending in work.pending))
    untouched = work is None or wait or steps.code == CONCURRENCY or not noted
    return ReservedAmount(key, steps, None if untouched else cost)
