"""All SQL, as functions of a connection."""

from base64 import b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
from sqlalchemy import RowMapping, Select, Table, and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.database import tables
from limitforge.catalog.history import Stamp, new_change_id
from limitforge.catalog.model import (
    AuditEntry,
    Entity,
    Key,
    KeyScope,
    Override,
    Plan,
    Policy,
    SecretHash,
    Tenant,
    TenantConfig,
    Token,
    build_entity,
    is_storable,
    to_datetime,
)
from limitforge.core.exact import US_PER_SECOND, short_repr
from limitforge.errors import CatalogError, InvalidInput

MAX_PAGE_SIZE = 1_000
OVERRIDE_ACTIONS = ("override.create", "override.update", "override.delete")

AnyEntity = TypeVar("AnyEntity", bound=Entity)

TABLES: Mapping[type[Entity], Table] = {
    Tenant: tables.tenants,
    Plan: tables.plans,
    Policy: tables.policies,
    Key: tables.keys,
    Override: tables.overrides,
    Token: tables.tokens,
}
_ORDER_COLUMN: Mapping[type[Entity], str] = {Policy: "resource", Override: "subject"}  # the others by name
_SECRETS_OF: Mapping[type[Entity], Any] = {Key: tables.secrets.c.key_id, Token: tables.secrets.c.token_id}


class Announcement(msgspec.Struct, frozen=True):
    """What other nodes must hear of one tenant: that what decides has changed, or its overrides; which keys have
    changed, and which are gone. `revoked` are the ids of keys, and of the tenant, that may do less than before;
    `revokes` says that there are any, or that keys are gone: such rows are published first.
    """

    revision: int
    tenant_id: str
    config: bool = False
    overrides: bool = False
    keys: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()
    revokes: bool = False
    timeline: int = 0
    change_id: int = 0
    previous_id: int = 0

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.timeline, self.revision, self.change_id)


class Revision(msgspec.Struct, frozen=True):
    """A write: its point in history, and the id of the write before it."""

    stamp: Stamp
    previous_id: int


class PendingAnnouncement(msgspec.Struct, frozen=True):
    """An announcement that was not published yet, and when it was written."""

    announcement: Announcement
    at: datetime


class Page(msgspec.Struct, frozen=True):
    """Some of a list; pass `cursor` on for the next page, None after the last."""

    items: list[Any]
    cursor: str | None


# --- Reading ---------------------------------------------------------------------------------------------------------


async def find(connection: AsyncConnection, kind: type[AnyEntity], identity: str) -> AnyEntity | None:
    if not is_storable(identity):
        return None
    rows = await _entities(connection, kind, _select(kind).where(TABLES[kind].c.id == identity))
    return rows[0] if rows else None


async def find_by(connection: AsyncConnection, kind: type[AnyEntity], **values: Any) -> list[AnyEntity]:
    """All that have these values, at most a page of them."""
    table = TABLES[kind]
    if not _are_storable(values):
        return []
    where = [table.c[column] == value for column, value in values.items()]
    return await _entities(connection, kind, _select(kind).where(*where).order_by(table.c.id).limit(MAX_PAGE_SIZE))


async def count(connection: AsyncConnection, kind: type[Entity], **values: Any) -> int:
    table = TABLES[kind]
    where = [table.c[column] == value for column, value in values.items()]
    found = await connection.scalar(select(func.count()).select_from(table).where(*where))
    return int(found or 0)


async def count_overrides(connection: AsyncConnection, override: Override, now: datetime) -> int:
    """How many its subject has that are not over."""
    table = tables.overrides
    theirs = and_(table.c.tenant_id == override.tenant_id, table.c.subject == override.subject)
    found = await connection.scalar(select(func.count()).select_from(table).where(theirs, table.c.expires_at > now))
    return int(found or 0)


async def list_for_tenant(connection: AsyncConnection, kind: type[AnyEntity], tenant_id: str) -> list[AnyEntity]:
    """All of a tenant, by name."""
    table = TABLES[kind]
    if not is_storable(tenant_id):
        return []
    ordered = _select(kind).where(table.c.tenant_id == tenant_id).order_by(table.c[_order_column(kind)], table.c.id)
    return await _entities(connection, kind, ordered)


async def find_where_in(
    connection: AsyncConnection,
    kind: type[AnyEntity],
    column: str,
    values: Iterable[str],
    invalid: dict[str, str] | None = None,
) -> list[AnyEntity]:
    """All that have one of these values, however many those are. With `invalid`, rows that are not valid are left out,
    and their ids are added there with the ids of their tenants; otherwise they raise.
    """
    table, found = TABLES[kind], []
    for chunk in _chunks(values):
        query = _select(kind).where(table.c[column].in_(chunk)).order_by(table.c.id)
        found += await _entities(connection, kind, query, invalid)
    return found


async def secret_owners(connection: AsyncConnection, hashes: Iterable[str]) -> dict[str, tuple[str | None, str | None]]:
    """Return who has these secrets, by hash: the id of the key and of its tenant, None twice where it is a token."""
    secrets, keys = tables.secrets, tables.keys
    found: dict[str, tuple[str | None, str | None]] = {}
    for chunk in _chunks(hashes):
        query = select(secrets.c.hash, keys.c.id, keys.c.tenant_id).outerjoin(keys, secrets.c.key_id == keys.c.id)
        found |= {
            row.hash: (row.id, row.tenant_id)
            for row in await connection.execute(query.where(secrets.c.hash.in_(chunk)))
        }
    return found


async def list_page(
    connection: AsyncConnection, kind: type[Entity], cursor: str | None, size: int, **values: Any
) -> Page:
    """A page of a list by name; `values` are what its items must have, None where any will do."""
    table = TABLES[kind]
    order, last = table.c[_order_column(kind)], _decode_cursor(cursor, 2)
    if not _are_storable(values):
        return Page([], None)
    query = _select(kind).order_by(order, table.c.id).limit(_check_page_size(size) + 1)
    query = query.where(*(table.c[column] == value for column, value in values.items() if value is not None))
    if kind is Tenant:
        query = query.where(table.c.id != "operator")
    if last is not None:
        query = query.where(or_(order > last[0], and_(order == last[0], table.c.id > last[1])))
    found = await _entities(connection, kind, query)
    if len(found) <= size:
        return Page(found, None)
    end = found[size - 1]
    return Page(found[:size], _encode_cursor([getattr(end, _order_column(kind)), end.id]))


async def tenant_config(connection: AsyncConnection, tenant_id: str) -> TenantConfig | None:
    """All of a tenant that decides, in three queries, however much that is."""
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
    """The same of many tenants, by id, in three queries for each thousand of them. Those that are gone are left out,
    and so are those of which something is not valid, as `some` adds it to `invalid`.
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
    """Sort both in one order, which does not depend on the database's collation: equal ones compare equal."""
    return TenantConfig(
        tenant,
        tuple(sorted(plans, key=lambda plan: (plan.name, plan.id))),
        tuple(sorted(policies, key=lambda policy: (policy.resource, policy.id))),
    )


async def plan_versions(connection: AsyncConnection, plan_id: str) -> Sequence[RowMapping]:
    """The history of a plan, the newest first."""
    if not is_storable(plan_id):
        return []
    table = tables.plan_versions
    rows = await connection.execute(select(table).where(table.c.plan_id == plan_id).order_by(table.c.version.desc()))
    return rows.mappings().all()


async def describe_plan_users(connection: AsyncConnection, plan: Plan) -> list[str]:
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


async def tenants_with_overrides(connection: AsyncConnection, among: Collection[str] | None = None) -> list[str]:
    """Those that have any, or had: what is no longer here may still be in a store that was set back."""
    found: list[str | None] = []
    for chunk in [None] if among is None else _chunks(among):
        have = select(tables.overrides.c.tenant_id)
        had = select(tables.audit.c.tenant_id).where(tables.audit.c.action.in_(OVERRIDE_ACTIONS))
        if chunk is not None:
            have = have.where(tables.overrides.c.tenant_id.in_(chunk))
            had = had.where(tables.audit.c.tenant_id.in_(chunk))
        found += await connection.scalars(have.union(had))
    return [tenant_id for tenant_id in found if tenant_id is not None]


async def tenant_lanes(connection: AsyncConnection) -> list[tuple[str, Any]]:
    """The id of every tenant, and its lanes as they are stored."""
    table = tables.tenants
    rows = await connection.execute(select(table.c.id, table.c.lanes).where(table.c.id != "operator"))
    return [(row.id, row.lanes) for row in rows]


async def audit_page(
    connection: AsyncConnection, cursor: str | None, size: int, tenant_id: str | None, entity_id: str | None
) -> Page:
    """The newest first."""
    table, last = tables.audit, _decode_cursor(cursor, 1)
    if not _are_storable({"tenant": tenant_id, "entity": entity_id}):
        return Page([], None)
    query = select(table).order_by(table.c.id.desc()).limit(_check_page_size(size) + 1)
    if tenant_id is not None:
        query = query.where(table.c.tenant_id == tenant_id)
    if entity_id is not None:
        query = query.where(table.c.entity_id == entity_id)
    if last is not None:
        query = query.where(table.c.id < last[0])
    rows = (await connection.execute(query)).mappings().all()
    entries = [AuditEntry(**row) for row in rows[:size]]
    return Page(entries, _encode_cursor([entries[-1].id]) if len(rows) > size else None)


# --- Writing ---------------------------------------------------------------------------------------------------------


async def next_revision(connection: AsyncConnection) -> Revision:
    """The number and the id of this write. It waits for every earlier one to end: call it first."""
    table = tables.revision
    following = {"value": table.c.value + 1, "previous_id": table.c.change_id, "change_id": new_change_id()}
    found = (await connection.execute(update(table).values(following).returning(table))).mappings().first()
    if found is None:
        raise CatalogError("the table `revision` has lost its row: restore it with the highest revision in `tenants`")
    return Revision(_stamp(found), found["previous_id"])


async def set_timeline(connection: AsyncConnection, timeline: int) -> None:
    await connection.execute(update(tables.revision).values(timeline=timeline))


async def add(connection: AsyncConnection, entity: Entity) -> None:
    await connection.execute(insert(TABLES[type(entity)]).values(_columns(entity)))


async def add_all(connection: AsyncConnection, entities: Sequence[Entity], actor: str, at: datetime) -> None:
    """Many new ones of one kind, with what is kept beside them. A tenant's default plan is left for later: there are no
    plans of it yet.
    """
    rows = [
        {**_columns(each), "default_plan_id": None} if isinstance(each, Tenant) else _columns(each) for each in entities
    ]
    await connection.execute(insert(TABLES[type(entities[0])]), rows)
    plans = [each for each in entities if isinstance(each, Plan)]
    if plans:
        await add_plan_versions(connection, plans, actor)
    secrets = [row for each in entities if isinstance(each, Key | Token) for row in _secret_hash_rows(each, at)]
    if secrets:
        await connection.execute(insert(tables.secrets), secrets)


async def set_default_plans(connection: AsyncConnection, tenants: Iterable[Tenant]) -> None:
    table = tables.tenants
    rows = [{"tenant": each.id, "plan": each.default_plan_id} for each in tenants if each.default_plan_id is not None]
    if rows:
        set_one = update(table).where(table.c.id == bindparam("tenant")).values(default_plan_id=bindparam("plan"))
        await connection.execute(set_one, rows)


async def replace_all(connection: AsyncConnection, entities: Sequence[Entity]) -> bool:
    """Replace many of one kind, each the version before its own. False if one of them was not at that version."""
    table = TABLES[type(entities[0])]
    rows = [_updatable_columns(each) for each in entities]
    same = and_(table.c.id == bindparam("its_id"), table.c.version == bindparam("its_version"))
    replaced = update(table).where(same).values({name: bindparam(f"new_{name}") for name in rows[0]})
    await connection.execute(
        replaced,
        [
            {f"new_{name}": value for name, value in row.items()} | {"its_id": each.id, "its_version": each.version - 1}
            for each, row in zip(entities, rows, strict=True)
        ],
    )
    found: dict[str, int] = {}
    for chunk in _chunks(each.id for each in entities):  # drivers don't count the rows that many statements changed
        query = select(table.c.id, table.c.version).where(table.c.id.in_(chunk))
        found |= {row.id: row.version for row in await connection.execute(query)}
    return found == {each.id: each.version for each in entities}


async def remove(connection: AsyncConnection, entities: Sequence[Entity]) -> None:
    """Delete some of one kind, and all that is their own."""
    kind = type(entities[0])
    table = TABLES[kind]
    for chunk in _chunks(each.id for each in entities):
        if kind is Tenant:
            await _remove_tenant_data(connection, chunk)
        if kind is Plan:
            await connection.execute(delete(tables.plan_versions).where(tables.plan_versions.c.plan_id.in_(chunk)))
        if kind in _SECRETS_OF:
            await connection.execute(delete(tables.secrets).where(_SECRETS_OF[kind].in_(chunk)))
        await connection.execute(delete(table).where(table.c.id.in_(chunk)))


async def _remove_tenant_data(connection: AsyncConnection, tenant_ids: Sequence[str]) -> None:
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
    await connection.execute(insert(tables.plan_versions), [_version_row(each, actor) for each in plans])


async def set_secrets(connection: AsyncConnection, entity: Key | Token, at: datetime) -> None:
    """Keep exactly these secrets of a key or token; those that stay keep the date on which they were made."""
    table, owner = tables.secrets, _SECRETS_OF[type(entity)]
    known = set(await connection.scalars(select(table.c.hash).where(owner == entity.id)))
    rows = _secret_hash_rows(entity, at)
    wanted = {row["hash"] for row in rows}
    for gone in known - wanted:
        await connection.execute(delete(table).where(table.c.hash == gone))
    for row in rows:
        if row["hash"] in known:
            changed = update(table).where(table.c.hash == row["hash"])
            await connection.execute(changed.values(expires_at=row["expires_at"]))
        else:
            await connection.execute(insert(table).values(row))


async def set_tenant_revisions(connection: AsyncConnection, tenant_ids: Iterable[str], revision: int) -> None:
    table = tables.tenants
    for chunk in _chunks(tenant_ids):
        await connection.execute(update(table).where(table.c.id.in_(chunk)).values(revision=revision))


async def touch_keys(connection: AsyncConnection, used: Mapping[str, datetime]) -> None:
    """When keys were last used; a later moment that is there already stays."""
    await _record_use(connection, tables.keys, used)


async def touch_tokens(connection: AsyncConnection, used: Mapping[str, datetime]) -> None:
    """The same of tokens."""
    await _record_use(connection, tables.tokens, used)


async def _record_use(connection: AsyncConnection, table: Table, used: Mapping[str, datetime]) -> None:
    await _lock_revision(connection)
    older = or_(table.c.last_used_at.is_(None), table.c.last_used_at < bindparam("at"))
    statement = update(table).where(table.c.id == bindparam("key"), older).values(last_used_at=bindparam("at"))
    await connection.execute(statement, [{"key": key, "at": at} for key, at in sorted(used.items())])


async def _lock_revision(connection: AsyncConnection) -> None:
    """As an edit does, so that the two never wait for each other in turn."""
    await connection.execute(select(tables.revision.c.value).with_for_update())


async def remove_expired(connection: AsyncConnection, now: datetime) -> None:
    """Overrides and old secrets that say nothing any more."""
    await _lock_revision(connection)
    for table in (tables.overrides, tables.secrets):
        await connection.execute(delete(table).where(table.c.expires_at <= now))


async def add_audit(connection: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> None:
    await connection.execute(insert(tables.audit), rows)


# --- The outbox ------------------------------------------------------------------------------------------------------


async def add_outbox(connection: AsyncConnection, announcements: Iterable[Announcement], at: datetime) -> None:
    rows = [
        {"revision": each.revision, "tenant_id": each.tenant_id, "change": msgspec.to_builtins(each)}
        for each in announcements
    ]
    await connection.execute(insert(tables.outbox), [{**row, "at": at, "published": False} for row in rows])


async def notify_postgres(connection: AsyncConnection, channel: str, revision: int) -> None:
    """Whoever listens is told when this transaction commits, and only then."""
    await connection.execute(select(func.pg_notify(channel, str(revision))))


async def read_last_stamp(connection: AsyncConnection, *, lock: bool = False) -> Stamp:
    """The last write. `lock` keeps others from writing until this transaction ends."""
    query = select(tables.revision)
    found = (await connection.execute(query.with_for_update() if lock else query)).mappings().first()
    return Stamp() if found is None else _stamp(found)


async def recent_stamps(connection: AsyncConnection, limit: int) -> list[Stamp]:
    """The last writes that the outbox still has, some `limit` rows of it."""
    newest_first = select(tables.outbox.c.change).order_by(tables.outbox.c.revision.desc()).limit(limit)
    return [msgspec.convert(change, Announcement).stamp for change in await connection.scalars(newest_first)]


async def outbox_after(connection: AsyncConnection, revision: int, limit: int) -> list[Announcement]:
    """In their order: some `limit` revisions, each of them whole."""
    table = tables.outbox
    some = and_(table.c.revision > revision, table.c.revision <= revision + limit)
    ordered = select(table.c.change).where(some).order_by(table.c.revision, table.c.tenant_id)
    return [msgspec.convert(change, Announcement) for change in await connection.scalars(ordered)]


async def unpublished_announcements(
    connection: AsyncConnection, limit: int, *, after: tuple[int, str] = (0, ""), revoking: bool = False
) -> list[PendingAnnouncement]:
    """The oldest rows behind this revision and tenant that were not published; with `revoking`, only of those that
    revoke something.
    """
    table = tables.outbox
    query = select(table).where(table.c.published.is_(False)).order_by(table.c.revision, table.c.tenant_id).limit(limit)
    revision, tenant_id = after
    later = and_(table.c.revision == revision, table.c.tenant_id > tenant_id)
    query = query.where(or_(table.c.revision > revision, later))
    if revoking:
        query = query.where(table.c.change["revokes"].as_boolean())
    rows = (await connection.execute(query)).mappings()
    return [PendingAnnouncement(msgspec.convert(row["change"], Announcement), row["at"]) for row in rows]


async def mark_published(connection: AsyncConnection, announcements: Iterable[Announcement]) -> None:
    table = tables.outbox
    this = and_(table.c.revision == bindparam("its_revision"), table.c.tenant_id == bindparam("its_tenant"))
    marked = update(table).where(this).values(published=True)
    rows = sorted((each.revision, each.tenant_id) for each in announcements)  # in one order, so that none deadlock
    await connection.execute(marked, [{"its_revision": revision, "its_tenant": tenant} for revision, tenant in rows])


async def trim_outbox(connection: AsyncConnection, before: datetime) -> None:
    """Remove the rows written before that moment, if the oldest is: `at` has no index, and rises with the revision."""
    table = tables.outbox
    oldest = await connection.scalar(select(table.c.at).order_by(table.c.revision).limit(1))
    if oldest is not None and oldest < before:
        await connection.execute(delete(table).where(table.c.at < before))


# --- Beside the catalog ----------------------------------------------------------------------------------------------

_USAGE_COUNTERS = ("allowed", "denied", "would_deny", "degraded")


class UsageRow(msgspec.Struct, frozen=True):
    """What one key was told in an hour. A check that would have been denied, or was decided without the store, counts
    as allowed or denied as well.
    """

    hour: datetime
    tenant_id: str
    key_id: str
    allowed: int
    denied: int
    would_deny: int
    degraded: int


class StoredResponse(msgspec.Struct, frozen=True):
    """How a create with an idempotency key was answered, and what it was asked for."""

    fingerprint: str
    status: int
    answer: dict[str, Any]


async def add_usage(connection: AsyncConnection, rows: Iterable[UsageRow]) -> None:
    """On top of what is there. All who write take the rows in one order, so that nobody waits for another in turn."""
    table = tables.usage
    ordered = sorted(rows, key=lambda row: (row.hour, row.tenant_id, row.key_id))
    dialect = sqlite_insert if connection.dialect.name == "sqlite" else postgres_insert
    new = dialect(table)
    summed = {name: table.c[name] + new.excluded[name] for name in _USAGE_COUNTERS}
    statement = new.on_conflict_do_update(index_elements=["hour", "tenant_id", "key_id"], set_=summed)
    for start in range(0, len(ordered), MAX_PAGE_SIZE):
        chunk = ordered[start : start + MAX_PAGE_SIZE]
        await connection.execute(statement, [msgspec.structs.asdict(row) for row in chunk])


async def usage_page(
    connection: AsyncConnection,
    cursor: str | None,
    size: int,
    since: datetime | None = None,
    until: datetime | None = None,
    **values: str | None,
) -> Page:
    """The newest hour first. `since` is the first moment that counts, `until` the first that does not any more."""
    table, last = tables.usage, _decode_cursor(cursor, 3)
    hour, tenant, key = table.c.hour, table.c.tenant_id, table.c.key_id
    query = select(table).order_by(hour.desc(), tenant, key).limit(_check_page_size(size) + 1)
    query = query.where(*(table.c[column] == value for column, value in values.items() if value is not None))
    if since is not None:
        query = query.where(hour >= since)
    if until is not None:
        query = query.where(hour < until)
    if last is not None:
        at, further = (
            to_datetime(last[0] * US_PER_SECOND),
            or_(tenant > last[1], and_(tenant == last[1], key > last[2])),
        )
        query = query.where(or_(hour < at, and_(hour == at, further)))
    found = [UsageRow(**row) for row in (await connection.execute(query)).mappings()]
    if len(found) <= size:
        return Page(found, None)
    end = found[size - 1]
    return Page(found[:size], _encode_cursor([int(end.hour.timestamp()), end.tenant_id, end.key_id]))


async def find_stored_response(
    connection: AsyncConnection, token_id: str, idempotency_key: str, since: datetime
) -> StoredResponse | None:
    """The answer that this token was given for this key, if that is not longer ago."""
    table = tables.creations
    same = and_(table.c.token_id == token_id, table.c.idempotency_key == idempotency_key, table.c.at > since)
    found = (await connection.execute(select(table).where(same))).mappings().first()
    return None if found is None else StoredResponse(found["fingerprint"], found["status"], found["answer"])


async def add_stored_response(
    connection: AsyncConnection, token_id: str, idempotency_key: str, response: StoredResponse, at: datetime
) -> None:
    """In place of one that is too old to be found."""
    table = tables.creations
    own = {"token_id": token_id, "idempotency_key": idempotency_key}
    await connection.execute(delete(table).where(*(table.c[name] == value for name, value in own.items())))
    await connection.execute(insert(table).values(**own, **msgspec.structs.asdict(response), at=at))


async def remove_old_records(connection: AsyncConnection, usage_before: datetime, creations_before: datetime) -> None:
    await connection.execute(delete(tables.usage).where(tables.usage.c.hour < usage_before))
    await connection.execute(delete(tables.creations).where(tables.creations.c.at <= creations_before))


# --- Rows and entities -----------------------------------------------------------------------------------------------


def _stamp(row: RowMapping) -> Stamp:
    return Stamp(row["timeline"], row["value"], row["change_id"])


def _select(kind: type[Entity]) -> Select[Any]:
    table = TABLES[kind]
    if kind is Plan:
        versions = tables.plan_versions
        current = and_(versions.c.plan_id == table.c.id, versions.c.version == table.c.version)
        return select(table, versions.c.limits).join(versions, current)
    return select(table)


async def _entities(
    connection: AsyncConnection, kind: type[AnyEntity], query: Select[Any], invalid: dict[str, str] | None = None
) -> list[AnyEntity]:
    rows = (await connection.execute(query)).mappings().all()
    secrets = await _secrets(connection, kind, [row["id"] for row in rows]) if rows and kind in _SECRETS_OF else {}
    names = kind.__struct_fields__
    found: list[AnyEntity] = []
    for row in rows:
        fields = {name: row[name] for name in names if name in row}
        if kind in _SECRETS_OF:
            fields["secrets"] = tuple(secrets.get(row["id"], ()))
        if kind is Key and row["may_name_plans"] and isinstance(row["scopes"], list):
            fields["scopes"] = [*row["scopes"], KeyScope.PLANS]
        try:
            found.append(build_entity(kind, fields))
        except InvalidInput as error:
            if invalid is not None:
                invalid[row["id"]] = row["id"] if kind is Tenant else row["tenant_id"]
                continue
            raise CatalogError(f"the database holds a {kind.kind} that makes no sense, {row['id']}: {error}") from error
    return found


async def _secrets(connection: AsyncConnection, kind: type[Entity], ids: list[str]) -> dict[str, list[SecretHash]]:
    owner, table = _SECRETS_OF[kind], tables.secrets
    found: dict[str, list[SecretHash]] = {}
    for chunk in _chunks(ids):
        newest = (table.c.created_at.desc(), table.c.expires_at.is_not(None), table.c.hash)
        query = select(table).where(owner.in_(chunk)).order_by(*newest)
        for row in (await connection.execute(query)).mappings():
            found.setdefault(row[owner.key], []).append(SecretHash(row["hash"], row["pepper"], row["expires_at"]))
    return found


def _are_storable(values: Mapping[str, Any]) -> bool:
    return all(is_storable(value) for value in values.values() if isinstance(value, str))


def _chunks(values: Iterable[str]) -> Iterator[list[str]]:
    """As many as a statement may have parameters, and fewer."""
    listed = list(values)
    for start in range(0, len(listed), MAX_PAGE_SIZE):
        yield listed[start : start + MAX_PAGE_SIZE]


def _version_row(plan: Plan, actor: str) -> dict[str, Any]:
    row = {"plan_id": plan.id, "version": plan.version, "limits": list(plan.limits)}
    return {**row, "created_at": plan.updated_at, "created_by": actor}


def _secret_hash_rows(entity: Key | Token, at: datetime) -> list[dict[str, Any]]:
    """The owner's other column is there as well, so that rows of both kinds have the same shape."""
    owners = {column.key: entity.id if kind is type(entity) else None for kind, column in _SECRETS_OF.items()}
    return [
        {"hash": each.hash, "pepper": each.pepper, "expires_at": each.expires_at, "created_at": at, **owners}
        for each in entity.secrets
    ]


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
        fields["scopes"] = [each for each in entity.scopes if each is not KeyScope.PLANS]
    if isinstance(entity, Key):
        fields["may_name_plans"] = KeyScope.PLANS in entity.scopes
    return fields


def _updatable_columns(entity: Entity) -> dict[str, Any]:
    """The columns that an edit may change. When a key was used is written beside the edits."""
    return {name: value for name, value in _columns(entity).items() if name not in ("id", "last_used_at")}


def _order_column(kind: type[Entity]) -> str:
    return _ORDER_COLUMN.get(kind, "name")


def _check_page_size(size: int) -> int:
    if type(size) is not int or not 1 <= size <= MAX_PAGE_SIZE:
        raise InvalidInput("page", f"must be from 1 to {MAX_PAGE_SIZE}, got {short_repr(size)}")
    return size


def _encode_cursor(values: list[Any]) -> str:
    return urlsafe_b64encode(msgspec.json.encode(values)).rstrip(b"=").decode()


# Of so many parts. Anybody can make one up, so it holds nothing that a database would choke on.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=2**37)]
_Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\0]*\Z")]
_CURSORS: Mapping[int, Any] = {1: tuple[_Number], 2: tuple[_Text, _Text], 3: tuple[_Seconds, _Text, _Text]}


def _decode_cursor(cursor: str | None, parts: int) -> list[Any] | None:
    if cursor is None:
        return None
    try:
        plain = b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        values = msgspec.json.decode(plain, type=_CURSORS[parts])
    except (ValueError, msgspec.MsgspecError):
        raise InvalidInput("cursor", "is not one that a list returned") from None
    return list(values)
