"""What the two buckets share: a level in 1/per_us tokens, and its exact conversion to another rate."""

from limitforge.core.algorithms.base import Algorithm, State
from limitforge.core.exact import MAX_EXACT, TEN_YEARS_US


class Level(State, gc=False):
    """`level` counts 1/per_us tokens, so that refilling and draining never round.

    An opened one keeps the `until` that was stored: if nothing is written now, the bucket is forgotten then, whatever
    numbers it has by now.
    """

    level: int


class LevelAlgorithm(Algorithm, frozen=True):
    """`tokens` per `per_us` microseconds move the level."""

    tokens: int
    per_us: int

    override_width = 3

    def with_numbers(self, leading: tuple[int, ...]) -> "Algorithm":
        """An override that names only some numbers may not fit a plan that has changed since: then the plan's hold."""
        changed = super().with_numbers(leading)
        full = changed.limit * changed.per_us  # type: ignore[attr-defined]
        is_exact = full <= MAX_EXACT and full <= TEN_YEARS_US * changed.tokens  # type: ignore[attr-defined]
        return changed if is_exact else self

    def divided(self, nodes: int) -> "LevelAlgorithm":
        return type(self)(max(self.limit // nodes, 1), self.tokens, self.per_us * nodes)

    def converted(self, state: Level, lowest: int, highest: int) -> int:
        """The level of `state` in these numbers' unit, rounded down and clamped."""
        level = state.level
        if state.algorithm.per_us != self.per_us:
            level = level * self.per_us // state.algorithm.per_us
        return min(max(level, lowest), highest)

    def source(self, state: Level) -> int:
        return 0
