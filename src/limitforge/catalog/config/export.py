"""Export the catalog of a database as a configuration document."""

from collections.abc import Collection, Mapping
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
    drop_expired,
    order_limit_fields,
    spec_fields,
)
from limitforge.catalog.config.validation import OverrideValidator
from limitforge.catalog.database import pages, queries
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import OPERATOR, Key, Override, Plan, Policy, Tenant, to_datetime
from limitforge.core.exact import short_repr
from limitforge.errors import CatalogError, NotFound


class TenantState(msgspec.Struct):
    """A tenant and everything that it owns, as the database has it."""

    tenant: Tenant
    plans: list[Plan] = []
    policies: list[Policy] = []
    keys: list[Key] = []
    overrides: list[Override] = []


class CatalogState(msgspec.Struct):
    """The operator, and some or all tenants by name."""

    operator: TenantState
    tenants: dict[str, TenantState]


async def export_document(catalog: Catalog, *, tenant: str | None = None) -> ConfigDocument:
    """Export everything that is in force, or all of one tenant.

    Applying the document to an empty database restores the catalog. It omits what has expired, and overrides of limits
    that no longer exist. Raises `NotFound` for an unknown tenant.
    """
    async with catalog.database.reading() as connection:
        state = await read_state(connection, None if tenant is None else [tenant])
    if tenant is not None and tenant not in state.tenants:
        raise NotFound(f"unknown tenant {short_repr(tenant)}")
    document = state_to_document(state, to_datetime(catalog.clock.now_us()))
    if tenant is not None:
        document = msgspec.structs.replace(document, operator=None)
    return msgspec.structs.replace(document, tenants=tuple(map(_without_invalid_overrides, document.tenants or ())))


async def read_state(connection: AsyncConnection, names: Collection[str] | None) -> CatalogState:
    """Read the tenants with these names, or all of them, with a few queries for each thousand tenants."""
    operator = await queries.find(connection, Tenant, OPERATOR)
    if operator is None:
        raise CatalogError("the database has no operator: run `limitforge db upgrade`")
    tenants = (
        await _all_tenants(connection)
        if names is None
        else await queries.find_where_in(connection, Tenant, "name", names)
    )
    # `names` may contain the operator's name, but it is read only once.
    others = (each for each in tenants if each.name != OPERATOR)
    found = {each.id: TenantState(each) for each in (operator, *others)}
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
        page = await queries.list_page(connection, Tenant, cursor, pages.MAX_PAGE_SIZE)
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found


# --- Entities to specs -----------------------------------------------------------------------------------------------


def state_to_document(state: CatalogState, now: datetime) -> ConfigDocument:
    """Describe what has not expired, in a fixed order: equal catalogs result in equal documents."""
    operator = _tenant_spec(state.operator, now)
    return ConfigDocument(
        operator=OperatorSpec(
            mode=operator.mode, time_zone=operator.time_zone, plan=operator.default_plan, plans=operator.plans
        ),
        tenants=tuple(_tenant_spec(state.tenants[name], now) for name in sorted(state.tenants)),
    )


def _tenant_spec(state: TenantState, now: datetime) -> TenantSpec:
    plan_names = {plan.id: plan.name for plan in state.plans}
    plans = [PlanSpec(name=each.name, limits=tuple(map(order_limit_fields, each.limits))) for each in state.plans]
    policies = [PolicySpec(**spec_fields(PolicySpec, each, plan_names)) for each in state.policies]
    keys = [_key_spec(each, plan_names) for each in state.keys]
    overrides = [OverrideSpec(**spec_fields(OverrideSpec, each, plan_names)) for each in state.overrides]
    tenant = TenantSpec(
        **spec_fields(TenantSpec, state.tenant, plan_names),
        plans=tuple(sorted(plans, key=lambda each: each.name)),
        policies=tuple(sorted(policies, key=lambda each: (each.resource, each.canonical_pattern))),
        keys=tuple(sorted(keys, key=lambda each: (each.name, each.id))),
        overrides=tuple(sorted(overrides, key=lambda each: (each.resource, each.subject))),
    )
    return drop_expired(tenant, now)


def _key_spec(key: Key, plan_names: Mapping[str, str]) -> KeySpec:
    secrets = tuple(SecretSpec(hash=each.hash, pepper=each.pepper, expires_at=each.expires_at) for each in key.secrets)
    return KeySpec(**spec_fields(KeySpec, key, plan_names), secrets=secrets)


def _without_invalid_overrides(tenant: TenantSpec) -> TenantSpec:
    if not tenant.overrides:
        return tenant
    validator = OverrideValidator(tenant)
    valid = (validator.valid_part(each) for each in tenant.overrides)
    return msgspec.structs.replace(tenant, overrides=tuple(each for each in valid if each is not None))
