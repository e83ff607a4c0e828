"""`/v1/admin/plans`: named sets of limits, in either of their shapes, with all that they ever were."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict

from limitforge.catalog.catalog import Edit
from limitforge.catalog.model import Plan, limits_given
from limitforge.catalog.plan_warnings import plan_warnings
from limitforge.errors import InvalidInput
from limitforge.service.admin.creation import Creating, Made
from limitforge.service.admin.fields import Body, Id, Listing, Name, PathId, Version, Wanted, Whole, absent
from limitforge.service.admin.replies import GONE, answers, answers_list, elsewhere, gone, listed, reply, shown, warned
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading, Writing

router = admin_router("/plans", "plans")

_OWN = {"tenant_id": "ten_1a2b3c4d5e6f7g8h"}
_BUCKET = {"algorithm": "token_bucket", "bucket_capacity": 10, "refill_rate_per_sec": 2}
_HOURLY = {"algorithm": "fixed_window", "name": "hourly", "limit": 1_000, "window_seconds": 3_600}
_BODIES = {
    "several": {
        "summary": "Several limits",
        "value": {**_OWN, "name": "free", "limits": [{"name": "burst", **_BUCKET}, _HOURLY]},
    },
    "flat": {"summary": "One limit, named after the plan", "value": {**_OWN, "name": "bucket", **_BUCKET}},
    "text": {"summary": "Their text", "value": {**_OWN, "name": "simple", "limits": "100/minute; 1000/hour"}},
}
EXAMPLES: Any = {"requestBody": {"content": {"application/json": {"examples": _BODIES}}}}


def _shapes(*required: str) -> Any:
    """The shapes of a plan: with `limits`, or with the fields of its only limit, which are described elsewhere."""

    def describe(schema: dict[str, Any]) -> None:
        own = {name: schema["properties"][name] for name in ("tenant_id", "name") if name in schema["properties"]}
        limits = {"limits": elsewhere("plan.limits")}
        with_limits = [*required, "limits"] if required else []
        schema.pop("additionalProperties", None)
        schema["properties"] = own
        schema["required"] = list(required)
        schema["anyOf"] = [
            {"properties": own | limits, "required": with_limits, "additionalProperties": False},
            elsewhere("plan.flat"),
        ]

    return describe


class NewPlan(Body):
    """A plan that is to be: with `limits` (a list, or their text), or with the fields of its only limit."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_shapes("tenant_id", "name"))

    tenant_id: Id
    name: Name
    limits: Any = absent()

    def fields(self) -> dict[str, Any]:
        return _refuse_strangers(self)


class PlanChanges(Body):
    """What of a plan changes: its name, all of its limits, or all fields of the only one."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_shapes())

    name: Name = absent()
    limits: Any = absent()

    def fields(self, plan: Plan) -> dict[str, Any]:
        """What the catalog takes: the flat shape as a list of one."""
        given = _refuse_strangers(self)
        if not self.model_extra:
            return given
        name = given.get("name", plan.name)
        return {"name": name, "limits": limits_given(name, given)}


def _refuse_strangers(body: NewPlan | PlanChanges) -> dict[str, Any]:
    """What is beside `limits`, or without an algorithm, belongs to no limit."""
    others = body.model_extra or {}
    if "limits" in body.model_fields_set or "algorithm" not in others:
        for field in others:
            raise InvalidInput(
                field[:64], "is not a field here: give `limits`, or an `algorithm` with the fields of that one limit"
            )
    return body.given()


class Rollback(Body):
    """Where to go back to."""

    version: Whole | None = None


class PlanListing(Listing):
    """Which plans are wanted."""

    tenant_id: Wanted | None = None
    name: Wanted | None = None


@router.post("", status_code=201, responses=answers("PlanWritten", status=201), openapi_extra=EXAMPLES)
async def create_plan(body: NewPlan, session: Writing, creating: Creating) -> Response:
    """Create a plan. Its limits take any of seven algorithms, several of them at once."""
    session.require_tenant(body.tenant_id)

    async def make(edit: Edit) -> Made:
        plan = await edit.create(Plan, body.fields())
        return Made(plan, warnings=await plan_warnings(edit.connection, plan.tenant_id, plan.id))

    return await creating.run(make)


@router.get("", responses=answers_list("Plan"))
async def list_plans(asked: Annotated[PlanListing, Query()], session: Reading) -> Response:
    """List plans by name. Those of the operator have the tenant_id `operator`."""
    return listed(await session.page(Plan, **asked.asked()))


@router.get("/{plan_id}", responses=answers("Plan"))
async def get_plan(plan_id: PathId, session: Reading) -> Response:
    """Show a plan."""
    return shown(await session.get(Plan, plan_id))


@router.patch("/{plan_id}", responses=answers("PlanWritten"))
async def change_plan(plan_id: PathId, body: PlanChanges, session: Writing, version: Version) -> Response:
    """Change a plan: what its limits were stays as a version of it."""
    async with session.edit() as edit:
        plan = await session.find(edit, Plan, plan_id)
        plan = await edit.update(Plan, plan_id, body.fields(plan), version=version)
        warnings = await plan_warnings(edit.connection, plan.tenant_id, plan.id)
    return shown(plan, **warned(warnings))


@router.delete("/{plan_id}", status_code=204, responses=GONE)
async def delete_plan(plan_id: PathId, session: Writing, version: Version) -> Response:
    """Delete a plan that nothing uses any more."""
    async with session.edit() as edit:
        await session.find(edit, Plan, plan_id)
        await edit.delete(Plan, plan_id, version=version)
    return gone()


@router.get("/{plan_id}/versions", responses=answers_list("PlanVersion"))
async def list_plan_versions(plan_id: PathId, session: Reading) -> Response:
    """List all that a plan ever was, the newest first."""
    await session.get(Plan, plan_id)
    return reply({"items": await session.catalog.history(plan_id), "cursor": None})


@router.post("/{plan_id}/rollback", responses=answers("PlanWritten"))
async def roll_back_plan(plan_id: PathId, session: Writing, version: Version, body: Rollback | None = None) -> Response:
    """Bring the limits of an earlier version back, as a new version: the one before, if none is named."""
    async with session.edit() as edit:
        await session.find(edit, Plan, plan_id)
        plan = await edit.roll_back(plan_id, None if body is None else body.version, version=version)
        warnings = await plan_warnings(edit.connection, plan.tenant_id, plan.id)
    return shown(plan, **warned(warnings))
