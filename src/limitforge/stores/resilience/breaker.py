"""A circuit breaker as a pure state machine: time comes in, permission comes out.

    closed   --failures in a row-->  open   --open_us later, one caller-->  probing
      ^                               ^ |                                     |   |
      |                               | +-- a straggler succeeded --> closed  |   |
      |                               +------------- failed ------------------+   |
      +------------------------------------------- succeeded --------------------+

Who asks `admits` and is let in must tell `succeeded` or `failed`. A probe that never tells (its caller went away) is
given up after `probe_us`, and the next caller probes.

A call that failed counts only if it began after the last failure that counted: whatever was under way at that moment
failed for the same reason, however many calls it was.
"""

from enum import StrEnum

from limitforge.core.clock import LONG_AGO_US


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "probing"


class CircuitBreaker:
    """Opens after `failures` in a row, for `open_us`; then lets one probe at a time through until one succeeds."""

    __slots__ = (
        "_last_failure_us",
        "_failures",
        "_open_us",
        "_probe_us",
        "_consecutive_failures",
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
        """Whether this caller may ask the backend."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_us < self._retry_at_us:
            return False
        self.state = BreakerState.HALF_OPEN
        self._retry_at_us = now_us + self._probe_us
        return True

    def record_success(self) -> bool:
        """The backend answered; tells whether that closed the breaker."""
        was_closed = self.state is BreakerState.CLOSED
        self._consecutive_failures = 0
        self.state = BreakerState.CLOSED
        return not was_closed

    def record_failure(self, now_us: int, began_us: int) -> bool:
        """The backend did not answer a call that began then; tells whether that opened the breaker."""
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
        """How long until a caller may ask; 0 if it may now."""
        return 0 if self.state is BreakerState.CLOSED else max(self._retry_at_us - now_us, 0)
