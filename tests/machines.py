"""What all state machines of the tests share: how they are run, and what of two answers must be equal."""

import os
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from limitforge import Decision, LimitforgeError


def comparable(answer: Any) -> Any:
    """Ids differ from store to store; whether there is one does not."""
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
    """Play the same traces each time for a seed, new ones without. `make test-fast` plays an eighth of them."""
    if os.environ.get("LIMITFORGE_TEST_PROFILE") == "fast":
        examples = max(examples // 8, 4)
    if machine_seed is not None:
        machine = seed(machine_seed)(machine)
    run_state_machine_as_test(
        machine,
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
