"""`/v1/admin/operator`: the plan above all tenants."""

from typing import Any

from fastapi import Response
from pydantic import ConfigDict

from limitforge.catalog import queries
from limitforge.catalog.model import OPERATOR, Plan, Tenant, plain
from limitforge.core.exact import shown as quoted
from limitforge.errors import NotFound
from limitforge.service.admin.fields import Body, Id, Version
from limitforge.service.admin.replies import answers, etag, reply
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading, Writing

router = admin_router("/operator", "operator")

EXAMPLE = {
    "plan_id": "pla_1a2b3c4d5e6f7g8h",
    "mode": "on",
    "time_zone": "UTC",
    "version": 2,
    "updated_at": "2026-01-01T00:00:00Z",
}


class OperatorPlan(Body):
    """Which plan every check goes through, before those of its tenant; null for none."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"plan_id": "pla_1a2b3c4d5e6f7g8h"}]})

    plan_id: Id | None


@router.get("", responses=answers("Operator", example=EXAMPLE))
async def get_operator(session: Reading) -> Response:
    """Show what holds above all tenants."""
    session.require_fleet("the operator")
    return _shown(await session.catalog.get(Tenant, OPERATOR))


@router.put("", responses=answers("Operator", example=EXAMPLE))
async def set_operator_plan(body: OperatorPlan, session: Writing, version: Version) -> Response:
    """Set the plan above all tenants: one whose tenant_id is `operator`."""
    session.require_fleet("the operator")
    async with session.edit() as edit:
        if body.plan_id is not None:
            plan = await queries.find(edit.connection, Plan, body.plan_id)
            if plan is None or plan.tenant_id != OPERATOR:
                raise NotFound(f"plan_id: the operator has no plan {quoted(body.plan_id)}")
        operator = await edit.update(Tenant, OPERATOR, {"default_plan_id": body.plan_id}, version=version)
    return _shown(operator)


def _shown(operator: Tenant) -> Response:
    fields: dict[str, Any] = plain(operator)
    told = {name: fields[name] for name in ("mode", "time_zone", "version", "updated_at")}
    return reply({"plan_id": operator.default_plan_id, **told}, etag=etag(operator.version))
