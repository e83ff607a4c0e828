"""What a burst has seen so far: how many of each verdict, and when."""

from dataclasses import dataclass, field
from enum import IntEnum

from limitforge.core.decision import Decision

MAX_SLICES = 4_096


class Verdict(IntEnum):
    """In the order in which they are stacked, from the bottom up."""

    ALLOWED = 0
    DELAYED = 1
    DENIED = 2


class Timeline:
    """Verdicts per slice of time. When time outgrows its slices, neighbours are joined, so its size stays bounded.

    A slice begins half a first slice early: what is due every so often then falls into the middle of its slice, and
    a little jitter moves nothing into the next.
    """

    def __init__(self, slice_us: float) -> None:
        self.slice_us = slice_us
        self.offset_us = slice_us / 2
        self.slices: list[list[int]] = []

    def slice_index(self, at_us: float) -> int:
        return int((at_us + self.offset_us) / self.slice_us)

    def add(self, at_us: float, verdict: Verdict) -> None:
        while self.slice_index(at_us) >= MAX_SLICES:
            self.slices = merge_slices(self.slices, 2)
            self.slice_us *= 2
        at = self.slice_index(at_us)
        while len(self.slices) <= at:
            self.slices.append([0] * len(Verdict))
        self.slices[at][verdict] += 1


def merge_slices(slices: list[list[int]], by: int) -> list[list[int]]:
    """Each `by` neighbours as one."""
    return [
        [sum(counts) for counts in zip(*slices[start : start + by], strict=True)] for start in range(0, len(slices), by)
    ]


@dataclass(slots=True)
class BurstResults:
    """The counts, the first denial, and the last decision, which tells how things stand."""

    timeline: Timeline
    counts: list[int] = field(default_factory=lambda: [0] * len(Verdict))
    elapsed_s: float = 0.0
    first_denial_s: float | None = None
    longest_delay_ms: int = 0
    last_decision: Decision | None = None

    @property
    def sent(self) -> int:
        return sum(self.counts)

    @property
    def allowed(self) -> int:
        """With those that were told to wait first."""
        return self.counts[Verdict.ALLOWED] + self.counts[Verdict.DELAYED]

    @property
    def delayed(self) -> int:
        return self.counts[Verdict.DELAYED]

    @property
    def denied(self) -> int:
        return self.counts[Verdict.DENIED]

    def add(self, at_s: float, decision: Decision) -> None:
        """A decision on what was asked `at_s` after the start. What is delayed is seen where it goes on."""
        self.last_decision = decision
        self.elapsed_s = at_s
        seen_us = at_s * 1_000_000
        if not decision.allowed:
            verdict = Verdict.DENIED
            if self.first_denial_s is None:
                self.first_denial_s = at_s
        elif decision.delay_ms:
            verdict = Verdict.DELAYED
            seen_us += decision.delay_ms * 1_000
            self.longest_delay_ms = max(self.longest_delay_ms, decision.delay_ms)
        else:
            verdict = Verdict.ALLOWED
        self.counts[verdict] += 1
        self.timeline.add(seen_us, verdict)
