"""What every test may ask for: a real Redis, and a Hypothesis profile."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.constellations import ClusterServers, SentinelServers
from tests.servers import RedisServer

# LIMITFORGE_TEST_PROFILE chooses. Only `soak` draws new examples each time: a red CI is never a matter of luck.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", _patient, max_examples=20, derandomize=True)
settings.register_profile("ci", _patient, max_examples=200, derandomize=True)
settings.register_profile("soak", _patient, max_examples=20_000, print_blob=True)
settings.load_profile(os.environ.get("LIMITFORGE_TEST_PROFILE", "ci"))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """This worker's Redis, shared by its tests: leave it running."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of this worker's Redis, emptied."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
def own_redis_server() -> Iterator[RedisServer]:
    """A Redis for one test, which may kill, pause and restart it."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def cluster_servers() -> Iterator[ClusterServers]:
    """This worker's Redis Cluster, shared by its tests: leave it as it is."""
    with ClusterServers() as servers:
        yield servers


@pytest.fixture(scope="session")
def sentinel_servers() -> Iterator[SentinelServers]:
    """This worker's Redis with replicas and sentinels, shared by its tests: leave them as they are."""
    with SentinelServers() as servers:
        yield servers
