"""Run the state machines of the tests, and compare their results."""

import os
import time
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from limitforge import Decision, LimitforgeError
from tests import run_report

EXAMPLES_PER_SEED = 100  # examples per seed, between two checks of the time


def comparable(answer: Any) -> Any:
    """Replace ids, which differ between stores, by whether there is one."""
    if isinstance(answer, LimitforgeError):
        return type(answer)
    if isinstance(answer, Decision):
        return msgspec.structs.replace(
            answer,
            lease_id="some" if answer.lease_id else None,
            reservation_id="some" if answer.reservation_id else None,
            shadow=comparable(answer.shadow),
        )
    if isinstance(answer, list):
        return [comparable(one) for one in answer]
    return answer


def run_machine(
    machine: type[RuleBasedStateMachine], examples: int, machine_seed: int | None, *, steps: int = 40
) -> None:
    """Play the same traces each time for a given seed; without one, play new ones for this test's share of the run.

    `make test-fast` plays an eighth of them.
    """
    if os.environ.get("LIMITFORGE_TEST_PROFILE") == "fast":
        examples = max(examples // 8, 4)
    if machine_seed is not None:
        _run(machine, examples, machine_seed, steps)
        return
    draw, over = run_report.seeded_random(), time.monotonic() + run_report.time_share_seconds()
    for done in range(0, examples, EXAMPLES_PER_SEED):
        if done and time.monotonic() > over:
            return
        _run(machine, min(EXAMPLES_PER_SEED, examples - done), draw.randrange(2**64), steps)


def _run(machine: type[RuleBasedStateMachine], examples: int, machine_seed: int, steps: int) -> None:
    def begin(self: Any) -> None:
        run_report.record_example()
        machine.__init__(self)

    run_state_machine_as_test(
        seed(machine_seed)(type(machine.__name__, (machine,), {"__init__": begin, "__module__": machine.__module__})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=False,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases={Phase.generate, Phase.shrink} & set(settings().phases),
        ),
    )
