"""Validate a configuration document as a whole: referenced names exist, and names are unique."""

from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

import msgspec

from limitforge.catalog.config.diagnostics import Diagnostics, join_path
from limitforge.catalog.config.specs import (
    OPERATOR_NAME,
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
    diagnostics: Diagnostics,
    only: Collection[str] | None = None,
) -> None:
    """Add every inconsistency of the document to `diagnostics`.

    `current` is the state of the catalog. It fills in sections that the document omits; without it, checks that need
    such a section are skipped. `only` restricts the checks to these tenants; `OPERATOR_NAME` is the operator.
    """
    current_tenants = {} if current is None else {each.name: each for each in current.tenants or ()}
    if document.operator is not None and (only is None or OPERATOR_NAME in only):
        existing = None if current is None else operator_as_tenant(current.operator or OperatorSpec())
        _validate_tenant(
            "operator",
            operator_as_tenant(document.operator),
            existing,
            now,
            diagnostics,
        )
    tenants = document.tenants or ()
    if only is None:
        _validate_unique("tenants", "name", (each.name for each in tenants), diagnostics)
        owners = [(f"tenants[{index}]", each.keys or ()) for index, each in enumerate(tenants)]
        _validate_unique_keys(owners, diagnostics)
    for index, tenant in enumerate(tenants):
        if only is not None and tenant.name not in only:
            continue
        existing = None if current is None else current_tenants.get(tenant.name, TenantSpec(name=tenant.name))
        _validate_tenant(f"tenants[{index}]", tenant, existing, now, diagnostics)


def _validate_tenant(
    path: str, tenant: TenantSpec, existing: TenantSpec | None, now: datetime, diagnostics: Diagnostics
) -> None:
    """Validate one tenant. Sections that it omits come from `existing`, which is None if the catalog was not read."""
    completed = tenant
    for name in SECTIONS:
        if getattr(tenant, name) is None and existing is not None:
            completed = msgspec.structs.replace(completed, **{name: getattr(existing, name) or ()})
    _validate_sections(path, tenant, now, diagnostics)
    if completed.plans is not None:
        _validate_plan_references(path, tenant, completed, diagnostics)
    if completed.policies is not None:
        with diagnostics.at(join_path(path, "policies")):
            PolicyMatcher(
                {each.canonical_pattern: (Pattern.parse(each.resource), None) for each in completed.policies}.values()
            )
    if tenant.overrides and completed.plans is not None and completed.policies is not None:
        _validate_overrides(path, completed, now, diagnostics)


def _validate_sections(path: str, tenant: TenantSpec, now: datetime, diagnostics: Diagnostics) -> None:
    """Check the sections of a tenant that need nothing else: unique names, numbers of entries, expiries."""
    _validate_unique(f"{path}.plans", "name", (each.name for each in tenant.plans or ()), diagnostics)
    _validate_unique(
        f"{path}.policies", "resource", (each.canonical_pattern for each in tenant.policies or ()), diagnostics
    )
    targets = [(each.resource, each.subject) for each in tenant.overrides or ()]
    _validate_unique(f"{path}.overrides", "subject", targets, diagnostics, " the resource and subject of")
    for name, specs, maximum in (
        ("plans", tenant.plans, MAX_PLANS_PER_TENANT),
        ("policies", tenant.policies, MAX_POLICIES_PER_TENANT),
    ):
        if specs is not None and len(specs) > maximum:
            diagnostics.add(f"{path}.{name}", f"at most {maximum} of one tenant, got {len(specs)}")
    for index, override in enumerate(tenant.overrides or ()):
        if override.expires_at > now + MAX_OVERRIDE_DURATION:
            diagnostics.add(f"{path}.overrides[{index}].expires_at", "must lie at most ten years from now")
    unexpired = Counter(each.subject for each in tenant.overrides or () if each.expires_at > now)
    for subject, count in unexpired.items():
        if count > MAX_PER_SUBJECT:
            why = f"one subject may have at most {MAX_PER_SUBJECT}, and {short_repr(subject)} has {count}"
            diagnostics.add(f"{path}.overrides", why)


def _validate_unique(
    path: str, field: str, values: Iterable[Any], diagnostics: Diagnostics, description: str = ""
) -> None:
    first: dict[Any, int] = {}
    for index, value in enumerate(values):
        if value in first:
            diagnostics.add(f"{path}[{index}].{field}", f"duplicates{description} {path}[{first[value]}]")
        first.setdefault(value, index)


def _validate_unique_keys(owners: Iterable[tuple[str, Iterable[KeySpec]]], diagnostics: Diagnostics) -> None:
    first: dict[str, str] = {}
    for path, keys in owners:
        for index, key in enumerate(keys):
            key_path = f"{path}.keys[{index}]"
            for field, values in (("id", [key.id]), ("secrets", [each.hash for each in key.secrets or ()])):
                for value in values:
                    if value in first:
                        diagnostics.add(f"{key_path}.{field}", f"is the same as that of {first[value]}")
                    first.setdefault(value, key_path)


def _validate_plan_references(path: str, tenant: TenantSpec, completed: TenantSpec, diagnostics: Diagnostics) -> None:
    known = {plan.name for plan in completed.plans or ()}
    is_operator = path == "operator"

    def check_one(name: str | None, field: str, user: str) -> None:
        """Check a reference to a plan. `field` is empty if the document omits the section of `user`."""
        if name is None or name in known:
            return
        if field:
            names = ", ".join(sorted(known)[:10]) or "none"
            diagnostics.add(f"{path}.{field}", f"unknown plan {short_repr(name)}; known plans: {names}")
        else:
            diagnostics.add(
                f"{path}.plans", f"plan {name} is missing, but {user} uses it, which this file does not change"
            )

    check_one(tenant.default_plan, "plan" if is_operator else "default_plan", "")
    for index, policy in enumerate(completed.policies or ()):
        for field in ("plan", "shadow_plan"):
            field_path = "" if tenant.policies is None else f"policies[{index}].{field}"
            check_one(getattr(policy, field), field_path, f"policy {policy.resource}")
    for index, key in enumerate(completed.keys or ()):
        check_one(key.plan, "" if tenant.keys is None else f"keys[{index}].plan", f"key {key.name}")


def _validate_overrides(path: str, tenant: TenantSpec, now: datetime, diagnostics: Diagnostics) -> None:
    try:
        validator = OverrideValidator(tenant)
    except InvalidInput:
        return  # the plans or policies are invalid, which was reported already
    for index, override in enumerate(tenant.overrides or ()):
        if override.expires_at > now:
            with diagnostics.at(f"{path}.overrides[{index}]"):
                validator.validate(override)


class OverrideValidator:
    """Validates overrides of a tenant against the limits that they change."""

    def __init__(self, tenant: TenantSpec) -> None:
        self._config = build_tenant_config(tenant, lambda *names: "/".join(names)[:200])
        self._matcher = PolicyMatcher((policy.pattern, policy) for policy in self._config.policies)

    def validate(self, override: OverrideSpec) -> None:
        """Raise `InvalidInput` if an override changes an unknown limit, or changes a limit to an invalid one."""
        policy = self._matcher.match(override.resource)
        # One policy is enough, which avoids building a matcher of all policies for each override.
        config = TenantConfig(self._config.tenant, self._config.plans, () if policy is None else (policy,))
        compile_override(
            override.limits, limits_for_override(config, override.resource, override.limits), override.resource
        )

    def valid_part(self, override: OverrideSpec) -> OverrideSpec | None:
        """Return the override with only its valid changes, or None if it has none."""
        limits = {}
        for name, change in override.limits.items():
            one = msgspec.structs.replace(override, limits={name: change})
            try:
                self.validate(one)
            except InvalidInput:
                continue
            limits[name] = change
        return msgspec.structs.replace(override, limits=limits) if limits else None
