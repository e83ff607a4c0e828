"""The OpenAPI paths of the routes that take an API key. FastAPI does not serve them, so it can't describe them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from limitforge.service.admin.openapi.check_schemas import KEY_PART, PLAN_ID_DESCRIPTION
from limitforge.service.checks.request_bodies import MAX_BATCH
from limitforge.service.checks.responses import FAIL_CLOSED, quota_problem

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
    **msgspec.to_builtins(quota_problem("burst", 1, ["burst"])),
}
UNAVAILABLE_EXAMPLE = {**DENIAL_EXAMPLE, "degraded": "closed", **msgspec.to_builtins(FAIL_CLOSED)}
LEASE_EXAMPLE = {"lease_id": "bGVhc2U.c2VhbA"}
API_KEY_SECURITY: Any = [{"apiKey": []}, {"apiKeyAsBearer": []}]
BODY_PROBLEM_STATUSES = [400, 401, 403, 405, 413, 415, 422, 429, 500, 503]

_INTEGER = {"type": "integer"}
RATE_LIMIT_HEADERS = {
    "X-RateLimit-Limit": {"description": "The size of the binding limit.", "schema": _INTEGER},
    "X-RateLimit-Remaining": {"description": "What is left of the binding limit.", "schema": _INTEGER},
    "X-RateLimit-Reset": {
        "description": "When the binding limit is unused again, in seconds since 1970 by default.",
        "schema": _INTEGER,
    },
    "RateLimit-Policy": {"description": "All limits, as a structured field.", "schema": {"type": "string"}},
    "RateLimit": {
        "description": "What is left of each limit, and the time until it is unused again.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "The number of seconds to wait. Absent if waiting never helps.",
        "schema": _INTEGER,
    },
}


def check_paths() -> dict[str, Any]:
    """Return the paths in reading order."""
    decision = {
        "200": _schema_response("Allowed.", "Decision", DECISION_EXAMPLE, headers=RATE_LIMIT_HEADERS)
    } | _denial_responses()
    lease = _request_body("Lease", plain=LEASE_EXAMPLE)
    released = {"200": _inline_response("Released.", {"released": {"type": "boolean"}}, {"released": True})}
    renewed = {"200": _inline_response("Renewed.", {"renewed": {"type": "boolean"}}, {"renewed": True})}
    return {
        "/v1/check": _post_operation(
            "check",
            "checks",
            "Check",
            "Take the cost from every limit that applies, or nothing from any limit if one has no room.",
            _request_body("Check", plain=CHECK_EXAMPLE, costly=COSTLY_CHECK_EXAMPLE),
            decision,
            [404],
        ),
        "/v1/check/batch": _post_operation(
            "check_batch",
            "checks",
            "Check a batch",
            f"Decide up to {MAX_BATCH} checks, each of up to 64 KiB, in a body of up to 1 MiB. The checks are "
            "independent, and are decided in order.",
            _batch_request_body(),
            {"200": _batch_response()},
        ),
        "/v1/reserve": _post_operation(
            "reserve",
            "reservations",
            "Reserve",
            "Reserve an estimated cost until it is settled or lapses.",
            _request_body("Reserve", plain={**CHECK_EXAMPLE, "cost": 500, "ttl_seconds": 60, "on_lapse": "keep"}),
            decision,
            [404, 409],
        ),
        "/v1/settle": _post_operation(
            "settle",
            "reservations",
            "Settle",
            "Replace the reserved cost by the real cost. The request is idempotent.",
            _request_body("Settle", plain={"reservation_id": "cmVzZXJ2ZQ.c2VhbA", "cost": 420}),
            {"200": _schema_response("The result.", "Settlement", {"outcome": "settled", "cost": 420})},
            [404],
        ),
        "/v1/release": _post_operation(
            "release",
            "leases",
            "Release",
            "Release the slots of a lease. The request is idempotent.",
            lease,
            released,
            [404],
        ),
        "/v1/renew": _post_operation(
            "renew", "leases", "Renew", "Extend a lease, so that its slots stay held.", lease, renewed, [404, 409]
        ),
        "/v1/usage": {"get": _usage_operation()},
        "/v1/explain": _post_operation(
            "explain",
            "insight",
            "Explain",
            "Explain how a check would be decided: the policy, plans and override that apply, and why. "
            "Nothing is taken.",
            _request_body("Explain", plain=CHECK_EXAMPLE),
            {"200": _schema_response("The explanation.", "Explanation", None)},
            [404],
        ),
        "/v1/health": {"get": _health_operation()},
        "/v1/ready": {"get": _ready_operation()},
        "/metrics": {"get": _metrics_operation()},
    }


# --- Operations ------------------------------------------------------------------------------------------------------


def _post_operation(
    operation_id: str,
    tag: str,
    summary: str,
    description: str,
    body: Mapping[str, Any],
    responses: Mapping[str, Any],
    more_problem_statuses: list[int] | None = None,
) -> dict[str, Any]:
    return {
        "post": {
            "operationId": operation_id,
            "tags": [tag],
            "summary": summary,
            "description": description,
            "security": API_KEY_SECURITY,
            "requestBody": {"required": True, "content": {"application/json": body}},
            "responses": dict(responses),
            "x-problems": sorted([*BODY_PROBLEM_STATUSES, *(more_problem_statuses or [])]),
        }
    }


def _usage_operation() -> dict[str, Any]:
    plan_id = {"type": "string", "description": PLAN_ID_DESCRIPTION}
    parameters = [("resource", True, KEY_PART), ("subject", True, KEY_PART), ("plan_id", False, plan_id)]
    return {
        "operationId": "usage",
        "tags": ["insight"],
        "summary": "Usage",
        "description": "Return the state of the limits of a subject. Nothing is taken.",
        "security": API_KEY_SECURITY,
        "parameters": [
            {"name": name, "in": "query", "required": required, "schema": schema}
            for name, required, schema in parameters
        ],
        "responses": {
            "200": _schema_response(
                "The state of the limits. `allowed` is always true.",
                "Decision",
                DECISION_EXAMPLE,
                headers=RATE_LIMIT_HEADERS,
            )
        },
        "x-problems": [400, 401, 403, 404, 405, 422, 429, 500, 503],
    }


def _health_operation() -> dict[str, Any]:
    fields = {"status": {"const": "ok"}, "version": {"type": "string"}}
    return {
        "operationId": "health",
        "tags": ["health"],
        "summary": "Liveness",
        "description": "Return 200 if the process responds.",
        "security": [],
        "responses": {"200": _inline_response("The process responds.", fields, {"status": "ok", "version": "0.1.0"})},
        "x-problems": [405],
    }


def _ready_operation() -> dict[str, Any]:
    backend = {
        "type": "object",
        "properties": {"state": {"type": "string"}, "since": {"type": "number"}},
        "required": ["state", "since"],
    }
    fields = {"status": {"enum": ["ok", "degraded"]}, "store": backend, "catalog": backend}
    ok = {"state": "ok", "since": 1_767_225_600.0}
    example = {"status": "ok", "store": ok, "catalog": ok}
    return {
        "operationId": "ready",
        "tags": ["health"],
        "summary": "Readiness",
        "description": "Return the state of the store and the catalog. `degraded` means that the failure behaviour or "
        "cached configuration is in use.",
        "security": [],
        "responses": {"200": _inline_response("The process decides checks.", fields, example)},
        "x-problems": [405],
    }


def _metrics_operation() -> dict[str, Any]:
    example = '# TYPE rl_allowed_total counter\nrl_allowed_total{tenant="acme"} 42\n'
    content = {"text/plain": {"schema": {"type": "string"}, "example": example}}
    return {
        "operationId": "metrics",
        "tags": ["health"],
        "summary": "Metrics",
        "description": "Return the counters of all tenants, summed over all processes, in the text format of "
        "Prometheus. Requires a token for all tenants with the scope `read`.",
        "security": [{"adminToken": []}],
        "responses": {"200": {"description": "The current values.", "content": content}},
        "x-problems": [400, 401, 403, 405, 429, 500, 503],
    }


# --- Request bodies and responses ------------------------------------------------------------------------------------


def _request_body(schema: str, **examples: Any) -> dict[str, Any]:
    named_examples = {name: {"value": value} for name, value in examples.items()}
    return {"schema": {"$ref": f"#/components/schemas/{schema}"}, "examples": named_examples}


def _batch_request_body() -> dict[str, Any]:
    check = {"anyOf": [{"$ref": "#/components/schemas/Check"}, {}]}  # an invalid check gets a problem in its place
    checks = {"type": "array", "items": check, "maxItems": MAX_BATCH}
    schema = {"type": "object", "properties": {"checks": checks}, "required": ["checks"], "additionalProperties": False}
    return {"schema": schema, "example": {"checks": [CHECK_EXAMPLE, COSTLY_CHECK_EXAMPLE]}}


def _batch_response() -> dict[str, Any]:
    decision = {"anyOf": [{"$ref": "#/components/schemas/Decision"}, {"$ref": "#/components/schemas/Problem"}]}
    return _inline_response(
        "The decisions, in the order of the checks.",
        {"decisions": {"type": "array", "items": decision}},
        {"decisions": [DECISION_EXAMPLE]},
    )


def _denial_responses() -> dict[str, Any]:
    schema = {"anyOf": [{"$ref": "#/components/schemas/Denial"}, {"$ref": "#/components/schemas/Problem"}]}

    def denial(description: str, example: Any) -> dict[str, Any]:
        content = {"application/problem+json": {"schema": schema, "example": example}}
        return {"description": description, "headers": RATE_LIMIT_HEADERS, "content": content}

    return {
        "429": denial(
            "Denied, and nothing was taken; or refused, because the client sent too many unknown keys or invalid "
            "bodies.",
            DENIAL_EXAMPLE,
        ),
        "503": denial(
            "Denied by the failure behaviour `closed`, because the store is unavailable; or the service "
            "could not decide.",
            UNAVAILABLE_EXAMPLE,
        ),
    }


def _schema_response(description: str, schema: str, example: Any, headers: Any = None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    if example is not None:
        content["example"] = example
    response: dict[str, Any] = {"description": description, "content": {"application/json": content}}
    return response if headers is None else {**response, "headers": headers}


def _inline_response(description: str, properties: Any, example: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"description": description, "content": {"application/json": {"schema": schema, "example": example}}}
