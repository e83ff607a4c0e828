"""Check an entity against the rest of the catalog, before it is written.

The constraints of the database hold the same invariants. These checks come first because their errors name the field.
"""

from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.database import queries
from limitforge.catalog.model import (
    MAX_OVERRIDE_DURATION,
    MAX_PLANS_PER_TENANT,
    MAX_POLICIES_PER_TENANT,
    OPERATOR,
    Entity,
    Key,
    Override,
    Plan,
    Policy,
    Tenant,
    Token,
)
from limitforge.catalog.snapshot import limits_for_override
from limitforge.core.exact import short_repr
from limitforge.core.overrides import compile_override
from limitforge.errors import Conflict, InvalidInput, NotFound


async def validate_entity(connection: AsyncConnection, entity: Entity, now: datetime) -> None:
    """Raise `InvalidInput`, `NotFound` or `Conflict` if the entity does not fit the rest of the catalog."""
    match entity:
        case Tenant():
            await _validate_tenant(connection, entity)
        case Plan():
            await _validate_plan(connection, entity)
        case Policy():
            await _validate_policy(connection, entity)
        case Key():
            await _require_owner(connection, entity.tenant_id)
            await _require_plan(connection, "plan_id", entity.plan_id, entity.tenant_id)
        case Token():
            if entity.tenant_id is not None:
                await _require_owner(connection, entity.tenant_id)
            await _require_unique(connection, entity, f"token called {entity.name}", name=entity.name)
        case Override():
            await _validate_override(connection, entity, now)


async def _validate_tenant(connection: AsyncConnection, tenant: Tenant) -> None:
    if tenant.is_operator:
        fixed = {"name": OPERATOR, "suspended": False, "lanes": 1, "failure": None, "priority": None}
        for field, value in fixed.items():
            if getattr(tenant, field) != value:
                raise InvalidInput(
                    field, "can't be set for the operator, which has only a mode, a time zone and a plan"
                )
    await _require_unique(connection, tenant, f"tenant called {tenant.name}", name=tenant.name)
    await _require_plan(connection, "default_plan_id", tenant.default_plan_id, tenant.id)


async def _validate_plan(connection: AsyncConnection, plan: Plan) -> None:
    await _require_owner(connection, plan.tenant_id, allow_operator=True)
    await _require_unique(connection, plan, f"plan called {plan.name}", tenant_id=plan.tenant_id, name=plan.name)
    await _require_capacity(connection, plan, plan.tenant_id, MAX_PLANS_PER_TENANT)


async def _validate_policy(connection: AsyncConnection, policy: Policy) -> None:
    await _require_owner(connection, policy.tenant_id)
    for field in ("plan_id", "shadow_plan_id"):
        await _require_plan(connection, field, getattr(policy, field), policy.tenant_id)
    values = {"tenant_id": policy.tenant_id, "pattern": policy.pattern.canonical}
    await _require_unique(connection, policy, f"policy for {policy.resource}", **values)
    await _require_capacity(connection, policy, policy.tenant_id, MAX_POLICIES_PER_TENANT)


async def _validate_override(connection: AsyncConnection, override: Override, now: datetime) -> None:
    if not now < override.expires_at <= now + MAX_OVERRIDE_DURATION:
        raise InvalidInput("expires_at", "must be in the future, and at most ten years from now")
    await _require_owner(connection, override.tenant_id)
    config = await queries.tenant_config(connection, override.tenant_id)
    if config is not None:
        limits = limits_for_override(config, override.resource, override.limits)
        compile_override(override.limits, limits, override.resource)


async def _require_owner(connection: AsyncConnection, tenant_id: str, *, allow_operator: bool = False) -> None:
    if await queries.find(connection, Tenant, tenant_id) is None:
        raise NotFound(f"tenant_id: unknown tenant {short_repr(tenant_id)}")
    if tenant_id == OPERATOR and not allow_operator:
        raise InvalidInput("tenant_id", "the operator has plans, but no policies, keys or overrides")


async def _require_plan(connection: AsyncConnection, field: str, plan_id: str | None, tenant_id: str) -> None:
    if plan_id is None:
        return
    plan = await queries.find(connection, Plan, plan_id)
    if plan is None or plan.tenant_id != tenant_id:
        raise NotFound(f"{field}: unknown plan {short_repr(plan_id)}")


async def _require_unique(connection: AsyncConnection, entity: Entity, description: str, **values: Any) -> None:
    for other in await queries.find_by(connection, type(entity), **values):
        if other.id != entity.id:
            raise Conflict(f"a {description} already exists")


async def _require_capacity(connection: AsyncConnection, entity: Entity, tenant_id: str, maximum: int) -> None:
    if entity.version == 1 and await queries.count(connection, type(entity), tenant_id=tenant_id) >= maximum:
        raise Conflict(f"a tenant may have at most {maximum} {entity.kind} entries")
