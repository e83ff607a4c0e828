"""Warn if limits with the same name in several plans of a tenant keep separate counts.

The window is part of a counter's key, so limits with the same name and different windows never share a count. If two
such plans apply to one caller or tenant, each admits its own number, which is rarely intended.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from limitforge.catalog.model import TenantConfig
from limitforge.core.limits import Quota, Scope, limit_from_fields
from limitforge.observability.events import log_event

MAX_WARNINGS = 20
MAX_NAMED = 5
MAX_LOGGED = 4_096

# Plans of two policies never decide the same resource, so they can only meet in caller and tenant limits. Plans of two
# keys can also meet in the limits of a resource.
_SHARED_BY_POLICIES = frozenset({Scope.CALLER, Scope.TENANT})
_SHARED_BY_KEYS = _SHARED_BY_POLICIES | {Scope.RESOURCE}

_log = logging.getLogger(__name__)


class DifferingLimits(msgspec.Struct, frozen=True):
    """Limits in several plans with the same name, algorithm and scope, and different windows."""

    limit: str
    plans: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"limit {self.limit} has different windows in the plans {_format_names(self.plans)}, so each keeps its own "
            "count. Give the limits different names, or the same window"
        )


def find_differing_limits(
    plans: Mapping[str, Sequence[Mapping[str, Any]]],
    policy_plans: Collection[str],
    default_plan: str | None,
    time_zone: str,
) -> list[DifferingLimits]:
    """Return the limits of a tenant's plans that have the same name and keep separate counts.

    `plans` are the limits of each plan by its name, `policy_plans` the plans that policies use. The plans of policies
    are compared with each other, and so are the default plan and the plans of keys. A plan that no policy uses counts
    as the plan of a key.
    """
    if len(plans) < 2:
        return []
    key_plans = [name for name in plans if name not in policy_plans or name == default_plan]
    policy_plan_names = [name for name in plans if name in policy_plans]
    return [
        *_differing(plans, policy_plan_names, _SHARED_BY_POLICIES, time_zone),
        *_differing(plans, key_plans, _SHARED_BY_KEYS, time_zone),
    ]


def _differing(
    plans: Mapping[str, Sequence[Mapping[str, Any]]], names: Iterable[str], scopes: Collection[str], time_zone: str
) -> Iterator[DifferingLimits]:
    same_name: dict[tuple[str, str, str], list[tuple[str, Mapping[str, Any]]]] = defaultdict(list)
    for plan in names:
        for fields in plans[plan]:
            scope = fields.get("scope", Scope.SUBJECT)
            if scope in scopes:
                same_name[fields["name"], fields["algorithm"], scope].append((plan, fields))
    for (name, *_), found in same_name.items():
        by_shape: dict[str, list[str]] = defaultdict(list)
        if len(found) > 1:
            for plan, fields in found:
                by_shape[_shape(fields, time_zone)].append(plan)
        if len(by_shape) > 1:
            yield DifferingLimits(name, tuple(sorted(plan for names in by_shape.values() for plan in names)))


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
def _log_once(tenant: str, revision: int, differing: DifferingLimits) -> None:
    log_event(
        _log,
        logging.WARNING,
        "catalog.limits_differ",
        "limits with the same name have different windows, so each plan keeps its own count",
        tenant=tenant,
        revision=revision,
        limit=differing.limit,
        plans=",".join(differing.plans[:MAX_NAMED]),
    )


def _format_names(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    shown = ", ".join(names[:MAX_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown
