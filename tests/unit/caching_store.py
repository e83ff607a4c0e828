"""A denial cache in front of a memory store, as in the Redis stores but without a network."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from limitforge import Decision, FixedWindow, Limit, LimitforgeError, ManualClock, SyncLimiter
from limitforge.core.check import Check
from limitforge.core.decision import Outcome, build_decision
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.protocol import Command, ResultT, StoreStatus
from limitforge.stores.redis.core import invalidation_of
from limitforge.stores.redis.denial_cache import DenialCache

MINUTE_US = 60_000_000
HOUR = FixedWindow(name="hour", limit=2, window_seconds=3_600)


class CachingStore:
    """Counts the calls of the store behind the cache."""

    def __init__(self, *, max_age_us: int = MINUTE_US, max_keys: int = 100, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.memory = MemoryStore(clock=self.clock)
        self.keys = self.memory.keys
        self.denials = DenialCache(max_age_us=max_age_us, max_keys=max_keys, clock=self.clock)
        self.calls = 0

    def check(self, check: Check) -> Decision:
        denied = self.denials.get(check)
        return self.answer(check, *self.ask(check)) if denied is None else cast("Decision", denied)

    def ask(self, check: Check) -> tuple[Outcome, int]:
        """Return the outcome of the store, and when it was called."""
        self.calls += 1
        return self.memory._evaluate(check, self.clock.now_us()), self.clock.now_us()

    def answer(self, check: Check, outcome: Outcome, sent_us: int) -> Decision:
        if not outcome.allowed:
            self.denials.add(check, outcome, sent_us)
        shadow = None if check.shadow is None else self.memory._evaluate(check.shadow, sent_us)
        return build_decision(check, outcome, shadow)

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        return [self.check(check) for check in checks]

    def run(self, command: Command[ResultT]) -> ResultT:
        try:
            return self.memory.run(command)
        finally:
            drop = invalidation_of(command)
            if drop is not None:
                self.denials.invalidate(drop)

    def status(self) -> StoreStatus:
        return StoreStatus()

    def close(self) -> None: ...


class CachingLimiter:
    """A limiter on a caching store."""

    def __init__(self, **bounds: int) -> None:
        self.store = CachingStore(**bounds)  # type: ignore[arg-type]
        self.clock, self.denials = self.store.clock, self.store.denials
        self.limiter = SyncLimiter(self.store)

    def check(self, limits: Limit | Sequence[Limit], subject: str = "u", resource: str = "r", **how: Any) -> Decision:
        return self.limiter.check(resource, subject, limits=limits, **how)

    def calls_store(self, act: Callable[[], object]) -> bool:
        """Return whether an operation calls the store."""
        before = self.store.calls
        act()
        return self.store.calls > before

    def check_calls_store(self, limits: Limit | Sequence[Limit], **how: Any) -> bool:
        """Return whether a check calls the store."""
        return self.calls_store(lambda: self.check(limits, **how))

    def deny(self, limits: Limit | Sequence[Limit] = HOUR, **how: Any) -> Decision:
        """Check until denied. A microsecond passes first, so that earlier invalidations have no effect."""
        self.clock.advance_us(1)
        while (decision := self.check(limits, **how)).allowed:
            pass
        return decision
