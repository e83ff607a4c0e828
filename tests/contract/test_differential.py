"""Memory and Redis get the same random traces and must give equal decisions: Lua and Python implement one contract."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from limitforge import Decision, Entry, Limit, LimitforgeError, Limits, ManualClock, Request, SyncLimiter
from limitforge.core.keys import Layer
from limitforge.core.limits import Mode, limit_to_fields
from limitforge.core.overrides import OVERRIDABLE_FIELDS
from tests.contract.conftest import open_limiter
from tests.contract.strategies import (
    ALGORITHMS,
    NAMES,
    PRIORITIES,
    RESOURCES,
    SUBJECTS,
    TENANTS,
    costs,
    limits,
    steps_us,
)
from tests.servers import RedisServer
from tests.state_machines import comparable, run_machine
from tests.topologies import RedisCluster, SentinelGroup

# Two seconds each on an idle machine, and up to 25 times as long on a busy one.
pytestmark = pytest.mark.timeout(180)

MACHINES = 4
EXAMPLES = 24  # of each; and 20,000 in `make soak`
FEWER = 8  # for other connections to the same script; and 2,000 in `make soak`
BASE_US = 1_700_006_400_000_000


class Engines(RuleBasedStateMachine):
    """Two limiters on one manual clock: every operation runs on both, and the results are compared."""

    server: Any  # has a `url` and a method `flush`
    store = "redis"
    lanes: Mapping[str, int] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(BASE_US)
        self.memory = SyncLimiter.connect("memory://", clock=self.clock, lanes=self.lanes)
        self.redis = open_limiter(self.store, self.server.url, self.clock)
        self.leases: list[tuple[str | None, str | None]] = []
        self.reservations: list[tuple[str | None, str | None]] = []
        self.last: Decision | None = None
        self.server.flush()

    def teardown(self) -> None:
        self.redis.close()

    def both(self, act: Callable[[SyncLimiter], Any]) -> tuple[Any, Any]:
        answers = []
        for limiter in (self.memory, self.redis):
            try:
                answers.append(act(limiter))
            except LimitforgeError as error:
                answers.append(error)
        assert comparable(answers[0]) == comparable(answers[1]), answers
        return answers[0], answers[1]

    def remember(self, mine: Any, theirs: Any) -> None:
        if isinstance(mine, Decision):
            if mine.lease_id:
                self.leases.append((mine.lease_id, theirs.lease_id))
            if mine.reservation_id:
                self.reservations.append((mine.reservation_id, theirs.reservation_id))
            self.last = mine

    def ask(self, resource: str, subject: str, plan: Limits | Limit, cost: int) -> None:
        self.remember(*self.both(lambda limiter: limiter.check(resource, subject, limits=plan, cost=cost)))

    @rule(by_us=steps_us())
    def let_time_pass(self, by_us: int) -> None:
        self.clock.advance_us(by_us)

    @precondition(lambda self: self.last is not None)
    @rule(reset=st.booleans(), quarters=st.sampled_from([1, 2, 3, 4, 4, 4, 5]))
    def wait_for_the_last_decision(self, reset: bool, quarters: int) -> None:
        decision = cast("Decision", self.last)
        wait_ms = decision.reset_after_ms if reset else decision.retry_after_ms
        self.clock.advance_us((wait_ms or 0) * 1_000 * quarters // 4)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), cost=costs())
    def settle(self, data: st.DataObject, cost: int) -> None:
        ids = data.draw(st.sampled_from(self.reservations))
        self.both(lambda limiter: limiter.settle(ids[limiter is self.redis] or "", cost))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(self.leases))
        self.both(lambda limiter: limiter.release(ids[limiter is self.redis] or ""))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(self.leases))
        self.both(lambda limiter: limiter.renew(ids[limiter is self.redis] or ""))


class WholePlan(Engines):
    """Four limits of any algorithm and scope, used in every way, while plan, modes and overrides change."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: dict[str, Limit] = {}

    def planned(self, names: list[str]) -> Limits:
        return Limits(*(self.placed(self.plan[name]) for name in names))

    def placed(self, limit: Limit) -> Limit:
        return limit

    @initialize(first=st.tuples(*(limits(name=name) for name in NAMES)))
    def start(self, first: tuple[Limit, ...]) -> None:
        self.plan = {limit.name: limit for limit in first}

    @rule(limit=limits())
    def change_the_plan(self, limit: Limit) -> None:
        self.plan[limit.name] = limit

    @rule(name=st.sampled_from(NAMES), mode=st.sampled_from([Mode.ON, Mode.ON, Mode.ON, Mode.MONITOR, Mode.OFF]))
    def switch_the_mode(self, name: str, mode: Mode) -> None:
        self.plan[name] = dataclasses.replace(self.plan[name], mode=mode)

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
        resource=st.sampled_from(RESOURCES),
        subject=st.sampled_from(SUBJECTS),
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from(PRIORITIES),
        cost=costs(),
        by_name=st.dictionaries(st.sampled_from(NAMES), costs(), max_size=1),
        times=st.integers(1, 12),
    )
    def check(
        self,
        names: list[str],
        resource: str,
        subject: str,
        tenant: str,
        priority: str,
        cost: int,
        by_name: dict[str, int],
        times: int,
    ) -> None:
        plan = self.planned(names)
        live = {limit.name for limit in plan if limit.mode != "off"}
        by_name = {name: cost for name, cost in by_name.items() if name in live}
        for _ in range(times):
            self.remember(
                *self.both(
                    lambda limiter: limiter.check(
                        resource, subject, limits=plan, cost=cost, costs=by_name, tenant=tenant, priority=priority
                    )
                )
            )

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
        candidate=st.lists(limits(), min_size=1, max_size=2, unique_by=lambda limit: limit.name),
        subject=st.sampled_from(SUBJECTS),
        cost=costs(),
    )
    def check_beside_a_shadow_plan(self, names: list[str], candidate: list[Limit], subject: str, cost: int) -> None:
        plan, shadow = self.planned(names), Limits(*map(self.placed, candidate))
        self.remember(
            *self.both(lambda limiter: limiter.check(RESOURCES[0], subject, limits=plan, cost=cost, shadow=shadow))
        )

    @rule(
        entries=st.lists(
            st.tuples(
                st.sampled_from(NAMES),
                st.sampled_from(RESOURCES),
                st.sampled_from(SUBJECTS),
                costs(),
                st.sampled_from(Layer),
            ),
            min_size=1,
            max_size=4,
        ),
        priority=st.sampled_from(PRIORITIES),
    )
    def check_entries(self, entries: list[tuple[str, str, str, int, Layer]], priority: str) -> None:
        asked = [
            Entry(self.placed(self.plan[name]), resource, subject, cost, place)
            for name, resource, subject, cost, place in entries
        ]
        self.remember(*self.both(lambda limiter: limiter.check_entries(asked, priority=priority)))

    @rule(
        checks=st.lists(
            st.tuples(
                st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
                st.sampled_from(SUBJECTS),
                costs(),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def check_a_batch(self, checks: list[tuple[list[str], str, int]]) -> None:
        requests = [
            Request(resource=RESOURCES[0], subject=subject, limits=self.planned(names), cost=cost)
            for names, subject, cost in checks
        ]
        self.both(lambda limiter: limiter.check_many(requests))

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
        subject=st.sampled_from(SUBJECTS),
        cost=costs(),
        ttl_seconds=st.sampled_from([0.001, 1, 30, 86_400]),
        on_lapse=st.sampled_from(["keep", "refund"]),
    )
    def reserve(self, names: list[str], subject: str, cost: int, ttl_seconds: float, on_lapse: str) -> None:
        plan = self.planned(names)
        self.remember(
            *self.both(
                lambda limiter: limiter.reserve(
                    RESOURCES[0], subject, limits=plan, cost=cost, ttl_seconds=ttl_seconds, on_lapse=on_lapse
                )
            )
        )

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True), subject=st.sampled_from(SUBJECTS)
    )
    def reset(self, names: list[str], subject: str) -> None:
        self.both(lambda limiter: limiter.reset(RESOURCES[0], subject, limits=self.planned(names)))

    @rule(
        name=st.sampled_from(NAMES),
        resource=st.sampled_from(RESOURCES),
        subject=st.sampled_from(SUBJECTS),
        change=st.one_of(
            st.sampled_from(
                ["unlimited", "blocked", {"limit": 7}, {"limit": 3_000_000}, {"limit": None}, {"window_seconds": 5}]
            ),
            st.sampled_from([{"refill_rate_per_sec": 3}, {"leak_rate_per_sec": "0.7"}, {"lease_ttl_seconds": 3}]),
        ),
        ttl_seconds=st.sampled_from([0.001, 5, 3_600]),
    )
    def set_an_override(self, name: str, resource: str, subject: str, change: Any, ttl_seconds: float) -> None:
        self.both(
            lambda limiter: limiter.set_override(
                resource, subject, {name: change}, limits=self.planned([name]), ttl_seconds=ttl_seconds
            )
        )

    @rule(data=st.data(), subject=st.sampled_from(SUBJECTS), times=st.integers(1, 12))
    def alternate_two_definitions(self, data: st.DataObject, subject: str, times: int) -> None:
        """Check two limits with one name and scope but another window, calendar or rate, in turn at one moment."""
        one = self.placed(self.plan[data.draw(st.sampled_from(NAMES))])
        two = data.draw(limits(name=one.name, algorithm=one.algorithm, scope=one.scope))
        for _ in range(times):
            for resource, limit in zip(RESOURCES[2:4], (one, two), strict=True):
                self.ask(resource, subject, limit, 1)

    @rule(
        name=st.sampled_from(NAMES),
        resource=st.sampled_from(RESOURCES),
        window=st.sampled_from([0.01, 1, 2, 10, 60, 86_400]),
        costs_of=st.tuples(costs(), costs(), costs()),
        by_us=st.sampled_from([0, 1, 1_000_000]),
    )
    def begin_and_end_an_override_of_the_window(
        self, name: str, resource: str, window: float, costs_of: tuple[int, int, int], by_us: int
    ) -> None:
        plan = self.planned([name])

        def check(cost: int) -> None:
            for asked in RESOURCES[2:4]:
                self.ask(asked, SUBJECTS[0], plan, cost)
            self.clock.advance_us(by_us)

        check(costs_of[0])
        change = {name: {"window_seconds": window}}
        self.both(lambda limiter: limiter.set_override(resource, SUBJECTS[0], change, limits=plan, ttl_seconds=3_600))
        check(costs_of[1])
        self.both(lambda limiter: limiter.delete_override(resource, SUBJECTS[0]))
        check(costs_of[2])

    @rule(resource=st.sampled_from(RESOURCES), subject=st.sampled_from(SUBJECTS))
    def delete_an_override(self, resource: str, subject: str) -> None:
        self.both(lambda limiter: limiter.delete_override(resource, subject))

    @rule(subject=st.sampled_from(SUBJECTS), resource=st.sampled_from(RESOURCES), page=st.integers(1, 3))
    def look_at_the_overrides(self, subject: str, resource: str, page: int) -> None:
        self.both(lambda limiter: limiter.get_override(resource, subject))
        places = [("default", each, subject) for each in RESOURCES]
        self.both(lambda limiter: limiter.missing_overrides(places))
        mine, _ = self.both(lambda limiter: limiter.list_overrides(page=page))
        if mine.cursor:
            self.both(lambda limiter: limiter.list_overrides(page=page, cursor=mine.cursor))

    @rule(dice=st.integers(0, 9))
    def clear_the_overrides(self, dice: int) -> None:
        if dice == 0:
            self.both(lambda limiter: limiter.clear_overrides())


class WholePlanOfOneTenant(WholePlan):
    """The same for limits of one tenant in one slot. A global limit would be in another slot."""

    def placed(self, limit: Limit) -> Limit:
        return dataclasses.replace(limit, scope="tenant") if limit.scope == "global" else limit


_NINTH = st.integers(0, 8)


class OneBucket(Engines):
    """One bucket whose numbers change all the time, with costs close to what remains: tests exact conversions."""

    algorithm = ""

    def __init__(self) -> None:
        super().__init__()
        self.limit: Limit

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.change_the_numbers(data)

    @rule(data=st.data())
    def change_the_numbers(self, data: st.DataObject) -> None:
        severe = data.draw(st.booleans())
        self.limit = data.draw(limits(name="a", scope="subject", algorithm=self.algorithm, severe=severe))

    @rule(data=st.data(), resource=st.sampled_from(["r", "*"]), named=st.integers(0, 2))
    def override_some_of_the_numbers(self, data: st.DataObject, resource: str, named: int) -> None:
        """A number that the override does not name stays that of the limit, also after the limit has changed."""
        other = limit_to_fields(data.draw(limits(name="a", algorithm=self.algorithm, severe=data.draw(st.booleans()))))
        known = [field for field in OVERRIDABLE_FIELDS if field in other]
        change = {field: other[field] for field in known[:named] or known}
        self.both(lambda limiter: limiter.set_override(resource, "s", {"a": change}, limits=self.limit, ttl_seconds=30))

    @rule(resource=st.sampled_from(["r", "*"]))
    def end_the_override(self, resource: str) -> None:
        self.both(lambda limiter: limiter.delete_override(resource, "s"))

    @rule(data=st.data(), times=st.integers(1, 4))
    def alternate_two_definitions(self, data: st.DataObject, times: int) -> None:
        first = self.limit
        for _ in range(times):
            self.check(data, "P0")
            self.change_the_numbers(data)
            self.check(data, "P0")
            self.limit = first

    def cost(self, data: st.DataObject) -> int:
        size = self.limit.size or 1
        left = (self.last.remaining or 0) if self.last else size
        around = [1, 1, size, size // 2, size // 3 + 1, max(size - 1, 0), left, left // 2, left + 1]
        return around[data.draw(_NINTH)]

    @rule(data=st.data(), priority=st.sampled_from(PRIORITIES))
    def check(self, data: st.DataObject, priority: str) -> None:
        cost = self.cost(data)
        self.remember(
            *self.both(lambda limiter: limiter.check("r", "s", limits=self.limit, cost=cost, priority=priority))
        )

    @rule(data=st.data(), on_lapse=st.sampled_from(["keep", "refund"]), ttl_seconds=st.sampled_from([1, 30]))
    def reserve(self, data: st.DataObject, on_lapse: str, ttl_seconds: float) -> None:
        cost = self.cost(data)
        self.remember(
            *self.both(
                lambda limiter: limiter.reserve(
                    "r", "s", limits=self.limit, cost=cost, ttl_seconds=ttl_seconds, on_lapse=on_lapse
                )
            )
        )

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def settle_about_as_much(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(self.reservations))
        cost = self.cost(data)
        self.both(lambda limiter: limiter.settle(ids[limiter is self.redis] or "", cost))


def run(kind: type[Engines], server: Any, examples: int, machine_seed: int | None, **settled: Any) -> None:
    machine: type[Engines] = type(kind.__name__, (kind,), {"server": server, **settled})
    run_machine(machine, examples, machine_seed)


@pytest.mark.parametrize("machine_seed", range(MACHINES))
def test_both_engines_agree_on_random_traces(redis_server: RedisServer, machine_seed: int) -> None:
    run(WholePlan, redis_server, EXAMPLES, machine_seed)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_both_engines_agree_on_a_bucket_whose_numbers_change(redis_server: RedisServer, algorithm: str) -> None:
    run(OneBucket, redis_server, EXAMPLES, 1, algorithm=algorithm)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["redis-async", "coalesced", "resilient"])
def test_every_way_to_redis_agrees_with_memory(redis_server: RedisServer, store: str) -> None:
    run(WholePlan, redis_server, FEWER, 4, store=store)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["sentinel", "sentinel-async"])
def test_a_master_behind_sentinels_agrees_with_memory(sentinel_servers: SentinelGroup, store: str) -> None:
    run(WholePlan, sentinel_servers, FEWER, 5, store=store)


@pytest.mark.slow
def test_a_cluster_agrees_with_memory(cluster_servers: RedisCluster) -> None:
    run(WholePlanOfOneTenant, cluster_servers, FEWER, 6, store="cluster-async")


@pytest.mark.soak
def test_both_engines_agree_on_ever_new_traces(redis_server: RedisServer) -> None:
    run(WholePlan, redis_server, 20_000, None)


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_both_engines_agree_on_ever_new_numbers(redis_server: RedisServer, algorithm: str) -> None:
    run(OneBucket, redis_server, 5_000, None, algorithm=algorithm)


@pytest.mark.soak
@pytest.mark.parametrize("store", ["redis-async", "coalesced", "resilient", "sentinel", "sentinel-async"])
def test_every_way_to_redis_agrees_on_ever_new_traces(request: pytest.FixtureRequest, store: str) -> None:
    kind = "sentinel_servers" if store.startswith("sentinel") else "redis_server"
    run(WholePlan, request.getfixturevalue(kind), 2_000, None, store=store)


@pytest.mark.soak
def test_a_cluster_agrees_on_ever_new_traces(cluster_servers: RedisCluster) -> None:
    run(WholePlanOfOneTenant, cluster_servers, 2_000, None, store="cluster-async")
