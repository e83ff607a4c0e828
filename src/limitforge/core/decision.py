"""The answer to a check."""

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
"""What a store tells of one limit: limit, remaining, reset and wait in microseconds, and 1 if a reservation or lease is
open on it, OVERFLOWED more if an overflow bucket decided.
"""
OVERFLOWED = 2


class LimitState(msgspec.Struct, frozen=True, gc=False):
    """One limit after a check. `allowed` tells whether it had room; `monitored` that it could not deny."""

    limit: int | None
    remaining: int | None
    reset_after_ms: int
    retry_after_ms: int | None
    allowed: bool
    monitored: bool


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Allowed, and the cost was taken from every limit; or not, and nothing was taken from any.

    `limit`, `remaining`, `reset_after_ms` and `reset_at` are those of the limit called `binding`: the one with the
    longest wait if denied, with the least remaining if allowed. `retry_after_ms` is None where waiting never helps.
    `degraded` tells that the store could not decide, and by which failure behaviour this was decided without it.
    `overflow` tells that the tenant has begun as many buckets as it may: a bucket decided that its new subjects share.
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
    """A group of limits as a store judged it at its time. `delay_us` is -1 where nothing is delayed."""

    now_us: int
    allowed: bool
    delay_us: int
    rows: list[LimitRow]


class CompactOutcome(msgspec.Struct, gc=False):
    """A check that was allowed by limits that are as planned, with nothing else to say: `numbers` are what each has
    left, and in how many microseconds it resets.
    """

    now_us: int
    remaining_and_reset_us: list[int]

    def expand(self, check: Check) -> Outcome:
        numbers = iter(self.remaining_and_reset_us)
        pairs = zip(numbers, numbers, strict=True)
        rows = [
            (debit[0].algorithm.limit, remaining, reset_us, 0, 0)
            for debit, (remaining, reset_us) in zip(check.debits, pairs, strict=True)
        ]
        return Outcome(self.now_us, allowed=True, delay_us=-1, rows=rows)


CheckResult = Decision | Outcome | CompactOutcome | LimitforgeError
"""What a check is answered with."""


def build_result(check: Check, outcome: Outcome) -> Decision | Outcome:
    """What a check without a candidate plan is answered with: a decision, unless what was told will do."""
    return outcome if check.result_kind is ResultKind.OUTCOME else build_decision(check, outcome)


def build_decision(check: Check, outcome: Outcome, shadow: Outcome | None = None) -> Decision:
    """Rounds what the store told, finds which limit binds, and hands out the ids of what is held."""
    allowed, delay_us = outcome.allowed, outcome.delay_us
    limits: dict[str, LimitState] = {}
    would_deny: tuple[str, ...] = ()
    binding: str | None = None
    bound: LimitState | None = None
    bound_reset_us = 0
    highest: float = 0
    takes, names = check.debits, check.names
    overflow = False
    for at, (limit, remaining, reset_us, wait_us, is_open) in enumerate(outcome.rows):
        if is_open >= OVERFLOWED:
            overflow = True
        name, enforced = names[at], takes[at][0].enforced
        unlimited = limit == UNLIMITED
        reset_ms = -(-reset_us // 1_000)
        retry_ms = 0 if not wait_us else None if wait_us == NEVER else -(-wait_us // 1_000)
        limits[name] = state = LimitState(
            None if unlimited else limit,
            None if unlimited else remaining,
            reset_ms,
            retry_ms,
            not wait_us,
            not enforced,
        )
        if not enforced:
            if wait_us:
                would_deny += (name,)
        elif not unlimited:
            # By the reported integers; the earlier limit keeps a tie.
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
    """Let a check pass without its store: nothing is known of its limits, and what it holds is of no bucket."""
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
    """Deny a check without its store, until it may be asked again. A look is allowed, as any look is."""
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
    """None for a look, which holds nothing; a lease of no slots where every concurrency limit is lifted."""
    groups = [(check, outcome)]
    if shadow is not None and check.shadow is not None and shadow.allowed:
        groups.append((check.shadow, shadow))
    asked = [
        (deciding_key(take, row), row)
        for group, judged in groups
        for take, row in zip(group.debits, judged.rows, strict=True)
        if take[2] and take[0].holds_lease
    ]
    if not asked:
        return None
    return encode_handle(
        Lease(check.lease, [encode_key(key) for key, row in asked if row[0] != UNLIMITED and row[3] == 0])
    )


def deciding_key(take: Debit, row: LimitRow) -> str:
    """Return the bucket that decided a take: its own, or the overflow bucket."""
    rule, key, *_ = take
    return overflow_key(key, rule.overflow_suffix) if row[4] >= OVERFLOWED else key


def encode_reservation_id(check: Check, outcome: Outcome) -> str:
    """The id of what a check holds, which must be held."""
    hold = cast("Hold", check.hold)
    limits = []
    for take, row, name in zip(check.debits, outcome.rows, check.names, strict=True):
        rule, key = take[0], deciding_key(take, row)
        limit = rule.limit
        calendar = (str(limit.period), limit.time_zone, limit.anchor_day) if isinstance(limit, Quota) else None
        limits.append(HeldLimit(encode_key(key), name, rule.counts_requests, calendar))
    return encode_handle(Reservation(hold.token, encode_key(hold.key), limits))
