"""Copies in Redis: an older one never replaces a newer one, and invalid ones are never used."""

import asyncio
import shutil
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis as redis_py
from hypothesis import given, settings
from hypothesis import strategies as st

from limitforge import Lanes, ManualClock
from limitforge.catalog.credentials import PREFIXES, Credential, Peppers
from limitforge.catalog.database import outbox
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.history import Stamp
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.lookup_limiter import LookupLimiter
from limitforge.catalog.live.database_source import DatabaseSource
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.catalog.live.shared_copies import COPY_FORMAT, SharedCopies
from limitforge.catalog.live.signing import Signer
from limitforge.catalog.model import OPERATOR, Key, Plan, Policy, Tenant, TenantConfig
from limitforge.catalog.snapshot import Snapshot
from limitforge.core.clock import SystemClock
from limitforge.core.limits import Mode
from limitforge.errors import CatalogError, InvalidInput, StoreError, StoreUnavailable, TooManyUnknownKeys, UnknownKey
from limitforge.stores.redis.catalog_redis import CatalogRedis
from tests.catalog.conftest import PEPPERS
from tests.catalog.environments import one_database
from tests.catalog.replicas import (
    PATIENCE_SECONDS,
    FakeSource,
    Replica,
    add_old_keys,
    cache_of,
    closing,
    copied_config,
    copied_key,
    create_account,
    eventually,
    shared_copies,
    wrong_key,
)
from tests.servers import RedisServer

MINUTE_US = 60_000_000
HEAD = struct.pack(">Q", 9) + COPY_FORMAT + struct.pack(">QQQQ", 0, 9, 0, 2**40)


@pytest.fixture
async def shared(redis_url: str) -> AsyncIterator[CatalogRedis]:
    shared = CatalogRedis(redis_url)
    yield shared
    await shared.close()


@pytest.fixture
def copies(shared: CatalogRedis, peppers: Peppers) -> SharedCopies:
    return shared_copies(shared, peppers)


@pytest.fixture
def source() -> FakeSource:
    source = FakeSource()
    source.add_tenant("acme")
    return source


@pytest.fixture
async def live_catalog(
    database: Database, peppers: Peppers, clock: ManualClock, shared: CatalogRedis
) -> AsyncIterator[LiveCatalog]:
    """A live catalog that writes, and has no background tasks."""
    live_catalog = LiveCatalog(database, peppers, catalog_redis=shared, clock=clock, lookup_seconds=PATIENCE_SECONDS)
    yield live_catalog
    await live_catalog.cache.close()


async def settled(cache: CatalogCache) -> None:
    await eventually(lambda: not cache._flights)


# --- Contents --------------------------------------------------------------------------------------------------------


async def test_a_copy_is_what_was_put(copies: SharedCopies, source: FakeSource, peppers: Peppers) -> None:
    config = source.add_tenant("acme")
    key, _ = source.add_key(peppers, "acme", metadata={"a": [1, 2.5, None, {"b": "ü"}]}, expires_at=datetime.now(UTC))
    await copies.put_all({"acme": config}, {}, Stamp(0, 1))
    await copies.put_all({}, {key.id: key}, Stamp(0, 1))
    assert await copied_config(copies, "acme") == config
    assert await copied_key(copies, key.id) == key
    assert await copied_config(copies, "globex") is None


@one_database
async def test_a_process_that_finds_copies_does_not_ask_the_database(
    live_catalog: LiveCatalog, database: Database, peppers: Peppers, clock: ManualClock, copies: SharedCopies
) -> None:
    account = await create_account(live_catalog.catalog)
    other = cache_of(DatabaseSource(database), peppers, clock, copies=copies)
    await other.find_tenant(account.tenant.id)  # so that there is a copy of the operator
    for _ in range(2):
        fresh = cache_of(DatabaseSource(database), peppers, clock, copies=copies)
        before = database.statement_count
        caller = await fresh.callers.find(account.text)
        assert database.statement_count == before
        assert caller.snapshot == Snapshot(
            await live_catalog.catalog.tenant_config(account.tenant.id),
            await live_catalog.catalog.tenant_config(OPERATOR),
        )
        await fresh.close()
    await other.close()


@one_database
async def test_an_old_key_with_a_copy_comes_in_from_a_source_that_sends_made_up_keys(
    live_catalog: LiveCatalog,
    database: Database,
    peppers: Peppers,
    clock: ManualClock,
    copies: SharedCopies,
    redis_url: str,
) -> None:
    """A lookup in the database would have to wait."""
    account = await create_account(live_catalog.catalog)
    known, other = await add_old_keys(live_catalog.catalog, account.tenant.id, 2)
    fresh = cache_of(DatabaseSource(database), peppers, clock, copies=copies, lookup_limiter=LookupLimiter(clock=clock))
    fresh._keys._copy_limiter = LookupLimiter.for_copies(clock)
    for index in range(20):
        with pytest.raises((UnknownKey, TooManyUnknownKeys)):
            await fresh.callers.find(wrong_key(index=index), "10.0.0.1")
    caller = await fresh.callers.find(known, "10.0.0.1")
    assert caller.key.tenant_id == account.tenant.id
    with redis_py.Redis.from_url(redis_url) as client:
        client.flushall()
        with pytest.raises(TooManyUnknownKeys):
            await fresh.callers.find(other, "10.0.0.1")
        before: Any = client.info("commandstats")
        for index in range(2_000):
            with pytest.raises((UnknownKey, TooManyUnknownKeys)):
                await fresh.callers.find(wrong_key(index=100 + index), "10.0.0.1")
        after: Any = client.info("commandstats")
    reads = after["cmdstat_getrange"]["calls"] - before["cmdstat_getrange"]["calls"]
    assert 0 < reads <= 100, "a flood does not cost one read of a copy each"
    await fresh.close()


@one_database
async def test_a_copy_is_read_once_from_the_database_before_it_is_believed_for_good(
    live_catalog: LiveCatalog,
    database: Database,
    peppers: Peppers,
    clock: ManualClock,
    copies: SharedCopies,
    redis_server: RedisServer,
) -> None:
    """The copy may be a day old: Redis was restored, and the change was announced long ago."""
    account = await create_account(live_catalog.catalog)
    old, above = (
        await live_catalog.catalog.tenant_config(account.tenant.id),
        await live_catalog.catalog.tenant_config(OPERATOR),
    )
    async with live_catalog.catalog.edit("test") as edit:
        await edit.update(Tenant, account.tenant.id, {"suspended": True})
        await edit.update(Tenant, OPERATOR, {"mode": "monitor"})
    redis_server.flush()
    await copies.put_all({account.tenant.id: old}, {}, Stamp(0, old.tenant.revision))
    await copies.put_all({OPERATOR: above}, {}, Stamp(0, above.tenant.revision))
    fresh = cache_of(DatabaseSource(database), peppers, clock, copies=copies)
    caller = await fresh.callers.find(account.text)
    assert not caller.snapshot.tenant.suspended
    for _ in range(2):
        clock.advance_us(MINUTE_US)
        fresh.confirm_up_to_date()
        assert fresh.callers.get(account.text) is caller
        await settled(fresh)
        assert caller.snapshot.tenant.suspended
        assert caller.snapshot.operator.tenant.mode == "monitor"
    before = database.statement_count
    clock.advance_us(MINUTE_US)
    fresh.confirm_up_to_date()
    assert fresh.callers.get(account.text) is caller
    await settled(fresh)
    assert database.statement_count == before
    await fresh.close()


@one_database
async def test_copies_are_made_by_each_process_that_reads_the_database(
    catalog: Catalog, database: Database, peppers: Peppers, clock: ManualClock, copies: SharedCopies
) -> None:
    account = await create_account(catalog)
    cache = cache_of(DatabaseSource(database), peppers, clock, copies=copies)
    await cache.callers.find(account.text)
    assert await copied_config(copies, account.tenant.id) == await catalog.tenant_config(account.tenant.id)
    assert await copied_config(copies, OPERATOR) == await catalog.tenant_config(OPERATOR)
    assert await copied_key(copies, account.key.id) == account.key
    await cache.close()


@one_database
async def test_deleted_keys_and_tenants_leave_no_copy_that_could_be_used(
    live_catalog: LiveCatalog, copies: SharedCopies, peppers: Peppers, clock: ManualClock, database: Database
) -> None:
    one, two = await create_account(live_catalog.catalog, "one"), await create_account(live_catalog.catalog, "two")
    async with live_catalog.catalog.edit("test") as edit:
        await edit.delete(Key, one.key.id)
        await edit.delete(Tenant, two.tenant.id)
    assert await copied_key(copies, one.key.id) is None
    assert await copied_config(copies, two.tenant.id) is None
    await copies.put_all({}, {one.key.id: one.key}, Stamp(0, one.key.version))  # by a process that had read it before
    assert await copied_key(copies, one.key.id) is None
    cache = cache_of(DatabaseSource(database), peppers, clock, copies=copies)
    for account in (one, two):
        with pytest.raises(UnknownKey):
            await cache.callers.find(account.text)
    await cache.close()


@one_database
async def test_a_key_that_was_changed_several_times_in_one_edit_is_gone_once_it_is_deleted(
    live_catalog: LiveCatalog, copies: SharedCopies, peppers: Peppers, clock: ManualClock, database: Database
) -> None:
    """Versions of keys may be ahead of the revisions: the copy of the deletion must still be the newest."""
    account = await create_account(live_catalog.catalog)
    async with live_catalog.catalog.edit("test") as edit:
        key, credential = await edit.create_key({"tenant_id": account.tenant.id, "name": "busy"})
        for disabled in (True, False) * 3:
            await edit.set_key_disabled(key.id, disabled=disabled)
    assert await copied_key(copies, key.id) is not None
    async with live_catalog.catalog.edit("test") as edit:
        await edit.delete(Key, key.id)
    assert await copied_key(copies, key.id) is None
    clock.advance_us(MINUTE_US)
    with pytest.raises(UnknownKey):
        await live_catalog.cache.callers.find(credential.text)


@one_database
async def test_no_secret_is_in_redis(
    live_catalog: LiveCatalog, redis_url: str, database: Database, copies: SharedCopies, peppers: Peppers
) -> None:
    account = await create_account(live_catalog.catalog)
    async with live_catalog.catalog.edit("test") as edit:
        _, rotated = await edit.rotate_key(account.key.id, 3_600)
        _, token = await edit.create_token({"name": "token"})
    await live_catalog.cache.callers.find(account.text)
    await live_catalog.cache.callers.find(rotated.text)
    secrets = [Credential.parse(text, peppers) for text in (account.text, rotated.text, token.text)]
    found = 0
    with redis_py.Redis.from_url(redis_url) as client:
        for name in client.scan_iter():
            value: Any = client.get(name)
            found += 1
            for secret in secrets:
                start = len(secret.prefix) + len(secret.id)
                for part in (secret.text, secret.text[start:], secret.text[start:-6]):
                    assert part.encode() not in name + value
            assert PEPPERS[2:].encode() not in name + value
    assert found >= 3


# --- Copies that are not used-----------------------------------------------------------------------------------------

WRONG = [
    b"",
    b"x",
    b"\0" * 8,
    b"\0" * 9,
    b"nonsense that is long enough",
    HEAD,
    HEAD + b"\xc1",
    HEAD + msgspec.msgpack.encode({"tenant": None}),
    HEAD + msgspec.msgpack.encode([1, 2, 3]),
    HEAD + b"\x81" * 5_000,
]


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("copy", WRONG, ids=range(len(WRONG)))
async def test_garbage_in_place_of_a_copy_is_not_believed(
    copy: bytes,
    is_sealed: bool,
    copies: SharedCopies,
    source: FakeSource,
    peppers: Peppers,
    sealer: Signer,
    clock: ManualClock,
    redis_url: str,
) -> None:
    key, text = source.add_key(peppers, "acme")
    with redis_py.Redis.from_url(redis_url) as client:
        for name in (copies._name("c", "acme"), copies._name("c", OPERATOR), copies._name("k", key.id)):
            client.set(name, sealer.sign(name, copy) if is_sealed else copy)
    cache = cache_of(source, peppers, clock, copies=copies)
    caller = await cache.callers.find(text)
    assert caller.key == key
    assert caller.snapshot.config == source.configs["acme"]
    await cache.close()


async def test_a_copy_of_another_kind_is_not_believed(
    copies: SharedCopies, source: FakeSource, peppers: Peppers, redis_url: str
) -> None:
    with redis_py.Redis.from_url(redis_url) as client:
        client.rpush(copies._name("c", "acme"), "a list")
    assert await copied_config(copies, "acme") is None


async def test_a_copy_of_another_release_is_not_believed(
    copies: SharedCopies, source: FakeSource, sealer: Signer, redis_url: str
) -> None:
    name = copies._name("c", "acme")
    config = source.configs["acme"]
    fields = msgspec.to_builtins(config, builtin_types=(datetime,))
    newer: dict[str, Any] = {**fields, "tenant": {**fields["tenant"], "colour": "red"}}
    older: dict[str, Any] = {**fields, "tenant": {k: v for k, v in fields["tenant"].items() if k != "name"}}
    right = msgspec.msgpack.encode(fields)
    bad_plan = {**fields, "plans": [{**fields["plans"][0], "limits": [{"algorithm": "unheard_of"}]}]}
    with redis_py.Redis.from_url(redis_url) as client:
        client.set(name, sealer.sign(name, HEAD + right))
        assert await copied_config(copies, "acme") == config
        for copy in (
            HEAD.replace(COPY_FORMAT, b"2", 1) + right,
            HEAD.replace(COPY_FORMAT, b"4", 1) + right,
            *(HEAD + msgspec.msgpack.encode(fields) for fields in (newer, older, bad_plan)),
        ):
            client.set(name, sealer.sign(name, copy))
            assert await copied_config(copies, "acme") is None


async def test_a_copy_that_is_older_than_what_was_announced_is_not_believed(
    copies: SharedCopies, source: FakeSource, peppers: Peppers, clock: ManualClock
) -> None:
    """A writer without Redis has left the old copy there."""
    _, text = source.add_key(peppers, "acme")
    await copies.put_all({"acme": source.configs["acme"]}, {}, Stamp(0, 1))
    cache = cache_of(source, peppers, clock, copies=copies)
    await cache.apply_changes([source.change("acme", suspended=True)])
    assert (await cache.callers.find(text)).snapshot.tenant.suspended
    assert (await copied_config(copies, "acme")) == source.configs["acme"]
    await cache.close()


async def test_a_key_goes_back_to_no_older_copy_than_is_known(
    copies: SharedCopies, source: FakeSource, peppers: Peppers, clock: ManualClock, redis_url: str
) -> None:
    """A Redis that failed over has lost the last writes. A secret that was replaced because it leaked does not become
    valid again.
    """
    key, text = source.add_key(peppers, "acme")
    old = msgspec.structs.replace(key)
    other = Credential.generate(PREFIXES["live"], key.id.removeprefix("key_"), peppers)
    source.change_key(key, secrets=(peppers.hash_credential(other),))
    cache = cache_of(source, peppers, clock, copies=copies)
    await cache.callers.find(other.text)
    with redis_py.Redis.from_url(redis_url) as client:
        client.flushall()
    await copies.put_all({}, {key.id: old}, Stamp(0, old.version))
    clock.advance_us(MINUTE_US)
    cache.callers.get(other.text)
    await settled(cache)
    await cache.callers.find(other.text)
    with pytest.raises(UnknownKey):
        await cache.callers.find(text)
    await cache.close()


@pytest.mark.parametrize("whose", ["acme", OPERATOR])
async def test_a_tenant_goes_back_to_no_older_copy_than_is_known(
    whose: str, copies: SharedCopies, source: FakeSource, peppers: Peppers, clock: ManualClock, redis_url: str
) -> None:
    _, text = source.add_key(peppers, "acme")
    old = source.configs[whose]
    source.change(whose, mode=Mode.OFF)
    cache = cache_of(source, peppers, clock, copies=copies)
    caller = await cache.callers.find(text)
    with redis_py.Redis.from_url(redis_url) as client:
        client.flushall()
    await copies.put_all({whose: old}, {}, Stamp())
    for _ in range(2):
        clock.advance_us(MINUTE_US)
        cache.callers.get(text)
        await settled(cache)
    config = caller.snapshot.config if whose == "acme" else caller.snapshot.operator
    assert config.tenant.mode is Mode.OFF
    await cache.close()


async def test_a_change_of_a_key_that_is_announced_just_as_it_is_to_be_read_again_is_not_lost(
    copies: SharedCopies, source: FakeSource, peppers: Peppers, clock: ManualClock
) -> None:
    """The refresh has not begun yet. The copy is outdated, because the writer made none."""
    key, text = source.add_key(peppers, "acme")
    cache = cache_of(source, peppers, clock, copies=copies)
    await cache.callers.find(text)
    clock.advance_us(MINUTE_US)
    stored = source.change_key(key, disabled=True)
    assert cache.callers.get(text) is not None
    await cache.apply_changes([stored])
    assert (await cache.callers.find(text)).key.disabled
    await cache.close()


@one_database
async def test_a_key_that_was_deleted_and_brought_back_is_not_the_old_one(
    database: Database, peppers: Peppers, copies: SharedCopies, redis_url: str
) -> None:
    """`apply` runs twice without Redis. The relay then publishes, which must replace the old copy."""
    writer = Catalog(database, peppers=peppers)
    async with Replica(str(database.url), redis_url, peppers=peppers) as replica:
        account = await create_account(replica.catalog)
        for disabled in (True, False) * 2:
            async with replica.catalog.edit("test") as edit:
                await edit.set_key_disabled(account.key.id, disabled=disabled)
        assert await copied_key(copies, account.key.id) is not None
        other = Credential.generate(PREFIXES["live"], account.key.id.removeprefix("key_"), peppers)
        async with writer.edit("test") as edit:
            before = await edit.delete(Key, account.key.id)
        async with writer.edit("test") as edit:
            await edit.add_key(msgspec.structs.replace(before, secrets=(peppers.hash_credential(other),)))

        async def is_published() -> bool:
            async with database.reading() as connection:
                return not await outbox.unpublished_announcements(connection, 1)

        await eventually(is_published)
    cache = cache_of(DatabaseSource(database), peppers, SystemClock(), copies=copies)
    async with closing(cache):
        await cache.callers.find(other.text)
        with pytest.raises(UnknownKey):
            await cache.callers.find(account.text)


@pytest.mark.parametrize("metadata", [{"n": 10**30}, {"s": "\ud800"}], ids=["number", "text"])
async def test_an_entity_that_can_not_be_copied_is_read_from_the_database(
    metadata: dict[str, Any],
    live_catalog: LiveCatalog,
    database: Database,
    peppers: Peppers,
    clock: ManualClock,
    copies: SharedCopies,
) -> None:
    """Such metadata may also be refused from the start."""
    account = await create_account(live_catalog.catalog)
    try:
        async with live_catalog.catalog.edit("test") as edit:
            _, credential = await edit.create_key({"tenant_id": account.tenant.id, "name": "odd", "metadata": metadata})
    except InvalidInput:
        return
    cache = cache_of(DatabaseSource(database), peppers, clock, copies=copies)
    assert (await cache.callers.find(credential.text)).key.metadata == metadata
    await cache.close()


# --- Without Redis ---------------------------------------------------------------------------------------------------


async def test_without_redis_the_database_is_asked_and_redis_is_left_alone_for_a_while(
    own_redis_server: RedisServer, source: FakeSource, peppers: Peppers, clock: ManualClock
) -> None:
    shared = CatalogRedis(own_redis_server.url)
    copies = shared_copies(shared, peppers, clock=clock)
    texts = [source.add_key(peppers, "acme", number)[1] for number in range(4)]
    cache = cache_of(source, peppers, clock, copies=copies)
    await cache.callers.find(texts[0])
    own_redis_server.kill()
    assert (await cache.callers.find(texts[1])).key == source.keys[f"key_{1:016}"]
    own_redis_server.restart()
    await cache.callers.find(texts[2])
    assert own_redis_server.command("DBSIZE") == b":0\r\n"
    clock.advance_us(1_000_000)
    await cache.callers.find(texts[3])
    assert await copied_key(copies, f"key_{3:016}") is not None
    await cache.close()
    await shared.close()


async def test_publishing_raises_if_a_copy_could_not_be_written(
    own_redis_server: RedisServer, source: FakeSource
) -> None:
    shared = CatalogRedis(own_redis_server.url)
    own_redis_server.kill()
    with pytest.raises(StoreUnavailable):
        await shared_copies(shared, Peppers.parse(PEPPERS)).put_all({"acme": source.configs["acme"]}, {}, Stamp(0, 1))
    await shared.close()


# --- Any edits -------------------------------------------------------------------------------------------------------


async def test_of_many_concurrent_writes_the_newest_copy_stays(
    copies: SharedCopies, source: FakeSource, peppers: Peppers
) -> None:
    key, _ = source.add_key(peppers, "acme")
    configs: list[TenantConfig] = []
    for _ in range(100):
        source.change("acme", suspended=len(configs) % 2 == 0)
        configs.append(source.configs["acme"])
    versions = [msgspec.structs.replace(key, version=version) for version in range(1, 101)]
    order = [(37 * index) % 100 for index in range(100)]
    for start in range(0, 100, 20):
        some = order[start : start + 20]
        await asyncio.gather(
            *(copies.put_all({"acme": configs[index]}, {}, Stamp(0, index)) for index in some),
            *(copies.put_all({}, {key.id: versions[index]}, Stamp(0, index)) for index in some),
        )
    assert await copied_config(copies, "acme") == configs[-1]
    assert await copied_key(copies, key.id) == versions[-1]


WHO = st.integers(0, 2)
MODES = st.sampled_from([mode.value for mode in Mode])
LIMITS = st.sampled_from(["5/minute", "1/second; 100/hour", "7/day", "10/30s"])
MOMENTS = st.datetimes(datetime(2030, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
LANES = st.one_of(st.integers(1, 8), st.builds(Lanes, st.integers(1, 8), st.integers(1, 8), st.floats(2e9, 3e9)))
METADATA = st.dictionaries(
    st.text(max_size=5), st.one_of(st.integers(-(2**63), 2**63), st.text(max_size=5)), max_size=3
)
EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("tenant"), WHO),
        st.tuples(st.just("drop tenant"), WHO),
        st.tuples(st.just("change tenant"), WHO, st.fixed_dictionaries({"mode": MODES, "suspended": st.booleans()})),
        st.tuples(st.just("lanes"), WHO, LANES),
        st.tuples(st.just("zone"), WHO, st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kathmandu"])),
        st.tuples(st.just("fleet"), WHO, MODES),
        st.tuples(st.just("plan"), WHO, LIMITS),
        st.tuples(st.just("limits"), WHO, LIMITS),
        st.tuples(st.just("roll back"), WHO),
        st.tuples(st.just("policy"), WHO, st.sampled_from(["*", "GET:*", "GET:/a/{id}", "POST:/b"]), MODES),
        st.tuples(st.just("drop policy"), WHO),
        st.tuples(st.just("key"), WHO, METADATA, st.one_of(st.none(), MOMENTS)),
        st.tuples(st.just("rotate"), WHO, st.integers(0, 100)),
        st.tuples(st.just("disable"), WHO, st.booleans()),
        st.tuples(st.just("drop key"), WHO),
    ),
    max_size=25,
)


async def do(catalog: Catalog, edit_of: tuple[Any, ...]) -> None:  # noqa: C901, PLR0912
    """Apply one edit. If it is not possible in this state, nothing happens."""
    what, who, *how = edit_of
    tenants = sorted((await catalog.list_page(Tenant)).items, key=lambda tenant: tenant.created_at)
    tenant = tenants[who] if who < len(tenants) else None
    plans = [] if tenant is None else await catalog.list_for_tenant(Plan, tenant.id)
    policies = [] if tenant is None else await catalog.list_for_tenant(Policy, tenant.id)
    keys = [] if tenant is None else await catalog.list_for_tenant(Key, tenant.id)
    async with catalog.edit("test") as edit:
        match what:
            case "tenant":
                await edit.create(Tenant, {"name": f"t{edit.revision}"})
            case "drop tenant" if tenant:
                await edit.delete(Tenant, tenant.id)
            case "change tenant" if tenant:
                await edit.update(Tenant, tenant.id, how[0])
            case "lanes" if tenant:
                await edit.update(Tenant, tenant.id, {"lanes": how[0]})
            case "zone" if tenant:
                await edit.update(Tenant, tenant.id, {"time_zone": how[0]})
            case "fleet":
                await edit.update(Tenant, OPERATOR, {"mode": how[0]})
            case "plan" if tenant:
                plan = await edit.create(Plan, {"tenant_id": tenant.id, "name": f"p{edit.revision}", "limits": how[0]})
                await edit.update(Tenant, tenant.id, {"default_plan_id": plan.id})
            case "limits" if plans:
                await edit.update(Plan, plans[0].id, {"limits": how[0]})
            case "roll back" if plans and plans[0].version > 1:
                await edit.roll_back_plan(plans[0].id)
            case "policy" if tenant and plans:
                fields = {"tenant_id": tenant.id, "resource": how[0], "plan_id": plans[-1].id, "mode": how[1]}
                await edit.create(Policy, fields)
            case "drop policy" if policies:
                await edit.delete(Policy, policies[0].id)
            case "key" if tenant:
                fields = {"tenant_id": tenant.id, "name": "key", "metadata": how[0], "expires_at": how[1]}
                await edit.create_key(fields)
            case "rotate" if keys:
                await edit.rotate_key(keys[0].id, how[0])
            case "disable" if keys:
                await edit.set_key_disabled(keys[0].id, disabled=how[0])
            case "drop key" if keys:
                await edit.delete(Key, keys[0].id)


async def copies_after(url: str, redis_url: str, edits: list[tuple[Any, ...]]) -> tuple[int, int]:
    """Compare all copies. Return the number of live ones, and of deleted entities without a copy."""
    database, shared = Database(url), CatalogRedis(redis_url)
    clock = ManualClock()
    live_catalog = LiveCatalog(database, Peppers.parse(PEPPERS), catalog_redis=shared, clock=clock)
    copies = shared_copies(shared, Peppers.parse(PEPPERS))
    ever: set[str] = set()
    try:
        for each in edits:
            clock.advance_us(1_000_000)
            with suppress(CatalogError):  # such as a policy that is there already
                await do(live_catalog.catalog, each)
            for tenant in (await live_catalog.catalog.list_page(Tenant)).items:
                ever |= {tenant.id, *(key.id for key in await live_catalog.catalog.list_for_tenant(Key, tenant.id))}
        assert live_catalog._relay is not None
        while live_catalog._relay.has_unpublished:  # Redis did not answer in time
            clock.advance_us(1_000_000)
            with suppress(StoreError):
                await live_catalog._relay.publish_pending()
        source = DatabaseSource(database)
        operator = await source.config(OPERATOR)
        assert operator is not None
        copy = await copied_config(copies, OPERATOR)
        assert copy is None or copy == operator
        for identity in ever:
            if identity.startswith("key_"):
                assert await copied_key(copies, identity) == await source.key(identity)
            else:
                stored, truth = await copied_config(copies, identity), await source.config(identity)
                assert stored == truth
                if stored is not None and truth is not None:
                    assert Snapshot(stored, operator) == Snapshot(truth, operator)
                    assert same_decisions(stored, truth, operator)
        there = [await copied_key(copies, each) or await copied_config(copies, each) for each in ever]
        return len(there) - there.count(None) + (copy is not None), there.count(None)
    finally:
        await live_catalog.cache.close()
        await shared.close()
        await database.close()


def same_decisions(one: TenantConfig, two: TenantConfig, operator: TenantConfig) -> bool:
    for resource in ("GET:/a/1", "POST:/b", "PUT:/c"):
        ours, theirs = Snapshot(one, operator).select(resource), Snapshot(two, operator).select(resource)
        if (list(ours.limits), ours.mode, ours.counted_resource) != (
            list(theirs.limits),
            theirs.mode,
            theirs.counted_resource,
        ):
            return False
    return True


@pytest.mark.slow
@settings(max_examples=min(settings.default.max_examples if settings.default else 10, 10))
@given(edits=EDITS)
def test_after_any_edits_the_copies_are_what_the_database_says(
    migrated_sqlite: Path, redis_server: RedisServer, edits: list[tuple[Any, ...]]
) -> None:
    redis_server.flush()
    file = migrated_sqlite.with_name("example.db")
    for left in file.parent.glob("example.db*"):
        left.unlink()
    shutil.copy(migrated_sqlite, file)
    asyncio.run(copies_after(f"sqlite:///{file}", redis_server.url, edits))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_property_above_is_about_something(database_url: str, redis_url: str) -> None:
    """The property would also hold if no edit ever succeeded, so check that some do."""
    database = Database(database_url)
    await database.upgrade()
    await database.close()
    edits: list[tuple[Any, ...]] = [
        *[("tenant", 0), ("plan", 0, "5/minute"), ("key", 0, {}, None), ("key", 0, {"a": 1}, None), ("drop key", 0)],
        *[("policy", 0, "*", "on"), ("rotate", 0, 9), ("tenant", 1), ("drop tenant", 1), ("fleet", 0, "off")],
    ]
    assert await copies_after(database_url, redis_url, edits) == (3, 2)
