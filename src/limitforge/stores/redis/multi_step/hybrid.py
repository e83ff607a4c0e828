"""Hybrid checks: this process decides the prepaid and local limits, the store decides the others.

The process debits its part first. The store then decides the rest, if there is any. If the store denies, the process
refunds its part, so that such a check is all or nothing as well.
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
from limitforge.stores.redis.multi_step.cross_slot import UNKNOWN_ROW
from limitforge.stores.redis.prepaid.shares import PrepaidShares

LOCAL_HOLD_TTL_US = 2_000 * MAX_DEADLINE_MS


class HybridCheck(msgspec.Struct):
    """A check whose local part this process has debited. `store_part` is None if the store need not be asked."""

    check: Check
    rows: list[LimitRow | None]
    now_us: int
    spent_shares: list[tuple[Debit, int]]
    held_buckets: dict[int, str]
    """The bucket in this process that holds the debit, by its position in the check."""
    token: bytes = b""
    delay_us: int = -1
    is_denied: bool = False
    store_part: Check | None = None


class HybridDecider:
    """Decides the part of a check that this process may decide. `local` divides limits by the live processes."""

    def __init__(self, shares: PrepaidShares, local: MemoryStore) -> None:
        self.shares = shares
        self._local = local

    def decide_from_share(self, check: Check) -> Decision | Outcome | None:
        """Decide a check of a single prepaid limit if its share covers the cost, else return None.

        A short path for the most frequent case.
        """
        if not _is_one_prepaid_limit(check):
            return None
        spent = self.shares.spend(check.debits[0])
        if spent is None:
            return None
        return build_result(check, Outcome(self._local.now_us(), allowed=True, delay_us=-1, rows=[spent[0]]))

    def begin(self, check: Check) -> HybridCheck:
        """Debit what this process can decide, after `decide_from_share` returned None.

        The store decides all prepaid limits of a reservation, because it holds the reservation.
        """
        hybrid = HybridCheck(check, [None] * len(check.debits), self._local.now_us(), [], {})
        local = [index for index, debit in enumerate(check.debits) if debit[0].local]
        if local:
            self._debit_locally(hybrid, local, is_whole=len(local) == len(check.debits))
        if check.hold is None and not hybrid.is_denied and not _is_one_prepaid_limit(check):
            for index, debit in enumerate(check.debits):
                if debit[0].prepaid and debit[2] and (spent := self.shares.spend(debit)) is not None:
                    hybrid.rows[index] = spent[0]
                    hybrid.spent_shares.append((debit, spent[1]))
        undecided = [debit for debit, row in zip(check.debits, hybrid.rows, strict=True) if row is None]
        if undecided:
            hybrid.store_part = self._store_part(hybrid, undecided)
        return hybrid

    def complete(self, hybrid: HybridCheck, outcome: Outcome | LimitforgeError | None) -> Outcome | LimitforgeError:
        """Combine the local rows with the store's outcome. If the check is denied or failed, refund the local part."""
        allowed = not hybrid.is_denied and (outcome is None or (isinstance(outcome, Outcome) and outcome.allowed))
        if not allowed:
            self._refund(hybrid)
        elif hybrid.held_buckets:
            self._local.finish_holds(list(hybrid.held_buckets.values()), hybrid.token, confirm=True)
        if isinstance(outcome, LimitforgeError):
            if not hybrid.is_denied:
                return outcome
            outcome = None  # the local denial stands, even if the store can't report the other limits
        store_rows = chain([] if outcome is None else outcome.rows, repeat(UNKNOWN_ROW))
        rows: list[LimitRow] = [next(store_rows) if row is None else row for row in hybrid.rows]
        now_us = hybrid.now_us if outcome is None else outcome.now_us
        delay_us = hybrid.delay_us if outcome is None else max(hybrid.delay_us, outcome.delay_us)
        return Outcome(now_us, allowed, delay_us if allowed else -1, rows)

    def _refund(self, hybrid: HybridCheck) -> None:
        """Refund what this process has debited, and update its rows to the state after the refund."""
        for debit, balance_id in hybrid.spent_shares:
            self.shares.refund(debit, balance_id)
        spent = [debit for debit, _ in hybrid.spent_shares]
        if hybrid.held_buckets:
            self._local.finish_holds(list(hybrid.held_buckets.values()), hybrid.token, confirm=False)
        for index, (debit, row) in enumerate(zip(hybrid.check.debits, hybrid.rows, strict=True)):
            rule, key, cost, resource, _ = debit
            if row is not None and index in hybrid.held_buckets:
                peek = Check(
                    [(rule, key, 0, resource, None)], ("",), is_dynamic=hybrid.check.is_dynamic, is_hybrid=True
                )
                hybrid.rows[index] = (*self._local.evaluate_part(peek).rows[0][:3], row[3], row[4])
            elif row is not None and debit in spent:
                hybrid.rows[index] = (row[0], row[1] + cost, *row[2:])

    def _debit_locally(self, hybrid: HybridCheck, indexes: list[int], *, is_whole: bool) -> None:
        """Debit local limits. Unless they are the whole check, hold the debits until the store has answered."""
        check = hybrid.check
        debits: list[Debit] = [(*check.debits[index][:4], None) for index in indexes]
        hybrid.token = b"" if is_whole else os.urandom(TOKEN_BYTES)
        hold = None if is_whole else Hold("", hybrid.token, LOCAL_HOLD_TTL_US, refund=True)
        names = tuple(check.names[index] for index in indexes)
        outcome = self._local.evaluate_part(
            Check(debits, names, is_dynamic=check.is_dynamic, hold=hold, is_hybrid=True)
        )
        hybrid.is_denied, hybrid.delay_us = not outcome.allowed, outcome.delay_us
        for index, row in zip(indexes, outcome.rows, strict=True):
            debit = check.debits[index]
            hybrid.rows[index] = row
            if hold is not None and outcome.allowed and debit[2] and row[0] != UNLIMITED and not row[3]:
                hybrid.held_buckets[index] = deciding_key(debit, row)

    def _store_part(self, hybrid: HybridCheck, debits: list[Debit]) -> Check:
        """Return the check for the store. It is a peek if this process has denied the check already."""
        check = hybrid.check
        if hybrid.is_denied:
            debits = [(rule, key, 0, *others) for rule, key, _, *others in debits]  # type: ignore[misc]
        keys = {debit[1] for debit in debits}
        names = [name for name, debit in zip(check.names, check.debits, strict=True) if debit[1] in keys]
        return Check(
            debits,
            tuple(names),
            lease=check.lease,
            is_dynamic=check.is_dynamic,
            weight_us=weight_us(rule for rule, *_ in debits),
            hold=None if hybrid.is_denied else check.hold,
            result_kind=ResultKind.PART,
        )


def _is_one_prepaid_limit(check: Check) -> bool:
    debits = check.debits
    return (
        len(debits) == 1 and debits[0][0].prepaid and debits[0][2] > 0 and check.hold is None and check.shadow is None
    )
