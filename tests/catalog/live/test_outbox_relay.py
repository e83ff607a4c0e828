"""The outbox relay: it publishes for writers that did not, in order of urgency, and delays no process."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import redis as redis_py

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.config import document
from limitforge.catalog.config.apply import apply_document
from limitforge.catalog.credentials import Peppers, new_id
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.outbox import unpublished_announcements
from limitforge.catalog.live import outbox_relay as relay_module
from limitforge.catalog.model import Tenant, build_entity, to_datetime
from limitforge.errors import Forbidden
from limitforge.stores.redis.catalog_redis import CatalogRedis
from tests.catalog.conftest import decode_announcements
from tests.catalog.environments import one_database
from tests.catalog.factories import url_of
from tests.catalog.replicas import Account, Replica, create_account, eventually

SLOW_CALL_SECONDS = 0.02


class Watched(CatalogRedis):
    """A Redis that records published messages, and is slow to write copies."""

    def __init__(self, url: str, published: list[list[Announcement]], seconds: float = 0.0) -> None:
        super().__init__(url)
        self._published = published
        self._seconds = seconds

    async def put(self, key: str, copy: bytes, ttl_seconds: float) -> None:
        await asyncio.sleep(self._seconds)
        await super().put(key, copy, ttl_seconds)

    async def put_many(self, copies: Mapping[str, bytes], ttl_seconds: float) -> None:
        await asyncio.sleep(self._seconds)
        await super().put_many(copies, ttl_seconds)

    async def publish(self, channel: str, message: bytes) -> None:
        self._published.append(decode_announcements(channel, message))
        await super().publish(channel, message)


class Stuck(CatalogRedis):
    """A Redis that never answers a PUBLISH."""

    async def publish(self, channel: str, message: bytes) -> None:
        await asyncio.sleep(600)


async def apply_tenants(catalog: Catalog, count: int, limit: int = 5) -> None:
    """Apply tenants as the command line does, without Redis."""
    lines = "\n".join(
        f"  - {{name: bulk-{index}, default_plan: free, plans: [{{name: free, limits: {limit}/minute}}]}}"
        for index in range(count)
    )
    wanted, _ = document.parse_document(
        f"tenants:\n{lines}\n".encode(), "bulk.yaml", to_datetime(catalog.clock.now_us())
    )
    await apply_document(catalog, wanted, "test")


async def disable(catalog: Catalog, account: Account) -> int:
    """Disable the key, and return the revision."""
    async with catalog.edit("test") as edit:
        await edit.set_key_disabled(account.key.id, disabled=True)
    return edit.revision


async def is_published(database: Database) -> bool:
    async with database.reading() as connection:
        return not await unpublished_announcements(connection, 1)


@pytest.fixture
def writer(database: Database, peppers: Peppers) -> Catalog:
    return Catalog(database, peppers=peppers)


def times_published(published: Sequence[Sequence[Announcement]]) -> Counter[tuple[int, str]]:
    return Counter((each.revision, each.tenant_id) for message in published for each in message)


@pytest.mark.slow
async def test_of_many_processes_one_publishes_however_long_it_takes(
    database: Database, writer: Catalog, redis_url: str, peppers: Peppers
) -> None:
    """Each call takes so long that writing the copies one by one would outlast the lock."""
    async with writer.edit("test") as edit:
        await edit.write_changes(
            (None, build_entity(Tenant, {"id": new_id("ten"), "name": f"t{index}"})) for index in range(150)
        )
    published: list[list[Announcement]] = []
    replicas = [
        Replica(url_of(database), peppers=peppers, shared=Watched(redis_url, published, SLOW_CALL_SECONDS))
        for _ in range(3)
    ]
    for replica in replicas:
        await replica.live.start()
    try:
        await eventually(lambda: is_published(database))
        await asyncio.sleep(2 * relay_module.RETRY_SECONDS)
    finally:
        for replica in replicas:
            await replica.close()
    times = times_published(published)
    assert len(times) == 150
    assert set(times.values()) == {1}
    assert max(len(message) for message in published) <= relay_module.BATCH


async def test_a_revocation_is_published_before_a_backlog(
    database: Database, writer: Catalog, redis_url: str, peppers: Peppers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "BATCH", 20)
    account = await create_account(writer)
    await apply_tenants(writer, 100)
    revision = await disable(writer, account)
    published: list[list[Announcement]] = []
    shared = Watched(redis_url, published)
    async with Replica(url_of(database), peppers=peppers, shared=shared):
        await eventually(lambda: is_published(database))
    assert [each.revision for each in published[0]] == [revision]
    assert len(published) > 5


@one_database
async def test_a_revocation_acts_while_nothing_can_be_published(
    database: Database, writer: Catalog, redis_url: str, peppers: Peppers
) -> None:
    """The outbox is read while the relay waits."""
    account = await create_account(writer)
    async with Replica(url_of(database), peppers=peppers, shared=Stuck(redis_url)) as there:
        await there.seconds_until(account.text, 5)
        await apply_tenants(writer, 50)
        await asyncio.sleep(3 * relay_module.RELAY_AFTER_SECONDS)  # the relay has begun, and never finishes
        await disable(writer, account)
        await there.seconds_until(account.text, Forbidden)
        assert not await is_published(database)


@one_database
async def test_a_relay_that_was_killed_is_replaced(
    database: Database, writer: Catalog, redis_url: str, peppers: Peppers
) -> None:
    client = redis_py.Redis.from_url(redis_url)
    client.set("lf:{%relay}:", b"one that was killed", px=1_500)
    await apply_tenants(writer, 5)
    async with Replica(url_of(database), redis_url, peppers=peppers):
        await eventually(lambda: is_published(database))
        await eventually(lambda: client.get("lf:{%relay}:") is None)
    client.close()


@one_database
async def test_tenants_that_were_changed_by_the_hundred_are_in_force_on_a_process_that_knows_them(
    database: Database, writer: Catalog, redis_url: str, peppers: Peppers
) -> None:
    """There are more changes than one slice: all slices are applied."""
    await apply_tenants(writer, 120)
    tenants = (await writer.list_page(Tenant, size=1_000)).items
    async with writer.edit("test") as edit:
        made = [await edit.create_key({"tenant_id": tenant.id, "name": "web"}) for tenant in tenants]
    keys = [credential.text for _, credential in made]
    async with Replica(url_of(database), redis_url, peppers=peppers) as there:
        for text in keys:
            assert await there.limit(text) == 5
        await apply_tenants(writer, 120, limit=6)
        for text in keys:
            await there.seconds_until(text, 6)
