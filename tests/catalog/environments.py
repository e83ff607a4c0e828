"""Where the nodes of a test live: a database of either kind, with and without a Redis."""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from tests.catalog.replicas import Replica, closing


@dataclass
class Environment:
    """Where nodes live: a database with its schema, and perhaps a Redis."""

    database_url: str
    redis_url: str | None
    peppers: Peppers
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def replica(self, **how: Any) -> Replica:
        """One that is started, and closed after the test."""
        replica = Replica(self.database_url, self.redis_url, peppers=self.peppers, **how)
        await self.stack.enter_async_context(replica)
        return replica

    async def writer(self) -> Catalog:
        """Who changes the catalog, and tells nobody: a CLI, or a node that dies between commit and publishing."""
        database = Database(self.database_url)
        await self.stack.enter_async_context(closing(database))
        return Catalog(database, peppers=self.peppers)


only_with_redis = pytest.mark.parametrize("environment", ["sqlite and redis", "postgres and redis"], indirect=True)
# Each database once, and with Redis and without once: for what does not depend on how the two go together.
each_database = pytest.mark.parametrize("environment", ["sqlite", "postgres and redis"], indirect=True)
without_redis = pytest.mark.parametrize("environment", ["sqlite", "postgres"], indirect=True)
only_postgres = pytest.mark.parametrize("environment", ["postgres", "postgres and redis"], indirect=True)
# What Python alone decides, or Redis: other tests of `make test` send every statement that it needs to Postgres.
one_database = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)], indirect=True
)
only_postgres_with_redis = pytest.mark.parametrize("environment", ["postgres and redis"], indirect=True)
only_sqlite = pytest.mark.parametrize("environment", ["sqlite"], indirect=True)
only_sqlite_with_redis = pytest.mark.parametrize("environment", ["sqlite and redis"], indirect=True)
