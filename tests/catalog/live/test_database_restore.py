"""A database that is restored from a backup while processes run: its state applies, and no change that it lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete

from limitforge import Limiter
from limitforge.catalog.database import tables
from limitforge.catalog.database.database import Database
from limitforge.catalog.history import Stamp
from limitforge.catalog.model import OPERATOR, Key, Plan, Tenant
from limitforge.core.limits import Mode
from limitforge.errors import CatalogUnavailable, Forbidden, UnknownKey
from limitforge.stores.redis.catalog_redis import CatalogRedis
from tests.catalog.backups import back_up, restore
from tests.catalog.environments import Environment, each_database, only_postgres_with_redis, only_sqlite_with_redis
from tests.catalog.replicas import (
    PATIENT,
    Account,
    Replica,
    closing,
    copied_config,
    create_account,
    eventually,
    set_limits,
    set_operator_mode,
    shared_copies,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_polls")]


async def lost_future(
    environment: Environment, replica: Replica, folder: Path, limits: str = "8/minute"
) -> tuple[Account, Path]:
    """Return an account with 5/minute in the backup and three changes since, and the backup."""
    account = await create_account(replica.catalog)
    file = await back_up(environment.database_url, folder)
    for number in (6, 7):
        await set_limits(replica.catalog, account, f"{number}/minute")
    await set_limits(replica.catalog, account, limits)
    return account, file


async def test_after_a_restore_every_process_decides_by_what_is_in_the_database(
    environment: Environment, tmp_path: Path
) -> None:
    replicas = [await environment.replica() for _ in range(3)]
    account, file = await lost_future(environment, replicas[0], tmp_path)
    for replica in replicas:
        await replica.seconds_until(account.text, 8)
    await restore(environment.database_url, file)
    for replica in replicas:
        await replica.seconds_until(account.text, 5)
    cold = await environment.replica()
    assert await cold.limit(account.text) == 5


@each_database
async def test_a_change_right_after_a_restore_is_in_force_when_it_is_answered(
    environment: Environment, tmp_path: Path
) -> None:
    """Its revision is lower than those that the processes have seen."""
    here, there = await environment.replica(), await environment.replica()
    account, file = await lost_future(environment, here, tmp_path)
    await there.seconds_until(account.text, 8)
    await restore(environment.database_url, file)
    await set_limits(here.catalog, account, "15/minute")
    assert await here.limit(account.text) == 15
    await there.seconds_until(account.text, 15)
    async with here.catalog.edit("test") as edit:
        await edit.update(Tenant, account.tenant.id, {"suspended": True})
    assert await here.error(account.text) is Forbidden
    await there.seconds_until(account.text, Forbidden)


@each_database
async def test_a_restored_database_that_has_come_further_than_a_process_is_noticed(
    environment: Environment, tmp_path: Path
) -> None:
    """The numbers continue without a gap: only the ids show the restore."""
    here, writer = await environment.replica(), await environment.writer()
    account, file = await lost_future(environment, here, tmp_path)
    other = await create_account(writer, "other")
    await here.seconds_until(account.text, 8)
    await here.seconds_until(other.text, 5)
    await here.live.close()
    await restore(environment.database_url, file)
    for number in range(10, 20):
        await set_limits(writer, account, f"{number}/minute")
    await set_limits(writer, account, "5/minute")  # a row that the node has in its past
    filler = await create_account(writer, "filler")
    for number in range(10, 20):
        await set_limits(writer, filler, f"{number}/minute")
    await here.live.start()
    await here.seconds_until(account.text, 5)
    await here.seconds_until(filler.text, 19)
    await here.seconds_until(other.text, UnknownKey)


@each_database
async def test_the_same_number_of_changes_after_a_restore_is_noticed(environment: Environment, tmp_path: Path) -> None:
    """Three changes were lost and three others made, so the numbers are equal."""
    here, writer = await environment.replica(), await environment.writer()
    account, file = await lost_future(environment, here, tmp_path)
    await here.seconds_until(account.text, 8)
    await here.live.close()
    await restore(environment.database_url, file)
    for number in (16, 17, 18):
        await set_limits(writer, account, f"{number}/minute")
    await here.live.start()
    await here.seconds_until(account.text, 18)


@each_database
async def test_what_was_suspended_disabled_and_deleted_in_the_lost_time_is_as_the_backup_has_it(
    environment: Environment, tmp_path: Path
) -> None:
    here, there = await environment.replica(), await environment.replica()
    accounts = {name: await create_account(here.catalog, name) for name in ("suspended", "disabled", "deleted", "kept")}
    async with here.catalog.edit("test") as edit:
        await edit.set_key_disabled(accounts["kept"].key.id, disabled=True)
    file = await back_up(environment.database_url, tmp_path)
    async with here.catalog.edit("test") as edit:
        await edit.update(Tenant, accounts["suspended"].tenant.id, {"suspended": True})
        await edit.set_key_disabled(accounts["disabled"].key.id, disabled=True)
        await edit.delete(Key, accounts["deleted"].key.id)
        await edit.set_key_disabled(accounts["kept"].key.id, disabled=False)
    await set_operator_mode(here.catalog, Mode.OFF)
    late = await create_account(here.catalog, "late")
    for replica in (here, there):
        await replica.seconds_until(accounts["suspended"].text, Forbidden)
        await replica.seconds_until(accounts["disabled"].text, Forbidden)
        await replica.seconds_until(accounts["deleted"].text, UnknownKey)
        await replica.seconds_until(accounts["kept"].text, None)
        await replica.seconds_until(late.text, None)
    await restore(environment.database_url, file)
    for replica in (here, there):
        for name in ("suspended", "disabled", "deleted"):
            await replica.seconds_until(accounts[name].text, 5)
        await replica.seconds_until(accounts["kept"].text, Forbidden)
        await replica.seconds_until(late.text, UnknownKey)


@each_database
async def test_a_database_that_is_restored_twice_is_believed_twice(environment: Environment, tmp_path: Path) -> None:
    here, there = await environment.replica(), await environment.replica()
    account, file = await lost_future(environment, here, tmp_path)
    for number in (11, 12):
        await restore(environment.database_url, file)
        await there.seconds_until(account.text, 5)
        await set_limits(here.catalog, account, f"{number}/minute")
        assert await here.limit(account.text) == number
        await there.seconds_until(account.text, number)


@each_database
async def test_several_processes_that_notice_at_once_begin_one_timeline(
    environment: Environment, tmp_path: Path
) -> None:
    replicas = [await environment.replica() for _ in range(4)]
    account, file = await lost_future(environment, replicas[0], tmp_path)
    for replica in replicas:
        await replica.seconds_until(account.text, 8)
    await restore(environment.database_url, file)
    await asyncio.gather(*(replica.live.catch_up() for replica in replicas))
    await asyncio.gather(*(replica.live.catch_up() for replica in replicas))
    heads = {replica.live._history.head for replica in replicas}
    assert len(heads) == 1
    (head,) = heads
    assert head is not None
    assert head.timeline >> 32 == 1


@only_postgres_with_redis
async def test_after_a_restore_with_all_processes_stopped_no_copy_of_the_lost_time_counts(
    environment: Environment, tmp_path: Path
) -> None:
    async with Replica(environment.database_url, environment.redis_url, peppers=environment.peppers) as before:
        account, file = await lost_future(environment, before, tmp_path)
        await before.limit(account.text)
    await restore(environment.database_url, file)
    here, there = await environment.replica(), await environment.replica()
    assert await here.limit(account.text) == 5
    await set_limits(here.catalog, account, "15/minute")
    assert await here.limit(account.text) == 15
    await there.seconds_until(account.text, 15)
    copies = shared_copies(here.shared, environment.peppers)

    async def is_copied() -> bool:
        copy = await copied_config(copies, account.tenant.id)
        return copy is not None and copy.plans[0].limits[0]["limit"] == 15

    await eventually(is_copied)


@only_sqlite_with_redis
async def test_a_copy_that_is_written_late_by_a_process_of_the_lost_time_is_not_believed(
    environment: Environment, tmp_path: Path
) -> None:
    """The copy was read before the restore, and is written after all others have noticed it."""
    here = await environment.replica()
    account, file = await lost_future(environment, here, tmp_path)
    lost, key = await here.catalog.tenant_config(account.tenant.id), await here.catalog.get(Key, account.key.id)
    stamp = here.live._history.head
    assert stamp is not None
    far = Stamp(stamp.timeline, stamp.revision + 1_000, 7)
    await restore(environment.database_url, file)
    async with here.catalog.edit("test") as edit:
        await edit.set_key_disabled(account.key.id, disabled=True)
    assert here.shared is not None
    copies = shared_copies(here.shared, environment.peppers)
    for late in (stamp, far):
        await clear(here.shared, account)
        await copies.put_all({account.tenant.id: lost}, {}, late)
        await copies.put_all({}, {key.id: key}, late)
        cold = await environment.replica()
        assert await cold.error(account.text) is Forbidden
        await here.seconds_until(account.text, Forbidden)


async def clear(shared: Any, account: Account) -> None:
    for name in (f"lf:{{{account.tenant.id}}}:%c", f"lf:{{{account.key.id}}}:%k"):
        await shared._call(name, "DEL", name)


@only_sqlite_with_redis
async def test_a_message_of_the_lost_time_deletes_nothing(environment: Environment, tmp_path: Path) -> None:
    """The message was sent during the restore. The key that it deletes exists again."""
    messages: list[bytes] = []

    class Recording(CatalogRedis):
        async def publish(self, channel: str, message: bytes) -> None:
            messages.append(message)
            await super().publish(channel, message)

    assert environment.redis_url is not None
    here = await environment.replica(shared=Recording(environment.redis_url))
    account = await create_account(here.catalog)
    file = await back_up(environment.database_url, tmp_path)
    async with here.catalog.edit("test") as edit:
        await edit.delete(Key, account.key.id)
    await restore(environment.database_url, file)
    await here.seconds_until(account.text, 5)
    await eventually(lambda: "redis" in here.live.status().listening)

    async def has_settled() -> bool:
        loads = here.live.status().cache.loads
        await asyncio.sleep(0.5)
        return here.live.status().cache.loads == loads

    await eventually(has_settled)  # it learns of the restore in several ways
    before = here.live.status().cache.loads
    for message in [each for each in messages if account.key.id.encode() in each]:
        await here.shared.publish("lf:%changes", message)
    for _ in range(50):
        assert await here.error(account.text) is None
        await asyncio.sleep(0.01)
    assert here.live.status().cache.loads == before


@pytest.mark.parametrize(
    ("when", "environment"),
    [("running", "postgres and redis"), ("stopped", "sqlite and redis")],
    indirect=["environment"],
)
async def test_overrides_of_the_lost_time_end_and_those_of_the_backup_act_again(
    when: str, environment: Environment, tmp_path: Path
) -> None:
    assert environment.redis_url is not None
    url = {"limiter_url": environment.redis_url}
    here = await environment.replica(**url)
    account = await create_account(here.catalog)
    own = {"tenant_id": account.tenant.id, "ttl_seconds": 3_600, "limits": {"minute": {"limit": 50}}}
    async with here.catalog.edit("test") as edit:
        kept = await edit.set_override({**own, "subject": "kept"})
    other = await create_account(here.catalog, "other")
    file = await back_up(environment.database_url, tmp_path)
    async with here.catalog.edit("test") as edit:
        await edit.delete(type(kept), kept.id)
        await edit.set_override({**own, "tenant_id": other.tenant.id, "subject": "lost"})
    limiter = Limiter.connect(environment.redis_url, options=PATIENT)
    async with closing(limiter):

        async def subjects(account: Account) -> list[str]:
            page = await limiter.list_overrides(tenant=account.tenant.id, cursor=None, page=10)
            return [each.subject for each in page.overrides]

        assert (await subjects(account), await subjects(other)) == ([], ["lost"])
        if when == "stopped":
            await here.live.close()
        await restore(environment.database_url, file)
        if when == "stopped":
            await environment.replica(**url)

        async def is_as_in_the_backup() -> bool:
            return (await subjects(account), await subjects(other)) == (["kept"], [])

        await eventually(is_as_in_the_backup)


@pytest.mark.parametrize("environment", ["sqlite", "postgres"], indirect=True)
async def test_overrides_in_a_processes_own_memory_are_as_in_the_backup(
    environment: Environment, tmp_path: Path
) -> None:
    here = await environment.replica()
    account = await create_account(here.catalog)
    file = await back_up(environment.database_url, tmp_path)
    async with here.catalog.edit("test") as edit:
        changes = {"limits": {"minute": {"limit": 50}}, "ttl_seconds": 3_600}
        await edit.set_override({"tenant_id": account.tenant.id, "subject": "s", **changes})
    assert await here.limit(account.text) == 50
    await restore(environment.database_url, file)
    await here.seconds_until(account.text, 5)


@each_database
async def test_an_override_whose_plan_had_another_algorithm_in_the_lost_time_acts_again(
    environment: Environment, tmp_path: Path
) -> None:
    """Small limits are counted exactly, large ones approximately. The name is the same, so the override looks right."""
    here = await environment.replica(
        **({} if environment.redis_url is None else {"limiter_url": environment.redis_url})
    )
    account = await create_account(here.catalog, limits="20/minute")
    async with here.catalog.edit("test") as edit:
        override = {"subject": "s", "limits": {"minute": {"limit": 3}}, "ttl_seconds": 3_600}
        await edit.set_override({"tenant_id": account.tenant.id, **override})
    await here.seconds_until(account.text, 3)
    file = await back_up(environment.database_url, tmp_path)
    await set_limits(here.catalog, account, "100/minute")
    await here.seconds_until(account.text, 3)
    await restore(environment.database_url, file)
    repair: Any = here.live._full_sync
    await eventually(lambda: not repair.is_pending and here.live._history.newest_timeline > 0)
    await here.seconds_until(account.text, 3)


@each_database
async def test_an_outbox_that_was_tidied_is_no_restore(
    environment: Environment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last row was deleted after a quiet year, and the next one names its id."""
    here, writer = await environment.replica(), await environment.writer()
    account = await create_account(here.catalog)
    await here.seconds_until(account.text, 5)
    async with writer.database.writing() as connection:
        await connection.execute(delete(tables.outbox))
    await set_limits(writer, account, "6/minute")
    await here.seconds_until(account.text, 6)
    assert "restored" not in caplog.text
    assert "catalog.changes_missed" not in caplog.text


@each_database
async def test_a_restored_database_that_can_not_be_written_yet_is_believed_all_the_same(
    environment: Environment, tmp_path: Path
) -> None:
    class ReadOnly(Database):
        is_read_only = False

        def writing(self) -> Any:
            if self.is_read_only:
                raise CatalogUnavailable("the test says that it can't be written")
            return super().writing()

    here = await environment.replica()
    account, file = await lost_future(environment, here, tmp_path)
    await here.seconds_until(account.text, 8)
    here.database.__class__ = ReadOnly
    here.database.is_read_only = True  # type: ignore[attr-defined]
    await restore(environment.database_url, file)
    await here.seconds_until(account.text, 5)
    assert here.live.status().database == "degraded"
    here.database.is_read_only = False  # type: ignore[attr-defined]
    await eventually(lambda: here.live.status().database == "ok")
    assert await here.limit(account.text) == 5


@each_database
async def test_plans_that_were_made_and_lost_are_not_served_by_any_process(
    environment: Environment, tmp_path: Path
) -> None:
    """The operator's too."""
    here, there = await environment.replica(), await environment.replica()
    account = await create_account(here.catalog)
    file = await back_up(environment.database_url, tmp_path)
    async with here.catalog.edit("test") as edit:
        plan = await edit.create(Plan, {"tenant_id": OPERATOR, "name": "fleet", "limits": "2/minute"})
        await edit.update(Tenant, OPERATOR, {"default_plan_id": plan.id})
    await there.seconds_until(account.text, 2)
    await restore(environment.database_url, file)
    for replica in (here, there):
        await replica.seconds_until(account.text, 5)
    assert msgspec.structs.asdict(await here.catalog.get(Tenant, OPERATOR))["default_plan_id"] is None


@only_postgres_with_redis
async def test_a_restore_is_noticed_by_a_process_that_got_the_lost_changes_while_it_was_cut_off(
    environment: Environment, tmp_path: Path
) -> None:
    """It knows the lost changes only from Redis: its own history did not advance."""
    here, there = await environment.replica(), await environment.replica()
    account = await create_account(there.catalog)
    await here.seconds_until(account.text, 5)
    await eventually(lambda: "redis" in here.live.status().listening)
    file = await back_up(environment.database_url, tmp_path)
    cut_off(here.database)
    await eventually(lambda: here.live.status().database == "degraded")
    for number in (6, 7, 9, 10, 11, 8):
        await set_limits(there.catalog, account, f"{number}/minute")
    await here.seconds_until(account.text, 8)
    await there.close()
    await restore(environment.database_url, file)
    reconnect(here.database)
    await here.seconds_until(account.text, 5)
    await set_limits(here.catalog, account, "3/minute")
    assert await here.limit(account.text) == 3


def cut_off(database: Database) -> None:
    @contextlib.asynccontextmanager
    async def refused() -> AsyncIterator[Any]:
        raise CatalogUnavailable("the test says that it is away")
        yield

    database.reading = database.writing = refused  # type: ignore[method-assign]


def reconnect(database: Database) -> None:
    del database.reading, database.writing
