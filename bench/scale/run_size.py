"""How much is measured, and for how long."""

from dataclasses import dataclass

MANY, ALONE = 64, 1
CROWDED = 512
PROCESSES = 4
SHARDS, TENANTS = 3, 300
LANES, FEW_LANES = 64, 6


@dataclass(frozen=True, slots=True)
class RunSize:
    """`warm_seconds` precede each measurement of prepaid limits. A share grows with the demand of the previous
    intervals, and is returned after five intervals without demand.
    """

    subjects: int
    rounds: int
    seconds: float
    exact_subjects: int
    exact_size: int
    sync_interval_ms: int
    warm_seconds: float
    prepaid_seconds: float
    prepaid_size: int
    processes_rounds: int
    processes_seconds: float
    processes_size: int


FULL = RunSize(
    subjects=10_000,
    rounds=5,
    seconds=0.6,
    exact_subjects=30,
    exact_size=100,
    sync_interval_ms=200,  # the default
    warm_seconds=1.2,
    prepaid_seconds=0.6,
    prepaid_size=200_000,
    processes_rounds=3,
    processes_seconds=1.5,
    processes_size=100_000,
)
QUICK = RunSize(
    subjects=600,
    rounds=2,
    seconds=0.1,
    exact_subjects=12,
    exact_size=20,
    sync_interval_ms=50,
    warm_seconds=0.4,
    prepaid_seconds=0.15,
    prepaid_size=40_000,
    processes_rounds=1,
    processes_seconds=0.5,
    processes_size=40_000,
)
