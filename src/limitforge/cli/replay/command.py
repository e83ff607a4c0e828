"""`limitforge replay`: what would these limits have done? Timed steps from a file, answered line by line."""

import json
import secrets
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from limitforge.cli.replay.cases import MAX_BYTES, Case, CheckStep, ReleaseStep, Step, parse_cases
from limitforge.cli.store_option import STORE_HELP, open_limiter
from limitforge.core.clock import ManualClock
from limitforge.core.decision import Decision
from limitforge.errors import InvalidInput, StoreError
from limitforge.limiter_sync import SyncLimiter

TENANT, RESOURCE, SUBJECT = "replay", "replay", "replay"
MAX_SHOWN_MISMATCHES = 20

_encode = msgspec.json.Encoder().encode


def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A JSON file of cases, or - to read it from stdin.")],
    store: Annotated[str, typer.Option(metavar="URL", help=STORE_HELP)] = "memory",
) -> None:
    """Ask what limits would have done: run the timed steps of FILE and print a decision for each.

    FILE holds a list of cases, each with limits and steps on a clock of its own:

      [{"base_ms": 1700006400000,
        "limits": [{"name": "burst", "algorithm": "token_bucket",
                    "bucket_capacity": 10, "refill_rate_per_sec": 2}],
        "steps": [{"at_ms": 0, "cost": 8}, {"at_ms": 900, "cost": 8}]}]

    A step has at_ms or at_us (after base_ms) and, if need be, cost, costs,
    priority and lease, a label for the slots that it takes; or it has release
    or renew with such a label.

    One JSON object per step goes to stdout. Where a step says what to expect,
    differences go to stderr, and the exit status is 1 if there are any.

    Examples:
      limitforge replay limits.json
      limitforge replay limits.json --store redis://localhost:6379/0
      limitforge replay - < limits.json | jq .allowed

    """
    cases = parse_cases(_read_file(file))
    checked, mismatches = 0, []
    out = sys.stdout.buffer
    for case in cases:
        with closing(_run_case(case, store)) as answers:
            for number, (step, answer) in enumerate(answers, start=1):
                out.write(_encode(answer) + b"\n")
                if step.expect is not None:
                    checked += 1
                    mismatches += [f"{case.title}, step {number}: {d}" for d in differences(step.expect, answer)]
    out.flush()
    if checked:
        _print_report(sum(len(case.steps) for case in cases), checked, mismatches)
    if mismatches:
        raise typer.Exit(1)


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What of the expected fields is otherwise; those that were not named may be anything."""
    for name, value in expected.items():
        place = f"{path}{name if name.isidentifier() else repr(name)}"
        if name not in actual:
            yield f"{place}: expected {_as_json(value)}, got nothing"
        elif isinstance(value, dict) and isinstance(actual[name], dict):
            yield from differences(value, actual[name], f"{place}.")
        elif _as_json(value) != _as_json(actual[name]):
            yield f"{place}: expected {_as_json(value)}, got {_as_json(actual[name])}"


def _read_file(file: str) -> bytes:
    try:
        if file == "-":
            return sys.stdin.buffer.read(MAX_BYTES + 1)
        with Path(file).open("rb") as opened:
            return opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        reason = error.strerror if isinstance(error, OSError) else None
        raise InvalidInput(file, f"can't be read: {reason or error}") from None


def _run_case(case: Case, store: str) -> Generator[tuple[Step, dict[str, Any]], None, None]:
    """Each step with its answer, on keys of the case's own, which are gone afterwards."""
    clock = ManualClock()
    with open_limiter(store, key_prefix=f"lf-replay-{secrets.token_hex(8)}", clock=clock) as limiter:
        leases: dict[str, str] = {}
        try:
            for step in case.steps:
                clock.set_us(step.at_us)
                yield step, _run_step(limiter, case, step, leases)
        finally:
            with suppress(StoreError):  # what can't be removed now expires by itself
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
    lease_id = leases.get(step.label)  # none if its check was denied, or never made
    if lease_id is not None:
        if isinstance(step, ReleaseStep):
            limiter.release(lease_id)
        else:
            limiter.renew(lease_id)
    return {}


def _decision_fields(decision: Decision) -> dict[str, Any]:
    told: dict[str, Any] = {
        "allowed": decision.allowed,
        "retry_after_ms": decision.retry_after_ms,
        "binding": decision.binding,
        "limit": decision.limit,
        "remaining": decision.remaining,
        "reset_after_ms": decision.reset_after_ms,
        "would_deny": list(decision.would_deny),
    }
    if decision.delay_ms is not None:
        told["delay_ms"] = decision.delay_ms
    told["limits"] = {name: msgspec.to_builtins(state) for name, state in decision.limits.items()}
    return told


def _print_report(steps: int, checked: int, mismatches: list[str]) -> None:
    for mismatch in mismatches[:MAX_SHOWN_MISMATCHES]:
        print(mismatch, file=sys.stderr)
    if len(mismatches) > MAX_SHOWN_MISMATCHES:
        print(f"... and {len(mismatches) - MAX_SHOWN_MISMATCHES} more", file=sys.stderr)
    verdict = f"{len(mismatches)} not as expected" if mismatches else "all as expected"
    partly = "" if checked == steps else f", {checked} with an expectation"
    print(f"{steps} step{'' if steps == 1 else 's'}{partly}, {verdict}", file=sys.stderr)


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)
