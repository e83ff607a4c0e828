"""An edit is all of its changes or none of them, however it ends."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import Key, Plan, Policy, Tenant
from limitforge.errors import Conflict, InvalidInput, NotFound
from tests.catalog.conftest import PEPPERS
from tests.catalog.factories import (
    ACTOR,
    audit_of,
    new_customer,
    new_tenant,
    open_database,
    rows,
    table_contents,
    url_of,
)
from tests.child_processes import child_process


async def change_everything(edit: Edit) -> None:
    tenant = await edit.create(Tenant, {"name": "initech"})
    own = {"tenant_id": tenant.id}
    plan = await edit.create(Plan, {**own, "name": "gold", "limits": "burst=5/second"})
    await edit.update(Plan, plan.id, {"limits": "burst=6/second"})
    await edit.update(Tenant, tenant.id, {"default_plan_id": plan.id})
    await edit.create(Policy, {**own, "resource": "*", "plan_id": plan.id})
    key, _ = await edit.create_key({**own, "name": "web"})
    await edit.rotate_key(key.id, 60)
    await edit.create_token({**own, "name": "cd"})
    await edit.set_override({**own, "subject": "s", "limits": {"burst": "blocked"}, "ttl_seconds": 60})


async def change_everything_and(catalog: Catalog, then: Callable[[Edit], Awaitable[Any]]) -> None:
    async with catalog.edit(ACTOR) as edit:
        await change_everything(edit)
        await then(edit)


async def test_an_edit_of_many_changes_is_one_revision_with_an_entry_for_each(catalog: Catalog) -> None:
    before = len(await audit_of(catalog))
    async with catalog.edit(ACTOR) as edit:
        await change_everything(edit)
    entries = (await audit_of(catalog))[before:]
    assert [entry.action for entry in entries] == [
        "tenant.create",
        "plan.create",
        "plan.update",
        "tenant.update",
        "policy.create",
        "key.create",
        "key.rotate",
        "token.create",
        "override.create",
    ]
    assert await rows(catalog.database, "SELECT value FROM revision") == [(edit.revision,)]


class CallerError(Exception):
    """An error that the caller raises inside an edit."""


ERRORS: list[BaseException] = [
    CallerError("mine"),
    ValueError("mine"),
    FileNotFoundError("mine"),
    ConnectionError("mine"),
    TimeoutError("mine"),
    KeyboardInterrupt("mine"),
    asyncio.CancelledError("mine"),
    GeneratorExit("mine"),
]


async def test_an_error_that_leaves_the_block_undoes_everything_and_stays_what_it_is(
    catalog: Catalog, database: Database
) -> None:
    """An OSError of the caller is not taken for an unavailable database."""
    await new_customer(catalog)
    before = await table_contents(database)
    became: dict[str, str] = {}
    for error in ERRORS:
        try:
            await change_everything_and(catalog, raising(error))
        except BaseException as raised:  # noqa: BLE001 - the test compares any error
            if raised is not error:
                became[repr(error)] = repr(raised)
        assert await table_contents(database) == before
    assert became == {}
    await new_tenant(catalog, "afterwards")


def raising(error: BaseException) -> Callable[[Edit], Awaitable[None]]:
    async def fail(_: Edit) -> None:
        raise error

    return fail


async def test_a_refusal_in_the_middle_undoes_what_came_before_it(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)
    before = await table_contents(database)
    with pytest.raises(Conflict):
        await change_everything_and(catalog, lambda edit: edit.create(Tenant, {"name": "acme"}))
    with pytest.raises(InvalidInput):
        await change_everything_and(catalog, lambda edit: edit.update(Tenant, customer.tenant.id, {"mode": "maybe"}))
    with pytest.raises(NotFound):
        await change_everything_and(catalog, lambda edit: edit.delete(Plan, "pla_none"))
    assert await table_contents(database) == before


async def test_a_refusal_that_the_caller_handles_spoils_nothing(catalog: Catalog) -> None:
    """The check in Python fails before the database does, so the edit can continue."""
    await new_customer(catalog)
    async with catalog.edit(ACTOR) as edit:
        for name in ("globex", "acme", "initech"):
            with contextlib.suppress(Conflict):
                await edit.create(Tenant, {"name": name})
    assert [tenant.name for tenant in (await catalog.list_page(Tenant)).items] == ["acme", "globex", "initech"]
    assert [entry.action for entry in await audit_of(catalog)].count("tenant.create") == 3


async def test_an_edit_that_is_cancelled_leaves_nothing_and_holds_nothing(catalog: Catalog, database: Database) -> None:
    """Cancel more edits than there are connections, and at each await."""
    await new_customer(catalog)
    before = await table_contents(database)

    async def work() -> None:
        async with catalog.edit(ACTOR) as edit:
            await change_everything(edit)
            await asyncio.sleep(60)

    for turn in range(25):
        task = asyncio.create_task(work())
        for _ in range(turn * 5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await table_contents(database) == before
    async with asyncio.timeout(30):
        await asyncio.gather(*(new_tenant(catalog, f"afterwards-{number}") for number in range(15)))


async def test_a_commit_listener_sees_the_committed_change(catalog: Catalog, database: Database) -> None:
    commits: list[list[Announcement]] = []

    async def on_commit(announcements: Any) -> None:
        commits.append(list(announcements))
        assert (await catalog.get_by_name_or_id(Tenant, "acme")).name == "acme"

    catalog.on_commit = on_commit
    await new_tenant(catalog, "acme")
    assert len(commits) == 1
    with pytest.raises(CallerError):
        async with catalog.edit(ACTOR):
            raise CallerError
    assert len(commits) == 1


async def test_an_actor_must_have_a_name_that_can_be_printed(catalog: Catalog, database: Database) -> None:
    before = await table_contents(database)
    for actor in ("", "a\nb", "a\0b", "\ud800", "x" * 129):
        with pytest.raises(InvalidInput) as refused:
            async with catalog.edit(actor):
                raise AssertionError
        assert refused.value.field == "actor"
    assert await table_contents(database) == before
    for actor in ("x" * 128, "Ünal Öz", "🙂", "a b", "'; --"):
        async with catalog.edit(actor) as edit:
            await edit.create(Tenant, {"name": f"by-{len(actor)}-{ord(actor[0])}"})
        assert (await audit_of(catalog))[-1].actor == actor


# -- killed


async def edit_until_killed(url: str, death: str | None, connection: Connection) -> None:
    async with open_database(url) as database:
        catalog = Catalog(database, peppers=Peppers.parse(PEPPERS))
        async with catalog.edit("test:doomed") as edit:
            await change_everything(edit)
            if death == "after its last change":
                await edit.finish()
            if death is not None:
                connection.send("now")
                await asyncio.to_thread(connection.recv)  # it is killed while it waits
        connection.send("done")
        await asyncio.to_thread(connection.recv)


def work(connection: Connection, url: str, death: str | None) -> None:
    asyncio.run(edit_until_killed(url, death, connection))


async def killed(url: str, death: str | None, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
    """Start a process that edits, and kill it when it reports that it has reached the given step."""
    with child_process(work, url, death) as process:
        assert await asyncio.to_thread(process.receive) == ("done" if death is None else "now")
        if meanwhile is not None:
            await meanwhile()


@pytest.mark.parametrize("death", ["in the middle", pytest.param("after its last change", marks=pytest.mark.slow)])
async def test_an_edit_whose_process_is_killed_leaves_nothing_and_holds_nothing(
    catalog: Catalog, database: Database, death: str
) -> None:
    await new_customer(catalog)
    before = await table_contents(database)

    async def look() -> None:
        assert await table_contents(database) == before

    await killed(url_of(database), death, look)
    await new_tenant(catalog, "afterwards")
    assert {name for (name,) in await rows(database, "SELECT name FROM tenants")} == {"operator", "acme", "afterwards"}
    after = await table_contents(database)
    for table in ("plans", "plan_versions", "policies", "keys", "secrets", "tokens", "overrides"):
        assert after[table] == before[table]
    assert len(after["audit"]) == len(before["audit"]) + 1
    assert len(after["outbox"]) == len(before["outbox"]) + 1


@pytest.mark.slow
async def test_an_edit_that_was_answered_outlives_its_process(catalog: Catalog, database: Database) -> None:
    await killed(url_of(database), None)
    tenant = await catalog.get_by_name_or_id(Tenant, "initech")
    assert len(await catalog.list_for_tenant(Key, tenant.id)) == 1
    assert {entry.actor for entry in await audit_of(catalog)} == {"test:doomed"}
