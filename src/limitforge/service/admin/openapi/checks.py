"""How the reference describes the calls that take an API key, which FastAPI does not serve."""

from typing import Any

import msgspec

from limitforge.core.reservations import Settlement
from limitforge.service.checks.request_bodies import MAX_BATCH, MAX_COSTS, CheckBody
from limitforge.service.checks.responses import DecisionBody, DenialProblem
from limitforge.service.checks.tenant_api import LeaseBody, ReserveBody, SettleBody

SCHEMA_NAMES: dict[type, str] = {
    CheckBody: "Check",
    ReserveBody: "Reserve",
    SettleBody: "Settle",
    LeaseBody: "Lease",
    DecisionBody: "Decision",
    DenialProblem: "Refusal",
    Settlement: "Settlement",
}
"""What the bodies are called in the reference."""

CHECK_EXAMPLE = {"resource": "GET:/orders", "subject": "user:42"}
COSTLY_CHECK_EXAMPLE = {**CHECK_EXAMPLE, "cost": 1, "costs": {"elements": 50}, "priority": "P2"}
LIMIT_EXAMPLE = {
    "limit": 100,
    "remaining": 99,
    "reset_after_ms": 600,
    "retry_after_ms": 0,
    "allowed": True,
    "monitored": False,
}
DECISION_EXAMPLE = {
    "allowed": True,
    "limit": 100,
    "remaining": 99,
    "reset_at": 1_767_225_600,
    "reset_after_ms": 600,
    "retry_after_ms": 0,
    "binding": "burst",
    "limits": {"burst": LIMIT_EXAMPLE},
}
DENIAL_EXAMPLE = {
    **DECISION_EXAMPLE,
    "allowed": False,
    "remaining": 0,
    "retry_after_ms": 600,
    "limits": {"burst": {**LIMIT_EXAMPLE, "remaining": 0, "retry_after_ms": 600, "allowed": False}},
    "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
    "title": "Quota exceeded",
    "status": 429,
    "detail": "burst has no room: come back in 1 s",
    "code": "rate_limit_exceeded",
    "violated-policies": ["burst"],
}
LEASE_EXAMPLE = {"lease_id": "bGVhc2U.c2VhbA"}
API_KEY_SECURITY: Any = [{"apiKey": []}, {"apiKeyAsBearer": []}]
BODY_PROBLEM_STATUSES = [400, 401, 403, 405, 413, 415, 422, 429, 500, 503]

_INTEGER = {"type": "integer"}
RATE_LIMIT_HEADERS = {
    "X-RateLimit-Limit": {"description": "The limit that binds.", "schema": _INTEGER},
    "X-RateLimit-Remaining": {"description": "What is left of it.", "schema": _INTEGER},
    "X-RateLimit-Reset": {"description": "When it is whole again, in epoch seconds by default.", "schema": _INTEGER},
    "RateLimit-Policy": {"description": "Every limit, as a structured field.", "schema": {"type": "string"}},
    "RateLimit": {"description": "What is left of each, and for how long.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds to wait; absent where waiting never helps.", "schema": _INTEGER},
}
PLAN_ID_DESCRIPTION = "A plan instead of those of the tenant and the policy. It takes a key with the scope `plans`."


def check_paths() -> dict[str, Any]:
    """All of them, in the order in which somebody would get to know them."""
    decided = {
        "200": _schema_response("Allowed.", "Decision", DECISION_EXAMPLE, headers=RATE_LIMIT_HEADERS)
    } | _denial_responses()
    lease = _request_body("Lease", plain=LEASE_EXAMPLE)
    released = {"200": _inline_response("Done, or done before.", {"released": {"type": "boolean"}}, {"released": True})}
    renewed = {"200": _inline_response("It is held for longer.", {"renewed": {"type": "boolean"}}, {"renewed": True})}
    return {
        "/v1/check": _post_operation(
            "check",
            "checks",
            "Check",
            "Take a cost from every limit that applies, or nothing from any if one has no room.",
            _request_body("Check", plain=CHECK_EXAMPLE, costly=COSTLY_CHECK_EXAMPLE),
            decided,
            [404],
        ),
        "/v1/check/batch": _post_operation(
            "check_batch",
            "checks",
            "Check many",
            f"Up to {MAX_BATCH} checks of up to 64 KiB in a body of up to 1 MiB, each judged alone and in order.",
            _batch_request_body(),
            {"200": _batch_response()},
        ),
        "/v1/reserve": _post_operation(
            "reserve",
            "reservations",
            "Reserve",
            "Hold an estimate, until it is settled or lapses.",
            _request_body("Reserve", plain={**CHECK_EXAMPLE, "cost": 500, "ttl_seconds": 60, "on_lapse": "keep"}),
            decided,
            [404, 409],
        ),
        "/v1/settle": _post_operation(
            "settle",
            "reservations",
            "Settle",
            "Replace an estimate by the real cost, once however often it is sent.",
            _request_body("Settle", plain={"reservation_id": "cmVzZXJ2ZQ.c2VhbA", "cost": 420}),
            {"200": _schema_response("How it ended.", "Settlement", {"outcome": "settled", "cost": 420})},
            [404],
        ),
        "/v1/release": _post_operation(
            "release", "leases", "Release", "Give slots back. Twice is fine.", lease, released, [404]
        ),
        "/v1/renew": _post_operation("renew", "leases", "Renew", "Hold slots for longer.", lease, renewed, [404, 409]),
        "/v1/usage": {"get": _usage_operation()},
        "/v1/explain": _post_operation(
            "explain",
            "insight",
            "Explain",
            "What a check would be decided by, without taking anything: policy, plans, override, and why.",
            _request_body("Explain", plain=CHECK_EXAMPLE),
            {"200": _schema_response("What was found.", "Explanation", None)},
            [404],
        ),
        "/v1/health": {"get": _health_operation()},
        "/v1/ready": {"get": _ready_operation()},
        "/metrics": {"get": _metrics_operation()},
    }


def check_schemas() -> dict[str, Any]:
    _, found = msgspec.json.schema_components(list(SCHEMA_NAMES), ref_template="#/components/schemas/{name}")
    renamed = {kind.__name__: name for kind, name in SCHEMA_NAMES.items()}
    plain = {renamed.get(name, name): _rename_refs(schema, renamed) for name, schema in found.items()}
    for schema in plain.values():
        schema.pop("title", None)
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())
    decision, refusal = plain["Decision"]["properties"], plain.pop("Refusal")["properties"]
    plain["Denial"] = {
        "type": "object",
        "description": "A decision as a problem document.",
        "properties": {**decision, **refusal},
    }
    for name in ("Check", "Reserve"):
        properties = plain[name]["properties"]
        for part in ("resource", "subject"):
            properties[part] = {"type": "string", "minLength": 1, "maxLength": 512}
        properties["cost"] = {"type": "integer", "minimum": 0, "default": 1}
        properties["costs"] = {**properties["costs"], "description": f"By the name of a limit; at most {MAX_COSTS}."}
        properties["priority"] = {"enum": ["P0", "P1", "P2", "P3", None], "default": None}
        properties["plan_id"]["description"] = PLAN_ID_DESCRIPTION
    always = ["allowed", "retry_after_ms", "limits"]
    plain["Decision"]["required"] = always
    plain["Denial"]["required"] = [*always, "type", "title", "status", "detail", "code", "violated-policies"]
    plain["Reserve"]["properties"]["on_lapse"] = {"enum": ["keep", "refund"], "default": "keep"}
    ignored = {"type": "integer", "minimum": 0, "description": "Nothing is taken, whatever it says."}
    plain["Explain"] = {**plain["Check"], "properties": {**plain["Check"]["properties"], "cost": ignored}}
    plain["Explain"]["description"] = "What `POST /v1/explain` takes: a check."
    plain["Explanation"] = _explanation_schema()
    return plain


def _explanation_schema() -> dict[str, Any]:
    some = {"type": ["object", "null"]}
    properties = {
        "decision": {"$ref": "#/components/schemas/Decision"},
        "tenant": {"type": "object"},
        "resource": {"type": "string"},
        "priority": {"type": "string"},
        "failure": {"type": ["string", "null"]},
        "policy": some,
        "plans": {"type": "array", "items": {"type": "object"}},
        "override": some,
        "why": {"type": "array", "items": {"type": "string"}},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def _denial_responses() -> dict[str, Any]:
    one = {"anyOf": [{"$ref": "#/components/schemas/Denial"}, {"$ref": "#/components/schemas/Problem"}]}

    def denial(description: str, example: Any) -> dict[str, Any]:
        content = {"application/problem+json": {"schema": one, "example": example}}
        return {"description": description, "headers": RATE_LIMIT_HEADERS, "content": content}

    closed = {
        **DENIAL_EXAMPLE,
        "degraded": "closed",
        "status": 503,
        "code": "store_unavailable",
        "violated-policies": [],
    }
    closed |= {"type": "urn:limitforge:problem:store-unavailable", "title": "The store can't be reached now"}
    return {
        "429": denial("Denied, and nothing was taken; or too many unknown keys or invalid bodies.", DENIAL_EXAMPLE),
        "503": denial("Denied without the store, by the failure behaviour `closed`; or not decided at all.", closed),
    }


def _post_operation(
    operation_id: str, tag: str, summary: str, description: str, body: Any, answers: Any, more: list[int] | None = None
) -> dict[str, Any]:
    return {
        "post": {
            "operationId": operation_id,
            "tags": [tag],
            "summary": summary,
            "description": description,
            "security": API_KEY_SECURITY,
            "requestBody": {"required": True, "content": {"application/json": body}},
            "responses": dict(answers),
            "x-problems": sorted([*BODY_PROBLEM_STATUSES, *(more or [])]),
        }
    }


def _request_body(schema: str, **examples: Any) -> dict[str, Any]:
    named = {name: {"value": value} for name, value in examples.items()}
    return {"schema": {"$ref": f"#/components/schemas/{schema}"}, "examples": named}


def _batch_request_body() -> dict[str, Any]:
    each = {"anyOf": [{"$ref": "#/components/schemas/Check"}, {}]}  # a wrong one is told in its place
    checks = {"type": "array", "items": each, "maxItems": MAX_BATCH}
    schema = {"type": "object", "properties": {"checks": checks}, "required": ["checks"], "additionalProperties": False}
    return {"schema": schema, "example": {"checks": [CHECK_EXAMPLE, COSTLY_CHECK_EXAMPLE]}}


def _batch_response() -> dict[str, Any]:
    each = {"anyOf": [{"$ref": "#/components/schemas/Decision"}, {"$ref": "#/components/schemas/Problem"}]}
    return _inline_response(
        "In order.", {"decisions": {"type": "array", "items": each}}, {"decisions": [DECISION_EXAMPLE]}
    )


def _usage_operation() -> dict[str, Any]:
    part = {"type": "string", "minLength": 1, "maxLength": 512}
    plan_id = {"type": "string", "description": PLAN_ID_DESCRIPTION}
    asked = [("resource", True, part), ("subject", True, part), ("plan_id", False, plan_id)]
    return {
        "operationId": "usage",
        "tags": ["insight"],
        "summary": "Usage",
        "description": "The state of the limits, without taking anything.",
        "security": API_KEY_SECURITY,
        "parameters": [
            {"name": name, "in": "query", "required": required, "schema": schema} for name, required, schema in asked
        ],
        "responses": {
            "200": _schema_response(
                "As a check would find it.", "Decision", DECISION_EXAMPLE, headers=RATE_LIMIT_HEADERS
            )
        },
        "x-problems": [400, 401, 403, 404, 405, 422, 429, 500, 503],
    }


def _health_operation() -> dict[str, Any]:
    fields = {"status": {"const": "ok"}, "version": {"type": "string"}}
    return {
        "operationId": "health",
        "tags": ["health"],
        "summary": "Live",
        "description": "Whether the process answers.",
        "security": [],
        "responses": {"200": _inline_response("It does.", fields, {"status": "ok", "version": "0.1.0"})},
        "x-problems": [405],
    }


def _ready_operation() -> dict[str, Any]:
    told_of_each = {"state": {"type": "string"}, "since": {"type": "number"}}
    backend = {
        "type": "object",
        "properties": told_of_each,
        "required": ["state", "since"],
    }
    fields = {"status": {"enum": ["ok", "degraded"]}, "store": backend, "catalog": backend}
    ok = {"state": "ok", "since": 1_767_225_600.0}
    example = {"status": "ok", "store": ok, "catalog": ok}
    return {
        "operationId": "ready",
        "tags": ["health"],
        "summary": "Ready",
        "description": "Whether checks are answered; `degraded` if it is by a failure behaviour.",
        "security": [],
        "responses": {"200": _inline_response("They are.", fields, example)},
        "x-problems": [405],
    }


def _metrics_operation() -> dict[str, Any]:
    example = '# TYPE rl_allowed_total counter\nrl_allowed_total{tenant="acme"} 42\n'
    content = {"text/plain": {"schema": {"type": "string"}, "example": example}}
    return {
        "operationId": "metrics",
        "tags": ["health"],
        "summary": "Metrics",
        "description": "Counters of all tenants, summed over all processes, in the text format of Prometheus. It takes"
        " a token of all tenants with the scope `read`.",
        "security": [{"adminToken": []}],
        "responses": {"200": {"description": "As they are now.", "content": content}},
        "x-problems": [400, 401, 403, 405, 429, 500, 503],
    }


def _schema_response(description: str, schema: str, example: Any, headers: Any = None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    if example is not None:
        content["example"] = example
    answer: dict[str, Any] = {"description": description, "content": {"application/json": content}}
    return answer if headers is None else {**answer, "headers": headers}


def _inline_response(description: str, properties: Any, example: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"description": description, "content": {"application/json": {"schema": schema, "example": example}}}


def _rename_refs(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        plain = {key: _rename_refs(each, names) for key, each in value.items()}
        if "$ref" in plain:
            start, slash, name = plain["$ref"].rpartition("/")
            plain["$ref"] = f"{start}{slash}{names.get(name, name)}"
        return plain
    return [_rename_refs(each, names) for each in value] if isinstance(value, list) else value
