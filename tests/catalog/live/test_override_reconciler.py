"""Overrides that a Redis lost without a message are set again, soon, and with bounded work."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from limitforge import Limiter, ManualClock, Request, StoreOptions
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.live import live_catalog as live_catalog_module
from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.live.database_source import DatabaseSource
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.catalog.live.overrides import reconciler as reconciler_module
from limitforge.catalog.live.overrides.override_sync import OverrideSync
from limitforge.catalog.live.overrides.reconciler import OverrideReconciler
from limitforge.catalog.model import Override, Plan, Tenant
from limitforge.errors import StoreUnavailable
from limitforge.stores.redis.catalog_redis import CatalogRedis
from limitforge.stores.redis.topology.hash_slots import hash_slot
from tests.catalog.replicas import PATIENT, Account, Replica, closing, create_account, decide, eventually, limit_of
from tests.catalog.reused_database import ReusedDatabase
from tests.proxy import CloseConnections, Proxy
from tests.servers import RedisServer
from tests.topologies import RedisCluster

HOUR = 3_600
SUBJECTS = tuple(f"s{number}" for number in range(5))


@pytest.fixture
async def database(tmp_path: Path, migrated_sqlite: Path) -> AsyncIterator[Database]:
    shutil.copy(migrated_sqlite, tmp_path / "catalog.db")
    database = Database(f"sqlite:///{tmp_path}/catalog.db")
    yield database
    await database.close()


@pytest.fixture
def raw(redis_server: RedisServer) -> Iterator[Any]:
    """A client that changes keys without a message."""
    with redis_py.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
async def limiter(redis_url: str, clock: ManualClock) -> AsyncIterator[Limiter]:
    async with Limiter.connect(redis_url, clock=clock, options=PATIENT) as limiter:
        yield limiter


@pytest.fixture
async def shared(redis_url: str) -> AsyncIterator[CatalogRedis]:
    shared = CatalogRedis(redis_url)
    yield shared
    await shared.close()


@pytest.fixture
async def live_catalog(
    database: Database, peppers: Peppers, clock: ManualClock, limiter: Limiter, shared: CatalogRedis
) -> AsyncIterator[LiveCatalog]:
    """A live catalog that applies its own changes, and has no background tasks."""

    def placed(tenant: Tenant) -> None:
        limiter.set_lanes(tenant.id, tenant.lane_layout)

    live_catalog = LiveCatalog(
        database, peppers, catalog_redis=shared, override_store=limiter, clock=clock, on_tenant_loaded=placed
    )
    yield live_catalog
    await live_catalog.cache.close()


@pytest.fixture
def reconciler(live_catalog: LiveCatalog) -> OverrideReconciler:
    assert live_catalog._reconciler is not None
    return live_catalog._reconciler


@pytest.fixture
async def account(live_catalog: LiveCatalog) -> Account:
    return await create_account(live_catalog.catalog, limits="5/minute")


@pytest.fixture
async def caller(live_catalog: LiveCatalog, account: Account) -> Caller:
    return await live_catalog.cache.callers.find(account.text)


async def override(
    catalog: Catalog, account: Account, *subjects: str, limit: Any = 50, resource: str = "r", seconds: int = HOUR
) -> list[Override]:
    """Set an override for each subject, in one transaction."""
    change = limit if isinstance(limit, str) else {"limit": limit}
    fields = {"tenant_id": account.tenant.id, "resource": resource, "ttl_seconds": seconds}
    async with catalog.edit("test") as edit:
        return [await edit.set_override({**fields, "subject": each, "limits": {"minute": change}}) for each in subjects]


async def limits_of(caller: Caller, limiter: Limiter, subjects: Iterable[str] = SUBJECTS) -> list[int | None]:
    return [await limit_of(caller, limiter, subject=subject) for subject in subjects]


def lose(raw: Any, what: str) -> None:
    """Drop keys as eviction does: without a message."""
    patterns = {"index": ["*}:x"], "key": ["*}:o:*"], "both": ["*}:x", "*}:o:*"], "one key": ["*}:o:s3"]}
    if what == "everything":
        raw.flushall()
        return
    found = [key for pattern in patterns[what] for key in raw.scan_iter(match=f"lf:{pattern}")]
    assert found
    raw.delete(*found)


LOSSES = {"index": 5, "key": 5, "both": 5, "one key": 1, "everything": 5}


# --- One step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", LOSSES)
async def test_one_step_sets_what_was_lost_again(
    what: str,
    live_catalog: LiveCatalog,
    account: Account,
    caller: Caller,
    limiter: Limiter,
    raw: Any,
    reconciler: OverrideReconciler,
) -> None:
    await override(live_catalog.catalog, account, *SUBJECTS)
    lose(raw, what)
    assert len((await limiter.list_overrides(tenant=account.tenant.id)).overrides) == 5 - LOSSES[what]
    await reconciler.step()
    assert await limits_of(caller, limiter) == [50] * 5
    assert len((await limiter.list_overrides(tenant=account.tenant.id)).overrides) == 5
    assert reconciler.status().restored == live_catalog.status().overrides.restored == LOSSES[what]
    await reconciler.step()
    assert reconciler.status().restored == LOSSES[what]
    assert reconciler.status().passes == 2


async def test_a_restored_override_ends_when_the_catalog_says_so(
    live_catalog: LiveCatalog,
    account: Account,
    caller: Caller,
    limiter: Limiter,
    raw: Any,
    reconciler: OverrideReconciler,
    clock: ManualClock,
) -> None:
    await override(live_catalog.catalog, account, *SUBJECTS, seconds=600)
    clock.advance_us(500 * 1_000_000)
    raw.flushall()
    await reconciler.step()
    clock.advance_us(99 * 1_000_000)
    assert await limits_of(caller, limiter) == [50] * 5
    clock.advance_us(2 * 1_000_000)
    assert await limits_of(caller, limiter) == [5] * 5
    raw.flushall()
    await reconciler.step()
    assert await limits_of(caller, limiter) == [5] * 5
    assert reconciler.status().restored == 5


async def test_one_of_two_overrides_of_a_subject_is_missed(
    live_catalog: LiveCatalog, account: Account, caller: Caller, limiter: Limiter, reconciler: OverrideReconciler
) -> None:
    """This is the state after a failover to a replica that had not received the second."""
    await override(live_catalog.catalog, account, "s", limit=50, resource="*")
    await override(live_catalog.catalog, account, "s", limit=70)
    await limiter.delete_override("r", "s", tenant=account.tenant.id)
    assert await limit_of(caller, limiter) == 50
    await reconciler.step()
    assert await limit_of(caller, limiter) == 70
    assert reconciler.status().restored == 1


async def test_a_tenant_with_lanes_gets_its_overrides_back_in_each_lane(
    live_catalog: LiveCatalog,
    account: Account,
    limiter: Limiter,
    raw: Any,
    database: Database,
    clock: ManualClock,
    redis_url: str,
) -> None:
    """This also holds for a process that has never had a request of this tenant."""
    async with live_catalog.catalog.edit("test") as edit:
        await edit.update(Tenant, account.tenant.id, {"lanes": 8})
    await override(live_catalog.catalog, account, *SUBJECTS)
    raw.flushall()
    async with Limiter.connect(redis_url, clock=clock, options=PATIENT) as other:

        def placed(tenant: Tenant) -> None:
            other.set_lanes(tenant.id, tenant.lane_layout)

        source = DatabaseSource(database)
        reconciler = OverrideReconciler(source, other, OverrideSync(source, other, clock, placed), clock)
        await reconciler.step()
        assert reconciler.status().restored == 5
        await reconciler.step()
        assert reconciler.status().restored == 5
    caller = await live_catalog.cache.callers.find(account.text)
    assert await limits_of(caller, limiter) == [50] * 5


# --- Not lost --------------------------------------------------------------------------------------------------------


async def test_an_override_whose_change_is_not_published_yet_is_not_lost(
    database: Database,
    peppers: Peppers,
    clock: ManualClock,
    live_catalog: LiveCatalog,
    account: Account,
    limiter: Limiter,
    reconciler: OverrideReconciler,
) -> None:
    """The command line does not publish its changes: a process of the service does."""
    writer = Catalog(database, peppers=peppers, clock=clock)
    await override(writer, account, *SUBJECTS)
    await reconciler.step()
    assert reconciler.status().restored == 0
    clock.advance_us(1_000_000)
    assert live_catalog._relay is not None
    await live_catalog._relay.publish_pending()
    assert await limits_of(await live_catalog.cache.callers.find(account.text), limiter) == [50] * 5
    await reconciler.step()
    assert reconciler.status().restored == 0


async def test_a_process_that_can_not_read_the_catalog_lets_another_one_lead(
    live_catalog: LiveCatalog,
    peppers: Peppers,
    clock: ManualClock,
    limiter: Limiter,
    shared: CatalogRedis,
    account: Account,
    redis_url: str,
) -> None:
    await override(live_catalog.catalog, account, *SUBJECTS)
    away = Database("postgresql://limitforge@127.0.0.1:1/none")
    async with closing(away):
        cut_off = LiveCatalog(away, peppers, catalog_redis=shared, override_store=limiter, clock=clock)
        assert cut_off._reconciler is not None
        assert live_catalog._reconciler is not None
        await cut_off._reconciler.step()
        with redis_py.Redis.from_url(redis_url) as raw:
            lose(raw, "both")
        await live_catalog._reconciler.step()
        assert live_catalog._reconciler.status().restored == len(SUBJECTS)
        await cut_off.cache.close()


async def test_an_override_that_can_not_be_in_force_is_not_tried_with_each_step(
    live_catalog: LiveCatalog,
    account: Account,
    reconciler: OverrideReconciler,
    database: Database,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await override(live_catalog.catalog, account, *SUBJECTS)
    async with live_catalog.catalog.edit("test") as edit:
        await edit.update(Plan, account.plan.id, {"limits": "7/hour"})
    await reconciler.step()
    counted = count_statements(database)
    for _ in range(3):
        await reconciler.step()
    assert len(counted) == 3  # a page each, and nothing else
    assert reconciler.pause_seconds() >= reconciler_module.PAUSE_SECONDS
    assert reconciler.status().restored == 0
    assert "restored" not in caplog.text


def count_statements(database: Database) -> list[str]:
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.lstrip().upper().startswith("SELECT"):
            statements.append(statement)

    event.listen(database._engine.sync_engine, "before_cursor_execute", note)
    return statements


# --- Bounded work ----------------------------------------------------------------------------------------------------


async def test_a_step_compares_a_page_and_the_next_step_the_next_page(
    live_catalog: LiveCatalog,
    account: Account,
    caller: Caller,
    limiter: Limiter,
    raw: Any,
    reconciler: OverrideReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconciler_module, "OVERRIDES_PER_STEP", 10)
    subjects = [f"s{number:02}" for number in range(35)]
    other = await create_account(live_catalog.catalog, "other")
    await override(live_catalog.catalog, account, *subjects[:18])
    await override(live_catalog.catalog, other, *subjects[18:])
    raw.flushall()
    restored = []
    for _ in range(4):
        await reconciler.step()
        restored.append(reconciler.status().restored)
    assert restored == [10, 20, 30, 35]
    assert reconciler.status().passes == 1
    assert await limits_of(caller, limiter, subjects[:18]) == [50] * 18
    assert await limits_of(await live_catalog.cache.callers.find(other.text), limiter, subjects[18:]) == [50] * 17


async def test_a_page_of_which_nothing_is_lost_costs_one_query_and_a_few_calls(
    live_catalog: LiveCatalog,
    account: Account,
    raw: Any,
    reconciler: OverrideReconciler,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconciler_module, "OVERRIDES_PER_STEP", 20)
    monkeypatch.setattr(reconciler_module, "TARGETS_PER_CALL", 2)
    accounts = [account, *[await create_account(live_catalog.catalog, f"tenant-{number}") for number in range(6)]]
    for each in accounts:
        await override(live_catalog.catalog, each, *(f"s{number:02}" for number in range(3)))
    await reconciler.step()  # opens its connections
    statements = count_statements(database)
    before = calls_of(raw)
    await reconciler.step()
    await reconciler.step()
    assert len(statements) == 2  # 21 overrides are two pages
    assert calls_of(raw) - before <= 2 * 10 + 2  # a page is ten calls; one renews the claim
    assert reconciler.status().restored == 0


def calls_of(raw: Any) -> int:
    """Return the number of script calls."""
    stats = raw.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha", "fcall", "fcall_ro"))


async def test_it_hurries_while_overrides_get_lost_and_rests_afterwards(
    live_catalog: LiveCatalog,
    account: Account,
    raw: Any,
    reconciler: OverrideReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconciler_module, "OVERRIDES_PER_STEP", 2)
    monkeypatch.setattr(reconciler_module, "PAUSE_SECONDS", 1_000.0)
    monkeypatch.setattr(reconciler_module, "FAST_PASS_SECONDS", 300.0)
    await override(live_catalog.catalog, account, *SUBJECTS)
    for _ in range(3):
        await reconciler.step()
    assert reconciler.pause_seconds() == 1_000
    raw.flushall()
    await reconciler.step()
    assert reconciler.pause_seconds() == 100  # three pages a pass
    await reconciler.step()
    await reconciler.step()
    assert reconciler.pause_seconds() == 100  # another pass, in which nothing is missing
    for _ in range(3):
        await reconciler.step()
    assert reconciler.pause_seconds() == 1_000


async def test_one_process_of_many_reconciles_and_another_takes_over_when_it_is_gone(
    live_catalog: LiveCatalog,
    account: Account,
    shared: CatalogRedis,
    limiter: Limiter,
    database: Database,
    clock: ManualClock,
    raw: Any,
) -> None:
    await override(live_catalog.catalog, account, *SUBJECTS)
    source = DatabaseSource(database)
    one, two = (
        OverrideReconciler(source, limiter, OverrideSync(source, limiter, clock), clock, catalog_redis=shared)
        for _ in range(2)
    )
    for _ in range(3):
        await one.step()
        await two.step()
    assert [each.status().passes for each in (one, two)] == [3, 0]
    assert 0 < raw.pttl("lf:{%sweep}:") <= 1_000 * reconciler_module.LOCK_SECONDS
    raw.delete("lf:{%sweep}:")  # as when its time is over
    await two.step()
    await one.step()
    assert [each.status().passes for each in (one, two)] == [3, 1]


# --- Races -----------------------------------------------------------------------------------------------------------


class HeldSink:
    """A limiter whose next `set_override` waits until it is released."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self.waiting = asyncio.Event()
        self.go = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._limiter, name)

    async def set_override(self, *args: Any, **kwargs: Any) -> object:
        self.waiting.set()
        await self.go.wait()
        return await self._limiter.set_override(*args, **kwargs)


@pytest.mark.parametrize("change", ["deleted", "changed", "plan"])
async def test_what_changes_while_it_is_restored_is_as_the_catalog_has_it_in_the_end(
    change: str,
    live_catalog: LiveCatalog,
    account: Account,
    caller: Caller,
    limiter: Limiter,
    raw: Any,
    database: Database,
) -> None:
    (one,) = await override(live_catalog.catalog, account, "s")
    raw.flushall()
    sink, source = HeldSink(limiter), DatabaseSource(database)
    reconciler = OverrideReconciler(source, sink, OverrideSync(source, sink, live_catalog._clock), live_catalog._clock)
    work = asyncio.create_task(reconciler.step())
    await sink.waiting.wait()
    if change == "deleted":
        async with live_catalog.catalog.edit("test") as edit:
            await edit.delete(Override, one.id)
    elif change == "changed":
        await override(live_catalog.catalog, account, "s", limit=70)
    else:
        async with live_catalog.catalog.edit("test") as edit:
            await edit.update(Plan, account.plan.id, {"limits": "7/hour"})
    sink.go.set()
    await work
    assert await limit_of(caller, limiter) == {"deleted": 5, "changed": 70, "plan": 7}[change]
    assert len((await limiter.list_overrides(tenant=account.tenant.id)).overrides) == (change == "changed")


# --- By itself -------------------------------------------------------------------------------------------------------


BLOCKED = tuple(f"blocked-{number}" for number in range(50))
FEW = BLOCKED[:10]


def flood(server: RedisServer, keys: int = 2_000) -> None:
    """Write about 2 MB of other keys, with a TTL like ours."""
    with redis_py.Redis.from_url(server.url) as client:
        pipeline = client.pipeline(transaction=False)
        for _ in range(keys):
            pipeline.set(f"junk:{uuid4().hex}", b"x" * 1_000, ex=HOUR)
        pipeline.execute()


def evicted_keys(server: RedisServer) -> int:
    with redis_py.Redis.from_url(server.url) as client:
        return int(client.info("stats")["evicted_keys"])


def limit_memory(server: RedisServer, policy: str, more: int = 4_000_000) -> None:
    with redis_py.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + more)


async def admitted(replica: Replica, text: str, blocked: Sequence[str] = BLOCKED) -> list[str]:
    """Return the blocked subjects that are allowed now; all of them while Redis is unreachable."""
    caller = replica.live.cache.callers.get(text) or await replica.live.cache.callers.find(text)
    try:
        return [each for each in blocked if (await decide(caller, replica.limiter, subject=each)).allowed]
    except StoreUnavailable:
        return list(blocked)


@pytest.mark.parametrize(
    "policy",
    [
        "allkeys-lru",
        "volatile-random",
        pytest.param("allkeys-lfu", marks=pytest.mark.soak),
        pytest.param("allkeys-random", marks=pytest.mark.soak),
        pytest.param("volatile-lru", marks=pytest.mark.soak),
    ],
)
async def test_blocked_subjects_are_blocked_again_after_redis_evicted_their_overrides(
    policy: str, database: Database, peppers: Peppers, own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two processes reconciles. Each flood evicts some overrides."""
    url = own_redis_server.url
    async with (
        Replica(str(database.url), url, peppers=peppers, limiter_url=url) as one,
        Replica(str(database.url), url, peppers=peppers, limiter_url=url) as two,
    ):
        account = await create_account(one.catalog)
        await override(one.catalog, account, *BLOCKED, limit="blocked", resource="*")
        assert await admitted(one, account.text) == []
        limit_memory(own_redis_server, policy)

        def restored() -> int:
            return sum(each.live.status().overrides.restored for each in (one, two))

        async def is_restored() -> bool:
            await asyncio.to_thread(flood, own_redis_server)
            return restored() >= 5

        await eventually(is_restored)
        assert evicted_keys(own_redis_server) > 0

        async def is_blocked() -> bool:
            return not await admitted(two, account.text)

        await eventually(is_blocked)
        assert f"policy={policy}" in caplog.text
        assert "overrides.restored: " in caplog.text
        assert account.tenant.id in caplog.text
        assert "blocked-" not in caplog.text
        known = [each.live.status().overrides.evicting for each in (one, two)]
        assert {name for policies in known for name in policies.values()} == {policy}  # one asks once a minute


@pytest.mark.parametrize("policy", ["noeviction", "volatile-ttl"])
async def test_a_policy_that_the_docs_call_safe_keeps_overrides(
    policy: str, own_redis_server: RedisServer, clock: ManualClock
) -> None:
    """Nothing sets them again here. `volatile-ttl` evicts keys with less time left first: windows of a minute."""
    options = StoreOptions(deadline_ms=30_000, failure="raise", breaker_failures=10**6)
    async with Limiter.connect(own_redis_server.url, options=options) as limiter:
        for subject in BLOCKED:
            await limiter.set_override("r", subject, {"a": "blocked"}, limits="a=5/minute", ttl_seconds=HOUR)
        limit_memory(own_redis_server, policy, more=500_000)
        refused = 0
        for number in range(20):
            requests = [
                Request(resource="r", subject=f"{number}-{each}", limits="a=5/minute", cost=1) for each in range(500)
            ]
            refused += sum(isinstance(answer, StoreUnavailable) for answer in await limiter.check_many(requests))
        evicted = evicted_keys(own_redis_server)
        assert (evicted > 1_000, refused > 1_000) == (policy != "noeviction", policy == "noeviction")
        for subject in BLOCKED:
            assert not (await limiter.check("r", subject, limits="a=5/minute")).allowed


@pytest.mark.parametrize("how", ["flushed", "restarted", "replaced by an empty one"])
async def test_a_redis_that_lost_everything_gets_its_overrides_back_without_waiting_for_the_minute(
    how: str, database: Database, peppers: Peppers, own_redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_catalog_module, "SYNC_OVERRIDES_SECONDS", 600)
    proxy = Proxy(own_redis_server.port)
    with RedisServer() as empty, contextlib.closing(proxy):
        async with Replica(str(database.url), proxy.url, peppers=peppers, limiter_url=proxy.url) as replica:
            account = await create_account(replica.catalog)
            await override(replica.catalog, account, *FEW, limit="blocked", resource="*")
            await eventually(lambda: replica.live.status().overrides.passes)
            if how == "flushed":
                own_redis_server.flush()
            elif how == "restarted":
                own_redis_server.restart()
            else:  # as after a failover to a replica that had nothing yet
                with proxy.in_mode(CloseConnections()):
                    proxy._target = empty.port

            async def is_blocked() -> bool:
                return not await admitted(replica, account.text, FEW)

            await eventually(is_blocked)


async def test_overrides_on_each_master_of_a_cluster_come_back(
    database: Database, peppers: Peppers, cluster_servers: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant has lanes, others have none, and each master loses its own part."""
    monkeypatch.setattr(live_catalog_module, "SYNC_OVERRIDES_SECONDS", 600)
    url = cluster_servers.url

    def placed(tenant: Tenant) -> None:
        replica.limiter.set_lanes(tenant.id, tenant.lane_layout)

    replica = Replica(str(database.url), url, peppers=peppers, limiter_url=url, on_tenant_loaded=placed)
    async with replica:
        accounts = [await create_account(replica.catalog, f"tenant-{number}") for number in range(6)]
        async with replica.catalog.edit("test") as edit:
            await edit.update(Tenant, accounts[0].tenant.id, {"lanes": 16})
        for each in accounts:
            await override(replica.catalog, each, *FEW, limit="blocked", resource="*")
        for master in cluster_servers.masters():
            before = replica.live.status().overrides.restored
            master.flush()
            await eventually(lambda before=before: replica.live.status().overrides.restored > before)
        for each in accounts:

            async def is_blocked(text: str = each.text) -> bool:
                return not await admitted(replica, text, FEW)

            await eventually(is_blocked)
        assert replica.live.status().overrides.restored >= 60


async def test_a_dead_master_does_not_keep_the_overrides_of_the_others_from_coming_back(
    database: Database, peppers: Peppers, clock: ManualClock
) -> None:
    options = StoreOptions(deadline_ms=5_000, failure="raise", breaker_failures=1)
    with RedisCluster(masters=3, replicas=0) as servers:
        async with Limiter.connect(servers.url, clock=clock, options=options) as limiter:
            shared = CatalogRedis(servers.url)
            live_catalog = LiveCatalog(database, peppers, catalog_redis=shared, override_store=limiter, clock=clock)
            source = DatabaseSource(database)
            reconciler = OverrideReconciler(source, limiter, OverrideSync(source, limiter, clock), clock)
            accounts = [await create_account(live_catalog.catalog, f"tenant-{number}") for number in range(8)]
            for each in accounts:
                await override(live_catalog.catalog, each, "s")
            homes = {each.tenant.id: servers.master_of(slot_of(each.tenant.id)) for each in accounts}
            dead = homes[accounts[0].tenant.id]
            for master in servers.masters():
                master.flush()
            dead.kill()
            await reconciler.step()
            living = [each for each in accounts if homes[each.tenant.id] is not dead]
            assert living
            for each in living:
                assert await limit_of(await live_catalog.cache.callers.find(each.text), limiter) == 50
            assert reconciler.status().restored == len(living)
            await live_catalog.cache.close()
            await shared.close()


def slot_of(tenant_id: str) -> int:
    return hash_slot(f"lf:{{{tenant_id}}}:")


async def test_overrides_come_back_on_postgres_too(
    peppers: Peppers, reused_postgres: ReusedDatabase, redis_url: str, raw: Any
) -> None:
    url = await reused_postgres.emptied()
    async with Replica(url, redis_url, peppers=peppers, limiter_url=redis_url) as replica:
        account = await create_account(replica.catalog)
        await override(replica.catalog, account, *FEW, limit="blocked", resource="*")
        lose(raw, "both")

        async def is_blocked() -> bool:
            return not await admitted(replica, account.text, FEW)

        await eventually(is_blocked)
        await eventually(lambda: replica.live.status().overrides.restored == len(FEW))


# --- Any order of changes and losses ---------------------------------------------------------------------------------


MOVES = ["set", "delete", "plan", "index", "key", "both", "one key", "everything", "step"]


@given(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 4), st.integers(6, 90)), max_size=25))
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_after_any_changes_and_losses_a_step_makes_decisions_follow_the_catalog(
    moves: list[tuple[str, int, int]],
    tmp_path: Path,
    migrated_sqlite: Path,
    redis_server: RedisServer,
    peppers: Peppers,
) -> None:
    asyncio.run(_play(moves, tmp_path, migrated_sqlite, redis_server, peppers))


async def _play(
    moves: list[tuple[str, int, int]], folder: Path, migrated: Path, server: RedisServer, peppers: Peppers
) -> None:
    server.flush()
    shutil.copy(migrated, folder / "played.db")
    clock, database, shared = ManualClock(), Database(f"sqlite:///{folder}/played.db"), CatalogRedis(server.url)
    limiter = Limiter.connect(server.url, clock=clock, options=PATIENT)
    live_catalog = LiveCatalog(database, peppers, catalog_redis=shared, override_store=limiter, clock=clock)
    wanted: dict[str, tuple[Override, int]] = {}
    with redis_py.Redis.from_url(server.url) as raw:
        async with closing(live_catalog.cache, shared, limiter, database):
            account, plan = await create_account(live_catalog.catalog, limits="5/minute"), 5
            caller = await live_catalog.cache.callers.find(account.text)
            for move, index, number in [*moves, ("step", 0, 0)]:
                subject = SUBJECTS[index]
                if move == "set":
                    (one,) = await override(live_catalog.catalog, account, subject, limit=number)
                    wanted[subject] = (one, number)
                elif move == "delete" and subject in wanted:
                    async with live_catalog.catalog.edit("test") as edit:
                        await edit.delete(Override, wanted.pop(subject)[0].id)
                elif move == "plan":
                    plan = 5 if plan != 5 else number
                    limit = {"name": "minute", "algorithm": "sliding_window_counter", "limit": plan}
                    async with live_catalog.catalog.edit("test") as edit:
                        await edit.update(Plan, account.plan.id, {"limits": [{**limit, "window_seconds": 60}]})
                elif move in LOSSES:
                    with contextlib.suppress(AssertionError):  # there may be nothing to lose
                        lose(raw, move)
                elif move == "step":
                    assert live_catalog._reconciler is not None
                    await live_catalog._reconciler.step()
                    for each in SUBJECTS:
                        assert await limit_of(caller, limiter, subject=each) == wanted.get(each, (None, plan))[1]
