"""Compare the catalog with a document, and format the changes for people and programs."""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from limitforge.catalog.config.specs import (
    SECTIONS,
    ConfigDocument,
    KeySpec,
    OperatorSpec,
    OverrideSpec,
    PlanSpec,
    PolicySpec,
    Spec,
    TenantSpec,
    drop_expired,
    spec_to_dict,
)
from limitforge.catalog.config.strict_yaml import format_time


class Action(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"


_TITLE_FIELDS = ("name", "resource", "subject")  # the title of a change contains them
_SIGN = {Action.CREATE: "+", Action.UPDATE: "~", Action.DELETE: "-"}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """An entry to create, update or delete, as its specs before and after."""

    kind: str
    """tenant, plan, policy, key, override or operator."""
    tenant: str
    """The name of the tenant that owns it; empty for the operator."""
    name: str
    before: Spec | None
    after: Spec | None

    @property
    def action(self) -> Action:
        return Action.CREATE if self.before is None else Action.DELETE if self.after is None else Action.UPDATE

    @property
    def title(self) -> str:
        """The entry in words, such as `tenant acme / plan free`."""
        owner = f"tenant {_format_value(self.tenant)}" if self.tenant else "operator"
        return owner if self.kind in ("tenant", "operator") else f"{owner} / {self.kind} {_format_value(self.name)}"

    def field_changes(self) -> dict[str, tuple[Any, Any]]:
        """Return the values before and after of each field that differs, by path. `ABSENT` stands for no value.

        For a new entry, these are the fields that differ from the defaults. Hashes of secrets are never included.
        """
        if self.before is None:
            return {
                path: (ABSENT, value)
                for path, value in _flat_fields(self.after, spec_to_dict).items()
                if path not in _TITLE_FIELDS
            }
        before, after = _flat_fields(self.before, _all_fields), _flat_fields(self.after, _all_fields)
        found = {
            path: (before.get(path, ABSENT), after.get(path, ABSENT))
            for path in dict.fromkeys((*before, *after))
            if before.get(path, ABSENT) != after.get(path, ABSENT)
        }
        if isinstance(self.after, KeySpec) and self.after.secrets is None:
            found.pop("secrets", None)  # the key keeps its secrets
        elif "secrets" not in found and _has_other_secrets(self.before, self.after):
            found["secrets"] = (before.get("secrets"), "others")
        if not found and isinstance(self.before, PlanSpec) and isinstance(self.after, PlanSpec):
            found["limits"] = (_limit_names(self.before), _limit_names(self.after))  # only their order differs
        return found


ABSENT: Any = msgspec.UNSET


def diff_documents(
    document: ConfigDocument, current: ConfigDocument, now: datetime, *, prune: bool = False
) -> list[Change]:
    """Return the changes that make `current`, which must be complete, match the unexpired part of the document.

    Tenants that are not in the document are deleted if `prune` is true, and else not changed.
    """
    found: list[Change] = []
    if document.operator is not None:
        operator = current.operator or OperatorSpec()
        found += _diff_spec("operator", "", "operator", operator, document.operator)
        found += _diff_section("plan", "", operator.plans, document.operator.plans)
    existing = {each.name: each for each in current.tenants or ()}
    for tenant in document.tenants or ():
        found += _diff_tenant(existing.pop(tenant.name, None), drop_expired(tenant, now))
    if prune and document.tenants is not None:
        for tenant in existing.values():
            found.append(Change(kind="tenant", tenant=tenant.name, name=tenant.name, before=tenant, after=None))
    return found


def format_changes(changes: Iterable[Change]) -> Iterator[str]:
    """Yield lines for people: one for each change, followed by its fields."""
    for change in changes:
        yield f"{_SIGN[change.action]} {change.title}"
        if change.action is Action.DELETE:
            continue
        for path, (before, after) in change.field_changes().items():
            if change.action is Action.CREATE:
                yield f"    {_format_value(path)}: {_format_value(after)}"
            elif before is ABSENT:
                yield f"  + {_format_value(path)}: {_format_value(after)}"
            elif after is ABSENT:
                yield f"  - {_format_value(path)}: {_format_value(before)}"
            else:
                yield f"    {_format_value(path)}: {_format_value(before)} -> {_format_value(after)}"


def count_changes(changes: Iterable[Change]) -> tuple[int, int, int]:
    """Return the numbers of created, updated and deleted entries."""
    actions = [change.action for change in changes]
    return actions.count(Action.CREATE), actions.count(Action.UPDATE), actions.count(Action.DELETE)


def changes_to_json(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """Return the changes as plain values for JSON."""
    return [
        {
            "action": str(change.action),
            "kind": change.kind,
            "tenant": change.tenant or None,
            "name": change.name,
            "fields": {
                path: {name: value for name, value in (("before", before), ("after", after)) if value is not ABSENT}
                for path, (before, after) in change.field_changes().items()
            },
        }
        for change in changes
    ]


# --- Comparing -------------------------------------------------------------------------------------------------------


def spec_identity(spec: Any) -> Hashable:
    """Return what identifies an entry within its tenant and section."""
    match spec:
        case PolicySpec():
            return spec.canonical_pattern
        case KeySpec():
            return spec.id
        case OverrideSpec():
            return spec.resource, spec.subject
    name: str = spec.name
    return name


def _diff_tenant(before: TenantSpec | None, after: TenantSpec) -> Iterator[Change]:
    yield from _diff_spec("tenant", after.name, after.name, before, after)
    for kind, section in zip(("plan", "policy", "key", "override"), SECTIONS, strict=True):
        existing = None if before is None else getattr(before, section)
        yield from _diff_section(kind, after.name, existing, getattr(after, section))


def _diff_section(
    kind: str, tenant: str, before: Iterable[Spec] | None, after: Iterable[Spec] | None
) -> Iterator[Change]:
    if after is None:
        return
    existing = {spec_identity(each): each for each in before or ()}
    for spec in after:
        yield from _diff_spec(kind, tenant, _display_name(spec), existing.pop(spec_identity(spec), None), spec)
    for spec in existing.values():
        yield Change(kind=kind, tenant=tenant, name=_display_name(spec), before=spec, after=None)


def _diff_spec(kind: str, tenant: str, name: str, before: Spec | None, after: Spec) -> Iterator[Change]:
    if before is None or _comparable_fields(before, after) != _comparable_fields(after, after):
        yield Change(kind=kind, tenant=tenant, name=name, before=before, after=after)


def _comparable_fields(spec: Spec, wanted: Spec) -> dict[str, Any]:
    """Return the fields to compare: no sections, and secrets only if `wanted` has them."""
    return {
        name: getattr(spec, name)
        for name in spec.__struct_fields__
        if name not in SECTIONS and (name != "secrets" or getattr(wanted, name) is not None)
    }


# --- Formatting ------------------------------------------------------------------------------------------------------


def _display_name(spec: Any) -> str:
    match spec:
        case PolicySpec():
            return spec.resource
        case KeySpec():
            return f"{spec.name} ({spec.id})"
        case OverrideSpec():
            return f"{spec.subject} on {spec.resource}"
    name: str = spec.name
    return name


def _flat_fields(spec: Spec | None, to_fields: Callable[[Spec], dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a spec as plain values by path."""
    found: dict[str, Any] = {}
    for name, value in ({} if spec is None else to_fields(spec)).items():
        if isinstance(spec, PlanSpec) and name == "limits":
            for limit in value:
                found |= _flatten(f"limits.{limit['name']}", {k: v for k, v in limit.items() if k != "name"})
        elif name == "secrets":
            found[name] = f"{len(value)} under pepper {', '.join(sorted({str(each['pepper']) for each in value}))}"
        elif name not in SECTIONS and name != "id":
            found |= _flatten(name, value)
    return found


def _all_fields(spec: Spec) -> dict[str, Any]:
    """Return all fields with a value, including defaults."""
    values = {name: getattr(spec, name) for name in spec.__struct_fields__}
    present = {name: value for name, value in values.items() if value not in (None, "", {}, ())}
    return {**msgspec.to_builtins(present, builtin_types=(datetime,)), **spec_to_dict(spec)}


def _flatten(path: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        found: dict[str, Any] = {}
        for name, each in value.items():
            found |= _flatten(f"{path}.{name}", each)
        return found
    if isinstance(value, datetime):
        return {path: format_time(value)}
    return {path: list(value) if isinstance(value, tuple) else value}


def _has_other_secrets(before: Spec | None, after: Spec | None) -> bool:
    return isinstance(before, KeySpec) and isinstance(after, KeySpec) and before.secrets != after.secrets


def _limit_names(plan: PlanSpec) -> list[str]:
    return [limit["name"] for limit in plan.limits]


def _format_value(value: Any) -> str:
    """Format any value on one line."""
    if isinstance(value, str):
        return value if value.isprintable() and value.strip() == value and value else json.dumps(value)
    if isinstance(value, list):
        return ", ".join(_format_value(each) for each in value) or "none"
    return json.dumps(value)
