"""The JSON Schema of the configuration file, made from what reads it, so that editors complete and check it."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from limitforge.catalog.config.specs import HASH_PATTERN, KEY_ID_PATTERN, SECTIONS, ConfigDocument
from limitforge.catalog.model import MAX_LIMITS_PER_PLAN, NAME_PATTERN
from limitforge.core.check import Failure
from limitforge.core.keys import MAX_KEY_PART_BYTES
from limitforge.core.lanes import MAX_LANES
from limitforge.core.limits import ALGORITHMS, Limit, Priority
from limitforge.core.limits import NAME as LIMIT_NAME
from limitforge.core.overrides import BLOCKED_WORD, OVERRIDABLE_FIELDS, UNLIMITED_WORD

JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

_NUMBER_TYPES = ["number", "string"]
_NAME_SCHEMA = {"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$"}

# What a field is for, where an editor shows it.
_DESCRIPTIONS: Mapping[str, str] = {
    "operator": "What holds above all tenants. Left alone if absent.",
    "tenants": "Each tenant with what is its own. Those that are not named are left alone, unless they are pruned.",
    "name": "1 to 64 letters, digits or -_./ characters.",
    "mode": "`on` decides, `monitor` decides and reports but lets pass, `off` lets everything pass.",
    "time_zone": "An IANA name such as Europe/Berlin: when the days and months of quotas begin.",
    "failure": "A check while the store is away: open lets it pass, closed denies it, local counts it on this node.",
    "priority": "How important a check is that states no priority: P0 is never shed.",
    "default_plan": "The name of the plan for whatever no policy or key gives another one.",
    "lanes": "Over how many shards of a Redis Cluster this tenant is spread.",
    "count": "How many lanes there are.",
    "then": "How many there are from `at` on. Counters start afresh then.",
    "at": "When that is, in seconds since 1970.",
    "suspended": "Whether all keys of this tenant are refused.",
    "plan": "The name of a plan that stands under `plans`.",
    "plans": "All plans; left alone if absent.",
    "policies": "Which plan applies to which resources: all of them; left alone if absent.",
    "keys": "All API keys; left alone if absent.",
    "overrides": "Other numbers for single subjects: all of them; left alone if absent. What has expired is ignored.",
    "limits": "A list of limits, or text such as 100/minute; 1000/hour.",
    "resource": "Such as GET:/orders, GET:/orders/{id}, POST:* or *.",
    "shadow_plan": "The name of a plan that is tried beside the other one, and never denies.",
    "id": "The key's id, as `limitforge keys make` prints it.",
    "type": "Test keys are the first to be shed.",
    "scopes": "What the key may do. Leave plans out for keys that leave your own servers: it lets them name a plan.",
    "expires_at": "When it ends, such as 2026-12-31T00:00:00Z.",
    "metadata": "Anything else that you want to remember of it, at most 4 KiB.",
    "disabled": "Whether the key is refused.",
    "secrets": "What is kept of the key. A key that is in the database keeps its own if they are absent.",
    "hash": "The key's HMAC-SHA256, as `limitforge keys make` prints it.",
    "pepper": "The version of the pepper that it was made under.",
    "subject": "Whose numbers these are, such as user:42.",
    "reason": "Why, for whoever asks later.",
    "algorithm": "How it counts.",
    "scope": "Who shares a bucket: each subject on each resource, each caller, a resource, the tenant, or all of them.",
    "counts": "Whether it takes a check's cost, or 1 for each.",
    "count_denied": "Whether denied checks count as well.",
    "charge_after_outage": "Whether what was let pass while the store was away is charged later.",
    "consistency": "exact asks the store each time, prepaid spends paid shares, local divides by the processes.",
    "shares": "How many percent of the limit each priority may use.",
    "bucket_capacity": "The largest burst. null is unlimited, 0 blocks.",
    "refill_rate_per_sec": "Tokens that come back each second.",
    "leak_rate_per_sec": "How many leave the queue each second.",
    "limit": "How many in a window or period. null is unlimited, 0 blocks.",
    "window_seconds": "How long a window is.",
    "align": "Whether windows lie on the clock, or open with the first cost taken.",
    "spread": "Whether the windows of different buckets begin at different times.",
    "max_concurrent": "How many may be held at once. null is unlimited, 0 blocks.",
    "lease_ttl_seconds": "When a slot comes back whose holder was not heard of.",
    "period": "How long a quota lasts. Weeks start on Monday.",
    "anchor_day": "The day on which months begin, or that of January on which years do.",
}


@cache
def json_schema() -> dict[str, Any]:
    """The whole schema. Don't change it: it is the same one each time."""
    _, definitions = msgspec.json.schema_components([ConfigDocument], ref_template="#/$defs/{name}")
    definitions["Failure"]["enum"] = [str(each) for each in Failure if each is not Failure.RAISE]
    for definition in definitions.values():
        definition.pop("title", None)
        for name, field in definition.get("properties", {}).items():
            definition["properties"][name] = _field_schema(name, field)
    definitions["Lanes"]["properties"]["count"] |= {"minimum": 1, "maximum": MAX_LANES}
    for algorithm, kind in ALGORITHMS.items():
        definitions[f"limit.{algorithm}"] = _limit_schema(kind)
    definitions["PlanSpec"] = _plan_schema(definitions["PlanSpec"]["description"])
    definitions["OverrideSpec"]["properties"]["limits"] = _override_limits_schema()
    document = definitions.pop("Document")
    named = {f"#/$defs/{name}": f"#/$defs/{_definition_name(name)}" for name in definitions}
    whole = {
        "$schema": JSON_SCHEMA_DIALECT,
        "title": "limitforge configuration",
        **document,
        "$defs": {_definition_name(name): definition for name, definition in sorted(definitions.items())},
    }
    renamed: dict[str, Any] = _rename_references(whole, named)
    return renamed


def _field_schema(name: str, field: dict[str, Any]) -> dict[str, Any]:
    """A field of a spec: what msgspec knows of it, and what only its reader knows."""
    if name in ("operator", "tenants", *SECTIONS):
        field = field["anyOf"][0]  # there, or absent: never null
    more: dict[str, Any] = {"description": _DESCRIPTIONS[name]}
    if name == "name":
        more |= _NAME_SCHEMA
    elif name in ("subject", "resource"):
        more |= {"minLength": 1, "maxLength": MAX_KEY_PART_BYTES}
    elif name == "id":
        more["pattern"] = f"^{KEY_ID_PATTERN.pattern}$"
    elif name == "hash":
        more["pattern"] = f"^{HASH_PATTERN.pattern}$"
    elif name == "pepper":
        more["minimum"] = 1
    elif name == "scopes":
        more |= {"minItems": 1, "uniqueItems": True, "contains": {"enum": ["check", "usage"]}}
    return field | more


def _plan_schema(description: str) -> dict[str, Any]:
    limit = [{"$ref": f"#/$defs/limit.{algorithm}"} for algorithm in ALGORITHMS]
    listed = {"type": "array", "maxItems": MAX_LIMITS_PER_PLAN, "items": {"oneOf": limit}}
    whole = {
        "type": "object",
        "properties": {
            "name": {**_NAME_SCHEMA, "description": _DESCRIPTIONS["name"]},
            "limits": {"anyOf": [{"type": "string"}, listed], "description": _DESCRIPTIONS["limits"]},
        },
        "required": ["name", "limits"],
        "additionalProperties": False,
    }
    flat = [{"$ref": each["$ref"], "required": ["name"]} for each in limit]
    return {"description": description, "oneOf": [whole, *flat]}


def _override_limits_schema() -> dict[str, Any]:
    numbers = {
        name: {"type": ["number", "string", "null"], "description": _DESCRIPTIONS[name]}
        for name in sorted(OVERRIDABLE_FIELDS)
    }
    changes = {"type": "object", "properties": numbers, "minProperties": 1, "additionalProperties": False}
    words = {"enum": [UNLIMITED_WORD, BLOCKED_WORD]}
    return {
        "type": "object",
        "description": "Other numbers by the name of a limit, or one of the words unlimited and blocked.",
        "minProperties": 1,
        "additionalProperties": {"anyOf": [words, changes]},
    }


def _limit_schema(kind: type[Limit]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    given = [field for field in fields(kind) if field.init]
    properties: dict[str, Any] = {"algorithm": {"const": kind.algorithm, "description": _DESCRIPTIONS["algorithm"]}}
    for field in sorted(given, key=lambda field: (field.name != "name", field.name in Limit.__dataclass_fields__)):
        properties[field.name] = {
            **_limit_field_schema(kind, field, hints[field.name]),
            "description": _DESCRIPTIONS[field.name],
        }
    required = [field.name for field in given if field.default is MISSING and field.default_factory is MISSING]
    found: dict[str, Any] = {
        "type": "object",
        "description": " ".join((kind.__doc__ or "").split()),
        "properties": properties,
        "required": ["algorithm", *required],
        "additionalProperties": False,
    }
    if kind.size_field != "limit":  # `limit: null` is unlimited in the words of every algorithm
        properties["limit"] = {"type": "null", "description": "null is unlimited."}
        found["required"].remove(kind.size_field)
        found["oneOf"] = [{"required": [kind.size_field]}, {"required": ["limit"]}]
    return found


def _limit_field_schema(kind: type[Limit], field: Field[Any], hint: Any) -> dict[str, Any]:
    if field.name == "name":
        return {"type": "string", "pattern": f"^{LIMIT_NAME.pattern}$"}
    if field.name == "consistency":
        return {"enum": list(kind.consistencies), "default": str(field.default)}
    if field.name == "shares":
        percent = {"type": "integer", "minimum": 0, "maximum": 100}
        by_priority = {str(each): percent | ({"const": 100} if each is Priority.P0 else {}) for each in Priority}
        return {"type": "object", "properties": by_priority, "additionalProperties": False}
    found = _schema_of_type(hint)
    if field.default is not MISSING and field.default is not None and field.name != "time_zone":  # that is the tenant's
        found["default"] = str(field.default) if isinstance(field.default, StrEnum) else field.default
    return found


def _schema_of_type(hint: Any) -> dict[str, Any]:
    options = get_args(hint) if get_origin(hint) in (Union, type(int | str)) else (hint,)
    for option in options:
        if get_origin(option) is Literal:
            return {"enum": list(get_args(option))}
    if options == (bool,):
        return {"type": "boolean"}
    if options == (str,):
        return {"type": "string"}
    if options == (int,):
        return {"type": "integer"}
    return {"type": [*_NUMBER_TYPES, "null"] if NoneType in options else _NUMBER_TYPES, "minimum": 0}


def _definition_name(name: str) -> str:
    return name.removesuffix("Spec").lower()


def _rename_references(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            name: names[each] if name == "$ref" else _rename_references(each, names) for name, each in value.items()
        }
    return [_rename_references(each, names) for each in value] if isinstance(value, list) else value
