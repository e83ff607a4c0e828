"""Overrides: other numbers for one tenant, resource and subject, compiled when they are set."""

import json
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec

from limitforge.core.algorithms.base import UNCHANGED, Algorithm
from limitforge.core.exact import US_PER_SECOND, short_repr
from limitforge.core.limits import Limit, Scope
from limitforge.core.plan import Limits
from limitforge.errors import InvalidInput, InvalidLimit

ANY_RESOURCE = "*"
MAX_PER_SUBJECT = 64
MAX_CHANGES = 4_096
UNLIMITED_WORD = "unlimited"
BLOCKED_WORD = "blocked"

OVERRIDABLE_FIELDS = {
    "bucket_capacity": (0,),
    "limit": (0,),
    "max_concurrent": (0,),
    "window_seconds": (1,),
    "lease_ttl_seconds": (1,),
    "refill_rate_per_sec": (1, 2),
    "leak_rate_per_sec": (1, 2),
}
"""The fields that an override may name, and which numbers of the limit each of them sets."""


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


class CompiledOverride(msgspec.Struct, frozen=True):
    """One overridden limit: ignored where the plan's algorithm is no longer `code`.

    A number that the override does not name is UNCHANGED: that of the limit which is checked holds.
    """

    name: str
    code: int
    numbers: tuple[int, ...]


def copy_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what an override says, as it can be written down."""
    text = json.dumps(changes, default=lambda value: dict(value) if isinstance(value, Mapping) else str(value))
    if len(text) > MAX_CHANGES:
        raise InvalidInput("limits", f"an override may be at most {MAX_CHANGES} characters of JSON, got {len(text)}")
    plain: dict[str, Any] = json.loads(text)
    return plain


def compile_override(changes: Mapping[str, Any], limits: Limits, resource: str) -> list[CompiledOverride]:
    """Validate what an override of this resource says against the limits that it changes."""
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
        compiled.append(_compiled(limit, change, resource))
    return compiled


def apply_overrides(
    steps: Algorithm, scope: Scope, exact: CompiledOverride | None, any_resource: CompiledOverride | None
) -> Algorithm:
    """Return the numbers that hold under the live overrides of a limit. `lua/overrides.lua` is the twin.

    A bucket that several resources share has one window: there only an override of all resources changes it, or each
    switch between two resources would start the count afresh.
    """
    chosen = exact or any_resource
    if chosen is None:
        return steps
    numbers, at = chosen.numbers, steps.window_at
    if exact is not None and scope is not Scope.SUBJECT and at is not None:
        window = UNCHANGED if any_resource is None else any_resource.numbers[at]
        numbers = (*numbers[:at], window, *numbers[at + 1 :])
    return steps.with_numbers(numbers)


def expiry_seconds(expires_us: int) -> float:
    return expires_us / US_PER_SECOND


def _compiled(limit: Limit, change: Any, resource: str) -> CompiledOverride:
    """Check the changed limit as a whole, and keep the numbers that the override names."""
    if change == UNLIMITED_WORD:
        change = {limit.size_field: None}
    elif change == BLOCKED_WORD:
        change = {limit.size_field: 0}
    if not isinstance(change, Mapping) or not change:
        raise InvalidInput(
            f"limits.{limit.name}", f"must be changed fields, 'unlimited' or 'blocked', got {short_repr(change)}"
        )
    known = OVERRIDABLE_FIELDS.keys() & {f.name for f in fields(limit)}
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
    if "window_seconds" in values and limit.scope is Scope.CALLER and resource != ANY_RESOURCE:
        raise InvalidInput(
            f"limits.{limit.name}.window_seconds",
            f"can't be changed for one resource: the limit counts all resources of a caller together; "
            f"set the override for the resource {ANY_RESOURCE!r}",
        )
    try:
        steps = replace(limit, **values).compiled
    except InvalidLimit as refused:
        raise InvalidInput(f"limits.{limit.name}.{refused.field}", refused.problem) from None
    named = {at for name in values for at in OVERRIDABLE_FIELDS[name]}
    numbers = steps.numbers()[: steps.override_width]
    kept = tuple(number if at in named else UNCHANGED for at, number in enumerate(numbers))
    return CompiledOverride(limit.name, steps.code, kept)


def require_room_for_override(count: int) -> None:
    """All overrides of a subject are read with each of its checks, so there can't be many."""
    if count > MAX_PER_SUBJECT:
        raise InvalidInput(
            "resource", f"one subject may have at most {MAX_PER_SUBJECT} overrides; delete one, or use '*'"
        )


def encode_cursor(subject: bytes) -> str:
    return urlsafe_b64encode(subject).decode()


def decode_cursor(cursor: str | None) -> bytes | None:
    """The last subject of the page before; None at the start."""
    if cursor is None:
        return None
    try:
        return b64decode(cursor, altchars=b"-_", validate=True)
    except (ValueError, TypeError):
        raise InvalidInput("cursor", "is not one that a list returned") from None
