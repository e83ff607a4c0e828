"""Print one entity with all of its fields."""

from typing import Any

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import Entity, to_public_dict
from limitforge.cli.catalog.lookup import NamesById
from limitforge.cli.terminal.output import print_fields, print_json

_FIRST = ("name", "subject", "resource", "id", "tenant_id")
_LAST = ("version", "created_at", "updated_at")
_NAMED_IDS = ("tenant_id", "plan_id", "shadow_plan_id", "default_plan_id")


async def print_entity(catalog: Catalog, entity: Entity, *, as_json: bool, **replacements: Any) -> None:
    """Print the fields of an entity, with the names of plans and tenants instead of their ids.

    `replacements` replaces fields, and adds others with their key as the label. A field that is None or empty is left
    out.
    """
    if as_json:
        print_json(to_public_dict(entity))
        return
    names = await NamesById.load(catalog, [entity])
    fields = {field: getattr(entity, field) for field in entity.__struct_fields__}
    fields |= {field: names[fields[field]] for field in _NAMED_IDS if field in fields}
    fields |= replacements
    first = [field for field in _FIRST if field in fields]
    middle = [field for field in fields if field not in _FIRST + _LAST]
    own_fields = entity.__struct_fields__
    print_fields(
        {_label(field) if field in own_fields else field: fields[field] for field in (*first, *middle, *_LAST)}
    )


def _label(field: str) -> str:
    return field.removesuffix("_id").removesuffix("_at").replace("_", " ")
