"""The real service on a real socket, with SQLite and memory; and with Postgres and Redis where that may differ."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.postgres import PostgresServer
from tests.servers import RedisServer
from tests.service.live import Account, Admin, Live


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """With SQLite and memory, for all tests of this worker: make a tenant of your own."""
    folder: Path = tmp_path_factory.mktemp("service")
    with Live(f"sqlite:///{folder}/service.db") as live:
        yield live


@pytest.fixture(scope="session")
def backed(postgres_server: PostgresServer) -> Iterator[Live]:
    """With Postgres and Redis, for all tests of this worker.

    It writes to Redis between tests too: with one of its own, the shared Redis stays as the other tests left it.
    """
    name = f"service_{uuid4().hex}"
    with RedisServer() as redis, Live(postgres_server.database(name), redis.url, key_prefix=name) as live:
        yield live
    postgres_server.drop(name)


@pytest.fixture(params=["embedded", "backed"])
def either(request: pytest.FixtureRequest) -> Live:
    """Each kind in turn."""
    live: Live = request.getfixturevalue(request.param)
    return live


@pytest.fixture
def admin(embedded: Live) -> Admin:
    """Somebody who may administer all tenants, and has not called yet."""
    return embedded.admin()


@pytest.fixture
def account(admin: Admin) -> Account:
    return Account(admin)


@pytest.fixture
def own(account: Account) -> Admin:
    """Somebody who may administer that one tenant."""
    return account.own_admin()
