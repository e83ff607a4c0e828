"""Edits that the commands of several kinds of entities share."""

from typing import TypeVar

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import Entity
from limitforge.cli.catalog.connect import audit_actor, run_with_catalog
from limitforge.cli.catalog.lookup import find_entity

AnyEntity = TypeVar("AnyEntity", bound=Entity)


def delete_entity(database: str, entity_type: type[AnyEntity], name: str, tenant: str | None = None) -> AnyEntity:
    """Delete the entity with this id or name, and return it as it was."""

    async def work(catalog: Catalog) -> AnyEntity:
        entity = await find_entity(catalog, entity_type, name, tenant)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.delete(entity_type, entity.id)

    return run_with_catalog(database, work)
