"""A Redis Cluster and a Redis with sentinels behind one interface: their victims, successors and repair."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import pytest

from limitforge.core.check import FailureName
from tests import run_report
from tests.chaos.mixed_load import (
    MixedLoad,
    TenantWorkload,
    limited_workload,
    options_of,
    tenants_by_third,
    two_limit_workload,
    unlimited_workload,
)
from tests.topologies import (
    ClusterServer,
    GroupServer,
    RedisCluster,
    SentinelGroup,
    ServerGroup,
    query,
    query_fields,
)

TENANTS = tenants_by_third()
ONE_SECOND = 1.0

C = TypeVar("C", RedisCluster, SentinelGroup)

_running: dict[type[ServerGroup], ServerGroup] = {}
_thirds = itertools.cycle(range(3))


class ServersUnderTest(Protocol):
    """Servers with one master that a test makes fail: the victim."""

    @property
    def url(self) -> str: ...

    @property
    def workloads(self) -> list[TenantWorkload]: ...

    def affected_workloads(self) -> list[TenantWorkload]:
        """The workloads whose buckets are on the victim now."""

    def victim(self) -> GroupServer:
        """The current master of the tested tenant."""

    def replicas(self) -> list[GroupServer]:
        """The replicas of the victim."""

    def masters(self) -> list[GroupServer]: ...

    def fail_over(self) -> None:
        """Let a replica take over by command."""

    def wait_for_successor(self, old: GroupServer) -> GroupServer:
        """Return the new master once all servers agree on it."""

    def heal(self) -> None: ...


class ClusterUnderTest:
    """Three tenants on three masters. Tests take turns with the victim: a new master can't be replaced at once."""

    def __init__(self, servers: RedisCluster) -> None:
        self.servers = servers
        self.url = servers.url
        self.tenant = TENANTS[next(_thirds)]
        self.workloads = [
            make(tenant) for tenant in TENANTS for make in (unlimited_workload, limited_workload, two_limit_workload)
        ]
        self.heal = servers.heal

    @property
    def slot(self) -> int:
        (slot,) = unlimited_workload(self.tenant).slots
        return slot

    def affected_workloads(self) -> list[TenantWorkload]:
        victim = self.victim()
        return [load for load in self.workloads if any(self.servers.master_of(slot) is victim for slot in load.slots)]

    def victim(self) -> ClusterServer:
        return self.servers.master_of(self.slot)

    def replicas(self) -> list[GroupServer]:
        return [*self.servers.replicas_of(self.victim())]

    def masters(self) -> list[GroupServer]:
        return [*self.servers.masters()]

    def fail_over(self) -> None:
        self.servers.failover(self.victim())

    def wait_for_successor(self, old: GroupServer) -> GroupServer:
        assert isinstance(old, ClusterServer)
        return self.servers.wait_for_new_master(self.slot, old)


class SentinelUnderTest:
    """Two tenants on one master."""

    def __init__(self, servers: SentinelGroup) -> None:
        self.servers = servers
        self.url = servers.url
        self.workloads = [
            make(tenant)
            for tenant in TENANTS[:2]
            for make in (unlimited_workload, limited_workload, two_limit_workload)
        ]
        self.heal = servers.heal

    def affected_workloads(self) -> list[TenantWorkload]:
        return self.workloads

    def victim(self) -> GroupServer:
        return self.servers.master()

    def replicas(self) -> list[GroupServer]:
        victim = self.victim()
        return [server for server in self.servers.servers if server is not victim and server.is_reachable]

    def masters(self) -> list[GroupServer]:
        return [self.victim()]

    def fail_over(self) -> None:
        self.servers.failover()

    def wait_for_successor(self, old: GroupServer) -> GroupServer:
        return self.servers.wait_for_new_master(old)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> ClusterUnderTest:
    """Healthy and empty."""
    return ClusterUnderTest(_in_order(request, RedisCluster))


@pytest.fixture
def sentinels(request: pytest.FixtureRequest) -> SentinelUnderTest:
    """Healthy and empty."""
    return SentinelUnderTest(_in_order(request, SentinelGroup))


def _in_order(request: pytest.FixtureRequest, kind: type[C]) -> C:
    """Return servers that are started once in each process, because a start takes seconds."""
    servers = _running.get(kind)
    if servers is None:
        servers = _running[kind] = kind().start()
        request.session.addfinalizer(servers.stop)
    assert isinstance(servers, kind)
    servers.heal()
    servers.flush()
    return servers


# -- faults

InjectFault = Callable[[MixedLoad, ServersUnderTest], tuple[float, float] | None]
"""Injects a fault and repairs it. Returns the time span whose admissions may be lost, None if none may."""


def run_under_fault(
    target: ServersUnderTest,
    failure: FailureName,
    inject: InjectFault,
    *,
    unaffected: list[TenantWorkload] | None = None,
) -> MixedLoad:
    """Inject a fault under load, and assert that the same limiters recover and keep their guarantees."""
    affected = target.affected_workloads()
    if unaffected is None:
        unaffected = [workload for workload in target.workloads if workload not in affected]
    with MixedLoad(target.url, target.workloads, options_of(failure)) as mixed_load:
        mixed_load.wait_until_decided()
        began = time.monotonic()
        run_report.record_fault(inject.__name__)
        doubtful = inject(mixed_load, target)
        mixed_load.wait_until_decided()
        mixed_load.stop()

        def lost(workload: TenantWorkload) -> int:
            if doubtful is None or workload in unaffected:
                return 0
            return mixed_load.admitted(workload, *doubtful)

        mixed_load.assert_counted(lost)
    mixed_load.assert_served_well()
    mixed_load.assert_limits_held(lost)
    mixed_load.assert_unaffected(unaffected, began)
    return mixed_load


def fault_parameters(faults: Sequence[InjectFault], rare: Sequence[InjectFault]) -> list[Any]:
    """Return faults as test parameters. The `rare` ones run in `make chaos` only."""
    return [
        pytest.param(inject, id=inject.__name__, marks=[pytest.mark.chaos] if inject in rare else [])
        for inject in faults
    ]


def failed_over(_crowd: MixedLoad, target: ServersUnderTest) -> tuple[float, float] | None:
    """A Cluster loses nothing. Behind sentinels, the old master serves until it learns that it was replaced."""
    began = time.monotonic()
    target.fail_over()
    return None if isinstance(target, ClusterUnderTest) else (began - ONE_SECOND, time.monotonic())


def killed(mixed_load: MixedLoad, target: ServersUnderTest) -> tuple[float, float]:
    """Writes that the replica did not receive are lost: none is older than a second."""
    victim, affected = target.victim(), target.affected_workloads()
    at = time.monotonic()
    victim.kill()
    mixed_load.wait_for_answers(unlimited_only(affected), 1, degraded=True)
    target.wait_for_successor(victim)
    mixed_load.wait_until_decided(affected)
    target.heal()
    return at - ONE_SECOND, at + ONE_SECOND


def frozen_for_a_moment(mixed_load: MixedLoad, target: ServersUnderTest) -> None:
    """Too short for a failover. The server executes pending calls when it resumes."""
    victim = target.victim()
    affected = target.affected_workloads()
    victim.pause()
    try:
        mixed_load.wait_for_answers(unlimited_only(affected)[:1], 1, degraded=True)
    finally:
        victim.resume()


def frozen_until_replaced(mixed_load: MixedLoad, target: ServersUnderTest) -> tuple[float, float]:
    victim, affected = target.victim(), target.affected_workloads()
    at = time.monotonic()
    victim.pause()
    mixed_load.wait_for_answers(unlimited_only(affected), 1, degraded=True)
    target.wait_for_successor(victim)
    mixed_load.wait_until_decided(affected)
    victim.resume()  # it still believes that it is the master
    mixed_load.wait_until_decided(affected)
    target.heal()
    return at - ONE_SECOND, at + ONE_SECOND


def killed_without_replicas(mixed_load: MixedLoad, target: ServersUnderTest) -> tuple[float, float]:
    """The replicas are disconnected for a while before the master dies, and all writes of that while are lost."""
    victim, affected = target.victim(), target.affected_workloads()
    replicas = target.replicas()
    at = time.monotonic()
    with without_replication(victim, replicas):
        mixed_load.wait_until_decided(affected, 20)
        victim.kill()
        killed_at = time.monotonic()
        target.wait_for_successor(victim)
    mixed_load.wait_until_decided(affected)
    target.heal()
    return at - ONE_SECOND, killed_at + ONE_SECOND


def scripts_flushed(mixed_load: MixedLoad, target: ServersUnderTest) -> None:
    for _ in range(20):
        for master in target.masters():
            query(master, "SCRIPT", "FLUSH")
        time.sleep(0.03)
    mixed_load.wait_until_decided()


def unlimited_only(workloads: list[TenantWorkload]) -> list[TenantWorkload]:
    """Return workloads that are never denied: a cached denial would not show that the store is unavailable."""
    return [workload for workload in workloads if not workload.is_finite]


@contextmanager
def without_replication(master: GroupServer, replicas: list[GroupServer]) -> Iterator[None]:
    """Disconnect the replicas: they log in to their master with a wrong password."""
    for replica in replicas:
        query(replica, "CONFIG", "SET", "masterauth", "a-wrong-password")
    query(master, "CLIENT", "KILL", "TYPE", "replica")
    try:
        yield
    finally:
        for replica in replicas:
            query(replica, "CONFIG", "SET", "masterauth", "")


@contextmanager
def loading(master: GroupServer, filler: str) -> Iterator[None]:
    """The master has crashed, and loads its data slowly."""
    query(master, "EVAL", "for n = 1, 5000 do redis.call('SET', KEYS[1] .. n, 'x', 'EX', 600) end", 1, filler)
    query(master, "SAVE")
    master.kill()
    slow_loading = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
    back = threading.Thread(target=master.restart, args=slow_loading)
    back.start()
    try:
        yield
    finally:
        while back.is_alive():
            with suppress(OSError):
                master.command("CONFIG SET key-load-delay 0")
            back.join(0.05)


def is_linked(replica: GroupServer) -> bool:
    return query_fields(replica, "INFO", "replication").get("master_link_status") == "up"
