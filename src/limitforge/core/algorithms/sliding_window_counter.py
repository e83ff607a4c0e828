"""Sliding window counter: an estimate from the counts of two aligned windows, in exact integers."""

from limitforge.core.algorithms.base import NEVER, Algorithm, State


class Counter(State, gc=False):
    """`current` is the count of the window that contains `last_us`, `previous` that of the window before."""

    previous: int
    current: int


class SlidingWindowCounterAlgorithm(Algorithm, frozen=True):
    window_us: int

    code = 5
    letter = "w"
    override_width = 2
    window_at = 1

    def fresh(self, now: int) -> Counter:
        return Counter(now, now, 0, self, (), 0, 0)

    def open(self, state: Counter, now: int) -> Counter:
        window = self.window_us
        if state.algorithm.window_us != window:
            return self.fresh(now)
        passed = now // window - state.last_us // window
        if passed == 0:
            return Counter(now, 0, 0, self, state.pending, state.previous, state.current)
        return Counter(now, 0, 0, self, state.pending, state.current if passed == 1 else 0, 0)

    def wait(self, state: Counter, cost: int, share: int) -> int:
        if cost > share:
            return NEVER
        target = share - cost
        if self._estimate(state) <= target:
            return 0
        return self._time_until(state, target)

    def take(self, state: Counter, cost: int, lease: bytes) -> None:
        state.current += cost

    def force(self, state: Counter, amount: int) -> bool:
        taken = min(amount, 2 * self.limit - self._estimate(state))
        if taken <= 0:
            return False
        state.current += taken
        return True

    def give(self, state: Counter, amount: int, source: int) -> None:
        start = self.source(state)
        if source == start:
            state.current = max(state.current - amount, 0)
        elif source == start - self.window_us:  # it has ended but still counts
            state.previous = max(state.previous - amount, 0)

    def source(self, state: Counter) -> int:
        return state.last_us - state.last_us % self.window_us

    def seal(self, state: Counter) -> None:
        state.used = self._estimate(state)
        state.until_us = state.last_us + (self._time_until(state, 0) if state.used else 0)

    def _estimate(self, state: Counter) -> int:
        if not state.previous:
            return state.current
        window = self.window_us
        return state.previous * (window - state.last_us % window) // window + state.current

    def _time_until(self, state: Counter, target: int) -> int:
        """Return the microseconds until the estimate, which is above `target`, has fallen to it."""
        window = self.window_us
        elapsed = state.last_us % window
        if state.current <= target:
            decaying, decayed_to = state.previous, target - state.current
        else:  # not before the current count has become the previous one
            decaying, decayed_to, elapsed = state.current, target, elapsed - window
        # That is window - ceil((decayed_to + 1) * window / decaying) + 1 - elapsed.
        return window + (-(decayed_to + 1) * window) // decaying + 1 - elapsed
