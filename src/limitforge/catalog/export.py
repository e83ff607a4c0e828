"""The catalog as a document: what the database holds, said as a configuration file says it."""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog import queries
from limitforge.catalog.catalog import Catalog
from limitforge.catalog.consistency import Reach
from limitforge.catalog.model import OPERATOR, Entity, Key, Override, Plan, Policy, Tenant, at_time
from limitforge.catalog.specs import (
    Document,
    KeySpec,
    OperatorSpec,
    OverrideSpec,
    PlanSpec,
    PolicySpec,
    SecretSpec,
    TenantSpec,
    ordered_limit,
)
from limitforge.errors import CatalogError, NotFound


class TenantState(msgspec.Struct):
    """A tenant and all that is its own, as the database has it."""

    tenant: Tenant
    plans: list[Plan] = []
    policies: list[Policy] = []
    keys: list[Key] = []
    overrides: list[Override] = []


class State(msgspec.Struct):
    """Some tenants, or all of them, by name, and the operator."""

    operator: TenantState
    tenants: dict[str, TenantState]


async def export(catalog: Catalog, *, tenant: str | None = None) -> Document:
    """All that is in force, or one tenant of it, whole: applied to an empty database it makes the same again. What has
    expired, and overrides of limits that are no more, are left out.
    """
    async with catalog.database.reading() as connection:
        state = await read_state(connection, None if tenant is None else [tenant])
    if tenant is not None and tenant not in state.tenants:
        raise NotFound(f"there is no tenant {tenant!r}")
    document = described(state, at_time(catalog.clock.now_us()))
    if tenant is not None:
        document = msgspec.structs.replace(document, operator=None)
    return msgspec.structs.replace(document, tenants=tuple(map(_living, document.tenants or ())))


async def read_state(connection: AsyncConnection, names: Collection[str] | None) -> State:
    """The tenants of these names that there are, or all; a few queries for each thousand of them."""
    operator = await queries.find(connection, Tenant, OPERATOR)
    if operator is None:
        raise CatalogError("the database has no operator: run `limitforge db upgrade`")
    tenants = await _all_tenants(connection) if names is None else await queries.some(connection, Tenant, "name", names)
    found = {each.id: TenantState(each) for each in (operator, *tenants) if each.name != OPERATOR or each is operator}
    kinds: tuple[tuple[str, type[Any]], ...] = (
        ("plans", Plan),
        ("policies", Policy),
        ("keys", Key),
        ("overrides", Override),
    )
    for field, kind in kinds:
        for entity in await queries.some(connection, kind, "tenant_id", found):
            getattr(found[entity.tenant_id], field).append(entity)
    return State(found.pop(OPERATOR), {each.tenant.name: each for each in found.values()})


async def _all_tenants(connection: AsyncConnection) -> list[Tenant]:
    found: list[Tenant] = []
    cursor: str | None = None
    while True:
        page = await queries.page(connection, Tenant, cursor, queries.MAX_PAGE)
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found


# --- In the words of a file ------------------------------------------------------------------------------------------


def described(state: State, now: datetime) -> Document:
    """What has not expired, in an order of its own: two databases that hold the same are described alike."""
    operator = _tenant(state.operator, now)
    return Document(
        operator=OperatorSpec(
            mode=operator.mode, time_zone=operator.time_zone, plan=operator.default_plan, plans=operator.plans
        ),
        tenants=tuple(_tenant(state.tenants[name], now) for name in sorted(state.tenants)),
    )


def _tenant(state: TenantState, now: datetime) -> TenantSpec:
    names = {plan.id: plan.name for plan in state.plans}
    return TenantSpec(
        **_same(state.tenant, ("name", "mode", "time_zone", "failure", "priority", "lanes", "suspended")),
        default_plan=names.get(state.tenant.default_plan_id or ""),
        plans=tuple(
            PlanSpec(name=each.name, limits=tuple(map(ordered_limit, each.limits)))
            for each in sorted(state.plans, key=lambda each: each.name)
        ),
        policies=tuple(
            sorted((_policy(each, names) for each in state.policies), key=lambda each: (each.resource, each.canonical))
        ),
        keys=tuple(sorted((_key(each, names, now) for each in state.keys), key=lambda each: (each.name, each.id))),
        overrides=tuple(
            sorted(
                (
                    OverrideSpec(**_same(each, ("resource", "subject", "limits", "expires_at", "reason")))
                    for each in state.overrides
                    if each.expires_at > now
                ),
                key=lambda each: (each.resource, each.subject),
            )
        ),
    )


def _policy(policy: Policy, names: dict[str, str]) -> PolicySpec:
    return PolicySpec(
        **_same(policy, ("resource", "mode", "failure", "priority")),
        plan=names[policy.plan_id],
        shadow_plan=names.get(policy.shadow_plan_id or ""),
    )


def _key(key: Key, names: dict[str, str], now: datetime) -> KeySpec:
    return KeySpec(
        **_same(key, ("id", "name", "type", "scopes", "expires_at", "metadata", "disabled")),
        plan=names.get(key.plan_id or ""),
        secrets=tuple(
            SecretSpec(hash=each.hash, pepper=each.pepper, expires_at=each.expires_at)
            for each in key.secrets
            if each.expires_at is None or each.expires_at > now
        ),
    )


def _same(entity: Entity, fields: Iterable[str]) -> dict[str, Any]:
    return {field: getattr(entity, field) for field in fields}


def _living(tenant: TenantSpec) -> TenantSpec:
    if not tenant.overrides:
        return tenant
    reach = Reach(tenant)
    living = (reach.living(each) for each in tenant.overrides)
    return msgspec.structs.replace(tenant, overrides=tuple(each for each in living if each is not None))
