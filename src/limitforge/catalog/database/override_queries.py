"""SQL for finding overrides that a store has lost."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.database import tables
from limitforge.catalog.database.pages import MAX_PAGE_SIZE
from limitforge.catalog.override_rows import DeletedOverride, OverrideRow


async def override_rows(
    connection: AsyncConnection, after: OverrideRow | None, expires_after: datetime, limit: int
) -> list[OverrideRow]:
    """Return a page of all overrides that expire later than `expires_after`, starting after the row `after`."""
    table, tenants = tables.overrides, tables.tenants
    order = (table.c.tenant_id, table.c.subject, table.c.resource)  # the order of an index
    query = (
        select(table.c.id, table.c.version, table.c.tenant_id, table.c.resource, table.c.subject, tenants.c.lanes)
        .join(tenants, tenants.c.id == table.c.tenant_id)
        .where(table.c.expires_at > expires_after)
        .order_by(*order)
        .limit(limit)
    )
    if after is not None:
        query = query.where(tuple_(*order) > tuple_(after.tenant_id, after.subject, after.resource))
    return [OverrideRow(*row) for row in await connection.execute(query)]


async def deleted_overrides(
    connection: AsyncConnection, tenant_id: str, after: int, since: datetime, limit: int
) -> list[DeletedOverride]:
    """Return the newest deletions of a tenant's overrides from its audit log, oldest first."""
    table = tables.audit
    query = (
        select(table.c.id, table.c.before)
        .where(table.c.action == "override.delete", table.c.tenant_id == tenant_id)
        .where(table.c.id > after, table.c.at > since)
        .order_by(table.c.id.desc())
        .limit(limit)
    )
    rows = (await connection.execute(query)).all()
    return [DeletedOverride(number, before["resource"], before["subject"]) for number, before in reversed(rows)]


async def tenant_revisions(connection: AsyncConnection, tenant_ids: Sequence[str]) -> dict[str, int]:
    """Return the revisions of the first `MAX_PAGE_SIZE` of these tenants."""
    table = tables.tenants
    rows = await connection.execute(
        select(table.c.id, table.c.revision).where(table.c.id.in_(tenant_ids[:MAX_PAGE_SIZE]))
    )
    return {tenant_id: int(revision) for tenant_id, revision in rows}


async def tenants_with_unpublished_changes(
    connection: AsyncConnection, tenant_ids: Iterable[str], since: datetime
) -> set[str]:
    """Return those tenants with a change after `since` that is not published yet."""
    table, wanted = tables.outbox, list(tenant_ids)
    found: set[str] = set()
    for start in range(0, len(wanted), MAX_PAGE_SIZE):
        chunk = wanted[start : start + MAX_PAGE_SIZE]
        query = select(table.c.tenant_id).where(table.c.published.is_(False), table.c.at > since)
        found.update(await connection.scalars(query.where(table.c.tenant_id.in_(chunk))))
    return found
