"""A master behind sentinels fails under load: nobody hangs, nothing raises, its successor is found by itself."""

import time

import pytest

from tests.chaos.mixed_load import KINDS, MixedLoad, options_of
from tests.chaos.servers_under_test import (
    InjectFault,
    SentinelUnderTest,
    ServersUnderTest,
    failed_over,
    fault_parameters,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed,
    killed_without_replicas,
    run_under_fault,
    scripts_flushed,
    sentinels,
    unlimited_only,
)
from tests.topologies import HOST, query

__all__ = ["sentinels"]
pytestmark = pytest.mark.slow

FAULTS: tuple[InjectFault, ...] = (
    failed_over,
    killed,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed_without_replicas,
)
LONG: tuple[InjectFault, ...] = (
    killed,
    killed_without_replicas,
)


@pytest.mark.parametrize("suffer", fault_parameters(FAULTS, LONG))
def test_a_fault_of_the_master_mends_itself(sentinels: SentinelUnderTest, suffer: InjectFault) -> None:
    run_under_fault(sentinels, KINDS[(FAULTS.index(suffer) + 1) % len(KINDS)], suffer)


def test_nobody_notices_that_the_master_forgets_the_script(sentinels: SentinelUnderTest) -> None:
    run_under_fault(sentinels, "open", scripts_flushed, unaffected=sentinels.workloads)


def test_a_master_that_was_demoted_behind_the_back_of_its_sentinels_is_a_passing_fault(
    sentinels: SentinelUnderTest,
) -> None:
    def suffer(crowd: MixedLoad, stage: ServersUnderTest) -> None:
        victim = stage.victim()
        query(victim, "REPLICAOF", HOST, 1)  # of nobody: its data stays
        crowd.wait_for_answers(unlimited_only(stage.workloads), 1, degraded=True)
        query(victim, "REPLICAOF", "NO", "ONE")

    run_under_fault(sentinels, "closed", suffer)


def test_a_frozen_sentinel_keeps_nobody_from_the_next_master(sentinels: SentinelUnderTest) -> None:
    def suffer(crowd: MixedLoad, stage: ServersUnderTest) -> tuple[float, float]:
        victim = stage.victim()
        sentinels.servers.sentinels[0].pause()
        at = time.monotonic()
        victim.kill()
        stage.wait_for_successor(victim)
        crowd.wait_until_decided()
        stage.heal()
        return at - 1, at + 1

    run_under_fault(sentinels, "local", suffer)


def test_a_limiter_that_starts_while_the_first_sentinel_of_its_url_is_frozen_asks_the_others(
    sentinels: SentinelUnderTest,
) -> None:
    first = sentinels.servers.sentinels[0]
    first.pause()
    try:
        with MixedLoad(sentinels.url, sentinels.workloads, options_of("closed")) as crowd:
            crowd.wait_until_decided()
            crowd.stop()
            crowd.assert_counted()
    finally:
        first.resume()
    crowd.assert_served_well()
