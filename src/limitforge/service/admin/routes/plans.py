"""`/v1/admin/plans`: named sets of limits, in either of their shapes, with all that they ever were."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict

from limitforge.catalog.config.plan_warnings import plan_warnings
from limitforge.catalog.database.catalog import Edit
from limitforge.catalog.model import Plan
from limitforge.catalog.plan_limits import parse_plan_limits
from limitforge.errors import InvalidInput
from limitforge.service.admin.fields import (
    Filter,
    Id,
    IfMatch,
    ListQuery,
    Name,
    PathId,
    RequestBody,
    StrictInt,
    optional,
)
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
    "text": {"summary": "Their text", "value": {**_OWNER, "name": "simple", "limits": "100/minute; 1000/hour"}},
}
BODY_EXAMPLES: Any = {"requestBody": {"content": {"application/json": {"examples": _BODY_EXAMPLES}}}}


def _describe_shapes(*required: str) -> Any:
    """The shapes of a plan: with `limits`, or with the fields of its only limit, which are described elsewhere."""

    def describe(schema: dict[str, Any]) -> None:
        own = {name: schema["properties"][name] for name in ("tenant_id", "name") if name in schema["properties"]}
        limits = {"limits": schema_ref("plan.limits")}
        with_limits = [*required, "limits"] if required else []
        schema.pop("additionalProperties", None)
        schema["properties"] = own
        schema["required"] = list(required)
        schema["anyOf"] = [
            {"properties": own | limits, "required": with_limits, "additionalProperties": False},
            schema_ref("plan.flat"),
        ]

    return describe


class NewPlan(RequestBody):
    """A plan that is to be: with `limits` (a list, or their text), or with the fields of its only limit."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_describe_shapes("tenant_id", "name"))

    tenant_id: Id
    name: Name
    limits: Any = optional()

    def fields(self) -> dict[str, Any]:
        return _recognised_fields(self)


class PlanChanges(RequestBody):
    """What of a plan changes: its name, all of its limits, or all fields of the only one."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_describe_shapes())

    name: Name = optional()
    limits: Any = optional()

    def fields(self, plan: Plan) -> dict[str, Any]:
        """What the catalog takes: the flat shape as a list of one."""
        given = _recognised_fields(self)
        if not self.model_extra:
            return given
        name = given.get("name", plan.name)
        return {"name": name, "limits": parse_plan_limits(name, given)}


def _recognised_fields(body: NewPlan | PlanChanges) -> dict[str, Any]:
    """What is beside `limits`, or without an algorithm, belongs to no limit."""
    others = body.model_extra or {}
    if "limits" in body.model_fields_set or "algorithm" not in others:
        for field in others:
            raise InvalidInput(
                field[:64], "is not a field here: give `limits`, or an `algorithm` with the fields of that one limit"
            )
    return body.given_fields()


class Rollback(RequestBody):
    """Where to go back to."""

    version: StrictInt | None = None


class PlanQuery(ListQuery):
    """Which plans are wanted."""

    tenant_id: Filter | None = None
    name: Filter | None = None


@router.post("", status_code=201, responses=describe_response("PlanWritten", status=201), openapi_extra=BODY_EXAMPLES)
async def create_plan(body: NewPlan, session: WriteSession, creating: Idempotency) -> Response:
    """Create a plan. Its limits take any of seven algorithms, several of them at once."""
    session.require_tenant(body.tenant_id)

    async def make(edit: Edit) -> CreateResult:
        plan = await edit.create(Plan, body.fields())
        return CreateResult(plan, warnings=await plan_warnings(edit.connection, plan.tenant_id, plan.id))

    return await creating.run(make)


@router.get("", responses=describe_page("Plan"))
async def list_plans(asked: Annotated[PlanQuery, Query()], session: ReadSession) -> Response:
    """List plans by name. Those of the operator have the tenant_id `operator`."""
    return page_response(await session.page(Plan, **asked.arguments()))


@router.get("/{plan_id}", responses=describe_response("Plan"))
async def get_plan(plan_id: PathId, session: ReadSession) -> Response:
    """Show a plan."""
    return entity_response(await session.get(Plan, plan_id))


@router.patch("/{plan_id}", responses=describe_response("PlanWritten"))
async def change_plan(plan_id: PathId, body: PlanChanges, session: WriteSession, version: IfMatch) -> Response:
    """Change a plan: what its limits were stays as a version of it."""
    async with session.edit() as edit:
        plan = await session.find(edit, Plan, plan_id)
        plan = await edit.update(Plan, plan_id, body.fields(plan), version=version)
        warnings = await plan_warnings(edit.connection, plan.tenant_id, plan.id)
    return entity_response(plan, **warning_fields(warnings))


@router.delete("/{plan_id}", status_code=204, responses=NO_CONTENT)
async def delete_plan(plan_id: PathId, session: WriteSession, version: IfMatch) -> Response:
    """Delete a plan that nothing uses any more."""
    async with session.edit() as edit:
        await session.find(edit, Plan, plan_id)
        await edit.delete(Plan, plan_id, version=version)
    return no_content_response()


@router.get("/{plan_id}/versions", responses=describe_page("PlanVersion"))
async def list_plan_versions(plan_id: PathId, session: ReadSession) -> Response:
    """List all that a plan ever was, the newest first."""
    await session.get(Plan, plan_id)
    return json_response({"items": await session.catalog.plan_versions(plan_id), "cursor": None})


@router.post("/{plan_id}/rollback", responses=describe_response("PlanWritten"))
async def roll_back_plan(
    plan_id: PathId, session: WriteSession, version: IfMatch, body: Rollback | None = None
) -> Response:
    """Bring the limits of an earlier version back, as a new version: the one before, if none is named."""
    async with session.edit() as edit:
        await session.find(edit, Plan, plan_id)
        plan = await edit.roll_back_plan(plan_id, None if body is None else body.version, version=version)
        warnings = await plan_warnings(edit.connection, plan.tenant_id, plan.id)
    return entity_response(plan, **warning_fields(warnings))
