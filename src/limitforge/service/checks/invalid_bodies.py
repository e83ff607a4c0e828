"""Charge invalid bodies to the key that sent them, so that garbage does not slow down other callers.

Parsing an invalid body takes time of the event loop, and no limit covers it. So each process has a budget per key
for the bytes of the invalid bodies that it parses. When it is spent, the service answers the key's batches and large
bodies with 429 and does not parse them. Small bodies are neither charged nor rejected: they cost no more than a valid
check.
"""

from limitforge.core.clock import Clock, MonotonicClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import InvalidInput
from limitforge.service.checks.body_sizes import SMALL_BODY_BYTES
from limitforge.service.problems import HttpError

BURST_BYTES = 4_194_304  # four batches of the largest size, about 30 ms of the event loop
BYTES_PER_SECOND = 524_288
INVALID_CHECK_BYTES = 256  # charge for each invalid check of a batch: reporting it takes about 15 us
MAX_KEYS = 4_096


class InvalidBodyBudget:
    """A token bucket of bytes for each key. A charge may overdraw it; the key then waits until it is refilled."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._keys: dict[str, tuple[float, int]] = {}
        """Bytes left and the time of that value, by key id. Only charged keys are here, the last charged at the end."""

    def require_budget(self, key_id: str) -> None:
        """Raise HttpError if the key has spent its budget."""
        if key_id not in self._keys:
            return
        left = self._bytes_left(key_id, self._clock.now_us())
        if left <= 0:
            detail = f"too many invalid bodies; for now, send only single checks of up to {SMALL_BODY_BYTES} bytes"
            wait_seconds = int(-left / BYTES_PER_SECOND) + 1
            raise HttpError(429, "too_many_refusals", detail, **{"retry-after": str(wait_seconds)})

    def charge(self, key_id: str, size: int) -> None:
        """Take `size` bytes from the key's budget."""
        now_us = self._clock.now_us()
        left = self._bytes_left(key_id, now_us) - size
        self._keys.pop(key_id, None)
        self._keys[key_id] = (left, now_us)
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

    def charge_error(self, error: Exception, key_id: str, size: int) -> None:
        """Take `size` bytes if `error` says that the body is invalid. Small bodies are free."""
        if size > SMALL_BODY_BYTES and isinstance(error, HttpError | InvalidInput) and not _was_unread(error):
            self.charge(key_id, size)

    def _bytes_left(self, key_id: str, now_us: int) -> float:
        left, since_us = self._keys.get(key_id, (BURST_BYTES, now_us))
        return min(left + (now_us - since_us) * BYTES_PER_SECOND / US_PER_SECOND, BURST_BYTES)


def _was_unread(error: Exception) -> bool:
    """Return whether the body was rejected before it was parsed."""
    return isinstance(error, HttpError) and error.status == 429
