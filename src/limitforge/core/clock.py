"""The clocks that the engine and the stores read. Connections and timers measure durations by themselves."""

import time
from typing import Protocol

from limitforge.errors import InvalidInput

LONG_AGO_US = -(2**62)
"""Earlier than any time of a clock."""


class Clock(Protocol):
    """Returns the time as integer microseconds since the epoch."""

    def now_us(self) -> int: ...


class SystemClock:
    """The clock of this machine."""

    def now_us(self) -> int:
        return time.time_ns() // 1_000


class MonotonicClock:
    """Microseconds since an arbitrary moment: for durations, since it never jumps as the system clock may."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1_000


class ManualClock:
    """A clock that moves only when the program moves it: for tests, replays and simulations.

    It starts at `now_us` (microseconds since the epoch), by default on 2023-11-15 at midnight UTC. `set_us` sets the
    time, also back, and raises `InvalidInput` for a time before 1970. `advance_us` moves it by a number of
    microseconds.
    """

    def __init__(self, now_us: int = 1_700_006_400_000_000) -> None:
        self.set_us(now_us)

    def now_us(self) -> int:
        return self._now_us

    def set_us(self, now_us: int) -> None:
        if now_us < 0:
            raise InvalidInput("now_us", f"must not be before 1970, got {now_us}")
        self._now_us = now_us

    def advance_us(self, by_us: int) -> None:
        self.set_us(self._now_us + by_us)
