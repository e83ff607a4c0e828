"""The outbox: announcements of the edits of the last day, in the order of their revisions.

`published` marks those that were also written to Redis.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec
from sqlalchemy import and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.database import tables
from limitforge.catalog.history import Stamp

NOTIFY_CHANNEL = "limitforge"
OUTBOX_RETENTION = timedelta(days=1)


class PendingAnnouncement(msgspec.Struct, frozen=True):
    """An announcement that is not published yet, and the time of its edit."""

    announcement: Announcement
    at: datetime


async def add_announcements(connection: AsyncConnection, announcements: Iterable[Announcement], at: datetime) -> None:
    """Append announcements to the outbox."""
    rows = [
        {"revision": each.revision, "tenant_id": each.tenant_id, "change": msgspec.to_builtins(each)}
        for each in announcements
    ]
    await connection.execute(insert(tables.outbox), [{**row, "at": at, "published": False} for row in rows])


async def notify_postgres(connection: AsyncConnection, revision: int) -> None:
    """Notify the listeners of `NOTIFY_CHANNEL` once this transaction commits."""
    await connection.execute(select(func.pg_notify(NOTIFY_CHANNEL, str(revision))))


async def recent_stamps(connection: AsyncConnection, limit: int) -> list[Stamp]:
    """Return the stamps of the last edits, from the newest `limit` rows of the outbox."""
    newest_first = select(tables.outbox.c.change).order_by(tables.outbox.c.revision.desc()).limit(limit)
    return [msgspec.convert(change, Announcement).stamp for change in await connection.scalars(newest_first)]


async def announcements_after(connection: AsyncConnection, revision: int, limit: int) -> list[Announcement]:
    """Return the announcements of the next `limit` revisions, in their order."""
    table = tables.outbox
    some = and_(table.c.revision > revision, table.c.revision <= revision + limit)
    ordered = select(table.c.change).where(some).order_by(table.c.revision, table.c.tenant_id)
    return [msgspec.convert(change, Announcement) for change in await connection.scalars(ordered)]


async def unpublished_announcements(
    connection: AsyncConnection, limit: int, *, after: tuple[int, str] = (0, ""), revoking: bool = False
) -> list[PendingAnnouncement]:
    """Return the oldest unpublished rows after a revision and tenant; with `revoking`, only revoking ones."""
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
    """Mark announcements as published."""
    table = tables.outbox
    this = and_(table.c.revision == bindparam("its_revision"), table.c.tenant_id == bindparam("its_tenant"))
    marked = update(table).where(this).values(published=True)
    ordered = sorted((each.revision, each.tenant_id) for each in announcements)  # the same for all, to avoid deadlocks
    await connection.execute(marked, [{"its_revision": revision, "its_tenant": tenant} for revision, tenant in ordered])


async def trim_outbox(connection: AsyncConnection, before: datetime) -> None:
    """Delete rows from before a time. It checks the oldest row first, since `at` has no index."""
    table = tables.outbox
    oldest = await connection.scalar(select(table.c.at).order_by(table.c.revision).limit(1))
    if oldest is not None and oldest < before:
        await connection.execute(delete(table).where(table.c.at < before))
