"""The limits of every contestant, by the name of their plan."""

from typing import NamedTuple

SECONDS = {"minute": 60, "hour": 3_600, "day": 86_400}


class Limit(NamedTuple):
    """A fixed window per subject. Units within a plan differ, because limitador identifies a limit by its window."""

    amount: int
    unit: str

    @property
    def seconds(self) -> int:
        return SECONDS[self.unit]


TWO, THREE, SPENT, AMPLE, ONCE = "bench", "three", "spent", "ample", "once"

PLANS: dict[str, tuple[Limit, ...]] = {
    TWO: (Limit(100, "minute"), Limit(1_000, "day")),
    THREE: (Limit(100, "minute"), Limit(1_000, "day"), Limit(500, "hour")),
    SPENT: (Limit(10, "minute"), Limit(5, "day")),
    AMPLE: (Limit(100_000_000, "minute"), Limit(1_000_000_000, "day")),
    ONCE: (Limit(1_000, "day"),),
}
