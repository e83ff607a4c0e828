"""Overrides: other numbers for one tenant, resource and subject, compiled when they are set."""

import json
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec

from limitforge.core.exact import MICROS, shown
from limitforge.core.limits import Limit, Scope
from limitforge.core.plan import Limits
from limitforge.errors import InvalidInput, InvalidLimit

ANY_RESOURCE = "*"
MAX_PER_SUBJECT = 64
MAX_CHANGES = 4_096
UNLIMITED_WORD = "unlimited"
BLOCKED_WORD = "blocked"

CHANGEABLE = {
    "bucket_capacity",
    "refill_rate_per_sec",
    "leak_rate_per_sec",
    "limit",
    "window_seconds",
    "max_concurrent",
    "lease_ttl_seconds",
}


class Override(msgspec.Struct, frozen=True):
    """An override as it was set: limit names to changed fields, or to "unlimited" or "blocked"."""

    tenant: str
    resource: str
    subject: str
    limits: dict[str, Any]
    expires_at: float
    """Epoch seconds."""


class OverridePage(msgspec.Struct, frozen=True):
    """Some of a tenant's overrides; pass `cursor` on for the next page, None after the last."""

    overrides: list[Override]
    cursor: str | None


class Compiled(msgspec.Struct, frozen=True):
    """One overridden limit: ignored where the plan's algorithm is no longer `code`."""

    name: str
    code: int
    numbers: tuple[int, ...]


def plain_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what an override says, as it can be written down."""
    text = json.dumps(changes, default=lambda value: dict(value) if isinstance(value, Mapping) else str(value))
    if len(text) > MAX_CHANGES:
        raise InvalidInput("limits", f"an override may be at most {MAX_CHANGES} characters of JSON, got {len(text)}")
    plain: dict[str, Any] = json.loads(text)
    return plain


def compile_override(changes: Mapping[str, Any], limits: Limits) -> list[Compiled]:
    """Validate what an override says against the limits that it changes."""
    if not isinstance(changes, Mapping) or not changes:
        raise InvalidInput("limits", "must map limit names to their changed fields, 'unlimited' or 'blocked'")
    compiled = []
    for name, change in changes.items():
        try:
            limit = limits[name]
        except KeyError:
            known = ", ".join(each.name for each in limits)
            raise InvalidInput(f"limits.{name!s:.64}", f"no limit of that name; there are {known}") from None
        if limit.scope not in (Scope.SUBJECT, Scope.CALLER):
            raise InvalidInput(
                f"limits.{name}", f"an override reaches subject and caller limits, not a {limit.scope} limit"
            )
        steps = _changed(limit, change).steps
        compiled.append(Compiled(name, steps.code, steps.numbers()[: steps.override_width]))
    return compiled


def expires_at(expires_us: int) -> float:
    return expires_us / MICROS


def _changed(limit: Limit, change: Any) -> Limit:
    if change == UNLIMITED_WORD:
        change = {limit.size_field: None}
    elif change == BLOCKED_WORD:
        change = {limit.size_field: 0}
    if not isinstance(change, Mapping) or not change:
        raise InvalidInput(
            f"limits.{limit.name}", f"must be changed fields, 'unlimited' or 'blocked', got {shown(change)}"
        )
    known = CHANGEABLE & {f.name for f in fields(limit)}
    if "limit" in change and limit.size_field != "limit" and limit.size_field in change:
        raise InvalidInput(
            f"limits.{limit.name}.limit", f"means {limit.size_field}, which is there too; give one of them"
        )
    values = {limit.size_field if name == "limit" else name: value for name, value in change.items()}
    for name in values:
        if name not in known:
            raise InvalidInput(
                f"limits.{limit.name}.{name!s:.64}", f"can't be overridden; these can: {', '.join(sorted(known))}"
            )
    try:
        return replace(limit, **values)
    except InvalidLimit as refused:
        raise InvalidInput(f"limits.{limit.name}.{refused.field}", refused.problem) from None


def too_many(count: int) -> None:
    """All overrides of a subject are read with each of its checks, so there can't be many."""
    if count > MAX_PER_SUBJECT:
        raise InvalidInput(
            "resource", f"one subject may have at most {MAX_PER_SUBJECT} overrides; delete one, or use '*'"
        )


def cursor_after(subject: bytes) -> str:
    return urlsafe_b64encode(subject).decode()


def subject_after(cursor: str | None) -> bytes | None:
    """The last subject of the page before; None at the start."""
    if cursor is None:
        return None
    try:
        return b64decode(cursor, altchars=b"-_", validate=True)
    except (ValueError, TypeError):
        raise InvalidInput("cursor", "is not one that a list returned") from None
