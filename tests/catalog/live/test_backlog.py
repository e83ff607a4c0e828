"""A backlog: the changes of a large apply are deferred, and a small change does not wait behind them."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import catalog_revision, outbox
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.core.limits import Mode
from limitforge.stores.redis.catalog_redis import CatalogRedis
from tests.catalog.factories import url_of
from tests.catalog.live.test_outbox_relay import apply_tenants
from tests.catalog.replicas import Replica, closing, create_account, eventually, set_limits, set_operator_mode

MANY = 150


@pytest.fixture
def writer(database: Database, peppers: Peppers) -> Catalog:
    return Catalog(database, peppers=peppers)


async def test_a_change_by_one_person_does_not_wait_behind_an_apply(
    database: Database, writer: Catalog, peppers: Peppers
) -> None:
    """The live catalog is not started, so deferred changes stay deferred."""
    account = await create_account(writer)
    replica = Replica(url_of(database), peppers=peppers)
    async with closing(replica):
        await replica.live.catch_up()
        assert await replica.limit(account.text) == 5
        await apply_tenants(writer, MANY)
        await replica.live.catch_up()
        assert len(replica.live._applier.deferred) == MANY
        await set_limits(writer, account, "7/minute")
        await replica.live.catch_up()
        assert await replica.limit(account.text) == 7
        await set_operator_mode(writer, Mode.OFF)
        await replica.live.catch_up()
        assert await replica.limit(account.text) is None
        assert len(replica.live._applier.deferred) == MANY


async def test_a_message_that_comes_late_does_not_replace_a_later_change(
    database: Database, writer: Catalog, peppers: Peppers
) -> None:
    replica = Replica(url_of(database), peppers=peppers)
    async with closing(replica):
        await replica.live.catch_up()
        revisions = []
        for limit in (5, 6):
            await apply_tenants(writer, MANY, limit)
            async with database.reading() as connection:
                revisions.append((await catalog_revision.read_last_stamp(connection)).revision)
        async with database.reading() as connection:
            rows = await outbox.announcements_after(connection, 0, 10_000)
        await replica.live.catch_up()
        waiting = dict(replica.live._applier.deferred)
        assert {each.revision for each in waiting.values()} == {revisions[1]}
        await replica.live._apply_message([row for row in rows if row.revision == revisions[0]])
        assert replica.live._applier.deferred == waiting


class Counted(CatalogRedis):
    """Counts the subscriptions."""

    subscriptions = 0

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        self.subscriptions += 1
        async for message in super().listen(channel):
            yield message


@pytest.mark.slow
async def test_a_process_without_its_database_keeps_listening(redis_url: str, peppers: Peppers) -> None:
    shared = Counted(redis_url)
    async with Replica("postgresql://nobody@127.0.0.1:1/none", peppers=peppers, shared=shared) as replica:
        await eventually(lambda: "redis" in replica.live.status().listening)
        await asyncio.sleep(1)  # a subscription that ends would be repeated ten times in that time
        assert "redis" in replica.live.status().listening
        assert shared.subscriptions == 1
