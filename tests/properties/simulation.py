"""A memory store on a manual clock that can be forked, so that a test can ask what would have happened."""

import copy
from collections.abc import Iterable
from typing import Any, Self

from limitforge import Decision, ManualClock, SyncLimiter
from limitforge.core.check import build_check
from limitforge.core.evaluate import Evaluation, evaluate
from limitforge.core.plan import LimitsLike
from limitforge.stores.memory.store import MemoryStore
from tests.properties.strategies import Step

RESOURCE, SUBJECT = "GET:/orders", "user:42"


class Simulation:
    """Checks on a memory store with a manual clock."""

    def __init__(self, now_us: int) -> None:
        self.clock = ManualClock(now_us)
        self.store = MemoryStore(clock=self.clock)
        self.limiter = SyncLimiter(self.store)

    @property
    def now_us(self) -> int:
        return self.clock.now_us()

    def check(self, limits: LimitsLike, cost: int = 1, **options: Any) -> Decision:
        return self.limiter.check(RESOURCE, SUBJECT, limits=limits, cost=cost, **options)

    def peek(self, limits: LimitsLike, **options: Any) -> Decision:
        return self.check(limits, 0, **options)

    def reserve(self, limits: LimitsLike, cost: int, **options: Any) -> Decision:
        return self.limiter.reserve(RESOURCE, SUBJECT, limits=limits, cost=cost, **options)

    def replay(self, limits: LimitsLike, steps: Iterable[Step], **options: Any) -> list[Decision]:
        """Replay a history."""
        decisions = []
        for step in steps:
            self.clock.advance_us(step.after_us)
            decisions.append(self.check(limits, step.cost, **options))
        return decisions

    def fork_later(self, us: int) -> Self:
        """Return another simulation with the same past, `us` later."""
        fork = type(self)(self.now_us + us)
        fork.store._states = copy.copy(self.store._states)
        fork.store._states._sampling_pool = list(self.store._states._sampling_pool)
        fork.store._records = {key: copy.copy(record) for key, record in self.store._records.items()}
        return fork

    def states(self) -> dict[str, Any]:
        """Return a copy of everything that is counted."""
        return copy.deepcopy(self.store._states)

    def evaluate(self, limits: LimitsLike, cost: int, priority: str = "P0") -> Evaluation:
        """Evaluate a check without changing anything; the result is not rounded to milliseconds."""
        check = build_check(
            self.store.keys,
            limits,
            RESOURCE,
            SUBJECT,
            cost=cost,
            costs=None,
            tenant="default",
            priority=priority,
            shadow=None,
        )
        check.resolve_calendars(self.now_us)
        verdict = evaluate(check, self.now_us, self.store._states)
        assert isinstance(verdict, Evaluation)
        return verdict

    def wait_us(self, limits: LimitsLike, cost: int, priority: str = "P0") -> int:
        """Return the longest of the waits."""
        return max(row[3] for row in self.evaluate(limits, cost, priority).rows)

    def reset_us(self, limits: LimitsLike) -> int:
        """Return the reset of a single limit."""
        return self.evaluate(limits, 0).rows[0][2]
