"""A memory store with a denial cache and one without: no sequence of operations shows a difference."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from limitforge import Decision, ManualClock, SyncLimiter
from limitforge.stores.memory.store import MemoryStore
from tests.contract.strategies import PRIORITIES
from tests.denial_cache_machine import NAMES, AnyChecksCachedAndPlain, CachedAndPlain, costs, names
from tests.unit.caching_store import CachingStore


class MemoryTwins(CachedAndPlain):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.store = CachingStore(clock=self.clock, max_age_us=3_600_000_000)
        self.cached = SyncLimiter(self.store)
        self.plain = SyncLimiter(MemoryStore(clock=self.clock))

    def hits(self) -> int:
        return self.store.denials.hits


class AnyChecksMemoryTwins(MemoryTwins, AnyChecksCachedAndPlain): ...


class SameCheckTwins(MemoryTwins, CachedAndPlain):
    """The same check all the time: even the waits are equal."""

    @initialize(
        chosen=names,
        cost=costs(),
        priority=st.sampled_from(PRIORITIES),
        by_name=st.tuples(st.sampled_from(NAMES), costs()),
    )
    def choose(self, chosen: list[str], cost: int, priority: str, by_name: tuple[str, int]) -> None:
        self.chosen, self.cost, self.priority = chosen, cost, priority
        self.costs = {name: cost for name, cost in [by_name] if name in chosen}

    @rule(times=st.integers(1, 8))
    def check(self, times: int) -> None:
        plan = self.limits(self.chosen)
        self.last_action = lambda limiter: limiter.check(
            "r", "s", limits=plan, cost=self.cost, costs=self.costs, priority=self.priority
        )
        for _ in range(times):
            self.run_on_both(self.last_action)

    def on_cached_denial(self, mine: Decision, theirs: Decision) -> None:
        assert mine.retry_after_ms == theirs.retry_after_ms


def run(machine: type[CachedAndPlain]) -> None:
    patient = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=patient)


def test_a_cache_of_denials_changes_no_verdict() -> None:
    run(AnyChecksMemoryTwins)


def test_a_cache_of_denials_repeats_the_same_wait_for_the_same_check() -> None:
    run(SameCheckTwins)
