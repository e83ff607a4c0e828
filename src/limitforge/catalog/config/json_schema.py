"""Generate the JSON Schema of the configuration file, so that editors complete and check it.

The schema is derived from the specs that read the file, and from the dataclasses of the limits.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from limitforge.catalog.config.specs import SECTIONS, ConfigDocument
from limitforge.catalog.plan_limits import MAX_LIMITS_PER_PLAN
from limitforge.core.check import Failure
from limitforge.core.lanes import MAX_LANES
from limitforge.core.limits import LIMIT_TYPES, Limit, Priority
from limitforge.core.limits import NAME as LIMIT_NAME
from limitforge.core.overrides import BLOCKED_WORD, OVERRIDABLE_FIELDS, UNLIMITED_WORD

JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

_NUMBER_TYPES = ["number", "string"]
_LANE_DESCRIPTIONS: Mapping[str, str] = {
    "count": "The number of lanes.",
    "then": "The number of lanes from `at` on. All counters start afresh then.",
    "at": "When the number of lanes changes, in seconds since 1970.",
}
_LIMIT_DESCRIPTIONS: Mapping[str, str] = {
    "algorithm": "The algorithm that counts.",
    "name": "1 to 64 letters, digits or -_./ characters.",
    "mode": "`on` enforces the limit, `monitor` evaluates and reports it but allows every check, `off` ignores it.",
    "scope": "Which checks share a bucket: those of a subject on a resource, of a subject, on a resource, of the "
    "tenant, or all of them.",
    "counts": "Whether a check uses its cost, or 1.",
    "count_denied": "True if denied checks count as well.",
    "charge_after_outage": "True if checks that were allowed while the store was unavailable are charged later.",
    "consistency": "`exact` asks the store for each check, `prepaid` spends shares that a process has bought in "
    "advance, `local` divides the limit by the number of processes.",
    "shares": "The percentage of the limit that checks of each priority may use.",
    "bucket_capacity": "The largest burst. null is unlimited, 0 blocks.",
    "refill_rate_per_sec": "The number of tokens that are added each second.",
    "leak_rate_per_sec": "The number of checks that leave the queue each second.",
    "limit": "The limit of a window or period. null is unlimited, 0 blocks.",
    "window_seconds": "The length of a window.",
    "align": "Whether windows begin at multiples of their length, or with the first check.",
    "spread": "True if the windows of different buckets begin at different times.",
    "max_concurrent": "The number of leases that may be held at once. null is unlimited, 0 blocks.",
    "lease_ttl_seconds": "When a lease that is not renewed expires.",
    "period": "The length of a period. Weeks start on Monday.",
    "anchor_day": "The day of the month on which months begin, or of January on which years begin.",
    "time_zone": "IANA time zone such as Europe/Berlin. It decides when periods begin. The default is the tenant's.",
}


@cache
def json_schema() -> dict[str, Any]:
    """Return the whole schema. It is cached: do not change it."""
    _, definitions = msgspec.json.schema_components([ConfigDocument], ref_template="#/$defs/{name}")
    for definition in definitions.values():
        definition.pop("title", None)
    definitions["Failure"]["enum"] = [str(each) for each in Failure if each is not Failure.RAISE]
    for name, field in definitions["Lanes"]["properties"].items():
        field["description"] = _LANE_DESCRIPTIONS[name]
    definitions["Lanes"]["properties"]["count"] |= {"minimum": 1, "maximum": MAX_LANES}
    for algorithm, kind in LIMIT_TYPES.items():
        definitions[f"limit.{algorithm}"] = _limit_schema(kind)
    definitions["PlanSpec"] = _plan_schema(definitions["PlanSpec"])
    definitions["OverrideSpec"]["properties"]["limits"] |= _override_limits_schema()
    document = definitions.pop(ConfigDocument.__name__)
    for properties in (
        document["properties"],
        *(definitions[name]["properties"] for name in ("TenantSpec", "OperatorSpec")),
    ):
        _forbid_null_sections(properties)
    named = {f"#/$defs/{name}": f"#/$defs/{_definition_name(name)}" for name in definitions}
    whole = {
        "$schema": JSON_SCHEMA_DIALECT,
        "title": "limitforge configuration",
        **document,
        "$defs": {_definition_name(name): definition for name, definition in sorted(definitions.items())},
    }
    renamed: dict[str, Any] = _rename_references(whole, named)
    return renamed


def _forbid_null_sections(properties: dict[str, Any]) -> None:
    """Replace the type of sections: msgspec describes them as optional, but in a file they are absent, never null."""
    for name in properties.keys() & {"operator", "tenants", *SECTIONS}:
        section = properties[name]
        properties[name] = {"description": section["description"], **section["anyOf"][0]}


def _plan_schema(spec: dict[str, Any]) -> dict[str, Any]:
    limit = [{"$ref": f"#/$defs/limit.{algorithm}"} for algorithm in LIMIT_TYPES]
    listed = {"type": "array", "maxItems": MAX_LIMITS_PER_PLAN, "items": {"oneOf": limit}}
    limits = {"anyOf": [{"type": "string"}, listed], "description": spec["properties"]["limits"]["description"]}
    whole = {
        "type": "object",
        "properties": {"name": spec["properties"]["name"], "limits": limits},
        "required": ["name", "limits"],
        "additionalProperties": False,
    }
    flat = [{"$ref": each["$ref"], "required": ["name"]} for each in limit]
    return {"description": spec["description"], "oneOf": [whole, *flat]}


def _override_limits_schema() -> dict[str, Any]:
    numbers = {
        name: {"type": ["number", "string", "null"], "description": _LIMIT_DESCRIPTIONS[name]}
        for name in sorted(OVERRIDABLE_FIELDS)
    }
    changes = {"type": "object", "properties": numbers, "minProperties": 1, "additionalProperties": False}
    words = {"enum": [UNLIMITED_WORD, BLOCKED_WORD]}
    return {"minProperties": 1, "additionalProperties": {"anyOf": [words, changes]}}


def _limit_schema(kind: type[Limit]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    given = [field for field in fields(kind) if field.init]
    properties: dict[str, Any] = {
        "algorithm": {"const": kind.algorithm, "description": _LIMIT_DESCRIPTIONS["algorithm"]}
    }
    for field in sorted(given, key=lambda field: (field.name != "name", field.name in Limit.__dataclass_fields__)):
        properties[field.name] = {
            **_limit_field_schema(kind, field, hints[field.name]),
            "description": _LIMIT_DESCRIPTIONS[field.name],
        }
    required = [field.name for field in given if field.default is MISSING and field.default_factory is MISSING]
    schema: dict[str, Any] = {
        "type": "object",
        "description": " ".join((kind.__doc__ or "").split()),
        "properties": properties,
        "required": ["algorithm", *required],
        "additionalProperties": False,
    }
    if kind.size_field != "limit":  # every algorithm accepts `limit: null` for unlimited
        properties["limit"] = {"type": "null", "description": "null is unlimited."}
        schema["required"].remove(kind.size_field)
        schema["oneOf"] = [{"required": [kind.size_field]}, {"required": ["limit"]}]
    return schema


def _limit_field_schema(kind: type[Limit], field: Field[Any], hint: Any) -> dict[str, Any]:
    if field.name == "name":
        return {"type": "string", "pattern": f"^{LIMIT_NAME.pattern}$"}
    if field.name == "consistency":
        return {"enum": list(kind.consistencies), "default": str(field.default)}
    if field.name == "shares":
        percent = {"type": "integer", "minimum": 0, "maximum": 100}
        by_priority = {str(each): percent | ({"const": 100} if each is Priority.P0 else {}) for each in Priority}
        return {"type": "object", "properties": by_priority, "additionalProperties": False}
    schema = _schema_of_type(hint)
    if field.default is not MISSING and field.default is not None and field.name != "time_zone":  # the tenant's
        schema["default"] = str(field.default) if isinstance(field.default, StrEnum) else field.default
    return schema


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
