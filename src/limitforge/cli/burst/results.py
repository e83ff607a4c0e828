"""The results of a burst: the number of each verdict, in total and over time."""

from dataclasses import dataclass, field
from enum import IntEnum

from limitforge.core.decision import Decision

MAX_SLICES = 4_096


class Verdict(IntEnum):
    """The result of a request. The chart stacks them in this order, from the bottom up."""

    ALLOWED = 0
    DELAYED = 1
    DENIED = 2


class Timeline:
    """The number of verdicts in each slice of time. Slices are merged when there are too many, to bound the memory.

    Slices begin half a slice before the start. Requests at regular intervals are then in the middle of their slice, and
    jitter does not move them to the next one.
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
        index = self.slice_index(at_us)
        while len(self.slices) <= index:
            self.slices.append([0] * len(Verdict))
        self.slices[index][verdict] += 1


def merge_slices(slices: list[list[int]], size: int) -> list[list[int]]:
    """Add up every `size` neighbours."""
    return [
        [sum(counts) for counts in zip(*slices[start : start + size], strict=True)]
        for start in range(0, len(slices), size)
    ]


@dataclass(slots=True)
class BurstResults:
    """The counts, the first denial, and the last decision, which has the current state of the limits."""

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
        """The number of allowed requests, including delayed ones."""
        return self.counts[Verdict.ALLOWED] + self.counts[Verdict.DELAYED]

    @property
    def delayed(self) -> int:
        return self.counts[Verdict.DELAYED]

    @property
    def denied(self) -> int:
        return self.counts[Verdict.DENIED]

    def add(self, at_s: float, decision: Decision) -> None:
        """Add the decision of a request sent `at_s` seconds after the start.

        A delayed request appears in the timeline at the end of its delay.
        """
        self.last_decision = decision
        self.elapsed_s = at_s
        shown_us = at_s * 1_000_000
        if not decision.allowed:
            verdict = Verdict.DENIED
            if self.first_denial_s is None:
                self.first_denial_s = at_s
        elif decision.delay_ms:
            verdict = Verdict.DELAYED
            shown_us += decision.delay_ms * 1_000
            self.longest_delay_ms = max(self.longest_delay_ms, decision.delay_ms)
        else:
            verdict = Verdict.ALLOWED
        self.counts[verdict] += 1
        self.timeline.add(shown_us, verdict)
