"""Prepaid shares of a limit that is defined twice, overridden or changed meanwhile: no count exceeds its limit.

An override of the window restarts the count. What was prepaid before must be neither spent nor returned after.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from limitforge import FixedWindow, Limit, ManualClock, Quota
from limitforge.stores.redis.denial_cache import Invalidation
from tests.contract.test_prepaid_model import BASE_US, INTERVAL_US, PROCESSES, PrepaidModel, PrepaidProcess
from tests.servers import RedisServer
from tests.state_machines import run_machine
from tests.topologies import RedisCluster

SECOND_US = 1_000_000
WINDOW = FixedWindow(name="window", limit=1_000, window_seconds=10, consistency="prepaid")
LATE_US = BASE_US + 12 * SECOND_US  # windows of 10 and of 20 seconds end together

DEFINITIONS: list[Limit] = [
    FixedWindow(name="window", limit=30, window_seconds=2, consistency="prepaid"),
    FixedWindow(name="window", limit=20, window_seconds=2, consistency="prepaid"),
    FixedWindow(name="window", limit=30, window_seconds=4, consistency="prepaid"),
]
PERIODS: list[Limit] = [
    Quota(name="window", limit=30, period="day", consistency="prepaid"),
    Quota(name="window", limit=20, period="day", consistency="prepaid"),
    Quota(name="window", limit=30, period="day", time_zone="Asia/Tokyo", consistency="prepaid"),
]


@pytest.fixture(params=["redis_server", pytest.param("cluster_servers", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Any:
    found = request.getfixturevalue(request.param)
    found.flush()
    return found


@pytest.fixture
def processes(server: Any) -> Iterator[list[PrepaidProcess]]:
    """Two processes at one moment, late in a window."""
    clock = ManualClock(LATE_US)
    with closing(PrepaidProcess(server.url, clock, 0)) as one, closing(PrepaidProcess(server.url, clock, 0)) as other:
        yield [one, other]


def admitted(process: PrepaidProcess, limit: Limit, times: int) -> int:
    return sum(process.limiter.check("r", "s", limits=limit).allowed for _ in range(times))


def rest(process: PrepaidProcess, limit: Limit) -> int:
    """Return all that is admitted, first in checks of 50 and then of 1."""
    passed = 0
    for cost in (50, 1):
        while process.limiter.check("r", "s", limits=limit, cost=cost).allowed:
            passed += cost
    return passed


def sync(process: PrepaidProcess) -> None:
    process.clock.advance_us(INTERVAL_US)
    process.store._top_up(process.shares.due_requests(), time.monotonic() + 30)


def override(process: PrepaidProcess, window_seconds: int | None, limit: Limit = WINDOW) -> None:
    """Change the window, and invalidate the shares of this process, which then returns them with its next request."""
    if window_seconds is None:
        process.limiter.delete_override("r", "s")
    else:
        changes = {limit.name: {"window_seconds": window_seconds}}
        process.limiter.set_override("r", "s", changes, limits=limit, ttl_seconds=3_600)
    drop_overridden(process)


def drop_overridden(process: PrepaidProcess) -> None:
    shares = process.shares._shares.values()
    process.shares.invalidate(
        Invalidation(override_keys=tuple({share.overrides for share in shares if share.overrides is not None}))
    )


def test_a_share_is_not_returned_into_another_window_of_the_same_end(processes: list[PrepaidProcess]) -> None:
    buyer, other = processes
    admitted(buyer, WINDOW, 100)
    sync(buyer)
    assert buyer.shares.total_balance > 0
    override(buyer, 20)
    assert rest(other, WINDOW) == 1_000
    sync(buyer)
    assert rest(other, WINDOW) == 0


def test_a_share_is_not_returned_into_the_count_that_began_when_an_override_ended(
    processes: list[PrepaidProcess],
) -> None:
    """The window is the same, but the count is another one."""
    buyer, other = processes
    admitted(buyer, WINDOW, 100)
    sync(buyer)
    override(buyer, 20)
    admitted(other, WINDOW, 1)
    override(buyer, None)
    assert rest(other, WINDOW) == 1_000
    sync(buyer)
    assert rest(other, WINDOW) == 0


def test_what_is_granted_in_another_window_does_not_take_the_old_share_with_it(processes: list[PrepaidProcess]) -> None:
    """An override begins while a request is in flight: its reply belongs to the new window, the balance to the old."""
    buyer, other = processes
    admitted(buyer, WINDOW, 100)
    sync(buyer)
    admitted(buyer, WINDOW, 150)
    buyer.clock.advance_us(INTERVAL_US)
    requests, sent_us = buyer.shares.due_requests(), buyer.shares.now_us()
    assert [(top_up.kept > 0, top_up.requested > 0) for top_up in requests] == [(True, True)]
    override(buyer, 20)
    replies = buyer.store._run_flow(
        buyer.store._core.top_up_flow(requests, buyer.shares.lapse_us), time.monotonic() + 30
    )
    buyer.shares.apply_replies(requests, replies, sent_us)
    passed = rest(other, WINDOW)
    sync(buyer)
    assert passed + rest(other, WINDOW) <= 1_000


def test_a_plan_with_a_smaller_limit_spends_nothing_of_the_shares(processes: list[PrepaidProcess]) -> None:
    buyer, other = processes
    passed = admitted(buyer, WINDOW, 100)
    sync(buyer)
    smaller = dataclasses.replace(WINDOW, limit=150)
    passed += rest(buyer, smaller)
    sync(buyer)
    passed += rest(other, smaller)
    sync(other)
    assert passed + rest(buyer, smaller) + rest(other, smaller) == 150


def test_a_plan_with_another_window_leaves_its_shares_to_the_old_one(processes: list[PrepaidProcess]) -> None:
    buyer, other = processes
    passed = admitted(buyer, WINDOW, 100)
    sync(buyer)
    longer = dataclasses.replace(WINDOW, window_seconds=20)
    assert rest(buyer, longer) == 1_000
    for _ in range(7):  # then the old share is idle, and is returned
        sync(buyer)
    assert passed + rest(other, WINDOW) == 1_000
    assert admitted(other, longer, 100) == 0


class Changing(PrepaidModel):
    """Each process has one of several definitions, and overrides of the window begin and end, also while messages are
    under way. No window of a definition admits more than its largest number, counted from the last change of override.
    """

    definitions: list[Limit]

    def __init__(self) -> None:
        super().__init__()
        self.limit = self.definitions[0]
        self.defined = [0] * PROCESSES
        self.overridden: int | None = None
        self.count: Counter[tuple[Any, ...]] = Counter()

    def window_now(self) -> int:
        return 0

    def ask(self, process: PrepaidProcess, cost: int) -> None:
        limit = self.definitions[self.defined[self.processes.index(process)]]
        if process.limiter.check("r", "s", limits=limit, cost=cost).allowed:
            counted = (limit.shape, self.period(limit))
            self.count[counted] += cost
            assert self.count[counted] <= self.most(limit)

    def period(self, limit: Limit) -> int:
        seconds = self.overridden or int(getattr(limit, "window_seconds", 86_400))
        offset = 9 * 3_600 if getattr(limit, "time_zone", "UTC") == "Asia/Tokyo" else 0
        return (self.clock.now_us() // SECOND_US + offset) // seconds

    def most(self, limit: Limit) -> int:
        return max(each.size or 0 for each in self.definitions if each.shape == limit.shape)

    @rule(process=st.integers(0, PROCESSES - 1), at=st.integers(0, 2))
    def deploy(self, process: int, at: int) -> None:
        self.defined[process] = at

    @rule(at=st.integers(0, 2))
    def change_the_plan(self, at: int) -> None:
        self.defined = [at] * PROCESSES

    @rule(times=st.integers(1, 20), cost=st.sampled_from([1, 2, 5]))
    def ask_all_in_turn(self, times: int, cost: int) -> None:
        for _ in range(times):
            for process in self.processes:
                self.ask(process, cost)

    @rule(window=st.sampled_from([None, None, 1, 2, 4, 8]))
    def change_the_override(self, window: int | None) -> None:
        if isinstance(self.limit, Quota):
            return  # the window of a quota can't be overridden
        self.overridden = window
        override(self.processes[0], window, self.limit)
        for process in self.processes:
            drop_overridden(process)
        self.count.clear()

    @rule(window=st.sampled_from([1, 4, 8]), during=st.integers(0, 3), after=st.integers(0, 15))
    def begin_and_end_an_override(self, window: int, during: int, after: int) -> None:
        """Check before any share has been returned."""
        for overridden, times in ((window, during), (None, after)):
            self.change_the_override(overridden)
            self.ask_all_in_turn(times, 1)

    @rule(
        process=st.integers(0, PROCESSES - 1),
        first=st.sampled_from([None, 1, 4]),
        second=st.sampled_from([None, 1, 4]),
        meanwhile=st.integers(0, 40),
    )
    def change_the_override_during_a_sync(
        self, process: int, first: int | None, second: int | None, meanwhile: int
    ) -> None:
        synced = self.processes[process]
        self.pass_time(INTERVAL_US)
        requests, sent_us = synced.shares.due_requests(), synced.shares.now_us()
        self.change_the_override(first)
        due = time.monotonic() + 30
        replies = (
            synced.store._run_flow(synced.store._core.top_up_flow(requests, synced.shares.lapse_us), due)
            if requests
            else []
        )
        self.change_the_override(second)
        for each in self.processes:
            if each is not synced:
                for _ in range(meanwhile):
                    self.ask(each, 1)
        synced.shares.apply_replies(requests, replies, sent_us)


def run(server: Any, definitions: list[Limit], examples: int, seed: int | None) -> None:
    machine: type[Changing] = type("Changing", (Changing,), {"server": server, "definitions": definitions})
    run_machine(machine, examples, seed, steps=30)


@pytest.mark.parametrize("definitions", [DEFINITIONS, PERIODS], ids=["windows", "quotas"])
def test_shares_never_pass_a_limit_that_changes(redis_server: RedisServer, definitions: list[Limit]) -> None:
    run(redis_server, definitions, 10, 1)


@pytest.mark.slow
def test_shares_never_pass_a_limit_that_changes_on_a_cluster(cluster_servers: RedisCluster) -> None:
    run(cluster_servers, DEFINITIONS, 8, 2)


@pytest.mark.soak
@pytest.mark.parametrize("definitions", [DEFINITIONS, PERIODS], ids=["windows", "quotas"])
def test_shares_never_pass_a_limit_that_changes_on_ever_new_traces(
    redis_server: RedisServer, definitions: list[Limit]
) -> None:
    run(redis_server, definitions, 3_000, None)


@pytest.mark.soak
def test_shares_never_pass_a_limit_that_changes_on_ever_new_traces_on_a_cluster(
    cluster_servers: RedisCluster,
) -> None:
    run(cluster_servers, DEFINITIONS, 1_000, None)


def test_a_share_does_not_go_back_after_an_override_whose_window_has_ended(redis_server: RedisServer) -> None:
    """The count of the override has ended, so the next count restarts in the window of the first."""
    redis_server.flush()
    clock = ManualClock(BASE_US + SECOND_US)
    minute = dataclasses.replace(WINDOW, window_seconds=60)
    with (
        closing(PrepaidProcess(redis_server.url, clock, 0)) as buyer,
        closing(PrepaidProcess(redis_server.url, clock, 0)) as other,
    ):
        admitted(buyer, minute, 100)
        sync(buyer)
        assert buyer.shares.total_balance > 0
        brief = {minute.name: {"window_seconds": "0.01"}}
        other.limiter.set_override("r", "s", brief, limits=minute, ttl_seconds=0.03)
        drop_overridden(buyer)
        admitted(other, minute, 1)
        clock.advance_us(40_000)
        passed = rest(other, minute)
        sync(buyer)
        assert passed + rest(other, minute) <= 1_000
