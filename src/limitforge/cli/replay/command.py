"""The command `limitforge replay`."""

import json
import secrets
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from typing import Annotated, Any

import msgspec
import typer

from limitforge.cli.replay.cases import MAX_BYTES, Case, CheckStep, ReleaseStep, Step, parse_cases
from limitforge.cli.store_option import STORE_HELP, open_limiter
from limitforge.cli.terminal.input import read_file
from limitforge.core.clock import ManualClock
from limitforge.core.decision import Decision
from limitforge.errors import StoreError
from limitforge.limiter_sync import SyncLimiter

TENANT, RESOURCE, SUBJECT = "replay", "replay", "replay"
MAX_SHOWN_MISMATCHES = 20

_encode = msgspec.json.Encoder().encode


def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A JSON file, or - for the standard input.")],
    store: Annotated[str, typer.Option(metavar="URL", help=STORE_HELP)] = "memory",
) -> None:
    """Run the timed steps of FILE against limits, and print a decision for each.

    FILE is a list of cases. Each has limits, and steps on a clock of its own:

      [{"base_ms": 1700006400000,
        "limits": [{"name": "burst", "algorithm": "token_bucket",
                    "bucket_capacity": 10, "refill_rate_per_sec": 2}],
        "steps": [{"at_ms": 0, "cost": 8}, {"at_ms": 900, "cost": 8}]}]

    A step has at_ms or at_us, which is added to base_ms. Optional fields are
    cost, costs, priority, and lease: a label for the slots that the check
    takes. A step with release or renew ends or extends the lease of a label.

    The command prints one JSON object per step. If a step has expect, the
    fields in it are compared with the decision. Differences are printed to
    stderr, and the exit status is 1 if there are any.

    Examples:
      limitforge replay limits.json
      limitforge replay limits.json --store redis://localhost:6379/0
      limitforge replay - < limits.json | jq .allowed

    """
    cases = parse_cases(read_file(file, MAX_BYTES))
    checked, mismatches = 0, []
    stdout = sys.stdout.buffer
    for case in cases:
        with closing(_run_case(case, store)) as results:
            for number, (step, result) in enumerate(results, start=1):
                stdout.write(_encode(result) + b"\n")
                if step.expect is not None:
                    checked += 1
                    mismatches += [f"{case.title}, step {number}: {d}" for d in differences(step.expect, result)]
    stdout.flush()
    if checked:
        _print_report(sum(len(case.steps) for case in cases), checked, mismatches)
    if mismatches:
        raise typer.Exit(1)


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Describe the expected fields that differ. Fields that are not expected may have any value."""
    for name, value in expected.items():
        field = f"{path}{name if name.isidentifier() else repr(name)}"
        if name not in actual:
            yield f"{field}: expected {_as_json(value)}, got nothing"
        elif isinstance(value, dict) and isinstance(actual[name], dict):
            yield from differences(value, actual[name], f"{field}.")
        elif _as_json(value) != _as_json(actual[name]):
            yield f"{field}: expected {_as_json(value)}, got {_as_json(actual[name])}"


def _run_case(case: Case, store: str) -> Generator[tuple[Step, dict[str, Any]], None, None]:
    """Yield each step with its result. The case has keys of its own, which are removed at the end."""
    clock = ManualClock()
    with open_limiter(store, key_prefix=f"lf-replay-{secrets.token_hex(8)}", clock=clock) as limiter:
        leases: dict[str, str] = {}
        try:
            for step in case.steps:
                clock.set_us(step.at_us)
                yield step, _run_step(limiter, case, step, leases)
        finally:
            with suppress(StoreError):  # the keys expire anyway
                limiter.reset(RESOURCE, SUBJECT, limits=case.limits, tenant=TENANT)


def _run_step(limiter: SyncLimiter, case: Case, step: Step, leases: dict[str, str]) -> dict[str, Any]:
    if isinstance(step, CheckStep):
        decision = limiter.check(
            RESOURCE,
            SUBJECT,
            limits=case.limits,
            cost=step.cost,
            costs=step.costs,
            tenant=TENANT,
            priority=step.priority,
        )
        if step.lease is not None and decision.lease_id is not None:
            leases[step.lease] = decision.lease_id
        return _decision_fields(decision)
    lease_id = leases.get(step.label)  # None if no check with this label was allowed
    if lease_id is not None:
        if isinstance(step, ReleaseStep):
            limiter.release(lease_id)
        else:
            limiter.renew(lease_id)
    return {}


def _decision_fields(decision: Decision) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "allowed": decision.allowed,
        "retry_after_ms": decision.retry_after_ms,
        "binding": decision.binding,
        "limit": decision.limit,
        "remaining": decision.remaining,
        "reset_after_ms": decision.reset_after_ms,
        "would_deny": list(decision.would_deny),
    }
    if decision.delay_ms is not None:
        fields["delay_ms"] = decision.delay_ms
    fields["limits"] = {name: msgspec.to_builtins(state) for name, state in decision.limits.items()}
    return fields


def _print_report(steps: int, checked: int, mismatches: list[str]) -> None:
    for mismatch in mismatches[:MAX_SHOWN_MISMATCHES]:
        print(mismatch, file=sys.stderr)
    if len(mismatches) > MAX_SHOWN_MISMATCHES:
        print(f"... and {len(mismatches) - MAX_SHOWN_MISMATCHES} more", file=sys.stderr)
    verdict = f"{len(mismatches)} not as expected" if mismatches else "all as expected"
    expectations = "" if checked == steps else f", {checked} with an expectation"
    print(f"{steps} step{'' if steps == 1 else 's'}{expectations}, {verdict}", file=sys.stderr)


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)
