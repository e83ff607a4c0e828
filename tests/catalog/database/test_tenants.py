"""Tenants and the operator."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from limitforge import ManualClock
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import OPERATOR, Key, Override, Plan, Policy, Tenant, Token, to_datetime
from limitforge.core.lanes import Lanes
from limitforge.errors import Conflict, InvalidInput, NotFound
from tests.catalog.factories import (
    ACTOR,
    MINUTE_US,
    Customer,
    delete,
    new_customer,
    new_plan,
    new_tenant,
    new_token,
    table_contents,
    update,
)

EVERY_CHARACTER = "abcdefghijklmnopqrstuvwxyz/ABCDEFGHIJKLMNOPQRSTUVWXYZ.0123456789"  # 64 characters
KINDS = (Tenant, Plan, Policy, Key, Override, Token)


async def test_a_tenant_needs_only_a_name(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog, "acme")
    found = await catalog.get(Tenant, tenant.id)
    assert found == Tenant(
        id=tenant.id,
        name="acme",
        created_at=to_datetime(clock.now_us()),
        updated_at=to_datetime(clock.now_us()),
        revision=found.revision,
    )
    assert (found.mode, found.time_zone, found.lanes, found.suspended, found.version) == ("on", "UTC", 1, False, 1)
    assert (found.failure, found.priority, found.default_plan_id) == (None, None, None)
    assert tenant.id.startswith("ten_")


async def test_what_was_set_is_what_is_read(catalog: Catalog) -> None:
    lanes: list[Any] = [1, 1_024, {"count": 2, "then": 8, "at": 1_900_000_000.5}, {"count": 3}]
    fields = {"mode": "monitor", "time_zone": "Pacific/Auckland", "failure": "closed", "priority": "P2"}
    for number, given in enumerate(lanes):
        tenant = await new_tenant(catalog, f"acme-{number}", **fields, suspended=True, lanes=given)
        found = await catalog.get(Tenant, tenant.id)
        assert {field: getattr(found, field) for field in fields} == fields
        assert found.suspended
        assert found.lanes == (given if isinstance(given, int) else Lanes(**given))
        assert (
            await catalog.get_by_name_or_id(Tenant, tenant.name)
            == await catalog.get_by_name_or_id(Tenant, tenant.id)
            == found
        )


async def test_an_update_changes_what_it_names_and_nothing_else(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog, "acme", priority="P1", failure="open")
    clock.advance_us(MINUTE_US)
    changed = await update(catalog, tenant, {"mode": "off", "failure": None}, expected_version=1)
    found = await catalog.get(Tenant, tenant.id)
    assert (found.mode, found.failure, found.priority, found.name, found.version) == ("off", None, "P1", "acme", 2)
    assert (found.created_at, found.updated_at) == (tenant.created_at, tenant.created_at + timedelta(minutes=1))
    assert changed.version == 2


async def test_an_update_that_changes_nothing_is_none(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)
    before = await table_contents(database, leave_out=("revision", "outbox"))
    own: Mapping[type, Mapping[str, Any]] = {
        Tenant: {"mode": "on", "name": "acme"},
        Plan: {"limits": "burst=100/minute"},
        Policy: {"plan_id": customer.plan.id},
        Key: {"scopes": ["usage", "check", "plans"], "metadata": {}},
        Token: {"scopes": ["read"]},
        Override: {"limits": {"burst": {"limit": 500}}, "reason": ""},
    }
    for entity in customer.entities:
        assert await update(catalog, entity, own[type(entity)]) == entity
        assert await update(catalog, entity, {}) == entity
    assert await table_contents(database, leave_out=("revision", "outbox")) == before


async def test_names_may_have_all_their_characters_and_all_their_length(catalog: Catalog) -> None:
    for name in (EVERY_CHARACTER, "-", "_", ".", "/", "0", "a", "-_./" * 16, "Operator", "null"):
        tenant = await new_tenant(catalog, name)
        assert (await catalog.get_by_name_or_id(Tenant, name)).id == tenant.id
        plan = await new_plan(catalog, tenant.id, name)
        assert (await catalog.get_by_name_or_id(Plan, name, tenant_id=tenant.id)).id == plan.id


async def test_two_tenants_can_not_have_one_name(catalog: Catalog, database: Database) -> None:
    await new_tenant(catalog, "acme")
    globex = await new_tenant(catalog, "globex")
    await new_tenant(catalog, "Acme")
    before = await table_contents(database)
    with pytest.raises(Conflict, match="tenant called acme"):
        await new_tenant(catalog, "acme")
    with pytest.raises(Conflict, match="tenant called acme"):
        await update(catalog, globex, {"name": "acme"})
    assert await table_contents(database) == before


async def test_the_name_of_a_deleted_tenant_is_free(catalog: Catalog) -> None:
    first = await new_tenant(catalog, "acme")
    await delete(catalog, first)
    second = await new_tenant(catalog, "acme")
    assert first.id != second.id


async def test_a_default_plan_is_the_tenants_own(catalog: Catalog, database: Database) -> None:
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")
    before = await table_contents(database)
    for plan_id in (globex.plan.id, "pla_none", ""):
        with pytest.raises(NotFound, match="default_plan_id: unknown plan"):
            await update(catalog, acme.tenant, {"default_plan_id": plan_id})
    with pytest.raises(NotFound, match="default_plan_id"):
        await new_tenant(catalog, "initech", default_plan_id=globex.plan.id)
    assert await table_contents(database) == before


# -- deleting


async def test_deleting_a_tenant_takes_all_that_is_its_own_and_nothing_else(
    catalog: Catalog, database: Database
) -> None:
    globex = await new_customer(catalog, "globex")
    await new_plan(catalog, OPERATOR, "everyone")
    everybodys, _ = await new_token(catalog, "everybodys")
    logs = ("audit", "outbox", "revision")
    before = await table_contents(database, leave_out=logs)
    acme = await new_customer(catalog, "acme")
    await update(catalog, acme.plan, {"limits": "burst=5/minute"})
    async with catalog.edit(ACTOR) as edit:
        await edit.rotate_key(acme.key.id, 3_600)
    gone = await delete(catalog, acme.tenant)
    assert gone.id == acme.tenant.id
    assert await table_contents(database, leave_out=logs) == before
    for entity in acme.entities:
        with pytest.raises(NotFound):
            await catalog.get(type(entity), entity.id)
    for entity in (*globex.entities, everybodys):
        assert await catalog.get(type(entity), entity.id) == entity


async def test_what_a_tenant_left_in_the_audit_log_stays(catalog: Catalog) -> None:
    acme = await new_customer(catalog, "acme")
    before = (await catalog.audit_page(tenant_id=acme.tenant.id)).items
    await delete(catalog, acme.tenant)
    after = (await catalog.audit_page(tenant_id=acme.tenant.id)).items
    assert after[1:] == before
    assert after[0].action == "tenant.delete"


async def test_an_unknown_entity_can_be_neither_read_changed_nor_deleted(catalog: Catalog, database: Database) -> None:
    before = await table_contents(database)
    for kind in KINDS:
        missing = f"unknown {kind.kind} 'none'"
        with pytest.raises(NotFound, match=missing):
            await catalog.get(kind, "none")
        with pytest.raises(NotFound, match=missing):
            await catalog.get_by_name_or_id(kind, "none")
        with pytest.raises(NotFound, match=missing):
            async with catalog.edit(ACTOR) as edit:
                await edit.update(kind, "none", {})
        with pytest.raises(NotFound, match=missing):
            async with catalog.edit(ACTOR) as edit:
                await edit.delete(kind, "none")
    assert await table_contents(database) == before


async def test_an_id_that_no_database_could_hold_is_not_found(catalog: Catalog) -> None:
    """Ids come from URL paths, so they may be any text."""
    customer = await new_customer(catalog)
    for identity in ("a\0b", "\ud800", "x" * 100_000 + "' OR 1=1"):
        await is_nowhere(catalog, customer, identity)


async def is_nowhere(catalog: Catalog, customer: Customer, identity: str) -> None:
    for kind in KINDS:
        with pytest.raises(NotFound):
            await catalog.get(kind, identity)
        with pytest.raises(NotFound):
            await catalog.get_by_name_or_id(kind, identity)
    with pytest.raises(NotFound):
        await catalog.tenant_config(identity)
    for kind in (Plan, Policy, Key, Override, Token):
        assert await catalog.list_for_tenant(kind, identity) == []
        assert (await catalog.list_page(kind, tenant_id=identity)).items == []
    assert (await catalog.list_page(Override, subject=identity)).items == []
    assert (await catalog.audit_page(tenant_id=identity)).items == []
    assert (await catalog.audit_page(entity_id=identity)).items == []
    assert await catalog.plan_versions(identity) == []
    with pytest.raises(NotFound, match="tenant_id"):
        await new_plan(catalog, identity)
    with pytest.raises(NotFound, match="plan_id"):
        await update(catalog, customer.policy, {"plan_id": identity})


# -- the operator


async def test_the_operator_can_not_be_deleted(catalog: Catalog, database: Database) -> None:
    before = await table_contents(database)
    with pytest.raises(Conflict, match="operator can't be deleted"):
        await delete(catalog, await catalog.get(Tenant, OPERATOR))
    assert await table_contents(database) == before


async def test_the_operator_can_be_neither_renamed_nor_suspended_nor_placed(
    catalog: Catalog, database: Database
) -> None:
    before = await table_contents(database)
    wrong: list[tuple[str, object]] = [
        ("name", "boss"),
        ("suspended", True),
        ("lanes", 2),
        ("lanes", {"count": 1, "then": 2, "at": 1_900_000_000}),
        ("failure", "open"),
        ("priority", "P0"),
    ]
    for field, value in wrong:
        with pytest.raises(InvalidInput, match="can't be set for the operator") as refused:
            await update(catalog, await catalog.get(Tenant, OPERATOR), {field: value})
        assert refused.value.field == field
    assert await table_contents(database) == before


async def test_the_operator_has_a_mode_a_time_zone_and_a_plan(catalog: Catalog) -> None:
    plan = await new_plan(catalog, OPERATOR, "everyone")
    operator = await catalog.get(Tenant, OPERATOR)
    await update(catalog, operator, {"mode": "monitor", "time_zone": "Europe/Berlin", "default_plan_id": plan.id})
    found = await catalog.get(Tenant, OPERATOR)
    assert (found.mode, found.time_zone, found.default_plan_id) == ("monitor", "Europe/Berlin", plan.id)
    assert (await catalog.tenant_config(OPERATOR)).plans == (plan,)


async def test_the_operator_has_no_policies_keys_overrides_or_tokens(catalog: Catalog, database: Database) -> None:
    plan = await new_plan(catalog, OPERATOR, "everyone")
    before = await table_contents(database)
    own = {"tenant_id": OPERATOR}
    with pytest.raises(InvalidInput) as refused:
        async with catalog.edit(ACTOR) as edit:
            await edit.create(Policy, {**own, "resource": "*", "plan_id": plan.id})
    assert refused.value.field == "tenant_id"
    with pytest.raises(InvalidInput) as refused:
        async with catalog.edit(ACTOR) as edit:
            await edit.create_key({**own, "name": "k"})
    assert refused.value.field == "tenant_id"
    with pytest.raises(InvalidInput) as refused:
        async with catalog.edit(ACTOR) as edit:
            await edit.set_override({**own, "subject": "s", "limits": {"burst": "blocked"}, "ttl_seconds": 60})
    assert refused.value.field == "tenant_id"
    with pytest.raises(InvalidInput) as refused:
        async with catalog.edit(ACTOR) as edit:
            await edit.create_token({**own, "name": "t"})
    assert refused.value.field == "tenant_id"
    assert await table_contents(database) == before


async def test_the_operator_is_in_no_list_of_tenants(catalog: Catalog) -> None:
    await new_tenant(catalog, "acme")
    assert [tenant.name for tenant in (await catalog.list_page(Tenant)).items] == ["acme"]
