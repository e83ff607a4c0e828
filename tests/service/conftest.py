"""The real service on a real socket: with SQLite and memory, or with Postgres and Redis where that may differ."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.postgres import PostgresServer
from tests.servers import RedisServer
from tests.service.live_service import AdminClient, LiveService, TenantFixture


@pytest.fixture(scope="session")
def sqlite_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A service on SQLite and memory, shared by all tests of this pytest worker. Create your own tenant."""
    folder: Path = tmp_path_factory.mktemp("service")
    with LiveService(f"sqlite:///{folder}/service.db") as live:
        yield live


@pytest.fixture(scope="session")
def postgres_service(postgres_server: PostgresServer) -> Iterator[LiveService]:
    """A service on Postgres and Redis, shared by all tests of this pytest worker.

    It has its own Redis, because it writes to Redis between tests too.
    """
    name = f"service_{uuid4().hex}"
    with RedisServer() as redis, LiveService(postgres_server.create_database(name), redis.url, key_prefix=name) as live:
        yield live
    postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite_service", "postgres_service"])
def each_service(request: pytest.FixtureRequest) -> LiveService:
    """Run the test with both services."""
    live: LiveService = request.getfixturevalue(request.param)
    return live


@pytest.fixture
def admin(sqlite_service: LiveService) -> AdminClient:
    """A client with a new token for all tenants."""
    return sqlite_service.admin()


@pytest.fixture
def account(admin: AdminClient) -> TenantFixture:
    return TenantFixture(admin)


@pytest.fixture
def tenant_admin(account: TenantFixture) -> AdminClient:
    """A client with a token for `account` alone."""
    return account.tenant_admin()
