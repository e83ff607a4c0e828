"""Groups of real Redis servers on 127.0.0.1: a Cluster, and a master with replicas and sentinels.

What waits here polls, and fails with `ServerFailed`: what was missing, and the end of every log.
"""

from tests.topologies.cluster import ClusterServer, RedisCluster
from tests.topologies.common import HOST, SLOT_COUNT, GroupServer, ServerGroup, query, query_fields, query_text
from tests.topologies.sentinel import Sentinel, SentinelGroup

__all__ = [
    "HOST",
    "SLOT_COUNT",
    "ClusterServer",
    "GroupServer",
    "RedisCluster",
    "Sentinel",
    "SentinelGroup",
    "ServerGroup",
    "query",
    "query_fields",
    "query_text",
]
