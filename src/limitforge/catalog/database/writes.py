"""Write entities and what belongs to them. Each function runs in the transaction of its connection."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Table, and_, bindparam, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.database import tables
from limitforge.catalog.database.catalog_revision import lock_revision
from limitforge.catalog.database.entity_rows import (
    SECRET_OWNER_COLUMN,
    TABLES,
    chunked,
    entity_columns,
    secret_hash_rows,
    updatable_columns,
)
from limitforge.catalog.model import Entity, Key, Plan, Tenant, Token


async def insert_entity(connection: AsyncConnection, entity: Entity) -> None:
    """Insert the row of an entity, without plan versions and secrets."""
    await connection.execute(insert(TABLES[type(entity)]).values(entity_columns(entity)))


async def insert_entities(connection: AsyncConnection, entities: Sequence[Entity], actor: str, at: datetime) -> None:
    """Insert many entities of one type, with their plan versions and secrets.

    Default plans of tenants are not set, since the plans do not exist yet: call `set_default_plans` later.
    """
    rows = [
        {**entity_columns(each), "default_plan_id": None} if isinstance(each, Tenant) else entity_columns(each)
        for each in entities
    ]
    await connection.execute(insert(TABLES[type(entities[0])]), rows)
    plans = [each for each in entities if isinstance(each, Plan)]
    if plans:
        await add_plan_versions(connection, plans, actor)
    secrets = [row for each in entities if isinstance(each, Key | Token) for row in secret_hash_rows(each, at)]
    if secrets:
        await connection.execute(insert(tables.secrets), secrets)


async def set_default_plans(connection: AsyncConnection, tenants: Iterable[Tenant]) -> None:
    """Set the default plans of tenants that `insert_entities` has inserted."""
    table = tables.tenants
    rows = [{"tenant": each.id, "plan": each.default_plan_id} for each in tenants if each.default_plan_id is not None]
    if rows:
        set_one = update(table).where(table.c.id == bindparam("tenant")).values(default_plan_id=bindparam("plan"))
        await connection.execute(set_one, rows)


async def replace_entities(connection: AsyncConnection, entities: Sequence[Entity]) -> bool:
    """Replace many entities of one type. Returns False if one was not at the version before its new one."""
    table = TABLES[type(entities[0])]
    rows = [updatable_columns(each) for each in entities]
    same = and_(table.c.id == bindparam("entity_id"), table.c.version == bindparam("old_version"))
    replaced = update(table).where(same).values({name: bindparam(f"new_{name}") for name in rows[0]})
    await connection.execute(
        replaced,
        [
            {f"new_{name}": value for name, value in row.items()}
            | {"entity_id": each.id, "old_version": each.version - 1}
            for each, row in zip(entities, rows, strict=True)
        ],
    )
    found: dict[str, int] = {}
    for chunk in chunked(each.id for each in entities):  # drivers don't return the row count of executemany
        query = select(table.c.id, table.c.version).where(table.c.id.in_(chunk))
        found |= {row.id: row.version for row in await connection.execute(query)}
    return found == {each.id: each.version for each in entities}


async def delete_entities(connection: AsyncConnection, entities: Sequence[Entity]) -> None:
    """Delete entities of one type, with everything that they own."""
    entity_type = type(entities[0])
    table = TABLES[entity_type]
    for chunk in chunked(each.id for each in entities):
        if entity_type is Tenant:
            await _delete_tenant_data(connection, chunk)
        if entity_type is Plan:
            await connection.execute(delete(tables.plan_versions).where(tables.plan_versions.c.plan_id.in_(chunk)))
        if entity_type in SECRET_OWNER_COLUMN:
            await connection.execute(delete(tables.secrets).where(SECRET_OWNER_COLUMN[entity_type].in_(chunk)))
        await connection.execute(delete(table).where(table.c.id.in_(chunk)))


async def _delete_tenant_data(connection: AsyncConnection, tenant_ids: Sequence[str]) -> None:
    tenants = tables.tenants
    await connection.execute(update(tenants).where(tenants.c.id.in_(tenant_ids)).values(default_plan_id=None))
    for owner, secret in ((tables.keys, tables.secrets.c.key_id), (tables.tokens, tables.secrets.c.token_id)):
        owned = select(owner.c.id).where(owner.c.tenant_id.in_(tenant_ids))
        await connection.execute(delete(tables.secrets).where(secret.in_(owned)))
    for table in (tables.policies, tables.keys, tables.tokens, tables.overrides):
        await connection.execute(delete(table).where(table.c.tenant_id.in_(tenant_ids)))
    owned = select(tables.plans.c.id).where(tables.plans.c.tenant_id.in_(tenant_ids))
    await connection.execute(delete(tables.plan_versions).where(tables.plan_versions.c.plan_id.in_(owned)))
    await connection.execute(delete(tables.plans).where(tables.plans.c.tenant_id.in_(tenant_ids)))


async def add_plan_versions(connection: AsyncConnection, plans: Sequence[Plan], actor: str) -> None:
    """Insert the current versions of plans into their history."""
    await connection.execute(insert(tables.plan_versions), [_version_row(each, actor) for each in plans])


async def replace_secret_hashes(connection: AsyncConnection, entity: Key | Token, at: datetime) -> None:
    """Replace the secrets of a key or token. Secrets that stay keep their date of creation."""
    table, owner = tables.secrets, SECRET_OWNER_COLUMN[type(entity)]
    known = set(await connection.scalars(select(table.c.hash).where(owner == entity.id)))
    rows = secret_hash_rows(entity, at)
    wanted = {row["hash"] for row in rows}
    for removed in known - wanted:
        await connection.execute(delete(table).where(table.c.hash == removed))
    for row in rows:
        if row["hash"] in known:
            changed = update(table).where(table.c.hash == row["hash"])
            await connection.execute(changed.values(expires_at=row["expires_at"]))
        else:
            await connection.execute(insert(table).values(row))


async def set_tenant_revisions(connection: AsyncConnection, tenant_ids: Iterable[str], revision: int) -> None:
    """Set the revision of tenants whose configuration an edit has changed."""
    table = tables.tenants
    for chunk in chunked(tenant_ids):
        await connection.execute(update(table).where(table.c.id.in_(chunk)).values(revision=revision))


async def record_key_use(connection: AsyncConnection, used: Mapping[str, datetime]) -> None:
    """Set when keys were last used, unless a later time is stored."""
    await _record_use(connection, tables.keys, used)


async def record_token_use(connection: AsyncConnection, used: Mapping[str, datetime]) -> None:
    """Set when tokens were last used, unless a later time is stored."""
    await _record_use(connection, tables.tokens, used)


async def _record_use(connection: AsyncConnection, table: Table, used: Mapping[str, datetime]) -> None:
    await lock_revision(connection)
    older = or_(table.c.last_used_at.is_(None), table.c.last_used_at < bindparam("at"))
    statement = update(table).where(table.c.id == bindparam("key"), older).values(last_used_at=bindparam("at"))
    await connection.execute(statement, [{"key": key, "at": at} for key, at in sorted(used.items())])


async def remove_expired(connection: AsyncConnection, now: datetime) -> None:
    """Delete expired overrides and secrets."""
    await lock_revision(connection)
    for table in (tables.overrides, tables.secrets):
        await connection.execute(delete(table).where(table.c.expires_at <= now))


async def add_audit_entries(connection: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append entries to the audit log."""
    await connection.execute(insert(tables.audit), rows)


def _version_row(plan: Plan, actor: str) -> dict[str, Any]:
    row = {"plan_id": plan.id, "version": plan.version, "limits": list(plan.limits)}
    return {**row, "created_at": plan.updated_at, "created_by": actor}
