"""A program that writes to Redis without knowing the pepper can only make processes ask the database."""

import logging
import struct
from collections.abc import AsyncIterator

import msgspec
import pytest
import redis as redis_py

from limitforge import ManualClock
from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.database import Database
from limitforge.catalog.history import Stamp
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.catalog.live.shared_copies import CLOCK_SKEW_SECONDS, COPY_SECONDS
from limitforge.catalog.live.signing import WARN_SECONDS, Signer
from limitforge.catalog.model import Key, Plan
from limitforge.errors import CatalogUnavailable, UnknownKey
from limitforge.stores.redis.catalog_redis import CatalogRedis
from tests.catalog.conftest import PEPPERS
from tests.catalog.environments import Environment, one_database, only_sqlite_with_redis, only_with_redis
from tests.catalog.replicas import (
    FakeSource,
    Replica,
    cache_of,
    copied_config,
    copied_key,
    create_account,
    events_of,
    eventually,
    set_limits,
    shared_copies,
)

MINUTE_US = 60_000_000
OLD, NEW, OTHER = PEPPERS, f"{PEPPERS},2:a second one that is newer", "1:a pepper of another deployment"


@pytest.fixture
async def shared(redis_url: str) -> AsyncIterator[CatalogRedis]:
    shared = CatalogRedis(redis_url)
    yield shared
    await shared.close()


@pytest.fixture
def client(redis_url: str) -> redis_py.Redis:
    """A program that can write to Redis, and does not know the pepper."""
    return redis_py.Redis.from_url(redis_url)


def key_copy(identity: str) -> str:
    return f"lf:{{{identity}}}:%k"


def config_copy(identity: str) -> str:
    return f"lf:{{{identity}}}:%c"


def stored(client: redis_py.Redis, name: str) -> bytes:
    found = client.get(name)
    assert isinstance(found, bytes)
    return found


def a_node(database: Database, peppers: Peppers, clock: ManualClock, shared: CatalogRedis) -> LiveCatalog:
    """Return a live catalog without background tasks."""
    return LiveCatalog(database, peppers, catalog_redis=shared, clock=clock)


# --- Copies ----------------------------------------------------------------------------------------------------------


@one_database
async def test_a_key_whose_copy_names_another_tenant_acts_for_its_own(
    database: Database, peppers: Peppers, clock: ManualClock, shared: CatalogRedis, client: redis_py.Redis
) -> None:
    writer, reader = (a_node(database, peppers, clock, shared) for _ in range(2))
    mine, theirs = await create_account(writer.catalog, "mine"), await create_account(writer.catalog, "theirs")
    name = key_copy(mine.key.id)
    forged = stored(client, name).replace(mine.tenant.id.encode(), theirs.tenant.id.encode())
    assert theirs.tenant.id.encode() in forged
    client.set(name, forged)
    caller = await reader.cache.callers.find(mine.text)
    assert (caller.key, caller.snapshot.tenant.id) == (mine.key, mine.tenant.id)
    for live_catalog in (writer, reader):
        await live_catalog.close()


@one_database
async def test_a_tenant_whose_copy_was_given_other_limits_keeps_its_own(
    database: Database, peppers: Peppers, clock: ManualClock, shared: CatalogRedis, client: redis_py.Redis
) -> None:
    writer, reader = (a_node(database, peppers, clock, shared) for _ in range(2))
    account = await create_account(writer.catalog, limits="1234/minute")
    name = config_copy(account.tenant.id)
    copy = stored(client, name)
    packed, more = (msgspec.msgpack.encode({"limit": number}) for number in (1_234, 9_999))
    assert packed[1:] in copy
    client.set(name, copy.replace(packed[1:], more[1:]))
    caller = await reader.cache.callers.find(account.text)
    assert caller.snapshot.config.plans == (account.plan,)
    for live_catalog in (writer, reader):
        await live_catalog.close()


@one_database
async def test_a_copy_that_was_moved_to_another_name_is_not_read(
    database: Database, peppers: Peppers, clock: ManualClock, shared: CatalogRedis, client: redis_py.Redis
) -> None:
    writer, reader = (a_node(database, peppers, clock, shared) for _ in range(2))
    mine = await create_account(writer.catalog, "mine", "5/minute")
    theirs = await create_account(writer.catalog, "theirs", "500/minute")
    client.set(config_copy(mine.tenant.id), stored(client, config_copy(theirs.tenant.id)))
    client.set(key_copy(mine.key.id), stored(client, key_copy(theirs.key.id)))
    caller = await reader.cache.callers.find(mine.text)
    assert (caller.key, caller.snapshot.tenant.id) == (mine.key, mine.tenant.id)
    assert caller.snapshot.config.plans == (mine.plan,)
    for live_catalog in (writer, reader):
        await live_catalog.close()


async def test_no_byte_of_a_copy_can_be_changed_left_out_or_added(
    peppers: Peppers, shared: CatalogRedis, client: redis_py.Redis
) -> None:
    source = FakeSource()
    key, _ = source.add_key(peppers, "acme")
    copies = shared_copies(shared, peppers)
    await copies.put_all({}, {key.id: key}, Stamp(0, 1))
    name = key_copy(key.id)
    copy = stored(client, name)
    for index in range(len(copy)):
        client.set(name, copy[:index] + bytes([copy[index] ^ 1]) + copy[index + 1 :])
        assert await copies.get_key(key.id) is None, index
    for other in (*(copy[:end] for end in range(len(copy))), copy[1:], copy + b"\0", b"\0" + copy):
        client.set(name, other)
        assert await copies.get_key(key.id) is None
    client.set(name, copy)
    assert await copied_key(copies, key.id) == key


async def test_without_a_database_a_forged_copy_is_answered_with_unavailable(
    peppers: Peppers, clock: ManualClock, shared: CatalogRedis, client: redis_py.Redis
) -> None:
    source = FakeSource()
    for tenant_id in ("mine", "them"):
        source.add_tenant(tenant_id)
    key, text = source.add_key(peppers, "mine")
    copies = shared_copies(shared, peppers)
    for tenant_id, config in source.configs.items():
        await copies.put_all({tenant_id: config}, {}, Stamp(0, 1))
    await copies.put_all({}, {key.id: key}, Stamp(0, 1))
    source.is_down = True
    cache = cache_of(source, peppers, clock, copies=copies)
    client.set(key_copy(key.id), (copy := stored(client, key_copy(key.id))).replace(b"mine", b"them"))
    with pytest.raises(CatalogUnavailable):
        await cache.callers.find(text)
    client.set(key_copy(key.id), copy)
    assert (await cache.callers.find(text)).snapshot.tenant.id == "mine"
    await cache.close()


async def test_a_copy_that_was_kept_and_put_back_later_is_not_read(
    peppers: Peppers, clock: ManualClock, shared: CatalogRedis, client: redis_py.Redis
) -> None:
    """The attacker puts the copy of a revoked key back, and controls the TTLs of Redis."""
    source = FakeSource()
    key, _ = source.add_key(peppers, "acme")
    copies = shared_copies(shared, peppers, wall_clock=clock)
    await copies.put_all({}, {key.id: key}, Stamp(0, 1))
    await copies.put_head(Stamp(0, 1))
    name = key_copy(key.id)
    client.set(name, stored(client, name))  # without a TTL
    clock.advance_us(int(COPY_SECONDS * 1_000_000))
    assert await copied_key(copies, key.id) == key  # the clock of its writer may be ahead of this one
    clock.advance_us(int(CLOCK_SKEW_SECONDS * 1_000_000))
    assert await copies.get_key(key.id) is None
    assert await copies.head() == Stamp(0, 1)


@only_sqlite_with_redis
async def test_a_copy_of_a_deleted_key_that_was_put_back_is_refused_for_good_once_the_database_was_asked(
    environment: Environment, client: redis_py.Redis, clock: ManualClock
) -> None:
    """The process started after the deletion, so it got no announcement."""
    async with Replica(environment.database_url, environment.redis_url, peppers=environment.peppers) as before:
        account = await create_account(before.catalog)
        name = key_copy(account.key.id)
        kept = stored(client, name)
        async with before.catalog.edit("test") as edit:
            await edit.delete(Key, account.key.id)
    client.set(name, kept)
    here = await environment.replica(clock=clock)
    cache = here.live.cache
    await cache.callers.find(account.text)
    clock.advance_us(MINUTE_US)
    cache.confirm_up_to_date()  # as a process does that has read the outbox to its end
    cache.callers.get(account.text)  # it is time to read the key from the database
    await eventually(lambda: cache.callers.get(account.text) is None)
    for _ in range(3):
        clock.advance_us(MINUTE_US)  # longer than an unknown key is remembered
        with pytest.raises(UnknownKey):
            await cache.callers.find(account.text)


@only_with_redis
async def test_a_forged_head_of_history_does_not_make_processes_discard_everything(
    environment: Environment, client: redis_py.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with Replica(environment.database_url, environment.redis_url, peppers=environment.peppers) as before:
        account = await create_account(before.catalog)
    name = "lf:{%head}:"
    head = stored(client, name)
    client.set(name, b"\xff" * 8 + head[8:17] + struct.pack(">Q", 1_000_000) + head[25:])
    here = await environment.replica()
    await here.seconds_until(account.text, 5)
    assert "catalog.restored" not in caplog.text


# --- Peppers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writer", "reader", "is_read"),
    [(OLD, OLD, True), (OLD, NEW, True), (NEW, NEW, True), (NEW, OLD, False), (OTHER, OLD, False)],
    ids=["same", "new reads old", "new reads new", "old reads new", "other"],
)
async def test_copies_are_read_by_processes_that_have_the_pepper_of_their_writer(
    writer: str, reader: str, is_read: bool, shared: CatalogRedis
) -> None:
    source = FakeSource()
    config = source.add_tenant("acme")
    await shared_copies(shared, Peppers.parse(writer)).put_all({"acme": config}, {}, Stamp(0, 1))
    found = await copied_config(shared_copies(shared, Peppers.parse(reader)), "acme")
    assert found == (config if is_read else None)


@only_sqlite_with_redis
async def test_changes_reach_all_processes_while_a_new_pepper_is_introduced(environment: Environment) -> None:
    """Neither accepts all copies and messages of the other: both ask the database."""
    old = await environment.replica()
    account = await create_account(old.catalog)
    async with Replica(environment.database_url, environment.redis_url, peppers=Peppers.parse(NEW)) as new:
        for number, writer, reader in ((6, old, new), (7, new, old), (8, old, new)):
            await set_limits(writer.catalog, account, f"{number}/minute")
            await reader.seconds_until(account.text, number)
            await writer.seconds_until(account.text, number)


# --- Messages --------------------------------------------------------------------------------------------------------


@only_sqlite_with_redis
async def test_a_forged_message_revokes_nothing_and_begins_no_timeline(
    environment: Environment, client: redis_py.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    here = await environment.replica()
    account = await create_account(here.catalog)
    await here.seconds_until(account.text, 5)
    await eventually(lambda: "redis" in here.live.status().listening)
    before = here.database.statement_count
    forged = Announcement(
        2**40, account.tenant.id, config=True, gone=(account.key.id,), revokes=True, timeline=2**50, change_id=7
    )
    assert here.live._publisher is not None
    for _ in range(500):
        client.publish(here.live._publisher.channel, msgspec.msgpack.encode([forged]))
    await eventually(lambda: "catalog.rejected" in caplog.text, seconds=20)
    for _ in range(20):
        assert await here.limit(account.text) == 5
    assert here.database.statement_count - before < 100, "it does not read the database for each of them"
    await set_limits(here.catalog, account, "6/minute")
    await here.seconds_until(account.text, 6)
    assert "catalog.restored" not in caplog.text
    assert caplog.text.count("catalog.rejected") == 1


@only_sqlite_with_redis
async def test_a_message_that_is_sent_again_changes_nothing(environment: Environment, client: redis_py.Redis) -> None:
    messages: list[bytes] = []

    class Recording(CatalogRedis):
        async def publish(self, channel: str, message: bytes) -> None:
            messages.append(message)
            await super().publish(channel, message)

    assert environment.redis_url is not None
    here = await environment.replica(shared=Recording(environment.redis_url))
    account = await create_account(here.catalog)
    await set_limits(here.catalog, account, "6/minute")
    await here.seconds_until(account.text, 6)
    await eventually(lambda: "redis" in here.live.status().listening)
    loads = here.live.status().cache.loads
    assert here.live._publisher is not None
    for message in 50 * messages:
        client.publish(here.live._publisher.channel, message)
    async with here.catalog.edit("test") as edit:
        await edit.update(Plan, account.plan.id, {"limits": "7/minute"})
    await here.seconds_until(account.text, 7)
    assert here.live.status().cache.loads - loads < 10


# --- The log ---------------------------------------------------------------------------------------------------------


def test_rejections_are_logged_once_a_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    sealer = Signer(Peppers.parse(OLD), clock)
    sealed = sealer.sign("a", b"content")
    with caplog.at_level(logging.WARNING):
        for _ in range(1_000):
            assert sealer.verify("b", sealed) is None
        clock.advance_us(int(WARN_SECONDS * 1_000_000))
        assert sealer.verify("a", Signer(Peppers.parse(OTHER)).sign("a", b"content")) is None
    assert events_of(caplog.records) == [
        ("catalog.rejected", {"name": "b", "reason": "wrong_mac", "count": 1}),
        ("catalog.rejected", {"name": "a", "reason": "unknown_pepper", "count": 1_000}),
    ]
    assert sealer.verify("a", sealed) == b"content"
