"""A level in units of 1/per_us tokens, and its exact conversion to another rate: what both buckets share."""

from limitforge.core.algorithms.base import Algorithm, State
from limitforge.core.exact import MAX_EXACT, TEN_YEARS_US


class Level(State, gc=False):
    """`level` counts units of 1/per_us tokens, so that refilling and draining never round.

    `open` keeps the stored `until_us`: if nothing is written now, the store drops the bucket at that time, even if its
    limit has other parameters by then.
    """

    level: int


class LevelAlgorithm(Algorithm, frozen=True):
    """The level moves by `tokens` per `per_us` microseconds."""

    tokens: int
    per_us: int

    override_width = 3

    def with_parameters(self, leading: tuple[int, ...]) -> "Algorithm":
        """Keep the old parameters if the new ones are not exact: the plan may have changed since the override."""
        changed = super().with_parameters(leading)
        full = changed.limit * changed.per_us  # type: ignore[attr-defined]
        is_exact = full <= MAX_EXACT and full <= TEN_YEARS_US * changed.tokens  # type: ignore[attr-defined]
        return changed if is_exact else self

    def divided_by(self, processes: int) -> "LevelAlgorithm":
        return type(self)(max(self.limit // processes, 1), self.tokens, self.per_us * processes)

    def converted(self, state: Level, lowest: int, highest: int) -> int:
        """Return the level of `state` in the unit of this rate, rounded down and clamped."""
        level = state.level
        if state.algorithm.per_us != self.per_us:
            level = level * self.per_us // state.algorithm.per_us
        return min(max(level, lowest), highest)

    def source(self, state: Level) -> int:
        return 0
