"""`/v1/admin/policies`: which plan applies to which resources."""

from typing import Annotated

from fastapi import Query, Response
from pydantic import ConfigDict

from limitforge.catalog.catalog import Edit
from limitforge.catalog.model import Policy
from limitforge.catalog.plan_warnings import plan_warnings
from limitforge.core.limits import Mode, Priority
from limitforge.service.admin.creation import Creating, Made
from limitforge.service.admin.fields import Body, FailureWord, Id, Listing, Part, PathId, Version, Wanted, absent
from limitforge.service.admin.replies import GONE, answers, answers_list, gone, listed, shown, warned
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading, Writing

router = admin_router("/policies", "policies")


class PolicyChanges(Body):
    """What of a policy changes."""

    resource: Part = absent()
    plan_id: Id = absent()
    mode: Mode = absent()
    failure: FailureWord | None = absent()
    priority: Priority | None = absent()
    shadow_plan_id: Id | None = absent()


class NewPolicy(PolicyChanges):
    """A policy that is to be. Its resource is such as GET:/orders, GET:/orders/{id}, POST:* or *."""

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
    resource: Part
    plan_id: Id


class PolicyListing(Listing):
    """Which policies are wanted."""

    tenant_id: Wanted | None = None
    resource: Wanted | None = None
    plan_id: Wanted | None = None


@router.post("", status_code=201, responses=answers("PolicyWritten", status=201))
async def create_policy(body: NewPolicy, session: Writing, creating: Creating) -> Response:
    """Create a policy. Of several that match a resource, the most specific one applies."""
    session.require_tenant(body.tenant_id)

    async def make(edit: Edit) -> Made:
        policy = await edit.create(Policy, body.given())
        return Made(policy, warnings=await plan_warnings(edit.connection, policy.tenant_id, policy.plan_id))

    return await creating.run(make)


@router.get("", responses=answers_list("Policy"))
async def list_policies(asked: Annotated[PolicyListing, Query()], session: Reading) -> Response:
    """List policies by resource."""
    return listed(await session.page(Policy, **asked.asked()))


@router.get("/{policy_id}", responses=answers("Policy"))
async def get_policy(policy_id: PathId, session: Reading) -> Response:
    """Show a policy."""
    return shown(await session.get(Policy, policy_id))


@router.patch("/{policy_id}", responses=answers("PolicyWritten"))
async def change_policy(policy_id: PathId, body: PolicyChanges, session: Writing, version: Version) -> Response:
    """Change what is named of a policy."""
    async with session.edit() as edit:
        await session.find(edit, Policy, policy_id)
        policy = await edit.update(Policy, policy_id, body.given(), version=version)
        warnings = await plan_warnings(edit.connection, policy.tenant_id, policy.plan_id)
    return shown(policy, **warned(warnings))


@router.delete("/{policy_id}", status_code=204, responses=GONE)
async def delete_policy(policy_id: PathId, session: Writing, version: Version) -> Response:
    """Delete a policy."""
    async with session.edit() as edit:
        await session.find(edit, Policy, policy_id)
        await edit.delete(Policy, policy_id, version=version)
    return gone()
