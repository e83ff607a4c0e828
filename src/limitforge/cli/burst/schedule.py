"""The schedule of a burst. It does not drift, even if requests are slow."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal

from limitforge.errors import InvalidInput

MAX_PER_SECOND = 1_000_000
FRAME_SECONDS = 1 / 12

_SECONDS = {"second": 1, "minute": 60, "hour": 3_600}
_UNITS = {unit: unit for unit in _SECONDS} | {
    "s": "second",
    "sec": "second",
    "m": "minute",
    "min": "minute",
    "h": "hour",
}
_RATE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(?:/|per)\s*([a-z]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RequestRate:
    """A rate of requests. `interval_s` is the time between two requests; 0 is full speed."""

    text: str
    interval_s: float

    @classmethod
    def parse(cls, text: str) -> "RequestRate":
        """Parse a rate such as `50/s` or `20/minute`, or `max`."""
        if text.strip().lower() == "max":
            return cls("full speed", 0.0)
        match = _RATE.fullmatch(text.strip())
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise InvalidInput("--rate", f"must be a rate such as 50/s or 20/minute, or max, got {text!r:.60}")
        per_second = Decimal(match[1]) / _SECONDS[unit]
        if not 0 < per_second <= MAX_PER_SECOND:
            raise InvalidInput("--rate", f"must be above 0 and at most {MAX_PER_SECOND:,}/s, got {text!r:.60}")
        return cls(f"{match[1]}/{unit}", float(1 / per_second))


def send_times(
    rate: RequestRate,
    requests: int,
    on_frame: Callable[[float], None],
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[float]:
    """Wait for the time of each request, and yield the seconds since the start.

    A late request is sent at once, and does not move the times of the following ones. `on_frame` is called about twelve
    times per second while waiting.
    """
    start = now()
    next_frame = 0.0
    for request in range(requests):
        scheduled = request * rate.interval_s
        while True:
            elapsed = now() - start
            if elapsed >= next_frame:
                on_frame(elapsed)
                next_frame = elapsed + FRAME_SECONDS
            elif elapsed >= scheduled:
                break
            else:
                sleep(min(scheduled, next_frame) - elapsed)
        yield elapsed
