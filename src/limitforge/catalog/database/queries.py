"""Read entities, plan versions and the audit log. Each function runs in the transaction of its connection."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.database import tables
from limitforge.catalog.database.entity_rows import (
    TABLES,
    are_storable,
    chunked,
    fetch_entities,
    select_entities,
)
from limitforge.catalog.database.pages import MAX_PAGE_SIZE, Page, decode_cursor, encode_cursor, validate_page_size
from limitforge.catalog.field_validation import is_storable
from limitforge.catalog.model import (
    OPERATOR,
    AnyEntity,
    AuditEntry,
    Entity,
    Override,
    Plan,
    Policy,
    Tenant,
    TenantConfig,
)
from limitforge.core.exact import short_repr
from limitforge.errors import Conflict, NotFound

OVERRIDE_ACTIONS = ("override.create", "override.update", "override.delete")

_ORDER_COLUMN: Mapping[type[Entity], str] = {Policy: "resource", Override: "subject"}  # the others by name


async def find(connection: AsyncConnection, entity_type: type[AnyEntity], identity: str) -> AnyEntity | None:
    """Return the entity with this id, or None."""
    if not is_storable(identity):
        return None
    rows = await fetch_entities(
        connection, entity_type, select_entities(entity_type).where(TABLES[entity_type].c.id == identity)
    )
    return rows[0] if rows else None


async def get(connection: AsyncConnection, entity_type: type[AnyEntity], identity: str) -> AnyEntity:
    """Return the entity with this id. Raises `NotFound` for an unknown id."""
    entity = await find(connection, entity_type, identity)
    if entity is None:
        raise NotFound(f"unknown {entity_type.kind} {short_repr(identity)}")
    return entity


async def get_by_name_or_id(
    connection: AsyncConnection, entity_type: type[AnyEntity], name: str, **values: Any
) -> AnyEntity:
    """Return the entity with this id, or the only one with this name; `values` are further columns it must have.

    Raises `NotFound` for an unknown name, and `Conflict` if several entities have it.
    """
    entity = await find(connection, entity_type, name)
    if entity is not None and all(getattr(entity, field) == value for field, value in values.items()):
        return entity
    column = "resource" if entity_type is Policy else "name"
    found = [] if entity_type is Override else await find_by(connection, entity_type, **{column: name}, **values)
    if not found:
        raise NotFound(f"unknown {entity_type.kind} {short_repr(name)}")
    if len(found) > 1:
        raise Conflict(f"{len(found)} {entity_type.kind} entries are called {name}: pass an id instead")
    return found[0]


async def find_by(connection: AsyncConnection, entity_type: type[AnyEntity], **values: Any) -> list[AnyEntity]:
    """Return the entities with these column values, at most a page of them."""
    table = TABLES[entity_type]
    if not are_storable(values):
        return []
    where = [table.c[column] == value for column, value in values.items()]
    return await fetch_entities(
        connection, entity_type, select_entities(entity_type).where(*where).order_by(table.c.id).limit(MAX_PAGE_SIZE)
    )


async def count(connection: AsyncConnection, entity_type: type[Entity], **values: Any) -> int:
    """Count the entities with these column values."""
    table = TABLES[entity_type]
    where = [table.c[column] == value for column, value in values.items()]
    found = await connection.scalar(select(func.count()).select_from(table).where(*where))
    return int(found or 0)


async def count_overrides(connection: AsyncConnection, override: Override, now: datetime) -> int:
    """Count the unexpired overrides of this override's subject."""
    table = tables.overrides
    of_subject = and_(table.c.tenant_id == override.tenant_id, table.c.subject == override.subject)
    found = await connection.scalar(select(func.count()).select_from(table).where(of_subject, table.c.expires_at > now))
    return int(found or 0)


async def list_for_tenant(connection: AsyncConnection, entity_type: type[AnyEntity], tenant_id: str) -> list[AnyEntity]:
    """Return all entities of a tenant, sorted by name."""
    table = TABLES[entity_type]
    if not is_storable(tenant_id):
        return []
    ordered = (
        select_entities(entity_type)
        .where(table.c.tenant_id == tenant_id)
        .order_by(table.c[_order_column(entity_type)], table.c.id)
    )
    return await fetch_entities(connection, entity_type, ordered)


async def find_where_in(
    connection: AsyncConnection,
    entity_type: type[AnyEntity],
    column: str,
    values: Iterable[str],
    invalid: dict[str, str] | None = None,
) -> list[AnyEntity]:
    """Return the entities with one of these values in a column. The number of values is not bounded.

    An invalid row raises `CatalogError`. If `invalid` is given, invalid rows are left out instead, and it collects
    their ids: row id to tenant id.
    """
    table, found = TABLES[entity_type], []
    for chunk in chunked(values):
        query = select_entities(entity_type).where(table.c[column].in_(chunk)).order_by(table.c.id)
        found += await fetch_entities(connection, entity_type, query, invalid)
    return found


async def secret_owners(connection: AsyncConnection, hashes: Iterable[str]) -> dict[str, tuple[str | None, str | None]]:
    """Return the key id and tenant id of each of these secrets, by hash. Both are None if it belongs to a token."""
    secrets, keys = tables.secrets, tables.keys
    found: dict[str, tuple[str | None, str | None]] = {}
    for chunk in chunked(hashes):
        query = select(secrets.c.hash, keys.c.id, keys.c.tenant_id).outerjoin(keys, secrets.c.key_id == keys.c.id)
        found |= {
            row.hash: (row.id, row.tenant_id)
            for row in await connection.execute(query.where(secrets.c.hash.in_(chunk)))
        }
    return found


async def list_page(
    connection: AsyncConnection, entity_type: type[Entity], cursor: str | None, size: int, **values: Any
) -> Page:
    """Return a page of entities sorted by name. `values` filter it by columns; None matches any value."""
    table = TABLES[entity_type]
    order, last = table.c[_order_column(entity_type)], decode_cursor(cursor, 2)
    if not are_storable(values):
        return Page([], None)
    query = select_entities(entity_type).order_by(order, table.c.id).limit(validate_page_size(size) + 1)
    query = query.where(*(table.c[column] == value for column, value in values.items() if value is not None))
    if entity_type is Tenant:
        query = query.where(table.c.id != OPERATOR)
    if last is not None:
        query = query.where(or_(order > last[0], and_(order == last[0], table.c.id > last[1])))
    found = await fetch_entities(connection, entity_type, query)
    if len(found) <= size:
        return Page(found, None)
    end = found[size - 1]
    return Page(found[:size], encode_cursor([getattr(end, _order_column(entity_type)), end.id]))


async def tenant_config(connection: AsyncConnection, tenant_id: str) -> TenantConfig | None:
    """Return the configuration of a tenant, in three queries."""
    tenant = await find(connection, Tenant, tenant_id)
    if tenant is None:
        return None
    plans = await list_for_tenant(connection, Plan, tenant_id)
    policies = await list_for_tenant(connection, Policy, tenant_id)
    return _sorted_config(tenant, plans, policies)


async def plan_ids_of_policies(connection: AsyncConnection, tenant_id: str) -> set[str]:
    """Return the ids of the plans that policies of a tenant use."""
    table = tables.policies
    return set(await connection.scalars(select(table.c.plan_id).where(table.c.tenant_id == tenant_id).distinct()))


async def tenant_configs(
    connection: AsyncConnection, tenant_ids: Collection[str], invalid: dict[str, str]
) -> dict[str, TenantConfig]:
    """Return the configurations of many tenants by id, with three queries for each thousand tenants.

    Deleted tenants are left out, and so are tenants with an invalid row. `invalid` collects the ids of invalid rows, as
    in `find_where_in`.
    """
    storable = [tenant_id for tenant_id in tenant_ids if is_storable(tenant_id)]
    tenants = await find_where_in(connection, Tenant, "id", storable, invalid)
    plans: dict[str, list[Plan]] = {}
    policies: dict[str, list[Policy]] = {}
    for plan in await find_where_in(connection, Plan, "tenant_id", storable, invalid):
        plans.setdefault(plan.tenant_id, []).append(plan)
    for policy in await find_where_in(connection, Policy, "tenant_id", storable, invalid):
        policies.setdefault(policy.tenant_id, []).append(policy)
    left_out = set(invalid.values())
    return {
        each.id: _sorted_config(each, plans.get(each.id, ()), policies.get(each.id, ()))
        for each in tenants
        if each.id not in left_out
    }


def _sorted_config(tenant: Tenant, plans: Iterable[Plan], policies: Iterable[Policy]) -> TenantConfig:
    """Sort plans and policies independently of the database's collation, so that equal configurations compare equal."""
    return TenantConfig(
        tenant,
        tuple(sorted(plans, key=lambda plan: (plan.name, plan.id))),
        tuple(sorted(policies, key=lambda policy: (policy.resource, policy.id))),
    )


async def plan_versions(connection: AsyncConnection, plan_id: str) -> Sequence[RowMapping]:
    """Return all versions of a plan, the newest first."""
    if not is_storable(plan_id):
        return []
    table = tables.plan_versions
    rows = await connection.execute(select(table).where(table.c.plan_id == plan_id).order_by(table.c.version.desc()))
    return rows.mappings().all()


async def describe_plan_users(connection: AsyncConnection, plan: Plan) -> list[str]:
    """Describe what uses a plan, such as `policy GET:/orders`, at most three of each kind."""
    policies, keys, tenants = tables.policies, tables.keys, tables.tenants
    users: list[str] = []
    uses_plan = or_(policies.c.plan_id == plan.id, policies.c.shadow_plan_id == plan.id)
    for label, column, condition in (
        ("the tenant (its default plan)", tenants.c.name, tenants.c.default_plan_id == plan.id),
        ("policy", policies.c.resource, uses_plan),
        ("key", keys.c.name, keys.c.plan_id == plan.id),
    ):
        found = await connection.scalars(select(column).where(condition).limit(3))
        users += [label if column is tenants.c.name else f"{label} {name}" for name in found]
    return users


async def tenants_with_overrides(connection: AsyncConnection, among: Collection[str] | None = None) -> list[str]:
    """Return the tenants that have or had overrides. A store that was restored may still have deleted overrides."""
    found: list[str | None] = []
    for chunk in [None] if among is None else chunked(among):
        have = select(tables.overrides.c.tenant_id)
        had = select(tables.audit.c.tenant_id).where(tables.audit.c.action.in_(OVERRIDE_ACTIONS))
        if chunk is not None:
            have = have.where(tables.overrides.c.tenant_id.in_(chunk))
            had = had.where(tables.audit.c.tenant_id.in_(chunk))
        found += await connection.scalars(have.union(had))
    return [tenant_id for tenant_id in found if tenant_id is not None]


async def tenant_lanes(connection: AsyncConnection) -> list[tuple[str, Any]]:
    """Return the id of every tenant with its lanes as stored."""
    table = tables.tenants
    rows = await connection.execute(select(table.c.id, table.c.lanes).where(table.c.id != OPERATOR))
    return [(row.id, row.lanes) for row in rows]


async def audit_page(
    connection: AsyncConnection, cursor: str | None, size: int, tenant_id: str | None, entity_id: str | None
) -> Page:
    """Return a page of the audit log, the newest entry first."""
    table, last = tables.audit, decode_cursor(cursor, 1)
    if not are_storable({"tenant": tenant_id, "entity": entity_id}):
        return Page([], None)
    query = select(table).order_by(table.c.id.desc()).limit(validate_page_size(size) + 1)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    if entity_id is not None:
        query = query.where(table.c.entity_id == entity_id)
    if last is not None:
        query = query.where(table.c.id < last[0])
    rows = (await connection.execute(query)).mappings().all()
    entries = [AuditEntry(**row) for row in rows[:size]]
    return Page(entries, encode_cursor([entries[-1].id]) if len(rows) > size else None)


def _order_column(entity_type: type[Entity]) -> str:
    return _ORDER_COLUMN.get(entity_type, "name")
