"""A Redis Cluster and a Redis with sentinels behind one face: who is struck, who takes over, and how it is mended."""

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
    """Servers, with one master that a test strikes."""

    @property
    def url(self) -> str: ...

    @property
    def workloads(self) -> list[TenantWorkload]: ...

    def affected_workloads(self) -> list[TenantWorkload]:
        """Those about which the victim decides now."""

    def victim(self) -> GroupServer:
        """The master that a test strikes, whoever it is now."""

    def replicas(self) -> list[GroupServer]:
        """The victim's."""

    def masters(self) -> list[GroupServer]: ...

    def fail_over(self) -> None:
        """By command."""

    def wait_for_successor(self, old: GroupServer) -> GroupServer:
        """Once all agree on it."""

    def heal(self) -> None: ...


class ClusterUnderTest:
    """Three tenants on three masters; each test strikes another, as one that was just elected has to rest."""

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
        return [one for one in self.workloads if any(self.servers.master_of(slot) is victim for slot in one.slots)]

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
    """Two tenants on the one master."""

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
    """In order and empty, whatever the test before did to it."""
    return ClusterUnderTest(_in_order(request, RedisCluster))


@pytest.fixture
def sentinels(request: pytest.FixtureRequest) -> SentinelUnderTest:
    """In order and empty, whatever the test before did to it."""
    return SentinelUnderTest(_in_order(request, SentinelGroup))


def _in_order(request: pytest.FixtureRequest, kind: type[C]) -> C:
    """Started once in each process, whichever module is first: that takes seconds."""
    servers = _running.get(kind)
    if servers is None:
        servers = _running[kind] = kind().start()
        request.session.addfinalizer(servers.stop)
    assert isinstance(servers, kind)
    servers.heal()
    servers.flush()
    return servers


# -- what a test does to them

InjectFault = Callable[[MixedLoad, ServersUnderTest], tuple[float, float] | None]
"""Breaks something and mends it; tells when answers were given whose takes may be lost, or None if never."""


def run_under_fault(
    stage: ServersUnderTest,
    failure: FailureName,
    inject: InjectFault,
    *,
    unaffected: list[TenantWorkload] | None = None,
) -> MixedLoad:
    """All asks are decided, something breaks, and all are decided again by the same limiters."""
    struck = stage.affected_workloads()
    if unaffected is None:
        unaffected = [one for one in stage.workloads if one not in struck]
    with MixedLoad(stage.url, stage.workloads, options_of(failure)) as crowd:
        crowd.wait_until_decided()
        began = time.monotonic()
        run_report.record_fault(inject.__name__)
        doubtful = inject(crowd, stage)
        crowd.wait_until_decided()
        crowd.stop()

        def lost(one: TenantWorkload) -> int:
            return 0 if doubtful is None or one in unaffected else crowd.admitted(one, *doubtful)

        crowd.assert_counted(lost)
    crowd.assert_served_well()
    crowd.assert_limits_held(lost)
    crowd.assert_unaffected(unaffected, began)
    return crowd


def fault_parameters(faults: Sequence[InjectFault], rare: Sequence[InjectFault]) -> list[Any]:
    """As parameters of a test: those that are `rare` are left to `make chaos`."""
    return [
        pytest.param(suffer, id=suffer.__name__, marks=[pytest.mark.chaos] if suffer in rare else [])
        for suffer in faults
    ]


def failed_over(_crowd: MixedLoad, stage: ServersUnderTest) -> tuple[float, float] | None:
    """A Cluster loses nothing. Behind sentinels the old master serves on until it is told, and that is lost."""
    began = time.monotonic()
    stage.fail_over()
    return None if isinstance(stage, ClusterUnderTest) else (began - ONE_SECOND, time.monotonic())


def killed(crowd: MixedLoad, stage: ServersUnderTest) -> tuple[float, float]:
    """What its replica had not heard of is lost: nothing that is older than a second, as it is in touch."""
    victim, struck = stage.victim(), stage.affected_workloads()
    at = time.monotonic()
    victim.kill()
    crowd.wait_for_answers(unlimited_only(struck), 1, degraded=True)
    stage.wait_for_successor(victim)
    crowd.wait_until_decided(struck)
    stage.heal()
    return at - ONE_SECOND, at + ONE_SECOND


def frozen_for_a_moment(crowd: MixedLoad, stage: ServersUnderTest) -> None:
    """Too short for anybody to take over. What was on its way is done when it wakes up."""
    victim = stage.victim()
    struck = stage.affected_workloads()
    victim.pause()
    try:
        crowd.wait_for_answers(unlimited_only(struck)[:1], 1, degraded=True)
    finally:
        victim.resume()


def frozen_until_replaced(crowd: MixedLoad, stage: ServersUnderTest) -> tuple[float, float]:
    victim, struck = stage.victim(), stage.affected_workloads()
    at = time.monotonic()
    victim.pause()
    crowd.wait_for_answers(unlimited_only(struck), 1, degraded=True)
    stage.wait_for_successor(victim)
    crowd.wait_until_decided(struck)
    victim.resume()  # it still thinks that it is the master
    crowd.wait_until_decided(struck)
    stage.heal()
    return at - ONE_SECOND, at + ONE_SECOND


def killed_without_replicas(crowd: MixedLoad, stage: ServersUnderTest) -> tuple[float, float]:
    """For a while its replicas hear nothing of it, then it dies: that while is lost."""
    victim, struck = stage.victim(), stage.affected_workloads()
    replicas = stage.replicas()
    at = time.monotonic()
    with without_replication(victim, replicas):
        crowd.wait_until_decided(struck, 20)
        victim.kill()
        killed_at = time.monotonic()
        stage.wait_for_successor(victim)
    crowd.wait_until_decided(struck)
    stage.heal()
    return at - ONE_SECOND, killed_at + ONE_SECOND


def scripts_flushed(crowd: MixedLoad, stage: ServersUnderTest) -> None:
    for _ in range(20):
        for master in stage.masters():
            query(master, "SCRIPT", "FLUSH")
        time.sleep(0.03)
    crowd.wait_until_decided()


def unlimited_only(asks: list[TenantWorkload]) -> list[TenantWorkload]:
    """A denial may be repeated from memory while nobody can be asked; these are never denied."""
    return [one for one in asks if not one.is_finite]


@contextmanager
def without_replication(master: GroupServer, replicas: list[GroupServer]) -> Iterator[None]:
    """No replica can follow its master: it logs in with a password that nobody asked for."""
    for replica in replicas:
        query(replica, "CONFIG", "SET", "masterauth", "nobody-asked-for-one")
    query(master, "CLIENT", "KILL", "TYPE", "replica")
    try:
        yield
    finally:
        for replica in replicas:
            query(replica, "CONFIG", "SET", "masterauth", "")


@contextmanager
def loading(master: GroupServer, filler: str) -> Iterator[None]:
    """It has crashed, and takes its time to read what it had saved."""
    query(master, "EVAL", "for n = 1, 5000 do redis.call('SET', KEYS[1] .. n, 'x', 'EX', 600) end", 1, filler)
    query(master, "SAVE")
    master.kill()
    slowly = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
    back = threading.Thread(target=master.restart, args=slowly)
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
