"""Compile the configuration of a tenant into an immutable snapshot, which selects the limits of each check."""

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

MAX_SELECTIONS = 32_768  # of one tenant: as many as it can have policies, and some more

_STRENGTH = {Mode.OFF: 0, Mode.MONITOR: 1, Mode.ON: 2}


class Selection(msgspec.Struct, frozen=True, eq=False):
    """The limits that apply to a check, and how they are evaluated. Compiled once and shared by all such checks."""

    limits: Limits
    shadow: Limits | None
    failure: Failure | None
    priority: Priority | None
    mode: Mode
    """`off` or `monitor` if the operator, the tenant or the policy sets this mode for all limits."""
    counted_resource: str | None
    """The resource that is counted if a policy with parameters matched: `/orders/1` and `/orders/2` share a count."""
    headers: HeaderTemplate
    policy: Policy | None
    plans: tuple[tuple[Layer, Plan], ...]
    """The plans that apply, each with its layer."""

    @property
    def is_matched(self) -> bool:
        return bool(self.plans)


class Snapshot:
    """The compiled configuration of a tenant and of the operator above it. Selects the limits of a check."""

    __slots__ = ("_header_options", "_matcher", "_plans", "_selections", "config", "operator")

    def __init__(
        self, config: TenantConfig, operator: TenantConfig, header_options: HeaderOptions | None = None
    ) -> None:
        self.config = config
        self.operator = operator
        self._header_options = header_options or HeaderOptions()
        self._plans = {plan.id: plan for plan in config.plans}
        self._matcher = _policy_matcher(tuple(policy.resource for policy in config.policies))
        self._selections: dict[tuple[int | None, str | None, str | None], Selection] = {}

    @property
    def tenant(self) -> Tenant:
        return self.config.tenant

    @property
    def revision(self) -> int:
        return self.config.tenant.revision

    def with_operator(self, operator: TenantConfig) -> "Snapshot":
        """Return a snapshot of the same tenant under a changed operator."""
        other = object.__new__(Snapshot)
        other.config, other.operator, other._header_options = self.config, operator, self._header_options
        other._plans, other._matcher, other._selections = self._plans, self._matcher, {}
        return other

    def select(self, resource: str, key_plan_id: str | None = None, plan_id: str | None = None) -> Selection:
        """Return the limits that apply to a check of `resource`.

        `key_plan_id` is the plan of the caller's key, `plan_id` the plan that the check itself asks for. Raises
        `NotFound` if the tenant has no such plan.
        """
        index = self._matcher.match(resource)
        cache_key = (index, key_plan_id, plan_id)
        try:
            return self._selections[cache_key]
        except KeyError:
            selection = self._select(None if index is None else self.config.policies[index], key_plan_id, plan_id)
        if len(self._selections) >= MAX_SELECTIONS:
            self._selections.clear()
        self._selections[cache_key] = selection
        return selection

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and (self.config, self.operator) == (other.config, other.operator)

    __hash__ = None  # type: ignore[assignment]

    def _select(self, policy: Policy | None, key_plan_id: str | None, plan_id: str | None) -> Selection:
        operator, tenant = self.operator.tenant, self.tenant
        inherited = weakest_mode(operator.mode, tenant.mode)
        layers: list[tuple[Layer, Plan, Mode, str]] = []
        if operator.default_plan_id is not None:
            plan = next(plan for plan in self.operator.plans if plan.id == operator.default_plan_id)
            layers.append((Layer.OPERATOR, plan, operator.mode, operator.time_zone))
        if plan_id is not None:
            if plan_id not in self._plans:
                raise NotFound(f"plan_id: this tenant has no plan {plan_id[:64]!r}")
            layers.append((Layer.POLICY, self._plans[plan_id], inherited, tenant.time_zone))
        else:
            default = self._plans.get(key_plan_id or "") or self._plans.get(tenant.default_plan_id or "")
            if default is not None:
                layers.append((Layer.TENANT, default, inherited, tenant.time_zone))
            if policy is not None:
                mode = weakest_mode(inherited, policy.mode)
                layers.append((Layer.POLICY, self._plans[policy.plan_id], mode, tenant.time_zone))
        parts = tuple((plan.compile(zone), layer, mode) for layer, plan, mode, zone in layers)
        limits, headers = _join_parts(parts, self._header_options)
        return Selection(
            limits=limits,
            shadow=self._shadow(policy, inherited),
            failure=(policy.failure if policy is not None else None) or tenant.failure,
            priority=(policy.priority if policy is not None else None) or tenant.priority,
            mode=max((mode for *_, mode, _ in layers), key=_STRENGTH.__getitem__, default=inherited),
            counted_resource=policy.resource if policy is not None and policy.pattern.is_template else None,
            headers=headers,
            policy=policy,
            plans=tuple((layer, plan) for layer, plan, *_ in layers),
        )

    def _shadow(self, policy: Policy | None, inherited: Mode) -> Limits | None:
        if policy is None or policy.shadow_plan_id is None or weakest_mode(inherited, policy.mode) is Mode.OFF:
            return None
        return self._plans[policy.shadow_plan_id].compile(self.tenant.time_zone)


@lru_cache(maxsize=4_096)
def _join_parts(
    parts: tuple[tuple[Limits, Layer, Mode], ...], header_options: HeaderOptions
) -> tuple[Limits, HeaderTemplate]:
    """Join the limits of several plans. Tenants with equal plans share the result."""
    limits = join_limits(*(PlanPart(*part) for part in parts))
    return limits, HeaderTemplate.compile(limits, header_options.styles, header_options.reset)


@lru_cache(maxsize=256)
def _policy_matcher(resources: tuple[str, ...]) -> PolicyMatcher[int]:
    """Return a matcher from resources to the indexes of their policies. Tenants with the same resources share it."""
    return PolicyMatcher((Pattern.parse(resource), index) for index, resource in enumerate(resources))


def limits_for_override(config: TenantConfig, resource: str, names: Iterable[Any]) -> Limits:
    """Return the limits of a tenant that an override of `resource` changes, by their names.

    The plan of the resource's policy takes precedence over the default plan, and both over the other plans. A limit
    that overrides do not apply to is returned only if no other limit has its name. Raises `InvalidInput` for an unknown
    name.
    """
    found: dict[str, Limit] = {}
    wanted = list(names)
    for limit in _by_precedence(config, resource):
        known = found.get(limit.name)
        if known is None or (not _is_overridable(known) and _is_overridable(limit)):
            found[limit.name] = limit
    for name in wanted:
        if name not in found:
            known_names = ", ".join(sorted(name for name, limit in found.items() if _is_overridable(limit))) or "none"
            raise InvalidInput(
                f"limits.{name!s:.64}", f"no plan of this tenant has a limit of that name; there are {known_names}"
            )
    return Limits(*(found[name] for name in wanted))


def _is_overridable(limit: Limit) -> bool:
    return limit.scope in (Scope.SUBJECT, Scope.CALLER)


def _by_precedence(config: TenantConfig, resource: str) -> Iterator[Limit]:
    index = _policy_matcher(tuple(policy.resource for policy in config.policies)).match(resource)
    first = (None if index is None else config.policies[index].plan_id, config.tenant.default_plan_id)
    plans = sorted(config.plans, key=lambda plan: (first.index(plan.id) if plan.id in first else len(first), plan.name))
    for plan in plans:
        yield from plan.compile(config.tenant.time_zone)
