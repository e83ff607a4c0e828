"""`/v1/admin/overrides`: other numbers for one subject, for a while."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict, WithJsonSchema

from limitforge.catalog.catalog import Edit
from limitforge.catalog.model import Override
from limitforge.core.exact import TEN_YEARS_US
from limitforge.service.admin.creation import Creating, Made
from limitforge.service.admin.fields import Body, Id, Listing, Moment, Part, PathId, Version, Wanted, absent
from limitforge.service.admin.replies import GONE, answers, answers_list, elsewhere, gone, listed, shown
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading, Writing

router = admin_router("/overrides", "overrides")

Numbers = Annotated[dict[str, Any], WithJsonSchema(elsewhere("override.limits"))]
Lifetime = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "number",
            "minimum": 0.001,
            "maximum": TEN_YEARS_US // 1_000_000,
            "description": "For how long, in place of `expires_at`.",
        }
    ),
]
Reason = Annotated[str, WithJsonSchema({"type": "string", "maxLength": 512})]


class OverrideChanges(Body):
    """What of an override changes."""

    limits: Numbers = absent()
    ttl_seconds: Lifetime = absent()
    expires_at: Moment = absent()
    reason: Reason = absent()


class NewOverride(OverrideChanges):
    """An override that is to be. It takes `ttl_seconds` or `expires_at`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "tenant_id": "ten_1a2b3c4d5e6f7g8h",
                    "resource": "*",
                    "subject": "user:42",
                    "limits": {"burst": {"limit": 500}, "daily": "unlimited"},
                    "ttl_seconds": 86_400,
                    "reason": "launch day",
                }
            ]
        }
    )

    tenant_id: Id
    resource: Part = absent()
    subject: Part
    limits: Numbers


class OverrideListing(Listing):
    """Which overrides are wanted."""

    tenant_id: Wanted | None = None
    resource: Wanted | None = None
    subject: Wanted | None = None


@router.post(
    "",
    status_code=201,
    responses=answers("Override", status=201) | answers("Override", description="It replaced the one that was there."),
)
async def set_override(body: NewOverride, session: Writing, creating: Creating, version: Version) -> Response:
    """Set an override, in place of any that this subject has for this resource: 201 if there was none, else 200."""
    session.require_tenant(body.tenant_id)

    async def make(edit: Edit) -> Made:
        override = await edit.set_override(body.given(), version=version)
        return Made(override, status=201 if override.version == 1 else 200)

    return await creating.run(make)


@router.get("", responses=answers_list("Override"))
async def list_overrides(asked: Annotated[OverrideListing, Query()], session: Reading) -> Response:
    """List overrides by subject."""
    return listed(await session.page(Override, **asked.asked()))


@router.get("/{override_id}", responses=answers("Override"))
async def get_override(override_id: PathId, session: Reading) -> Response:
    """Show an override."""
    return shown(await session.get(Override, override_id))


@router.patch("/{override_id}", responses=answers("Override"))
async def change_override(override_id: PathId, body: OverrideChanges, session: Writing, version: Version) -> Response:
    """Change an override: all of its numbers, how long it lasts, or why it is there."""
    async with session.edit() as edit:
        before = await session.find(edit, Override, override_id)
        if not body.model_fields_set:
            return shown(await edit.update(Override, override_id, {}, version=version))
        kept = {name: getattr(before, name) for name in Override.settable}
        if "ttl_seconds" in body.model_fields_set:
            del kept["expires_at"]
        override = await edit.set_override({**kept, **body.given()}, version=version)
    return shown(override)


@router.delete("/{override_id}", status_code=204, responses=GONE)
async def delete_override(override_id: PathId, session: Writing, version: Version) -> Response:
    """Delete an override: the plan's numbers hold again."""
    async with session.edit() as edit:
        await session.find(edit, Override, override_id)
        await edit.delete(Override, override_id, version=version)
    return gone()
