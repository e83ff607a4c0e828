"""Concurrent changes of the same entities: no change is lost, and no writer waits forever."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from limitforge import ManualClock
from limitforge.catalog.database import catalog_revision, writes
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import Entity, Key, Override, Plan, Policy, Tenant, Token, to_datetime
from limitforge.errors import Conflict, VersionConflict
from tests.catalog.factories import ACTOR, audit_of, new_customer, new_key, new_tenant, rows, table_contents, update

MANY = 10

CHANGES: dict[type[Entity], tuple[dict[str, Any], dict[str, Any]]] = {
    Tenant: ({"mode": "off"}, {"mode": "monitor"}),
    Plan: ({"limits": "burst=1/minute"}, {"limits": "burst=2/minute"}),
    Policy: ({"priority": "P1"}, {"priority": "P2"}),
    Key: ({"metadata": {"a": 1}}, {"metadata": {"b": 1}}),
    Token: ({"scopes": ["write"]}, {"scopes": ["read", "write"]}),
    Override: ({"reason": "a"}, {"reason": "b"}),
}


async def blocked(database: Database, task: asyncio.Task[Any]) -> None:
    """Wait until the task waits for a lock or has ended. SQLite does not show waiters: there it waits to begin."""
    while not task.done():
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        if database.is_sqlite or await rows(database, waiting) != [(0,)]:
            await asyncio.sleep(0.05)
            return
        await asyncio.sleep(0.005)


async def test_the_loser_of_two_edits_gets_a_conflict_and_nothing_of_the_winners_is_lost(
    catalog: Catalog, database: Database
) -> None:
    customer = await new_customer(catalog)
    for entity in customer.entities:
        kind, read = type(entity), entity.version
        winners, losers = CHANGES[kind]
        after = await update(catalog, entity, winners, expected_version=read)
        before = await table_contents(database)
        with pytest.raises(VersionConflict) as refused:
            await update(catalog, entity, losers, expected_version=read)
        error = str(refused.value)
        assert f"{kind.kind} {entity.id} is at version {read + 1}, not {read}" in error
        assert "it has changed since it was read" in error
        assert await table_contents(database) == before
        assert isinstance(refused.value, Conflict)
        assert (await catalog.get(kind, entity.id)).version == after.version == read + 1
        if kind is not Tenant:  # a tenant's revision changes with any of its configuration
            assert await catalog.get(kind, entity.id) == after


async def test_everything_that_changes_something_may_name_the_version_that_was_read(
    catalog: Catalog, database: Database
) -> None:
    customer = await new_customer(catalog)
    plan, key, override = customer.plan, customer.key, customer.override
    await update(catalog, plan, {"limits": "burst=7/minute"})
    fields = {"tenant_id": override.tenant_id, "subject": override.subject, "limits": override.limits, "ttl_seconds": 5}
    attempts: list[Callable[[Edit], Awaitable[Any]]] = [
        lambda edit: edit.update(Key, key.id, {"name": "x"}, expected_version=9),
        lambda edit: edit.delete(Key, key.id, expected_version=9),
        lambda edit: edit.rotate_key(key.id, expected_version=9),
        lambda edit: edit.set_key_disabled(key.id, disabled=True, expected_version=9),
        lambda edit: edit.roll_back_plan(plan.id, expected_version=9),
        lambda edit: edit.set_override(fields, expected_version=9),
        lambda edit: edit.delete(Tenant, customer.tenant.id, expected_version=9),
        lambda edit: edit.delete(Token, customer.token.id, expected_version=9),
        lambda edit: edit.update(Key, key.id, {"name": "x"}, expected_version=0),
        lambda edit: edit.update(Key, key.id, {"name": "x"}, expected_version=2**70),
    ]
    before = await table_contents(database)
    for attempt in attempts:
        with pytest.raises(VersionConflict):
            async with catalog.edit(ACTOR) as edit:
                await attempt(edit)
    assert await table_contents(database) == before


async def test_many_who_count_at_once_lose_no_count(catalog: Catalog) -> None:
    """Each task reads, adds one and writes with the version that it read, and repeats this after a conflict."""
    tenant = await new_tenant(catalog)
    key, _ = await new_key(catalog, tenant.id, metadata={"count": 0})
    too_late = 0

    async def count() -> None:
        nonlocal too_late
        while True:
            found = await catalog.get(Key, key.id)
            try:
                await update(
                    catalog, found, {"metadata": {"count": found.metadata["count"] + 1}}, expected_version=found.version
                )
            except VersionConflict:
                too_late += 1
            else:
                return

    async with asyncio.timeout(30):
        await asyncio.gather(*(count() for _ in range(MANY)))
    found = await catalog.get(Key, key.id)
    assert (found.metadata, found.version) == ({"count": MANY}, MANY + 1)
    assert too_late > 0  # or there was no contention
    entries = (await audit_of(catalog, entity_id=key.id))[1:]
    steps = [(e.before["metadata"]["count"], e.after["metadata"]["count"]) for e in entries if e.before and e.after]
    assert steps == [(number, number + 1) for number in range(MANY)]


@pytest.mark.slow
async def test_many_who_change_different_things_need_no_second_try(catalog: Catalog) -> None:
    customer = await new_customer(catalog)

    async def one(number: int) -> None:
        async with catalog.edit(f"test:{number}") as edit:
            plan = await edit.create(
                Plan, {"tenant_id": customer.tenant.id, "name": f"plan-{number}", "limits": "1/minute"}
            )
            fields = {"tenant_id": customer.tenant.id, "resource": f"GET:/{number}", "plan_id": plan.id}
            await edit.create(Policy, fields)

    async with asyncio.timeout(30):
        await asyncio.gather(*(one(number) for number in range(MANY)))
    config = await catalog.tenant_config(customer.tenant.id)
    assert {plan.name for plan in config.plans} == {"free", *(f"plan-{number}" for number in range(MANY))}
    assert len(config.policies) == MANY + 1


async def test_changes_of_different_fields_that_name_no_version_both_hold(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    changes: list[dict[str, Any]] = [{"mode": "off"}, {"time_zone": "Asia/Tokyo"}, {"priority": "P3"}, {"lanes": 4}]
    await asyncio.gather(*(update(catalog, tenant, change) for change in changes))
    found = await catalog.get(Tenant, tenant.id)
    assert (found.mode, found.time_zone, found.priority, found.lanes, found.version) == (
        "off",
        "Asia/Tokyo",
        "P3",
        4,
        5,
    )


async def test_of_many_who_want_one_name_one_gets_it(catalog: Catalog) -> None:
    answers = await asyncio.gather(*(new_tenant(catalog, "acme") for _ in range(MANY)), return_exceptions=True)
    made = [answer for answer in answers if isinstance(answer, Tenant)]
    assert len(made) == 1
    assert all(isinstance(answer, Conflict) for answer in answers if answer is not made[0])
    assert (await catalog.list_page(Tenant)).items == [await catalog.get(Tenant, made[0].id)]


@pytest.mark.slow
async def test_of_many_who_delete_one_thing_one_does(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    await asyncio.gather(
        *(delete_tenant(catalog, customer.tenant.id) for _ in range(MANY)),
        return_exceptions=True,
    )
    entries = await audit_of(catalog, entity_id=customer.tenant.id)
    assert [entry.action for entry in entries].count("tenant.delete") == 1


async def delete_tenant(catalog: Catalog, tenant_id: str) -> None:
    async with catalog.edit(ACTOR) as edit:
        await edit.delete(Tenant, tenant_id)


async def test_changes_of_the_same_things_in_opposite_orders_do_not_deadlock(catalog: Catalog) -> None:
    first, second = await new_tenant(catalog, "acme"), await new_tenant(catalog, "globex")

    async def both(*tenants: Tenant, mode: str) -> None:
        async with catalog.edit(ACTOR) as edit:
            for tenant in tenants:
                await edit.update(Tenant, tenant.id, {"mode": mode})
                await asyncio.sleep(0.001)

    async with asyncio.timeout(30):
        there = (both(first, second, mode="off") for _ in range(5))
        back = (both(second, first, mode="monitor") for _ in range(5))
        await asyncio.gather(*there, *back)
    modes = {(await catalog.get(Tenant, tenant.id)).mode for tenant in (first, second)}
    assert len(modes) == 1  # each edit set both


async def test_writing_when_keys_were_used_does_not_deadlock_with_an_edit(catalog: Catalog, database: Database) -> None:
    """One process writes when keys were used, in the order of their ids; an edit changes them in another order."""
    tenant = await new_tenant(catalog)
    made = [(await new_key(catalog, tenant.id))[0] for _ in range(2)]
    first, second = sorted(made, key=lambda key: key.id)
    at = datetime(2026, 1, 1, tzinfo=UTC)

    async def used() -> None:
        async with database.writing() as connection:
            await writes.record_key_use(connection, {first.id: at, second.id: at})

    async with asyncio.timeout(30), asyncio.TaskGroup() as group, catalog.edit(ACTOR) as edit:
        await edit.update(Key, second.id, {"name": "changed"})
        touching = group.create_task(used())
        await blocked(database, touching)
        await edit.update(Key, first.id, {"name": "changed"})
    for key in (first, second):
        found = await catalog.get(Key, key.id)
        assert (found.name, found.last_used_at) == ("changed", at)


async def test_removing_what_has_expired_does_not_deadlock_with_an_edit(
    catalog: Catalog, database: Database, clock: ManualClock
) -> None:
    """One process removes expired overrides and then secrets; an edit changes such rows in another order."""
    customer = await new_customer(catalog)
    async with catalog.edit(ACTOR) as edit:
        await edit.rotate_key(customer.key.id, 60)
    clock.advance_us(2 * 3_600_000_000)  # the old secret and the override have expired
    fields = {"tenant_id": customer.tenant.id, "subject": "user:42", "limits": {"burst": "blocked"}, "ttl_seconds": 60}

    async def remove_expired() -> None:
        async with database.writing() as connection:
            await writes.remove_expired(connection, to_datetime(clock.now_us()))

    async with asyncio.timeout(30), asyncio.TaskGroup() as group, catalog.edit(ACTOR) as edit:
        await edit.rotate_key(customer.key.id)
        tidying = group.create_task(remove_expired())
        await blocked(database, tidying)
        await edit.set_override(fields)
    assert [each.limits for each in await catalog.list_for_tenant(Override, customer.tenant.id)] == [
        {"burst": "blocked"}
    ]
    assert len((await catalog.get(Key, customer.key.id)).secrets) == 1


async def test_an_edit_does_not_undo_that_a_key_was_used(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    key, _ = await new_key(catalog, tenant.id)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group, database.writing() as connection:
        await writes.record_key_use(connection, {key.id: at})
        editing = group.create_task(update(catalog, key, {"name": "changed"}))
        await blocked(database, editing)
    found = await catalog.get(Key, key.id)
    assert (found.name, found.last_used_at) == ("changed", at)


@pytest.mark.slow
async def test_a_configuration_is_read_as_of_one_moment(catalog: Catalog) -> None:
    """It takes three queries, which see all changes of an edit or none."""
    customer = await new_customer(catalog)

    async def write() -> None:
        for number in range(1, 13):
            async with catalog.edit(ACTOR) as edit:
                await edit.update(Plan, customer.plan.id, {"limits": f"burst={number}/minute"})
                await edit.update(Tenant, customer.tenant.id, {"lanes": number})

    async def read() -> set[int]:
        seen = set()
        while not writing.done():
            config = await catalog.tenant_config(customer.tenant.id)
            (limit,) = config.plans[0].compile("UTC")
            if config.tenant.lanes != 1 or limit.size != 100:
                assert limit.size == config.tenant.lanes
                seen.add(limit.size)
        return seen

    writing = asyncio.create_task(write())
    seen = await asyncio.gather(read(), read())
    await writing
    assert len(set().union(*seen)) > 3


async def test_a_reader_does_not_wait_for_a_writer(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    async with asyncio.timeout(30), catalog.edit(ACTOR) as edit:
        await edit.update(Tenant, tenant.id, {"mode": "off"})
        assert (await catalog.get(Tenant, tenant.id)).mode == "on"
        assert (await catalog.list_page(Tenant)).items[0].mode == "on"
    assert (await catalog.get(Tenant, tenant.id)).mode == "off"


async def test_what_only_reads_can_not_write(catalog: Catalog, database: Database) -> None:
    """Only on Postgres: SQLite has no read-only transactions."""
    if database.is_sqlite:
        pytest.skip("SQLite has no transactions that only read")
    with pytest.raises(Exception, match="read-only"):
        async with database.reading() as connection:
            await catalog_revision.next_revision(connection)
