"""How long everything is measured."""

from dataclasses import dataclass

MANY, ALONE = 64, 1
CROWDED = 512
PROCESSES = 4
SHARDS, TENANTS = 3, 300
LANES, FEW_LANES = 64, 6


@dataclass(frozen=True, slots=True)
class Pace:
    """`warm_seconds` lead up to each measurement of leases: a share grows with what was asked for in the intervals
    before, and goes back when its process is quiet for five of them.
    """

    subjects: int
    rounds: int
    seconds: float
    exact_subjects: int
    exact_size: int
    sync_interval_ms: int
    warm_seconds: float
    leased_seconds: float
    leased_size: int
    crowd_rounds: int
    crowd_seconds: float
    crowd_size: int


FULL = Pace(
    subjects=10_000,
    rounds=5,
    seconds=0.6,
    exact_subjects=30,
    exact_size=100,
    sync_interval_ms=200,  # as shipped
    warm_seconds=1.2,
    leased_seconds=0.6,
    leased_size=200_000,
    crowd_rounds=3,
    crowd_seconds=1.5,
    crowd_size=100_000,
)
QUICK = Pace(
    subjects=600,
    rounds=2,
    seconds=0.1,
    exact_subjects=12,
    exact_size=20,
    sync_interval_ms=50,
    warm_seconds=0.4,
    leased_seconds=0.15,
    leased_size=40_000,
    crowd_rounds=1,
    crowd_seconds=0.5,
    crowd_size=40_000,
)
