"""A master behind sentinels fails under load: no caller hangs or raises, and limiters find its successor."""

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


@pytest.mark.parametrize("inject", fault_parameters(FAULTS, LONG))
def test_limiters_recover_from_a_fault_of_the_master(sentinels: SentinelUnderTest, inject: InjectFault) -> None:
    run_under_fault(sentinels, KINDS[(FAULTS.index(inject) + 1) % len(KINDS)], inject)


def test_callers_do_not_notice_that_the_master_loses_the_script(sentinels: SentinelUnderTest) -> None:
    run_under_fault(sentinels, "open", scripts_flushed, unaffected=sentinels.workloads)


def test_a_master_that_was_demoted_behind_the_back_of_its_sentinels_is_a_passing_fault(
    sentinels: SentinelUnderTest,
) -> None:
    def inject(mixed_load: MixedLoad, target: ServersUnderTest) -> None:
        victim = target.victim()
        query(victim, "REPLICAOF", HOST, 1)  # of no server: it keeps its data
        mixed_load.wait_for_answers(unlimited_only(target.workloads), 1, degraded=True)
        query(victim, "REPLICAOF", "NO", "ONE")

    run_under_fault(sentinels, "closed", inject)


def test_a_frozen_sentinel_does_not_prevent_the_discovery_of_the_next_master(sentinels: SentinelUnderTest) -> None:
    def inject(mixed_load: MixedLoad, target: ServersUnderTest) -> tuple[float, float]:
        victim = target.victim()
        sentinels.servers.sentinels[0].pause()
        at = time.monotonic()
        victim.kill()
        target.wait_for_successor(victim)
        mixed_load.wait_until_decided()
        target.heal()
        return at - 1, at + 1

    run_under_fault(sentinels, "local", inject)


def test_a_limiter_that_starts_while_the_first_sentinel_of_its_url_is_frozen_asks_the_others(
    sentinels: SentinelUnderTest,
) -> None:
    first = sentinels.servers.sentinels[0]
    first.pause()
    try:
        with MixedLoad(sentinels.url, sentinels.workloads, options_of("closed")) as mixed_load:
            mixed_load.wait_until_decided()
            mixed_load.stop()
            mixed_load.assert_counted()
    finally:
        first.resume()
    mixed_load.assert_served_well()
