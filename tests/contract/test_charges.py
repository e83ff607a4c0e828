"""Charges: taken without asking for room, equal in both engines, and made once after an outage."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from limitforge import (
    Decision,
    FixedWindow,
    Limit,
    Limiter,
    Limits,
    Quota,
    SlidingWindow,
    StoreOptions,
    SyncLimiter,
)
from limitforge.core.check import Check, FailureName, build_charge, build_check
from limitforge.core.keys import Keys
from tests.contract.conftest import BlockingLimiter
from tests.contract.strategies import ALGORITHMS, PRIORITIES, RESOURCES, SUBJECTS, costs, limits
from tests.contract.test_differential import Engines
from tests.servers import RedisServer
from tests.state_machines import run_machine

CHARGEABLE = [algorithm for algorithm in ALGORITHMS if algorithm != "concurrency"]
NAMES = ("a", "b")
PATIENCE_SECONDS = 60.0


def charge(plan: Limits, resource: str, subject: str, cost: int, keys: Keys | None = None) -> Check:
    taken = build_check(keys or Keys(), plan, resource, subject, cost, None, "default", "P0")
    return build_charge(taken.debits)


class Charged(Engines):
    """Two limits of one algorithm, checked, reserved and charged, while their numbers change."""

    algorithm = ""

    def __init__(self) -> None:
        super().__init__()
        self.plan: dict[str, Limit] = {}

    def limits(self, names: list[str]) -> Limits:
        return Limits(*(self.plan[name] for name in names))

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        for name in NAMES:
            self.change_the_numbers(data, name)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def change_the_numbers(self, data: st.DataObject, name: str) -> None:
        severe = data.draw(st.booleans())
        self.plan[name] = data.draw(limits(name=name, algorithm=self.algorithm, severe=severe))

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        resource=st.sampled_from(RESOURCES),
        subject=st.sampled_from(SUBJECTS),
        cost=costs(),
        times=st.integers(1, 3),
    )
    def charge(self, names: list[str], resource: str, subject: str, cost: int, times: int) -> None:
        for _ in range(times):
            plan = self.limits(names)
            mine, _theirs = self.both(lambda limiter: limiter._store.check(charge(plan, resource, subject, cost)))  # noqa: B023
            assert mine.allowed

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        resource=st.sampled_from(RESOURCES),
        subject=st.sampled_from(SUBJECTS),
        cost=costs(),
        priority=st.sampled_from(PRIORITIES),
    )
    def check(self, names: list[str], resource: str, subject: str, cost: int, priority: str) -> None:
        plan = self.limits(names)
        self.remember(
            *self.both(lambda limiter: limiter.check(resource, subject, limits=plan, cost=cost, priority=priority))
        )

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        subject=st.sampled_from(SUBJECTS),
        cost=costs(),
        on_lapse=st.sampled_from(["keep", "refund"]),
    )
    def reserve(self, names: list[str], subject: str, cost: int, on_lapse: str) -> None:
        plan = self.limits(names)
        self.remember(
            *self.both(
                lambda limiter: limiter.reserve(RESOURCES[0], subject, limits=plan, cost=cost, on_lapse=on_lapse)
            )
        )

    @rule(
        name=st.sampled_from(NAMES),
        resource=st.sampled_from(RESOURCES),
        subject=st.sampled_from(SUBJECTS),
        change=st.sampled_from(["unlimited", "blocked", {"limit": 7}, {"window_seconds": 5}, {"limit": 1}]),
        ttl_seconds=st.sampled_from([5, 3_600]),
    )
    def set_an_override(self, name: str, resource: str, subject: str, change: Any, ttl_seconds: float) -> None:
        plan = self.limits([name])
        self.both(
            lambda limiter: limiter.set_override(
                resource, subject, {name: change}, limits=plan, ttl_seconds=ttl_seconds
            )
        )


def run(server: RedisServer, algorithm: str, examples: int, machine_seed: int | None) -> None:
    machine: type[Charged] = type("Charged", (Charged,), {"server": server, "algorithm": algorithm})
    run_machine(machine, examples, machine_seed, steps=30)


@pytest.mark.parametrize("algorithm", CHARGEABLE)
def test_both_engines_charge_alike(redis_server: RedisServer, algorithm: str) -> None:
    run(redis_server, algorithm, 15, 1)


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", CHARGEABLE)
def test_both_engines_charge_alike_on_ever_new_traces(redis_server: RedisServer, algorithm: str) -> None:
    run(redis_server, algorithm, 5_000, None)


TEN = FixedWindow(name="ten", limit=10, window_seconds=86_400, align="first_hit", charge_after_outage=True)


def submit(limiter: SyncLimiter, plan: Limits, cost: int) -> Decision:
    """Submit a charge to the store of any limiter of this suite."""
    if isinstance(limiter, SyncLimiter):
        return limiter._store.check(charge(plan, "r", "s", cost, limiter._store.keys))
    blocking = cast("Any", limiter)
    store = blocking._limiter._store
    decision: Decision = blocking._loop.run_until_complete(store.check(charge(plan, "r", "s", cost, store.keys)))
    return decision


def used(limiter: SyncLimiter, limit: FixedWindow, subject: str = "s") -> int:
    """Return the cost that is used, also beyond the limit."""
    return 1_000 - (limiter.check("r", subject, limits=replace(limit, limit=1_000), cost=0).remaining or 0)


def test_a_charge_asks_for_no_room_and_stops_at_twice_the_limit(limiter: SyncLimiter) -> None:
    for counted in (8, 16, 20, 20):
        assert submit(limiter, Limits(TEN), 8).allowed
        assert used(limiter, TEN) == counted
    assert not limiter.check("r", "s", limits=TEN).allowed


def test_a_charge_of_nothing_changes_nothing(limiter: SyncLimiter) -> None:
    limiter.check("r", "s", limits=TEN, cost=3)
    assert submit(limiter, Limits(TEN), 0).remaining == 7


def test_a_charge_knows_the_overrides_of_its_caller(limiter: SyncLimiter) -> None:
    limiter.set_override("r", "s", {"ten": {"limit": 2}}, limits=TEN, ttl_seconds=60)
    submit(limiter, Limits(TEN), 9)
    limiter.delete_override("r", "s")
    assert used(limiter, TEN) == 4


# -- after an outage

LOG = SlidingWindow(name="log", limit=100, window_seconds=86_400, charge_after_outage=True)
MONTH = Quota(name="month", limit=100, period="month", charge_after_outage=True)
FREE = FixedWindow(name="free", limit=100, window_seconds=86_400, align="first_hit")
PLAN = Limits(LOG, MONTH, FREE)


class Outage:
    """A sync or async limiter whose Redis stops, and later returns with all its data."""

    def __init__(self, shell: str, server: RedisServer, failure: FailureName) -> None:
        options = StoreOptions(failure=failure, deadline_ms=2_000, breaker_seconds=0.05, denial_cache_ms=0)
        self._server = server
        self.limiter = (
            SyncLimiter.connect(server.url, options=options)
            if shell == "sync"
            else cast("SyncLimiter", BlockingLimiter(Limiter.connect(server.url, options=options)))
        )

    def check(self, subject: str = "s", **how: Any) -> Decision:
        return self.limiter.check("r", subject, limits=PLAN, **how)

    def begin(self) -> None:
        """Stop Redis. The call that gets lost is a peek."""
        self._server.command_ok("SAVE")
        self._server.kill()
        assert self.check(cost=0).degraded

    def end(self) -> None:
        self._server.restart()
        eventually(lambda: self.check(cost=0).degraded is None)

    def counted(self, subject: str = "s") -> dict[str, int]:
        states = self.check(subject, cost=0).limits
        return {name: (state.limit or 0) - (state.remaining or 0) for name, state in states.items()}


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(params=["async", "sync"])
def outage(request: pytest.FixtureRequest, own_redis_server: RedisServer, failure: FailureName) -> Iterator[Outage]:
    outage = Outage(request.param, own_redis_server, failure)
    yield outage
    outage.limiter.close()


@pytest.mark.parametrize("failure", ["open", "local"])
def test_what_was_admitted_during_an_outage_is_charged_once(outage: Outage) -> None:
    assert outage.check(cost=5).degraded is None
    expected = {"log": 5, "month": 5, "free": 5}
    for _ in range(2):
        outage.begin()
        for cost in (1, 2, 3, 4):
            assert outage.check(cost=cost).allowed
        assert outage.check("another", cost=7).allowed
        outage.end()
        expected = {"log": expected["log"] + 10, "month": expected["month"] + 10, "free": 5}
        eventually(lambda: outage.counted() == expected)  # noqa: B023 - asked at once
    assert outage.counted("another") == {"log": 14, "month": 14, "free": 0}
    for _ in range(20):
        outage.check("other")
    assert outage.counted() == expected


@pytest.mark.parametrize("failure", ["open"])
def test_an_outage_never_charges_more_than_twice_the_limit(outage: Outage) -> None:
    outage.begin()
    for _ in range(5):
        assert outage.check(cost=90).allowed
    outage.end()
    eventually(lambda: not outage.check().allowed)
    roomy = Limits(replace(LOG, limit=1_000), replace(MONTH, limit=1_000))
    look = outage.limiter.check("r", "s", limits=roomy, cost=0)
    assert {name: state.remaining for name, state in look.limits.items()} == {"log": 800, "month": 800}


@pytest.mark.parametrize("failure", ["closed"])
def test_an_outage_that_admits_nothing_charges_nothing(outage: Outage) -> None:
    outage.begin()
    for _ in range(5):
        assert not outage.check(cost=9).allowed
    outage.end()
    outage.check("other")
    assert outage.counted() == {"log": 0, "month": 0, "free": 0}


@pytest.mark.parametrize("failure", ["open"])
def test_what_a_full_redis_could_not_count_is_charged_when_there_is_room(
    outage: Outage, own_redis_server: RedisServer
) -> None:
    assert outage.check(cost=5).degraded is None
    own_redis_server.command_ok("CONFIG SET maxmemory 1")
    for _ in range(3):
        assert outage.check(cost=2).degraded == "local"  # a full store decides locally
    own_redis_server.command_ok("CONFIG SET maxmemory 0")
    eventually(lambda: outage.counted() == {"log": 11, "month": 11, "free": 5})
