"""`/v1/admin/policies`: the plans that apply to the resources of a tenant."""

from typing import Annotated

from fastapi import Query, Response
from pydantic import ConfigDict

from limitforge.catalog.database.edits import Edit
from limitforge.catalog.database.plan_warnings import plan_warnings
from limitforge.catalog.model import Policy
from limitforge.core.limits import Mode, Priority
from limitforge.service.admin.fields import (
    EntityBody,
    FailureBehaviour,
    Filter,
    Id,
    IfMatch,
    ListQuery,
    PathId,
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
    warning_fields,
)
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession, WriteSession

router = admin_router("/policies", "policies")


class PolicyChanges(EntityBody):
    """The fields of a policy to change. Absent fields stay as they are."""

    entity = Policy

    resource: str = optional()
    plan_id: Id = optional()
    mode: Mode = optional()
    failure: FailureBehaviour | None = optional()
    priority: Priority | None = optional()
    shadow_plan_id: Id | None = optional()


class NewPolicy(PolicyChanges):
    """A policy to create. `resource` is a pattern, such as GET:/orders, GET:/orders/{id}, POST:* or *."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "tenant_id": "ten_1a2b3c4d5e6f7g8h",
                    "resource": "GET:/orders/{id}",
                    "plan_id": "pla_1a2b3c4d5e6f7g8h",
                    "mode": "monitor",
                }
            ]
        }
    )

    tenant_id: Id
    resource: str
    plan_id: Id


class PolicyQuery(ListQuery):
    """The filters of the list of policies."""

    tenant_id: Filter | None = None
    resource: Filter | None = None
    plan_id: Filter | None = None


@router.post("", status_code=201, responses=describe_response("PolicyWithWarnings", status=201))
async def create_policy(body: NewPolicy, session: WriteSession, idempotency: Idempotency) -> Response:
    """Create a policy. If several policies match a resource, the most specific one applies."""
    session.require_tenant(body.tenant_id)

    async def create(edit: Edit) -> CreateResult:
        policy = await edit.create(Policy, body.given_fields())
        return CreateResult(policy, warnings=await plan_warnings(edit.connection, policy.tenant_id, policy.plan_id))

    return await idempotency.run(create)


@router.get("", responses=describe_page("Policy"))
async def list_policies(query: Annotated[PolicyQuery, Query()], session: ReadSession) -> Response:
    """List policies by resource."""
    return page_response(await session.list_page(Policy, query))


@router.get("/{policy_id}", responses=describe_response("Policy"))
async def get_policy(policy_id: PathId, session: ReadSession) -> Response:
    """Return a policy."""
    return entity_response(await session.get(Policy, policy_id))


@router.patch("/{policy_id}", responses=describe_response("PolicyWithWarnings"))
async def change_policy(
    policy_id: PathId, body: PolicyChanges, session: WriteSession, expected_version: IfMatch
) -> Response:
    """Change the given fields of a policy."""
    async with session.edit() as edit:
        await session.require_visible(edit, Policy, policy_id)
        policy = await edit.update(Policy, policy_id, body.given_fields(), expected_version=expected_version)
        warnings = await plan_warnings(edit.connection, policy.tenant_id, policy.plan_id)
    return entity_response(policy, **warning_fields(warnings))


@router.delete("/{policy_id}", status_code=204, responses=NO_CONTENT)
async def delete_policy(policy_id: PathId, session: WriteSession, expected_version: IfMatch) -> Response:
    """Delete a policy."""
    async with session.edit() as edit:
        await session.require_visible(edit, Policy, policy_id)
        await edit.delete(Policy, policy_id, expected_version=expected_version)
    return no_content_response()
