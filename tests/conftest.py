"""Shared fixtures: a real Redis, a real PostgreSQL, and the Hypothesis profiles."""

import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests import run_report
from tests.postgres import SHARED_MEMORY, PostgresServer, has_free_space, postgres_data
from tests.servers import RedisServer
from tests.topologies import RedisCluster, SentinelGroup

TESTS = Path(__file__).parent
SECOND_TIMEOUT_SECONDS = 5.0

# LIMITFORGE_TEST_PROFILE selects the profile. Only `soak` uses a new seed each time, so CI never fails at random.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", _patient, max_examples=20, derandomize=True)
settings.register_profile("ci", _patient, max_examples=50, derandomize=True)
# `make mutants` needs a failing example, not the smallest one.
settings.register_profile("mutants", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("soak", _patient, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("LIMITFORGE_TEST_PROFILE", "ci"))

# `make test-fast` skips everything that starts programs, waits for real time or moves much data; `make test` runs it.
# Such tests are marked `slow` by their folder or file, by a fixture, or by a word in one of their parameters
# ("postgres and redis"). A single test that takes seconds has the mark itself.
SLOW_PLACES = {
    "catalog/live/test_cache.py",
    "catalog/database/test_constraints.py",
    "catalog/database/test_edits.py",
    "catalog/live/test_lookup_limiter.py",
    "catalog/database/test_locking.py",
    "catalog/database/test_migrations.py",
    "catalog/live/test_override_sync.py",
    "catalog/live/test_live_catalog.py",
    "catalog/database/test_outbox.py",
    "catalog/database/test_overrides.py",
    "catalog/live/test_partial_failure.py",
    "catalog/live/test_outbox_relay.py",
    "catalog/live/test_signing.py",
    "catalog/live/test_override_reconciler.py",
    "catalog/live/test_shared_copies.py",
    "chaos",
    "cli",
    "contract/test_definitions.py",
    "contract/test_denial_cache.py",
    "contract/test_invalidation.py",
    "contract/test_prepaid_corner_cases.py",
    "contract/test_prepaid_plan_changes.py",
    "contract/test_catalog_redis.py",
    "deploy",
    "docs",
    "hostile",
    "mutants",
    "service",
    "unit/test_topology_servers.py",
    "unit/test_postgres_server.py",
    "unit/test_servers.py",
}
SLOW_FIXTURES = {
    "cluster_servers",
    "own_postgres_server",
    "own_redis_server",
    "postgres_server",
    "sentinel_servers",
    "small_redis",
}
SLOW_WORDS = {"cluster", "sentinel", "postgres"}

# Random searches of `make test` that `make soak` repeats with more and new examples.
RANDOM_SEARCHES = {"properties", "unit/test_denial_cache_twins.py"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip collecting deselected files, because importing them takes a third of the time of the rest."""
    is_left_out = "not slow" in config.getoption("markexpr") and _is_in(SLOW_PLACES, collection_path)
    return True if is_left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        words = {word for given in parameters if isinstance(given, str) for word in given.split()}
        if os.environ.get("LIMITFORGE_TEST_PROFILE") == "soak" and _is_in(RANDOM_SEARCHES, item.path):
            item.add_marker(pytest.mark.soak)
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(0))  # unless it has its own
        if _is_in(SLOW_PLACES, item.path) or SLOW_FIXTURES.intersection(fixtures) or SLOW_WORDS & words:
            item.add_marker(pytest.mark.slow)
        for name, seconds in (("soak", 0), ("chaos", 600)):  # 0 means no time-out: these tests run as long as requested
            if item.get_closest_marker(name) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(seconds))


def pytest_collection_finish() -> None:
    """Freeze collected objects, so that no garbage collection during the tests scans them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # otherwise a tenth of the run time goes into garbage collection


def _is_in(places: set[str], path: Path) -> bool:
    return not places.isdisjoint(_path_and_parents(path))


@cache
def _path_and_parents(path: Path) -> list[str]:
    """Return the file and its folders, relative to `tests`."""
    return [each.relative_to(TESTS).as_posix() for each in (path, *path.parents) if TESTS in each.parents]


def pytest_configure(config: pytest.Config) -> None:
    """Put temporary files into memory if there is room, as for Postgres: then no commit waits for a disk."""
    config.pluginmanager.register(run_report)
    if has_free_space(SHARED_MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_MEMORY))


@pytest.fixture(autouse=True)
def rearm_test_timeout() -> None:
    """Set a second time-out: Hypothesis catches the first one as a failure, and runs the hanging example again."""
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    if left:
        signal.setitimer(signal.ITIMER_REAL, left, SECOND_TIMEOUT_SECONDS)


@pytest.fixture(autouse=True)
def collect_unclosed_files() -> Iterator[None]:
    """Report unclosed files in the test that left them open, not in a later one that collects garbage.

    Objects that are alive afterwards belong to fixtures and modules. They are frozen, because scanning them again for
    each test took half a second.
    """
    before = _open_files()
    yield
    if _open_files() > before:
        gc.collect()
        gc.freeze()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - runs twice per test, and creating a Path for each entry doubles its time


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The Redis of this worker, shared by its tests: leave it running."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of this worker's Redis, flushed."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
def own_redis_server() -> Iterator[RedisServer]:
    """A Redis for a single test, which may kill, pause and restart it."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def cluster_servers() -> Iterator[RedisCluster]:
    """A Redis Cluster, shared by the tests of a file: leave it as it is.

    Its servers ping each other all the time. Over a whole run, that costs more than starting a new one per file.
    """
    with RedisCluster() as servers:
        yield servers


@pytest.fixture(scope="module")
def sentinel_servers() -> Iterator[SentinelGroup]:
    """A Redis with replicas and sentinels, shared by the tests of a file: leave them as they are."""
    with SentinelGroup() as servers:
        yield servers


@pytest.fixture(scope="session")
def empty_postgres() -> Iterator[Path]:
    """An initialised data folder, which this worker's PostgreSQL servers copy."""
    with postgres_data() as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres_server(empty_postgres: Path) -> Iterator[PostgresServer]:
    """The PostgreSQL of this worker, shared by its tests: leave it running."""
    with PostgresServer(data=empty_postgres) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database for a single test, on this worker's PostgreSQL."""
    name = f"test_{uuid4().hex}"
    yield postgres_server.create_database(name)
    if postgres_server.running:  # an interrupt may have stopped the server first
        postgres_server.drop_database(name)


@pytest.fixture
def own_postgres_server(empty_postgres: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL for a single test, which may kill, pause and restart it."""
    with PostgresServer(data=empty_postgres) as server:
        yield server
