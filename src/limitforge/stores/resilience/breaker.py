"""A circuit breaker as a pure state machine: the caller passes the time.

    closed   --consecutive failures-->  open   --open_us later, one caller-->  half-open
      ^                                 ^ |                                     |    |
      |                                 | +-- a late call succeeded --> closed  |    |
      |                                 +------------- failure -----------------+    |
      +------------------------------------------- success --------------------------+

A caller that `allows_call` lets through must call `record_success` or `record_failure`. A half-open breaker lets one
probe through. If that probe reports nothing for `probe_us` (its caller was cancelled), the next caller probes.

A failure counts only if its call began after the last failure that counted. All calls that were in flight at that
moment are assumed to fail for the same reason, so together they count as one failure.
"""

from enum import StrEnum

from limitforge.core.clock import LONG_AGO_US


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """Opens for `open_us` after `failures` consecutive failures, then lets one probe at a time through."""

    __slots__ = (
        "_consecutive_failures",
        "_failures",
        "_last_failure_us",
        "_open_us",
        "_probe_us",
        "_retry_at_us",
        "state",
    )

    def __init__(self, failures: int, open_us: int, probe_us: int) -> None:
        self._failures = failures
        self._open_us = open_us
        self._probe_us = probe_us
        self._consecutive_failures = 0
        self._last_failure_us = LONG_AGO_US
        self._retry_at_us = 0
        self.state = BreakerState.CLOSED

    def allows_call(self, now_us: int) -> bool:
        """Return whether this caller may call the server now."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_us < self._retry_at_us:
            return False
        self.state = BreakerState.HALF_OPEN
        self._retry_at_us = now_us + self._probe_us
        return True

    def record_success(self) -> bool:
        """Record a reply of the server; return whether it closed the breaker."""
        was_closed = self.state is BreakerState.CLOSED
        self._consecutive_failures = 0
        self.state = BreakerState.CLOSED
        return not was_closed

    def record_failure(self, now_us: int, began_us: int) -> bool:
        """Record a failed call that began at `began_us`; return whether it opened the breaker."""
        if began_us < self._last_failure_us:
            return False
        self._last_failure_us = now_us
        self._consecutive_failures += 1
        if self.state is BreakerState.OPEN or (
            self.state is BreakerState.CLOSED and self._consecutive_failures < self._failures
        ):
            return False
        self.state = BreakerState.OPEN
        self._retry_at_us = now_us + self._open_us
        return True

    def retry_after_us(self, now_us: int) -> int:
        """Return how long until the breaker lets a call through; 0 if it does so now."""
        return 0 if self.state is BreakerState.CLOSED else max(self._retry_at_us - now_us, 0)
