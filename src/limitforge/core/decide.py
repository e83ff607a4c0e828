"""The walk of one check over its buckets: probe all, then commit all or none. `lua/check.lua` is its twin."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from limitforge.core.algorithms.concurrency import ConcurrencySteps
from limitforge.core.algorithms.leaky_bucket import LeakyBucketSteps
from limitforge.core.algorithms.steps import Pending, State, Steps
from limitforge.core.check import Check, Hold, Take
from limitforge.core.decision import Row
from limitforge.core.exact import share_of
from limitforge.errors import TooManyReservations

MAX_PENDING = 1_000

StepsFor = Callable[[Take], Steps]
"""The numbers that hold for a take now: its rule's, or those of an override."""


class Verdict(msgspec.Struct):
    """What was decided, with the states to store. `held` is what each take took from where, for a reservation."""

    allowed: bool
    delay_us: int
    rows: list[Row]
    writes: list[tuple[str, State]]
    held: list["Held"]


class Held(msgspec.Struct, frozen=True):
    """What a reservation took of one bucket; `amount` is None where it took nothing and never will."""

    key: str
    steps: Steps
    amount: int | None
    source: int


class Again(msgspec.Struct, frozen=True):
    """The windows of the quota at this place do not reach `now_us`: ask once more with those around it."""

    at: int
    now_us: int


def decide(check: Check, now_us: int, states: Mapping[str, Any], steps_for: StepsFor | None = None) -> Verdict | Again:
    """Judge `check` at the store's time. `states` is only read."""
    probed = []
    allowed = True
    for at, take in enumerate(check.takes):
        rule = take.rule
        steps = rule.steps if steps_for is None or take.overrides is None else steps_for(take)
        limit = steps.limit
        if limit < 0:
            probed.append((take, steps, None, 0, 0))
            continue
        state = states.get(take.key)
        work = opened(state, steps, now_us)
        if work is None:
            return Again(at, judged_at(state, now_us))
        if check.hold is not None and take.cost and len(work.pending) >= MAX_PENDING:
            raise TooManyReservations(
                f"limit {rule.limit.name!r} holds {MAX_PENDING} open reservations of this bucket; settle some first"
            )
        share = limit if rule.percent == 100 else share_of(limit, rule.percent)
        wait = steps.wait(work, take.cost, share) if take.cost else 0
        if wait and rule.enforced:
            allowed = False
        probed.append((take, steps, work, share, wait))
    verdict = Verdict(allowed, -1, [], [], [])
    for take, steps, work, share, wait in probed:
        _commit(check, verdict, take, steps, work, share, wait, now_us)
    return verdict


def _commit(
    check: Check, verdict: Verdict, take: Take, steps: Steps, work: Any, share: int, wait: int, now_us: int
) -> None:
    cost, taken = take.cost, 0
    if work is None:
        verdict.rows.append((-1, -1, 0, 0, 0))
    else:
        if verdict.allowed:
            if cost and not wait:
                taken = cost
                if take.rule.enforced and isinstance(steps, LeakyBucketSteps):
                    verdict.delay_us = max(verdict.delay_us, steps.delay(work))
                steps.take(work, cost, check.lease)
                if check.hold is not None and not isinstance(steps, ConcurrencySteps):
                    work.pending = _with_pending(work.pending, check.hold, cost, steps.source(work), now_us)
                _store(verdict, take.key, steps, work)
        elif wait and take.rule.count_denied and steps.force(work, min(cost, steps.limit)):
            if wait > 0:
                wait = steps.wait(work, cost, share)
            _store(verdict, take.key, steps, work)
        remaining, reset = steps.view(work, share)
        is_open = bool(work.pending) or (isinstance(steps, ConcurrencySteps) and bool(work.items))
        verdict.rows.append((steps.limit, remaining, reset, wait, 1 if is_open else 0))
    if check.hold is not None and verdict.allowed:
        verdict.held.append(_held(take, steps, work, taken, wait))


def opened(state: Any, steps: Steps, now_us: int) -> Any:
    """The bucket as it is now under `steps`, with what has lapsed given back; None if a calendar does not reach that
    far.
    """
    if is_gone(state, now_us):
        return steps.fresh(now_us)
    now = judged_at(state, now_us)
    work = steps.open(state, now)
    if work is not None and work.pending and work.pending[0].lapses_us <= now:
        for pending in work.pending:
            if pending.lapses_us <= now and pending.refund:
                steps.give(work, pending.amount, pending.source)
        work.pending = tuple(pending for pending in work.pending if pending.lapses_us > now)
    return work


def is_gone(state: State | None, now_us: int) -> bool:
    """Whether a bucket no longer matters, and is treated as if it were not there."""
    return state is None or (now_us >= state.until and now_us >= state.last)


def judged_at(state: State | None, now_us: int) -> int:
    """A clock that steps back stands still, per bucket."""
    return now_us if state is None or now_us > state.last else state.last


def _store(verdict: Verdict, key: str, steps: Steps, work: Any) -> None:
    steps.seal(work)
    verdict.writes.append((key, work))


def _with_pending(
    pending: tuple[Pending, ...], hold: Hold, amount: int, source: int, now_us: int
) -> tuple[Pending, ...]:
    """In the order of their lapses, so that one look at the first tells whether any is due."""
    added = Pending(hold.token, now_us + hold.ttl_us, amount, source, hold.refund)
    return tuple(sorted((*pending, added), key=lambda p: p.lapses_us))


def _held(take: Take, steps: Steps, work: Any, taken: int, wait: int) -> Held:
    untouched = work is None or bool(wait) or isinstance(steps, ConcurrencySteps)
    return Held(take.key, steps, None if untouched else taken, steps.source(work) if taken and not untouched else 0)
