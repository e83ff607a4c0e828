"""`/v1/admin/tenants`: accounts whose traffic is limited."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict, StrictBool, WithJsonSchema

from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import Tenant
from limitforge.core.lanes import MAX_LANES
from limitforge.core.limits import Mode, Priority
from limitforge.service.admin.fields import (
    EntityBody,
    FailureBehaviour,
    Filter,
    Id,
    IfMatch,
    ListQuery,
    PathId,
    optional,
)
from limitforge.service.admin.idempotency import CreateResult, Idempotency
from limitforge.service.admin.responses import (
    NO_CONTENT,
    describe_page,
    describe_response,
    entity_response,
    no_content_response,
    page_response,
)
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession, WriteSession

router = admin_router("/tenants", "tenants")

PROTECTED_FIELDS = ("name", "lanes", "suspended")
"""The fields that a token of the tenant itself may not change. A suspended tenant must not resume itself."""

_LANE_COUNT: Any = {"type": "integer", "minimum": 1, "maximum": MAX_LANES}
_LANE_MOVE: Any = {
    "type": "object",
    "properties": {"count": _LANE_COUNT, "then": _LANE_COUNT, "at": {"type": "number"}},
    "additionalProperties": False,
}
Lanes = Annotated[Any, WithJsonSchema({"anyOf": [_LANE_COUNT, _LANE_MOVE]})]


class TenantChanges(EntityBody):
    """The fields of a tenant to change. Absent fields stay as they are."""

    entity = Tenant

    name: str = optional()
    mode: Mode = optional()
    time_zone: str = optional()
    failure: FailureBehaviour | None = optional()
    priority: Priority | None = optional()
    default_plan_id: Id | None = optional()
    lanes: Lanes = optional()
    suspended: StrictBool = optional()


class NewTenant(TenantChanges):
    """A tenant to create."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "acme", "time_zone": "Europe/Berlin"}]})

    name: str


class TenantQuery(ListQuery):
    """The filters of the list of tenants."""

    name: Filter | None = None


@router.post("", status_code=201, responses=describe_response("Tenant", status=201))
async def create_tenant(body: NewTenant, session: WriteSession, idempotency: Idempotency) -> Response:
    """Create a tenant. All of its checks are allowed until it has a plan."""
    session.require_all_tenants("creating tenants")

    async def create(edit: Edit) -> CreateResult:
        return CreateResult(await edit.create(Tenant, body.given_fields()))

    return await idempotency.run(create)


@router.get("", responses=describe_page("Tenant"))
async def list_tenants(query: Annotated[TenantQuery, Query()], session: ReadSession) -> Response:
    """List tenants by name."""
    return page_response(await session.list_page(Tenant, query))


@router.get("/{tenant_id}", responses=describe_response("Tenant"))
async def get_tenant(tenant_id: PathId, session: ReadSession) -> Response:
    """Return a tenant."""
    return entity_response(await session.get(Tenant, tenant_id))


@router.patch("/{tenant_id}", responses=describe_response("Tenant"))
async def change_tenant(
    tenant_id: PathId, body: TenantChanges, session: WriteSession, expected_version: IfMatch
) -> Response:
    """Change the given fields of a tenant. A token of the tenant itself can't change its name, lanes or suspension."""
    async with session.edit() as edit:
        await session.require_visible(edit, Tenant, tenant_id)
        for field in PROTECTED_FIELDS:
            if field in body.model_fields_set:
                session.require_all_tenants(field)
        tenant = await edit.update(Tenant, tenant_id, body.given_fields(), expected_version=expected_version)
    return entity_response(tenant)


@router.delete("/{tenant_id}", status_code=204, responses=NO_CONTENT)
async def delete_tenant(tenant_id: PathId, session: WriteSession, expected_version: IfMatch) -> Response:
    """Delete a tenant with its plans, policies, keys, overrides and tokens."""
    async with session.edit() as edit:
        await session.require_visible(edit, Tenant, tenant_id)
        session.require_all_tenants("deleting tenants")
        await edit.delete(Tenant, tenant_id, expected_version=expected_version)
    return no_content_response()
