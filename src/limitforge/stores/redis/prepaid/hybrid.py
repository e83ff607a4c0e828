"""Checks of which this process decides a part: limits that are leased, or divided by the nodes that are alive.

What can be decided here is taken here first; the rest, if there is any, is asked of the store. If that denies, what was
taken here goes back. So such a check is all or nothing, too.
"""

import os
from itertools import chain, repeat

import msgspec

from limitforge.core.algorithms.base import UNLIMITED
from limitforge.core.check import TOKEN_BYTES, Check, Debit, Hold, ResultKind
from limitforge.core.decision import Decision, LimitRow, Outcome, build_result, deciding_key
from limitforge.core.plan import weight_us
from limitforge.errors import LimitforgeError
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.options import MAX_DEADLINE_MS
from limitforge.stores.redis.prepaid.shares import PrepaidShares
from limitforge.stores.redis.topology.cross_slot import UNKNOWN_ROW

HOLD_US = 2_000 * MAX_DEADLINE_MS


class HybridCheck(msgspec.Struct):
    """A check of which a part was taken here. `rest` is for the store, None if nothing is left to ask."""

    check: Check
    rows: list[LimitRow | None]
    now_us: int
    spent_shares: list[tuple[Debit, int]]
    held_buckets: dict[int, str]
    """The bucket of this process that holds each take, by place."""
    token: bytes = b""
    delay_us: int = -1
    is_denied: bool = False
    store_part: Check | None = None


class HybridDecider:
    """Decides here what may be decided here; `local` divides limits by the nodes that are alive."""

    def __init__(self, shares: PrepaidShares, local: MemoryStore) -> None:
        self.shares = shares
        self._local = local

    def decide_from_share(self, check: Check) -> Decision | Outcome | None:
        """The whole check, if a share of its only limit pays for it; the most frequent case has a short way."""
        if not _is_one_prepaid_limit(check):
            return None
        spent = self.shares.spend(check.debits[0])
        if spent is None:
            return None
        return build_result(check, Outcome(self._local.now_us(), allowed=True, delay_us=-1, rows=[spent[0]]))

    def begin(self, check: Check) -> HybridCheck:
        """Take here what can be taken here, after `decide` could not. A reservation is held in the store, whatever its
        limits say.
        """
        blend = HybridCheck(check, [None] * len(check.debits), self._local.now_us(), [], {})
        local = [place for place, take in enumerate(check.debits) if take[0].local]
        if local:
            self._debit_locally(blend, local, is_whole=len(local) == len(check.debits))
        if check.hold is None and not blend.is_denied and not _is_one_prepaid_limit(check):
            for place, take in enumerate(check.debits):
                if take[0].prepaid and take[2] and (spent := self.shares.spend(take)) is not None:
                    blend.rows[place] = spent[0]
                    blend.spent_shares.append((take, spent[1]))
        takes = [take for take, row in zip(check.debits, blend.rows, strict=True) if row is None]
        if takes:
            blend.store_part = self._store_part(blend, takes)
        return blend

    def complete(self, blend: HybridCheck, outcome: Outcome | LimitforgeError | None) -> Outcome | LimitforgeError:
        """Put together what was decided here and there; if the check is denied or failed, nothing stays taken here."""
        allowed = not blend.is_denied and (outcome is None or (isinstance(outcome, Outcome) and outcome.allowed))
        if not allowed:
            self._give_back(blend)
        elif blend.held_buckets:
            self._local.end_holds(list(blend.held_buckets.values()), blend.token, confirm=True)
        if isinstance(outcome, LimitforgeError):
            if not blend.is_denied:
                return outcome
            outcome = None  # this process denies by itself, whether or not the rest can be asked
        told: list[LimitRow] = [] if outcome is None else outcome.rows
        asked = chain(told, repeat(UNKNOWN_ROW))
        rows: list[LimitRow] = [next(asked) if row is None else row for row in blend.rows]
        now_us = blend.now_us if outcome is None else outcome.now_us
        delay_us = blend.delay_us if outcome is None else max(blend.delay_us, outcome.delay_us)
        return Outcome(now_us, allowed, delay_us if allowed else -1, rows)

    def _give_back(self, blend: HybridCheck) -> None:
        """Nothing stays taken, and what is told of each limit is how it is without."""
        for take, epoch in blend.spent_shares:
            self.shares.refund(take, epoch)
        spent = [take for take, _ in blend.spent_shares]
        if blend.held_buckets:
            self._local.end_holds(list(blend.held_buckets.values()), blend.token, confirm=False)
        for place, (take, row) in enumerate(zip(blend.check.debits, blend.rows, strict=True)):
            rule, key, cost, resource, _ = take
            if row is not None and place in blend.held_buckets:
                look = Check(
                    [(rule, key, 0, resource, None)], ("",), is_dynamic=blend.check.is_dynamic, is_partly_local=True
                )
                blend.rows[place] = (*self._local.evaluate(look).rows[0][:3], row[3], row[4])
            elif row is not None and take in spent:
                blend.rows[place] = (row[0], row[1] + cost, *row[2:])

    def _debit_locally(self, blend: HybridCheck, places: list[int], *, is_whole: bool) -> None:
        """Held for as long as the rest may take; if there is no rest there is nothing to hold it for."""
        check = blend.check
        takes: list[Debit] = [(*check.debits[place][:4], None) for place in places]
        blend.token = b"" if is_whole else os.urandom(TOKEN_BYTES)
        hold = None if is_whole else Hold("", blend.token, HOLD_US, refund=True)
        names = tuple(check.names[place] for place in places)
        outcome = self._local.evaluate(
            Check(takes, names, is_dynamic=check.is_dynamic, hold=hold, is_partly_local=True)
        )
        blend.is_denied, blend.delay_us = not outcome.allowed, outcome.delay_us
        for place, row in zip(places, outcome.rows, strict=True):
            take = check.debits[place]
            blend.rows[place] = row
            if hold is not None and outcome.allowed and take[2] and row[0] != UNLIMITED and not row[3]:
                blend.held_buckets[place] = deciding_key(take, row)

    def _store_part(self, blend: HybridCheck, takes: list[Debit]) -> Check:
        """For the store: to be taken, or only looked at if this process has denied the check already."""
        check = blend.check
        if blend.is_denied:
            takes = [(rule, key, 0, *others) for rule, key, _, *others in takes]  # type: ignore[misc]
        left = {take[1] for take in takes}
        names = [name for name, take in zip(check.names, check.debits, strict=True) if take[1] in left]
        return Check(
            takes,
            tuple(names),
            lease=check.lease,
            is_dynamic=check.is_dynamic,
            weight_us=weight_us(rule for rule, *_ in takes),
            hold=None if blend.is_denied else check.hold,
            result_kind=ResultKind.PART,
        )


def _is_one_prepaid_limit(check: Check) -> bool:
    """One leased limit, and nothing beside it."""
    takes = check.debits
    return len(takes) == 1 and takes[0][0].prepaid and takes[0][2] > 0 and check.hold is None and check.shadow is None
