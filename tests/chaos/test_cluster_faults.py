"""Masters of a Cluster fail under load: nobody hangs, nothing raises, tenants of other shards never notice, and all
mends itself.
"""

import threading
import time

import pytest

from tests.chaos.shards import KINDS, Crowd, options_of
from tests.chaos.stages import (
    ClusterStage,
    Stage,
    Suffer,
    cluster,
    cut_off_and_killed,
    endure,
    failed_over,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed,
    loading,
    marked,
    never_full,
    scripts_flushed,
)
from tests.chaos.waiting import eventually
from tests.constellations import HOST, ask_text

__all__ = ["cluster"]
pytestmark = pytest.mark.slow

FAULTS: tuple[Suffer, ...] = (
    failed_over,
    killed,
    frozen_for_a_moment,
    frozen_until_replaced,
    cut_off_and_killed,
)
LONG: tuple[Suffer, ...] = (frozen_until_replaced,)


@pytest.mark.parametrize("suffer", marked(FAULTS, LONG))
def test_a_fault_of_one_master_is_felt_by_its_own_tenants_only_and_mends_itself(
    cluster: ClusterStage, suffer: Suffer
) -> None:
    endure(cluster, KINDS[FAULTS.index(suffer) % len(KINDS)], suffer)


def test_nobody_notices_that_all_masters_forget_the_script(cluster: ClusterStage) -> None:
    endure(cluster, "closed", scripts_flushed, spared=cluster.asks)


def test_a_master_that_is_loading_is_waited_for_by_its_own_tenants_only(cluster: ClusterStage) -> None:
    def suffer(crowd: Crowd, stage: Stage) -> tuple[float, float]:
        struck = stage.struck()
        began = time.monotonic()
        with loading(stage.victim(), f"{{{cluster.tenant}}}filler"):
            crowd.answered(never_full(struck), 1, degraded=True)
        return began - 1, time.monotonic()

    endure(cluster, "local", suffer)


def test_a_limiter_that_starts_while_the_first_server_of_its_url_is_frozen_finds_the_others(
    cluster: ClusterStage,
) -> None:
    seed = cluster.servers.nodes[0]
    asks = [ask for ask in cluster.asks if all(cluster.servers.master_of(slot) is not seed for slot in ask.slots)]
    seed.pause()
    try:
        with Crowd(cluster.url, asks, options_of("closed")) as crowd:
            crowd.decided()
            crowd.stop()
            crowd.was_counted()
    finally:
        seed.resume()
    crowd.was_served_well()


def test_limiters_that_are_closed_right_after_a_failover_leave_no_connection_behind(cluster: ClusterStage) -> None:
    old = f"{HOST}:{cluster.victim().port}"
    with Crowd(f"{cluster.url}?client_name=whoever", cluster.asks, options_of("closed")) as crowd:
        crowd.decided()
        failing_over = threading.Thread(target=cluster.fail_over)
        failing_over.start()
        for load in crowd.loads.values():
            eventually(lambda load=load: old not in load.limiter.status().nodes)  # type: ignore[misc]
        crowd.stop()
    failing_over.join()
    eventually(lambda: not any("name=whoever" in ask_text(node, "CLIENT", "LIST") for node in cluster.servers.nodes))
    crowd.was_served_well()
