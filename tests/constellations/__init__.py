"""Servers that belong together: a real Redis Cluster, and a Redis with replicas and sentinels, on 127.0.0.1.

What waits here polls, and fails with `ServerFailed`: what was missing, and the end of every log.
"""

from tests.constellations.cluster import ClusterNode, ClusterServers
from tests.constellations.common import HOST, SLOTS, Constellation, Member, ask, ask_fields, ask_text
from tests.constellations.sentinel import Sentinel, SentinelServers

__all__ = [
    "HOST",
    "SLOTS",
    "ClusterNode",
    "ClusterServers",
    "Constellation",
    "Member",
    "Sentinel",
    "SentinelServers",
    "ask",
    "ask_fields",
    "ask_text",
]
