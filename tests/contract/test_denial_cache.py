"""Denial caches of several processes on a real Redis: they admit nothing, and over-deny only within their bound."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from limitforge import Decision, FixedWindow, Limit, ManualClock, StoreOptions, SyncLimiter
from limitforge.stores.memory.store import MemoryStore
from tests.contract.caching_processes import CachingProcesses
from tests.contract.conftest import PATIENT
from tests.denial_cache_machine import CHANGES, NAMES, SUBJECTS, AnyChecksCachedAndPlain, tight_limits
from tests.servers import RedisServer
from tests.state_machines import run_machine

AGE_MS = 1_000
AGE_US = 1_000 * AGE_MS


class CachedProcesses(AnyChecksCachedAndPlain):
    """Checks go to different processes in turn."""

    fleet: CachingProcesses

    def __init__(self) -> None:
        super().__init__()
        self.fleet.reset()
        self.clock = self.fleet.clock
        self.cached = self.fleet.limiters[0]

    def hits(self) -> int:
        return self.fleet.hits()

    @rule(at=st.integers(0, 2))
    def ask_another_node(self, at: int) -> None:
        self.cached = self.fleet.limiters[at]


class ListeningProcesses(CachedProcesses):
    """Every invalidation arrives before the next operation: decisions equal those of one store without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = SyncLimiter(MemoryStore(clock=self.clock))

    def on_change(self) -> None:
        self.fleet.wait_for_invalidations()


class IsolatedProcesses(CachedProcesses):
    """Every invalidation is lost, overrides expire and plans change: a wrong denial ends within its bound."""

    uncached: SyncLimiter

    def __init__(self) -> None:
        super().__init__()
        self.plain = self.uncached  # on the same keys
        self.changes_us: list[int] = [0]

    def run_on_both(self, act: Callable[[SyncLimiter], Any]) -> None:
        hits = self.hits()
        mine = self.answer(act, self.cached)
        if not isinstance(mine, Decision):
            self.changes_us.append(self.clock.now_us())
            self.repeat_now_and_later()
            return
        self.remember(mine, mine)
        if mine.allowed:
            assert self.hits() == hits
            return
        theirs = self.answer(act, self.uncached)
        if theirs.allowed:
            self.remember(theirs, theirs)
            latest_us = max(at_us for at_us in self.changes_us if at_us <= self.clock.now_us())
            assert self.hits() > hits
            assert self.clock.now_us() < latest_us + AGE_US

    @rule(limit=st.sampled_from(NAMES).flatmap(tight_limits))
    def change_the_plan(self, limit: Limit) -> None:
        self.plan[limit.name] = limit
        self.changes_us.append(self.clock.now_us())

    @rule(
        name=st.sampled_from(NAMES),
        subject=st.sampled_from(SUBJECTS),
        change=st.sampled_from(CHANGES),
        ttl_seconds=st.sampled_from([0.5, 3, 60]),
    )
    def set_a_brief_override(self, name: str, subject: str, change: Any, ttl_seconds: float) -> None:
        plan = self.limits([name])
        self.run_on_both(
            lambda limiter: limiter.set_override("*", subject, {name: change}, limits=plan, ttl_seconds=ttl_seconds)
        )
        self.changes_us.append(self.clock.now_us() + int(ttl_seconds * 1e6))

    @precondition(lambda self: self.last is not None and not self.last.allowed)
    @rule(by_us=st.sampled_from([1, AGE_US // 2, AGE_US - 1, AGE_US]))
    def let_the_cache_grow_old(self, by_us: int) -> None:
        self.clock.advance_us(by_us)


@pytest.fixture
def hearing(redis_server: RedisServer) -> Iterator[type[ListeningProcesses]]:
    fleet = CachingProcesses(redis_server.url, denial_cache_ms=60_000)
    yield type("Hearing", (ListeningProcesses,), {"fleet": fleet})
    fleet.close()


@pytest.fixture
def deaf(redis_server: RedisServer) -> Iterator[type[IsolatedProcesses]]:
    fleet = CachingProcesses(redis_server.url, denial_cache_ms=AGE_MS, deaf=True)
    with SyncLimiter.connect(redis_server.url, clock=fleet.clock, options=PATIENT) as uncached:
        yield type("Deaf", (IsolatedProcesses,), {"fleet": fleet, "uncached": uncached})
    fleet.close()


def run(machine: type[CachedProcesses], examples: int, machine_seed: int | None) -> None:
    run_machine(machine, examples, machine_seed)
    assert machine.fleet.hits() > 0


def test_processes_that_receive_invalidations_decide_as_one_store_without_a_cache(
    hearing: type[ListeningProcesses],
) -> None:
    run(hearing, 20, 1)


@pytest.mark.soak
def test_processes_that_receive_invalidations_decide_so_on_ever_new_traces(hearing: type[ListeningProcesses]) -> None:
    run(hearing, 10_000, None)


def test_a_process_without_invalidations_denies_more_than_redis_only_within_its_bound(
    deaf: type[IsolatedProcesses],
) -> None:
    run(deaf, 20, 1)


@pytest.mark.soak
def test_a_process_without_invalidations_keeps_its_bound_on_ever_new_traces(deaf: type[IsolatedProcesses]) -> None:
    run(deaf, 10_000, None)


def test_processes_that_check_at_once_admit_exactly_the_limit(redis_url: str) -> None:
    limit = FixedWindow(name="w", limit=100, window_seconds=86_400)
    options = StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=60_000)
    clock = ManualClock()
    admitted: list[bool] = []

    def call(node: SyncLimiter) -> None:
        admitted.extend(node.check("r", "s", limits=limit).allowed for _ in range(100))

    with ExitStack() as opened:
        nodes = [opened.enter_context(SyncLimiter.connect(redis_url, clock=clock, options=options)) for _ in range(3)]
        threads = [threading.Thread(target=call, args=(node,)) for node in nodes for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(admitted), sum(admitted)) == (600, 100)
        assert all(node.status().denial_hits for node in nodes)
        with SyncLimiter.connect(redis_url, clock=clock, options=PATIENT) as uncached:
            assert not uncached.check("r", "s", limits=limit).allowed
