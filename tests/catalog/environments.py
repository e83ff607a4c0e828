"""The servers that the replicas of a test use: a database of either kind, with and without Redis."""

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
    """A database with its schema, and perhaps a Redis, for all replicas of a test."""

    database_url: str
    redis_url: str | None
    peppers: Peppers
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def replica(self, **how: Any) -> Replica:
        """Start a replica, and close it after the test."""
        replica = Replica(self.database_url, self.redis_url, peppers=self.peppers, **how)
        await self.stack.enter_async_context(replica)
        return replica

    async def writer(self) -> Catalog:
        """Return a catalog that publishes nothing: the command line, or a process that is killed after a commit."""
        database = Database(self.database_url)
        await self.stack.enter_async_context(closing(database))
        return Catalog(database, peppers=self.peppers)


only_with_redis = pytest.mark.parametrize("environment", ["sqlite and redis", "postgres and redis"], indirect=True)
# For tests that do not depend on the combination: each database once, with Redis once and without once.
each_database = pytest.mark.parametrize("environment", ["sqlite", "postgres and redis"], indirect=True)
without_redis = pytest.mark.parametrize("environment", ["sqlite", "postgres"], indirect=True)
only_postgres = pytest.mark.parametrize("environment", ["postgres", "postgres and redis"], indirect=True)
# For tests of Python code or Redis: other tests of `make test` run their statements on Postgres as well.
one_database = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)], indirect=True
)
only_postgres_with_redis = pytest.mark.parametrize("environment", ["postgres and redis"], indirect=True)
only_sqlite = pytest.mark.parametrize("environment", ["sqlite"], indirect=True)
only_sqlite_with_redis = pytest.mark.parametrize("environment", ["sqlite and redis"], indirect=True)
