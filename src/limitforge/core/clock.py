"""Where time comes from. The only module that may read a clock."""

import time
from typing import Protocol

from limitforge.errors import InvalidInput

LONG_AGO_US = -(2**62)
"""Before any time that a clock tells."""


class Clock(Protocol):
    """Integer microseconds since the epoch."""

    def now_us(self) -> int: ...


class SystemClock:
    """This machine's clock."""

    def now_us(self) -> int:
        return time.time_ns() // 1_000


class MonotonicClock:
    """Microseconds since some moment: for how long something may last, whatever happens to the wall's clock."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1_000


class ManualClock:
    """A clock that moves only when told to: for tests, replays and simulations."""

    def __init__(self, now_us: int = 1_700_006_400_000_000) -> None:
        self.set_us(now_us)

    def now_us(self) -> int:
        return self._now_us

    def set_us(self, now_us: int) -> None:
        if now_us < 0:
            raise InvalidInput("now_us", f"must not lie before 1970, got {now_us}")
        self._now_us = now_us

    def advance_us(self, by_us: int) -> None:
        self.set_us(self._now_us + by_us)
