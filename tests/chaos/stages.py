"""A Redis Cluster and a Redis with sentinels behind one face: who is struck, who takes over, and how it is mended."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import pytest

from limitforge.core.check import FailureName
from tests import report
from tests.chaos.shards import Crowd, TenantAsk, options_of, pair_of, tenants_by_third, tight_of, wide_of
from tests.constellations import ClusterNode, ClusterServers, Constellation, Member, SentinelServers, ask, ask_fields

TENANTS = tenants_by_third()
SECOND = 1.0

C = TypeVar("C", ClusterServers, SentinelServers)

_running: dict[type[Constellation], Constellation] = {}
_thirds = itertools.cycle(range(3))


class Stage(Protocol):
    """Servers, with one master that a test strikes."""

    @property
    def url(self) -> str: ...

    @property
    def asks(self) -> list[TenantAsk]: ...

    def struck(self) -> list[TenantAsk]:
        """Those about which the victim decides now."""

    def victim(self) -> Member:
        """The master that a test strikes, whoever it is now."""

    def replicas(self) -> list[Member]:
        """The victim's."""

    def masters(self) -> list[Member]: ...

    def fail_over(self) -> None:
        """By command."""

    def wait_for_successor(self, old: Member) -> Member:
        """Once all agree on it."""

    def heal(self) -> None: ...


class ClusterStage:
    """Three tenants on three masters; each test strikes another, as one that was just elected has to rest."""

    def __init__(self, servers: ClusterServers) -> None:
        self.servers = servers
        self.url = servers.url
        self.tenant = TENANTS[next(_thirds)]
        self.asks = [make(tenant) for tenant in TENANTS for make in (wide_of, tight_of, pair_of)]
        self.heal = servers.heal

    @property
    def slot(self) -> int:
        (slot,) = wide_of(self.tenant).slots
        return slot

    def struck(self) -> list[TenantAsk]:
        victim = self.victim()
        return [one for one in self.asks if any(self.servers.master_of(slot) is victim for slot in one.slots)]

    def victim(self) -> ClusterNode:
        return self.servers.master_of(self.slot)

    def replicas(self) -> list[Member]:
        return [*self.servers.replicas_of(self.victim())]

    def masters(self) -> list[Member]:
        return [*self.servers.masters()]

    def fail_over(self) -> None:
        self.servers.failover(self.victim())

    def wait_for_successor(self, old: Member) -> Member:
        assert isinstance(old, ClusterNode)
        return self.servers.wait_for_new_master(self.slot, old)


class SentinelStage:
    """Two tenants on the one master."""

    def __init__(self, servers: SentinelServers) -> None:
        self.servers = servers
        self.url = servers.url
        self.asks = [make(tenant) for tenant in TENANTS[:2] for make in (wide_of, tight_of, pair_of)]
        self.heal = servers.heal

    def struck(self) -> list[TenantAsk]:
        return self.asks

    def victim(self) -> Member:
        return self.servers.master()

    def replicas(self) -> list[Member]:
        victim = self.victim()
        return [server for server in self.servers.servers if server is not victim and server.reachable]

    def masters(self) -> list[Member]:
        return [self.victim()]

    def fail_over(self) -> None:
        self.servers.failover()

    def wait_for_successor(self, old: Member) -> Member:
        return self.servers.wait_for_new_master(old)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> ClusterStage:
    """In order and empty, whatever the test before did to it."""
    return ClusterStage(_in_order(request, ClusterServers))


@pytest.fixture
def sentinels(request: pytest.FixtureRequest) -> SentinelStage:
    """In order and empty, whatever the test before did to it."""
    return SentinelStage(_in_order(request, SentinelServers))


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

Suffer = Callable[[Crowd, Stage], tuple[float, float] | None]
"""Breaks something and mends it; tells when answers were given whose takes may be lost, or None if never."""


def endure(stage: Stage, failure: FailureName, suffer: Suffer, *, spared: list[TenantAsk] | None = None) -> Crowd:
    """All asks are decided, something breaks, and all are decided again by the same limiters."""
    struck = stage.struck()
    if spared is None:
        spared = [one for one in stage.asks if one not in struck]
    with Crowd(stage.url, stage.asks, options_of(failure)) as crowd:
        crowd.decided()
        began = time.monotonic()
        report.fault(suffer.__name__)
        doubtful = suffer(crowd, stage)
        crowd.decided()
        crowd.stop()

        def lost(one: TenantAsk) -> int:
            return 0 if doubtful is None or one in spared else crowd.admitted(one, *doubtful)

        crowd.was_counted(lost)
    crowd.was_served_well()
    crowd.got_no_more_than(lost)
    crowd.was_spared(spared, began)
    return crowd


def marked(faults: Sequence[Suffer], rare: Sequence[Suffer]) -> list[Any]:
    """As parameters of a test: those that are `rare` are left to `make chaos`."""
    return [
        pytest.param(suffer, id=suffer.__name__, marks=[pytest.mark.chaos] if suffer in rare else [])
        for suffer in faults
    ]


def failed_over(_crowd: Crowd, stage: Stage) -> tuple[float, float] | None:
    """A Cluster loses nothing. Behind sentinels the old master serves on until it is told, and that is lost."""
    began = time.monotonic()
    stage.fail_over()
    return None if isinstance(stage, ClusterStage) else (began - SECOND, time.monotonic())


def killed(crowd: Crowd, stage: Stage) -> tuple[float, float]:
    """What its replica had not heard of is lost: nothing that is older than a second, as it is in touch."""
    victim, struck = stage.victim(), stage.struck()
    at = time.monotonic()
    victim.kill()
    crowd.answered(never_full(struck), 1, degraded=True)
    stage.wait_for_successor(victim)
    crowd.decided(struck)
    stage.heal()
    return at - SECOND, at + SECOND


def frozen_for_a_moment(crowd: Crowd, stage: Stage) -> None:
    """Too short for anybody to take over. What was on its way is done when it wakes up."""
    victim = stage.victim()
    struck = stage.struck()
    victim.pause()
    try:
        crowd.answered(never_full(struck)[:1], 1, degraded=True)
    finally:
        victim.resume()


def frozen_until_replaced(crowd: Crowd, stage: Stage) -> tuple[float, float]:
    victim, struck = stage.victim(), stage.struck()
    at = time.monotonic()
    victim.pause()
    crowd.answered(never_full(struck), 1, degraded=True)
    stage.wait_for_successor(victim)
    crowd.decided(struck)
    victim.resume()  # it still thinks that it is the master
    crowd.decided(struck)
    stage.heal()
    return at - SECOND, at + SECOND


def cut_off_and_killed(crowd: Crowd, stage: Stage) -> tuple[float, float]:
    """For a while its replicas hear nothing of it, then it dies: that while is lost."""
    victim, struck = stage.victim(), stage.struck()
    replicas = stage.replicas()
    at = time.monotonic()
    with cut_off(victim, replicas):
        crowd.decided(struck, 20)
        victim.kill()
        killed_at = time.monotonic()
        stage.wait_for_successor(victim)
    crowd.decided(struck)
    stage.heal()
    return at - SECOND, killed_at + SECOND


def scripts_flushed(crowd: Crowd, stage: Stage) -> None:
    for _ in range(20):
        for master in stage.masters():
            ask(master, "SCRIPT", "FLUSH")
        time.sleep(0.03)
    crowd.decided()


def never_full(asks: list[TenantAsk]) -> list[TenantAsk]:
    """A denial may be repeated from memory while nobody can be asked; these are never denied."""
    return [one for one in asks if not one.can_be_full]


@contextmanager
def cut_off(master: Member, replicas: list[Member]) -> Iterator[None]:
    """No replica can follow its master: it logs in with a password that nobody asked for."""
    for replica in replicas:
        ask(replica, "CONFIG", "SET", "masterauth", "nobody-asked-for-one")
    ask(master, "CLIENT", "KILL", "TYPE", "replica")
    try:
        yield
    finally:
        for replica in replicas:
            ask(replica, "CONFIG", "SET", "masterauth", "")


@contextmanager
def loading(master: Member, filler: str) -> Iterator[None]:
    """It has crashed, and takes its time to read what it had saved."""
    ask(master, "EVAL", "for n = 1, 5000 do redis.call('SET', KEYS[1] .. n, 'x', 'EX', 600) end", 1, filler)
    ask(master, "SAVE")
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


def is_linked(replica: Member) -> bool:
    return ask_fields(replica, "INFO", "replication").get("master_link_status") == "up"
