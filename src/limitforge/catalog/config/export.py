"""The catalog as a document: what the database holds, said as a configuration file says it."""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.config.specs import (
    ConfigDocument,
    KeySpec,
    OperatorSpec,
    OverrideSpec,
    PlanSpec,
    PolicySpec,
    SecretSpec,
    TenantSpec,
    order_limit_fields,
)
from limitforge.catalog.config.validation import OverrideValidator
from limitforge.catalog.database import queries
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import OPERATOR, Entity, Key, Override, Plan, Policy, Tenant, to_datetime
from limitforge.errors import CatalogError, NotFound


class TenantState(msgspec.Struct):
    """A tenant and all that is its own, as the database has it."""

    tenant: Tenant
    plans: list[Plan] = []
    policies: list[Policy] = []
    keys: list[Key] = []
    overrides: list[Override] = []


class CatalogState(msgspec.Struct):
    """Some tenants, or all of them, by name, and the operator."""

    operator: TenantState
    tenants: dict[str, TenantState]


async def export_document(catalog: Catalog, *, tenant: str | None = None) -> ConfigDocument:
    """All that is in force, or one tenant of it, whole: applied to an empty database it makes the same again. What has
    expired, and overrides of limits that are no more, are left out.
    """
    async with catalog.database.reading() as connection:
        state = await read_state(connection, None if tenant is None else [tenant])
    if tenant is not None and tenant not in state.tenants:
        raise NotFound(f"there is no tenant {tenant!r}")
    document = state_to_document(state, to_datetime(catalog.clock.now_us()))
    if tenant is not None:
        document = msgspec.structs.replace(document, operator=None)
    return msgspec.structs.replace(document, tenants=tuple(map(_without_invalid_overrides, document.tenants or ())))


async def read_state(connection: AsyncConnection, names: Collection[str] | None) -> CatalogState:
    """The tenants of these names that there are, or all; a few queries for each thousand of them."""
    operator = await queries.find(connection, Tenant, OPERATOR)
    if operator is None:
        raise CatalogError("the database has no operator: run `limitforge db upgrade`")
    tenants = (
        await _all_tenants(connection)
        if names is None
        else await queries.find_where_in(connection, Tenant, "name", names)
    )
    found = {each.id: TenantState(each) for each in (operator, *tenants) if each.name != OPERATOR or each is operator}
    kinds: tuple[tuple[str, type[Any]], ...] = (
        ("plans", Plan),
        ("policies", Policy),
        ("keys", Key),
        ("overrides", Override),
    )
    for field, kind in kinds:
        for entity in await queries.find_where_in(connection, kind, "tenant_id", found):
            getattr(found[entity.tenant_id], field).append(entity)
    return CatalogState(found.pop(OPERATOR), {each.tenant.name: each for each in found.values()})


async def _all_tenants(connection: AsyncConnection) -> list[Tenant]:
    found: list[Tenant] = []
    cursor: str | None = None
    while True:
        page = await queries.list_page(connection, Tenant, cursor, queries.MAX_PAGE_SIZE)
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found


# --- In the words of a file ------------------------------------------------------------------------------------------


def state_to_document(state: CatalogState, now: datetime) -> ConfigDocument:
    """What has not expired, in an order of its own: two databases that hold the same are described alike."""
    operator = _tenant_spec(state.operator, now)
    return ConfigDocument(
        operator=OperatorSpec(
            mode=operator.mode, time_zone=operator.time_zone, plan=operator.default_plan, plans=operator.plans
        ),
        tenants=tuple(_tenant_spec(state.tenants[name], now) for name in sorted(state.tenants)),
    )


def _tenant_spec(state: TenantState, now: datetime) -> TenantSpec:
    names = {plan.id: plan.name for plan in state.plans}
    return TenantSpec(
        **_copy_fields(state.tenant, ("name", "mode", "time_zone", "failure", "priority", "lanes", "suspended")),
        default_plan=names.get(state.tenant.default_plan_id or ""),
        plans=tuple(
            PlanSpec(name=each.name, limits=tuple(map(order_limit_fields, each.limits)))
            for each in sorted(state.plans, key=lambda each: each.name)
        ),
        policies=tuple(
            sorted(
                (_policy_spec(each, names) for each in state.policies),
                key=lambda each: (each.resource, each.canonical_pattern),
            )
        ),
        keys=tuple(sorted((_key_spec(each, names, now) for each in state.keys), key=lambda each: (each.name, each.id))),
        overrides=tuple(
            sorted(
                (
                    OverrideSpec(**_copy_fields(each, ("resource", "subject", "limits", "expires_at", "reason")))
                    for each in state.overrides
                    if each.expires_at > now
                ),
                key=lambda each: (each.resource, each.subject),
            )
        ),
    )


def _policy_spec(policy: Policy, names: dict[str, str]) -> PolicySpec:
    return PolicySpec(
        **_copy_fields(policy, ("resource", "mode", "failure", "priority")),
        plan=names[policy.plan_id],
        shadow_plan=names.get(policy.shadow_plan_id or ""),
    )


def _key_spec(key: Key, names: dict[str, str], now: datetime) -> KeySpec:
    return KeySpec(
        **_copy_fields(key, ("id", "name", "type", "scopes", "expires_at", "metadata", "disabled")),
        plan=names.get(key.plan_id or ""),
        secrets=tuple(
            SecretSpec(hash=each.hash, pepper=each.pepper, expires_at=each.expires_at)
            for each in key.secrets
            if each.expires_at is None or each.expires_at > now
        ),
    )


def _copy_fields(entity: Entity, fields: Iterable[str]) -> dict[str, Any]:
    return {field: getattr(entity, field) for field in fields}


def _without_invalid_overrides(tenant: TenantSpec) -> TenantSpec:
    if not tenant.overrides:
        return tenant
    reach = OverrideValidator(tenant)
    living = (reach.valid_part(each) for each in tenant.overrides)
    return msgspec.structs.replace(tenant, overrides=tuple(each for each in living if each is not None))
