"""The OpenAPI schemas of the admin API's requests and responses, derived from the types of the catalog."""

from collections.abc import Mapping
from typing import Any

import msgspec

from limitforge.catalog.config.json_schema import json_schema as file_schema
from limitforge.catalog.database.queries import UsageRow
from limitforge.catalog.model import AuditEntry, Entity, Key, Override, Plan, Policy, Tenant, Token
from limitforge.service.counters.throttled import ThrottledSubject

TEXT: Any = {"type": "string"}
TEXT_OR_NULL: Any = {"type": ["string", "null"]}
NUMBER: Any = {"type": "integer"}
TIME: Any = {"type": "string", "format": "date-time"}
MODES: Any = {"enum": ["off", "monitor", "on"]}

_COMMON_FIELDS = {"id": None, "version": 3, "created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-02-01T00:00:00Z"}
_TENANT, _PLAN = "ten_1a2b3c4d5e6f7g8h", "pla_1a2b3c4d5e6f7g8h"
ENTITY_EXAMPLES: Mapping[type[Entity], dict[str, Any]] = {
    Tenant: {
        **_COMMON_FIELDS,
        "id": _TENANT,
        "name": "acme",
        "mode": "on",
        "time_zone": "Europe/Berlin",
        "failure": None,
        "priority": None,
        "default_plan_id": _PLAN,
        "lanes": 1,
        "suspended": False,
        "revision": 42,
    },
    Plan: {
        **_COMMON_FIELDS,
        "id": _PLAN,
        "tenant_id": _TENANT,
        "name": "free",
        "limits": [{"name": "burst", "algorithm": "token_bucket", "bucket_capacity": 10, "refill_rate_per_sec": 2}],
    },
    Policy: {
        **_COMMON_FIELDS,
        "id": "pol_1a2b3c4d5e6f7g8h",
        "tenant_id": _TENANT,
        "resource": "GET:/orders/{id}",
        "plan_id": _PLAN,
        "mode": "monitor",
        "failure": "closed",
        "priority": None,
        "shadow_plan_id": None,
    },
    Key: {
        **_COMMON_FIELDS,
        "id": "key_1a2b3c4d5e6f7g8h",
        "tenant_id": _TENANT,
        "name": "web",
        "type": "live",
        "plan_id": None,
        "scopes": ["check", "usage", "plans"],
        "expires_at": None,
        "metadata": {"team": "checkout"},
        "disabled": False,
        "last_used_at": "2026-02-01T08:00:00Z",
        "secrets": [{"pepper": 1, "expires_at": None}],
    },
    Override: {
        **_COMMON_FIELDS,
        "id": "ovr_1a2b3c4d5e6f7g8h",
        "tenant_id": _TENANT,
        "resource": "*",
        "subject": "user:42",
        "limits": {"burst": {"limit": 500}},
        "expires_at": "2026-02-02T00:00:00Z",
        "reason": "launch day",
        "set_by": "token:tok_1a2b3c4d5e6f7g8h",
    },
    Token: {
        **_COMMON_FIELDS,
        "id": "tok_1a2b3c4d5e6f7g8h",
        "name": "deploy",
        "scopes": ["read", "write"],
        "tenant_id": None,
        "expires_at": None,
        "last_used_at": None,
        "secrets": [{"pepper": 1, "expires_at": None}],
    },
}


def admin_schemas() -> dict[str, Any]:
    """Return the schemas of entities, of other responses, and of the limits of plans and overrides."""
    entities = _entity_schemas()
    return _limit_schemas() | entities | _response_schemas(entities)


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
    kinds = [*ENTITY_EXAMPLES, AuditEntry, UsageRow, ThrottledSubject]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        schema.pop("title", None)
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
        if "properties" in schema:
            _require_all_fields(schema)
    for kind, example in ENTITY_EXAMPLES.items():
        schemas[kind.__name__]["examples"] = [example]
    schemas["SecretHash"] = {  # responses never contain the hash itself
        "type": "object",
        "description": "A secret of a key or token: the version of the pepper that it was hashed with, and its expiry.",
        "properties": {"pepper": NUMBER, "expires_at": {"anyOf": [TIME, {"type": "null"}]}},
        "required": ["pepper", "expires_at"],
    }
    schemas["Plan"]["properties"]["limits"] = {"type": "array", "items": {"type": "object"}, "minItems": 0}
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
    warnings = {
        "type": "array",
        "items": TEXT,
        "description": "Likely mistakes, such as two limits of one name that count separately. Absent if there are "
        "none.",
    }
    return {
        "PlanWithWarnings": _extended(entities["Plan"], {}, {"warnings": warnings}),
        "PolicyWithWarnings": _extended(entities["Policy"], {}, {"warnings": warnings}),
        "KeyWithSecret": _extended(entities["Key"], {"key": secret, "key_hash": TEXT_OR_NULL}, {"notice": notice}),
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
