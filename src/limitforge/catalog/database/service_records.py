"""What the service stores beside the catalog: usage per hour, and responses to idempotent requests."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import and_, delete, insert, or_, select
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.database import tables
from limitforge.catalog.database.entity_rows import chunked
from limitforge.catalog.database.pages import Page, decode_cursor, encode_cursor, validate_page_size
from limitforge.catalog.model import to_datetime
from limitforge.core.exact import US_PER_SECOND

_USAGE_COUNTERS = ("allowed", "denied", "would_deny", "degraded")


class UsageRow(msgspec.Struct, frozen=True):
    """The decisions for one key in an hour.

    `would_deny` (denied in monitor mode) and `degraded` (decided without the store) count checks that are also in
    `allowed` or `denied`.
    """

    hour: datetime
    tenant_id: str
    key_id: str
    allowed: int
    denied: int
    would_deny: int
    degraded: int


class StoredResponse(msgspec.Struct, frozen=True):
    """The response to a create request with an idempotency key, and the fingerprint of that request."""

    fingerprint: str
    status: int
    body: dict[str, Any]


async def add_usage(connection: AsyncConnection, rows: Iterable[UsageRow]) -> None:
    """Add to the stored counts. All writers lock the rows in the same order, so they can't deadlock."""
    table = tables.usage
    ordered = sorted(rows, key=lambda row: (row.hour, row.tenant_id, row.key_id))
    dialect = sqlite_insert if connection.dialect.name == "sqlite" else postgres_insert
    new = dialect(table)
    summed = {name: table.c[name] + new.excluded[name] for name in _USAGE_COUNTERS}
    statement = new.on_conflict_do_update(index_elements=["hour", "tenant_id", "key_id"], set_=summed)
    for chunk in chunked(ordered):
        await connection.execute(statement, [msgspec.structs.asdict(row) for row in chunk])


async def usage_page(
    connection: AsyncConnection,
    cursor: str | None,
    size: int,
    since: datetime | None = None,
    until: datetime | None = None,
    **values: str | None,
) -> Page:
    """Return a page of usage, the newest hour first, from `since` (inclusive) to `until` (exclusive)."""
    table, last = tables.usage, decode_cursor(cursor, 3)
    hour, tenant, key = table.c.hour, table.c.tenant_id, table.c.key_id
    query = select(table).order_by(hour.desc(), tenant, key).limit(validate_page_size(size) + 1)
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
    return Page(found[:size], encode_cursor([int(end.hour.timestamp()), end.tenant_id, end.key_id]))


async def find_stored_response(
    connection: AsyncConnection, token_id: str, idempotency_key: str, since: datetime
) -> StoredResponse | None:
    """Return the response to a request of this token with this idempotency key, if it was stored after `since`."""
    table = tables.stored_responses
    same = and_(table.c.token_id == token_id, table.c.idempotency_key == idempotency_key, table.c.at > since)
    found = (await connection.execute(select(table).where(same))).mappings().first()
    return None if found is None else StoredResponse(found["fingerprint"], found["status"], found["answer"])


async def add_stored_response(
    connection: AsyncConnection, token_id: str, idempotency_key: str, response: StoredResponse, at: datetime
) -> None:
    """Store a response. It replaces one that has expired."""
    table = tables.stored_responses
    own = {"token_id": token_id, "idempotency_key": idempotency_key}
    await connection.execute(delete(table).where(*(table.c[name] == value for name, value in own.items())))
    columns = {"fingerprint": response.fingerprint, "status": response.status, "answer": response.body, "at": at}
    await connection.execute(insert(table).values(**own, **columns))


async def remove_old_records(connection: AsyncConnection, usage_before: datetime, responses_before: datetime) -> None:
    """Delete usage and responses from before these times."""
    await connection.execute(delete(tables.usage).where(tables.usage.c.hour < usage_before))
    await connection.execute(delete(tables.stored_responses).where(tables.stored_responses.c.at <= responses_before))
