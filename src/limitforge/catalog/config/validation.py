"""What the parts of a configuration must be to each other: names that are there, and there once."""

from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

import msgspec

from limitforge.catalog.config.diagnostics import Diagnostics, join_path
from limitforge.catalog.config.specs import (
    SECTIONS,
    ConfigDocument,
    KeySpec,
    OperatorSpec,
    OverrideSpec,
    TenantSpec,
    build_tenant_config,
    operator_as_tenant,
)
from limitforge.catalog.model import MAX_OVERRIDE_DURATION, MAX_PLANS_PER_TENANT, MAX_POLICIES_PER_TENANT, TenantConfig
from limitforge.catalog.patterns import Pattern, PolicyMatcher
from limitforge.catalog.snapshot import limits_for_override
from limitforge.core.exact import short_repr
from limitforge.core.overrides import MAX_PER_SUBJECT, compile_override
from limitforge.errors import InvalidInput


def validate(
    document: ConfigDocument,
    current: ConfigDocument | None,
    now: datetime,
    problems: Diagnostics,
    only: Collection[str] | None = None,
) -> None:
    """What its parts must be to each other. `current` is what is there already, for sections that the document leaves
    alone; without it, whatever depends on those is not checked. `only` names the tenants to check, "" the operator.
    """
    there = {} if current is None else {each.name: each for each in current.tenants or ()}
    if document.operator is not None and (only is None or "" in only):
        known = None if current is None else operator_as_tenant(current.operator or OperatorSpec())
        _validate_tenant(
            "operator", operator_as_tenant(document.operator), known, now, problems, is_known=current is not None
        )
    tenants = document.tenants or ()
    if only is None:
        _check_unique("tenants", "name", (each.name for each in tenants), problems)
        ids = [(f"tenants[{at}]", each.keys or ()) for at, each in enumerate(tenants)]
        _check_keys_are_unique(ids, problems)
    for at, tenant in enumerate(tenants):
        if only is not None and tenant.name not in only:
            continue
        known = there.get(tenant.name)
        _validate_tenant(f"tenants[{at}]", tenant, known, now, problems, is_known=current is not None)


def _validate_tenant(
    path: str, tenant: TenantSpec, known: TenantSpec | None, now: datetime, problems: Diagnostics, *, is_known: bool
) -> None:
    whole = tenant
    for name in SECTIONS:
        if getattr(tenant, name) is None and is_known:
            whole = msgspec.structs.replace(whole, **{name: (known and getattr(known, name)) or ()})
    _validate_sections(path, tenant, now, problems)
    if whole.plans is not None:
        _check_plans_exist(path, tenant, whole, problems)
    if whole.policies is not None:
        with problems.at(join_path(path, "policies")):
            PolicyMatcher(
                {each.canonical_pattern: (Pattern.parse(each.resource), None) for each in whole.policies}.values()
            )
    if tenant.overrides and whole.plans is not None and whole.policies is not None:
        _validate_overrides(path, whole, now, problems)


def _validate_sections(path: str, tenant: TenantSpec, now: datetime, problems: Diagnostics) -> None:
    """What a tenant's own lists must be, whatever else there is."""
    _check_unique(f"{path}.plans", "name", (each.name for each in tenant.plans or ()), problems)
    _check_unique(f"{path}.policies", "resource", (each.canonical_pattern for each in tenant.policies or ()), problems)
    places = [(each.resource, each.subject) for each in tenant.overrides or ()]
    _check_unique(f"{path}.overrides", "subject", places, problems, what="an override of this resource and subject")
    for name, specs, most in (
        ("plans", tenant.plans, MAX_PLANS_PER_TENANT),
        ("policies", tenant.policies, MAX_POLICIES_PER_TENANT),
    ):
        if specs is not None and len(specs) > most:
            problems.add(f"{path}.{name}", f"at most {most} of one tenant, got {len(specs)}")
    for at, override in enumerate(tenant.overrides or ()):
        if override.expires_at > now + MAX_OVERRIDE_DURATION:
            problems.add(f"{path}.overrides[{at}].expires_at", "must lie at most ten years from now")
    living = Counter(each.subject for each in tenant.overrides or () if each.expires_at > now)
    for subject, count in living.items():
        if count > MAX_PER_SUBJECT:
            why = f"one subject may have at most {MAX_PER_SUBJECT}, and {short_repr(subject)} has {count}"
            problems.add(f"{path}.overrides", why)


def _check_unique(
    path: str, field: str, values: Iterable[Any], problems: Diagnostics, what: str = "one of the same"
) -> None:
    first: dict[Any, int] = {}
    for at, value in enumerate(values):
        if value in first:
            problems.add(f"{path}[{at}].{field}", f"there is {what} already, {path}[{first[value]}]")
        first.setdefault(value, at)


def _check_keys_are_unique(owners: Iterable[tuple[str, Iterable[KeySpec]]], problems: Diagnostics) -> None:
    first: dict[str, str] = {}
    for path, keys in owners:
        for at, key in enumerate(keys):
            place = f"{path}.keys[{at}]"
            for field, values in (("id", [key.id]), ("secrets", [each.hash for each in key.secrets or ()])):
                for value in values:
                    if value in first:
                        problems.add(f"{place}.{field}", f"is the same as that of {first[value]}")
                    first.setdefault(value, place)


def _check_plans_exist(path: str, tenant: TenantSpec, whole: TenantSpec, problems: Diagnostics) -> None:
    known = {plan.name for plan in whole.plans or ()}
    is_operator = path == "operator"

    def check_one(name: str | None, place: str, user: str) -> None:
        if name is None or name in known:
            return
        if place:
            there = ", ".join(sorted(known)[:10]) or "none"
            problems.add(f"{path}.{place}", f"there is no plan {short_repr(name)} here; there are {there}")
        else:
            problems.add(f"{path}.plans", f"plan {name} is missing, and {user}, which this file leaves alone, uses it")

    check_one(tenant.default_plan, "plan" if is_operator else "default_plan", "")
    for at, policy in enumerate(whole.policies or ()):
        for field in ("plan", "shadow_plan"):
            place = "" if tenant.policies is None else f"policies[{at}].{field}"
            check_one(getattr(policy, field), place, f"policy {policy.resource}")
    for at, key in enumerate(whole.keys or ()):
        check_one(key.plan, "" if tenant.keys is None else f"keys[{at}].plan", f"key {key.name}")


def _validate_overrides(path: str, tenant: TenantSpec, now: datetime, problems: Diagnostics) -> None:
    try:
        reach = OverrideValidator(tenant)
    except InvalidInput:
        return  # something else is wrong with it, and was told
    for at, override in enumerate(tenant.overrides or ()):
        if override.expires_at > now:
            with problems.at(f"{path}.overrides[{at}]"):
                reach.validate(override)


class OverrideValidator:
    """Which limits the overrides of a tenant mean."""

    def __init__(self, tenant: TenantSpec) -> None:
        self._config = build_tenant_config(tenant, lambda *names: "/".join(names)[:200])
        self._table = PolicyMatcher((policy.pattern, policy) for policy in self._config.policies)

    def validate(self, override: OverrideSpec) -> None:
        """Refuse one that changes no limit, or changes it to what it can't be."""
        policy = self._table.match(override.resource)
        near = TenantConfig(self._config.tenant, self._config.plans, () if policy is None else (policy,))
        compile_override(
            override.limits, limits_for_override(near, override.resource, override.limits), override.resource
        )

    def valid_part(self, override: OverrideSpec) -> OverrideSpec | None:
        """What of it still means a limit; None if nothing does."""
        limits = {}
        for name, change in override.limits.items():
            one = msgspec.structs.replace(override, limits={name: change})
            try:
                self.validate(one)
            except InvalidInput:
                continue
            limits[name] = change
        return msgspec.structs.replace(override, limits=limits) if limits else None
