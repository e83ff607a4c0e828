"""A master behind sentinels fails under load: nobody hangs, nothing raises, its successor is found by itself."""

import time

import pytest

from tests.chaos.shards import KINDS, Crowd, options_of
from tests.chaos.stages import (
    SentinelStage,
    Stage,
    Suffer,
    cut_off_and_killed,
    endure,
    failed_over,
    frozen_for_a_moment,
    frozen_until_replaced,
    killed,
    marked,
    never_full,
    scripts_flushed,
    sentinels,
)
from tests.constellations import HOST, ask

__all__ = ["sentinels"]
pytestmark = pytest.mark.slow

FAULTS: tuple[Suffer, ...] = (
    failed_over,
    killed,
    frozen_for_a_moment,
    frozen_until_replaced,
    cut_off_and_killed,
)
LONG: tuple[Suffer, ...] = (
    killed,
    cut_off_and_killed,
)


@pytest.mark.parametrize("suffer", marked(FAULTS, LONG))
def test_a_fault_of_the_master_mends_itself(sentinels: SentinelStage, suffer: Suffer) -> None:
    endure(sentinels, KINDS[(FAULTS.index(suffer) + 1) % len(KINDS)], suffer)


def test_nobody_notices_that_the_master_forgets_the_script(sentinels: SentinelStage) -> None:
    endure(sentinels, "open", scripts_flushed, spared=sentinels.asks)


def test_a_master_that_was_demoted_behind_the_back_of_its_sentinels_is_a_passing_fault(
    sentinels: SentinelStage,
) -> None:
    def suffer(crowd: Crowd, stage: Stage) -> None:
        victim = stage.victim()
        ask(victim, "REPLICAOF", HOST, 1)  # of nobody: its data stays
        crowd.answered(never_full(stage.asks), 1, degraded=True)
        ask(victim, "REPLICAOF", "NO", "ONE")

    endure(sentinels, "closed", suffer)


def test_a_frozen_sentinel_keeps_nobody_from_the_next_master(sentinels: SentinelStage) -> None:
    def suffer(crowd: Crowd, stage: Stage) -> tuple[float, float]:
        victim = stage.victim()
        sentinels.servers.sentinels[0].pause()
        at = time.monotonic()
        victim.kill()
        stage.wait_for_successor(victim)
        crowd.decided()
        stage.heal()
        return at - 1, at + 1

    endure(sentinels, "local", suffer)


def test_a_limiter_that_starts_while_the_first_sentinel_of_its_url_is_frozen_asks_the_others(
    sentinels: SentinelStage,
) -> None:
    first = sentinels.servers.sentinels[0]
    first.pause()
    try:
        with Crowd(sentinels.url, sentinels.asks, options_of("closed")) as crowd:
            crowd.decided()
            crowd.stop()
            crowd.was_counted()
    finally:
        first.resume()
    crowd.was_served_well()
