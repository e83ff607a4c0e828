"""The OpenAPI schemas of the routes that take an API key, derived from the structs that decode and encode them."""

from typing import Any

import msgspec

from limitforge.core.keys import MAX_KEY_PART_BYTES
from limitforge.core.reservations import Settlement
from limitforge.service.checks.request_bodies import MAX_COSTS, CheckBody
from limitforge.service.checks.responses import DecisionBody, DenialProblem
from limitforge.service.checks.tenant_api import LeaseBody, ReserveBody, SettleBody

SCHEMA_NAMES: dict[type, str] = {
    CheckBody: "Check",
    ReserveBody: "Reserve",
    SettleBody: "Settle",
    LeaseBody: "Lease",
    DecisionBody: "Decision",
    DenialProblem: "DenialProblem",
    Settlement: "Settlement",
}
"""The structs with their names in the document."""

KEY_PART: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_KEY_PART_BYTES}
PLAN_ID_DESCRIPTION = (
    "The id of a plan to apply instead of the plans of the tenant and the policy. The key needs the scope `plans`."
)

_CHECK_FIELDS = {
    "resource": "The resource to access, such as GET:/orders. Use a route template, not a URL with ids in it.",
    "subject": "The caller that is limited, such as a user id or an IP address.",
    "cost": "The cost of the check, taken from every limit. 0 only reads the state.",
    "costs": f"Costs of single limits by their name, instead of `cost`; at most {MAX_COSTS}.",
    "priority": "For limits with `shares`; P0 may use the whole limit. The default is that of the policy, else of the "
    "tenant, else P3 for a test key, P2 for a GET or HEAD resource, and P1 for others.",
    "plan_id": PLAN_ID_DESCRIPTION,
}
DESCRIPTIONS: dict[str, dict[str, str]] = {
    "Check": _CHECK_FIELDS,
    "Reserve": {
        **_CHECK_FIELDS,
        "ttl_seconds": "How long the reservation is held if it is not settled.",
        "on_lapse": "What happens to the reserved cost if the reservation is not settled in time.",
    },
    "Settle": {
        "reservation_id": "The `reservation_id` of the decision that granted the reservation.",
        "cost": "The real cost. It replaces the reserved cost.",
        "costs": "The real costs of single limits by their name, instead of `cost`.",
    },
    "Lease": {"lease_id": "The `lease_id` of the decision that granted the slots."},
    "Settlement": {
        "outcome": "`settled`, or `lapsed` if the reservation had expired and the real cost was not applied.",
        "cost": "The cost that was applied.",
    },
    "Decision": {
        "allowed": "True if the request may proceed. False means that nothing was taken from any limit.",
        "limit": "The size of the binding limit. Absent if it is unlimited, or if no limit applies.",
        "remaining": "What is left of the binding limit.",
        "reset_at": "When the binding limit is unused again, in seconds since 1970.",
        "reset_after_ms": "The time until the binding limit is unused again.",
        "retry_after_ms": "The time to wait before retrying; 0 if allowed, null if waiting never helps.",
        "delay_ms": "The time to wait before proceeding, if a leaky bucket applies.",
        "binding": "The name of the binding limit: the one with the longest wait if denied, or with the least "
        "remaining if allowed. The fields above are its state.",
        "limits": "The state of every limit by its name.",
        "would_deny": "The names of limits in monitor mode that had no room.",
        "degraded": "The failure behaviour that decided while the store was unavailable: `open`, `closed` or `local`.",
        "overflow": "True if a shared overflow bucket decided, because the tenant had used its budget of new buckets.",
        "mode": "The mode that applied, if it was not `on`.",
        "lease_id": "The handle of the slots taken from concurrency limits, to renew or release them.",
        "reservation_id": "The handle of the reservation, to settle it.",
        "shadow": "The decision of the shadow plan. It does not affect `allowed`.",
    },
    "DenialProblem": {
        "type": "A URI that identifies the kind of problem.",
        "title": "A short description of the kind of problem.",
        "status": "The HTTP status.",
        "detail": "What was denied, and when to retry.",
        "code": "A stable code of the kind of problem.",
        "violated-policies": "The names of the limits that denied the check.",
    },
    "LimitState": {
        "limit": "The size of the limit; null if it is unlimited.",
        "remaining": "What is left; null if the limit is unlimited.",
        "reset_after_ms": "The time until the limit is unused again.",
        "retry_after_ms": "The time until this cost has room; 0 if it has room now, null if it never will.",
        "allowed": "True if the limit had room.",
        "monitored": "True if the limit is in monitor mode, and can't deny.",
    },
    "Explanation": {
        "decision": "The state of the limits that would decide the check. `allowed` is always true.",
        "tenant": "The tenant of the key.",
        "resource": "The resource whose counters apply: the template of the policy, if one matches.",
        "priority": "The priority that applies.",
        "failure": "The failure behaviour that applies; null for the default of the service.",
        "policy": "The policy that matches the resource; null if none does.",
        "plans": "The plans that apply.",
        "override": "The override of the subject; null if it has none.",
        "why": "The steps that led to the decision, as sentences.",
    },
}
"""The description of every field, by schema."""


def check_schemas() -> dict[str, Any]:
    """Return the schemas by name."""
    _, components = msgspec.json.schema_components(list(SCHEMA_NAMES), ref_template="#/components/schemas/{name}")
    new_names = {struct.__name__: name for struct, name in SCHEMA_NAMES.items()}
    schemas = {new_names.get(name, name): _rename_refs(schema, new_names) for name, schema in components.items()}
    for schema in schemas.values():
        schema.pop("title", None)
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
    for name in ("Check", "Reserve"):
        properties = schemas[name]["properties"]
        properties["resource"] = properties["subject"] = KEY_PART
        properties["cost"] = {"type": "integer", "minimum": 0, "default": 1}
        properties["priority"] = {"enum": ["P0", "P1", "P2", "P3", None], "default": None}
    schemas["Reserve"]["properties"]["on_lapse"] = {"enum": ["keep", "refund"], "default": "keep"}
    schemas["Explanation"] = _explanation_schema()
    for name, descriptions in DESCRIPTIONS.items():
        properties = schemas[name]["properties"]
        for field, description in descriptions.items():
            properties[field] = {**properties[field], "description": description}
    required = ["allowed", "retry_after_ms", "limits"]
    schemas["Decision"]["required"] = required
    problem = schemas.pop("DenialProblem")["properties"]
    schemas["Denial"] = {
        "type": "object",
        "description": "A denial: a decision that is also a problem document.",
        "properties": {**schemas["Decision"]["properties"], **problem},
        "required": [*required, *problem],
    }
    ignored_cost = {"type": "integer", "minimum": 0, "description": "Ignored: nothing is taken."}
    schemas["Explain"] = {
        **schemas["Check"],
        "description": "The body of `POST /v1/explain`: the check to explain.",
        "properties": {**schemas["Check"]["properties"], "cost": ignored_cost},
    }
    return schemas


def _explanation_schema() -> dict[str, Any]:
    optional_object = {"type": ["object", "null"]}
    properties = {
        "decision": {"$ref": "#/components/schemas/Decision"},
        "tenant": {"type": "object"},
        "resource": {"type": "string"},
        "priority": {"type": "string"},
        "failure": {"type": ["string", "null"]},
        "policy": optional_object,
        "plans": {"type": "array", "items": {"type": "object"}},
        "override": optional_object,
        "why": {"type": "array", "items": {"type": "string"}},
    }
    return {
        "type": "object",
        "description": "The limits that would decide a check, their state, and the configuration that they come from.",
        "properties": properties,
        "required": list(properties),
    }


def _rename_refs(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        members = {name: _rename_refs(member, names) for name, member in value.items()}
        if "$ref" in members:
            start, slash, name = members["$ref"].rpartition("/")
            members["$ref"] = f"{start}{slash}{names.get(name, name)}"
        return members
    return [_rename_refs(item, names) for item in value] if isinstance(value, list) else value
