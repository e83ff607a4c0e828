"""What was decided, counted: one list of numbers for each key, which costs a check a look-up and an addition."""

import operator
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from limitforge.catalog.live.cache.entries import Caller

MAX_TENANTS = 1_000  # that are named in metrics; whatever is beyond them is counted together
OTHER_TENANTS = "others"

ALLOWED, DENIED, WOULD_DENY, DEGRADED, OVERFLOW = range(5)
ZEROS = (0,) * 5


class KeyUsage(msgspec.Struct, frozen=True):
    """What one key did since it was last asked."""

    tenant_id: str
    key_id: str
    allowed: int
    denied: int
    would_deny: int
    degraded: int


class ProcessCounters:
    """Of one process. What was drained is in the totals by tenant, which only rise."""

    def __init__(self) -> None:
        self._requests: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._rows: dict[str, tuple[list[int], str, str]] = {}
        """By key: its numbers, whose they are, and what that tenant was called when it was first seen."""
        self._totals: dict[str, list[int]] = {}
        self.overrides_restored = 0

    def count_decision(
        self,
        caller: Caller,
        *,
        allowed: bool,
        would_deny: bool = False,
        degraded: bool = False,
        overflow: bool = False,
    ) -> None:
        known = self._rows.get(caller.key.id)
        if known is None:
            name = caller.snapshot.tenant.name
            known = self._rows[caller.key.id] = (list(ZEROS), caller.key.tenant_id, name)
        row = known[0]
        row[ALLOWED if allowed else DENIED] += 1
        if would_deny:
            row[WOULD_DENY] += 1
        if degraded:
            row[DEGRADED] += 1
        if overflow:
            row[OVERFLOW] += 1

    def count_admission(self, caller: Caller) -> None:
        """`count` for what there is most of."""
        known = self._rows.get(caller.key.id)
        if known is None:
            self.count_decision(caller, allowed=True)
        else:
            known[0][ALLOWED] += 1

    def count_restored_overrides(self, overrides: int) -> None:
        """Count overrides that the store had lost and that were set again."""
        self.overrides_restored += overrides

    def status_counts(self, call: str) -> dict[int, int]:
        """How often a call was answered with each status: for whoever counts there."""
        return self._requests[call]

    def count_response(self, call: str, status: int) -> None:
        answers = self._requests[call]
        answers[status] = answers.get(status, 0) + 1

    def requests(self) -> dict[tuple[str, int], int]:
        """By call and status, since the start."""
        return {(call, status): n for call, answers in self._requests.items() for status, n in answers.items()}

    def drain(self) -> list[KeyUsage]:
        """What each key did since this was last asked."""
        rows, self._rows = self._rows, {}
        for row, _, name in rows.values():
            add_row(self._totals, name, row)
        return [KeyUsage(tenant_id, key_id, *row[:OVERFLOW]) for key_id, (row, tenant_id, _) in rows.items()]

    def totals(self) -> dict[str, list[int]]:
        """By tenant, since the start."""
        totals = {name: list(row) for name, row in self._totals.items()}
        for row, _, name in self._rows.values():
            add_row(totals, name, row)
        return totals


def add_row(totals: dict[str, list[int]], name: str, row: Iterable[int]) -> None:
    """The first tenants keep their names; those that come when there is no room for more are others."""
    is_named = name in totals or len(totals) < MAX_TENANTS
    known = totals.setdefault(name if is_named else OTHER_TENANTS, list(ZEROS))
    known[:] = map(operator.add, known, row)
