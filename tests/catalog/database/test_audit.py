"""The audit log: every change has one entry with its actor, its time, and the entity before and after."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from limitforge import ManualClock
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import (
    OPERATOR,
    AuditEntry,
    Entity,
    Key,
    Override,
    Plan,
    Policy,
    Tenant,
    Token,
    to_datetime,
    to_public_dict,
)
from limitforge.errors import LimitforgeError
from tests.catalog.factories import (
    ACTOR,
    Customer,
    audit_of,
    new_customer,
    new_key,
    new_plan,
    new_tenant,
    new_token,
    rows,
    table_contents,
    update,
)

BLOCKED = {"burst": "blocked"}
Change = Callable[[Edit, Customer], Awaitable[Any]]


def with_tenant(customer: Customer, **fields: Any) -> dict[str, Any]:
    return {"tenant_id": customer.tenant.id, **fields}


CHANGES: list[tuple[str, Change]] = [
    ("tenant.create", lambda edit, _: edit.create(Tenant, {"name": "globex"})),
    ("tenant.update", lambda edit, c: edit.update(Tenant, c.tenant.id, {"mode": "off"})),
    ("tenant.delete", lambda edit, c: edit.delete(Tenant, c.tenant.id)),
    ("tenant.update", lambda edit, _: edit.update(Tenant, OPERATOR, {"mode": "off"})),
    ("plan.create", lambda edit, c: edit.create(Plan, with_tenant(c, name="gold", limits="5/minute"))),
    ("plan.update", lambda edit, c: edit.update(Plan, c.plan.id, {"limits": "burst=5/minute"})),
    ("plan.rollback", lambda edit, c: edit.roll_back_plan(c.plan.id)),
    ("policy.create", lambda edit, c: edit.create(Policy, with_tenant(c, resource="*", plan_id=c.plan.id))),
    ("policy.update", lambda edit, c: edit.update(Policy, c.policy.id, {"mode": "off"})),
    ("policy.delete", lambda edit, c: edit.delete(Policy, c.policy.id)),
    ("key.create", lambda edit, c: edit.create_key(with_tenant(c, name="app"))),
    ("key.update", lambda edit, c: edit.update(Key, c.key.id, {"metadata": {"a": 1}})),
    ("key.rotate", lambda edit, c: edit.rotate_key(c.key.id, 60)),
    ("key.disable", lambda edit, c: edit.set_key_disabled(c.key.id, disabled=True)),
    ("key.delete", lambda edit, c: edit.delete(Key, c.key.id)),
    ("token.create", lambda edit, _: edit.create_token({"name": "everyones"})),
    ("token.update", lambda edit, c: edit.update(Token, c.token.id, {"scopes": ["write"]})),
    ("token.delete", lambda edit, c: edit.delete(Token, c.token.id)),
    ("override.create", lambda edit, c: edit.set_override(with_tenant(c, subject="s", limits=BLOCKED, ttl_seconds=60))),
    (
        "override.update",
        lambda edit, c: edit.set_override(with_tenant(c, subject="user:42", limits=BLOCKED, ttl_seconds=60)),
    ),
    ("override.update", lambda edit, c: edit.update(Override, c.override.id, {"reason": "because"})),
    ("override.delete", lambda edit, c: edit.delete(Override, c.override.id)),
]


def entity_of(answer: Any) -> Entity:
    entity = answer[0] if isinstance(answer, tuple) else answer
    assert isinstance(entity, Entity)
    return entity


@pytest.fixture
async def customer(catalog: Catalog) -> Customer:
    customer = await new_customer(catalog)
    customer.plan = await update(catalog, customer.plan, {"limits": "burst=50/minute"})
    return customer


async def test_every_change_has_one_entry(catalog: Catalog, customer: Customer, clock: ManualClock) -> None:
    """Each change is an edit of its own."""
    changes = sorted(CHANGES, key=lambda change: ("delete" in change[0], change[0] == "tenant.delete"))
    for number, (action, change) in enumerate(changes):
        clock.advance_us(1_000_000)
        before = await audit_of(catalog)
        async with catalog.edit(f"test:{number}") as edit:
            changed = entity_of(await change(edit, customer))
        entries = await audit_of(catalog)
        assert entries[:-1] == before, action
        entry = entries[-1]
        assert (entry.action, entry.actor, entry.at) == (action, f"test:{number}", to_datetime(clock.now_us()))
        assert entry.entity_id == changed.id
        assert entry.tenant_id == (changed.id if isinstance(changed, Tenant) else getattr(changed, "tenant_id", None))
        is_new, is_gone = action.endswith(".create"), action.endswith(".delete")
        assert (entry.before is None, entry.after is None) == (is_new, is_gone)
        recorded = entry.before if is_gone else entry.after
        assert recorded == msgspec.json.decode(msgspec.json.encode(to_public_dict(changed))), action
        if entry.before is not None and entry.after is not None:
            assert entry.after["version"] == entry.before["version"] + 1
            assert entry.after != entry.before


async def test_before_and_after_differ(catalog: Catalog, customer: Customer) -> None:
    await update(catalog, customer.plan, {"limits": "burst=7/minute", "name": "gold"})
    entry = (await audit_of(catalog))[-1]
    assert entry.before is not None
    assert entry.after is not None
    differing = {field for field in entry.after if entry.after[field] != entry.before[field]}
    assert {"limits", "name", "version"} <= differing <= {"limits", "name", "version", "updated_at"}
    assert (entry.before["name"], entry.after["name"]) == ("free", "gold")
    assert (entry.before["limits"][0]["limit"], entry.after["limits"][0]["limit"]) == (50, 7)


async def test_a_change_that_is_refused_has_no_entry(catalog: Catalog, customer: Customer, database: Database) -> None:
    before = await table_contents(database)
    refused: list[Change] = [
        lambda edit, _: edit.create(Tenant, {"name": "acme"}),
        lambda edit, _: edit.create(Tenant, {"name": "a b"}),
        lambda edit, c: edit.create(Plan, with_tenant(c, name="free", limits="1/minute")),
        lambda edit, c: edit.create(Plan, with_tenant(c, name="new", limits="nonsense")),
        lambda edit, c: edit.create(Policy, with_tenant(c, resource="GET:/orders/{x}", plan_id=c.plan.id)),
        lambda edit, c: edit.update(Plan, c.plan.id, {"limits": "1/minute"}, expected_version=1),
        lambda edit, c: edit.delete(Plan, c.plan.id),
        lambda edit, _: edit.delete(Tenant, OPERATOR),
        lambda edit, c: edit.create_key(with_tenant(c, name="a b")),
        lambda edit, c: edit.rotate_key(c.key.id, -1),
        lambda edit, _: edit.rotate_key("key_none"),
        lambda edit, c: edit.set_key_disabled(c.key.id, disabled=True, expected_version=9),
        lambda edit, c: edit.create_token({"name": c.token.name}),
        lambda edit, c: edit.set_override(with_tenant(c, subject="", limits=BLOCKED, ttl_seconds=60)),
        lambda edit, c: edit.roll_back_plan(c.plan.id, 99),
    ]
    for change in refused:
        with pytest.raises(LimitforgeError):
            async with catalog.edit(ACTOR) as edit:
                await change(edit, customer)
    assert await table_contents(database) == before


async def test_the_entries_of_one_edit_have_one_time(catalog: Catalog, clock: ManualClock) -> None:
    async with catalog.edit(ACTOR) as edit:
        await edit.create(Tenant, {"name": "acme"})
        clock.advance_us(1_000_000)
        await edit.create(Tenant, {"name": "globex"})
    first, second = await audit_of(catalog)
    assert first.at == second.at == to_datetime(clock.now_us()) - timedelta(seconds=1)


async def test_an_entry_names_the_tenant_that_owns_the_entity(catalog: Catalog) -> None:
    """A token of all tenants has no tenant, and a plan of the operator belongs to the operator."""
    tenant = await new_tenant(catalog)
    await new_token(catalog, "everyones")
    await new_token(catalog, "acmes", tenant_id=tenant.id)
    await new_plan(catalog, OPERATOR)
    assert [entry.tenant_id for entry in await audit_of(catalog)] == [tenant.id, None, tenant.id, OPERATOR]


async def test_an_entry_has_a_null_where_there_was_or_is_nothing(catalog: Catalog, database: Database) -> None:
    """Readers of the database see NULL, not the JSON text null."""
    tenant = await new_tenant(catalog)
    async with catalog.edit(ACTOR) as edit:
        await edit.delete(Tenant, tenant.id)
    assert await rows(database, "SELECT action FROM audit WHERE before IS NULL") == [("tenant.create",)]
    assert await rows(database, "SELECT action FROM audit WHERE after IS NULL") == [("tenant.delete",)]


async def test_entries_can_be_written_as_json(catalog: Catalog, customer: Customer) -> None:
    await new_key(catalog, customer.tenant.id, metadata={"a": 2**63 - 1, "ü": "🙂\0"})
    entries = await audit_of(catalog)
    assert msgspec.json.decode(msgspec.json.encode(entries), type=list[AuditEntry]) == entries
    newest = entries[-1].after
    assert newest is not None
    assert newest["metadata"] == {"a": 2**63 - 1, "ü": "🙂\0"}
