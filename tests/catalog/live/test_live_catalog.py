"""How a live catalog follows changes of other processes: with Redis and without, on SQLite and on Postgres."""

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

import pytest
import redis as redis_py
from sqlalchemy import delete, update
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge import ManualClock
from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import outbox, tables
from limitforge.catalog.database.database import Database
from limitforge.catalog.live import live_catalog as live_catalog_module
from limitforge.catalog.live import outbox_relay as relay_module
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.catalog.model import Key, Plan, Tenant, TenantConfig
from limitforge.core.limits import Mode
from limitforge.errors import CatalogUnavailable, Forbidden, InvalidInput, UnknownKey
from limitforge.stores.redis.catalog_redis import CatalogRedis
from tests.catalog.conftest import decode_announcements
from tests.catalog.environments import (
    Environment,
    each_database,
    only_postgres,
    only_postgres_with_redis,
    only_sqlite,
    only_sqlite_with_redis,
    only_with_redis,
    without_redis,
)
from tests.catalog.live.test_processes import cut_listeners
from tests.catalog.replicas import (
    Replica,
    closing,
    copied_config,
    create_account,
    eventually,
    set_limits,
    set_operator_mode,
    shared_copies,
    wrong_key,
)
from tests.contract.test_catalog_redis import sockets
from tests.postgres import PostgresServer
from tests.servers import RedisServer

pytestmark = pytest.mark.usefixtures("quick_polls")

Record = Callable[[str, object], None]


# --- Changes made elsewhere ------------------------------------------------------------------------------------------


async def is_published(replica: Replica) -> bool:
    async with replica.database.reading() as connection:
        return not await outbox.unpublished_announcements(connection, 1)


async def test_what_one_process_changes_decides_on_the_other(environment: Environment, record_property: Record) -> None:
    here, there = await environment.replica(), await environment.replica()
    account = await create_account(here.catalog)
    await there.seconds_until(account.text, 5)
    delays = {}
    await set_limits(here.catalog, account, "6/minute")
    assert await here.limit(account.text) == 6
    delays["plan"] = await there.seconds_until(account.text, 6)

    async with here.catalog.edit("test") as edit:
        await edit.update(Tenant, account.tenant.id, {"suspended": True})
    delays["suspended"] = await there.seconds_until(account.text, Forbidden)
    async with here.catalog.edit("test") as edit:
        await edit.update(Tenant, account.tenant.id, {"suspended": False})
    await there.seconds_until(account.text, 6)

    async with here.catalog.edit("test") as edit:
        await edit.set_key_disabled(account.key.id, disabled=True)
    assert await here.error(account.text) is Forbidden
    delays["disabled"] = await there.seconds_until(account.text, Forbidden)
    async with here.catalog.edit("test") as edit:
        await edit.set_key_disabled(account.key.id, disabled=False)
    await there.seconds_until(account.text, 6)

    await set_operator_mode(here.catalog, Mode.OFF)
    assert await here.limit(account.text) is None
    delays["kill switch"] = await there.seconds_until(account.text, None)
    await set_operator_mode(here.catalog, Mode.ON)
    await there.seconds_until(account.text, 6)

    async with here.catalog.edit("test") as edit:
        _, credential = await edit.rotate_key(account.key.id)
    assert await here.error(account.text) is UnknownKey
    delays["rotated"] = await there.seconds_until(account.text, UnknownKey)
    assert await there.limit(credential.text) == 6

    async with here.catalog.edit("test") as edit:
        await edit.delete(Key, account.key.id)
    assert await here.error(credential.text) is UnknownKey
    delays["deleted"] = await there.seconds_until(credential.text, UnknownKey)
    record_property("delays", delays)


async def test_what_a_writer_that_never_publishes_changes_decides_everywhere(
    environment: Environment, record_property: Record
) -> None:
    writer, there = await environment.writer(), await environment.replica()
    account = await create_account(writer)
    await there.seconds_until(account.text, 5)
    delays = []
    for number in (6, 7, 8):
        await set_limits(writer, account, f"{number}/minute")
        delays.append(await there.seconds_until(account.text, number))
    async with writer.edit("test") as edit:
        await edit.set_key_disabled(account.key.id, disabled=True)
    delays.append(await there.seconds_until(account.text, Forbidden))
    async with writer.edit("test") as edit:
        await edit.delete(Key, account.key.id)
    delays.append(await there.seconds_until(account.text, UnknownKey))
    record_property("delays", delays)


@only_with_redis
async def test_a_key_that_another_writer_changes_in_the_very_moment_it_is_first_used_is_the_new_one_soon(
    environment: Environment,
) -> None:
    """This holds no matter which copy the first request found."""
    writer, one, two = await environment.writer(), await environment.replica(), await environment.replica()
    account = await create_account(one.catalog)
    await one.limit(account.text)
    async with writer.edit("test") as edit:
        await edit.set_key_disabled(account.key.id, disabled=True)
    await two.error(account.text)
    await two.seconds_until(account.text, Forbidden)
    await one.seconds_until(account.text, Forbidden)


@only_postgres_with_redis
async def test_exactly_one_process_publishes_for_a_writer_that_did_not(environment: Environment) -> None:
    """The outdated copy is replaced as well."""
    published: list[int] = []

    class Counting(CatalogRedis):
        async def publish(self, channel: str, message: bytes) -> None:
            published.extend(each.revision for each in decode_announcements(channel, message))
            await super().publish(channel, message)

    assert environment.redis_url is not None
    replicas = [await environment.replica(shared=Counting(environment.redis_url)) for _ in range(4)]
    writer = await environment.writer()
    account = await create_account(replicas[0].catalog)
    for replica in replicas:
        await replica.seconds_until(account.text, 5)
    await eventually(lambda: is_published(replicas[0]))
    published.clear()
    copies = shared_copies(replicas[0].shared, environment.peppers)
    for number in (6, 7, 8):
        await set_limits(writer, account, f"{number}/minute")
        truth = await writer.tenant_config(account.tenant.id)

        async def is_right(truth: TenantConfig = truth) -> bool:
            return await copied_config(copies, account.tenant.id) == truth

        await eventually(is_right)
        for replica in replicas:
            await replica.seconds_until(account.text, number)
    await eventually(lambda: is_published(replicas[0]))
    for replica in replicas:
        assert replica.live._relay is not None
        await replica.live._relay.publish_pending()
    assert len(published) == len(set(published)) == 3


@only_postgres_with_redis
async def test_what_was_written_just_before_a_process_started_is_in_force_there(environment: Environment) -> None:
    """The copy is outdated, and the message comes before the subscription. So unpublished announcements must be
    processed as if they were made after the start.
    """

    class Deaf(CatalogRedis):
        """A Redis whose subscription never becomes active."""

        async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
            await asyncio.sleep(600)
            yield None

    assert environment.redis_url is not None
    async with Replica(environment.database_url, environment.redis_url, peppers=environment.peppers) as before:
        account = await create_account(before.catalog)
        await before.limit(account.text)
    writer = await environment.writer()
    await set_limits(writer, account, "6/minute")
    there = Replica(environment.database_url, peppers=environment.peppers, shared=Deaf(environment.redis_url))
    async with closing(there):
        starting = asyncio.create_task(there.live.start())
        await there.limit(account.text)
        await starting
        await there.seconds_until(account.text, 6)


@only_sqlite_with_redis
async def test_what_was_written_while_redis_was_away_is_published_when_it_is_back(
    environment: Environment, own_redis_server: RedisServer, peppers: Peppers
) -> None:
    environment.redis_url = own_redis_server.url
    here, there = await environment.replica(), await environment.replica()
    account = await create_account(here.catalog)
    await there.seconds_until(account.text, 5)
    own_redis_server.kill()
    await set_limits(here.catalog, account, "6/minute")
    await there.seconds_until(account.text, 6)
    own_redis_server.restart()
    copies = shared_copies(here.shared, peppers)

    async def is_copied() -> bool:
        copy = await copied_config(copies, account.tenant.id)
        return copy is not None and copy.plans[0].limits == (await here.catalog.get(Plan, account.plan.id)).limits

    await eventually(is_copied)


@only_postgres_with_redis
async def test_a_subscriber_whose_connection_is_cut_misses_nothing(
    environment: Environment, redis_server: RedisServer, record_property: Record
) -> None:
    here, there = await environment.replica(), await environment.replica()
    account = await create_account(here.catalog)
    await there.seconds_until(account.text, 5)
    await eventually(lambda: "redis" in there.live.status().listening)
    delays = []
    for number in range(6, 9):
        redis_server.command("CLIENT KILL TYPE pubsub")
        await set_limits(here.catalog, account, f"{number}/minute")
        delays.append(await there.seconds_until(account.text, number))
    await eventually(lambda: "redis" in there.live.status().listening)
    record_property("delays", delays)


@only_postgres
async def test_a_process_whose_listen_is_cut_misses_nothing(
    environment: Environment, postgres_server: PostgresServer, record_property: Record
) -> None:
    writer, there = await environment.writer(), await environment.replica()
    account = await create_account(writer)
    await there.seconds_until(account.text, 5)
    await eventually(lambda: "postgres" in there.live.status().listening)
    delays = []
    for number in range(6, 9):
        await eventually(lambda: asyncio.to_thread(cut_listeners, postgres_server))
        await set_limits(writer, account, f"{number}/minute")
        delays.append(await there.seconds_until(account.text, number))
    record_property("delays", delays)


@only_sqlite_with_redis
async def test_messages_of_other_programs_are_ignored(environment: Environment, redis_url: str) -> None:
    here, there = await environment.replica(), await environment.replica()
    account = await create_account(here.catalog)
    await there.seconds_until(account.text, 5)
    with redis_py.Redis.from_url(redis_url) as client:
        for message in (
            b"",
            b"\xc1",
            b"\x90",
            b"\x93\x01\x02\x03",
            b"[]",
            b"\x91\x82\xa8revision\xff\xa9tenant_id\xa0",
        ):
            client.publish("lf:%changes", message)
    await set_limits(here.catalog, account, "6/minute")
    await there.seconds_until(account.text, 6)
    assert "redis" in there.live.status().listening


@each_database
async def test_many_writes_at_once_reach_all_replicas_without_a_full_reload(
    environment: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = await environment.replica(), await environment.replica()
    accounts = [await create_account(here.catalog, f"t{index}") for index in range(4)]
    for account in accounts:
        await there.seconds_until(account.text, 5)
    caplog.clear()
    for number in range(6, 10):
        await asyncio.gather(
            *(
                set_limits((here, there)[index % 2].catalog, account, f"{number}/minute")
                for index, account in enumerate(accounts)
            )
        )
    for account in accounts:
        await there.seconds_until(account.text, 9)
        await here.seconds_until(account.text, 9)
    assert "catalog.changes_missed" not in caplog.text


class SlowDatabase(Database):
    """A database whose next reading transaction ends late."""

    is_held = False

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        async with super().reading() as connection:
            yield connection
            if self.is_held:
                self.is_held, self.go = False, asyncio.Event()
                await self.go.wait()


@without_redis
async def test_a_change_of_its_own_while_a_process_looks_for_others_makes_it_read_nothing_again(
    environment: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    """The read saw the previous revision; meanwhile the process has made a change itself."""
    database = SlowDatabase(environment.database_url)
    async with closing(database):
        live_catalog = LiveCatalog(database, environment.peppers, catalog_redis=None)
        account = await create_account(live_catalog.catalog)
        await live_catalog.catch_up()
        database.is_held = True
        looking = asyncio.create_task(live_catalog.catch_up())
        await eventually(lambda: not database.is_held)
        await set_limits(live_catalog.catalog, account, "6/minute")
        database.go.set()
        await looking
        await live_catalog.cache.close()
    assert "catalog.changes_missed" not in caplog.text


@only_sqlite_with_redis
async def test_one_edit_of_more_tenants_than_fit_into_a_batch_reaches_all_of_them(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message may have only a part of a revision."""
    monkeypatch.setattr(relay_module, "BATCH", 3)
    assert environment.redis_url is not None
    messages: list[list[Announcement]] = []

    class Counting(CatalogRedis):
        async def publish(self, channel: str, message: bytes) -> None:
            messages.append(decode_announcements(channel, message))
            await super().publish(channel, message)

    writer = await environment.writer()
    accounts = [await create_account(writer, f"t{index}") for index in range(10)]
    there = await environment.replica(shared=Counting(environment.redis_url))
    for account in accounts:
        await there.seconds_until(account.text, 5)
    await eventually(lambda: is_published(there))
    messages.clear()
    async with writer.edit("test") as edit:
        for account in accounts:
            await edit.update(Plan, account.plan.id, {"limits": "6/minute"})
    for account in accounts:
        await there.seconds_until(account.text, 6)
    await eventually(lambda: is_published(there))
    assert [len(message) for message in messages] == [3, 3, 3, 1]
    assert {each.tenant_id for message in messages for each in message} == {account.tenant.id for account in accounts}


@each_database
async def test_a_process_that_missed_more_than_is_kept_reads_everything_again(environment: Environment) -> None:
    writer = await environment.writer()
    account = await create_account(writer)
    replica = Replica(environment.database_url, environment.redis_url, peppers=environment.peppers)
    async with closing(replica):
        await replica.limit(account.text)
        await replica.live.catch_up()
        replica.live._history.move_head_back(1, 0)
        await set_limits(writer, account, "6/minute")
        async with writer.edit("test") as edit:
            await edit.set_key_disabled(account.key.id, disabled=True)
        async with replica.database.writing() as connection:
            await connection.exec_driver_sql("DELETE FROM outbox")
        await replica.live.catch_up()
        assert await replica.error(account.text) is Forbidden
        async with writer.edit("test") as edit:
            await edit.set_key_disabled(account.key.id, disabled=False)
        await replica.live.catch_up()
        assert await replica.limit(account.text) == 6


@each_database
async def test_a_database_that_was_set_back_is_believed(environment: Environment) -> None:
    """The database is restored while a process runs: its revisions are lower than those that the process has seen."""
    writer = await environment.writer()
    account = await create_account(writer)
    there = await environment.replica()
    await there.seconds_until(account.text, 5)
    before = await writer.tenant_config(account.tenant.id)
    revision = before.tenant.revision
    await set_limits(writer, account, "6/minute")
    await there.seconds_until(account.text, 6)
    async with writer.database.writing() as connection:
        await connection.exec_driver_sql("DELETE FROM plan_versions WHERE version > 1")
        await connection.exec_driver_sql("UPDATE plans SET version = 1")
        await connection.execute(delete(tables.outbox).where(tables.outbox.c.revision > revision))
        later = tables.tenants.c.revision > revision
        await connection.execute(update(tables.tenants).where(later).values(revision=revision))
        await connection.execute(update(tables.revision).values(value=revision))
    assert (await writer.tenant_config(account.tenant.id)).plans[0].limits == before.plans[0].limits
    await there.seconds_until(account.text, 5)


@only_sqlite
async def test_an_unexpected_error_does_not_stop_a_replica_from_following_changes(environment: Environment) -> None:
    """Here `on_tenant_loaded` fails for one tenant; it might be any error."""
    refused: set[str] = set()
    refusals: list[str] = []

    def placed(tenant: Tenant) -> None:
        if tenant.id in refused:
            refusals.append(tenant.id)
            raise InvalidInput("lanes", "the test says so")

    writer = await environment.writer()
    one, two = await create_account(writer, "one"), await create_account(writer, "two")
    there = await environment.replica(on_tenant_loaded=placed)
    await there.seconds_until(one.text, 5)
    await there.seconds_until(two.text, 5)
    refused.add(one.tenant.id)
    await set_limits(writer, one, "6/minute")
    await eventually(lambda: refusals)
    await set_limits(writer, two, "6/minute")
    await there.seconds_until(two.text, 6)
    refused.clear()
    await set_limits(writer, one, "7/minute")
    await there.seconds_until(one.text, 7)


# --- Keys that were used ---------------------------------------------------------------------------------------------


@without_redis
async def test_when_keys_were_used_is_written_in_batches(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_catalog_module, "LAST_USED_SECONDS", 0.1)
    writer = await environment.writer()
    account = await create_account(writer)
    there = await environment.replica()
    await there.limit(account.text)

    async def is_written() -> bool:
        return (await writer.get(Key, account.key.id)).last_used_at is not None

    await eventually(is_written)
    first = (await writer.get(Key, account.key.id)).last_used_at
    await asyncio.sleep(0.3)
    assert (await writer.get(Key, account.key.id)).last_used_at == first
    await there.limit(account.text)

    async def is_later() -> bool:
        return (await writer.get(Key, account.key.id)).last_used_at != first

    await eventually(is_later)


@without_redis
async def test_what_was_used_is_written_at_the_end(environment: Environment) -> None:
    writer = await environment.writer()
    account = await create_account(writer)
    async with Replica(environment.database_url, environment.redis_url, peppers=environment.peppers) as there:
        await there.limit(account.text)
    assert (await writer.get(Key, account.key.id)).last_used_at is not None


async def test_when_a_key_was_used_is_not_forgotten_because_the_database_was_away(
    own_postgres_server: PostgresServer, peppers: Peppers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_catalog_module, "LAST_USED_SECONDS", 0.2)
    environment = await place_on(own_postgres_server, peppers)
    async with environment.stack:
        there = await environment.replica()
        account = await create_account(there.catalog)
        await there.live.cache.callers.find(account.text)
        there.live.cache.callers.take_last_used()
        own_postgres_server.kill()
        assert there.live.cache.callers.get(account.text) is not None
        await eventually(lambda: there.live.status().database == "degraded")
        own_postgres_server.restart()

        async def is_written() -> bool:
            try:
                return (await there.catalog.get(Key, account.key.id)).last_used_at is not None
            except CatalogUnavailable:
                return False

        await eventually(is_written)


# --- Without the database --------------------------------------------------------------------------------------------


async def place_on(server: PostgresServer, peppers: Peppers, redis_url: str | None = None) -> Environment:
    database = Database(server.url)
    async with closing(database):
        await database.upgrade()
    return Environment(server.url, redis_url, peppers)


async def test_without_a_database_and_without_redis_a_process_does_not_start(
    own_postgres_server: PostgresServer, peppers: Peppers
) -> None:
    environment = await place_on(own_postgres_server, peppers)
    own_postgres_server.kill()
    async with environment.stack:
        with pytest.raises(CatalogUnavailable):
            await environment.replica()


async def test_without_a_database_a_process_starts_from_copies_and_recovers_by_itself(
    own_postgres_server: PostgresServer, peppers: Peppers, redis_url: str
) -> None:
    environment = await place_on(own_postgres_server, peppers, redis_url)
    async with environment.stack:
        first = await environment.replica()
        account = await create_account(first.catalog)
        cold = await create_account(first.catalog, "cold")
        await first.limit(account.text)
        await first.live.close()
        with redis_py.Redis.from_url(redis_url) as client:
            client.delete(f"lf:{{{cold.key.id}}}:%k")
        own_postgres_server.kill()
        there = await environment.replica()
        assert there.live.status().database == "degraded"
        assert await there.limit(account.text) == 5
        assert await there.error(cold.text) is CatalogUnavailable
        assert await there.error(wrong_key()) is CatalogUnavailable
        own_postgres_server.restart()
        await eventually(lambda: there.live.status().database == "ok")
        await there.seconds_until(cold.text, 5)
        writer = await environment.writer()
        await set_limits(writer, account, "6/minute")
        await there.seconds_until(account.text, 6)


async def test_an_idle_process_says_that_all_is_well_once_the_database_is_back(
    own_postgres_server: PostgresServer, peppers: Peppers, clock: ManualClock
) -> None:
    """It has served a stale snapshot, and no request has come since."""
    environment = await place_on(own_postgres_server, peppers)
    async with environment.stack:
        there = await environment.replica(clock=clock)
        account = await create_account(there.catalog)
        await there.limit(account.text)
        own_postgres_server.kill()
        clock.advance_us(61_000_000)
        caller = there.live.cache.callers.get(account.text)
        assert caller is not None
        await eventually(lambda: caller.is_stale)
        await eventually(lambda: there.live.status().database == "degraded")
        assert there.live.status().since == pytest.approx(clock.now_us() / 1e6, abs=120)
        own_postgres_server.restart()
        await eventually(lambda: there.live.status().database == "ok")


async def test_a_change_made_while_the_database_was_away_for_one_process_is_in_force_when_it_is_back(
    own_postgres_server: PostgresServer, peppers: Peppers
) -> None:
    environment = await place_on(own_postgres_server, peppers)
    async with environment.stack:
        there = await environment.replica()
        account = await create_account(there.catalog)
        await there.limit(account.text)
        own_postgres_server.restart()
        writer = await environment.writer()

        async def is_changed() -> bool:
            try:
                async with writer.edit("test") as edit:
                    await edit.set_key_disabled(account.key.id, disabled=True)
            except CatalogUnavailable:
                return False
            return True

        await eventually(is_changed)
        await there.seconds_until(account.text, Forbidden)


@only_sqlite_with_redis
async def test_while_redis_is_away_the_status_of_the_database_is_ok_and_the_log_is_not_flooded(
    environment: Environment, own_redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    environment.redis_url = own_redis_server.url
    there, writer = await environment.replica(), await environment.writer()
    account = await create_account(writer)
    await there.seconds_until(account.text, 5)
    await eventually(lambda: is_published(there))
    own_redis_server.kill()
    there.live._database_failed(CatalogUnavailable("as if it had been away as well"))
    caplog.clear()
    await set_limits(writer, account, "6/minute")
    await there.seconds_until(account.text, 6)
    await asyncio.sleep(1)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) <= 6, f"{len(warnings)} warnings in 1 s, such as: {warnings[-1].getMessage()}"
    assert there.live.status().database == "ok"


# --- Life cycle ------------------------------------------------------------------------------------------------------


@each_database
async def test_a_process_that_is_started_twice_does_everything_once(environment: Environment) -> None:
    there = await environment.replica()
    before = len(there.live._background.tasks)
    await there.live.start()
    assert len(there.live._background.tasks) == before


@each_database
async def test_a_process_that_was_closed_is_closed_and_can_be_started_again(environment: Environment) -> None:
    writer, there = await environment.writer(), await environment.replica()
    account = await create_account(writer)
    await there.seconds_until(account.text, 5)
    await there.live.close()
    await there.live.close()
    assert not there.live._background.tasks
    await set_limits(writer, account, "6/minute")
    await there.live.start()
    await there.seconds_until(account.text, 6)


@each_database
async def test_nothing_is_left_of_a_process_that_was_closed(environment: Environment) -> None:
    """No task, thread, socket or warning is left, in asyncio's debug mode."""
    asyncio.get_running_loop().set_debug(True)
    tasks, threads, open_sockets = asyncio.all_tasks(), set(threading.enumerate()), sockets()
    async with Replica(environment.database_url, environment.redis_url, peppers=environment.peppers) as there:
        account = await create_account(there.catalog)
        await there.limit(account.text)
        await asyncio.sleep(0.2)
    del there
    gc.collect()
    assert asyncio.all_tasks() == tasks
    await eventually(lambda: set(threading.enumerate()) <= threads)
    assert sockets() <= open_sockets


@pytest.mark.parametrize("steps", range(6))
@only_sqlite
async def test_closing_a_live_catalog_just_as_it_is_notified_ends(environment: Environment, steps: int) -> None:
    """asyncio.wait_for swallows a cancellation that comes together with what it waits for (before Python 3.12)."""
    there = await environment.replica()
    await asyncio.sleep(0.05)
    there.live._wake.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    closing_it = asyncio.create_task(there.live.close())
    done, _ = await asyncio.wait([closing_it], timeout=30)
    try:
        assert done, "closing does not end"
    finally:
        for task in there.live._background.tasks:
            task.cancel()
        await asyncio.wait([closing_it], timeout=30)


@only_sqlite_with_redis
async def test_a_process_ends_also_if_a_driver_swallows_that_it_is_to_end(environment: Environment) -> None:
    """redis-py writes within asyncio.wait_for, which does so now and then (before Python 3.12)."""

    class Swallowing(CatalogRedis):
        is_waiting = False

        async def put_many(self, copies: Mapping[str, bytes], ttl_seconds: float) -> None:
            self.is_waiting = True
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(20)

    assert environment.redis_url is not None
    shared = Swallowing(environment.redis_url)
    writer = await environment.writer()
    await create_account(writer)
    there = await environment.replica(shared=shared)
    await eventually(lambda: shared.is_waiting)
    closing_it = asyncio.create_task(there.live.close())
    done, _ = await asyncio.wait([closing_it], timeout=30)
    try:
        assert done, "closing does not end"
        left = [task for task in asyncio.all_tasks() if "limitforge/catalog" in str(task)]
        assert not left, "tasks are left after closing"
    finally:
        for task in there.live._background.tasks:
            task.cancel()
        await asyncio.wait([closing_it], timeout=30)


@each_database
async def test_a_process_can_be_closed_while_requests_wait_for_what_it_reads(environment: Environment) -> None:
    writer = await environment.writer()
    account = await create_account(writer)
    there = Replica(environment.database_url, environment.redis_url, peppers=environment.peppers)
    async with closing(there):
        await there.live.start()
        requests = [asyncio.create_task(there.limit(account.text)) for _ in range(20)]
        for _ in range(3):
            await asyncio.sleep(0)
        await asyncio.wait_for(there.live.close(), 30)
        done, waiting = await asyncio.wait(requests, timeout=30)
        assert not waiting
        for request in done:
            error = None if request.cancelled() else request.exception()
            assert not request.cancelled()
            assert error is None or isinstance(error, CatalogUnavailable)


async def test_the_status_says_what_it_listens_to_and_how_far_it_got(environment: Environment) -> None:
    there = await environment.replica()
    account = await create_account(there.catalog)
    await there.limit(account.text)
    expected = {"redis"} if environment.redis_url else set()
    expected |= {"postgres"} if environment.database_url.startswith("postgres") else set()
    await eventually(lambda: set(there.live.status().listening) == expected)
    status = there.live.status()
    assert status.database == "ok"
    assert status.revision == (await there.catalog.get(Tenant, account.tenant.id)).revision
    assert (status.cache.tenants, status.cache.keys) == (1, 1)
