"""Fixtures for an empty catalog on each kind of database."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from limitforge import ManualClock
from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.live import live_catalog as live_catalog_module
from limitforge.catalog.live.signing import Signer
from tests.catalog.compiled_statements import compiled_once
from tests.catalog.environments import Environment
from tests.catalog.factories import open_database
from tests.catalog.reused_database import ReusedDatabase
from tests.postgres import PostgresServer

PEPPERS = "1:a pepper that the tests alone know"


@pytest.fixture(scope="session", autouse=True)
def statements_are_compiled_once() -> Iterator[None]:
    """Each test creates an engine, which would compile all statements again: that was 7 % of the CPU time."""
    with compiled_once():
        yield


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database without a schema."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/catalog.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the newest schema and no rows."""
    path = tmp_path_factory.mktemp("migrated") / "catalog.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def reused_postgres(postgres_server: PostgresServer) -> ReusedDatabase:
    """An empty database with the newest schema on this worker's PostgreSQL. It is emptied for each test."""
    _migrate(postgres_server.create_database("migrated"))
    return ReusedDatabase(postgres_server, "migrated")


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """An empty database with the newest schema."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / "catalog.db")
        async with open_database(f"sqlite:///{tmp_path}/catalog.db") as database:
            yield database
        return
    reused: ReusedDatabase = request.getfixturevalue("reused_postgres")
    async with open_database(await reused.emptied()) as database:
        yield database


@pytest.fixture(params=["sqlite", "postgres", "sqlite and redis", "postgres and redis"])
async def environment(request: pytest.FixtureRequest, tmp_path: Path, peppers: Peppers) -> AsyncIterator[Environment]:
    redis_url = request.getfixturevalue("redis_url") if "redis" in request.param else None
    if request.param.startswith("sqlite"):
        shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / "catalog.db")
        environment = Environment(f"sqlite:///{tmp_path}/catalog.db", redis_url, peppers)
        async with environment.stack:
            yield environment
        return
    reused: ReusedDatabase = request.getfixturevalue("reused_postgres")
    environment = Environment(await reused.emptied(), redis_url, peppers)
    async with environment.stack:
        yield environment


def _migrate(url: str) -> None:
    """Migrate in a thread, since the caller may run on an event loop."""

    async def migrate() -> None:
        database = Database(url)
        await database.upgrade()
        await database.close()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, migrate()).result()


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll the outbox five to ten times as often as in production, so that tests wait less."""
    monkeypatch.setattr(live_catalog_module, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(live_catalog_module, "POLL_WHILE_NOTIFIED_SECONDS", 0.5)


@pytest.fixture
def peppers() -> Peppers:
    return Peppers.parse(PEPPERS)


@pytest.fixture
def sealer(peppers: Peppers) -> Signer:
    return Signer(peppers)


def decode_announcements(channel: str, message: bytes) -> list[Announcement]:
    """Return the announcements in a message of a process with `PEPPERS`."""
    content = Signer(Peppers.parse(PEPPERS)).verify(channel, message)
    assert content is not None
    return msgspec.msgpack.decode(content, type=list[Announcement])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def catalog(database: Database, peppers: Peppers, clock: ManualClock) -> Catalog:
    return Catalog(database, peppers=peppers, clock=clock)
