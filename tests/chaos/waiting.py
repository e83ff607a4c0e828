"""Wait for conditions in real time."""

import time
from collections.abc import Callable

from limitforge import FixedWindow, SyncLimiter

PATIENCE_SECONDS = 45.0  # less than the timeout of a test, which would not say what is missing

ANY = FixedWindow(name="any", limit=1, window_seconds=1)


def eventually(is_so: Callable[[], object]) -> float:
    """Poll until a condition holds. Return how many seconds that took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < PATIENCE_SECONDS
        time.sleep(0.005)
    return time.monotonic() - began


def wait_until_store_decides(limiter: SyncLimiter) -> float:
    """Peek until the store decides again."""
    return eventually(lambda: limiter.check("anything", "s", limits=ANY, cost=0, failure="open").degraded is None)
