"""When the requests of a burst are due: on a schedule that does not drift, however long each of them takes."""

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
    """`interval_s` between two requests; 0 for as fast as it goes."""

    text: str
    interval_s: float

    @classmethod
    def parse(cls, text: str) -> "RequestRate":
        """A rate such as `50/s` or `20/minute`, or `max`."""
        if text.strip().lower() == "max":
            return cls("full speed", 0.0)
        found = _RATE.fullmatch(text.strip())
        unit = _UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None:
            raise InvalidInput("--rate", f"must be like 50/s, 20/minute or max, got {text!r:.60}")
        per_second = Decimal(found[1]) / _SECONDS[unit]
        if not 0 < per_second <= MAX_PER_SECOND:
            raise InvalidInput("--rate", f"must be above 0 and at most {MAX_PER_SECOND:,}/s, got {text!r:.60}")
        return cls(f"{found[1]}/{unit}", float(1 / per_second))


def send_times(
    rate: RequestRate,
    requests: int,
    on_frame: Callable[[float], None],
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[float]:
    """The seconds since the start, each time that a request is due. One that is late is due at once, and those after
    it keep their own times. In between `frame` is called, about twelve times a second.
    """
    start = now()
    next_frame = 0.0
    for request in range(requests):
        due_at = request * rate.interval_s
        while True:
            elapsed = now() - start
            if elapsed >= next_frame:
                on_frame(elapsed)
                next_frame = elapsed + FRAME_SECONDS
            elif elapsed >= due_at:
                break
            else:
                sleep(min(due_at, next_frame) - elapsed)
        yield elapsed
