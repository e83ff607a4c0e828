"""`/v1/admin/overrides`: different limits for one subject, until they expire."""

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ConfigDict, WithJsonSchema

from limitforge.catalog.database.edits import Edit
from limitforge.catalog.fields import settable_fields
from limitforge.catalog.model import Override
from limitforge.core.exact import TEN_YEARS_US
from limitforge.service.admin.fields import EntityBody, Filter, Id, IfMatch, ListQuery, PathId, Timestamp, optional
from limitforge.service.admin.idempotency import CreateResult, Idempotency
from limitforge.service.admin.responses import (
    NO_CONTENT,
    describe_page,
    describe_response,
    entity_response,
    no_content_response,
    page_response,
    schema_ref,
)
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession, WriteSession

router = admin_router("/overrides", "overrides")

OverrideLimits = Annotated[dict[str, Any], WithJsonSchema(schema_ref("override.limits"))]
TtlSeconds = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "number",
            "minimum": 0.001,
            "maximum": TEN_YEARS_US // 1_000_000,
            "description": "How long the override lasts, instead of `expires_at`.",
        }
    ),
]


class OverrideChanges(EntityBody):
    """The fields of an override to change. Absent fields stay as they are."""

    entity = Override

    limits: OverrideLimits = optional()
    ttl_seconds: TtlSeconds = optional()
    expires_at: Timestamp = optional()
    reason: str = optional()


class NewOverride(OverrideChanges):
    """An override to set. It needs either `ttl_seconds` or `expires_at`."""

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
    resource: str = optional()
    subject: str
    limits: OverrideLimits


class OverrideQuery(ListQuery):
    """The filters of the list of overrides."""

    tenant_id: Filter | None = None
    resource: Filter | None = None
    subject: Filter | None = None


@router.post(
    "",
    status_code=201,
    responses=describe_response("Override", status=201)
    | describe_response("Override", description="An existing override was replaced."),
)
async def set_override(
    body: NewOverride, session: WriteSession, idempotency: Idempotency, expected_version: IfMatch
) -> Response:
    """Set the override of a subject for a resource. The status is 201 if it is new, and 200 if it replaced one."""
    session.require_tenant(body.tenant_id)

    async def create(edit: Edit) -> CreateResult:
        override = await edit.set_override(body.given_fields(), expected_version=expected_version)
        return CreateResult(override, status=201 if override.version == 1 else 200)

    return await idempotency.run(create)


@router.get("", responses=describe_page("Override"))
async def list_overrides(query: Annotated[OverrideQuery, Query()], session: ReadSession) -> Response:
    """List overrides by subject."""
    return page_response(await session.list_page(Override, query))


@router.get("/{override_id}", responses=describe_response("Override"))
async def get_override(override_id: PathId, session: ReadSession) -> Response:
    """Return an override."""
    return entity_response(await session.get(Override, override_id))


@router.patch("/{override_id}", responses=describe_response("Override"))
async def change_override(
    override_id: PathId, body: OverrideChanges, session: WriteSession, expected_version: IfMatch
) -> Response:
    """Change the limits, the expiry or the reason of an override. New limits replace all of the old ones."""
    async with session.edit() as edit:
        before = await session.require_visible(edit, Override, override_id)
        if not body.model_fields_set:  # an empty PATCH checks the version and changes nothing
            return entity_response(await edit.update(Override, override_id, {}, expected_version=expected_version))
        fields = {name: getattr(before, name) for name in settable_fields(Override)}
        if "ttl_seconds" in body.model_fields_set:
            del fields["expires_at"]
        override = await edit.set_override({**fields, **body.given_fields()}, expected_version=expected_version)
    return entity_response(override)


@router.delete("/{override_id}", status_code=204, responses=NO_CONTENT)
async def delete_override(override_id: PathId, session: WriteSession, expected_version: IfMatch) -> Response:
    """Delete an override. The limits of the plan apply again."""
    async with session.edit() as edit:
        await session.require_visible(edit, Override, override_id)
        await edit.delete(Override, override_id, expected_version=expected_version)
    return no_content_response()
