"""The walk of one check over its buckets: probe all, then commit all or none. `lua/check.lua` is its twin."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from limitforge.core.algorithms.concurrency import ConcurrencySteps
from limitforge.core.algorithms.leaky_bucket import LeakyBucketSteps
from limitforge.core.algorithms.steps import UNLIMITED, Pending, State, Steps
from limitforge.core.check import Check, Hold, Take
from limitforge.core.decision import Outcome
from limitforge.core.exact import share_of
from limitforge.core.plan import Rule
from limitforge.errors import TooManyReservations

MAX_PENDING = 1_000
LEAKY_BUCKET = LeakyBucketSteps.code
CONCURRENCY = ConcurrencySteps.code

StepsFor = Callable[[Take], Steps]
"""The numbers that hold for a take now: its rule's, or those of an override."""


class Verdict(Outcome, gc=False):
    """What was decided, with the states to store. `held` is what each take took, for a reservation."""

    writes: list[tuple[str, State]]
    held: list["Held"]


class Held(msgspec.Struct, frozen=True):
    """What a reservation took of one bucket; `amount` is None where it took nothing and never will."""

    key: str
    steps: Steps
    amount: int | None


class Again(msgspec.Struct, frozen=True):
    """The windows of the quota at this place do not reach `now_us`: ask once more with those around it."""

    at: int
    now_us: int


def decide(  # noqa: C901, PLR0912, PLR0915 - the hot path: two loops, and no call that can be spared
    check: Check, now_us: int, states: Mapping[str, Any], steps_for: StepsFor | None = None
) -> Verdict | Again:
    """Judge `check` at the store's time. `states` is only read."""
    hold = check.hold
    allowed = True
    probed: list[tuple[Take, Rule, Any, Any, int, int]] = []
    for take in check.takes:
        rule = take.rule
        steps = rule.steps if steps_for is None or take.overrides is None else steps_for(take)
        limit = steps.limit
        if limit == UNLIMITED:
            probed.append((take, rule, steps, None, 0, 0))
            continue
        state = states.get(take.key)
        if state is None or (now_us >= state.until and now_us >= state.last):
            work = steps.fresh(now_us)
        else:
            work = steps.open(state, now_us if now_us > state.last else state.last)
            if work is not None and work.pending:
                lapse(work, steps)
        if work is None:
            return Again(check.takes.index(take), judged_at(state, now_us))
        share = limit if rule.percent == 100 else share_of(limit, rule.percent)
        wait = 0
        if take.cost:
            if hold is not None and len(work.pending) >= MAX_PENDING:
                raise too_many_reservations(rule)
            wait = steps.wait(work, take.cost, share)
            if wait and rule.enforced:
                allowed = False
        probed.append((take, rule, steps, work, share, wait))

    verdict = Verdict(allowed, -1, [], [], [])
    for take, rule, steps, work, share, probed_wait in probed:
        wait = probed_wait
        if work is None:
            verdict.rows.append((UNLIMITED, UNLIMITED, 0, 0, 0))
        else:
            changed = False
            if wait == 0:
                if allowed and take.cost:
                    changed = True
                    if steps.code == LEAKY_BUCKET and rule.enforced:
                        verdict.delay_us = max(verdict.delay_us, steps.delay(work))
                    steps.take(work, take.cost, check.lease)
                    if hold is not None:
                        _reserve(work, steps, hold, take.cost, now_us)
            elif rule.count_denied and not allowed and steps.force(work, min(take.cost, steps.limit)):
                changed = True
                if wait > 0:
                    wait = steps.wait(work, take.cost, share)
            steps.seal(work)
            if changed:
                verdict.writes.append((take.key, work))
            is_open = 1 if work.pending or (steps.code == CONCURRENCY and work.items) else 0
            left = share - work.used
            verdict.rows.append((steps.limit, left if left > 0 else 0, work.until - work.last, wait, is_open))
        if hold is not None and allowed:
            untouched = work is None or wait or steps.code == CONCURRENCY
            verdict.held.append(Held(take.key, steps, None if untouched else take.cost))
    return verdict


def opened(state: State | None, steps: Steps, now_us: int) -> Any:
    """The bucket as it is now under `steps`; None if a calendar does not reach that far."""
    if state is None or is_gone(state, now_us):
        return steps.fresh(now_us)
    work = steps.open(state, judged_at(state, now_us))
    if work is not None and work.pending:
        lapse(work, steps)
    return work


def lapse(work: Any, steps: Steps) -> None:
    """Give back what was reserved for refund and is over; forget what was to be kept."""
    now = work.last
    if work.pending[0].lapses_us <= now:
        for pending in work.pending:
            if pending.lapses_us <= now and pending.refund:
                steps.give(work, pending.amount, pending.source)
        work.pending = tuple(pending for pending in work.pending if pending.lapses_us > now)


def is_gone(state: State | None, now_us: int) -> bool:
    """Whether a bucket no longer matters, and is treated as if it were not there."""
    return state is None or (now_us >= state.until and now_us >= state.last)


def judged_at(state: State | None, now_us: int) -> int:
    """A clock that steps back stands still, per bucket."""
    return now_us if state is None or now_us > state.last else state.last


def too_many_reservations(rule: Rule) -> TooManyReservations:
    return TooManyReservations(
        f"limit {rule.limit.name!r} holds {MAX_PENDING} open reservations of this bucket; settle some first"
    )


def _reserve(work: Any, steps: Steps, hold: Hold, amount: int, now_us: int) -> None:
    """In the order of their lapses, so that one look at the first tells whether any is due. Slots are not reserved."""
    if steps.code != CONCURRENCY:
        added = Pending(hold.token, now_us + hold.ttl_us, amount, steps.source(work), hold.refund)
        work.pending = tuple(sorted((*work.pending, added), key=lambda pending: pending.lapses_us))
