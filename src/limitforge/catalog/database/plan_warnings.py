"""Warnings about the plans in the database."""

from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.database import queries
from limitforge.catalog.model import Plan, Tenant
from limitforge.catalog.plan_warnings import MAX_WARNINGS, find_differing_limits


async def plan_warnings(connection: AsyncConnection, tenant_id: str, plan_id: str) -> list[str]:
    """Return the warnings about one plan, to show after a change of the plan or of its use."""
    tenant = await queries.find(connection, Tenant, tenant_id)
    if tenant is None or tenant.is_operator:
        return []
    plans = await queries.list_for_tenant(connection, Plan, tenant_id)
    names = {plan.id: plan.name for plan in plans}
    used = {names[each] for each in await queries.plan_ids_of_policies(connection, tenant_id)}
    default = names.get(tenant.default_plan_id or "")
    found = find_differing_limits({plan.name: plan.limits for plan in plans}, used, default, tenant.time_zone)
    return [str(each) for each in found if names.get(plan_id) in each.plans][:MAX_WARNINGS]
