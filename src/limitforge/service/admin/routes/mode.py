"""`/v1/admin/mode`: the kill switch, which turns limits off without a restart."""

from typing import Annotated

from fastapi import Response
from pydantic import ConfigDict, Field

from limitforge.catalog.model import OPERATOR, Tenant
from limitforge.core.limits import Mode
from limitforge.service.admin.fields import Id, IfMatch, RequestBody, optional
from limitforge.service.admin.responses import describe_response, format_etag, json_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import WriteSession

router = admin_router("/mode", "mode")


class ModeSwitch(RequestBody):
    """The new mode, of one tenant, or of all tenants if `tenant_id` is absent."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"mode": "monitor"}, {"mode": "off", "tenant_id": "ten_1a2b3c4d5e6f7g8h"}]}
    )

    mode: Annotated[Mode, Field(description="`on` enforces limits, `monitor` and `off` allow every check.")]
    tenant_id: Annotated[Id, Field(description="The tenant. Absent for all tenants.")] = optional()


@router.put(
    "",
    responses=describe_response(
        "ModeState", example={"mode": "off", "tenant_id": "ten_1a2b3c4d5e6f7g8h", "version": 3}
    ),
)
async def set_mode(body: ModeSwitch, session: WriteSession, expected_version: IfMatch) -> Response:
    """Set the mode of a tenant, or of all tenants, to `on`, `monitor` or `off`. All nodes apply it within a second."""
    tenant_id = body.given_fields().get("tenant_id")
    async with session.edit() as edit:
        if tenant_id is None:
            session.require_all_tenants("the mode of all tenants")
        else:
            await session.require_visible(edit, Tenant, tenant_id)
        tenant = await edit.update(
            Tenant, tenant_id or OPERATOR, {"mode": body.mode}, expected_version=expected_version
        )
    content = {"mode": tenant.mode, "tenant_id": tenant_id, "version": tenant.version}
    return json_response(content, etag=format_etag(tenant.version))
