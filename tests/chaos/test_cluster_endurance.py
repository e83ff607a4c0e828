"""Half a minute of faults in any order, on a Cluster and behind sentinels, with every kind of check."""

import random
import time

import pytest

from tests import run_report
from tests.chaos.mixed_load import (
    HOLD_SECONDS,
    MixedLoad,
    TenantWorkload,
    cross_slot_workload,
    lanes_workload,
    options_of,
)
from tests.chaos.servers_under_test import (
    TENANTS,
    ClusterUnderTest,
    InjectFault,
    SentinelUnderTest,
    ServersUnderTest,
    cluster,
    failed_over,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed,
    killed_without_replicas,
    scripts_flushed,
    sentinels,
)

__all__ = ["cluster", "sentinels"]
pytestmark = [pytest.mark.slow, pytest.mark.chaos]

SECONDS = 30.0
FAULTS: tuple[InjectFault, ...] = (
    failed_over,
    killed,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed_without_replicas,
    scripts_flushed,
)


def migrated(crowd: MixedLoad, stage: ServersUnderTest) -> None:
    """To another master, and it stays there."""
    assert isinstance(stage, ClusterUnderTest)
    others = [node for node in stage.servers.masters() if node is not stage.victim()]
    stage.servers.migrate(stage.slot, random.choice(others), 2, 0.05)


def run_under_faults(stage: ServersUnderTest, faults: tuple[InjectFault, ...]) -> None:
    """What may be lost adds up over the faults."""
    lost: dict[TenantWorkload, int] = dict.fromkeys(stage.workloads, 0)
    with MixedLoad(stage.url, stage.workloads, options_of("local")) as crowd:
        crowd.wait_until_decided()
        began, draw = time.monotonic(), run_report.seeded_random()
        random.seed(draw.random())  # for what the faults draw
        while time.monotonic() - began < SECONDS:
            if isinstance(stage, ClusterUnderTest):
                stage.tenant = draw.choice(TENANTS)
            suffer = draw.choice(faults)
            run_report.record_fault(suffer.__name__)
            print(f"{time.monotonic() - began:.1f} s: {suffer.__name__}")  # noqa: T201 - for whoever looks into a failure
            doubtful = suffer(crowd, stage)
            crowd.wait_until_decided()
            for one in lost if doubtful is not None else ():
                lost[one] += crowd.admitted(one, *(doubtful or ()))
        crowd.stop()
        time.sleep(HOLD_SECONDS)
        crowd.assert_counted(lost.__getitem__)
    crowd.assert_served_well()
    crowd.assert_limits_held(lost.__getitem__)


def test_a_cluster_may_fail_for_half_a_minute(cluster: ClusterUnderTest) -> None:
    cluster.workloads += [
        *(cross_slot_workload(tenant, most) for tenant in TENANTS for most in (10**9, 500)),
        lanes_workload(),
    ]
    run_under_faults(cluster, (*FAULTS, migrated))


def test_servers_behind_sentinels_may_fail_for_half_a_minute(sentinels: SentinelUnderTest) -> None:
    run_under_faults(sentinels, FAULTS)
