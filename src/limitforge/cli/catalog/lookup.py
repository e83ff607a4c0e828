"""Finds what people name, and names what the catalog knows by id."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.queries import find_where_in
from limitforge.catalog.model import OPERATOR, Entity, Plan, Tenant
from limitforge.errors import Conflict, NotFound

AnyEntity = TypeVar("AnyEntity", bound=Entity)
PAGE_SIZE = 1_000

_PLAN_FIELDS = {"plan": "plan_id", "shadow_plan": "shadow_plan_id", "default_plan": "default_plan_id"}


async def find_tenant(catalog: Catalog, name: str) -> Tenant:
    return await catalog.get_by_name_or_id(Tenant, name)


async def find_entity(catalog: Catalog, kind: type[AnyEntity], name: str, tenant: str | None) -> AnyEntity:
    """By id, or by a name that is the only one: of this tenant, or of all if none is said."""
    owner = {} if tenant is None else {"tenant_id": (await find_tenant(catalog, tenant)).id}
    try:
        return await catalog.get_by_name_or_id(kind, name, **owner)
    except Conflict as error:
        raise Conflict(f"{error}" if owner else f"{error}, or whose with --tenant") from None
    except NotFound as error:
        raise NotFound(f"{error} of tenant {tenant}" if owner else str(error)) from None


async def resolve_plan_names(catalog: Catalog, tenant_id: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that name plans, as fields that hold their ids."""
    found = dict(fields)
    for name, column in _PLAN_FIELDS.items():
        if name in found:
            plan = found.pop(name)
            found[column] = (
                None if plan is None else (await catalog.get_by_name_or_id(Plan, plan, tenant_id=tenant_id)).id
            )
    return found


async def list_entities(catalog: Catalog, kind: type[AnyEntity], tenant: str | None = None) -> list[AnyEntity]:
    """All of a kind, page by page; those of one tenant if it is named."""
    values = {} if tenant is None else {"tenant_id": (await find_tenant(catalog, tenant)).id}
    found: list[AnyEntity] = []
    cursor: str | None = None
    while True:
        page = await catalog.list_page(kind, cursor=cursor, size=PAGE_SIZE, **values)
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found


class NamesById:
    """Names for the ids that some entities hold."""

    def __init__(self, by_id: Mapping[str, str]) -> None:
        self._by_id = by_id

    @classmethod
    async def load(cls, catalog: Catalog, entities: Iterable[Entity]) -> "NamesById":
        plans, tenants = set[str](), set[str]()
        for entity in entities:
            plans |= {getattr(entity, column, None) for column in _PLAN_FIELDS.values()} - {None}  # type: ignore[arg-type]
            tenants |= {getattr(entity, "tenant_id", None)} - {None, OPERATOR}  # type: ignore[arg-type]
        async with catalog.database.reading() as connection:
            named = {each.id: each.name for each in await find_where_in(connection, Plan, "id", sorted(plans))}
            named |= {each.id: each.name for each in await find_where_in(connection, Tenant, "id", sorted(tenants))}
        return cls(named)

    def __getitem__(self, identity: str | None) -> str | None:
        return None if identity is None else self._by_id.get(identity, identity)
