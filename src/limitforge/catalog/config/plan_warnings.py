"""Warn where limits of one name in several plans of a tenant look like one count, and are several.

A window's shape is in its bucket's key, so limits of one name with different windows never share a count. Where two
such plans meet on one caller or tenant, each admits its own number: rarely what their author meant.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from limitforge.catalog.config.specs import ConfigDocument, TenantSpec
from limitforge.catalog.database import queries
from limitforge.catalog.model import Plan, Policy, Tenant, TenantConfig
from limitforge.core.limits import Quota, Scope, limit_from_fields

MAX_WARNINGS = 20
MAX_NAMED = 5
MAX_LOGGED = 4_096

# A resource has one policy, so two policies' plans meet only on buckets that several resources share. Two keys may ask
# for one resource.
_SHARED_BY_POLICIES = frozenset({Scope.CALLER, Scope.TENANT})
_SHARED_BY_KEYS = _SHARED_BY_POLICIES | {Scope.RESOURCE}

_log = logging.getLogger(__name__)


class DifferingLimits(msgspec.Struct, frozen=True):
    """Limits of one name, algorithm and place in several plans, whose windows differ."""

    limit: str
    plans: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"limit {self.limit} has another window in each of the plans {_listed(self.plans)}: where they meet they "
            "count apart. Give the limits different names, or the same window"
        )


def find_differing_limits(
    plans: Mapping[str, Sequence[Mapping[str, Any]]],
    policy_plans: Collection[str],
    default_plan: str | None,
    time_zone: str,
) -> list[DifferingLimits]:
    """Return the limits of a tenant's plans, by the plans' names, that count apart under one name.

    Plans of policies are compared with each other, and so are those of the default and of keys: a plan that no policy
    uses counts as a key's.
    """
    if len(plans) < 2:
        return []
    of_keys = [name for name in plans if name not in policy_plans or name == default_plan]
    of_policies = [name for name in plans if name in policy_plans]
    return [
        *_differing(plans, of_policies, _SHARED_BY_POLICIES, time_zone),
        *_differing(plans, of_keys, _SHARED_BY_KEYS, time_zone),
    ]


def _differing(
    plans: Mapping[str, Sequence[Mapping[str, Any]]], names: Iterable[str], scopes: Collection[str], time_zone: str
) -> Iterator[DifferingLimits]:
    alike: dict[tuple[str, str, str], list[tuple[str, Mapping[str, Any]]]] = defaultdict(list)
    for plan in names:
        for fields in plans[plan]:
            scope = fields.get("scope", Scope.SUBJECT)
            if scope in scopes:
                alike[fields["name"], fields["algorithm"], scope].append((plan, fields))
    for (name, *_), found in alike.items():
        by_shape: dict[str, list[str]] = defaultdict(list)
        if len(found) > 1:
            for plan, fields in found:
                by_shape[_shape(fields, time_zone)].append(plan)
        if len(by_shape) > 1:
            yield DifferingLimits(name, tuple(sorted(plan for same in by_shape.values() for plan in same)))


def _shape(fields: Mapping[str, Any], time_zone: str) -> str:
    is_quota = fields["algorithm"] == Quota.algorithm
    return limit_from_fields({"time_zone": time_zone, **fields} if is_quota else fields).shape


def log_plan_warnings(config: TenantConfig) -> None:
    """Log the warnings of a tenant that was loaded, once per revision."""
    names = {plan.id: plan.name for plan in config.plans}
    tenant = config.tenant
    found = find_differing_limits(
        {plan.name: plan.limits for plan in config.plans},
        {names[policy.plan_id] for policy in config.policies},
        names.get(tenant.default_plan_id or ""),
        tenant.time_zone,
    )
    for each in found[: 0 if tenant.is_operator else MAX_WARNINGS]:
        _log_once(tenant.id, tenant.revision, each)


@lru_cache(maxsize=MAX_LOGGED)
def _log_once(tenant: str, revision: int, differ: DifferingLimits) -> None:
    plans = ",".join(differ.plans[:MAX_NAMED])
    _log.warning("catalog.limits_differ tenant=%s revision=%d limit=%s plans=%s", tenant, revision, differ.limit, plans)


async def plan_warnings(connection: AsyncConnection, tenant_id: str, plan_id: str) -> list[str]:
    """Return the warnings that concern one plan, for the person who has just changed it or its use."""
    tenant = await queries.find(connection, Tenant, tenant_id)
    if tenant is None or tenant.is_operator:
        return []
    plans = await queries.list_for_tenant(connection, Plan, tenant_id)
    names = {plan.id: plan.name for plan in plans}
    used = {names[each] for each in await queries.plan_ids_of_policies(connection, tenant_id)}
    default = names.get(tenant.default_plan_id or "")
    found = find_differing_limits({plan.name: plan.limits for plan in plans}, used, default, tenant.time_zone)
    return [str(each) for each in found if names.get(plan_id) in each.plans][:MAX_WARNINGS]


async def document_warnings(connection: AsyncConnection, document: ConfigDocument) -> list[str]:
    """Return the warnings for the tenants whose plans or policies a document changes, as it leaves them."""
    tenants = [each for each in document.tenants or () if each.plans is not None or each.policies is not None]
    partly = [each.name for each in tenants if each.plans is None or each.policies is None]
    known = {each.name: each.id for each in await queries.find_where_in(connection, Tenant, "name", partly)}
    plans: dict[str, dict[str, Plan]] = defaultdict(dict)
    for plan in await queries.find_where_in(connection, Plan, "tenant_id", known.values()):
        plans[plan.tenant_id][plan.id] = plan
    policies: dict[str, list[Policy]] = defaultdict(list)
    for policy in await queries.find_where_in(connection, Policy, "tenant_id", known.values()):
        policies[policy.tenant_id].append(policy)
    found: list[str] = []
    for tenant in tenants:
        own = known.get(tenant.name, "")
        for each in _of_spec(tenant, plans[own], policies[own]):
            found.append(f"tenant {tenant.name}: {each}")
            if len(found) == MAX_WARNINGS:
                return [*found, "there may be more warnings, which are not shown"]
    return found


def _of_spec(tenant: TenantSpec, plans: Mapping[str, Plan], policies: Iterable[Policy]) -> list[DifferingLimits]:
    """Return the warnings for a tenant of a document; `plans` and `policies` are there already."""
    limits = {each.name: each.limits for each in (plans.values() if tenant.plans is None else tenant.plans)}
    if tenant.policies is None:
        used = {plans[each.plan_id].name for each in policies}
    else:
        used = {each.plan for each in tenant.policies}
    return find_differing_limits(limits, used, tenant.default_plan, tenant.time_zone)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    shown = ", ".join(names[:MAX_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown
