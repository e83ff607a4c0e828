"""How much is measured, and for how long. Durations are whole seconds, because `wrk` takes no others."""

from dataclasses import dataclass

CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class RunSize:
    """`visit_seconds` bounds the first pass over all subjects before few and many are compared."""

    subjects: int
    few_subjects: int
    rounds: int
    seconds: int
    other_rounds: int
    other_seconds: int
    warm_seconds: int
    exact_seconds: int
    comparison_rounds: int
    comparison_seconds: int
    visit_seconds: int
    keys: int
    tenants: int
    policies: int
    all_subjects: int


FULL = RunSize(
    subjects=10_000,
    few_subjects=100,
    rounds=5,
    seconds=3,
    other_rounds=3,
    other_seconds=2,
    warm_seconds=1,
    exact_seconds=2,
    comparison_rounds=5,
    comparison_seconds=2,
    visit_seconds=90,
    keys=1_000,
    tenants=10_000,
    policies=1_000,
    all_subjects=1_000_000,
)
QUICK = RunSize(
    subjects=1_000,
    few_subjects=20,
    rounds=2,
    seconds=1,
    other_rounds=1,
    other_seconds=1,
    warm_seconds=1,
    exact_seconds=1,
    comparison_rounds=1,
    comparison_seconds=1,
    visit_seconds=10,
    keys=100,
    tenants=200,
    policies=100,
    all_subjects=10_000,
)
