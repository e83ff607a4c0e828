"""Decisions, and the outcomes that stores return before they are rounded into a decision."""

from math import inf
from typing import cast

import msgspec

from limitforge.core.algorithms.base import NEVER, UNLIMITED
from limitforge.core.check import Check, Debit, Failure, Hold, ResultKind
from limitforge.core.handles import HeldLimit, Lease, Reservation, empty_reservation, encode_handle
from limitforge.core.keys import encode_key, overflow_key
from limitforge.core.limits import Quota
from limitforge.errors import LimitforgeError

LimitRow = tuple[int, int, int, int, int]
"""The state of one limit as a store returns it: limit, remaining, reset and wait in microseconds, and flags.

The flags are OPEN_HOLD if a reservation or lease is open on the bucket, plus OVERFLOWED if an overflow bucket decided.
"""
OPEN_HOLD = 1
OVERFLOWED = 2


class LimitState(msgspec.Struct, frozen=True, gc=False):
    """The state of one limit after a check.

    `limit` and `remaining` are None if the limit is unlimited, `retry_after_ms` is None if waiting never helps.
    `allowed` is true if the limit had room. A `monitored` limit can't deny a check.
    """

    limit: int | None
    remaining: int | None
    reset_after_ms: int
    retry_after_ms: int | None
    allowed: bool
    monitored: bool


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The result of a check.

    If the store `allowed` the check, its cost was taken from every limit, except from monitored limits without room. If
    the check was denied, nothing was taken, except by limits with `count_denied`.

    `limit`, `remaining`, `reset_after_ms` and `reset_at` (epoch seconds) belong to the limit that `binding` names: the
    one with the longest wait if the check is denied, the one with the least remaining if it is allowed. They are None
    if every enforced limit is unlimited. `retry_after_ms` is 0 if allowed, and None if waiting never helps. `delay_ms`
    is how long to wait before going ahead, if a leaky bucket applies. `limits` has the state of each limit by name, and
    `would_deny` the names of monitored limits without room.

    `degraded` names the failure behaviour that decided because the store could not. `lease_id` is for `release` and
    `renew`, `reservation_id` for `settle`. `shadow` is the decision of the candidate plan. `overflow` is true if an
    overflow bucket decided, because the tenant had created as many buckets as it may.
    """

    allowed: bool
    limit: int | None
    remaining: int | None
    reset_after_ms: int | None
    reset_at: int | None
    retry_after_ms: int | None
    delay_ms: int | None
    limits: dict[str, LimitState]
    binding: str | None
    would_deny: tuple[str, ...] = ()
    degraded: str | None = None
    lease_id: str | None = None
    reservation_id: str | None = None
    shadow: "Decision | None" = None
    overflow: bool = False


class Outcome(msgspec.Struct, gc=False):
    """The result of a check in microseconds, at the store's time. `delay_us` is -1 without a delay."""

    now_us: int
    allowed: bool
    delay_us: int
    rows: list[LimitRow]


class CompactOutcome(msgspec.Struct, gc=False):
    """The outcome of an allowed check whose limits have the parameters of the plan, with nothing else to report.

    `remaining_and_reset_us` alternates: what the first limit has left, the microseconds until it resets, and so on.
    """

    now_us: int
    remaining_and_reset_us: list[int]

    def expand(self, check: Check) -> Outcome:
        """Return the same outcome with a row for each limit."""
        alternating = iter(self.remaining_and_reset_us)
        pairs = zip(alternating, alternating, strict=True)
        rows = [
            (debit[0].algorithm.limit, remaining, reset_us, 0, 0)
            for debit, (remaining, reset_us) in zip(check.debits, pairs, strict=True)
        ]
        return Outcome(self.now_us, allowed=True, delay_us=-1, rows=rows)


CheckResult = Decision | Outcome | CompactOutcome | LimitforgeError
"""What a store returns for a check. `ResultKind` says when it is an outcome."""


def build_result(check: Check, outcome: Outcome) -> Decision | Outcome:
    """Return the result of a check without a shadow plan, of the kind that the check asks for."""
    return outcome if check.result_kind is ResultKind.OUTCOME else build_decision(check, outcome)


def build_decision(check: Check, outcome: Outcome, shadow: Outcome | None = None) -> Decision:
    """Round an outcome, find the binding limit, and add the ids of leases and reservations."""
    allowed, delay_us = outcome.allowed, outcome.delay_us
    limits: dict[str, LimitState] = {}
    would_deny: tuple[str, ...] = ()
    binding: str | None = None
    bound: LimitState | None = None
    bound_reset_us = 0
    highest: float = 0
    debits, names = check.debits, check.names
    overflow = False
    for index, (limit, remaining, reset_us, wait_us, flags) in enumerate(outcome.rows):
        if flags & OVERFLOWED:
            overflow = True
        name, enforced = names[index], debits[index][0].enforced
        is_unlimited = limit == UNLIMITED
        reset_ms = -(-reset_us // 1_000)
        retry_ms = 0 if not wait_us else None if wait_us == NEVER else -(-wait_us // 1_000)
        limits[name] = state = LimitState(
            None if is_unlimited else limit,
            None if is_unlimited else remaining,
            reset_ms,
            retry_ms,
            not wait_us,
            not enforced,
        )
        if not enforced:
            if wait_us:
                would_deny += (name,)
        elif not is_unlimited:
            # Rank by the reported integers. Of equal limits the first one binds.
            rank = -remaining if allowed else inf if retry_ms is None else retry_ms
            if bound is None or rank > highest or (rank == highest and allowed and reset_ms > bound.reset_after_ms):
                binding, bound, bound_reset_us, highest = name, state, reset_us, rank
    if bound is None:
        decision = Decision(allowed, None, None, None, None, 0, None, limits, None, would_deny, overflow=overflow)
    else:
        decision = Decision(
            allowed,
            bound.limit,
            bound.remaining,
            bound.reset_after_ms,
            -(-(outcome.now_us + bound_reset_us) // 1_000_000),
            0 if allowed else bound.retry_after_ms,
            -(-delay_us // 1_000) if delay_us >= 0 else None,
            limits,
            binding,
            would_deny,
            overflow=overflow,
        )
    if check.lease or check.hold is not None or shadow is not None:
        return _with_ids(decision, check, outcome, shadow)
    return decision


def fail_open_decision(check: Check) -> Decision:
    """Allow a check without its store. The state of its limits is unknown, and a lease or reservation holds nothing."""
    return Decision(
        allowed=True,
        limit=None,
        remaining=None,
        reset_after_ms=None,
        reset_at=None,
        retry_after_ms=0,
        delay_ms=None,
        limits={},
        binding=None,
        degraded=Failure.OPEN.value,
        lease_id=encode_handle(Lease(check.lease, []))
        if any(c and r.holds_lease for r, _, c, *_ in check.debits)
        else None,
        reservation_id=None if check.hold is None else encode_handle(empty_reservation(encode_key(check.hold.key))),
    )


def fail_closed_decision(check: Check, retry_after_ms: int) -> Decision:
    """Deny a check without its store, until the store may be called again. A peek is always allowed."""
    allowed = not any(cost for _, _, cost, *_ in check.debits)
    return Decision(
        allowed=allowed,
        limit=None,
        remaining=None,
        reset_after_ms=None,
        reset_at=None,
        retry_after_ms=0 if allowed else retry_after_ms,
        delay_ms=None,
        limits={},
        binding=None,
        degraded=Failure.CLOSED.value,
    )


def _with_ids(decision: Decision, check: Check, outcome: Outcome, shadow: Outcome | None) -> Decision:
    return msgspec.structs.replace(
        decision,
        lease_id=_lease_id(check, outcome, shadow) if decision.allowed and check.lease else None,
        reservation_id=encode_reservation_id(check, outcome) if decision.allowed and check.hold is not None else None,
        shadow=None if shadow is None or check.shadow is None else build_decision(check.shadow, shadow),
    )


def _lease_id(check: Check, outcome: Outcome, shadow: Outcome | None) -> str | None:
    """Return None for a peek, which holds nothing. The lease has no slots if every concurrency limit is unlimited."""
    groups = [(check, outcome)]
    if shadow is not None and check.shadow is not None and shadow.allowed:
        groups.append((check.shadow, shadow))
    held = [
        (deciding_key(debit, row), row)
        for group, group_outcome in groups
        for debit, row in zip(group.debits, group_outcome.rows, strict=True)
        if debit[2] and debit[0].holds_lease
    ]
    if not held:
        return None
    return encode_handle(
        Lease(check.lease, [encode_key(key) for key, row in held if row[0] != UNLIMITED and row[3] == 0])
    )


def deciding_key(debit: Debit, row: LimitRow) -> str:
    """Return the key of the bucket that decided a debit: its own, or the overflow bucket."""
    rule, key, *_ = debit
    return overflow_key(key, rule.overflow_suffix) if row[4] & OVERFLOWED else key


def encode_reservation_id(check: Check, outcome: Outcome) -> str:
    """Return the id of the reservation that an allowed check made."""
    hold = cast("Hold", check.hold)
    limits = []
    for debit, row, name in zip(check.debits, outcome.rows, check.names, strict=True):
        rule, key = debit[0], deciding_key(debit, row)
        limit = rule.limit
        calendar = (str(limit.period), limit.time_zone, limit.anchor_day) if isinstance(limit, Quota) else None
        limits.append(HeldLimit(encode_key(key), name, rule.counts_requests, calendar))
    return encode_handle(Reservation(hold.token, encode_key(hold.key), limits))
