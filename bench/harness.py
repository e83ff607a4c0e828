"""Define contestants and workloads, and how they are measured.

The contestants of a workload alternate in interleaved rounds, so that a slow moment of the machine affects all of them.
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
"""Check each subject once, read every field of the reply, and return the number of admitted checks."""

OURS = "limitforge"

_THREADS = 4
_LIMIT = 5
_CHECKS_PER_SUBJECT = 8  # more than the limit of 5


@dataclass(frozen=True, slots=True)
class Contestant:
    """A library to measure. `make` builds a limiter with separate state; its argument is the size of its limits.

    `full_decision` is true if it returns more than the verdict, `thread_safe` if several threads may use it.
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
    """One kind of check. All contestants are compared with the first one."""

    name: str
    contestants: tuple[Contestant, ...]
    size: int = 500  # more than one subject takes in a run, and at most the maximum of a log


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several rounds, with the lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], base: Sequence[float]) -> "Spread":
        """Divide round by round, each value by the base of the same round."""
        return cls.of([value / other for value, other in zip(values, base, strict=True)])

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Exactness:
    """How many checks were admitted when several threads exceeded the limit, and how many should have been."""

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
        return Exactness(
            0, expected, type(error).__name__
        )  # a peer that fails under threads is a result, not a reason to stop


def interleave(contestants: Sequence[Contestant], rounds: int) -> Iterator[tuple[int, Contestant]]:
    """Yield every contestant once per round; each round starts with another one."""
    for number in range(rounds):
        for at in range(len(contestants)):
            yield number, contestants[(at + number) % len(contestants)]


def settle() -> None:
    """Collect garbage and wait for timer threads of the previous contestant, so that the next one does not pay."""
    deadline = time.monotonic() + 1
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    gc.collect()
    gc.freeze()


def progress(text: str) -> None:
    print(f"  {text} ...", file=sys.stderr, flush=True)


@contextmanager
def _frequent_thread_switches() -> Iterator[None]:
    """Switch threads a hundred times as often, so that a check that is not atomic shows it.

    This makes a peer start its timer twice and complain on stderr. Only its admitted checks matter here.
    """
    before, hook = sys.getswitchinterval(), sys.unraisablehook
    sys.setswitchinterval(before / 100)
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        sys.unraisablehook = hook
