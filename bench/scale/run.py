"""The servers, and everything that is measured on them, one part after the other."""

import asyncio

import uvloop

from bench.scale import crowd, leases, shards
from bench.scale.crowd import CrowdResult
from bench.scale.leases import LeasesResult
from bench.scale.pace import FULL, QUICK, SHARDS
from bench.scale.shards import ShardsResult, Site
from tests.constellations import ClusterServers

Result = ShardsResult | LeasesResult | CrowdResult


def run(url: str, *, quick: bool) -> list[Result]:
    pace = QUICK if quick else FULL
    found: list[Result] = []
    # Nobody fails over here: what the nodes tell each other meanwhile should take next to nothing.
    with (
        ClusterServers(SHARDS, 0, 15_000) as cluster,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        site = Site(url, cluster.url, [node.url for node in cluster.masters()])
        found += runner.run(shards.run(site, pace))
        site.close()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found += runner.run(leases.run(url, pace))
    found += crowd.run(url, pace)
    return found
