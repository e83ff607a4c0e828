"""What a failover may lose: takes that were answered, and that the next master has never heard of.

Replication is asynchronous. These tests measure what that costs, and only hold it to a generous bound: what was
answered since a second before the replicas last heard of their master.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests import report as report_run
from tests.chaos.losses import RawCounter, report
from tests.chaos.shards import Crowd, options_of, wide_of
from tests.chaos.stages import TENANTS, ClusterStage, SentinelStage, Stage, cluster, cut_off, sentinels
from tests.constellations import Member, ask

__all__ = ["cluster", "sentinels"]
pytestmark = pytest.mark.slow

SECOND = 1.0
ALONE_SECONDS = 2.5  # how long a master is cut off from its replicas before it dies
MAX_LAG_SECONDS = 1
PAUSE_SECONDS = 0.001  # between two checks of a caller
PRESSURE = 4  # times as many callers as elsewhere
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Loss:
    """`unsure` takes were never answered: some of them may be among those that the next master has."""

    acknowledged: int
    found: int
    unsure: int
    acknowledged_in_the_last_second: int
    acknowledged_while_alone: int

    @property
    def lost(self) -> int:
        return max(0, self.acknowledged - self.found)

    def told(self, name: str) -> "Loss":
        report(name, lost=self.lost, **dataclasses.asdict(self))
        return self


@contextmanager
def careful(servers: list[Member]) -> Iterator[None]:
    """A server only writes while a replica was heard of in the last second."""
    for server in servers:
        ask(server, "CONFIG", "SET", "min-replicas-max-lag", MAX_LAG_SECONDS)
        ask(server, "CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        yield
    finally:
        for server in servers:
            if server.reachable:
                ask(server, "CONFIG", "SET", "min-replicas-to-write", 0)


def loss_of(stage: Stage, *, alone: bool, wait_replicas: int = 0) -> Loss:
    """Takes under load until the master is killed, perhaps after a while without its replicas; then nothing more."""
    tenant = stage.tenant if isinstance(stage, ClusterStage) else TENANTS[0]
    one = wide_of(tenant)
    victim, replicas = stage.victim(), stage.replicas()
    options = dataclasses.replace(options_of("closed"), wait_replicas=wait_replicas)
    with Crowd(stage.url, [one] * PRESSURE, options, pause=PAUSE_SECONDS) as crowd:
        crowd.decided(count=500)
        in_touch = time.monotonic()
        with cut_off(victim, replicas) if alone else nullcontext():
            if alone:
                time.sleep(ALONE_SECONDS)
            else:
                in_touch = time.monotonic()
            report_run.fault("killed")
            victim.kill()
            crowd.stop()
            stage.wait_for_successor(victim)
        if wait_replicas:
            stage.heal()  # a master that has lost its only replica tells nothing
        found = crowd.counted(one)["wide"]
    crowd.was_served_well()
    return Loss(
        acknowledged=crowd.admitted(one),
        found=found,
        unsure=crowd.unsure(one),
        acknowledged_in_the_last_second=crowd.admitted(one, since=in_touch - SECOND, until=in_touch),
        acknowledged_while_alone=crowd.admitted(one, since=in_touch),
    )


@pytest.mark.parametrize("servers", [pytest.param("cluster", marks=pytest.mark.chaos), "sentinels"])
def test_a_master_that_dies_takes_little_with_it(request: pytest.FixtureRequest, servers: str) -> None:
    loss = loss_of(request.getfixturevalue(servers), alone=False).told(f"killed, {servers}")
    assert loss.lost <= loss.acknowledged_in_the_last_second + loss.acknowledged_while_alone


@pytest.mark.chaos
@pytest.mark.parametrize("servers", ["cluster", "sentinels"])
def test_a_master_that_dies_alone_takes_all_with_it_that_its_replicas_did_not_hear_of(
    request: pytest.FixtureRequest, servers: str
) -> None:
    loss = loss_of(request.getfixturevalue(servers), alone=True).told(f"cut off and killed, {servers}")
    assert loss.lost <= loss.acknowledged_in_the_last_second + loss.acknowledged_while_alone


def test_a_master_that_writes_only_beside_a_replica_takes_less_with_it(sentinels: SentinelStage) -> None:
    """`min-replicas-to-write 1`: once no replica is heard of, it refuses, and the failure behaviour decides."""
    with careful([sentinels.victim()]):
        loss = loss_of(sentinels, alone=True).told("cut off and killed with min-replicas-to-write, sentinels")
    assert loss.unsure > 0
    assert loss.lost <= loss.acknowledged_in_the_last_second + loss.acknowledged_while_alone


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("servers", [pytest.param("cluster", marks=pytest.mark.chaos), "sentinels"])
def test_a_limiter_that_waits_for_a_replica_loses_nothing(
    request: pytest.FixtureRequest, servers: str, alone: bool
) -> None:
    loss = loss_of(request.getfixturevalue(servers), alone=alone, wait_replicas=1)
    loss.told(f"{'cut off and ' if alone else ''}killed with wait_replicas, {servers}")
    assert loss.lost == 0


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_what_a_replica_has_confirmed_is_not_lost(sentinels: SentinelStage, alone: bool) -> None:
    """What WAIT gives by itself, on one bare connection."""
    victim, replicas = sentinels.victim(), sentinels.replicas()
    counter = RawCounter(victim.port, "counted", replicas=1, wait_ms=100)
    counter.start()
    time.sleep(SECOND)
    with cut_off(victim, replicas) if alone else nullcontext():
        if alone:
            time.sleep(SECOND)
        victim.kill()
        counter.join()
        successor = sentinels.wait_for_successor(victim)
    found = ask(successor, "GET", "counted")
    assert isinstance(found, bytes)
    name = "cut off and killed with WAIT 1, raw" if alone else "killed with WAIT 1, raw"
    report(name, answered=counter.answered, confirmed=counter.confirmed, found=int(found))
    assert 0 < counter.confirmed <= int(found)


@pytest.mark.chaos
def test_masters_that_die_one_after_the_other_take_little_with_them(sentinels: SentinelStage) -> None:
    for _ in range(ROUNDS):
        loss = loss_of(sentinels, alone=False).told("killed again and again, sentinels")
        assert loss.lost <= loss.acknowledged_in_the_last_second + loss.acknowledged_while_alone
        sentinels.heal()
        sentinels.servers.flush()
