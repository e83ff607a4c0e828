"""Evaluate a check against the states of its buckets: probe all, then commit all or none.

`lua/check.lua` is its twin.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from limitforge.core.algorithms.base import UNLIMITED, Algorithm, Pending, State
from limitforge.core.algorithms.concurrency import ConcurrencyAlgorithm
from limitforge.core.check import Check, Debit, Hold
from limitforge.core.decision import OPEN_HOLD, LimitRow, Outcome
from limitforge.core.exact import percent_of
from limitforge.core.plan import Rule
from limitforge.errors import TooManyReservations

MAX_PENDING = 1_000
CONCURRENCY = ConcurrencyAlgorithm.code

AlgorithmFor = Callable[[Rule, str, str], Algorithm]
"""Maps a rule, a resource and the key of the subject's overrides to the algorithm of the rule or of its override."""


class Evaluation(Outcome, gc=False):
    """An outcome with the states to store. `reserved` is what each debit of a reservation took."""

    writes: list[tuple[str, State]]
    reserved: list["ReservedAmount"] | None
    lapses_us: int


class ReservedAmount(msgspec.Struct, frozen=True):
    """What a reservation took from one bucket. `amount` is None if it took nothing: settling ignores the bucket."""

    key: str
    algorithm: Algorithm
    amount: int | None


class CalendarMiss(msgspec.Struct, frozen=True):
    """The calendar windows of the quota at `index` do not reach `now_us`: evaluate again with those around it."""

    index: int
    now_us: int


def evaluate(  # noqa: C901, PLR0912, PLR0915 - the hot path: two loops, and as few calls as possible
    check: Check, now_us: int, states: Mapping[str, Any], algorithm_for: AlgorithmFor | None = None
) -> Evaluation | CalendarMiss:
    """Evaluate `check` at the store's time. `states` is not changed."""
    hold = check.hold
    allowed = True
    probed: list[tuple[Debit, Any, Any, int, int]] = []
    for debit in check.debits:
        rule, key, cost, resource, overrides = debit
        algorithm = (
            rule.algorithm if algorithm_for is None or overrides is None else algorithm_for(rule, resource, overrides)
        )
        limit = algorithm.limit
        if limit == UNLIMITED:
            probed.append((debit, algorithm, None, 0, 0))
            continue
        state = states.get(key)
        if state is None or (now_us >= state.until_us and now_us >= state.last_us):
            opened = algorithm.fresh(now_us)
        else:
            opened = algorithm.open(state, now_us if now_us > state.last_us else state.last_us)
            if opened is not None and opened.pending:
                lapse_reservations(opened, algorithm)
        if opened is None:
            return CalendarMiss(check.debits.index(debit), effective_time_us(state, now_us))
        share = limit if rule.percent == 100 else percent_of(limit, rule.percent)
        wait = 0
        if cost:
            if hold is not None and len(opened.pending) >= MAX_PENDING and rule.enforced:
                raise too_many_reservations(rule)
            wait = 0 if rule.forced else algorithm.wait(opened, cost, share)
            if wait:
                if rule.has_level and wait > opened.until_us - opened.last_us:
                    # The bucket expires before it would have that much room. 0 would mean room.
                    wait = max(opened.until_us - opened.last_us, 1)
                if rule.enforced:
                    allowed = False
        probed.append((debit, algorithm, opened, share, wait))

    # The last write of a bucket may be ahead of the clock. The TTL of a hold counts from the latest of these times.
    lapses_us = (
        0 if hold is None else hold.ttl_us + max([now_us, *(opened.last_us for _, _, opened, _, _ in probed if opened)])
    )
    delay_us = -1
    rows: list[LimitRow] = []
    writes: list[tuple[str, State]] = []
    for (rule, key, cost, _, _), algorithm, opened, share, probed_wait in probed:
        if opened is None:
            rows.append((UNLIMITED, UNLIMITED, 0, 0, 0))
            continue
        wait, written = probed_wait, False
        if wait == 0:
            if allowed and cost:
                if rule.forced:
                    written = algorithm.force(opened, cost)
                else:
                    if rule.delays:
                        delay_us = max(delay_us, algorithm.delay(opened))
                    algorithm.take(opened, cost, check.lease)
                    if hold is not None:
                        _reserve(opened, algorithm, hold, cost, lapses_us)
                    written = True
        elif rule.count_denied and not allowed and algorithm.force(opened, min(cost, algorithm.limit)):
            if wait > 0:
                wait = algorithm.wait(opened, cost, share)
            written = True
        expires_us = opened.until_us
        algorithm.seal(opened)
        if written:
            writes.append((key, opened))
        elif rule.has_level and opened.until_us > expires_us:
            opened.until_us = expires_us
        remaining = share - opened.used
        flags = OPEN_HOLD if opened.pending or (rule.holds_lease and opened.entries) else 0
        rows.append((algorithm.limit, remaining if remaining > 0 else 0, opened.until_us - opened.last_us, wait, flags))
    reserved = [_reserved_amount(hold, *probe) for probe in probed] if hold is not None and allowed else None
    return Evaluation(now_us, allowed, delay_us, rows, writes, reserved, lapses_us)


def open_state(state: State | None, algorithm: Algorithm, now_us: int) -> Any:
    """Return the bucket as it is now under `algorithm`; None if its calendar windows do not reach the time."""
    if state is None or is_expired(state, now_us):
        return algorithm.fresh(now_us)
    opened = algorithm.open(state, effective_time_us(state, now_us))
    if opened is not None and opened.pending:
        lapse_reservations(opened, algorithm)
    return opened


def lapse_reservations(opened: Any, algorithm: Algorithm) -> None:
    """End the reservations of a bucket that have lapsed, and refund those that ask for it."""
    now = opened.last_us
    if opened.pending[0].lapses_us <= now:
        for pending in opened.pending:
            if pending.lapses_us <= now and pending.refund:
                algorithm.give(opened, pending.amount, pending.source)
        opened.pending = tuple(pending for pending in opened.pending if pending.lapses_us > now)


def is_expired(state: State | None, now_us: int) -> bool:
    """Return True if a bucket is treated as if it did not exist."""
    return state is None or (now_us >= state.until_us and now_us >= state.last_us)


def effective_time_us(state: State | None, now_us: int) -> int:
    """Return the time at which a bucket is evaluated: now, but never earlier than the bucket's last write."""
    return now_us if state is None or now_us > state.last_us else state.last_us


def too_many_reservations(rule: Rule) -> TooManyReservations:
    return TooManyReservations(
        f"limit {rule.limit.name!r} has {MAX_PENDING} open reservations on this bucket; settle some first"
    )


def _reserve(opened: Any, algorithm: Algorithm, hold: Hold, amount: int, lapses_us: int) -> None:
    """Record a reservation on a bucket, sorted by lapse so that only the first needs to be compared with the time.

    Slots of a concurrency limit are not reserved. If the list of a monitored limit is full, the reservation is not
    recorded, because such a limit must not deny the check.
    """
    if algorithm.code != CONCURRENCY and len(opened.pending) < MAX_PENDING:
        added = Pending(hold.token, lapses_us, amount, algorithm.source(opened), hold.refund)
        opened.pending = tuple(sorted((*opened.pending, added), key=lambda pending: pending.lapses_us))


def _reserved_amount(
    hold: Hold, debit: Debit, algorithm: Algorithm, opened: Any, _share: int, wait: int
) -> ReservedAmount:
    _, key, cost, *_ = debit
    was_recorded = not cost or (
        opened is not None and any(pending.reservation == hold.token for pending in opened.pending)
    )
    is_untouched = opened is None or wait or algorithm.code == CONCURRENCY or not was_recorded
    return ReservedAmount(key, algorithm, None if is_untouched else cost)
