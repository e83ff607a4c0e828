"""Warnings about the plans that a document would make."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.config.specs import ConfigDocument, TenantSpec
from limitforge.catalog.database import queries
from limitforge.catalog.model import Plan, Policy, Tenant
from limitforge.catalog.plan_warnings import MAX_WARNINGS, DifferingLimits, find_differing_limits


async def document_warnings(connection: AsyncConnection, document: ConfigDocument) -> list[str]:
    """Return the warnings about the tenants whose plans or policies a document changes, in their new state."""
    tenants = [each for each in document.tenants or () if each.plans is not None or each.policies is not None]
    incomplete = [each.name for each in tenants if each.plans is None or each.policies is None]
    known = {each.name: each.id for each in await queries.find_where_in(connection, Tenant, "name", incomplete)}
    plans: dict[str, dict[str, Plan]] = defaultdict(dict)
    for plan in await queries.find_where_in(connection, Plan, "tenant_id", known.values()):
        plans[plan.tenant_id][plan.id] = plan
    policies: dict[str, list[Policy]] = defaultdict(list)
    for policy in await queries.find_where_in(connection, Policy, "tenant_id", known.values()):
        policies[policy.tenant_id].append(policy)
    found: list[str] = []
    for tenant in tenants:
        tenant_id = known.get(tenant.name, "")
        for each in _find_in_spec(tenant, plans[tenant_id], policies[tenant_id]):
            found.append(f"tenant {tenant.name}: {each}")
            if len(found) == MAX_WARNINGS:
                return [*found, "there may be more warnings, which are not shown"]
    return found


def _find_in_spec(tenant: TenantSpec, plans: Mapping[str, Plan], policies: Iterable[Policy]) -> list[DifferingLimits]:
    """Return the differing limits of a tenant in a document. `plans` and `policies` are those in the database."""
    limits = {each.name: each.limits for each in (plans.values() if tenant.plans is None else tenant.plans)}
    if tenant.policies is None:
        used = {plans[each.plan_id].name for each in policies}
    else:
        used = {each.plan for each in tenant.policies}
    return find_differing_limits(limits, used, tenant.default_plan, tenant.time_zone)
