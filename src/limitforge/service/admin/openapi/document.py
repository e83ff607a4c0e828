"""The OpenAPI document of the whole service.

FastAPI describes the admin API. `check_paths` and `check_schemas` describe the routes that take an API key, which
FastAPI does not serve. This module joins both and adds the problem documents.
"""

from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from limitforge.service.admin.idempotency import REPLAYED_HEADER
from limitforge.service.admin.openapi.admin_schemas import TEXT, admin_schemas
from limitforge.service.admin.openapi.check_paths import check_paths
from limitforge.service.admin.openapi.check_schemas import check_schemas
from limitforge.service.admin.responses import SCHEMA_REF_KEY
from limitforge.service.problems import ERROR_KINDS, HTTP_ERROR_TITLES, INTERNAL_ERROR, ProblemKind, problem_type

DESCRIPTION = """A rate limiter: each check returns whether it is allowed, what is left, and when to retry.

Checks need an API key, and the admin API needs an admin token. Every error is a problem document (RFC 9457) with a
stable `type`, a short `code` for programs, and a `detail` that names the invalid field.
"""
REQUEST_PROBLEM_STATUSES: Mapping[str, int] = {
    "malformed_json": 400,
    "malformed_request": 400,
    "unknown_path": 404,
    "method_not_allowed": 405,
    "too_slow": 408,
    "body_too_large": 413,
    "not_json": 415,
    "head_too_large": 431,
    "idempotency_key_reused": 422,
    "rate_limit_exceeded": 429,
    "overloaded": 503,
    "too_many_batches": 429,
    "too_many_refusals": 429,
}
"""The statuses of errors in the request itself, by the code of the problem."""

TAGS: Mapping[str, str] = {
    "checks": "Check whether a request is allowed now.",
    "leases": "Slots of concurrency limits.",
    "reservations": "Reserve an estimated cost now, and settle the real cost later.",
    "insight": "Read the state of limits, and explain decisions.",
    "health": "For load balancers and Prometheus.",
    "tenants": "Accounts whose traffic is limited.",
    "plans": "Named sets of limits, with all their versions.",
    "keys": "The API keys of callers.",
    "policies": "The plans that apply to the resources of a tenant.",
    "overrides": "Different limits for one subject, until they expire.",
    "tokens": "The tokens for the admin API.",
    "audit": "All changes: who, when, before and after.",
    "reset": "Clear the counters of a subject.",
    "operator": "The plan that applies to all tenants.",
    "mode": "The kill switch.",
    "usage": "Allowed and denied checks of each key, hour by hour.",
    "throttled": "The subjects with the most denials now.",
}
SECURITY = {
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An API key, `lf_live_…`."},
    "apiKeyAsBearer": {"type": "http", "scheme": "bearer", "description": "The same API key."},
    "adminToken": {"type": "http", "scheme": "bearer", "description": "An admin token, `lf_admin_…`."},
}
ETAG_HEADER = {
    "description": "The version of the returned object. Send it as `If-Match` to change this version only.",
    "schema": {"type": "string", "examples": ['"3"']},
}
REPLAYED_HEADER_SCHEMA = {
    "description": "`true` if this is the stored response of an earlier request, and nothing was created.",
    "schema": {"type": "string", "enum": ["true"]},
}


def build_document(app: FastAPI, root_path: str) -> dict[str, Any]:
    """Return the OpenAPI document of the service."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        openapi_version=app.openapi_version,
        description=DESCRIPTION,
        routes=app.routes,
        tags=[{"name": name, "description": description} for name, description in TAGS.items()],
        servers=[{"url": root_path or "/"}],
    )
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete_operation(path, method, operation)
    document["paths"] = check_paths() | document["paths"]
    for operations in document["paths"].values():
        for operation in operations.values():
            _add_problem_responses(operation)
    components = document["components"]
    bodies = {name: _without_titles(schema) for name, schema in components["schemas"].items()}
    schemas = bodies | check_schemas() | admin_schemas()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["schemas"] = dict(sorted(schemas.items()))
    components["responses"] = {
        f"Problem{status}": _problem_response(status, kinds) for status, kinds in _problem_kinds().items()
    }
    components["securitySchemes"] = SECURITY
    complete: dict[str, Any] = _with_local_refs(document)
    return complete


# --- Operations ------------------------------------------------------------------------------------------------------


def _complete_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    """Add what all admin routes have in common and FastAPI does not know: security, headers and possible problems."""
    operation["security"] = [{"adminToken": []}]
    parameters = operation.get("parameters", ())
    names = [parameter["name"] for parameter in parameters]
    operation["x-problems"] = _problem_statuses(path, method, names)
    for parameter in parameters:
        parameter["schema"] = _without_titles(_without_null(parameter["schema"]))
        parameter["schema"].pop("description", None)  # FastAPI repeats it in the parameter itself
    for status in ("200", "201"):
        response = operation["responses"].get(status)
        if response is None or not response.get("content"):
            operation["responses"].pop(status, None)
        elif _is_versioned_response(response):
            response["headers"] = {"ETag": ETAG_HEADER}
            if "Idempotency-Key" in names:
                response["headers"][REPLAYED_HEADER] = REPLAYED_HEADER_SCHEMA


def _is_versioned_response(response: Mapping[str, Any]) -> bool:
    """Return True if the response is one object with a version, and not a list or the result of a reset."""
    ref = response["content"]["application/json"]["schema"].get("$ref", "")
    return bool(ref) and not ref.endswith("/ResetResult")


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from the types of a parameter: a parameter can be absent, but not null."""
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name != "anyOf"}
    return {**rest, **options[0]} if len(options) == 1 else schema


def _problem_statuses(path: str, method: str, parameters: Collection[str]) -> list[int]:
    statuses = {401, 403, 405, 422, 429, 500, 503}
    if "{" in path or method in ("post", "put"):
        statuses |= {404}
    if method != "get":
        statuses |= {400, 409, 413, 415}
    if "If-Match" in parameters:
        statuses |= {412}
    return sorted(statuses)


def _add_problem_responses(operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    for status in operation.pop("x-problems"):
        responses.setdefault(str(status), {"$ref": f"#/components/responses/Problem{status}"})
    operation["responses"] = dict(sorted(responses.items()))


# --- Problems --------------------------------------------------------------------------------------------------------


def _problem_kinds() -> dict[int, list[ProblemKind]]:
    kinds = [kind for _, kind in ERROR_KINDS]
    kinds += [ProblemKind(REQUEST_PROBLEM_STATUSES[code], code, title) for code, title in HTTP_ERROR_TITLES.items()]
    by_status: dict[int, list[ProblemKind]] = {}
    for kind in sorted([*kinds, INTERNAL_ERROR], key=lambda kind: kind.status):
        by_status.setdefault(kind.status, []).append(kind)
    return by_status


def _problem_response(status: int, kinds: Collection[ProblemKind]) -> dict[str, Any]:
    schema = {"allOf": [{"$ref": "#/components/schemas/Problem"}]} | {
        "properties": {"status": {"const": status}, "code": {"enum": [kind.code for kind in kinds]}}
    }
    content = {"schema": schema, "examples": {kind.code: {"value": _problem_example(kind)} for kind in kinds}}
    response: dict[str, Any] = {
        "description": "; ".join(f"{kind.title} (`{kind.code}`)" for kind in kinds),
        "content": {"application/problem+json": content},
    }
    if status in (429, 503):
        seconds = {"description": "The number of seconds to wait.", "schema": {"type": "integer", "minimum": 1}}
        response["headers"] = {"Retry-After": seconds}
    elif status == 405:
        response["headers"] = {"Allow": {"description": "The methods that the path accepts.", "schema": TEXT}}
    elif status == 401:
        response["headers"] = {"WWW-Authenticate": {"schema": TEXT}}
    return response


DETAIL_EXAMPLES: Mapping[str, str] = {
    "invalid_field": "limits[0].bucket_capacity: must be 0 or more, got -1",
    "not_found": "plan_id: unknown plan 'pla_0000000000000000'",
    "conflict": "a plan called free already exists",
    "outdated": "plan pla_1a2b3c4d5e6f7g8h is at version 4, not 3: "
    "it has changed since it was read. Read it again, and retry",
}


def _problem_example(kind: ProblemKind) -> dict[str, Any]:
    detail = DETAIL_EXAMPLES.get(kind.code, kind.title[0].lower() + kind.title[1:])
    example = {"type": problem_type(kind.code), "title": kind.title, "status": kind.status, "detail": detail}
    example["code"] = kind.code
    return example | ({"field": detail.partition(":")[0]} if kind.code == "invalid_field" else {})


# --- Rewriting of schemas --------------------------------------------------------------------------------------------


def _without_titles(value: Any) -> Any:
    """Remove the titles that pydantic derives from names."""
    if isinstance(value, dict):
        return {
            name: member if name in ("example", "examples") else _without_titles(member)
            for name, member in value.items()
            if name != "title" or not isinstance(member, str)
        }
    return [_without_titles(item) for item in value] if isinstance(value, list) else value


def _with_local_refs(value: Any) -> Any:
    """Point all references at `#/components/schemas` of this document."""
    if isinstance(value, dict):
        members = {name: _with_local_refs(member) for name, member in value.items()}
        if SCHEMA_REF_KEY in members:
            members["$ref"] = f"#/components/schemas/{members.pop(SCHEMA_REF_KEY)}"
        elif isinstance(members.get("$ref"), str):
            members["$ref"] = members["$ref"].replace("#/$defs/", "#/components/schemas/")
        return members
    return [_with_local_refs(item) for item in value] if isinstance(value, list) else value
