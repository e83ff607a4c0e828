"""The limits of a plan: read from any of the shapes in which they may be given, normalized, and compiled."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from limitforge.core.exact import Rate, short_repr
from limitforge.core.limits import Limit, Quota, limit_from_fields, limit_to_fields
from limitforge.core.plan import Limits
from limitforge.errors import InvalidInput, InvalidLimit

MAX_LIMITS_PER_PLAN = 10  # the plans of operator, tenant and policy apply together, and a check has room for 32 limits

_PLAN_FIELDS = ("tenant_id", "name")


def parse_plan_limits(name: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Read the limits of a plan from its fields: a list of limits, their text, or the fields of the only limit."""
    if "limits" not in fields:
        flat = {field: value for field, value in fields.items() if field not in _PLAN_FIELDS}
        if not flat:
            raise InvalidInput("limits", "is required: a list of limits, or text such as '100/minute; 10/second'")
        return normalize_limits([{"name": name, **flat}], path="")
    for field in fields:
        if field not in (*_PLAN_FIELDS, "limits"):
            problem = "belongs inside `limits`: a plan has either `limits` or the fields of a single limit"
            raise InvalidInput(str(field)[:64], problem)
    return normalize_limits(fields["limits"])


def normalize_limits(limits: object, path: str = "limits") -> tuple[dict[str, Any], ...]:
    """Return limits as they are stored: plain values of every field that was given or differs from its default."""
    if isinstance(limits, str):
        return tuple(_as_storable(index, limit_to_fields(limit)) for index, limit in enumerate(Limits.parse(limits)))
    if isinstance(limits, Mapping) or not isinstance(limits, Iterable):
        raise InvalidLimit("limits", f"must be a list of limits, or their text, got {short_repr(limits)}")
    normalized: list[dict[str, Any]] = []
    for index, each in enumerate(limits):
        if index == MAX_LIMITS_PER_PLAN:
            raise InvalidLimit("limits", f"at most {MAX_LIMITS_PER_PLAN} in one plan")
        if not isinstance(each, Mapping | Limit):
            raise InvalidLimit(f"{path}[{index}]", f"must be the fields of a limit, got {short_repr(each)}")
        try:
            limit = each if isinstance(each, Limit) else limit_from_fields(each)
        except InvalidLimit as error:
            field = f"{path}[{index}].{error.field}" if path else error.field
            raise InvalidLimit(field, error.problem) from None
        fields = _as_storable(index, limit_to_fields(limit))
        if isinstance(limit, Quota) and isinstance(each, Mapping) and "time_zone" in each:
            fields["time_zone"] = limit.time_zone  # the default is the tenant's, so an explicit UTC must stay
        normalized.append(fields)
    return tuple(normalized)


@lru_cache(maxsize=4_096)
def decode_limits(limits: bytes) -> tuple[dict[str, Any], ...]:
    """Decode limits from JSON. Cached, so that equal plans of many tenants share their fields in memory."""
    return tuple(msgspec.json.decode(limits))


@lru_cache(maxsize=4_096)
def compile_limits(limits: bytes, time_zone: str) -> Limits:
    """Compile limits from JSON; `time_zone` is for quotas that have none. Cached: equal plans share the result."""
    compiled = []
    decoded: list[dict[str, Any]] = msgspec.json.decode(limits)
    if len(decoded) > MAX_LIMITS_PER_PLAN:
        raise InvalidLimit("limits", f"at most {MAX_LIMITS_PER_PLAN} in one plan, got {len(decoded)}")
    for index, fields in enumerate(decoded):
        is_quota = fields.get("algorithm") == Quota.algorithm
        try:
            compiled.append(limit_from_fields({"time_zone": time_zone, **fields} if is_quota else fields))
        except InvalidLimit as error:
            raise InvalidLimit(f"limits[{index}].{error.field}", error.problem) from None
    return Limits(*compiled)


def _as_storable(index: int, fields: dict[str, Any]) -> dict[str, Any]:
    for field, value in fields.items():
        if isinstance(value, Rate):
            problem = "has no exact decimal form per second; use a rate with fewer digits"
            raise InvalidLimit(f"limits[{index}].{field}", problem)
        if not isinstance(value, str | int | float | bool | dict | None):  # a Decimal
            fields[field] = str(value)
    return fields
