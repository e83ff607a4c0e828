"""The difference between what is there and what a document says, and that difference as a person reads it."""

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


_TITLE_FIELDS = ("name", "resource", "subject")  # what the title of something new says already
_SIGN = {Action.CREATE: "+", Action.UPDATE: "~", Action.DELETE: "-"}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is to be created, updated or deleted; `before` and `after` are what is said of it."""

    kind: str
    """tenant, plan, policy, key, override or operator."""
    tenant: str
    """The name of the one whose it is; empty for the operator's."""
    name: str
    before: Spec | None
    after: Spec | None

    @property
    def action(self) -> Action:
        return Action.CREATE if self.before is None else Action.DELETE if self.after is None else Action.UPDATE

    @property
    def title(self) -> str:
        owner = f"tenant {_format_value(self.tenant)}" if self.tenant else "operator"
        return owner if self.kind in ("tenant", "operator") else f"{owner} / {self.kind} {_format_value(self.name)}"

    def field_changes(self) -> dict[str, tuple[Any, Any]]:
        """What differs, by its path, before and after; `ABSENT` on one side where there is nothing. Hashes are never
        among it. Of something new, this is what differs from the defaults.
        """
        if self.before is None:
            return {
                path: (ABSENT, value)
                for path, value in _flat_fields(self.after, spec_to_dict).items()
                if path not in _TITLE_FIELDS
            }
        before, after = _flat_fields(self.before, _with_defaults), _flat_fields(self.after, _with_defaults)
        found = {
            path: (before.get(path, ABSENT), after.get(path, ABSENT))
            for path in dict.fromkeys((*before, *after))
            if before.get(path, ABSENT) != after.get(path, ABSENT)
        }
        if isinstance(self.after, KeySpec) and self.after.secrets is None:
            found.pop("secrets", None)  # it keeps those that it has
        elif "secrets" not in found and _has_other_secrets(self.before, self.after):
            found["secrets"] = (before.get("secrets"), "others")
        if not found and isinstance(self.before, PlanSpec) and isinstance(self.after, PlanSpec):
            found["limits"] = (_limit_names(self.before), _limit_names(self.after))  # in another order
        return found


ABSENT: Any = msgspec.UNSET


def diff_documents(
    document: ConfigDocument, current: ConfigDocument, now: datetime, *, prune: bool = False
) -> list[Change]:
    """What makes `current`, which is complete, say what the document says of what has not expired. Tenants that the
    document does not name are left alone, unless they are to be pruned.
    """
    found: list[Change] = []
    if document.operator is not None:
        operator = current.operator or OperatorSpec()
        found += _diff_spec("operator", "", "operator", operator, document.operator)
        found += _diff_section("plan", "", operator.plans, document.operator.plans)
    there = {each.name: each for each in current.tenants or ()}
    for tenant in document.tenants or ():
        found += _diff_tenant(there.pop(tenant.name, None), drop_expired(tenant, now))
    if prune and document.tenants is not None:
        for tenant in there.values():
            found.append(Change(kind="tenant", tenant=tenant.name, name=tenant.name, before=tenant, after=None))
    return found


def format_changes(changes: Iterable[Change]) -> Iterator[str]:
    """Lines for a person: what happens to what, and under it field by field."""
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
    """How many are created, changed and deleted."""
    actions = [change.action for change in changes]
    return actions.count(Action.CREATE), actions.count(Action.UPDATE), actions.count(Action.DELETE)


def changes_to_json(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """For programs: the same as JSON would have it."""
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
    """What makes two of a tenant's one and the same."""
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
        there = None if before is None else getattr(before, section)
        yield from _diff_section(kind, after.name, there, getattr(after, section))


def _diff_section(
    kind: str, tenant: str, before: Iterable[Spec] | None, after: Iterable[Spec] | None
) -> Iterator[Change]:
    if after is None:
        return
    there = {spec_identity(each): each for each in before or ()}
    for spec in after:
        yield from _diff_spec(kind, tenant, _display_name(spec), there.pop(spec_identity(spec), None), spec)
    for spec in there.values():
        yield Change(kind=kind, tenant=tenant, name=_display_name(spec), before=spec, after=None)


def _diff_spec(kind: str, tenant: str, name: str, before: Spec | None, after: Spec) -> Iterator[Change]:
    if before is None or _comparable_fields(before, after) != _comparable_fields(after, after):
        yield Change(kind=kind, tenant=tenant, name=name, before=before, after=after)


def _comparable_fields(spec: Spec, wanted: Spec) -> dict[str, Any]:
    """What is compared of it: not its sections, and no secrets where none are wanted."""
    return {
        name: getattr(spec, name)
        for name in spec.__struct_fields__
        if name not in SECTIONS and (name != "secrets" or getattr(wanted, name) is not None)
    }


# --- In words --------------------------------------------------------------------------------------------------------


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


def _flat_fields(spec: Spec | None, said: Callable[[Spec], dict[str, Any]]) -> dict[str, Any]:
    """Its fields, each as a path and a plain value."""
    found: dict[str, Any] = {}
    for name, value in ({} if spec is None else said(spec)).items():
        if isinstance(spec, PlanSpec) and name == "limits":
            for limit in value:
                found |= _flatten(f"limits.{limit['name']}", {k: v for k, v in limit.items() if k != "name"})
        elif name == "secrets":
            found[name] = f"{len(value)} under pepper {', '.join(sorted({str(each['pepper']) for each in value}))}"
        elif name not in SECTIONS and name != "id":
            found |= _flatten(name, value)
    return found


def _with_defaults(spec: Spec) -> dict[str, Any]:
    """With its defaults, except for what is nothing."""
    everything = {name: getattr(spec, name) for name in spec.__struct_fields__}
    there = {name: value for name, value in everything.items() if value not in (None, "", {}, ())}
    return {**msgspec.to_builtins(there, builtin_types=(datetime,)), **spec_to_dict(spec)}


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
    """On one line, whatever it is."""
    if isinstance(value, str):
        return value if value.isprintable() and value.strip() == value and value else json.dumps(value)
    if isinstance(value, list):
        return ", ".join(_format_value(each) for each in value) or "none"
    return json.dumps(value)
