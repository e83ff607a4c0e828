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


def migrated(mixed_load: MixedLoad, target: ServersUnderTest) -> None:
    """A slot moves to another master, and stays there."""
    assert isinstance(target, ClusterUnderTest)
    others = [node for node in target.servers.masters() if node is not target.victim()]
    target.servers.migrate(target.slot, random.choice(others), 2, 0.05)


def run_under_faults(target: ServersUnderTest, faults: tuple[InjectFault, ...]) -> None:
    """Inject one fault after the other. The losses that each allows add up."""
    lost: dict[TenantWorkload, int] = dict.fromkeys(target.workloads, 0)
    with MixedLoad(target.url, target.workloads, options_of("local")) as mixed_load:
        mixed_load.wait_until_decided()
        began, draw = time.monotonic(), run_report.seeded_random()
        random.seed(draw.random())  # the faults use it
        while time.monotonic() - began < SECONDS:
            if isinstance(target, ClusterUnderTest):
                target.tenant = draw.choice(TENANTS)
            inject = draw.choice(faults)
            run_report.record_fault(inject.__name__)
            print(f"{time.monotonic() - began:.1f} s: {inject.__name__}")  # noqa: T201 - for debugging a failure
            doubtful = inject(mixed_load, target)
            mixed_load.wait_until_decided()
            for one in lost if doubtful is not None else ():
                lost[one] += mixed_load.admitted(one, *(doubtful or ()))
        mixed_load.stop()
        time.sleep(HOLD_SECONDS)
        mixed_load.assert_counted(lost.__getitem__)
    mixed_load.assert_served_well()
    mixed_load.assert_limits_held(lost.__getitem__)


def test_a_cluster_may_fail_for_half_a_minute(cluster: ClusterUnderTest) -> None:
    cluster.workloads += [
        *(cross_slot_workload(tenant, most) for tenant in TENANTS for most in (10**9, 500)),
        lanes_workload(),
    ]
    run_under_faults(cluster, (*FAULTS, migrated))


def test_servers_behind_sentinels_may_fail_for_half_a_minute(sentinels: SentinelUnderTest) -> None:
    run_under_faults(sentinels, FAULTS)
