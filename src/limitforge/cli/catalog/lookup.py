"""Find entities by name or id, and find the names that belong to ids."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.queries import find_where_in
from limitforge.catalog.model import OPERATOR, Entity, Plan, Tenant
from limitforge.errors import Conflict, NotFound

AnyEntity = TypeVar("AnyEntity", bound=Entity)
PAGE_SIZE = 1_000

_PLAN_FIELDS = {"plan": "plan_id", "shadow_plan": "shadow_plan_id", "default_plan": "default_plan_id"}
"""The options that name a plan, with the field that holds its id."""


async def find_tenant(catalog: Catalog, name: str) -> Tenant:
    return await catalog.get_by_name_or_id(Tenant, name)


async def find_entity(catalog: Catalog, entity_type: type[AnyEntity], name: str, tenant: str | None) -> AnyEntity:
    """Return the entity with this id or name, of the given tenant or of all tenants.

    Raises `Conflict` if several tenants have an entity of this name.
    """
    tenant_filter = {} if tenant is None else {"tenant_id": (await find_tenant(catalog, tenant)).id}
    try:
        return await catalog.get_by_name_or_id(entity_type, name, **tenant_filter)
    except Conflict as error:
        raise Conflict(f"{error}" if tenant_filter else f"{error}, or name the tenant with --tenant") from None
    except NotFound as error:
        raise NotFound(f"{error} of tenant {tenant}" if tenant_filter else str(error)) from None


async def resolve_plan_names(catalog: Catalog, tenant_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace options that name a plan by fields with its id."""
    fields = dict(options)
    for option, field in _PLAN_FIELDS.items():
        if option in fields:
            name = fields.pop(option)
            plan = None if name is None else await catalog.get_by_name_or_id(Plan, name, tenant_id=tenant_id)
            fields[field] = None if plan is None else plan.id
    return fields


async def list_entities(catalog: Catalog, entity_type: type[AnyEntity], tenant: str | None = None) -> list[AnyEntity]:
    """Return all entities of a kind, of one tenant or of all tenants. Reads all pages."""
    filters = {} if tenant is None else {"tenant_id": (await find_tenant(catalog, tenant)).id}
    entities: list[AnyEntity] = []
    cursor: str | None = None
    while True:
        page = await catalog.list_page(entity_type, cursor=cursor, size=PAGE_SIZE, **filters)
        entities += page.items
        cursor = page.cursor
        if cursor is None:
            return entities


class NamesById:
    """The names of the plans and tenants whose ids some entities hold. An unknown id is shown as is."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    @classmethod
    async def load(cls, catalog: Catalog, entities: Iterable[Entity]) -> "NamesById":
        plans, tenants = set[str](), set[str]()
        for entity in entities:
            plans |= {getattr(entity, field, None) for field in _PLAN_FIELDS.values()} - {None}  # type: ignore[arg-type]
            tenants |= {getattr(entity, "tenant_id", None)} - {None, OPERATOR}  # type: ignore[arg-type]
        async with catalog.database.reading() as connection:
            names = {plan.id: plan.name for plan in await find_where_in(connection, Plan, "id", sorted(plans))}
            names |= {
                tenant.id: tenant.name for tenant in await find_where_in(connection, Tenant, "id", sorted(tenants))
            }
        return cls(names)

    def __getitem__(self, entity_id: str | None) -> str | None:
        return None if entity_id is None else self._names.get(entity_id, entity_id)
