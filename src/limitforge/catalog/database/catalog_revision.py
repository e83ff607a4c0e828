"""The revision of the catalog: the number and the random id of the last edit, and the timeline it belongs to."""

import msgspec
from sqlalchemy import RowMapping, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.database import tables
from limitforge.catalog.history import Stamp, new_change_id
from limitforge.errors import CatalogError


class EditStamp(msgspec.Struct, frozen=True):
    """The point in history of an edit, and the id of the edit before it."""

    stamp: Stamp
    previous_id: int


async def next_revision(connection: AsyncConnection) -> EditStamp:
    """Take the next revision. Must be the first statement of an edit: it locks the row, so edits are serialized."""
    table = tables.revision
    following = {"value": table.c.value + 1, "previous_id": table.c.change_id, "change_id": new_change_id()}
    found = (await connection.execute(update(table).values(following).returning(table))).mappings().first()
    if found is None:
        raise CatalogError(
            "the table `revision` is empty: insert one row whose value is the highest `tenants.revision`"
        )
    return EditStamp(_stamp_of(found), found["previous_id"])


async def set_timeline(connection: AsyncConnection, timeline: int) -> None:
    """Set the timeline of this edit and all later ones."""
    await connection.execute(update(tables.revision).values(timeline=timeline))


async def lock_revision(connection: AsyncConnection) -> None:
    """Lock the revision before any other row, as edits do, to avoid deadlocks with them."""
    await connection.execute(select(tables.revision.c.value).with_for_update())


async def read_last_stamp(connection: AsyncConnection, *, lock: bool = False) -> Stamp:
    """Return the stamp of the last edit. `lock` blocks other edits until this transaction ends."""
    query = select(tables.revision)
    found = (await connection.execute(query.with_for_update() if lock else query)).mappings().first()
    return Stamp() if found is None else _stamp_of(found)


def _stamp_of(row: RowMapping) -> Stamp:
    return Stamp(row["timeline"], row["value"], row["change_id"])
