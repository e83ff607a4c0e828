"""Half a minute of faults in any order, on a Cluster and behind sentinels, with every kind of check."""

import random
import time

import pytest

from tests import report
from tests.chaos.shards import HOLD_SECONDS, Crowd, TenantAsk, lanes_of_default, options_of, spread_of
from tests.chaos.stages import (
    TENANTS,
    ClusterStage,
    SentinelStage,
    Stage,
    Suffer,
    cluster,
    cut_off_and_killed,
    failed_over,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed,
    scripts_flushed,
    sentinels,
)

__all__ = ["cluster", "sentinels"]
pytestmark = [pytest.mark.slow, pytest.mark.chaos]

SECONDS = 30.0
FAULTS: tuple[Suffer, ...] = (
    failed_over,
    killed,
    frozen_for_a_moment,
    frozen_until_replaced,
    cut_off_and_killed,
    scripts_flushed,
)


def migrated(crowd: Crowd, stage: Stage) -> None:
    """To another master, and it stays there."""
    assert isinstance(stage, ClusterStage)
    others = [node for node in stage.servers.masters() if node is not stage.victim()]
    stage.servers.migrate(stage.slot, random.choice(others), 2, 0.05)


def endure_all(stage: Stage, faults: tuple[Suffer, ...]) -> None:
    """What may be lost adds up over the faults."""
    lost: dict[TenantAsk, int] = dict.fromkeys(stage.asks, 0)
    with Crowd(stage.url, stage.asks, options_of("local")) as crowd:
        crowd.decided()
        began, draw = time.monotonic(), report.draw()
        random.seed(draw.random())  # for what the faults draw
        while time.monotonic() - began < SECONDS:
            if isinstance(stage, ClusterStage):
                stage.tenant = draw.choice(TENANTS)
            suffer = draw.choice(faults)
            report.fault(suffer.__name__)
            print(f"{time.monotonic() - began:.1f} s: {suffer.__name__}")  # noqa: T201 - for whoever looks into a failure
            doubtful = suffer(crowd, stage)
            crowd.decided()
            for one in lost if doubtful is not None else ():
                lost[one] += crowd.admitted(one, *(doubtful or ()))
        crowd.stop()
        time.sleep(HOLD_SECONDS)
        crowd.was_counted(lost.__getitem__)
    crowd.was_served_well()
    crowd.got_no_more_than(lost.__getitem__)


def test_a_cluster_may_fail_for_half_a_minute(cluster: ClusterStage) -> None:
    cluster.asks += [*(spread_of(tenant, most) for tenant in TENANTS for most in (10**9, 500)), lanes_of_default()]
    endure_all(cluster, (*FAULTS, migrated))


def test_servers_behind_sentinels_may_fail_for_half_a_minute(sentinels: SentinelStage) -> None:
    endure_all(sentinels, FAULTS)
