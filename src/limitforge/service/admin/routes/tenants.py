"""`/v1/admin/tenants`: accounts whose traffic is limited."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict, WithJsonSchema

from limitforge.catalog.database.catalog import Edit
from limitforge.catalog.model import Tenant
from limitforge.core.lanes import MAX_LANES
from limitforge.core.limits import Mode, Priority
from limitforge.service.admin.fields import (
    FailureBehaviour,
    Filter,
    Id,
    IfMatch,
    ListQuery,
    Name,
    PathId,
    RequestBody,
    StrictBool,
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
"""What a tenant's own token may not change of it: whoever is suspended can't lift that."""

_LANE_COUNT: Any = {"type": "integer", "minimum": 1, "maximum": MAX_LANES}
_LANE_MOVE: Any = {
    "type": "object",
    "properties": {"count": _LANE_COUNT, "then": _LANE_COUNT, "at": {"type": "number"}},
    "additionalProperties": False,
}
Lanes = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [_LANE_COUNT, _LANE_MOVE], "description": "Over how many lanes of a Cluster its keys are spread."}
    ),
]


Zone = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "description": "IANA's name of it."})]


class TenantChanges(RequestBody):
    """What of a tenant changes."""

    name: Name = optional()
    mode: Mode = optional()
    time_zone: Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "description": "IANA's name."})] = (
        optional()
    )
    failure: FailureBehaviour | None = optional()
    priority: Priority | None = optional()
    default_plan_id: Id | None = optional()
    lanes: Lanes = optional()
    suspended: StrictBool = optional()


class NewTenant(TenantChanges):
    """A tenant that is to be."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "acme", "time_zone": "Europe/Berlin"}]})

    name: Name


class TenantQuery(ListQuery):
    """Which tenants are wanted."""

    name: Filter | None = None


@router.post("", status_code=201, responses=describe_response("Tenant", status=201))
async def create_tenant(body: NewTenant, session: WriteSession, creating: Idempotency) -> Response:
    """Create a tenant. Its plans, policies and keys come later: it is allowed everything until then."""
    session.require_all_tenants("creating tenants")

    async def make(edit: Edit) -> CreateResult:
        return CreateResult(await edit.create(Tenant, body.given_fields()))

    return await creating.run(make)


@router.get("", responses=describe_page("Tenant"))
async def list_tenants(asked: Annotated[TenantQuery, Query()], session: ReadSession) -> Response:
    """List tenants by name."""
    return page_response(await session.page(Tenant, **asked.arguments()))


@router.get("/{tenant_id}", responses=describe_response("Tenant"))
async def get_tenant(tenant_id: PathId, session: ReadSession) -> Response:
    """Show a tenant."""
    return entity_response(await session.get(Tenant, tenant_id))


@router.patch("/{tenant_id}", responses=describe_response("Tenant"))
async def change_tenant(tenant_id: PathId, body: TenantChanges, session: WriteSession, version: IfMatch) -> Response:
    """Change what is named of a tenant. A tenant's own token may not rename, spread or suspend it."""
    async with session.edit() as edit:
        await session.find(edit, Tenant, tenant_id)
        for field in PROTECTED_FIELDS:
            if field in body.model_fields_set:
                session.require_all_tenants(field)
        tenant = await edit.update(Tenant, tenant_id, body.given_fields(), version=version)
    return entity_response(tenant)


@router.delete("/{tenant_id}", status_code=204, responses=NO_CONTENT)
async def delete_tenant(tenant_id: PathId, session: WriteSession, version: IfMatch) -> Response:
    """Delete a tenant with all that is its own: plans, policies, keys, overrides and tokens."""
    async with session.edit() as edit:
        await session.find(edit, Tenant, tenant_id)
        session.require_all_tenants("deleting tenants")
        await edit.delete(Tenant, tenant_id, version=version)
    return no_content_response()
