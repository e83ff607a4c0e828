"""Masters of a Cluster fail under load: no caller hangs or gets an exception, and tenants of other shards never notice.

Limiters recover by themselves.
"""

import threading
import time

import pytest

from tests.chaos.mixed_load import KINDS, MixedLoad, options_of
from tests.chaos.servers_under_test import (
    ClusterUnderTest,
    InjectFault,
    ServersUnderTest,
    cluster,
    failed_over,
    fault_parameters,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed,
    killed_without_replicas,
    loading,
    run_under_fault,
    scripts_flushed,
    unlimited_only,
)
from tests.chaos.waiting import eventually
from tests.topologies import HOST, query_text

__all__ = ["cluster"]
pytestmark = pytest.mark.slow

FAULTS: tuple[InjectFault, ...] = (
    failed_over,
    killed,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed_without_replicas,
)
LONG: tuple[InjectFault, ...] = (frozen_until_replaced,)


@pytest.mark.parametrize("inject", fault_parameters(FAULTS, LONG))
def test_a_fault_of_one_master_affects_only_its_own_tenants_and_recovers(
    cluster: ClusterUnderTest, inject: InjectFault
) -> None:
    run_under_fault(cluster, KINDS[FAULTS.index(inject) % len(KINDS)], inject)


def test_callers_do_not_notice_that_all_masters_lose_the_script(cluster: ClusterUnderTest) -> None:
    run_under_fault(cluster, "closed", scripts_flushed, unaffected=cluster.workloads)


def test_a_master_that_is_loading_is_waited_for_by_its_own_tenants_only(cluster: ClusterUnderTest) -> None:
    def inject(mixed_load: MixedLoad, target: ServersUnderTest) -> tuple[float, float]:
        affected = target.affected_workloads()
        began = time.monotonic()
        with loading(target.victim(), f"{{{cluster.tenant}}}filler"):
            mixed_load.wait_for_answers(unlimited_only(affected), 1, degraded=True)
        return began - 1, time.monotonic()

    run_under_fault(cluster, "local", inject)


def test_a_limiter_that_starts_while_the_first_server_of_its_url_is_frozen_finds_the_others(
    cluster: ClusterUnderTest,
) -> None:
    seed = cluster.servers.servers[0]
    workloads = [
        workload
        for workload in cluster.workloads
        if all(cluster.servers.master_of(slot) is not seed for slot in workload.slots)
    ]
    seed.pause()
    try:
        with MixedLoad(cluster.url, workloads, options_of("closed")) as mixed_load:
            mixed_load.wait_until_decided()
            mixed_load.stop()
            mixed_load.assert_counted()
    finally:
        seed.resume()
    mixed_load.assert_served_well()


def test_limiters_that_are_closed_right_after_a_failover_leave_no_connection_behind(cluster: ClusterUnderTest) -> None:
    old = f"{HOST}:{cluster.victim().port}"
    with MixedLoad(f"{cluster.url}?client_name=leaver", cluster.workloads, options_of("closed")) as mixed_load:
        mixed_load.wait_until_decided()
        failing_over = threading.Thread(target=cluster.fail_over)
        failing_over.start()
        for load in mixed_load.loads.values():
            eventually(lambda load=load: old not in load.limiter.status().servers)  # type: ignore[misc]
        mixed_load.stop()
    failing_over.join()
    eventually(lambda: not any("name=leaver" in query_text(node, "CLIENT", "LIST") for node in cluster.servers.servers))
    mixed_load.assert_served_well()
