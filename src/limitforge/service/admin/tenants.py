"""`/v1/admin/tenants`: accounts whose traffic is limited."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict, WithJsonSchema

from limitforge.catalog.catalog import Edit
from limitforge.catalog.model import Tenant
from limitforge.core.lanes import MAX_LANES
from limitforge.core.limits import Mode, Priority
from limitforge.service.admin.creation import Creating, Made
from limitforge.service.admin.fields import (
    Body,
    FailureWord,
    Flag,
    Id,
    Listing,
    Name,
    PathId,
    Version,
    Wanted,
    absent,
)
from limitforge.service.admin.replies import GONE, answers, answers_list, gone, listed, shown
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading, Writing

router = admin_router("/tenants", "tenants")

NOT_ITS_OWN = ("name", "lanes", "suspended")
"""What a tenant's own token may not change of it: whoever is suspended can't lift that."""

_COUNT: Any = {"type": "integer", "minimum": 1, "maximum": MAX_LANES}
_MOVE: Any = {
    "type": "object",
    "properties": {"count": _COUNT, "then": _COUNT, "at": {"type": "number"}},
    "additionalProperties": False,
}
LaneCount = Annotated[
    Any,
    WithJsonSchema({"anyOf": [_COUNT, _MOVE], "description": "Over how many lanes of a Cluster its keys are spread."}),
]


Zone = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "description": "IANA's name of it."})]


class TenantChanges(Body):
    """What of a tenant changes."""

    name: Name = absent()
    mode: Mode = absent()
    time_zone: Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "description": "IANA's name."})] = (
        absent()
    )
    failure: FailureWord | None = absent()
    priority: Priority | None = absent()
    default_plan_id: Id | None = absent()
    lanes: LaneCount = absent()
    suspended: Flag = absent()


class NewTenant(TenantChanges):
    """A tenant that is to be."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "acme", "time_zone": "Europe/Berlin"}]})

    name: Name


class TenantListing(Listing):
    """Which tenants are wanted."""

    name: Wanted | None = None


@router.post("", status_code=201, responses=answers("Tenant", status=201))
async def create_tenant(body: NewTenant, session: Writing, creating: Creating) -> Response:
    """Create a tenant. Its plans, policies and keys come later: it is allowed everything until then."""
    session.require_fleet("creating tenants")

    async def make(edit: Edit) -> Made:
        return Made(await edit.create(Tenant, body.given()))

    return await creating.run(make)


@router.get("", responses=answers_list("Tenant"))
async def list_tenants(asked: Annotated[TenantListing, Query()], session: Reading) -> Response:
    """List tenants by name."""
    return listed(await session.page(Tenant, **asked.asked()))


@router.get("/{tenant_id}", responses=answers("Tenant"))
async def get_tenant(tenant_id: PathId, session: Reading) -> Response:
    """Show a tenant."""
    return shown(await session.get(Tenant, tenant_id))


@router.patch("/{tenant_id}", responses=answers("Tenant"))
async def change_tenant(tenant_id: PathId, body: TenantChanges, session: Writing, version: Version) -> Response:
    """Change what is named of a tenant. A tenant's own token may not rename, spread or suspend it."""
    async with session.edit() as edit:
        await session.find(edit, Tenant, tenant_id)
        for field in NOT_ITS_OWN:
            if field in body.model_fields_set:
                session.require_fleet(field)
        tenant = await edit.update(Tenant, tenant_id, body.given(), version=version)
    return shown(tenant)


@router.delete("/{tenant_id}", status_code=204, responses=GONE)
async def delete_tenant(tenant_id: PathId, session: Writing, version: Version) -> Response:
    """Delete a tenant with all that is its own: plans, policies, keys, overrides and tokens."""
    async with session.edit() as edit:
        await session.find(edit, Tenant, tenant_id)
        session.require_fleet("deleting tenants")
        await edit.delete(Tenant, tenant_id, version=version)
    return gone()
