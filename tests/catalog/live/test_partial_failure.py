"""One of several Redis servers fails, or one tenant is invalid: changes of all other tenants are published, and failed
ones are retried until they succeed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from sqlalchemy import select, update

from limitforge import Limiter, ManualClock, StoreOptions
from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import tables
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.outbox import unpublished_announcements
from limitforge.catalog.live import live_catalog as live_catalog_module
from limitforge.catalog.live import outbox_relay as relay_module
from limitforge.catalog.live.database_source import DatabaseSource
from limitforge.catalog.live.overrides import override_sync as override_sync_module
from limitforge.catalog.live.overrides.override_sync import OverrideSync
from limitforge.catalog.model import Key, TenantConfig
from limitforge.errors import PartialFailure
from limitforge.stores.redis.catalog_redis import CatalogRedis
from limitforge.stores.redis.topology.hash_slots import hash_slot
from tests.catalog.backups import back_up, restore
from tests.catalog.conftest import decode_announcements
from tests.catalog.environments import one_database
from tests.catalog.factories import url_of
from tests.catalog.live.test_outbox_relay import apply_tenants, disable
from tests.catalog.replicas import (
    Account,
    Replica,
    closing,
    create_account,
    decide,
    eventually,
    set_limits,
    shared_copies,
)
from tests.servers import RedisServer
from tests.topologies import RedisCluster
from tests.topologies.cluster import ClusterServer

# Fail early if a server is down, and try it again soon.
HASTY = StoreOptions(deadline_ms=5_000, failure="raise", breaker_failures=1, breaker_seconds=0.5)


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[RedisCluster]:
    """A Cluster of masters without replicas: a killed one is down until it is restarted, and then is empty."""
    with RedisCluster(masters=3, replicas=0) as servers:
        yield servers


@pytest.fixture
def writer(database: Database, peppers: Peppers) -> Catalog:
    """A writer without Redis, as the command line is."""
    return Catalog(database, peppers=peppers)


def home_of(servers: RedisCluster, account: Account) -> ClusterServer:
    return servers.master_of(hash_slot(f"lf:{{{account.tenant.id}}}:"))


async def accounts_on(
    servers: RedisCluster, catalog: Catalog, dead: ClusterServer, each: int = 1
) -> tuple[list[Account], list[Account]]:
    """Create so many accounts whose overrides are on this master, and as many on others."""
    there: list[Account] = []
    elsewhere: list[Account] = []
    number = 0
    while min(len(there), len(elsewhere)) < each:
        account = await create_account(catalog, f"tenant-{number}", "50/minute")
        (there if home_of(servers, account) is dead else elsewhere).append(account)
        number += 1
    return there[:each], elsewhere[:each]


async def set_override(catalog: Catalog, account: Account, change: Any, subject: str = "s") -> int:
    """Set an override, and return the revision."""
    fields = {"tenant_id": account.tenant.id, "resource": "*", "subject": subject, "ttl_seconds": 3_600}
    async with catalog.edit("test") as edit:
        await edit.set_override({**fields, "limits": {"minute": change}})
    return edit.revision


async def pending(database: Database) -> set[str]:
    """Return the tenants that have unpublished rows."""
    async with database.reading() as connection:
        return {row.announcement.tenant_id for row in await unpublished_announcements(connection, 1_000)}


async def admits(replica: Replica, account: Account) -> bool:
    caller = replica.live.cache.callers.get(account.text) or await replica.live.cache.callers.find(account.text)
    return (await decide(caller, replica.limiter)).allowed


@contextlib.asynccontextmanager
async def listening(url: str, channel: str) -> AsyncIterator[list[Announcement]]:
    """Collect the announcements that are published while this block runs."""
    shared = CatalogRedis(url)
    announced: list[Announcement] = []
    is_in = asyncio.Event()

    async def listen() -> None:
        async for message in shared.listen(channel):
            if message is None:
                is_in.set()
            else:
                announced.extend(decode_announcements(channel, message))

    task = asyncio.create_task(listen())
    try:
        await asyncio.wait_for(is_in.wait(), 30)
        yield announced
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await shared.close()


# The first master has the head of history and the channel of a client that asks for slot 0, the last one the lock.
@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("index", [0, 2, pytest.param(1, marks=pytest.mark.soak)])
async def test_a_dead_master_holds_up_no_tenant_of_the_others(
    index: int,
    database: Database,
    writer: Catalog,
    own_cluster: RedisCluster,
    peppers: Peppers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_catalog_module, "SYNC_OVERRIDES_SECONDS", 600)  # the relay has to do it
    monkeypatch.setattr(relay_module, "BATCH", 2)
    url, dead = own_cluster.url, own_cluster.servers[index]
    (away,), (well,) = await accounts_on(own_cluster, writer, dead)
    replica = Replica(url_of(database), url, peppers=peppers, limiter_url=url, options=HASTY)
    async with replica:
        await set_override(writer, away, {"limit": 9})
        await set_override(writer, well, "unlimited")
        await replica.seconds_until(away.text, 9)
        await eventually(lambda: admits(replica, well))

        async def is_published() -> bool:
            return not await pending(database)

        await eventually(is_published)
        dead.kill()
        try:
            async with listening(url, "lf:%changes") as announced:
                for number in range(5):  # more than a batch
                    await set_override(writer, away, {"limit": 20 + number})
                await set_limits(writer, well, "40/minute")
                revision = await set_override(writer, well, "blocked")

                async def is_blocked() -> bool:
                    return not await admits(replica, well)

                await eventually(is_blocked)
                await eventually(lambda: revision in {each.revision for each in announced})

                async def is_only_the_dead_pending() -> bool:
                    return await pending(database) == {away.tenant.id}

                await eventually(is_only_the_dead_pending)
                assert not dead.running
            async with contextlib.AsyncExitStack() as stack:
                shared = CatalogRedis(url)
                await stack.enter_async_context(closing(shared))
                copy = await shared_copies(shared, peppers).get_config(well.tenant.id)
                assert copy is not None
                assert copy.value is not None
                assert copy.value.plans[0].limits[0]["limit"] == 40
        finally:
            dead.restart()
            own_cluster.wait_until_ok()
        await replica.seconds_until(away.text, 24)
        await eventually(is_published)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_all_tenants_are_compared_although_one_master_is_dead(
    database: Database, writer: Catalog, own_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(override_sync_module, "MAX_FAILURES", 100)  # the few tenants here may come in an unlucky order
    clock, dead, source = ManualClock(), own_cluster.servers[1], Counting(database)
    away, well = await accounts_on(own_cluster, writer, dead, each=3)
    for each in (*away, *well):
        await set_override(writer, each, {"limit": 7})
    async with Limiter.connect(own_cluster.url, options=HASTY) as limiter:
        override_sync = OverrideSync(source, limiter, clock)
        dead.kill()
        try:
            with pytest.raises(PartialFailure) as failure:
                await override_sync.sync_all()
            assert failure.value.failed == {each.tenant.id for each in away}
            for each in well:
                (found,) = (await limiter.list_overrides(tenant=each.tenant.id)).overrides
                assert found.limits == {"minute": {"limit": 7}}
            source.read.clear()
            with pytest.raises(PartialFailure):
                await override_sync.sync_pending_tenants()
            assert set(source.read) == failure.value.failed
            override_sync.forget_failures()
            with pytest.raises(PartialFailure):
                await override_sync.sync_pending_tenants()
            assert set(source.read) == {each.tenant.id for each in (*away, *well)}
        finally:
            dead.restart()
            own_cluster.wait_until_ok()

        async def is_done() -> bool:
            with contextlib.suppress(PartialFailure):
                return await override_sync.sync_all() >= 0
            return False

        await eventually(is_done)
        for each in away:
            (found,) = (await limiter.list_overrides(tenant=each.tenant.id)).overrides
            assert found.limits == {"minute": {"limit": 7}}


class Counting(DatabaseSource):
    """Records the tenants that were read."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.read: list[str] = []

    async def config(self, tenant_id: str) -> TenantConfig | None:
        self.read.append(tenant_id)
        return await super().config(tenant_id)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_store_that_is_away_as_a_whole_costs_a_bounded_number_of_reads(
    database: Database, writer: Catalog, own_redis_server: RedisServer
) -> None:
    accounts = [await create_account(writer, f"t{number}") for number in range(3 * override_sync_module.MAX_FAILURES)]
    for each in accounts:
        await set_override(writer, each, {"limit": 7})
    source = Counting(database)
    async with Limiter.connect(own_redis_server.url, options=HASTY) as limiter:
        own_redis_server.kill()
        with pytest.raises(PartialFailure) as failure:
            await OverrideSync(source, limiter).sync_all()
    assert len(source.read) == override_sync_module.MAX_FAILURES
    assert failure.value.failed == {each.tenant.id for each in accounts}


@one_database
async def test_a_full_redis_still_passes_messages_on_and_gets_the_copies_later(
    database: Database, writer: Catalog, own_redis_server: RedisServer, peppers: Peppers
) -> None:
    url = own_redis_server.url
    account = await create_account(writer)
    with redis_py.Redis.from_url(url) as raw:
        async with Replica(url_of(database), url, peppers=peppers) as replica:
            await replica.seconds_until(account.text, 5)

            async def is_published() -> bool:
                return not await pending(database)

            await eventually(is_published)
            async with listening(url, "lf:%changes") as announced:
                raw.config_set("maxmemory", 1)
                async with replica.catalog.edit("test") as edit:
                    await edit.set_key_disabled(account.key.id, disabled=True)
                await eventually(lambda: edit.revision in {each.revision for each in announced})
                assert await pending(database) == {account.tenant.id}
                raw.config_set("maxmemory", 0)
                await eventually(is_published)
            shared = CatalogRedis(url)
            async with closing(shared):
                copy = await shared_copies(shared, peppers).get_key(account.key.id)
            assert copy is not None
            assert copy.value is not None
            assert copy.value.disabled


async def test_an_invalid_tenant_holds_up_no_other_and_is_published_once_it_is_corrected(
    database: Database, writer: Catalog, redis_url: str, peppers: Peppers
) -> None:
    """The invalid row may come from a newer release."""
    bad, good = await create_account(writer, "bad"), await create_account(writer, "good")
    versions = tables.plan_versions
    row = versions.c.plan_id == bad.plan.id

    async def set_stored(limits: Any) -> None:
        async with database.writing() as connection:
            await connection.execute(update(versions).where(row).values(limits=limits))

    async with database.reading() as connection:
        limits = await connection.scalar(select(versions.c.limits).where(row))
    await set_stored([{"algorithm": "one of tomorrow"}])
    async with Replica(url_of(database), redis_url, peppers=peppers, limiter_url=redis_url) as replica:

        async def is_only_the_bad_pending() -> bool:
            return await pending(database) == {bad.tenant.id}

        await eventually(is_only_the_bad_pending)
        await set_override(writer, good, "blocked")

        async def is_blocked() -> bool:
            return not await admits(replica, good)

        await eventually(is_blocked)
        await eventually(is_only_the_bad_pending)
        copies = shared_copies(replica.shared, peppers)
        assert await copies.get_config(bad.tenant.id) is None  # no copy says that it is deleted
        await set_stored(limits)

        async def is_published() -> bool:
            return not await pending(database)

        await eventually(is_published)
        copy = await copies.get_config(bad.tenant.id)
        assert copy is not None
        assert copy.value is not None
        assert copy.value.plans[0].limits == bad.plan.limits


@one_database
async def test_an_invalid_key_is_not_published_as_deleted_and_holds_up_nothing_else(
    database: Database, writer: Catalog, redis_url: str, peppers: Peppers
) -> None:
    bad, good = await create_account(writer, "bad"), await create_account(writer, "good")
    async with database.writing() as connection:
        await connection.execute(update(tables.keys).where(tables.keys.c.id == bad.key.id).values(scopes=["tomorrow"]))
    await set_limits(writer, bad, "9/minute")
    async with Replica(url_of(database), redis_url, peppers=peppers) as replica:

        async def is_only_the_bad_pending() -> bool:
            return await pending(database) == {bad.tenant.id}

        await eventually(is_only_the_bad_pending)
        copies = shared_copies(replica.shared, peppers)
        assert await copies.get_key(bad.key.id) is None
        copy = await copies.get_key(good.key.id)
        assert copy is not None
        assert isinstance(copy.value, Key)

        async def is_changed() -> bool:
            config = await copies.get_config(bad.tenant.id)
            return config is not None and config.value is not None and config.value.plans[0].limits[0]["limit"] == 9

        await eventually(is_changed)


class FailsOnce(CatalogRedis):
    """Refuses the first copy of one key, and records the revisions of all messages."""

    def __init__(self, url: str, refused: str) -> None:
        super().__init__(url)
        self.sent: list[set[int]] = []
        self._refused: str | None = refused

    async def put_many(self, copies: Mapping[str, bytes], ttl_seconds: float) -> None:
        if self._refused is not None and (refused := [key for key in copies if self._refused in key]):
            self._refused = None
            raise PartialFailure("the test says so", refused)
        await super().put_many(copies, ttl_seconds)

    async def publish(self, channel: str, message: bytes) -> None:
        self.sent.append({each.revision for each in decode_announcements(channel, message)})
        await super().publish(channel, message)


@one_database
async def test_a_revocation_that_failed_once_does_not_wait_behind_a_backlog(
    database: Database, writer: Catalog, redis_url: str, peppers: Peppers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "BATCH", 5)
    monkeypatch.setattr(relay_module, "RETRY_SECONDS", 0.01)
    account = await create_account(writer)
    await apply_tenants(writer, 100)
    revision = await disable(writer, account)
    shared = FailsOnce(redis_url, account.key.id)
    async with Replica(url_of(database), peppers=peppers, shared=shared):

        async def is_published() -> bool:
            return not await pending(database)

        await eventually(is_published)
    times = [index for index, revisions in enumerate(shared.sent) if revision in revisions]
    assert len(times) == 2
    assert times[1] < 5
    assert len(shared.sent) > 20


@one_database
async def test_an_invalid_tenant_does_not_end_the_comparison_after_a_restore(
    database: Database, writer: Catalog, redis_url: str, peppers: Peppers, tmp_path: Path
) -> None:
    accounts = [await create_account(writer, f"t{number}") for number in range(5)]
    for each in accounts:
        await set_override(writer, each, {"limit": 3})
    bad, *good = accounts
    async with database.writing() as connection:
        stored = update(tables.plan_versions).where(tables.plan_versions.c.plan_id == bad.plan.id)
        await connection.execute(stored.values(limits=[{"algorithm": "one of tomorrow"}]))
    file = await back_up(url_of(database), tmp_path)
    async with Replica(url_of(database), redis_url, peppers=peppers, limiter_url=redis_url) as replica:
        for each in good:
            await set_override(replica.catalog, each, "blocked")
        await restore(url_of(database), file)
        for each in good:
            await replica.seconds_until(each.text, 3)
        repair: Any = replica.live._full_sync
        await eventually(lambda: not repair.is_pending)
        await eventually(lambda: replica.live.status().database == "ok")
