"""The counters of one process: a row of numbers for each API key, so counting a check is a lookup and an addition."""

import operator
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from limitforge.catalog.live.cache.entries import Caller

MAX_NAMED_TENANTS = 1_000  # tenants that are named in metrics; the others are counted together
OTHER_TENANTS = "others"

ALLOWED, DENIED, WOULD_DENY, DEGRADED, OVERFLOW = range(5)
ZEROS = (0,) * 5


class KeyUsage(msgspec.Struct, frozen=True):
    """The decisions for one key since the last `drain`."""

    tenant_id: str
    key_id: str
    allowed: int
    denied: int
    would_deny: int
    degraded: int


class ProcessCounters:
    """Counts decisions by key and responses by call. The totals by tenant never decrease."""

    def __init__(self) -> None:
        self._requests: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._rows: dict[str, tuple[list[int], str, str]] = {}
        """By key id: the numbers since the last drain, the tenant id, and the tenant's name at the first check."""
        self._totals: dict[str, list[int]] = {}
        """By tenant name: the numbers up to the last drain."""
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
        entry = self._rows.get(caller.key.id)
        if entry is None:
            name = caller.snapshot.tenant.name
            entry = self._rows[caller.key.id] = (list(ZEROS), caller.key.tenant_id, name)
        row = entry[0]
        row[ALLOWED if allowed else DENIED] += 1
        if would_deny:
            row[WOULD_DENY] += 1
        if degraded:
            row[DEGRADED] += 1
        if overflow:
            row[OVERFLOW] += 1

    def count_admission(self, caller: Caller) -> None:
        """Count the most frequent decision, a plain admission, faster than `count_decision`."""
        entry = self._rows.get(caller.key.id)
        if entry is None:
            self.count_decision(caller, allowed=True)
        else:
            entry[0][ALLOWED] += 1

    def count_restored_overrides(self, overrides: int) -> None:
        """Count overrides that the store had lost and that were set again."""
        self.overrides_restored += overrides

    def response_counter(self, call: str) -> dict[int, int]:
        """Return the counter of a call's responses by status. The HTTP front end increments it."""
        return self._requests[call]

    def count_response(self, call: str, status: int) -> None:
        counts = self._requests[call]
        counts[status] = counts.get(status, 0) + 1

    def requests(self) -> dict[tuple[str, int], int]:
        """Return the responses since the start, by call and status."""
        return {(call, status): n for call, counts in self._requests.items() for status, n in counts.items()}

    def drain(self) -> list[KeyUsage]:
        """Return the decisions by key since the last call."""
        rows, self._rows = self._rows, {}
        for row, _, name in rows.values():
            add_row(self._totals, name, row)
        return [KeyUsage(tenant_id, key_id, *row[:OVERFLOW]) for key_id, (row, tenant_id, _) in rows.items()]

    def totals(self) -> dict[str, list[int]]:
        """Return the decisions since the start, by tenant name."""
        totals = {name: list(row) for name, row in self._totals.items()}
        for row, _, name in self._rows.values():
            add_row(totals, name, row)
        return totals


def add_row(totals: dict[str, list[int]], name: str, row: Iterable[int]) -> None:
    """Add a row to the totals of a tenant, or to those of all others if too many tenants are named already."""
    is_named = name in totals or len(totals) < MAX_NAMED_TENANTS
    total = totals.setdefault(name if is_named else OTHER_TENANTS, list(ZEROS))
    total[:] = map(operator.add, total, row)
