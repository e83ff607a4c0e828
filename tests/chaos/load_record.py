"""The checks of a load, with their results and durations."""

import asyncio
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from limitforge import Decision, FixedWindow, Limits, SlidingWindow, TokenBucket

TICK_SECONDS = 0.02
DAY = 86_400


@dataclass(frozen=True, slots=True)
class Workload:
    """What a caller checks again and again. Its limits admit `max_admitted` during a test, and not one more."""

    resource: str
    limits: Limits
    max_admitted: int
    subject: str = "s"

    @property
    def is_finite(self) -> bool:
        return self.max_admitted < 10**9


WIDE = Workload("wide", Limits(FixedWindow(name="wide", limit=10**9, window_seconds=50 * DAY)), 10**9)
TIGHT = Workload("tight", Limits(FixedWindow(name="tight", limit=100, window_seconds=DAY, align="first_hit")), 100)
BUCKET = Workload("bucket", Limits(TokenBucket(name="bucket", bucket_capacity=100, refill_rate_per_sec="0.0001")), 100)
PAIR = Workload("pair", Limits(*WIDE.limits, SlidingWindow(name="log", limit=50, window_seconds=DAY)), 50)
WORKLOADS = (WIDE, TIGHT, BUCKET, PAIR)


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """One check with its result and duration."""

    workload: Workload
    began: float  # of time.monotonic()
    seconds: float
    allowed: bool = False
    degraded: str | None = None
    error: BaseException | None = None
    inconsistency: str = ""  # what is wrong with the decision


def record_check(workload: Workload, began: float, answer: Decision | BaseException) -> CheckRecord:
    waited = time.monotonic() - began
    if isinstance(answer, Decision):
        return CheckRecord(
            workload, began, waited, answer.allowed, answer.degraded, None, _find_inconsistency(answer, workload)
        )
    return CheckRecord(workload, began, waited, error=answer)


def _find_inconsistency(decision: Decision, workload: Workload) -> str:
    """Return what is wrong with a decision."""
    if decision.degraded == "open":
        wrong = not decision.allowed or bool(decision.limits)
    elif decision.degraded == "closed":
        wrong = decision.allowed or not decision.retry_after_ms
    else:
        limits = {name: state.limit for name, state in decision.limits.items()}
        wrong = limits != _numbers(workload) or decision.allowed == bool(decision.retry_after_ms)
    return str(decision) if wrong else ""


def _numbers(workload: Workload) -> dict[str, object]:
    """Return the number of each limit. The result of another check would have other numbers."""
    return {
        limit.name: limit.bucket_capacity if isinstance(limit, TokenBucket) else limit.limit
        for limit in workload.limits
        if isinstance(limit, TokenBucket | FixedWindow | SlidingWindow)
    }


class Lag:
    """The longest delay of a timer: what the machine, or the event loop, adds to every wait."""

    def __init__(self) -> None:
        self.worst = 0.0

    async def measure_loop(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self._note(began)

    def measure_thread(self, over: threading.Event) -> None:
        while not over.is_set():
            began = time.monotonic()
            time.sleep(TICK_SECONDS)
            self._note(began)

    def _note(self, began: float) -> None:
        self.worst = max(self.worst, time.monotonic() - began - TICK_SECONDS)


@dataclass
class LoadRecord:
    """All checks of a load. The list only grows, so any thread may read it."""

    checks: list[CheckRecord] = field(default_factory=list)
    machine: Lag = field(default_factory=Lag)
    loop: Lag = field(default_factory=Lag)  # stays 0 without a loop
    hung: int = 0  # callers that were still waiting long after the end
    close_seconds: float = 0.0  # how long closing the limiter took

    def of(self, workload: Workload) -> list[CheckRecord]:
        return [call for call in self.checks if call.workload is workload]

    @property
    def slowest(self) -> float:
        return max((call.seconds for call in self.checks), default=0.0)

    @property
    def exceptions(self) -> Counter[str]:
        return Counter(repr(call.error) for call in self.checks if call.error is not None)

    @property
    def inconsistencies(self) -> list[str]:
        return [call.inconsistency for call in self.checks if call.inconsistency]

    @property
    def kinds(self) -> Counter[str | None]:
        """How many checks were decided by the store (None), or without it as open, closed or local."""
        return Counter(call.degraded for call in self.checks if call.error is None)

    def admitted(self, workload: Workload) -> Counter[str | None]:
        """How many checks were admitted, by kind."""
        return Counter(call.degraded for call in self.of(workload) if call.allowed)
