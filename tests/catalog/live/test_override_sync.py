"""Overrides in the store become equal to those of the database, even if the store has lost or kept some."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from limitforge import InvalidInput, Limiter, ManualClock, OverridePage
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.live import live_catalog as live_catalog_module
from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.live.database_source import DatabaseSource
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.catalog.live.overrides.override_sync import OverrideSync
from limitforge.catalog.model import Override, Plan, Tenant
from limitforge.core.plan import LimitsLike
from limitforge.errors import CatalogUnavailable, StoreUnavailable
from limitforge.stores.redis.catalog_redis import CatalogRedis
from tests.catalog.replicas import (
    PATIENCE_SECONDS,
    PATIENT,
    Account,
    Replica,
    closing,
    create_account,
    decide,
    eventually,
    limit_of,
    set_limits,
)
from tests.postgres import PostgresServer
from tests.servers import RedisServer

HOUR = 3_600


@pytest.fixture
async def database(tmp_path: Path, migrated_sqlite: Path) -> AsyncIterator[Database]:
    """SQLite only: the comparison does not depend on the kind of database."""
    shutil.copy(migrated_sqlite, tmp_path / "catalog.db")
    database = Database(f"sqlite:///{tmp_path}/catalog.db")
    yield database
    await database.close()


@pytest.fixture(params=["memory", "redis"])
async def limiter(request: pytest.FixtureRequest, clock: ManualClock) -> AsyncIterator[Limiter]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("redis_url")
    async with Limiter.connect(url, clock=clock, options=PATIENT) as limiter:
        yield limiter


@pytest.fixture
async def live_catalog(
    database: Database, peppers: Peppers, clock: ManualClock, limiter: Limiter
) -> AsyncIterator[LiveCatalog]:
    """A live catalog that applies its own changes, and has no background tasks."""
    live_catalog = LiveCatalog(database, peppers, override_store=limiter, clock=clock, lookup_seconds=PATIENCE_SECONDS)
    yield live_catalog
    await live_catalog.cache.close()


@pytest.fixture
def override_sync(database: Database, limiter: Limiter, clock: ManualClock) -> OverrideSync:
    return OverrideSync(DatabaseSource(database), limiter, clock)


@pytest.fixture
async def account(live_catalog: LiveCatalog) -> Account:
    return await create_account(live_catalog.catalog, limits="5/minute")


@pytest.fixture
async def caller(live_catalog: LiveCatalog, account: Account) -> Caller:
    return await live_catalog.cache.callers.find(account.text)


async def override(
    catalog: Catalog, account: Account, limit: Any = 50, subject: str = "s", resource: str = "r", seconds: int = HOUR
) -> Override:
    change = limit if isinstance(limit, str) else {"limit": limit}
    fields = {"tenant_id": account.tenant.id, "resource": resource, "subject": subject, "ttl_seconds": seconds}
    async with catalog.edit("test") as edit:
        return await edit.set_override({**fields, "limits": {"minute": change}})


async def delete(catalog: Catalog, one: Override) -> None:
    async with catalog.edit("test") as edit:
        await edit.delete(Override, one.id)


# --- Effect ----------------------------------------------------------------------------------------------------------


async def test_an_override_acts_from_when_it_is_set_until_it_is_deleted(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter
) -> None:
    assert await limit_of(caller, limiter) == 5
    one = await override(live_catalog.catalog, account, 50)
    assert await limit_of(caller, limiter) == 50
    assert await limit_of(caller, limiter, subject="somebody else") == 5
    await override(live_catalog.catalog, account, 70)
    assert await limit_of(caller, limiter) == 70
    await override(live_catalog.catalog, account, "blocked")
    assert not (await decide(caller, limiter)).allowed
    await delete(live_catalog.catalog, one)
    assert await limit_of(caller, limiter) == 5


async def test_an_override_ends_when_its_time_has_come(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter, clock: ManualClock
) -> None:
    await override(live_catalog.catalog, account, 50, seconds=10)
    clock.advance_us(9_900_000)
    assert await limit_of(caller, limiter) == 50
    clock.advance_us(200_000)
    assert await limit_of(caller, limiter) == 5


async def test_an_override_for_any_resource_gives_way_to_one_for_this_resource(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter
) -> None:
    await override(live_catalog.catalog, account, 50, resource="*")
    assert await limit_of(caller, limiter) == 50
    await override(live_catalog.catalog, account, 70, resource="r")
    assert await limit_of(caller, limiter) == 70


async def test_a_changed_plan_compiles_its_overrides_anew(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter
) -> None:
    """The override changes the limit. The window is that of the plan, and has changed."""
    await override(live_catalog.catalog, account, 50)
    window = {"name": "minute", "algorithm": "sliding_window_counter", "limit": 5, "window_seconds": 60}
    async with live_catalog.catalog.edit("test") as edit:
        await edit.update(Plan, account.plan.id, {"limits": [{**window, "window_seconds": 600}]})
    for _ in range(50):
        assert (await decide(caller, limiter)).allowed
    denied = await decide(caller, limiter)
    assert not denied.allowed
    assert denied.limit == 50
    assert denied.reset_after_ms is not None
    assert denied.reset_after_ms > 60_000


async def test_an_override_whose_limit_is_gone_does_nothing_and_comes_back_with_it(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter
) -> None:
    await override(live_catalog.catalog, account, 50)
    await set_limits(live_catalog.catalog, account, "7/hour")
    assert await limit_of(caller, limiter) == 7
    await set_limits(live_catalog.catalog, account, "5/minute")
    assert await limit_of(caller, limiter) == 50


async def test_an_override_that_no_longer_fits_its_plan_is_not_in_force(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a warning about it."""
    bucket = {"name": "bucket", "algorithm": "token_bucket", "bucket_capacity": 5, "refill_rate_per_sec": 1}
    async with live_catalog.catalog.edit("test") as edit:
        await edit.update(Plan, account.plan.id, {"limits": [bucket]})
    fields = {"tenant_id": account.tenant.id, "resource": "r", "subject": "s", "ttl_seconds": HOUR}
    async with live_catalog.catalog.edit("test") as edit:
        await edit.set_override({**fields, "limits": {"bucket": {"bucket_capacity": 100_000_000}}})
    assert await limit_of(caller, limiter) == 100_000_000
    async with live_catalog.catalog.edit("test") as edit:
        await edit.update(Plan, account.plan.id, {"limits": [{**bucket, "refill_rate_per_sec": "0.00001"}]})
    assert "overrides.invalid" in caplog.text
    assert await limit_of(caller, limiter) == 5


async def test_the_overrides_of_a_deleted_tenant_are_gone(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter
) -> None:
    await override(live_catalog.catalog, account, 50)
    async with live_catalog.catalog.edit("test") as edit:
        await edit.delete(Tenant, account.tenant.id)
    page = await limiter.list_overrides(tenant=account.tenant.id)
    assert page.overrides == []


async def test_overrides_are_set_where_the_tenant_has_its_lanes(
    database: Database, peppers: Peppers, clock: ManualClock, redis_url: str
) -> None:
    """The process that writes an override may never have had a request of this tenant."""
    here, there = (Limiter.connect(redis_url, clock=clock, options=PATIENT) for _ in range(2))
    shared = CatalogRedis(redis_url)

    def node_with(limiter: Limiter) -> LiveCatalog:
        def placed(tenant: Tenant) -> None:
            limiter.set_lanes(tenant.id, tenant.lane_layout)

        return LiveCatalog(
            database, peppers, catalog_redis=shared, override_store=limiter, clock=clock, on_tenant_loaded=placed
        )

    writer, reader = node_with(here), node_with(there)
    async with closing(writer.cache, reader.cache, shared, here, there):
        account = await create_account(writer.catalog)
        async with writer.catalog.edit("test") as edit:
            await edit.update(Tenant, account.tenant.id, {"lanes": 8})
        caller = await reader.cache.callers.find(account.text)
        for subject in ("a", "b", "c", "d"):
            await override(writer.catalog, account, 50, subject=subject)
        assert [await limit_of(caller, there, subject=subject) for subject in ("a", "b", "c", "d")] == [50] * 4


# --- Repair ----------------------------------------------------------------------------------------------------------


async def test_what_the_store_lost_is_set_again_with_what_is_left_of_its_time(
    live_catalog: LiveCatalog,
    account: Account,
    caller: Caller,
    limiter: Limiter,
    override_sync: OverrideSync,
    clock: ManualClock,
) -> None:
    for subject in ("a", "b", "c"):
        await override(live_catalog.catalog, account, 50, subject=subject)
    clock.advance_us(600 * 1_000_000)
    await limiter.clear_overrides(tenant=account.tenant.id)
    assert await limit_of(caller, limiter, subject="a") == 5
    assert await override_sync.sync_all() == 3
    assert await limit_of(caller, limiter, subject="a") == 50
    there = (await limiter.list_overrides(tenant=account.tenant.id)).overrides
    assert {round(each.expires_at - clock.now_us() / 1e6) for each in there} == {HOUR - 600}
    assert await override_sync.sync_all() == 0


async def test_strays_are_removed(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter, override_sync: OverrideSync
) -> None:
    await override(live_catalog.catalog, account, 50, subject="right")
    stray = {"limits": "5/minute", "ttl_seconds": HOUR, "tenant": account.tenant.id}
    await limiter.set_override("r", "stray", {"minute": "unlimited"}, **stray)  # type: ignore[arg-type]
    assert await override_sync.sync_all() == 1
    assert await limit_of(caller, limiter, subject="stray") == 5
    assert await limit_of(caller, limiter, subject="right") == 50


async def test_strays_of_a_tenant_that_has_no_override_any_more_are_removed(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter, override_sync: OverrideSync
) -> None:
    """A Redis that came back with its state from before the last override was deleted."""
    one = await override(live_catalog.catalog, account, "unlimited")
    await delete(live_catalog.catalog, one)
    stray = {"limits": "5/minute", "ttl_seconds": HOUR, "tenant": account.tenant.id}
    await limiter.set_override("r", "s", {"minute": "unlimited"}, **stray)  # type: ignore[arg-type]
    await override_sync.sync_all()
    assert await limit_of(caller, limiter) == 5


async def test_an_override_that_is_deleted_while_its_index_is_lost_does_not_act_on(
    database: Database, peppers: Peppers, clock: ManualClock, redis_url: str
) -> None:
    """The store does not list the override any more, but its key still exists."""
    limiter = Limiter.connect(redis_url, clock=clock, options=PATIENT)
    live_catalog = LiveCatalog(database, peppers, override_store=limiter, clock=clock)
    async with closing(live_catalog.cache, limiter):
        account = await create_account(live_catalog.catalog, limits="5/minute")
        caller = await live_catalog.cache.callers.find(account.text)
        one = await override(live_catalog.catalog, account, 50, subject="one")
        await override(live_catalog.catalog, account, 50, subject="two")
        with redis_py.Redis.from_url(redis_url) as raw:
            assert raw.delete(f"lf:{{{account.tenant.id}}}:x") == 1
        await delete(live_catalog.catalog, one)
        assert await limit_of(caller, limiter, subject="one") == 5
        assert await limit_of(caller, limiter, subject="two") == 50


async def test_what_the_store_has_with_other_numbers_is_put_right(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter, override_sync: OverrideSync
) -> None:
    await override(live_catalog.catalog, account, 50)
    wrong = {"limits": "5/minute", "ttl_seconds": HOUR, "tenant": account.tenant.id}
    await limiter.set_override("r", "s", {"minute": {"limit": 9}}, **wrong)  # type: ignore[arg-type]
    assert await override_sync.sync_all() == 1
    assert await limit_of(caller, limiter) == 50


async def test_more_overrides_than_fit_on_a_page_are_all_mirrored(
    live_catalog: LiveCatalog,
    account: Account,
    limiter: Limiter,
    override_sync: OverrideSync,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("limitforge.catalog.live.overrides.override_sync.OVERRIDES_PER_PAGE", 3)
    async with live_catalog.catalog.edit("test") as edit:
        for index in range(20):
            fields = {"tenant_id": account.tenant.id, "resource": "r", "subject": f"s{index}", "ttl_seconds": HOUR}
            await edit.set_override({**fields, "limits": {"minute": "unlimited"}})
    assert await override_sync.sync_all() == 0
    await limiter.clear_overrides(tenant=account.tenant.id)
    assert await override_sync.sync_all() == 20


# --- Races -----------------------------------------------------------------------------------------------------------


class SlowSink:
    """A limiter whose next `set` or `delete` waits until it is released."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self.hold: str | None = None
        self.waiting = asyncio.Event()
        self.go = asyncio.Event()

    async def set_override(
        self,
        resource: str,
        subject: str,
        changes: Mapping[str, Any],
        *,
        limits: LimitsLike,
        ttl_seconds: float,
        tenant: str,
    ) -> object:
        await self._held("set")
        return await self._limiter.set_override(
            resource, subject, changes, limits=limits, ttl_seconds=ttl_seconds, tenant=tenant
        )

    async def delete_override(self, resource: str, subject: str, *, tenant: str) -> bool:
        await self._held("delete")
        return await self._limiter.delete_override(resource, subject, tenant=tenant)

    async def list_overrides(self, *, tenant: str, cursor: str | None, page: int) -> OverridePage:
        return await self._limiter.list_overrides(tenant=tenant, cursor=cursor, page=page)

    async def missing_overrides(self, places: Iterable[tuple[str, str, str]]) -> list[int]:
        return await self._limiter.missing_overrides(places)

    async def _held(self, what: str) -> None:
        if self.hold == what:
            self.hold = None
            self.waiting.set()
            await self.go.wait()


@pytest.fixture
def slow(limiter: Limiter) -> SlowSink:
    return SlowSink(limiter)


@pytest.fixture
def slow_override_sync(database: Database, slow: SlowSink, clock: ManualClock) -> OverrideSync:
    return OverrideSync(DatabaseSource(database), slow, clock)


async def test_an_override_that_is_deleted_while_it_is_put_right_does_not_come_back(
    live_catalog: LiveCatalog,
    account: Account,
    caller: Caller,
    limiter: Limiter,
    slow: SlowSink,
    slow_override_sync: OverrideSync,
) -> None:
    one = await override(live_catalog.catalog, account, 50)
    await limiter.clear_overrides(tenant=account.tenant.id)
    slow.hold = "set"
    work = asyncio.create_task(slow_override_sync.sync_all())
    await slow.waiting.wait()
    await delete(live_catalog.catalog, one)
    slow.go.set()
    await work
    assert await limit_of(caller, limiter) == 5


async def test_an_override_that_is_changed_while_it_is_put_right_is_the_new_one_in_the_end(
    live_catalog: LiveCatalog,
    account: Account,
    caller: Caller,
    limiter: Limiter,
    slow: SlowSink,
    slow_override_sync: OverrideSync,
) -> None:
    await override(live_catalog.catalog, account, 50)
    await limiter.clear_overrides(tenant=account.tenant.id)
    slow.hold = "set"
    work = asyncio.create_task(slow_override_sync.sync_all())
    await slow.waiting.wait()
    await override(live_catalog.catalog, account, 70)
    slow.go.set()
    await work
    assert await limit_of(caller, limiter) == 70


async def test_an_override_that_is_set_while_a_stray_in_its_place_is_removed_stays(
    live_catalog: LiveCatalog,
    account: Account,
    caller: Caller,
    limiter: Limiter,
    slow: SlowSink,
    slow_override_sync: OverrideSync,
) -> None:
    await override(live_catalog.catalog, account, 50, subject="other")
    stray = {"limits": "5/minute", "ttl_seconds": HOUR, "tenant": account.tenant.id}
    await limiter.set_override("r", "s", {"minute": "unlimited"}, **stray)  # type: ignore[arg-type]
    slow.hold = "delete"
    work = asyncio.create_task(slow_override_sync.sync_all())
    await slow.waiting.wait()
    await override(live_catalog.catalog, account, 70)
    slow.go.set()
    await work
    assert await limit_of(caller, limiter) == 70


async def test_two_concurrent_syncs_end_with_the_state_of_the_database(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter, override_sync: OverrideSync
) -> None:
    for index in range(10):
        await override(live_catalog.catalog, account, 50 + index, subject=f"s{index}")
    await limiter.clear_overrides(tenant=account.tenant.id)
    await asyncio.gather(
        override_sync.sync_all(), override_sync.sync_all(), override_sync.sync_tenant(account.tenant.id, force=True)
    )
    assert [await limit_of(caller, limiter, subject=f"s{index}") for index in range(10)] == list(range(50, 60))


# --- By itself -------------------------------------------------------------------------------------------------------


async def limit_now(replica: Replica, text: str) -> int | None:
    """Return the current limit, or None while Redis is unreachable."""
    with suppress(StoreUnavailable):
        return await replica.limit(text)
    return None


@pytest.mark.parametrize("how", ["emptied", "restarted"])
async def test_a_redis_that_lost_everything_gets_the_overrides_back_by_itself(
    how: str,
    database: Database,
    peppers: Peppers,
    own_redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    """After a flush within the interval, after a restart as soon as the subscription is active again."""
    monkeypatch.setattr(live_catalog_module, "SYNC_OVERRIDES_SECONDS", 0.5 if how == "emptied" else 600)
    url = own_redis_server.url
    async with Replica(str(database.url), url, peppers=peppers, limiter_url=url) as replica:
        account = await create_account(replica.catalog)
        await eventually(lambda: "redis" in replica.live.status().listening)
        await override(replica.catalog, account, 50)
        assert await replica.limit(account.text) == 50
        if how == "emptied":
            own_redis_server.flush()
        else:
            own_redis_server.restart()

        async def is_back() -> bool:
            return await limit_now(replica, account.text) == 50

        record_property("seconds", await eventually(is_back))


@pytest.mark.slow
async def test_overrides_are_set_when_the_database_is_back_if_redis_lost_them_while_it_was_away(
    peppers: Peppers,
    own_redis_server: RedisServer,
    own_postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    """The process that took the lock failed. The others must not wait for the lock's end or the next interval."""
    monkeypatch.setattr(live_catalog_module, "SYNC_OVERRIDES_SECONDS", 40)
    database = Database(own_postgres_server.url)
    async with closing(database):
        await database.upgrade()
    url = own_redis_server.url
    async with Replica(own_postgres_server.url, url, peppers=peppers, limiter_url=url) as replica:
        account = await create_account(replica.catalog)
        await override(replica.catalog, account, 50)
        own_postgres_server.kill()
        await eventually(lambda: replica.live.status().database == "degraded")
        own_redis_server.restart()
        await asyncio.sleep(1.5)
        own_postgres_server.restart()

        async def is_back() -> bool:
            return await limit_now(replica, account.text) == 50

        record_property("seconds", await eventually(is_back, 15))


async def test_what_the_store_refuses_does_not_undo_a_change_and_is_tried_again(
    database: Database, peppers: Peppers, clock: ManualClock, limiter: Limiter
) -> None:
    class Full(SlowSink):
        is_full = True

        async def set_override(self, *args: Any, **kwargs: Any) -> object:
            if self.is_full:
                raise CatalogUnavailable("the test says so")
            return await super().set_override(*args, **kwargs)

    sink = Full(limiter)
    live_catalog = LiveCatalog(database, peppers, override_store=sink, clock=clock)
    account = await create_account(live_catalog.catalog)
    caller = await live_catalog.cache.callers.find(account.text)
    await override(live_catalog.catalog, account, 50)
    assert await limit_of(caller, limiter) == 5
    with suppress(CatalogUnavailable):
        await live_catalog.catch_up()
    sink.is_full = False
    await live_catalog.catch_up()
    assert await limit_of(caller, limiter) == 50
    await live_catalog.cache.close()


async def test_an_override_of_a_limit_that_no_plan_has_is_refused_when_it_is_set(
    live_catalog: LiveCatalog, account: Account
) -> None:
    fields = {"tenant_id": account.tenant.id, "resource": "r", "subject": "s", "ttl_seconds": HOUR}
    with pytest.raises(InvalidInput, match="nothing"):
        async with live_catalog.catalog.edit("test") as edit:
            await edit.set_override({**fields, "limits": {"nothing": "unlimited"}})
