"""Who is measured, on what, and how.

Contestants of one shape take turns, round by round, so that a slow moment of the machine hits all of them.
"""

import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

Sweep = Callable[[Sequence[str]], int]
"""Checks each subject once, reads all that the answer tells, and returns how many were admitted."""

OURS = "limitforge"

_THREADS = 4
_LIMIT = 5
_CHECKS_PER_SUBJECT = 8  # each subject is asked for more than it may have


@dataclass(frozen=True, slots=True)
class Contestant:
    """`make` builds a limiter with state of its own, by the size of its limits.

    `full` tells whether it answers with more than the verdict, `threads` whether several may use it at once.
    """

    name: str
    make: Callable[[int], Sweep]
    full_decision: bool = True
    thread_safe: bool = True

    @property
    def is_limitforge(self) -> bool:
        return self.name.startswith(OURS)


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of check. The first contestant is the one that all others are compared with."""

    name: str
    contestants: tuple[Contestant, ...]
    size: int = 500  # more than any run takes of one subject; at most what a log may hold


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several rounds, and how far the rounds were apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], base: Sequence[float]) -> "Spread":
        """Round by round, each against the base of the same round."""
        return cls.of([value / other for value, other in zip(values, base, strict=True)])

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Exactness:
    """How many were admitted when several threads asked for more than there was, and how many should have been."""

    admitted: int
    expected: int
    raised: str = ""

    def text(self) -> str:
        if self.raised:
            return f"raised {self.raised}"
        return "exact" if self.admitted == self.expected else f"{self.admitted} for {self.expected}"


def exactness(contestant: Contestant, subjects: Sequence[str]) -> Exactness:
    sweep = contestant.make(_LIMIT)
    expected = _LIMIT * len(subjects)
    if not contestant.thread_safe:
        return Exactness(sum(sweep(subjects) for _ in range(_CHECKS_PER_SUBJECT)), expected)
    try:
        with _frequent_thread_switches(), ThreadPoolExecutor(_THREADS) as pool:
            return Exactness(sum(pool.map(sweep, [subjects] * _CHECKS_PER_SUBJECT)), expected)
    except Exception as error:
        if contestant.is_limitforge:
            raise
        return Exactness(0, expected, type(error).__name__)  # a peer that breaks under threads is a result, not an end


def interleave(contestants: Sequence[Contestant], rounds: int) -> Iterator[tuple[int, Contestant]]:
    """Every contestant once a round, each round starting with another one."""
    for number in range(rounds):
        for at in range(len(contestants)):
            yield number, contestants[(at + number) % len(contestants)]


def settle() -> None:
    """Before a measurement: what others left behind (garbage, timer threads) is not the next one's to pay."""
    deadline = time.monotonic() + 1
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    gc.collect()
    gc.freeze()


def progress(text: str) -> None:
    print(f"  {text} ...", file=sys.stderr, flush=True)


@contextmanager
def _frequent_thread_switches() -> Iterator[None]:
    """Threads change places a hundred times as often: a check that is not atomic has its chance to show it.

    A peer that starts its timer twice by that complains on stderr. What counts here is how many it admits.
    """
    before, hook = sys.getswitchinterval(), sys.unraisablehook
    sys.setswitchinterval(before / 100)
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        sys.unraisablehook = hook
