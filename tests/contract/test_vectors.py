"""The worked cases of vectors/limits.json, on every store."""

import json
from pathlib import Path
from typing import Any

from limitforge import Decision, Limits, ManualClock, SyncLimiter, limit_from_fields

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "limits.json").read_text())


def as_expected(decision: Decision) -> dict[str, Any]:
    answer = {
        "allowed": decision.allowed,
        "retry_after_ms": decision.retry_after_ms,
        "binding": decision.binding,
        "limit": decision.limit,
        "remaining": decision.remaining,
        "reset_after_ms": decision.reset_after_ms,
        "would_deny": list(decision.would_deny),
        "limits": {
            name: {"remaining": state.remaining, "reset_after_ms": state.reset_after_ms}
            for name, state in decision.limits.items()
        },
    }
    if decision.delay_ms is not None:
        answer["delay_ms"] = decision.delay_ms
    return answer


def test_the_worked_cases(limiter: SyncLimiter, clock: ManualClock) -> None:
    for case in CASES:
        play(case, limiter, clock)


def play(case: dict[str, Any], limiter: SyncLimiter, clock: ManualClock) -> None:
    """Play a case for a subject of its own."""
    limits = Limits(*map(limit_from_fields, case["limits"]))
    leases: dict[str, str | None] = {}
    for number, step in enumerate(case["steps"]):
        clock.set_us(case["base_ms"] * 1_000 + (step["at_us"] if "at_us" in step else step["at_ms"] * 1_000))
        if "cost" in step:
            decision = limiter.check(
                "r", case["name"], limits=limits, cost=step["cost"], priority=step.get("priority", "P0")
            )
            leases[step.get("lease", "")] = decision.lease_id
            assert as_expected(decision) == step["expect"], f"{case['name']}, step {number}"
        elif "release" in step:
            limiter.release(leases[step["release"]] or "")
        else:
            limiter.renew(leases[step["renew"]] or "")
