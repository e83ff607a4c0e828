"""A tenant's whole configuration, compiled and immutable: what the limiter reads."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from limitforge.catalog.model import Plan, Policy, Tenant, TenantConfig
from limitforge.catalog.patterns import Pattern, PolicyMatcher
from limitforge.core.check import Failure
from limitforge.core.headers import HeaderOptions, HeaderTemplate
from limitforge.core.join import PlanPart, join_limits
from limitforge.core.keys import Layer
from limitforge.core.limits import Limit, Mode, Priority, Scope
from limitforge.core.plan import Limits, weakest_mode
from limitforge.errors import InvalidInput, NotFound

MAX_SELECTIONS = 32_768  # of one tenant: as many as it has policies, and a few more

_STRENGTH = {Mode.OFF: 0, Mode.MONITOR: 1, Mode.ON: 2}


class Selection(msgspec.Struct, frozen=True, eq=False):
    """What decides a check: limits that are judged together, and how. Made once, used by every check alike."""

    limits: Limits
    shadow: Limits | None
    failure: Failure | None
    priority: Priority | None
    mode: Mode
    """`off` or `monitor` if a mode above the limits says so for all of them."""
    template: str | None
    """The resource that is counted, where a policy with parameters matched: `/orders/1` and `/orders/2` are one."""
    headers: HeaderTemplate
    policy: Policy | None
    plans: tuple[tuple[Layer, Plan], ...]
    """Which plans joined, and in which place."""

    @property
    def is_matched(self) -> bool:
        return bool(self.plans)


class Snapshot:
    """What decides for a tenant, and what the operator says above it."""

    __slots__ = ("_form", "_plans", "_selections", "_table", "config", "operator")

    def __init__(self, config: TenantConfig, operator: TenantConfig, form: HeaderOptions | None = None) -> None:
        self.config = config
        self.operator = operator
        self._form = form or HeaderOptions()
        self._plans = {plan.id: plan for plan in config.plans}
        self._table = _table(tuple(policy.resource for policy in config.policies))
        self._selections: dict[tuple[int | None, str | None, str | None], Selection] = {}

    @property
    def tenant(self) -> Tenant:
        return self.config.tenant

    @property
    def revision(self) -> int:
        return self.config.tenant.revision

    def with_operator(self, operator: TenantConfig) -> "Snapshot":
        """The same tenant after a change of the operator's plan or mode."""
        other = object.__new__(Snapshot)
        other.config, other.operator, other._form = self.config, operator, self._form
        other._plans, other._table, other._selections = self._plans, self._table, {}
        return other

    def select(self, resource: str, key_plan_id: str | None = None, plan_id: str | None = None) -> Selection:
        """What decides a check of this resource; `key_plan_id` is the plan of the key, `plan_id` what the check itself
        asks for, which must be this tenant's.
        """
        at = self._table.match(resource)
        wanted = (at, key_plan_id, plan_id)
        try:
            return self._selections[wanted]
        except KeyError:
            selection = self._select(None if at is None else self.config.policies[at], key_plan_id, plan_id)
        if len(self._selections) >= MAX_SELECTIONS:
            self._selections.clear()
        self._selections[wanted] = selection
        return selection

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and (self.config, self.operator) == (other.config, other.operator)

    __hash__ = None  # type: ignore[assignment]

    def _select(self, policy: Policy | None, key_plan_id: str | None, plan_id: str | None) -> Selection:
        fleet, tenant = self.operator.tenant, self.tenant
        above = weakest_mode(fleet.mode, tenant.mode)
        places: list[tuple[Layer, Plan, Mode, str]] = []
        if fleet.default_plan_id is not None:
            plan = next(plan for plan in self.operator.plans if plan.id == fleet.default_plan_id)
            places.append((Layer.OPERATOR, plan, fleet.mode, fleet.time_zone))
        if plan_id is not None:
            if plan_id not in self._plans:
                raise NotFound(f"plan_id: this tenant has no plan {plan_id[:64]!r}")
            places.append((Layer.POLICY, self._plans[plan_id], above, tenant.time_zone))
        else:
            default = self._plans.get(key_plan_id or "") or self._plans.get(tenant.default_plan_id or "")
            if default is not None:
                places.append((Layer.TENANT, default, above, tenant.time_zone))
            if policy is not None:
                mode = weakest_mode(above, policy.mode)
                places.append((Layer.POLICY, self._plans[policy.plan_id], mode, tenant.time_zone))
        parts = tuple((plan.compile(zone), place, mode) for place, plan, mode, zone in places)
        limits, headers = _joined(parts, self._form)
        return Selection(
            limits=limits,
            shadow=self._shadow(policy, above),
            failure=(policy.failure if policy is not None else None) or tenant.failure,
            priority=(policy.priority if policy is not None else None) or tenant.priority,
            mode=max((mode for *_, mode, _ in places), key=_STRENGTH.__getitem__, default=above),
            template=policy.resource if policy is not None and policy.pattern.is_template else None,
            headers=headers,
            policy=policy,
            plans=tuple((place, plan) for place, plan, *_ in places),
        )

    def _shadow(self, policy: Policy | None, above: Mode) -> Limits | None:
        if policy is None or policy.shadow_plan_id is None or weakest_mode(above, policy.mode) is Mode.OFF:
            return None
        return self._plans[policy.shadow_plan_id].compile(self.tenant.time_zone)


@lru_cache(maxsize=4_096)
def _joined(parts: tuple[tuple[Limits, Layer, Mode], ...], form: HeaderOptions) -> tuple[Limits, HeaderTemplate]:
    """Tenants with equal plans share what is compiled of them."""
    limits = join_limits(*(PlanPart(*part) for part in parts))
    return limits, HeaderTemplate.compile(limits, form.styles, form.reset)


@lru_cache(maxsize=256)
def _table(resources: tuple[str, ...]) -> PolicyMatcher[int]:
    """From resources to the numbers of their policies; tenants with the same resources share it."""
    return PolicyMatcher((Pattern.parse(resource), at) for at, resource in enumerate(resources))


def limits_for_override(config: TenantConfig, resource: str, names: Iterable[Any]) -> Limits:
    """The limits of a tenant that an override means by these names: those of the policy for its resource, else of the
    default plan, else of any other. Only what an override reaches counts, unless nothing else has that name.
    """
    found: dict[str, Limit] = {}
    wanted = list(names)
    for limit in _by_nearness(config, resource):
        known = found.get(limit.name)
        if known is None or (not _is_reached(known) and _is_reached(limit)):
            found[limit.name] = limit
    for name in wanted:
        if name not in found:
            there = ", ".join(sorted(name for name, limit in found.items() if _is_reached(limit))) or "none"
            raise InvalidInput(
                f"limits.{name!s:.64}", f"no plan of this tenant has a limit of that name; there are {there}"
            )
    return Limits(*(found[name] for name in wanted))


def _is_reached(limit: Limit) -> bool:
    return limit.scope in (Scope.SUBJECT, Scope.CALLER)


def _by_nearness(config: TenantConfig, resource: str) -> Iterator[Limit]:
    at = _table(tuple(policy.resource for policy in config.policies)).match(resource)
    first = (None if at is None else config.policies[at].plan_id, config.tenant.default_plan_id)
    nearest = sorted(
        config.plans, key=lambda plan: (first.index(plan.id) if plan.id in first else len(first), plan.name)
    )
    for plan in nearest:
        yield from plan.compile(config.tenant.time_zone)
