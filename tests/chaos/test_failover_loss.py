"""What a failover may lose: takes that were answered, and that the next master has never heard of.

Replication is asynchronous. These tests measure what that costs, and only hold it to a generous bound: what was
answered since a second before the replicas last heard of their master.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests import run_report as report_run
from tests.chaos.failover_loss import RawCounter, record_numbers
from tests.chaos.mixed_load import MixedLoad, options_of, unlimited_workload
from tests.chaos.servers_under_test import (
    TENANTS,
    ClusterUnderTest,
    SentinelUnderTest,
    ServersUnderTest,
    cluster,
    sentinels,
    without_replication,
)
from tests.topologies import GroupServer, query

__all__ = ["cluster", "sentinels"]
pytestmark = pytest.mark.slow

SECOND = 1.0
ALONE_SECONDS = 2.5  # how long a master is disconnected from its replicas before it dies
MAX_LAG_SECONDS = 1
PAUSE_SECONDS = 0.001  # between two checks of a caller
PRESSURE = 4  # times as many callers as elsewhere
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class FailoverLoss:
    """What a failover lost. `unsure` debits got no answer: the next master may have some of them."""

    acknowledged: int
    found: int
    unsure: int
    acknowledged_in_the_last_second: int
    acknowledged_while_alone: int

    @property
    def lost(self) -> int:
        return max(0, self.acknowledged - self.found)

    def record(self, name: str) -> "FailoverLoss":
        record_numbers(name, lost=self.lost, **dataclasses.asdict(self))
        return self


@contextmanager
def require_replica(servers: list[GroupServer]) -> Iterator[None]:
    """Let servers refuse writes unless a replica acknowledged one in the last second."""
    for server in servers:
        query(server, "CONFIG", "SET", "min-replicas-max-lag", MAX_LAG_SECONDS)
        query(server, "CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        yield
    finally:
        for server in servers:
            if server.is_reachable:
                query(server, "CONFIG", "SET", "min-replicas-to-write", 0)


def measure_loss(target: ServersUnderTest, *, alone: bool, wait_replicas: int = 0) -> FailoverLoss:
    """Kill a master under load, perhaps after a while without its replicas, and compare what its successor has."""
    tenant = target.tenant if isinstance(target, ClusterUnderTest) else TENANTS[0]
    one = unlimited_workload(tenant)
    victim, replicas = target.victim(), target.replicas()
    options = dataclasses.replace(options_of("closed"), wait_replicas=wait_replicas)
    with MixedLoad(target.url, [one] * PRESSURE, options, pause=PAUSE_SECONDS) as mixed_load:
        mixed_load.wait_until_decided(count=500)
        in_touch = time.monotonic()
        with without_replication(victim, replicas) if alone else nullcontext():
            if alone:
                time.sleep(ALONE_SECONDS)
            else:
                in_touch = time.monotonic()
            report_run.record_fault("killed")
            victim.kill()
            mixed_load.stop()
            target.wait_for_successor(victim)
        if wait_replicas:
            target.heal()  # a master that has lost its only replica refuses to answer
        found = mixed_load.count_in_store(one)["wide"]
    mixed_load.assert_served_well()
    return FailoverLoss(
        acknowledged=mixed_load.admitted(one),
        found=found,
        unsure=mixed_load.degraded_count(one),
        acknowledged_in_the_last_second=mixed_load.admitted(one, since=in_touch - SECOND, until=in_touch),
        acknowledged_while_alone=mixed_load.admitted(one, since=in_touch),
    )


@pytest.mark.parametrize("servers", [pytest.param("cluster", marks=pytest.mark.chaos), "sentinels"])
def test_a_master_that_dies_loses_little(request: pytest.FixtureRequest, servers: str) -> None:
    loss = measure_loss(request.getfixturevalue(servers), alone=False).record(f"killed, {servers}")
    assert loss.lost <= loss.acknowledged_in_the_last_second + loss.acknowledged_while_alone


@pytest.mark.chaos
@pytest.mark.parametrize("servers", ["cluster", "sentinels"])
def test_a_master_that_dies_alone_loses_all_that_its_replicas_did_not_receive(
    request: pytest.FixtureRequest, servers: str
) -> None:
    loss = measure_loss(request.getfixturevalue(servers), alone=True).record(f"cut off and killed, {servers}")
    assert loss.lost <= loss.acknowledged_in_the_last_second + loss.acknowledged_while_alone


def test_a_master_that_requires_a_replica_loses_less(sentinels: SentinelUnderTest) -> None:
    """`min-replicas-to-write 1`: without a replica it refuses writes, and the failure behaviour decides."""
    with require_replica([sentinels.victim()]):
        loss = measure_loss(sentinels, alone=True).record("cut off and killed with min-replicas-to-write, sentinels")
    assert loss.unsure > 0
    assert loss.lost <= loss.acknowledged_in_the_last_second + loss.acknowledged_while_alone


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("servers", [pytest.param("cluster", marks=pytest.mark.chaos), "sentinels"])
def test_a_limiter_that_waits_for_a_replica_loses_nothing(
    request: pytest.FixtureRequest, servers: str, alone: bool
) -> None:
    loss = measure_loss(request.getfixturevalue(servers), alone=alone, wait_replicas=1)
    loss.record(f"{'cut off and ' if alone else ''}killed with wait_replicas, {servers}")
    assert loss.lost == 0


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_what_a_replica_has_confirmed_is_not_lost(sentinels: SentinelUnderTest, alone: bool) -> None:
    """What WAIT guarantees by itself, on one raw connection."""
    victim, replicas = sentinels.victim(), sentinels.replicas()
    counter = RawCounter(victim.port, "counted", replicas=1, wait_ms=100)
    counter.start()
    time.sleep(SECOND)
    with without_replication(victim, replicas) if alone else nullcontext():
        if alone:
            time.sleep(SECOND)
        victim.kill()
        counter.join()
        successor = sentinels.wait_for_successor(victim)
    found = query(successor, "GET", "counted")
    assert isinstance(found, bytes)
    name = "cut off and killed with WAIT 1, raw" if alone else "killed with WAIT 1, raw"
    record_numbers(name, answered=counter.answered, confirmed=counter.confirmed, found=int(found))
    assert 0 < counter.confirmed <= int(found)


@pytest.mark.chaos
def test_masters_that_die_one_after_the_other_lose_little(sentinels: SentinelUnderTest) -> None:
    for _ in range(ROUNDS):
        loss = measure_loss(sentinels, alone=False).record("killed again and again, sentinels")
        assert loss.lost <= loss.acknowledged_in_the_last_second + loss.acknowledged_while_alone
        sentinels.heal()
        sentinels.servers.flush()
