"""The outbox: announcements of changes, in the order of their commits, without a gap."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from limitforge import ManualClock
from limitforge.catalog.announcements import NO_TENANT, Announcement
from limitforge.catalog.database import catalog_revision, outbox
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import OPERATOR, Key, Override, Plan, Policy, Tenant, Token
from limitforge.errors import InvalidInput
from tests.catalog.environments import one_database
from tests.catalog.factories import (
    ACTOR,
    Customer,
    new_customer,
    new_key,
    new_plan,
    new_tenant,
    new_token,
    rows,
    table_contents,
)

BLOCKED = {"burst": "blocked"}


async def written(database: Database, after: int = 0) -> list[Announcement]:
    async with database.reading() as connection:
        return await outbox.announcements_after(connection, after, 10_000)


async def last_revision(database: Database) -> int:
    async with database.reading() as connection:
        return (await catalog_revision.read_last_stamp(connection)).revision


async def revisions(database: Database) -> list[int]:
    return [number for (number,) in await rows(database, "SELECT DISTINCT revision FROM outbox ORDER BY revision")]


async def announcements_of(catalog: Catalog, change: Callable[[Edit], Awaitable[Any]]) -> list[Announcement]:
    """Return the announcements of one edit."""
    before = await last_revision(catalog.database)
    async with catalog.edit(ACTOR) as edit:
        await change(edit)
    announcements = await written(catalog.database, before)
    assert {each.revision for each in announcements} == {before + 1} == {edit.revision}
    assert len({each.stamp for each in announcements}) == 1
    return [msgspec.structs.replace(each, timeline=0, change_id=0, previous_id=0, revoked=()) for each in announcements]


@one_database
async def test_a_change_of_the_configuration_announces_its_tenant(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    tenant_id = customer.tenant.id
    for change in (
        lambda edit: edit.update(Tenant, tenant_id, {"mode": "off"}),
        lambda edit: edit.update(Plan, customer.plan.id, {"limits": "burst=1/minute"}),
        lambda edit: edit.roll_back_plan(customer.plan.id),
        lambda edit: edit.update(Policy, customer.policy.id, {"mode": "off"}),
        lambda edit: edit.delete(Policy, customer.policy.id),
    ):
        (announced,) = await announcements_of(catalog, change)
        assert announced == Announcement(announced.revision, tenant_id, config=True)
    (announced,) = await announcements_of(catalog, lambda edit: edit.update(Tenant, OPERATOR, {"mode": "off"}))
    assert announced == Announcement(announced.revision, OPERATOR, config=True)


async def test_a_change_of_a_key_names_the_key(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    key = customer.key
    changes: list[tuple[Callable[[Edit], Awaitable[Any]], bool]] = [
        (lambda edit: edit.update(Key, key.id, {"name": "app"}), False),
        (lambda edit: edit.update(Key, key.id, {"scopes": ["usage"]}), True),
        (lambda edit: edit.rotate_key(key.id, 60), True),
        (lambda edit: edit.set_key_disabled(key.id, disabled=True), True),
        (lambda edit: edit.set_key_disabled(key.id, disabled=False), False),
    ]
    for change, revokes in changes:
        (announced,) = await announcements_of(catalog, change)
        assert announced == Announcement(announced.revision, key.tenant_id, keys=(key.id,), revokes=revokes)
    (announced,) = await announcements_of(catalog, lambda edit: edit.delete(Key, key.id))
    assert announced == Announcement(announced.revision, key.tenant_id, gone=(key.id,), revokes=True)


@one_database
async def test_a_suspended_or_deleted_tenant_is_announced_as_a_revocation(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    tenant_id = customer.tenant.id
    changes: list[tuple[Callable[[Edit], Awaitable[Any]], bool]] = [
        (lambda edit: edit.update(Tenant, tenant_id, {"suspended": True}), True),
        (lambda edit: edit.update(Tenant, tenant_id, {"suspended": False}), False),
        (lambda edit: edit.delete(Tenant, tenant_id), True),
    ]
    for change, revokes in changes:
        (announced,) = await announcements_of(catalog, change)
        assert (announced.config, announced.revokes) == (True, revokes)


@one_database
async def test_a_change_of_an_override_is_announced_as_such(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    fields = {"tenant_id": customer.tenant.id, "subject": "s", "limits": BLOCKED, "ttl_seconds": 60}
    for change in (
        lambda edit: edit.set_override(fields),
        lambda edit: edit.set_override({**fields, "ttl_seconds": 90}),
        lambda edit: edit.update(Override, customer.override.id, {"limits": BLOCKED}),
        lambda edit: edit.delete(Override, customer.override.id),
    ):
        (announced,) = await announcements_of(catalog, change)
        assert announced == Announcement(announced.revision, customer.tenant.id, overrides=True)


@one_database
async def test_a_change_that_concerns_no_process_still_has_a_revision(catalog: Catalog) -> None:
    """A gap would look like a missed change."""
    customer = await new_customer(catalog)

    async def nothing(_: Edit) -> None:
        return

    for change in (
        nothing,
        lambda edit: edit.create_token({"name": "new"}),
        lambda edit: edit.delete(Token, customer.token.id),
        lambda edit: edit.update(Tenant, customer.tenant.id, {"mode": "on"}),
    ):
        assert await announcements_of(catalog, change) == [
            Announcement(await last_revision(catalog.database), NO_TENANT)
        ]


@one_database
async def test_an_edit_of_several_tenants_announces_each_with_one_revision(catalog: Catalog) -> None:
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")

    async def much(edit: Edit) -> None:
        await edit.update(Plan, acme.plan.id, {"limits": "burst=1/minute"})
        await edit.rotate_key(acme.key.id)
        await edit.delete(Override, acme.override.id)
        await edit.update(Key, globex.key.id, {"name": "a"})
        await edit.set_key_disabled(globex.key.id, disabled=True)
        await edit.update(Tenant, OPERATOR, {"mode": "off"})

    by_tenant = {each.tenant_id: each for each in await announcements_of(catalog, much)}
    number = await last_revision(catalog.database)
    assert by_tenant == {
        acme.tenant.id: Announcement(
            number, acme.tenant.id, config=True, overrides=True, keys=(acme.key.id,), revokes=True
        ),
        globex.tenant.id: Announcement(number, globex.tenant.id, keys=(globex.key.id,), revokes=True),
        OPERATOR: Announcement(number, OPERATOR, config=True),
    }


async def test_a_tenants_revision_is_that_of_the_last_change_of_its_configuration(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    tenant_id = customer.tenant.id

    async def now() -> int:
        return (await catalog.get(Tenant, tenant_id)).revision

    first = await now()
    assert first == await last_revision(catalog.database)
    await new_key(catalog, tenant_id)
    await new_token(catalog, "new", tenant_id=tenant_id)
    await new_tenant(catalog, "globex")
    assert await now() == first
    await new_plan(catalog, tenant_id, "gold")
    assert await now() == await last_revision(catalog.database) > first
    assert (await catalog.get(Tenant, tenant_id)).version == customer.tenant.version


async def test_an_edit_that_is_undone_leaves_no_row_and_no_gap(catalog: Catalog, database: Database) -> None:
    await new_customer(catalog)
    before = await table_contents(database)
    for _ in range(3):
        with pytest.raises(InvalidInput):
            await announcements_of(catalog, lambda edit: edit.create(Tenant, {"name": "a b"}))
    assert await table_contents(database) == before
    await new_tenant(catalog, "globex")
    numbers = await revisions(database)
    assert numbers == list(range(1, len(numbers) + 1))


async def test_numbers_have_no_gap_and_are_seen_in_their_order_under_concurrency(
    catalog: Catalog, database: Database
) -> None:
    """A reader that continues after the last revision it has seen misses nothing: 10 tasks write, a third fails."""
    seen: list[int] = []

    async def write(number: int) -> None:
        for turn in range(3):
            try:
                async with catalog.edit(f"test:{number}") as edit:
                    await edit.create(Tenant, {"name": f"tenant-{number}-{turn}"})
                    if (number + turn) % 3 == 0:
                        await edit.create(Tenant, {"name": "a b"})
            except InvalidInput:
                pass

    async def follow() -> None:
        while True:
            done = writing.done()
            for each in await written(database, seen[-1] if seen else 0):
                if not seen or each.revision != seen[-1]:
                    seen.append(each.revision)
            if done:
                return
            await asyncio.sleep(0.001)

    async with asyncio.timeout(60):
        writing = asyncio.gather(*(write(number) for number in range(10)))
        await asyncio.gather(writing, follow())
    assert seen == list(range(1, 21))
    assert await last_revision(database) == 20
    logged = await rows(database, "SELECT tenant_id FROM audit ORDER BY id")
    assert [each.tenant_id for each in await written(database)] == [tenant_id for (tenant_id,) in logged]


async def test_a_deleted_tenant_can_still_be_announced(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)
    (announced,) = await announcements_of(catalog, lambda edit: edit.delete(Tenant, customer.tenant.id))
    assert announced.tenant_id == customer.tenant.id
    last = (await written(database))[-1]
    assert (last.revision, last.tenant_id, last.config) == (announced.revision, announced.tenant_id, True)


async def test_rows_are_published_once_and_in_order(catalog: Catalog, database: Database, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    await new_key(catalog, customer.tenant.id)
    async with database.reading() as connection:
        owed = await outbox.unpublished_announcements(connection, 10)
    assert [each.announcement for each in owed] == await written(database)
    async with database.writing() as connection:
        await outbox.mark_published(connection, [owed[0].announcement])
    async with database.reading() as connection:
        assert await outbox.unpublished_announcements(connection, 10) == owed[1:]
    assert await written(database) == [each.announcement for each in owed]  # polling processes still read it


async def test_rows_that_revoke_can_be_read_before_older_ones(catalog: Catalog, database: Database) -> None:
    customers = [await new_customer(catalog, f"tenant-{number}") for number in range(3)]
    async with catalog.edit(ACTOR) as edit:
        await edit.set_key_disabled(customers[1].key.id, disabled=True)
    await new_tenant(catalog, "later")
    async with database.reading() as connection:
        (first,) = await outbox.unpublished_announcements(connection, 1)
        (revoking,) = await outbox.unpublished_announcements(connection, 10, revoking=True)
    assert first.announcement.tenant_id == customers[0].tenant.id
    assert revoking.announcement.keys == (customers[1].key.id,)


async def test_rows_are_kept_for_a_day(catalog: Catalog, database: Database, clock: ManualClock) -> None:
    await new_tenant(catalog, "first")
    clock.advance_us(int(timedelta(days=1).total_seconds() * 1e6))
    await new_tenant(catalog, "second")
    assert await revisions(database) == [1, 2]
    clock.advance_us(1)
    await new_tenant(catalog, "third")
    assert await revisions(database) == [2, 3]


async def test_a_batch_of_rows_holds_whole_revisions(catalog: Catalog, database: Database) -> None:
    customers: list[Customer] = [await new_customer(catalog, f"tenant-{number}") for number in range(3)]
    async with catalog.edit(ACTOR) as edit:
        for customer in customers:
            await edit.update(Tenant, customer.tenant.id, {"mode": "off"})
    async with database.reading() as connection:
        assert len(await outbox.announcements_after(connection, 3, 1)) == 3
        assert [each.revision for each in await outbox.announcements_after(connection, 0, 2)] == [1, 2]
        assert await outbox.announcements_after(connection, 4, 100) == []
