"""A memory store on a manual clock that can be forked, so that a test can ask what would have happened."""

import copy
from collections.abc import Iterable
from typing import Any, Self

from limitforge import Decision, ManualClock, SyncLimiter
from limitforge.core.check import check_of
from limitforge.core.decide import Verdict, decide
from limitforge.core.plan import LimitsLike
from limitforge.stores.memory import MemoryStore
from tests.properties.strategies import Step

RESOURCE, SUBJECT = "GET:/orders", "user:42"


class World:
    def __init__(self, now_us: int) -> None:
        self.clock = ManualClock(now_us)
        self.store = MemoryStore(clock=self.clock)
        self.limiter = SyncLimiter(self.store)

    @property
    def now_us(self) -> int:
        return self.clock.now_us()

    def check(self, limits: LimitsLike, cost: int = 1, **options: Any) -> Decision:
        return self.limiter.check(RESOURCE, SUBJECT, limits=limits, cost=cost, **options)

    def look(self, limits: LimitsLike, **options: Any) -> Decision:
        return self.check(limits, 0, **options)

    def reserve(self, limits: LimitsLike, cost: int, **options: Any) -> Decision:
        return self.limiter.reserve(RESOURCE, SUBJECT, limits=limits, cost=cost, **options)

    def live(self, limits: LimitsLike, steps: Iterable[Step], **options: Any) -> list[Decision]:
        """Go through a history."""
        decisions = []
        for step in steps:
            self.clock.advance_us(step.after_us)
            decisions.append(self.check(limits, step.cost, **options))
        return decisions

    def after(self, us: int) -> Self:
        """Another world with the same past, `us` later."""
        fork = type(self)(self.now_us + us)
        fork.store._states = copy.copy(self.store._states)
        fork.store._states._order = list(self.store._states._order)
        fork.store._records = {key: copy.copy(record) for key, record in self.store._records.items()}
        return fork

    def states(self) -> dict[str, Any]:
        """Everything that is counted, as it is now."""
        return copy.deepcopy(self.store._states)

    def exact(self, limits: LimitsLike, cost: int, priority: str = "P0") -> Verdict:
        """What the engine would say, before anything is rounded to milliseconds. Changes nothing."""
        check = check_of(
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
        check.around(self.now_us)
        verdict = decide(check, self.now_us, self.store._states)
        assert isinstance(verdict, Verdict)
        return verdict

    def wait_us(self, limits: LimitsLike, cost: int, priority: str = "P0") -> int:
        """The longest of the waits."""
        return max(row[3] for row in self.exact(limits, cost, priority).rows)

    def reset_us(self, limits: LimitsLike) -> int:
        """The reset of a single limit."""
        return self.exact(limits, 0).rows[0][2]
