"""Overrides: other parameters for one tenant, resource and subject. They are compiled when they are set."""

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
MAX_JSON_LENGTH = 4_096
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
"""The fields that an override may change, and the indexes of the parameters that each of them sets."""


class Override(msgspec.Struct, frozen=True):
    """An override as it was set.

    `limits` maps names of limits to their changed fields, or to "unlimited" or "blocked". `resource` is `*` for all
    resources.
    """

    tenant: str
    resource: str
    subject: str
    limits: dict[str, Any]
    expires_at: float
    """When the override expires, in epoch seconds."""


class OverridePage(msgspec.Struct, frozen=True):
    """A page of a tenant's overrides. `cursor` is the argument for the next page, None after the last one."""

    overrides: list[Override]
    cursor: str | None


class CompiledOverride(msgspec.Struct, frozen=True):
    """One overridden limit, compiled. It is ignored if the algorithm of the limit has another `code` by now.

    A parameter that the override does not name is UNCHANGED: that of the limit applies.
    """

    name: str
    code: int
    parameters: tuple[int, ...]


def copy_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the changes that can be stored as JSON. Raise `InvalidInput` if it is too long."""
    text = json.dumps(changes, default=lambda value: dict(value) if isinstance(value, Mapping) else str(value))
    if len(text) > MAX_JSON_LENGTH:
        raise InvalidInput(
            "limits", f"an override may be at most {MAX_JSON_LENGTH} characters of JSON, got {len(text)}"
        )
    plain: dict[str, Any] = json.loads(text)
    return plain


def compile_override(changes: Mapping[str, Any], limits: Limits, resource: str) -> list[CompiledOverride]:
    """Compile the changes of an override of this resource, given the limits that it changes.

    Raise `InvalidInput`, naming the limit and field, if a change is invalid.
    """
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
                f"limits.{name}", f"an override can change subject and caller limits, not a {limit.scope} limit"
            )
        compiled.append(_compile_limit(limit, change, resource))
    return compiled


def apply_overrides(
    algorithm: Algorithm, scope: Scope, exact: CompiledOverride | None, any_resource: CompiledOverride | None
) -> Algorithm:
    """Return the algorithm with the parameters of the live overrides of a limit. `lua/overrides.lua` is the twin.

    A bucket that several resources share has one window. Only an override of all resources may change that window:
    otherwise the count would start afresh whenever another resource is checked.
    """
    chosen = exact or any_resource
    if chosen is None:
        return algorithm
    parameters, index = chosen.parameters, algorithm.window_at
    if exact is not None and scope is not Scope.SUBJECT and index is not None:
        window = UNCHANGED if any_resource is None else any_resource.parameters[index]
        parameters = (*parameters[:index], window, *parameters[index + 1 :])
    return algorithm.with_parameters(parameters)


def expiry_seconds(expires_us: int) -> float:
    """Return the epoch seconds of a time in microseconds."""
    return expires_us / US_PER_SECOND


def _compile_limit(limit: Limit, change: Any, resource: str) -> CompiledOverride:
    """Validate the changed limit as a whole, and keep the parameters that the override names."""
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
            f"limits.{limit.name}.limit", f"means {limit.size_field}, which is given too; give only one of them"
        )
    values = {limit.size_field if name == "limit" else name: value for name, value in change.items()}
    for name in values:
        if name not in known:
            raise InvalidInput(
                f"limits.{limit.name}.{name!s:.64}",
                f"can't be overridden; these fields can: {', '.join(sorted(known))}",
            )
    if "window_seconds" in values and limit.scope is Scope.CALLER and resource != ANY_RESOURCE:
        raise InvalidInput(
            f"limits.{limit.name}.window_seconds",
            f"can't be changed for one resource: the limit counts all resources of a caller together; "
            f"set the override for the resource {ANY_RESOURCE!r}",
        )
    try:
        algorithm = replace(limit, **values).compiled
    except InvalidLimit as error:
        raise InvalidInput(f"limits.{limit.name}.{error.field}", error.problem) from None
    named = {index for name in values for index in OVERRIDABLE_FIELDS[name]}
    parameters = algorithm.parameters()[: algorithm.override_width]
    kept = tuple(value if index in named else UNCHANGED for index, value in enumerate(parameters))
    return CompiledOverride(limit.name, algorithm.code, kept)


def check_override_count(count: int) -> None:
    """Raise `InvalidInput` if a subject has too many overrides: each of its checks reads all of them."""
    if count > MAX_PER_SUBJECT:
        raise InvalidInput(
            "resource", f"one subject may have at most {MAX_PER_SUBJECT} overrides; delete one, or use '*'"
        )


def encode_cursor(subject: bytes) -> str:
    """Return the cursor of the page that starts after this subject."""
    return urlsafe_b64encode(subject).decode()


def decode_cursor(cursor: str | None) -> bytes | None:
    """Return the last subject of the previous page, None at the start. Raise `InvalidInput` for an invalid cursor."""
    if cursor is None:
        return None
    try:
        return b64decode(cursor, altchars=b"-_", validate=True)
    except (ValueError, TypeError):
        raise InvalidInput("cursor", "is not a cursor that a list returned") from None
