"""Slots move from master to master while their tenants are checked: nothing is lost, nothing counts twice.

Redis answers ASK while a slot is on its way and a key is not where it was, and TRYAGAIN when of the keys of one call
some are there and some are not, which is also so when one of them does not exist at all.
"""

import time
from dataclasses import replace

import pytest

from limitforge import FixedWindow, Limits
from tests.chaos.record import DAY
from tests.chaos.shards import HOLD_SECONDS, Crowd, TenantAsk, options_of, pair_of, spread_of, wide_of
from tests.chaos.stages import TENANTS, ClusterStage, Stage, cluster, endure
from tests.constellations import ClusterNode

__all__ = ["cluster"]
pytestmark = pytest.mark.slow

PORTION = 2
PAUSE_SECONDS = 0.05


def tenant_wide_of(tenant: str) -> TenantAsk:
    """One bucket and no other key: a subject's checks always ask for its overrides as well."""
    limits = Limits(FixedWindow(name="tenant-wide", limit=10**9, window_seconds=50 * DAY, scope="tenant"))
    return TenantAsk(f"tenant-wide-{tenant}", limits, 10**9, tenant=tenant)


def other_master(stage: ClusterStage) -> ClusterNode:
    return next(node for node in stage.servers.masters() if node is not stage.victim())


def fill(crowd: Crowd, tenant: str, subjects: int) -> None:
    """Subjects of a tenant that have a bucket each."""
    for number in range(subjects):
        crowd.ask_once(replace(wide_of(tenant), subject=f"subject-{number}"))


def test_a_slot_that_moves_there_and_back_loses_nothing_and_admits_nobody_twice(cluster: ClusterStage) -> None:
    def suffer(crowd: Crowd, stage: Stage) -> None:
        fill(crowd, cluster.tenant, 20)
        home, there = cluster.victim(), other_master(cluster)
        for node in (there, home):
            cluster.servers.migrate(cluster.slot, node, PORTION, PAUSE_SECONDS)
            crowd.decided()

    endure(cluster, "closed", suffer)


def test_subjects_that_come_for_the_first_time_while_their_slot_moves_are_counted_once(cluster: ClusterStage) -> None:
    def suffer(crowd: Crowd, stage: Stage) -> None:
        fill(crowd, cluster.tenant, 10)
        cluster.servers.start_migration(cluster.slot, other_master(cluster))
        for number, make in enumerate((tenant_wide_of, wide_of, pair_of)):
            cluster.servers.move_keys(cluster.slot, PORTION)
            crowd.ask_once(replace(make(cluster.tenant), subject=f"new-{number}"))
        while cluster.servers.move_keys(cluster.slot, PORTION):
            pass
        cluster.servers.finish_migration(cluster.slot)
        for new in list(crowd.others):
            crowd.ask_once(new)

    endure(cluster, "closed", suffer)


@pytest.mark.parametrize("moved", ["nothing", "everything"])
def test_a_check_of_one_bucket_is_decided_wherever_that_is_while_its_slot_moves(
    cluster: ClusterStage, moved: str
) -> None:
    """One key is either here or there, so Redis can always say where to ask."""
    tenant, servers = cluster.tenant, cluster.servers
    asks = [tenant_wide_of(tenant)]
    with Crowd(cluster.url, asks, options_of("closed")) as crowd:
        crowd.decided()
        began = time.monotonic()
        servers.start_migration(cluster.slot, other_master(cluster))
        while moved == "everything" and servers.move_keys(cluster.slot, 1):
            crowd.answered(asks, 1, degraded=False)
        crowd.decided()
        while servers.move_keys(cluster.slot, PORTION):
            pass
        servers.finish_migration(cluster.slot)
        crowd.decided()
        crowd.stop()
        crowd.was_counted()
    crowd.was_served_well()
    crowd.was_spared(asks, began)


def test_checks_over_several_slots_stay_exact_while_one_of_them_moves(cluster: ClusterStage) -> None:
    asks = [spread_of(tenant, most) for tenant in TENANTS for most in (10**9, 150)]
    (world,) = spread_of(cluster.tenant).slots - wide_of(cluster.tenant).slots
    servers = cluster.servers
    with Crowd(cluster.url, asks, options_of("closed")) as crowd:
        crowd.decided()
        home = servers.master_of(world)
        for node in (next(node for node in servers.masters() if node is not home), home):
            servers.migrate(world, node, 1, PAUSE_SECONDS)
            crowd.decided()
        crowd.stop()
        time.sleep(HOLD_SECONDS)  # what was confirmed stays, also after all that was only held has lapsed
        crowd.was_counted()
    crowd.was_served_well()
    crowd.got_no_more_than()
