"""Charges refused bodies to the key that sent them, so that garbage does not cost other callers.

Reading a body that is then refused takes time of the event loop and nothing from any limit. Each key may make a process
read so many bytes of refused bodies. Once that budget is spent, its batches and large bodies are answered 429 without
being parsed. Small bodies are neither charged nor refused: they cost no more than a normal check.
"""

from limitforge.core.clock import Clock, MonotonicClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import InvalidInput
from limitforge.service.problems import HttpError

SMALL_BODY = 4_096  # bytes: reading that many takes less time than HTTP does
BURST_BYTES = 4_194_304  # four of the largest batches, about 30 ms of the loop
BYTES_PER_SECOND = 524_288
INVALID_CHECK_BYTES = 256  # charged for each wrong check of a batch: to report one takes about 15 us
MAX_KEYS = 4_096


class InvalidBodyBudget:
    """Bytes of refused bodies that each key has left. A charge may overdraw the budget; debts are paid first."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._keys: dict[str, tuple[float, int]] = {}
        """What is left and when that was written, for keys that were charged; the last charged come last."""

    def require(self, key_id: str) -> None:
        """Raise BadRequest if the key has spent its budget."""
        if key_id not in self._keys:
            return
        left = self._bytes_left(key_id, self._clock.now_us())
        if left <= 0:
            detail = "too many requests with invalid bodies: only small single checks are read for now"
            wait = int(-left / BYTES_PER_SECOND) + 1
            raise HttpError(429, "too_many_refusals", detail, **{"retry-after": str(wait)})

    def charge(self, key_id: str, size: int) -> None:
        """Take `size` bytes for a body that was refused."""
        now_us = self._clock.now_us()
        left = self._bytes_left(key_id, now_us) - size
        self._keys.pop(key_id, None)
        self._keys[key_id] = (left, now_us)
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

    def charge_error(self, error: Exception, key_id: str, size: int) -> None:
        """Take `size` bytes if `error` refuses what a body contains."""
        if size > SMALL_BODY and isinstance(error, HttpError | InvalidInput) and not _was_unread(error):
            self.charge(key_id, size)

    def _bytes_left(self, key_id: str, now_us: int) -> float:
        left, since_us = self._keys.get(key_id, (BURST_BYTES, now_us))
        return min(left + (now_us - since_us) * BYTES_PER_SECOND / US_PER_SECOND, BURST_BYTES)


def _was_unread(error: Exception) -> bool:
    """Return whether the body was refused unread."""
    return isinstance(error, HttpError) and error.status == 429
