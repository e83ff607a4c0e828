"""Fixed window: a count per window; windows are aligned, opened by the first hit, or spread by key."""

from enum import IntEnum

from limitforge.core.algorithms.steps import NEVER, State, Steps


class WindowKind(IntEnum):
    ALIGNED = 0
    FIRST_HIT = 1
    SPREAD = 2


class Window(State):
    """`until` is the window's end, or 0 while no hit has opened it."""

    count: int


class WindowSteps(Steps, frozen=True):
    """What fixed windows and quotas share: a count that ends with its window."""

    def wait(self, state: Window, cost: int, share: int) -> int:
        if cost > share:
            return NEVER
        return 0 if state.count + cost <= share else state.until - state.last

    def take(self, state: Window, cost: int, lease: bytes) -> None:
        state.count += cost

    def force(self, state: Window, amount: int) -> bool:
        taken = min(amount, 2 * self.limit - state.count)
        if taken <= 0:
            return False
        self.take(state, taken, b"")
        return True

    def give(self, state: Window, amount: int, source: int) -> None:
        state.count = max(state.count - amount, 0)  # what was reserved in an earlier window left with it

    def source(self, state: Window) -> int:
        return 0

    def view(self, state: Window, share: int) -> tuple[int, int]:
        return max(share - state.count, 0), state.until - state.last if state.until else 0

    def seal(self, state: Window) -> None:
        """The window's end is already in `until`."""


class FixedWindowSteps(WindowSteps, frozen=True):
    window_us: int
    kind: int
    offset: int = 0  # for a spread window: 48 bits of its key's hash, taken modulo the window

    code = 3
    letter = "f"
    override_width = 2

    def fresh(self, now: int) -> Window:
        if self.kind == WindowKind.FIRST_HIT:
            return Window(now, 0, self, (), 0)
        phase = self.offset % self.window_us
        return Window(now, now + self.window_us - (now + phase) % self.window_us, self, (), 0)

    def open(self, state: Window, now: int) -> Window:
        old = state.numbers
        if old.window_us != self.window_us or old.kind != self.kind:
            return self.fresh(now)
        return Window(now, state.until, self, state.pending, state.count)

    def take(self, state: Window, cost: int, lease: bytes) -> None:
        if not state.until:
            state.until = state.last + self.window_us
        state.count += cost
