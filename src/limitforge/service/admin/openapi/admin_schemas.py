"""The OpenAPI schemas of the admin API's requests and responses, derived from the types of the catalog."""

from collections.abc import Mapping
from typing import Any

import msgspec

from limitforge.catalog.config.json_schema import json_schema as file_schema
from limitforge.catalog.database.service_records import UsageRow
from limitforge.catalog.model import ENTITY_TYPES, AuditEntry, example_entity
from limitforge.service.counters.throttled import ThrottledSubject

TEXT: Any = {"type": "string"}
TEXT_OR_NULL: Any = {"type": ["string", "null"]}
NUMBER: Any = {"type": "integer"}
TIME: Any = {"type": "string", "format": "date-time"}
MODES: Any = {"enum": ["off", "monitor", "on"]}

_VERSION = "Counts the changes; it is also the ETag."
DESCRIPTIONS: dict[str, dict[str, str]] = {
    "AuditEntry": {
        "id": "The number of the entry. Later entries have higher numbers.",
        "at": "When the change was made.",
        "actor": "Who made it: a token, a user of the command line, or the value of LIMITFORGE_ACTOR.",
        "action": "What was done, such as plan.update.",
        "tenant_id": "The tenant that the entity belongs to; null if it belongs to none.",
        "entity_id": "The id of the entity that was changed.",
        "before": "The entity before the change; null if it was created.",
        "after": "The entity after the change; null if it was deleted.",
    },
    "Lanes": {
        "count": "The number of lanes now.",
        "then": "The number of lanes from `at` on.",
        "at": "When the number changes, in seconds since 1970.",
    },
    "ModeState": {
        "mode": "The mode that applies now.",
        "tenant_id": "The tenant; null for the mode of all tenants.",
        "version": _VERSION,
    },
    "Operator": {
        "plan_id": "The plan that applies to every check; null for none.",
        "mode": "The mode of all tenants.",
        "time_zone": "The time zone of quotas in the operator's plan.",
        "version": _VERSION,
        "updated_at": "When it was last changed.",
    },
    "PlanVersion": {
        "plan_id": "The plan.",
        "version": "The version of the plan.",
        "limits": "The limits of this version.",
        "created_at": "When this version was created.",
        "created_by": "The actor that created it.",
    },
    "Problem": {
        "type": "A URI that identifies the kind of problem.",
        "title": "A short description of the kind of problem.",
        "status": "The HTTP status.",
        "detail": "What is wrong, and where.",
        "code": "A stable code of the kind of problem.",
    },
    "ResetResult": {
        "tenant_id": "The tenant.",
        "resource": "The resource whose counters were cleared: the template of the policy, if one matches.",
        "subject": "The subject whose counters were cleared.",
        "forgotten": "The names of the limits whose counters were cleared.",
    },
    "SecretHash": {
        "pepper": "The version of the pepper.",
        "expires_at": "When the secret expires; null for never.",
    },
    "ThrottledSubject": {
        "tenant_id": "The tenant of the subject.",
        "subject_hash": "An HMAC of the tenant and the subject.",
        "denied": "The number of denials. It may be too low, but never too high.",
        "last_denied_at": "When the subject was last denied.",
    },
    "UsageRow": {
        "hour": "The start of the hour.",
        "tenant_id": "The tenant of the key.",
        "key_id": "The key.",
        "allowed": "The number of allowed checks.",
        "denied": "The number of denied checks.",
        "would_deny": "The number of checks that a limit in monitor mode would have denied.",
        "degraded": "The number of checks that were decided without the store.",
    },
}
"""The descriptions of fields that have none in the code. Those of entities are in the model of the catalog."""


def admin_schemas() -> dict[str, Any]:
    """Return the schemas of entities, of other responses, and of the limits of plans and overrides."""
    entities = _entity_schemas()
    schemas = _limit_schemas() | entities | _response_schemas(entities)
    for name, descriptions in DESCRIPTIONS.items():
        properties = schemas[name]["properties"]
        for field, description in descriptions.items():
            properties[field] = {**properties[field], "description": description}
    return schemas


def _limit_schemas() -> dict[str, Any]:
    """Return the schemas of limits, which are those of configuration files."""
    definitions = file_schema()["$defs"]
    limits = {name: schema for name, schema in definitions.items() if name.startswith("limit.")}
    return limits | {
        "plan.limits": definitions["plan"]["oneOf"][0]["properties"]["limits"],
        "plan.flat": {"anyOf": [_flat_plan(schema) for schema in limits.values()]},
        "override.limits": definitions["override"]["properties"]["limits"],
    }


def _flat_plan(limit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a plan with a single limit, which has the name of the plan."""
    required = [name for name in limit["required"] if name != "name"]
    plan_fields = {"tenant_id": TEXT, "name": TEXT}
    return {**limit, "properties": {**limit["properties"], **plan_fields}, "required": required}


def _entity_schemas() -> dict[str, Any]:
    kinds = [*ENTITY_TYPES.values(), AuditEntry, UsageRow, ThrottledSubject]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        schema.pop("title", None)
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
        if "properties" in schema:
            _require_all_fields(schema)
    for entity in ENTITY_TYPES.values():
        schemas[entity.__name__]["examples"] = [example_entity(entity)]
    schemas["SecretHash"] = {  # responses never contain the hash itself
        "type": "object",
        "description": "A secret of a key or token: the version of the pepper that it was hashed with, and its expiry.",
        "properties": {"pepper": NUMBER, "expires_at": {"anyOf": [TIME, {"type": "null"}]}},
        "required": ["pepper", "expires_at"],
    }
    return schemas


def _require_all_fields(schema: dict[str, Any]) -> None:
    """Mark all fields as required: a response contains fields with their default too."""
    for name, field in schema["properties"].items():
        field.pop("default", None)
        if name.endswith("_at") or name in ("at", "hour"):
            for option in field.get("anyOf", (field,)):
                if option.get("type") == "string":
                    option["format"] = "date-time"
    schema["required"] = list(schema["properties"])


def _response_schemas(entities: Mapping[str, Any]) -> dict[str, Any]:
    secret = {"type": ["string", "null"], "description": "The secret; null in a replayed response."}
    notice = {"type": "string", "description": "Why the secret is null."}
    key_hash = {**TEXT_OR_NULL, "description": "The hash of the secret; null in a replayed response."}
    warnings = {
        "type": "array",
        "items": TEXT,
        "description": "Likely mistakes, such as two limits of one name that count separately. Absent if there are "
        "none.",
    }
    return {
        "PlanWithWarnings": _extended(entities["Plan"], {}, {"warnings": warnings}),
        "PolicyWithWarnings": _extended(entities["Policy"], {}, {"warnings": warnings}),
        "KeyWithSecret": _extended(entities["Key"], {"key": secret, "key_hash": key_hash}, {"notice": notice}),
        "TokenWithSecret": _extended(entities["Token"], {"token": secret}, {"notice": notice}),
        "PlanVersion": _object_schema(
            plan_id=TEXT, version=NUMBER, limits={"type": "array"}, created_at=TIME, created_by=TEXT
        ),
        "Operator": _object_schema(plan_id=TEXT_OR_NULL, mode=MODES, time_zone=TEXT, version=NUMBER, updated_at=TIME),
        "ModeState": _object_schema(mode=MODES, tenant_id=TEXT_OR_NULL, version=NUMBER),
        "ResetResult": _object_schema(
            tenant_id=TEXT, resource=TEXT, subject=TEXT, forgotten={"type": "array", "items": TEXT}
        ),
        "Problem": {
            **_object_schema(
                type={"type": "string", "format": "uri"}, title=TEXT, status=NUMBER, detail=TEXT, code=TEXT
            ),
            "description": "A problem document (RFC 9457).",
        },
    }


def _extended(schema: Mapping[str, Any], required: Mapping[str, Any], optional: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object schema with more properties, and without its examples, which lack them."""
    return {
        **{name: value for name, value in schema.items() if name != "examples"},
        "properties": {**schema["properties"], **required, **optional},
        "required": [*schema["required"], *required],
    }


def _object_schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}
