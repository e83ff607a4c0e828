"""Statistics of an outage: what was decided without the server, and what is charged when it replies again."""

from collections import Counter
from typing import Any

import msgspec

from limitforge.core.check import Check, Debit, build_charge
from limitforge.core.decision import Decision

MAX_NAMES = 1_000  # limits with a sum of their own; the others are summed as OTHER_LIMITS
MAX_CHARGED_BUCKETS = 10_000
OTHER_LIMITS = "(other limits)"


class Outage(msgspec.Struct):
    """The decisions that were made without a server since its last reply."""

    since_us: int
    decisions: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of decisions by failure behaviour."""
    admitted: Counter[str] = msgspec.field(default_factory=Counter)
    """Admitted cost by limit name."""
    pending_charges: dict[str, Debit] = msgspec.field(default_factory=dict)
    """By bucket: the cost that is charged later, for limits with `charge_after_outage`."""
    maybe_counted: int = 0
    """Admitted checks that were sent, so that the server may have counted them. They are never charged."""
    unrecorded_cost: int = 0
    """Admitted cost that is not charged, because too many buckets have pending charges already."""

    def record_admission(self, check: Check, decision: Decision, *, maybe_counted: bool) -> None:
        """Add the cost of a check that was allowed without the server."""
        if maybe_counted and any(cost for _, _, cost, *_ in check.debits):
            self.maybe_counted += 1
        for name, debit in zip(check.names, check.debits, strict=True):
            rule, _, cost, *_ = debit
            state = decision.limits.get(name)
            if not cost or (state is not None and not state.allowed):
                continue  # a peek, or a monitored limit without room
            has_own_sum = name in self.admitted or len(self.admitted) < MAX_NAMES
            self.admitted[name if has_own_sum else OTHER_LIMITS] += cost
            if rule.limit.charge_after_outage and not maybe_counted:
                self.add_charge(debit)

    def add_charge(self, debit: Debit) -> None:
        """Add to the pending charge of a bucket, up to the maximum that a bucket can be charged."""
        rule, key, cost, resource, overrides = debit
        if key not in self.pending_charges and len(self.pending_charges) >= MAX_CHARGED_BUCKETS:
            self.unrecorded_cost += cost
            return
        pending = self.pending_charges[key][2] if key in self.pending_charges else 0
        maximum = 2 * max(rule.algorithm.limit, 0)
        self.pending_charges[key] = (rule, key, min(pending + cost, maximum), resource, overrides)

    def charges(self) -> list[Check]:
        """Return the checks that charge the server."""
        return [build_charge([debit]) for debit in self.pending_charges.values()]

    def summary(self) -> dict[str, Any]:
        """Return the fields of the log line at the end of the outage."""
        return {
            "decisions": format_counts(self.decisions),
            "admitted": format_counts(self.admitted),
            "charged_cost": sum(debit[2] for debit in self.pending_charges.values()),
            "charged_buckets": len(self.pending_charges),
            "maybe_counted": self.maybe_counted,
            "unrecorded_cost": self.unrecorded_cost,
        }


def format_counts(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
