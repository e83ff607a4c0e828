"""What every test may ask for: a real Redis, a real PostgreSQL, and a Hypothesis profile."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings

from tests.constellations import ClusterServers, SentinelServers
from tests.postgres import PostgresServer, postgres_data
from tests.servers import RedisServer

# LIMITFORGE_TEST_PROFILE chooses. Only `soak` draws new examples each time: a red CI is never a matter of luck.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", _patient, max_examples=20, derandomize=True)
settings.register_profile("ci", _patient, max_examples=200, derandomize=True)
settings.register_profile("soak", _patient, max_examples=20_000, print_blob=True)
settings.load_profile(os.environ.get("LIMITFORGE_TEST_PROFILE", "ci"))


def pytest_configure() -> None:
    """What ends a run with SIGTERM, as `timeout` and CI do, leaves no more behind than Ctrl-C: no server, no folder."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def empty_postgres() -> Iterator[Path]:
    """The data folder that this worker's PostgreSQL servers begin with a copy of."""
    with postgres_data() as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres_server(empty_postgres: Path) -> Iterator[PostgresServer]:
    """This worker's PostgreSQL, shared by its tests: leave it running."""
    with PostgresServer(data=empty_postgres) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database for one test, on this worker's PostgreSQL."""
    name = f"test_{uuid4().hex}"
    yield postgres_server.database(name)
    if postgres_server.running:  # what interrupts a run may have reached the server first
        postgres_server.drop(name)


@pytest.fixture
def own_postgres_server(empty_postgres: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL for one test, which may kill, pause and restart it."""
    with PostgresServer(data=empty_postgres) as server:
        yield server
