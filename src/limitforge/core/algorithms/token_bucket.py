"""Token bucket: starts full and refills continuously. Charges may lower it to minus its capacity."""

from limitforge.core.algorithms.base import NEVER
from limitforge.core.algorithms.level import Level, LevelAlgorithm


class TokenBucketAlgorithm(LevelAlgorithm, frozen=True):
    code = 1
    letter = "t"

    def fresh(self, now: int) -> Level:
        return Level(now, now, 0, self, (), self.limit * self.per_us)

    def open(self, state: Level, now: int) -> Level:
        full = self.limit * self.per_us
        level = state.level if state.algorithm is self else self.converted(state, -full, full)
        refilled = level + (now - state.last_us) * self.tokens
        return Level(now, state.until_us, 0, self, state.pending, refilled if refilled < full else full)

    def wait(self, state: Level, cost: int, share: int) -> int:
        if cost > share:
            return NEVER
        short = (self.limit - share + cost) * self.per_us - state.level
        return -(-short // self.tokens) if short > 0 else 0

    def take(self, state: Level, cost: int, lease: bytes) -> None:
        state.level -= cost * self.per_us

    def force(self, state: Level, amount: int) -> bool:
        before = state.level
        state.level = max(before - amount * self.per_us, -self.limit * self.per_us)
        return state.level < before

    def give(self, state: Level, amount: int, source: int) -> None:
        state.level = min(state.level + amount * self.per_us, self.limit * self.per_us)

    def seal(self, state: Level) -> None:
        level, per_us = state.level, self.per_us
        state.used = self.limit - level // per_us
        state.until_us = state.last_us - (level - self.limit * per_us) // self.tokens
