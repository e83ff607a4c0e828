"""Map entities to rows and back."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Select, Table, and_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.database import tables
from limitforge.catalog.field_validation import is_storable
from limitforge.catalog.model import (
    AnyEntity,
    Entity,
    Key,
    KeyScope,
    Override,
    Plan,
    Policy,
    SecretHash,
    Tenant,
    Token,
    build_entity,
)
from limitforge.errors import CatalogError, InvalidInput

CHUNK_SIZE = 1_000  # values in one statement: drivers bound the number of parameters
Item = TypeVar("Item")

TABLES: Mapping[type[Entity], Table] = {
    Tenant: tables.tenants,
    Plan: tables.plans,
    Policy: tables.policies,
    Key: tables.keys,
    Override: tables.overrides,
    Token: tables.tokens,
}

SECRET_OWNER_COLUMN: Mapping[type[Entity], Any] = {Key: tables.secrets.c.key_id, Token: tables.secrets.c.token_id}


def select_entities(entity_type: type[Entity]) -> Select[Any]:
    """Return a query for all entities of a kind; plans are joined with the limits of their current version."""
    table = TABLES[entity_type]
    if entity_type is Plan:
        versions = tables.plan_versions
        current = and_(versions.c.plan_id == table.c.id, versions.c.version == table.c.version)
        return select(table, versions.c.limits).join(versions, current)
    return select(table)


async def fetch_entities(
    connection: AsyncConnection, entity_type: type[AnyEntity], query: Select[Any], invalid: dict[str, str] | None = None
) -> list[AnyEntity]:
    """Run a query made with `select_entities`, and build its entities.

    An invalid row raises `CatalogError`. If `invalid` is given, invalid rows are left out instead, and it collects
    their ids: row id to tenant id.
    """
    rows = (await connection.execute(query)).mappings().all()
    secrets = (
        await _secrets(connection, entity_type, [row["id"] for row in rows])
        if rows and entity_type in SECRET_OWNER_COLUMN
        else {}
    )
    names = entity_type.__struct_fields__
    found: list[AnyEntity] = []
    for row in rows:
        fields = {name: row[name] for name in names if name in row}
        if entity_type in SECRET_OWNER_COLUMN:
            fields["secrets"] = tuple(secrets.get(row["id"], ()))
        if entity_type is Key and row["may_name_plans"] and isinstance(row["scopes"], list):
            fields["scopes"] = [*row["scopes"], KeyScope.PLANS]
        try:
            found.append(build_entity(entity_type, fields))
        except InvalidInput as error:
            if invalid is not None:
                invalid[row["id"]] = row["id"] if entity_type is Tenant else row["tenant_id"]
                continue
            raise CatalogError(f"the database contains an invalid {entity_type.kind}, {row['id']}: {error}") from error
    return found


async def _secrets(
    connection: AsyncConnection, entity_type: type[Entity], ids: list[str]
) -> dict[str, list[SecretHash]]:
    owner, table = SECRET_OWNER_COLUMN[entity_type], tables.secrets
    found: dict[str, list[SecretHash]] = {}
    for chunk in chunked(ids):
        newest = (table.c.created_at.desc(), table.c.expires_at.is_not(None), table.c.hash)
        query = select(table).where(owner.in_(chunk)).order_by(*newest)
        for row in (await connection.execute(query)).mappings():
            found.setdefault(row[owner.key], []).append(SecretHash(row["hash"], row["pepper"], row["expires_at"]))
    return found


def are_storable(values: Mapping[str, Any]) -> bool:
    """Return True if the database can be searched for all of these values."""
    return all(is_storable(value) for value in values.values() if isinstance(value, str))


def chunked(values: Iterable[Item]) -> Iterator[list[Item]]:
    """Split values into lists that are small enough for the parameters of one statement."""
    listed = list(values)
    for start in range(0, len(listed), CHUNK_SIZE):
        yield listed[start : start + CHUNK_SIZE]


def secret_hash_rows(entity: Key | Token, at: datetime) -> list[dict[str, Any]]:
    """Return the rows of its secrets. Rows of keys and tokens have the same columns, as a bulk insert needs."""
    owners = {
        column.key: entity.id if entity_type is type(entity) else None
        for entity_type, column in SECRET_OWNER_COLUMN.items()
    }
    return [
        {"hash": each.hash, "pepper": each.pepper, "expires_at": each.expires_at, "created_at": at, **owners}
        for each in entity.secrets
    ]


def entity_columns(entity: Entity) -> dict[str, Any]:
    """Return the columns of an entity's row."""
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


def updatable_columns(entity: Entity) -> dict[str, Any]:
    """Return the columns that an edit may change. The time of the last use is not written by edits."""
    return {name: value for name, value in entity_columns(entity).items() if name not in ("id", "last_used_at")}
