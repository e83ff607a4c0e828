"""`/v1/admin/plans`: named sets of limits, and their earlier versions."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict, Field, StrictInt

from limitforge.catalog.database.edits import Edit
from limitforge.catalog.database.plan_warnings import plan_warnings
from limitforge.catalog.fields import field_docs
from limitforge.catalog.model import Plan
from limitforge.catalog.plan_limits import parse_plan_limits
from limitforge.errors import InvalidInput
from limitforge.service.admin.fields import EntityBody, Filter, Id, IfMatch, ListQuery, PathId, RequestBody, optional
from limitforge.service.admin.idempotency import CreateResult, Idempotency
from limitforge.service.admin.responses import (
    NO_CONTENT,
    describe_page,
    describe_response,
    entity_response,
    json_response,
    no_content_response,
    page_response,
    schema_ref,
    warning_fields,
)
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession, WriteSession

router = admin_router("/plans", "plans")

_OWNER = {"tenant_id": "ten_1a2b3c4d5e6f7g8h"}
_BUCKET = {"algorithm": "token_bucket", "bucket_capacity": 10, "refill_rate_per_sec": 2}
_HOURLY = {"algorithm": "fixed_window", "name": "hourly", "limit": 1_000, "window_seconds": 3_600}
_BODY_EXAMPLES = {
    "several": {
        "summary": "Several limits",
        "value": {**_OWNER, "name": "free", "limits": [{"name": "burst", **_BUCKET}, _HOURLY]},
    },
    "flat": {"summary": "One limit, named after the plan", "value": {**_OWNER, "name": "bucket", **_BUCKET}},
    "text": {"summary": "Limits as text", "value": {**_OWNER, "name": "simple", "limits": "100/minute; 1000/hour"}},
}
BODY_EXAMPLES: Any = {"requestBody": {"content": {"application/json": {"examples": _BODY_EXAMPLES}}}}


def _describe_both_forms(*required: str) -> Any:
    """Describe both forms of a plan: with `limits`, or with the fields of a single limit."""

    def describe(schema: dict[str, Any]) -> None:
        common = {name: schema["properties"][name] for name in ("tenant_id", "name") if name in schema["properties"]}
        limits = {"limits": {**schema_ref("plan.limits"), "description": field_docs(Plan)["limits"].description}}
        required_with_limits = [*required, "limits"] if required else []
        schema.pop("additionalProperties", None)
        schema["properties"] = common
        schema["required"] = list(required)
        schema["anyOf"] = [
            {"properties": common | limits, "required": required_with_limits, "additionalProperties": False},
            schema_ref("plan.flat"),
        ]

    return describe


class NewPlan(EntityBody):
    """A plan to create: with `limits` (a list or text), or with the fields of a single limit."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_describe_both_forms("tenant_id", "name"))
    entity = Plan

    tenant_id: Id
    name: str
    limits: Any = optional()

    def fields(self) -> dict[str, Any]:
        return _recognised_fields(self)


class PlanChanges(EntityBody):
    """The fields of a plan to change: its name, all of its limits, or all fields of its single limit."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_describe_both_forms())
    entity = Plan

    name: str = optional()
    limits: Any = optional()

    def fields(self, plan: Plan) -> dict[str, Any]:
        """Return the changes in the form that the catalog accepts: a single limit becomes a list."""
        fields = _recognised_fields(self)
        if not self.model_extra:
            return fields
        name = fields.get("name", plan.name)
        return {"name": name, "limits": parse_plan_limits(name, fields)}


def _recognised_fields(body: NewPlan | PlanChanges) -> dict[str, Any]:
    """Return the given fields. Refuse fields of a single limit beside `limits`, or without an `algorithm`."""
    extra = body.model_extra or {}
    if "limits" in body.model_fields_set or "algorithm" not in extra:
        for field in extra:
            raise InvalidInput(
                field[:64], "unknown field: send `limits`, or an `algorithm` with the fields of a single limit"
            )
    return body.given_fields()


class Rollback(RequestBody):
    """The version of a plan to restore. The previous version is the default."""

    version: Annotated[StrictInt | None, Field(description="The version to restore; null for the previous one.")] = None


class PlanQuery(ListQuery):
    """The filters of the list of plans."""

    tenant_id: Filter | None = None
    name: Filter | None = None


@router.post(
    "", status_code=201, responses=describe_response("PlanWithWarnings", status=201), openapi_extra=BODY_EXAMPLES
)
async def create_plan(body: NewPlan, session: WriteSession, idempotency: Idempotency) -> Response:
    """Create a plan. Its limits may use different algorithms."""
    session.require_tenant(body.tenant_id)

    async def create(edit: Edit) -> CreateResult:
        plan = await edit.create(Plan, body.fields())
        return CreateResult(plan, warnings=await plan_warnings(edit.connection, plan.tenant_id, plan.id))

    return await idempotency.run(create)


@router.get("", responses=describe_page("Plan"))
async def list_plans(query: Annotated[PlanQuery, Query()], session: ReadSession) -> Response:
    """List plans by name. The plans of the operator have the tenant_id `operator`."""
    return page_response(await session.list_page(Plan, query))


@router.get("/{plan_id}", responses=describe_response("Plan"))
async def get_plan(plan_id: PathId, session: ReadSession) -> Response:
    """Return a plan."""
    return entity_response(await session.get(Plan, plan_id))


@router.patch("/{plan_id}", responses=describe_response("PlanWithWarnings"))
async def change_plan(plan_id: PathId, body: PlanChanges, session: WriteSession, expected_version: IfMatch) -> Response:
    """Change a plan. Its old limits remain available as an earlier version."""
    async with session.edit() as edit:
        plan = await session.require_visible(edit, Plan, plan_id)
        plan = await edit.update(Plan, plan_id, body.fields(plan), expected_version=expected_version)
        warnings = await plan_warnings(edit.connection, plan.tenant_id, plan.id)
    return entity_response(plan, **warning_fields(warnings))


@router.delete("/{plan_id}", status_code=204, responses=NO_CONTENT)
async def delete_plan(plan_id: PathId, session: WriteSession, expected_version: IfMatch) -> Response:
    """Delete a plan. A plan that is still in use can't be deleted."""
    async with session.edit() as edit:
        await session.require_visible(edit, Plan, plan_id)
        await edit.delete(Plan, plan_id, expected_version=expected_version)
    return no_content_response()


@router.get("/{plan_id}/versions", responses=describe_page("PlanVersion"))
async def list_plan_versions(plan_id: PathId, session: ReadSession) -> Response:
    """List all versions of a plan, the newest first."""
    await session.get(Plan, plan_id)
    return json_response({"items": await session.catalog.plan_versions(plan_id), "cursor": None})


@router.post("/{plan_id}/rollback", responses=describe_response("PlanWithWarnings"))
async def roll_back_plan(
    plan_id: PathId, session: WriteSession, expected_version: IfMatch, body: Rollback | None = None
) -> Response:
    """Restore the limits of an earlier version as a new version. The previous version is the default."""
    async with session.edit() as edit:
        await session.require_visible(edit, Plan, plan_id)
        plan = await edit.roll_back_plan(
            plan_id, None if body is None else body.version, expected_version=expected_version
        )
        warnings = await plan_warnings(edit.connection, plan.tenant_id, plan.id)
    return entity_response(plan, **warning_fields(warnings))
