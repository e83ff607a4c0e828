"""Leaky bucket: starts empty and drains continuously. What is taken waits until the level before it has drained."""

from limitforge.core.algorithms.base import NEVER
from limitforge.core.algorithms.level import Level, LevelAlgorithm


class LeakyBucketAlgorithm(LevelAlgorithm, frozen=True):
    code = 2
    letter = "l"

    def fresh(self, now: int) -> Level:
        return Level(now, now, 0, self, (), 0)

    def open(self, state: Level, now: int) -> Level:
        level = state.level if state.algorithm is self else self.converted(state, 0, 2 * self.limit * self.per_us)
        drained = level - (now - state.last_us) * self.tokens
        return Level(now, state.until_us, 0, self, state.pending, drained if drained > 0 else 0)

    def wait(self, state: Level, cost: int, share: int) -> int:
        if cost > share:
            return NEVER
        over = state.level - (share - cost) * self.per_us
        return -(-over // self.tokens) if over > 0 else 0

    def delay(self, state: Level) -> int:
        """Return how long a cost that is taken now has to wait."""
        return -(-state.level // self.tokens)

    def take(self, state: Level, cost: int, lease: bytes) -> None:
        state.level += cost * self.per_us

    def force(self, state: Level, amount: int) -> bool:
        before = state.level
        state.level = max(before, min(before + amount * self.per_us, 2 * self.limit * self.per_us))
        return state.level > before

    def give(self, state: Level, amount: int, source: int) -> None:
        state.level = max(state.level - amount * self.per_us, 0)

    def seal(self, state: Level) -> None:
        state.used = -(-state.level // self.per_us)
        state.until_us = state.last_us - -state.level // self.tokens
