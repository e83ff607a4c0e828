"""Compute waits and resets without a formula: search for the first instant at which an oracle has room."""

from collections.abc import Callable
from fractions import Fraction
from math import ceil

from limitforge import FixedWindow, Quota
from limitforge.core.limits import Align
from tests.properties.oracles import Oracle


def search_first_us(holds: Callable[[int], bool], now_us: int) -> int:
    """Return how long it takes until `holds` is true, and stays true: by doubling, then bisecting."""
    if holds(now_us):
        return 0
    low, high = 0, 1
    while not holds(now_us + high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(now_us + middle) else (middle, high)
    return high


def wait_us(oracle: Oracle, now_us: int, cost: int, share: int) -> int | None:
    """Return the shortest wait after which a cost fits; None if it never does."""
    if not cost:
        return 0
    return search_first_us(lambda at: oracle.used(at) + cost <= share, now_us) if cost <= share else None


def reset_us(oracle: Oracle, now_us: int) -> int:
    """Return how long it takes until nothing is in use; a window on the clock also ends when nothing was counted."""
    limit = oracle.limit
    if isinstance(limit, Quota) or (isinstance(limit, FixedWindow) and limit.align is not Align.FIRST_HIT):
        window = oracle.window  # type: ignore[attr-defined]
        return search_first_us(lambda at: window(at) != window(now_us), now_us)
    return search_first_us(lambda at: not oracle.used(at), now_us)


def round_up_to_ms(us: int) -> int:
    return ceil(Fraction(us, 1_000))
