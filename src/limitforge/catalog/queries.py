"""All SQL, as functions of a connection."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from sqlalchemy import RowMapping, Select, Table, and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog import tables
from limitforge.catalog.model import (
    AuditEntry,
    Entity,
    Key,
    Override,
    Plan,
    Policy,
    Secret,
    Tenant,
    TenantConfig,
    Token,
    build,
)
from limitforge.core.exact import shown
from limitforge.errors import CatalogError, InvalidInput

MAX_PAGE = 1_000

AnyEntity = TypeVar("AnyEntity", bound=Entity)

TABLES: Mapping[type[Entity], Table] = {
    Tenant: tables.tenants,
    Plan: tables.plans,
    Policy: tables.policies,
    Key: tables.keys,
    Override: tables.overrides,
    Token: tables.tokens,
}
_ORDER: Mapping[type[Entity], str] = {Policy: "resource", Override: "subject"}  # the others by name
_SECRETS_OF: Mapping[type[Entity], Any] = {Key: tables.secrets.c.key_id, Token: tables.secrets.c.token_id}


class Announcement(msgspec.Struct, frozen=True):
    """What other nodes must hear of one tenant: that what decides has changed, or its overrides; which keys have
    changed, and which are gone.
    """

    revision: int
    tenant_id: str
    config: bool = False
    overrides: bool = False
    keys: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class Owed(msgspec.Struct, frozen=True):
    """An announcement that was not published yet, and when it was written."""

    announcement: Announcement
    at: datetime


class Page(msgspec.Struct, frozen=True):
    """Some of a list; pass `cursor` on for the next page, None after the last."""

    items: list[Any]
    cursor: str | None


# --- Reading ---------------------------------------------------------------------------------------------------------


async def find(connection: AsyncConnection, kind: type[AnyEntity], identity: str) -> AnyEntity | None:
    rows = await _entities(connection, kind, _select(kind).where(TABLES[kind].c.id == identity))
    return rows[0] if rows else None


async def find_by(connection: AsyncConnection, kind: type[AnyEntity], **values: Any) -> list[AnyEntity]:
    """All that have these values, at most a page of them."""
    table = TABLES[kind]
    where = [table.c[column] == value for column, value in values.items()]
    return await _entities(connection, kind, _select(kind).where(*where).order_by(table.c.id).limit(MAX_PAGE))


async def count(connection: AsyncConnection, kind: type[Entity], **values: Any) -> int:
    table = TABLES[kind]
    where = [table.c[column] == value for column, value in values.items()]
    found = await connection.scalar(select(func.count()).select_from(table).where(*where))
    return int(found or 0)


async def every(connection: AsyncConnection, kind: type[AnyEntity], tenant_id: str) -> list[AnyEntity]:
    """All of a tenant, by name."""
    table = TABLES[kind]
    ordered = _select(kind).where(table.c.tenant_id == tenant_id).order_by(table.c[_order(kind)], table.c.id)
    return await _entities(connection, kind, ordered)


async def page(connection: AsyncConnection, kind: type[Entity], cursor: str | None, size: int, **values: Any) -> Page:
    """A page of a list by name; `values` are what its items must have, None where any will do."""
    table = TABLES[kind]
    order, last = table.c[_order(kind)], _read_cursor(cursor, 2)
    query = _select(kind).order_by(order, table.c.id).limit(_size(size) + 1)
    query = query.where(*(table.c[column] == value for column, value in values.items() if value is not None))
    if kind is Tenant:
        query = query.where(table.c.id != "operator")
    if last is not None:
        query = query.where(or_(order > last[0], and_(order == last[0], table.c.id > last[1])))
    found = await _entities(connection, kind, query)
    if len(found) <= size:
        return Page(found, None)
    end = found[size - 1]
    return Page(found[:size], _cursor([getattr(end, _order(kind)), end.id]))


async def tenant_config(connection: AsyncConnection, tenant_id: str) -> TenantConfig | None:
    """All of a tenant that decides, in three queries, however much that is."""
    tenant = await find(connection, Tenant, tenant_id)
    if tenant is None:
        return None
    plans = await every(connection, Plan, tenant_id)
    policies = await every(connection, Policy, tenant_id)
    return TenantConfig(tenant, tuple(plans), tuple(policies))


async def plan_versions(connection: AsyncConnection, plan_id: str) -> Sequence[RowMapping]:
    """The history of a plan, the newest first."""
    table = tables.plan_versions
    rows = await connection.execute(select(table).where(table.c.plan_id == plan_id).order_by(table.c.version.desc()))
    return rows.mappings().all()


async def users_of_plan(connection: AsyncConnection, plan: Plan) -> list[str]:
    """Who would miss it, in words; at most a few of them."""
    policies, keys, tenants = tables.policies, tables.keys, tables.tenants
    users: list[str] = []
    uses = or_(policies.c.plan_id == plan.id, policies.c.shadow_plan_id == plan.id)
    for words, column, condition in (
        ("the tenant's default", tenants.c.name, tenants.c.default_plan_id == plan.id),
        ("policy", policies.c.resource, uses),
        ("key", keys.c.name, keys.c.plan_id == plan.id),
    ):
        found = await connection.scalars(select(column).where(condition).limit(3))
        users += [words if column is tenants.c.name else f"{words} {name}" for name in found]
    return users


async def tenants_with_overrides(connection: AsyncConnection) -> list[str]:
    return list(await connection.scalars(select(tables.overrides.c.tenant_id).distinct()))


async def audit_page(
    connection: AsyncConnection, cursor: str | None, size: int, tenant_id: str | None, entity_id: str | None
) -> Page:
    """The newest first."""
    table, last = tables.audit, _read_cursor(cursor, 1)
    query = select(table).order_by(table.c.id.desc()).limit(_size(size) + 1)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    if entity_id is not None:
        query = query.where(table.c.entity_id == entity_id)
    if last is not None:
        query = query.where(table.c.id < last[0])
    rows = (await connection.execute(query)).mappings().all()
    entries = [AuditEntry(**row) for row in rows[:size]]
    return Page(entries, _cursor([entries[-1].id]) if len(rows) > size else None)


# --- Writing ---------------------------------------------------------------------------------------------------------


async def next_revision(connection: AsyncConnection) -> int:
    """The number of this write. It waits for every earlier one to end: call it first."""
    table = tables.revision
    advanced = update(table).values(value=table.c.value + 1).returning(table.c.value)
    found = await connection.scalar(advanced)
    if found is None:
        raise CatalogError("the table `revision` has lost its row: restore it with the highest revision in `tenants`")
    return int(found)


async def add(connection: AsyncConnection, entity: Entity) -> None:
    await connection.execute(insert(TABLES[type(entity)]).values(_columns(entity)))


async def replace(connection: AsyncConnection, entity: Entity, version: int) -> bool:
    """False if it is no longer at that version."""
    table = TABLES[type(entity)]
    same = and_(table.c.id == entity.id, table.c.version == version)
    done = await connection.execute(update(table).where(same).values(_columns(entity)))
    return done.rowcount == 1


async def remove(connection: AsyncConnection, entity: Entity) -> None:
    """It, and all that is its own."""
    if isinstance(entity, Tenant):
        await _remove_all_of(connection, entity.id)
    if isinstance(entity, Plan):
        await connection.execute(delete(tables.plan_versions).where(tables.plan_versions.c.plan_id == entity.id))
    if type(entity) in _SECRETS_OF:
        await connection.execute(delete(tables.secrets).where(_SECRETS_OF[type(entity)] == entity.id))
    table = TABLES[type(entity)]
    await connection.execute(delete(table).where(table.c.id == entity.id))


async def _remove_all_of(connection: AsyncConnection, tenant_id: str) -> None:
    await connection.execute(
        update(tables.tenants).where(tables.tenants.c.id == tenant_id).values(default_plan_id=None)
    )
    for owner, secret in ((tables.keys, tables.secrets.c.key_id), (tables.tokens, tables.secrets.c.token_id)):
        owned = select(owner.c.id).where(owner.c.tenant_id == tenant_id)
        await connection.execute(delete(tables.secrets).where(secret.in_(owned)))
    for table in (tables.policies, tables.keys, tables.tokens, tables.overrides):
        await connection.execute(delete(table).where(table.c.tenant_id == tenant_id))
    owned = select(tables.plans.c.id).where(tables.plans.c.tenant_id == tenant_id)
    await connection.execute(delete(tables.plan_versions).where(tables.plan_versions.c.plan_id.in_(owned)))
    await connection.execute(delete(tables.plans).where(tables.plans.c.tenant_id == tenant_id))


async def add_plan_version(connection: AsyncConnection, plan: Plan, actor: str) -> None:
    row = {"plan_id": plan.id, "version": plan.version, "limits": list(plan.limits)}
    await connection.execute(insert(tables.plan_versions).values(**row, created_at=plan.updated_at, created_by=actor))


async def set_secrets(connection: AsyncConnection, entity: Key | Token, at: datetime) -> None:
    """Keep exactly these secrets of a key or token."""
    owner = _SECRETS_OF[type(entity)]
    await connection.execute(delete(tables.secrets).where(owner == entity.id))
    if entity.secrets:
        rows = [
            {"hash": each.hash, "pepper": each.pepper, "expires_at": each.expires_at, owner.key: entity.id}
            for each in entity.secrets
        ]
        await connection.execute(insert(tables.secrets), [{**row, "created_at": at} for row in rows])


async def set_tenant_revision(connection: AsyncConnection, tenant_id: str, revision: int) -> None:
    table = tables.tenants
    await connection.execute(update(table).where(table.c.id == tenant_id).values(revision=revision))


async def touch_keys(connection: AsyncConnection, used: Mapping[str, datetime]) -> None:
    """When keys were last used; a later moment that is there already stays."""
    table = tables.keys
    older = or_(table.c.last_used_at.is_(None), table.c.last_used_at < bindparam("at"))
    statement = update(table).where(table.c.id == bindparam("key"), older).values(last_used_at=bindparam("at"))
    await connection.execute(statement, [{"key": key, "at": at} for key, at in sorted(used.items())])


async def remove_expired(connection: AsyncConnection, now: datetime) -> None:
    """Overrides and old secrets that say nothing any more."""
    for table in (tables.overrides, tables.secrets):
        await connection.execute(delete(table).where(table.c.expires_at <= now))


async def add_audit(connection: AsyncConnection, **values: Any) -> None:
    await connection.execute(insert(tables.audit).values(**values))


# --- The outbox ------------------------------------------------------------------------------------------------------


async def add_outbox(connection: AsyncConnection, announcements: Iterable[Announcement], at: datetime) -> None:
    for each in announcements:
        change = msgspec.to_builtins(each)
        await connection.execute(
            insert(tables.outbox).values(
                revision=each.revision, tenant_id=each.tenant_id, change=change, at=at, published=False
            )
        )


async def announce_in_postgres(connection: AsyncConnection, channel: str, revision: int) -> None:
    """Whoever listens is told when this transaction commits, and only then."""
    await connection.execute(select(func.pg_notify(channel, str(revision))))


async def last_revision(connection: AsyncConnection) -> int:
    return int(await connection.scalar(select(tables.revision.c.value)) or 0)


async def outbox_after(connection: AsyncConnection, revision: int, limit: int) -> list[Announcement]:
    """In their order: some `limit` revisions, each of them whole."""
    table = tables.outbox
    some = and_(table.c.revision > revision, table.c.revision <= revision + limit)
    ordered = select(table.c.change).where(some).order_by(table.c.revision, table.c.tenant_id)
    return [msgspec.convert(change, Announcement) for change in await connection.scalars(ordered)]


async def unpublished(connection: AsyncConnection, limit: int) -> list[Owed]:
    table = tables.outbox
    query = select(table).where(table.c.published.is_(False)).order_by(table.c.revision, table.c.tenant_id)
    rows = (await connection.execute(query.limit(limit))).mappings()
    return [Owed(msgspec.convert(row["change"], Announcement), row["at"]) for row in rows]


async def mark_published(connection: AsyncConnection, announcement: Announcement) -> None:
    table = tables.outbox
    this = and_(table.c.revision == announcement.revision, table.c.tenant_id == announcement.tenant_id)
    await connection.execute(update(table).where(this).values(published=True))


async def trim_outbox(connection: AsyncConnection, before: datetime) -> None:
    await connection.execute(delete(tables.outbox).where(tables.outbox.c.at < before))


# --- Rows and entities -----------------------------------------------------------------------------------------------


def _select(kind: type[Entity]) -> Select[Any]:
    table = TABLES[kind]
    if kind is Plan:
        versions = tables.plan_versions
        current = and_(versions.c.plan_id == table.c.id, versions.c.version == table.c.version)
        return select(table, versions.c.limits).join(versions, current)
    return select(table)


async def _entities(connection: AsyncConnection, kind: type[AnyEntity], query: Select[Any]) -> list[AnyEntity]:
    rows = (await connection.execute(query)).mappings().all()
    secrets = await _secrets(connection, kind, [row["id"] for row in rows]) if rows and kind in _SECRETS_OF else {}
    names = kind.__struct_fields__
    found: list[AnyEntity] = []
    for row in rows:
        fields = {name: row[name] for name in names if name in row}
        if kind in _SECRETS_OF:
            fields["secrets"] = tuple(secrets.get(row["id"], ()))
        try:
            found.append(build(kind, fields))
        except InvalidInput as error:
            raise CatalogError(f"the database holds a {kind.kind} that makes no sense, {row['id']}: {error}") from error
    return found


async def _secrets(connection: AsyncConnection, kind: type[Entity], ids: list[str]) -> dict[str, list[Secret]]:
    owner, table = _SECRETS_OF[kind], tables.secrets
    found: dict[str, list[Secret]] = {}
    query = select(table).where(owner.in_(ids)).order_by(table.c.created_at.desc(), table.c.expires_at.desc())
    for row in (await connection.execute(query)).mappings():
        found.setdefault(row[owner.key], []).append(Secret(row["hash"], row["pepper"], row["expires_at"]))
    return found


def _columns(entity: Entity) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(entity, name) for name in entity.__struct_fields__}
    fields.pop("secrets", None)
    if isinstance(entity, Plan):
        del fields["limits"]
    if isinstance(entity, Tenant):
        fields["lanes"] = msgspec.to_builtins(entity.lanes)
    if isinstance(entity, Policy):
        fields["pattern"] = entity.pattern.canonical
    if isinstance(entity, Key | Token):
        fields["scopes"] = list(entity.scopes)
    return fields


def _order(kind: type[Entity]) -> str:
    return _ORDER.get(kind, "name")


def _size(size: int) -> int:
    if type(size) is not int or not 1 <= size <= MAX_PAGE:
        raise InvalidInput("page", f"must be from 1 to {MAX_PAGE}, got {shown(size)}")
    return size


def _cursor(values: list[Any]) -> str:
    return urlsafe_b64encode(msgspec.json.encode(values)).rstrip(b"=").decode()


def _read_cursor(cursor: str | None, parts: int) -> list[Any] | None:
    if cursor is None:
        return None
    kinds: Mapping[int, Any] = {1: tuple[int], 2: tuple[str, str]}
    try:
        values = msgspec.json.decode(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=kinds[parts])
    except (ValueError, msgspec.MsgspecError):
        raise InvalidInput("cursor", "is not one that a list returned") from None
    return list(values)
