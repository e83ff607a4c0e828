"""Start the servers and run all scale benchmarks."""

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
    run_size = QUICK if quick else FULL
    found: list[Result] = []
    # There is no failover here, so a long node time-out keeps the gossip between the servers small.
    with (
        RedisCluster(SHARDS, 0, 15_000) as cluster,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        site = BenchServers(url, cluster.url, [node.url for node in cluster.masters()])
        found += runner.run(shards.run(site, run_size))
        site.close()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found += runner.run(prepaid.run(url, run_size))
    found += hot_key_processes.run(url, run_size)
    return found
