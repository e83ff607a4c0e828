"""The servers, and everything that is measured on them, one part after the other."""

import asyncio

import uvloop

from bench.scale import hot_key_processes, prepaid, shards
from bench.scale.hot_key_processes import HotKeyResult
from bench.scale.prepaid import PrepaidResult
from bench.scale.run_size import FULL, QUICK, SHARDS
from bench.scale.shards import BenchServers, ShardsResult
from tests.topologies import RedisCluster

Result = ShardsResult | PrepaidResult | HotKeyResult


def run(url: str, *, quick: bool) -> list[Result]:
    pace = QUICK if quick else FULL
    found: list[Result] = []
    # Nobody fails over here: what the nodes tell each other meanwhile should take next to nothing.
    with (
        RedisCluster(SHARDS, 0, 15_000) as cluster,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        site = BenchServers(url, cluster.url, [node.url for node in cluster.masters()])
        found += runner.run(shards.run(site, pace))
        site.close()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found += runner.run(prepaid.run(url, pace))
    found += hot_key_processes.run(url, pace)
    return found
