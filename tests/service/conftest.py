"""The real service on a real socket, with SQLite and memory; and with Postgres and Redis where that may differ."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.postgres import PostgresServer
from tests.servers import RedisServer
from tests.service.live_service import AdminClient, LiveService, TenantFixture


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """With SQLite and memory, for all tests of this worker: make a tenant of your own."""
    folder: Path = tmp_path_factory.mktemp("service")
    with LiveService(f"sqlite:///{folder}/service.db") as live:
        yield live


@pytest.fixture(scope="session")
def backed(postgres_server: PostgresServer) -> Iterator[LiveService]:
    """With Postgres and Redis, for all tests of this worker.

    It writes to Redis between tests too: with one of its own, the shared Redis stays as the other tests left it.
    """
    name = f"service_{uuid4().hex}"
    with RedisServer() as redis, LiveService(postgres_server.create_database(name), redis.url, key_prefix=name) as live:
        yield live
    postgres_server.drop_database(name)


@pytest.fixture(params=["embedded", "backed"])
def either(request: pytest.FixtureRequest) -> LiveService:
    """Each kind in turn."""
    live: LiveService = request.getfixturevalue(request.param)
    return live


@pytest.fixture
def admin(embedded: LiveService) -> AdminClient:
    """Somebody who may administer all tenants, and has not called yet."""
    return embedded.admin()


@pytest.fixture
def account(admin: AdminClient) -> TenantFixture:
    return TenantFixture(admin)


@pytest.fixture
def own(account: TenantFixture) -> AdminClient:
    """Somebody who may administer that one tenant."""
    return account.tenant_admin()
