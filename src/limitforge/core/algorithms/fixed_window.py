"""Fixed window: a count per window. Windows are aligned to the clock, opened by the first hit, or spread by key."""

from enum import IntEnum

from limitforge.core.algorithms.base import NEVER, Algorithm, State


class WindowKind(IntEnum):
    ALIGNED = 0
    FIRST_HIT = 1
    SPREAD = 2


class Window(State, gc=False):
    """`until_us` is the end of the window, or now if no hit has opened it."""


class WindowAlgorithm(Algorithm, frozen=True):
    """A count that ends with its window: what fixed windows and quotas share."""

    def wait(self, state: Window, cost: int, share: int) -> int:
        if cost > share:
            return NEVER
        return 0 if state.used + cost <= share else state.until_us - state.last_us

    def take(self, state: Window, cost: int, lease: bytes) -> None:
        state.used += cost

    def force(self, state: Window, amount: int) -> bool:
        taken = min(amount, 2 * self.limit - state.used)
        if taken <= 0:
            return False
        self.take(state, taken, b"")
        return True

    def give(self, state: Window, amount: int, source: int) -> None:
        state.used = max(state.used - amount, 0)  # an amount of an earlier window ended with it

    def source(self, state: Window) -> int:
        return 0

    def seal(self, state: Window) -> None:
        """Do nothing: `used` and `until_us` are up to date."""


class FixedWindowAlgorithm(WindowAlgorithm, frozen=True):
    window_us: int
    kind: int
    offset: int = 0  # of a spread window: 48 bits of its key's hash, used modulo the window

    code = 3
    letter = "f"
    override_width = 2
    window_at = 1

    def fresh(self, now: int) -> Window:
        if self.kind == WindowKind.FIRST_HIT:
            return Window(now, now, 0, self, ())
        phase = self.offset % self.window_us
        return Window(now, now + self.window_us - (now + phase) % self.window_us, 0, self, ())

    def open(self, state: Window, now: int) -> Window:
        old = state.algorithm
        if old.window_us != self.window_us or old.kind != self.kind:
            return self.fresh(now)
        return Window(now, state.until_us, state.used, self, state.pending)

    def take(self, state: Window, cost: int, lease: bytes) -> None:
        if state.until_us == state.last_us:
            state.until_us = state.last_us + self.window_us
        state.used += cost
