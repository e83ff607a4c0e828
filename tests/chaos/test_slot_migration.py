"""Slots move from master to master while their tenants are checked: nothing is lost, nothing counts twice.

Redis answers ASK while a slot is on its way and a key is not where it was, and TRYAGAIN when of the keys of one call
some are there and some are not, which is also so when one of them does not exist at all.
"""

import time
from dataclasses import replace

import pytest

from limitforge import FixedWindow, Limits
from tests.chaos.load_record import DAY
from tests.chaos.mixed_load import (
    HOLD_SECONDS,
    MixedLoad,
    TenantWorkload,
    cross_slot_workload,
    options_of,
    two_limit_workload,
    unlimited_workload,
)
from tests.chaos.servers_under_test import TENANTS, ClusterUnderTest, ServersUnderTest, cluster, run_under_fault
from tests.topologies import ClusterServer

__all__ = ["cluster"]
pytestmark = pytest.mark.slow

PORTION = 2
PAUSE_SECONDS = 0.05


def tenant_wide_of(tenant: str) -> TenantWorkload:
    """A workload of one bucket and no other key: checks of a subject also use the key of its overrides."""
    limits = Limits(FixedWindow(name="tenant-wide", limit=10**9, window_seconds=50 * DAY, scope="tenant"))
    return TenantWorkload(f"tenant-wide-{tenant}", limits, 10**9, tenant=tenant)


def other_master(target: ClusterUnderTest) -> ClusterServer:
    return next(node for node in target.servers.masters() if node is not target.victim())


def fill(mixed_load: MixedLoad, tenant: str, subjects: int) -> None:
    """Create buckets of several subjects of a tenant."""
    for number in range(subjects):
        mixed_load.check_once(replace(unlimited_workload(tenant), subject=f"subject-{number}"))


def test_a_slot_that_moves_there_and_back_loses_nothing_and_admits_no_subject_twice(cluster: ClusterUnderTest) -> None:
    def inject(mixed_load: MixedLoad, target: ServersUnderTest) -> None:
        fill(mixed_load, cluster.tenant, 20)
        home, there = cluster.victim(), other_master(cluster)
        for node in (there, home):
            cluster.servers.migrate(cluster.slot, node, PORTION, PAUSE_SECONDS)
            mixed_load.wait_until_decided()

    run_under_fault(cluster, "closed", inject)


def test_new_subjects_are_counted_once_while_their_slot_moves(
    cluster: ClusterUnderTest,
) -> None:
    def inject(mixed_load: MixedLoad, target: ServersUnderTest) -> None:
        fill(mixed_load, cluster.tenant, 10)
        cluster.servers.start_migration(cluster.slot, other_master(cluster))
        for number, make in enumerate((tenant_wide_of, unlimited_workload, two_limit_workload)):
            cluster.servers.move_keys(cluster.slot, PORTION)
            mixed_load.check_once(replace(make(cluster.tenant), subject=f"new-{number}"))
        while cluster.servers.move_keys(cluster.slot, PORTION):
            pass
        cluster.servers.finish_migration(cluster.slot)
        for new in list(mixed_load.extra_workloads):
            mixed_load.check_once(new)

    run_under_fault(cluster, "closed", inject)


@pytest.mark.parametrize("moved", ["nothing", "everything"])
def test_a_check_of_one_bucket_is_decided_while_its_slot_moves(cluster: ClusterUnderTest, moved: str) -> None:
    """One key is on one of the two servers, so Redis can always redirect the call."""
    tenant, servers = cluster.tenant, cluster.servers
    workloads = [tenant_wide_of(tenant)]
    with MixedLoad(cluster.url, workloads, options_of("closed")) as mixed_load:
        mixed_load.wait_until_decided()
        began = time.monotonic()
        servers.start_migration(cluster.slot, other_master(cluster))
        while moved == "everything" and servers.move_keys(cluster.slot, 1):
            mixed_load.wait_for_answers(workloads, 1, degraded=False)
        mixed_load.wait_until_decided()
        while servers.move_keys(cluster.slot, PORTION):
            pass
        servers.finish_migration(cluster.slot)
        mixed_load.wait_until_decided()
        mixed_load.stop()
        mixed_load.assert_counted()
    mixed_load.assert_served_well()
    mixed_load.assert_unaffected(workloads, began)


def test_checks_over_several_slots_stay_exact_while_one_of_them_moves(cluster: ClusterUnderTest) -> None:
    workloads = [cross_slot_workload(tenant, most) for tenant in TENANTS for most in (10**9, 150)]
    (world,) = cross_slot_workload(cluster.tenant).slots - unlimited_workload(cluster.tenant).slots
    servers = cluster.servers
    with MixedLoad(cluster.url, workloads, options_of("closed")) as mixed_load:
        mixed_load.wait_until_decided()
        home = servers.master_of(world)
        for node in (next(node for node in servers.masters() if node is not home), home):
            servers.migrate(world, node, 1, PAUSE_SECONDS)
            mixed_load.wait_until_decided()
        mixed_load.stop()
        time.sleep(HOLD_SECONDS)  # confirmed debits stay after all holds have lapsed
        mixed_load.assert_counted()
    mixed_load.assert_served_well()
    mixed_load.assert_limits_held()
