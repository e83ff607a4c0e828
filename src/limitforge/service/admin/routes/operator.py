"""`/v1/admin/operator`: the plan that applies to the checks of all tenants."""

from typing import Annotated, Any

from fastapi import Response
from pydantic import ConfigDict, Field

from limitforge.catalog.database import queries
from limitforge.catalog.model import OPERATOR, Plan, Tenant, to_public_dict
from limitforge.core.exact import short_repr
from limitforge.errors import NotFound
from limitforge.service.admin.fields import Id, IfMatch, RequestBody
from limitforge.service.admin.responses import describe_response, format_etag, json_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession, WriteSession

router = admin_router("/operator", "operator")

EXAMPLE = {
    "plan_id": "pla_1a2b3c4d5e6f7g8h",
    "mode": "on",
    "time_zone": "UTC",
    "version": 2,
    "updated_at": "2026-01-01T00:00:00Z",
}


class OperatorPlan(RequestBody):
    """The plan that applies to every check, in addition to the plans of its tenant; null for none."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"plan_id": "pla_1a2b3c4d5e6f7g8h"}]})

    plan_id: Annotated[Id | None, Field(description="A plan with the tenant_id `operator`; null for none.")]


@router.get("", responses=describe_response("Operator", example=EXAMPLE))
async def get_operator(session: ReadSession) -> Response:
    """Return the operator's plan, mode and time zone."""
    session.require_all_tenants("the operator")
    return _operator_response(await session.catalog.get(Tenant, OPERATOR))


@router.put("", responses=describe_response("Operator", example=EXAMPLE))
async def set_operator_plan(body: OperatorPlan, session: WriteSession, expected_version: IfMatch) -> Response:
    """Set the plan that applies to all tenants. It must have the tenant_id `operator`."""
    session.require_all_tenants("the operator")
    async with session.edit() as edit:
        if body.plan_id is not None:  # the update checks this too, but names another field
            plan = await queries.find(edit.connection, Plan, body.plan_id)
            if plan is None or plan.tenant_id != OPERATOR:
                raise NotFound(f"plan_id: unknown plan of the operator {short_repr(body.plan_id)}")
        operator = await edit.update(
            Tenant, OPERATOR, {"default_plan_id": body.plan_id}, expected_version=expected_version
        )
    return _operator_response(operator)


def _operator_response(operator: Tenant) -> Response:
    fields: dict[str, Any] = to_public_dict(operator)
    shared = {name: fields[name] for name in ("mode", "time_zone", "version", "updated_at")}
    return json_response({"plan_id": operator.default_plan_id, **shared}, etag=format_etag(operator.version))
