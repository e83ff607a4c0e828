"""What callers asked, what each was told, and how long it waited."""

import asyncio
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from limitforge import Decision, FixedWindow, Limits, SlidingWindow, TokenBucket

TICK_SECONDS = 0.02
DAY = 86_400


@dataclass(frozen=True, slots=True)
class Ask:
    """What a caller asks, again and again. Its limits admit `most` in a test's time, and not one more."""

    resource: str
    limits: Limits
    most: int
    subject: str = "s"

    @property
    def can_be_full(self) -> bool:
        return self.most < 10**9


WIDE = Ask("wide", Limits(FixedWindow(name="wide", limit=10**9, window_seconds=50 * DAY)), 10**9)
TIGHT = Ask("tight", Limits(FixedWindow(name="tight", limit=100, window_seconds=DAY, align="first_hit")), 100)
BUCKET = Ask("bucket", Limits(TokenBucket(name="bucket", bucket_capacity=100, refill_rate_per_sec="0.0001")), 100)
PAIR = Ask("pair", Limits(*WIDE.limits, SlidingWindow(name="log", limit=50, window_seconds=DAY)), 50)
ASKS = (WIDE, TIGHT, BUCKET, PAIR)


@dataclass(frozen=True, slots=True)
class Call:
    """One check: what was asked when, how long it took, and what was said."""

    ask: Ask
    began: float  # of time.monotonic()
    waited: float
    allowed: bool = False
    degraded: str | None = None
    error: BaseException | None = None
    oddity: str = ""  # what the decision says and must not


def call_of(ask: Ask, began: float, answer: Decision | BaseException) -> Call:
    waited = time.monotonic() - began
    if isinstance(answer, Decision):
        return Call(ask, began, waited, answer.allowed, answer.degraded, None, _oddity(answer, ask))
    return Call(ask, began, waited, error=answer)


def _oddity(decision: Decision, ask: Ask) -> str:
    """What is wrong with a decision, whoever made it."""
    if decision.degraded == "open":
        wrong = not decision.allowed or bool(decision.limits)
    elif decision.degraded == "closed":
        wrong = decision.allowed or not decision.retry_after_ms
    else:
        told = {name: state.limit for name, state in decision.limits.items()}
        wrong = told != _numbers(ask) or decision.allowed == bool(decision.retry_after_ms)
    return str(decision) if wrong else ""


def _numbers(ask: Ask) -> dict[str, object]:
    """Of each limit its own: an answer to somebody else's check would have others."""
    return {
        limit.name: limit.bucket_capacity if isinstance(limit, TokenBucket) else limit.limit
        for limit in ask.limits
        if isinstance(limit, TokenBucket | FixedWindow | SlidingWindow)
    }


class Lag:
    """How late somebody wakes who only sleeps: what the machine, or the loop, adds to every wait."""

    def __init__(self) -> None:
        self.worst = 0.0

    async def on_the_loop(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self._note(began)

    def in_a_thread(self, over: threading.Event) -> None:
        while not over.is_set():
            began = time.monotonic()
            time.sleep(TICK_SECONDS)
            self._note(began)

    def _note(self, began: float) -> None:
        self.worst = max(self.worst, time.monotonic() - began - TICK_SECONDS)


@dataclass
class Record:
    """All calls of a load. The list only grows, so any thread may read it."""

    calls: list[Call] = field(default_factory=list)
    machine: Lag = field(default_factory=Lag)
    loop: Lag = field(default_factory=Lag)  # stays 0 without a loop
    hung: int = 0  # callers that still waited long after the end
    close_seconds: float = 0.0  # until the limiter was closed

    def of(self, ask: Ask) -> list[Call]:
        return [call for call in self.calls if call.ask is ask]

    @property
    def slowest(self) -> float:
        return max((call.waited for call in self.calls), default=0.0)

    @property
    def exceptions(self) -> Counter[str]:
        return Counter(repr(call.error) for call in self.calls if call.error is not None)

    @property
    def oddities(self) -> list[str]:
        return [call.oddity for call in self.calls if call.oddity]

    @property
    def kinds(self) -> Counter[str | None]:
        """How many answers there were of each kind: undegraded (None), open, closed, local."""
        return Counter(call.degraded for call in self.calls if call.error is None)

    def admitted(self, ask: Ask) -> Counter[str | None]:
        """How many were let in, by kind."""
        return Counter(call.degraded for call in self.of(ask) if call.allowed)
