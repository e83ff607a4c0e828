"""A store that never replies, without a network: the failure behaviour decides every check."""

from collections.abc import Sequence
from typing import Any

import pytest

from limitforge import Decision, Limit, LimitforgeError, ManualClock, StoreOptions, StoreUnavailable, SyncLimiter
from limitforge.core.check import Check
from limitforge.core.keys import Keys
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.protocol import Command, ResultT, StoreStatus
from limitforge.stores.resilience import failure as resilience_module
from limitforge.stores.resilience.failure import Resilience

UNREACHABLE = StoreUnavailable("connection refused")
TIMED_OUT = StoreUnavailable("no answer within 50 ms", maybe_counted=True)


class UnavailableStore:
    """What the Redis stores do while Redis is unavailable. `error` is the reason."""

    def __init__(self, clock: ManualClock, **options: Any) -> None:
        self.keys = Keys()
        local = MemoryStore(keys=self.keys, clock=clock, max_keys=resilience_module.LOCAL_MAX_KEYS)
        self.resilience = Resilience(StoreOptions(**options), local)
        self.error = UNREACHABLE

    def check(self, check: Check) -> Decision:
        answer = self.resilience.decide_without_store(check, self.error)
        if isinstance(answer, LimitforgeError):
            raise answer
        return answer

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        return [self.resilience.decide_without_store(check, self.error) for check in checks]

    def run(self, command: Command[ResultT]) -> ResultT:
        return self.resilience.local.run(command)

    def status(self) -> StoreStatus:
        return StoreStatus()

    def close(self) -> None: ...


class OutageLimiter:
    """A limiter whose store is unavailable. `monotonic` is the clock of the breaker and of the log lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.clock, self.monotonic = ManualClock(), ManualClock()
        monkeypatch.setattr(resilience_module, "MonotonicClock", lambda: self.monotonic)
        self.store = UnavailableStore(self.clock, **options)
        self.resilience = self.store.resilience
        self.limiter = SyncLimiter(self.store)

    def check(self, limits: Limit | Sequence[Limit], subject: str = "s", **how: Any) -> Decision:
        return self.limiter.check("r", subject, limits=limits, **how)

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.resilience.record_failure(StoreUnavailable("connection refused"), self.resilience.now_us())

    def store_after_charges(self) -> MemoryStore:
        """Return a store that has received the charges after the outage."""
        back = MemoryStore(clock=self.clock)
        for charge in self.resilience.record_success():
            back.check(charge)
        return back


def used(store: MemoryStore, limit: Limit, subject: str = "s", **how: Any) -> int:
    """Return the cost that is used of a limit, which must be far from reached."""
    peek = SyncLimiter(store).check("r", subject, limits=limit, cost=0, **how)
    return (peek.limit or 0) - (peek.remaining or 0)
