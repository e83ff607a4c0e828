"""The configuration cache: when it reads, how it applies announced changes, and its bounds."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest

from limitforge import Limiter, ManualClock
from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import ID_LENGTH, PREFIXES, Credential, Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.live.cache import key_cache as keys_module
from limitforge.catalog.live.cache import single_flight
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.lookup_limiter import LookupLimiter
from limitforge.catalog.live.database_source import DatabaseSource
from limitforge.catalog.model import OPERATOR, Key, KeyScope, Plan, Policy, Tenant, TenantConfig, to_datetime
from limitforge.catalog.snapshot import Snapshot
from limitforge.core.limits import Mode
from limitforge.errors import CatalogUnavailable, Forbidden, UnknownKey
from tests.catalog.environments import one_database
from tests.catalog.replicas import FakeSource, cache_of, create_account, decide, eventually, wrong_key

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US


@pytest.fixture
def source() -> FakeSource:
    source = FakeSource()
    source.add_tenant("acme")
    return source


@pytest.fixture
async def cache(source: FakeSource, peppers: Peppers, clock: ManualClock) -> AsyncIterator[CatalogCache]:
    cache = cache_of(source, peppers, clock)
    yield cache
    await cache.close()


async def settled(cache: CatalogCache) -> None:
    """Wait until no read is running."""
    await eventually(lambda: not cache._flights)


# --- The cost of a lookup ---------------------------------------------------------------------------------------------


@one_database
async def test_a_warm_look_up_reads_nothing(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock
) -> None:
    account = await create_account(catalog)
    cache = cache_of(DatabaseSource(database), peppers, clock)
    assert cache.callers.get(account.text) is None
    first = await cache.callers.find(account.text)
    before = database.statement_count
    for _ in range(100):
        assert cache.callers.get(account.text) is first
        assert await cache.callers.find(account.text) is first
        first.snapshot.select("GET:/orders", first.key.plan_id)
    assert database.statement_count == before
    await cache.close()


@one_database
async def test_a_thousand_first_requests_of_a_cold_tenant_cost_one_load(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock
) -> None:
    """Two queries for the key, three for the operator (once per process), three for the tenant."""
    account = await create_account(catalog)
    other = await create_account(catalog, "globex")
    cache = cache_of(DatabaseSource(database), peppers, clock)
    before = database.statement_count
    callers = await asyncio.gather(*(cache.callers.find(account.text) for _ in range(1_000)))
    assert database.statement_count - before == 8
    assert len({id(caller.tenant) for caller in callers}) == 1
    before = database.statement_count
    await asyncio.gather(*(cache.callers.find(other.text) for _ in range(1_000)))
    assert database.statement_count - before == 5
    await cache.close()


@one_database
async def test_the_size_of_a_tenant_does_not_change_the_number_of_queries(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock
) -> None:
    account = await create_account(catalog)
    async with catalog.edit("test") as edit:
        for index in range(30):
            plan = await edit.create(Plan, {"tenant_id": account.tenant.id, "name": f"p{index}", "limits": "9/minute"})
            await edit.create(
                Policy, {"tenant_id": account.tenant.id, "resource": f"GET:/{index}/{{id}}", "plan_id": plan.id}
            )
    cache = cache_of(DatabaseSource(database), peppers, clock)
    before = database.statement_count
    caller = await cache.callers.find(account.text)
    assert database.statement_count - before == 8
    assert len(caller.snapshot.config.policies) == 30
    await cache.close()


async def test_a_cancelled_request_does_not_end_the_load_that_others_wait_for(
    source: FakeSource, cache: CatalogCache, peppers: Peppers
) -> None:
    _, text = source.add_key(peppers, "acme")
    async with source.held("acme") as let_go:
        requests = [asyncio.create_task(cache.callers.find(text)) for _ in range(3)]
        await source.until_waiting()
        requests[0].cancel()
        await asyncio.sleep(0)
        let_go()
        with pytest.raises(asyncio.CancelledError):
            await requests[0]
        assert (await requests[1]).key == (await requests[2]).key
    assert source.reads.count("acme") == 1


async def test_a_load_that_fails_after_its_only_request_was_cancelled_says_nothing(
    source: FakeSource, cache: CatalogCache, caplog: pytest.LogCaptureFixture
) -> None:
    text = wrong_key()
    name = f"key_{text.removeprefix(PREFIXES['live'])[:ID_LENGTH]}"
    async with source.held(name) as let_go:
        request = asyncio.create_task(cache.callers.find(text))
        await source.until_waiting()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        let_go()
        await settled(cache)
    gc.collect()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


# --- Time ------------------------------------------------------------------------------------------------------------


async def test_what_is_older_than_its_ttl_is_served_while_it_is_read_once_more(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    key, text = source.add_key(peppers, "acme")
    caller = await cache.callers.find(text)
    source.reads.clear()
    source.change("acme", suspended=True)  # without an announcement
    clock.advance_us(MINUTE_US - 1)
    assert cache.callers.get(text) is caller
    await asyncio.sleep(0)
    assert not source.reads

    clock.advance_us(1)
    async with source.held("acme") as let_go:
        for _ in range(1_000):
            assert cache.callers.get(text) is caller
            assert not caller.snapshot.tenant.suspended
        await source.until_waiting()
        clock.advance_us(10_000_000)
        for _ in range(1_000):
            assert cache.callers.get(text) is caller
        let_go()
        await settled(cache)
    assert caller.snapshot.tenant.suspended
    assert source.reads.count("acme") == 1
    assert source.reads.count(key.id) <= 2  # its own TTL; the ten seconds may have made it due once more


async def test_what_can_not_be_read_again_is_served_on_and_says_so_until_it_is_too_old(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    _, text = source.add_key(peppers, "acme")
    caller = await cache.callers.find(text)
    source.is_down = True
    clock.advance_us(MINUTE_US)
    assert cache.callers.get(text) is caller
    await settled(cache)
    assert caller.is_stale
    assert cache.status().stale_since == clock.now_us() / 1e6
    since = cache.status().stale_since
    while clock.now_us() < 1_700_006_400_000_000 + HOUR_US - 10 * MINUTE_US:
        clock.advance_us(5 * MINUTE_US)
        assert cache.callers.get(text) is caller
        await settled(cache)
    assert cache.status().stale_since == since
    clock.advance_us(10 * MINUTE_US)
    assert cache.callers.get(text) is None
    with pytest.raises(CatalogUnavailable):
        await cache.callers.find(text)

    source.is_down = False
    back = await cache.callers.find(text)
    assert not back.is_stale
    assert cache.status().stale_since is None


async def test_an_entry_without_announced_changes_is_not_read_again(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    _, text = source.add_key(peppers, "acme")
    caller = await cache.callers.find(text)
    source.reads.clear()
    for _ in range(200):  # minutes: well past the time that entries are usable without a confirmation
        clock.advance_us(MINUTE_US)
        cache.confirm_up_to_date()
        assert cache.callers.get(text) is caller
        await settled(cache)
    assert "acme" not in source.reads
    assert not [read for read in source.reads if read.startswith("key_")]
    clock.advance_us(MINUTE_US + 1)  # no more confirmations
    assert cache.callers.get(text) is caller
    await settled(cache)
    assert "acme" in source.reads
    source.is_down = True
    clock.advance_us(HOUR_US)
    assert cache.callers.get(text) is None


async def test_what_could_not_be_acted_on_is_read_again_all_the_same(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    _, text = source.add_key(peppers, "acme")
    caller = await cache.callers.find(text)
    announcement = source.change("acme", suspended=True)
    source.is_down = True
    await cache.apply_changes([announcement])
    assert caller.is_stale
    source.is_down = False
    cache.confirm_up_to_date()
    clock.advance_us(MINUTE_US)
    cache.confirm_up_to_date()
    cache.callers.get(text)
    await settled(cache)
    assert not caller.is_stale
    assert caller.snapshot.tenant.suspended


async def test_a_refresh_that_fails_is_tried_again_once_a_second_at_most(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    _, text = source.add_key(peppers, "acme")
    await cache.callers.find(text)
    clock.advance_us(MINUTE_US)
    source.is_down = True
    source.reads.clear()
    for _ in range(100):
        clock.advance_us(100_000)
        cache.callers.get(text)
        await settled(cache)
    assert 8 <= source.reads.count("acme") <= 11


async def test_without_a_database_every_request_of_an_old_key_gets_catalog_unavailable(
    source: FakeSource, peppers: Peppers, clock: ManualClock
) -> None:
    """The error is not `TooManyUnknownKeys`, neither then nor afterwards."""
    texts = [source.add_key(peppers, "acme", number)[1] for number in range(20)]
    cache = cache_of(source, peppers, clock, lookup_limiter=LookupLimiter(clock=clock))
    source.is_down = True
    errors = [await caught(cache, text) for text in texts]
    assert {type(error) for error in errors} == {CatalogUnavailable}
    source.is_down = False
    assert [await caught(cache, text) for text in texts] == [None] * 20
    await cache.close()


async def caught(cache: CatalogCache, text: str, source: str = "10.0.0.1") -> Exception | None:
    try:
        await cache.callers.find(text, source)
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return error
    return None


async def test_a_key_ends_when_its_time_has_come_without_anybody_saying_so(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    _, text = source.add_key(peppers, "acme", expires_at=to_datetime(clock.now_us() + 5_000_000))
    await cache.callers.find(text)
    clock.advance_us(4_999_999)
    assert cache.callers.get(text) is not None
    clock.advance_us(1)
    assert cache.callers.get(text) is None
    with pytest.raises(UnknownKey):
        await cache.callers.find(text)
    assert source.reads.count(f"key_{'0' * 16}") == 1


@one_database
async def test_during_a_rotation_the_old_secret_works_for_the_grace_period_and_the_new_one_at_once(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock
) -> None:
    account = await create_account(catalog)
    cache = cache_of(DatabaseSource(database), peppers, clock)
    catalog.on_commit = cache.apply_changes
    old = await cache.callers.find(account.text)
    async with catalog.edit("test") as edit:
        _, credential = await edit.rotate_key(account.key.id, 60)
    assert (await cache.callers.find(credential.text)).key.version == 2
    assert (await cache.callers.find(account.text)).key.version == 2
    assert old.key.version == 1
    clock.advance_us(59_999_999)
    await cache.callers.find(account.text)
    clock.advance_us(1)
    assert cache.callers.get(account.text) is None
    with pytest.raises(UnknownKey):
        await cache.callers.find(account.text)
    await cache.callers.find(credential.text)
    await cache.close()


@one_database
async def test_a_rotation_without_grace_ends_the_old_secret_before_the_writer_continues(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock
) -> None:
    account = await create_account(catalog)
    cache = cache_of(DatabaseSource(database), peppers, clock)
    catalog.on_commit = cache.apply_changes
    await cache.callers.find(account.text)
    async with catalog.edit("test") as edit:
        _, credential = await edit.rotate_key(account.key.id)
    assert cache.callers.get(account.text) is None
    with pytest.raises(UnknownKey):
        await cache.callers.find(account.text)
    await cache.callers.find(credential.text)
    await cache.close()


# --- Announced changes -----------------------------------------------------------------------------------------------


@one_database
async def test_disabled_keys_and_suspended_tenants_are_forbidden_and_what_is_gone_is_unknown(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock
) -> None:
    account = await create_account(catalog)
    cache = cache_of(DatabaseSource(database), peppers, clock)
    catalog.on_commit = cache.apply_changes
    (await cache.callers.find(account.text)).require(KeyScope.CHECK)
    async with catalog.edit("test") as edit:
        await edit.set_key_disabled(account.key.id, disabled=True)
    with pytest.raises(Forbidden, match="disabled"):
        (await cache.callers.find(account.text)).require(KeyScope.CHECK)
    async with catalog.edit("test") as edit:
        await edit.set_key_disabled(account.key.id, disabled=False)
        await edit.update(Tenant, account.tenant.id, {"suspended": True})
    with pytest.raises(Forbidden, match="suspended"):
        (await cache.callers.find(account.text)).require(KeyScope.CHECK)
    async with catalog.edit("test") as edit:
        await edit.update(Tenant, account.tenant.id, {"suspended": False})
        await edit.update(Key, account.key.id, {"scopes": ["usage"]})
    caller = await cache.callers.find(account.text)
    caller.require(KeyScope.USAGE)
    with pytest.raises(Forbidden, match="scope check"):
        caller.require(KeyScope.CHECK)
    async with catalog.edit("test") as edit:
        await edit.delete(Key, account.key.id)
    with pytest.raises(UnknownKey):
        await cache.callers.find(account.text)
    await cache.close()


@one_database
async def test_the_keys_of_a_deleted_tenant_stop_and_cost_the_database_next_to_nothing(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock
) -> None:
    account = await create_account(catalog)
    cache = cache_of(DatabaseSource(database), peppers, clock, lookup_limiter=LookupLimiter(clock=clock))
    catalog.on_commit = cache.apply_changes
    await cache.callers.find(account.text)
    async with catalog.edit("test") as edit:
        await edit.delete(Tenant, account.tenant.id)
    before = database.statement_count
    for _ in range(200):
        with pytest.raises(UnknownKey):
            await cache.callers.find(account.text, "10.0.0.1")
    assert database.statement_count - before <= 10
    await cache.close()


@one_database
async def test_a_mode_and_a_plan_of_the_operator_reach_every_cached_tenant(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock
) -> None:
    accounts = [await create_account(catalog, f"tenant-{index}", "1/hour") for index in range(5)]
    cache = cache_of(DatabaseSource(database), peppers, clock)
    catalog.on_commit = cache.apply_changes
    callers = [await cache.callers.find(account.text) for account in accounts]
    async with Limiter.connect("memory://", clock=clock) as limiter:
        for caller in callers:
            assert (await decide(caller, limiter)).allowed
            assert not (await decide(caller, limiter)).allowed
        async with catalog.edit("test") as edit:
            await edit.update(Tenant, OPERATOR, {"mode": "off"})
        for caller in callers:
            assert (await decide(caller, limiter)).allowed
        async with catalog.edit("test") as edit:
            one = {"name": "all", "algorithm": "fixed_window", "limit": 1, "window_seconds": 60, "scope": "global"}
            plan = await edit.create(Plan, {"tenant_id": OPERATOR, "name": "fleet", "limits": [one]})
            await edit.update(Tenant, OPERATOR, {"mode": "on", "default_plan_id": plan.id})
        allowed = [(await decide(caller, limiter, subject="new")).allowed for caller in callers]
        assert allowed == [True, False, False, False, False]
    await cache.close()


async def test_a_tenant_that_is_read_while_the_operator_is_switched_off_is_switched_off_too(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    _, text = source.add_key(peppers, "acme")
    source.add_tenant("globex")
    await cache.find_tenant("globex")  # so that the operator is known
    async with source.held("acme") as let_go:
        request = asyncio.create_task(cache.callers.find(text))
        await source.until_waiting()
        await cache.apply_changes([source.change(OPERATOR, mode=Mode.OFF)])
        let_go()
        caller = await request
    assert (await cache.find_tenant("globex")).snapshot.operator.tenant.mode is Mode.OFF
    assert caller.snapshot.operator.tenant.mode is Mode.OFF
    clock.advance_us(10 * MINUTE_US)
    cache.callers.get(text)
    await settled(cache)
    assert caller.snapshot.operator.tenant.mode is Mode.OFF


async def test_a_mode_of_the_operator_that_is_announced_during_its_first_read_is_not_lost(
    source: FakeSource, cache: CatalogCache, peppers: Peppers
) -> None:
    _, text = source.add_key(peppers, "acme")
    async with source.held(OPERATOR) as let_go:
        request = asyncio.create_task(cache.callers.find(text))
        await source.until_waiting()
        hearing = asyncio.create_task(cache.apply_changes([source.change(OPERATOR, mode=Mode.OFF)]))
        await asyncio.sleep(0)
        let_go()
        caller = await request
        await hearing
    assert caller.snapshot.operator.tenant.mode is Mode.OFF


@pytest.mark.parametrize("is_known", [False, True], ids=["first read", "refresh"])
async def test_a_change_of_a_tenant_that_is_announced_while_it_is_read_is_not_lost(
    is_known: bool, source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    _, text = source.add_key(peppers, "acme")
    if is_known:
        await cache.callers.find(text)
        clock.advance_us(MINUTE_US)
    async with source.held("acme") as let_go:
        request = asyncio.create_task(cache.callers.find(text))
        await source.until_waiting()
        hearing = asyncio.create_task(cache.apply_changes([source.change("acme", suspended=True)]))
        await asyncio.sleep(0)
        let_go()
        await hearing
        caller = await request
    assert caller.snapshot.tenant.suspended


@pytest.mark.parametrize("is_known", [False, True], ids=["first read", "refresh"])
async def test_a_change_of_a_key_that_is_announced_while_it_is_read_is_not_lost(
    is_known: bool, source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    key, text = source.add_key(peppers, "acme")
    if is_known:
        await cache.callers.find(text)
        clock.advance_us(MINUTE_US)
    async with source.held(key.id) as let_go:
        request = asyncio.create_task(cache.callers.find(text))
        await source.until_waiting()
        hearing = asyncio.create_task(cache.apply_changes([source.change_key(key, disabled=True)]))
        await asyncio.sleep(0)
        let_go()
        await hearing
        await request
    assert (await cache.callers.find(text)).key.disabled


@pytest.mark.parametrize("is_known", [False, True], ids=["first read", "refresh"])
async def test_a_key_that_is_deleted_while_it_is_read_stops(
    is_known: bool, source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    key, text = source.add_key(peppers, "acme")
    if is_known:
        await cache.callers.find(text)
        clock.advance_us(MINUTE_US)
    async with source.held(key.id) as let_go:
        request = asyncio.create_task(cache.callers.find(text))
        await source.until_waiting()
        hearing = asyncio.create_task(cache.apply_changes([source.drop_key(key)]))
        await asyncio.sleep(0)
        let_go()
        await hearing
        await asyncio.gather(request, return_exceptions=True)
    await settled(cache)
    with pytest.raises(UnknownKey):
        await cache.callers.find(text)


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_late_message_about_the_old_place_of_a_key_that_has_moved_changes_nothing(
    is_known: bool, source: FakeSource, cache: CatalogCache, peppers: Peppers
) -> None:
    """The outbox had the whole move. The relay publishes the removal separately."""
    source.add_tenant("other")
    key, text = source.add_key(peppers, "acme")
    await cache.callers.find(text)
    source.keys[key.id] = msgspec.structs.replace(key, tenant_id="other", version=9)
    gone = Announcement(9, "acme", gone=(key.id,), revokes=True, change_id=9)
    await cache.apply_changes([gone, Announcement(9, "other", keys=(key.id,), change_id=9)])
    if is_known:
        assert (await cache.callers.find(text)).key.tenant_id == "other"
    await cache.apply_changes([gone])
    assert (await cache.callers.find(text)).key.tenant_id == "other"


async def test_a_key_that_is_made_while_it_is_looked_for_is_found(
    source: FakeSource, cache: CatalogCache, peppers: Peppers
) -> None:
    """The key was made elsewhere, and is used before `apply` adds it."""
    key, text = source.add_key(peppers, "acme")
    del source.keys[key.id]
    async with source.held(key.id) as let_go:
        request = asyncio.create_task(cache.callers.find(text))
        await source.until_waiting()
        source.keys[key.id] = key
        hearing = asyncio.create_task(cache.apply_changes([Announcement(9, "acme", keys=(key.id,))]))
        await asyncio.sleep(0)
        let_go()
        await hearing
        await asyncio.gather(request, return_exceptions=True)
    assert (await cache.callers.find(text)).key == key


async def test_a_key_that_was_unknown_is_known_once_it_is_announced(
    source: FakeSource, cache: CatalogCache, peppers: Peppers
) -> None:
    key, text = source.add_key(peppers, "acme")
    del source.keys[key.id]
    for _ in range(10):
        with pytest.raises(UnknownKey):
            await cache.callers.find(text)
    assert source.reads.count(key.id) == 1
    source.keys[key.id] = key
    await cache.apply_changes([Announcement(9, "acme", keys=(key.id,))])
    assert (await cache.callers.find(text)).key == key


async def test_a_change_of_a_key_that_is_announced_while_the_database_is_away_is_in_force_soon_after_it_is_back(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    key, text = source.add_key(peppers, "acme")
    await cache.callers.find(text)
    source.is_down = True
    announcement = source.change_key(key, disabled=True)
    try:
        await cache.apply_changes([announcement])
    except CatalogUnavailable:
        must_announce_again = True
    else:
        must_announce_again = False
    source.is_down = False
    clock.advance_us(2_000_000)
    if must_announce_again:
        await cache.apply_changes([announcement])
    cache.callers.get(text)
    await settled(cache)
    assert (await cache.callers.find(text)).key.disabled


async def test_a_change_of_a_tenant_that_is_announced_while_the_database_is_away_is_in_force_soon_after_it_is_back(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    _, text = source.add_key(peppers, "acme")
    await cache.callers.find(text)
    source.is_down = True
    announcement = source.change("acme", suspended=True)
    try:
        await cache.apply_changes([announcement])
    except CatalogUnavailable:
        must_announce_again = True
    else:
        must_announce_again = False
    source.is_down = False
    clock.advance_us(2_000_000)
    if must_announce_again:
        await cache.apply_changes([announcement])
    cache.callers.get(text)
    await settled(cache)
    assert (await cache.callers.find(text)).snapshot.tenant.suspended


async def test_a_mode_of_the_operator_that_is_announced_while_the_database_is_away_acts_soon_after_it_is_back(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    """The next request of any tenant is enough: it does not wait for the tenant's own TTL."""
    _, text = source.add_key(peppers, "acme")
    caller = await cache.callers.find(text)
    source.is_down = True
    announcement = source.change(OPERATOR, mode=Mode.OFF)
    try:
        await cache.apply_changes([announcement])
    except CatalogUnavailable:
        must_announce_again = True
    else:
        must_announce_again = False
    source.is_down = False
    clock.advance_us(2_000_000)
    if must_announce_again:
        await cache.apply_changes([announcement])
    for _ in range(2):
        cache.callers.get(text)
        await settled(cache)
    assert caller.snapshot.operator.tenant.mode is Mode.OFF


@one_database
async def test_a_change_of_many_keys_at_once_reaches_all_of_them(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock
) -> None:
    """There are more reads than database connections."""
    account = await create_account(catalog)
    async with catalog.edit("test") as edit:
        made = [await edit.create_key({"tenant_id": account.tenant.id, "name": f"k{index}"}) for index in range(40)]
    cache = cache_of(DatabaseSource(database), peppers, clock)
    for _, credential in made:
        await cache.callers.find(credential.text)
    catalog.on_commit = cache.apply_changes
    async with catalog.edit("test") as edit:
        for key, _ in made:
            await edit.set_key_disabled(key.id, disabled=True)
    assert cache.status().stale_since is None
    callers = [await cache.callers.find(credential.text) for _, credential in made]
    assert all(caller.key.disabled for caller in callers)
    await cache.close()


async def test_an_announcement_of_what_is_not_remembered_reads_nothing(
    source: FakeSource, cache: CatalogCache, peppers: Peppers
) -> None:
    source.add_key(peppers, "acme")
    source.add_tenant("globex")
    await cache.find_tenant("acme")
    source.reads.clear()
    for index in range(100):
        await cache.apply_changes(
            [Announcement(index, "globex", config=True, keys=(f"key_{index}",), gone=(f"key_g{index}",))]
        )
    assert not source.reads
    assert not cache._flights._changed
    assert not cache._flights


async def test_an_old_announcement_that_is_repeated_reads_nothing(
    source: FakeSource, cache: CatalogCache, peppers: Peppers
) -> None:
    _, text = source.add_key(peppers, "acme")
    announcement = source.change("acme", suspended=True)
    await cache.callers.find(text)
    source.reads.clear()
    await cache.apply_changes([announcement])
    assert not source.reads


async def test_everything_is_read_again_when_too_much_was_missed(
    source: FakeSource, cache: CatalogCache, peppers: Peppers
) -> None:
    key, text = source.add_key(peppers, "acme")
    other, gone = source.add_key(peppers, "acme", 1)
    caller = await cache.callers.find(text)
    await cache.callers.find(gone)
    source.change("acme", suspended=True)
    source.change(OPERATOR, mode=Mode.OFF)
    source.change_key(key, disabled=True)
    source.drop_key(other)
    cache.clear()
    assert cache.callers.get(text) is None
    caller = await cache.callers.find(text)
    assert caller.snapshot.tenant.suspended
    assert caller.snapshot.operator.tenant.mode is Mode.OFF
    assert caller.key.disabled
    with pytest.raises(UnknownKey):
        await cache.callers.find(gone)


async def test_a_database_that_was_set_back_is_believed_when_everything_is_read_again(
    source: FakeSource, cache: CatalogCache, peppers: Peppers
) -> None:
    """The database was restored from a backup: its revisions are lower than the cached ones."""
    _, text = source.add_key(peppers, "acme")
    before = source.configs["acme"]
    source.change("acme", suspended=True)
    assert (await cache.callers.find(text)).snapshot.tenant.suspended
    source.configs["acme"] = before
    cache.clear()
    assert not (await cache.callers.find(text)).snapshot.tenant.suspended


async def test_on_tenant_loaded_is_called_before_the_tenant_is_served(
    source: FakeSource, peppers: Peppers, clock: ManualClock
) -> None:
    announcement: list[tuple[str, int, bool]] = []
    kept: list[CatalogCache] = []

    def placed(tenant: Tenant) -> None:
        announcement.append((tenant.id, tenant.lane_layout.count, tenant.id in kept[0]._cached_tenants))

    kept.append(cache_of(source, peppers, clock, on_tenant_loaded=placed))
    _, text = source.add_key(peppers, "acme")
    source.change("acme", lanes=4)
    await kept[0].callers.find(text)
    assert announcement == [("acme", 4, False)]
    await kept[0].close()


# --- Bounds ----------------------------------------------------------------------------------------------------------


async def test_no_more_tenants_and_keys_are_kept_than_allowed_and_what_was_dropped_comes_back(
    source: FakeSource, peppers: Peppers, clock: ManualClock
) -> None:
    cache = cache_of(source, peppers, clock, max_tenants=5, max_keys=8)
    texts = []
    for number in range(50):
        source.add_tenant(f"t{number}")
        texts.append(source.add_key(peppers, f"t{number}", number)[1])
    for text in texts:
        await cache.callers.find(text)
    status = cache.status()
    assert (status.tenants, status.keys) == (5, 8)
    assert len(cache._caller_index.by_fingerprint) <= 8
    for number, text in enumerate(texts):
        caller = await cache.callers.find(text)
        assert caller.key.tenant_id == f"t{number}"
        assert caller.snapshot.tenant.id == f"t{number}"
    await cache.close()


async def test_a_tenant_that_was_evicted_is_read_again_and_gets_changes_as_before(
    source: FakeSource, peppers: Peppers, clock: ManualClock
) -> None:
    cache = cache_of(source, peppers, clock, max_tenants=2)
    _, text = source.add_key(peppers, "acme")
    await cache.callers.find(text)
    for number in range(3):
        source.add_tenant(f"t{number}")
        await cache.find_tenant(f"t{number}")
    await cache.apply_changes([source.change("acme", suspended=True)])
    assert (await cache.callers.find(text)).snapshot.tenant.suspended
    await cache.apply_changes([source.change("acme", suspended=False)])
    caller = cache.callers.get(text)
    assert caller is not None
    assert not caller.snapshot.tenant.suspended
    await cache.close()


async def test_snapshots_of_dropped_tenants_are_not_kept_alive_by_their_callers(
    source: FakeSource, peppers: Peppers, clock: ManualClock
) -> None:
    """The cache may have a hundred thousand keys, of at most ten thousand tenants."""
    cache = cache_of(source, peppers, clock, max_tenants=5)
    for number in range(60):
        source.add_tenant(f"t{number}")
        await cache.callers.find(source.add_key(peppers, f"t{number}", number)[1])
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is Snapshot and each.tenant.id.startswith("t")]
    assert len(alive) <= 6
    await cache.close()


async def test_memory_does_not_grow_with_wrong_keys(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "MAX_UNKNOWN", 50)
    key, text = source.add_key(peppers, "acme")
    await cache.callers.find(text)
    for index in range(500):
        with pytest.raises(UnknownKey):
            await cache.callers.find(wrong_key(index=index + 1))
    for _ in range(500):
        with pytest.raises(UnknownKey):  # the right id with another secret
            await cache.callers.find(Credential.generate(PREFIXES["live"], key.id.removeprefix("key_"), peppers).text)
    assert cache.status().unknown == 50
    assert (cache.status().keys, cache.status().tenants) == (1, 1)
    assert len(cache._caller_index.by_fingerprint) == 1
    assert len(cache._keys.keys[key.id].fingerprints) == 1
    assert not cache._flights
    assert not cache._flights._changed
    assert source.reads.count(key.id) == 1


async def test_what_is_known_of_changes_is_bounded_too(
    source: FakeSource, peppers: Peppers, clock: ManualClock
) -> None:
    cache = cache_of(source, peppers, clock, max_tenants=10)
    for index in range(200):
        await cache.apply_changes([Announcement(index, f"t{index}", config=True)])
    assert len(cache._validator.required_stamps) <= 10
    await cache.close()


@pytest.mark.parametrize("text", ["", "\ud800", "lf_live_", "lf_live_" + "ü" * 50, "x" * 100_000, "lf_live_\0"])
async def test_what_can_not_be_a_key_is_unknown_without_a_look_up(
    text: str, source: FakeSource, cache: CatalogCache
) -> None:
    source.reads.clear()
    with pytest.raises(UnknownKey):
        await cache.callers.find(text)
    assert not source.reads


async def test_when_keys_were_last_used_is_returned_once(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, clock: ManualClock
) -> None:
    key, text = source.add_key(peppers, "acme")
    await cache.callers.find(text)
    clock.advance_us(5)
    cache.callers.get(text)
    assert cache.callers.take_last_used() == {key.id: clock.now_us()}
    assert cache.callers.take_last_used() == {}


# --- The end ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_closing_during_a_read_leaves_no_task_waiting(
    source: FakeSource, cache: CatalogCache, peppers: Peppers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_flight, "CLOSE_SECONDS", 0.05)
    _, text = source.add_key(peppers, "acme")
    async with source.held("acme"):
        requests = [asyncio.create_task(cache.callers.find(text)) for _ in range(3)]
        await source.until_waiting()
        await cache.close()
        done, waiting = await asyncio.wait(requests, timeout=30)
        assert len(done) == 3
        assert not waiting
    assert not cache._flights
    await cache.close()


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(8))
async def test_what_is_begun_to_be_read_while_it_is_closed_ends_too(
    steps: int, source: FakeSource, cache: CatalogCache, peppers: Peppers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that has just read its key reads its tenant next."""
    monkeypatch.setattr(single_flight, "CLOSE_SECONDS", 0.05)
    key, text = source.add_key(peppers, "acme")
    async with source.held("acme"):
        async with source.held(key.id) as let_go:
            requests = [asyncio.create_task(cache.callers.find(text)) for _ in range(3)]
            await source.until_waiting()
            let_go()
            for _ in range(steps):
                await asyncio.sleep(0)
            await asyncio.wait_for(cache.close(), 30)
        _, waiting = await asyncio.wait(requests, timeout=30)
        assert not waiting
        errors = [request.exception() for request in requests]
        assert {type(error) for error in errors} <= {CatalogUnavailable, type(None)}
        assert not cache._flights


async def test_a_load_that_breaks_in_an_unexpected_way_is_logged_and_the_old_snapshot_serves_on(
    source: FakeSource,
    cache: CatalogCache,
    peppers: Peppers,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, text = source.add_key(peppers, "acme")
    caller = await cache.callers.find(text)
    config = source.configs["acme"]
    broken = msgspec.structs.replace(config.tenant, revision=9)
    source.configs["acme"] = TenantConfig(broken, (), (None,))  # type: ignore[arg-type]
    clock.advance_us(MINUTE_US)
    with caplog.at_level(logging.ERROR):
        assert cache.callers.get(text) is caller
        await settled(cache)
    assert "catalog.refresh_failed" in caplog.text
    assert cache.callers.get(text) is caller

    source.configs["acme"] = config
    await cache.apply_changes([source.change("acme", revision=10, suspended=True)])
    clock.advance_us(2_000_000)
    cache.callers.get(text)
    await settled(cache)
    found = cache.callers.get(text)
    assert found is not None
    assert found.snapshot.tenant.suspended
