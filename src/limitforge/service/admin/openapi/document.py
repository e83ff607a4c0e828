"""The OpenAPI document of the whole service: what FastAPI knows of the admin API, the calls of the other doors, and
every problem.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from limitforge.service.admin.idempotency import REPLAYED_HEADER
from limitforge.service.admin.openapi import checks
from limitforge.service.admin.openapi.schemas import TEXT, admin_schemas
from limitforge.service.admin.responses import SCHEMA_REF_KEY
from limitforge.service.problems import ERROR_KINDS, HTTP_ERROR_TITLES, INTERNAL_ERROR, ProblemKind, problem_type

DESCRIPTION = """Rate limiting as a contract: what a caller may do now, what is left, and when to come back.

Checks take an API key, administration takes an admin token. What goes wrong is answered as a problem document
(RFC 9457) with a stable `type`, a short `code` for programs, and a `detail` that names the field.
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
"""Of problems with the request itself."""

TAGS: Mapping[str, str] = {
    "checks": "What may be done now.",
    "leases": "Slots of concurrency limits.",
    "reservations": "Costs that are known later.",
    "insight": "What is left, and why.",
    "health": "For load balancers, and for Prometheus.",
    "tenants": "Accounts whose traffic is limited.",
    "plans": "Named sets of limits, with all their versions.",
    "keys": "What callers show.",
    "policies": "Which plan applies to which resources.",
    "overrides": "Other numbers for one subject, for a while.",
    "tokens": "Who may administer.",
    "audit": "Who changed what.",
    "reset": "Forget what was counted.",
    "operator": "The plan above all tenants.",
    "mode": "The kill switch.",
    "usage": "What keys were told, hour by hour.",
    "throttled": "Who is throttled now.",
}
SECURITY = {
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An API key, `lf_live_…`."},
    "apiKeyAsBearer": {"type": "http", "scheme": "bearer", "description": "The same API key."},
    "adminToken": {"type": "http", "scheme": "bearer", "description": "An admin token, `lf_admin_…`."},
}
ETAG_HEADER = {
    "description": "The version of what is answered: send it as `If-Match` to change this one and no later one.",
    "schema": {"type": "string", "examples": ['"3"']},
}
REPLAYED_HEADER_SCHEMA = {
    "description": "`true` if this was answered before: nothing was created now.",
    "schema": {"type": "string", "enum": ["true"]},
}


def build_document(app: FastAPI, root_path: str) -> dict[str, Any]:
    whole = get_openapi(
        title=app.title,
        version=app.version,
        openapi_version=app.openapi_version,
        description=DESCRIPTION,
        routes=app.routes,
        tags=[{"name": name, "description": description} for name, description in TAGS.items()],
        servers=[{"url": root_path or "/"}],
    )
    for path, operations in whole["paths"].items():
        for method, operation in operations.items():
            _complete_operation(path, method, operation)
    whole["paths"] = checks.check_paths() | whole["paths"]
    for operations in whole["paths"].values():
        for operation in operations.values():
            _add_problem_responses(operation)
    parts = whole["components"]
    bodies = {name: _without_titles(schema) for name, schema in parts["schemas"].items()}
    described = bodies | checks.check_schemas() | admin_schemas()
    for stranger in ("HTTPValidationError", "ValidationError"):
        described.pop(stranger, None)
    parts["schemas"] = dict(sorted(described.items()))
    parts["responses"] = {
        f"Problem{status}": _problem_response(status, kinds) for status, kinds in _problem_kinds().items()
    }
    parts["securitySchemes"] = SECURITY
    at_home: dict[str, Any] = _with_local_refs(whole)
    return at_home


# --- Operations ------------------------------------------------------------------------------------------------------


def _complete_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    """What all calls of the admin API have, and FastAPI does not know."""
    operation["security"] = [{"adminToken": []}]
    names = [each["name"] for each in operation.get("parameters", ())]
    operation["x-problems"] = _problem_statuses(path, method, names)
    for parameter in operation.get("parameters", ()):
        parameter["schema"] = _without_titles(_without_null(parameter["schema"]))
        parameter["schema"].pop("description", None)  # the parameter itself has it
    for status in ("200", "201"):
        answer = operation["responses"].get(status)
        if answer is None or not answer.get("content"):
            operation["responses"].pop(status, None)
        elif _is_versioned_response(answer):
            answer["headers"] = {"ETag": ETAG_HEADER}
            if "Idempotency-Key" in names:
                answer["headers"][REPLAYED_HEADER] = REPLAYED_HEADER_SCHEMA


def _is_versioned_response(answer: Mapping[str, Any]) -> bool:
    """Whether it answers one thing that has a version."""
    ref = answer["content"]["application/json"]["schema"].get("$ref", "")
    return bool(ref) and not ref.endswith("/ResetAnswer")


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter is there or absent, and never null."""
    options = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    rest = {name: each for name, each in schema.items() if name != "anyOf"}
    return {**rest, **options[0]} if len(options) == 1 else schema


def _problem_statuses(path: str, method: str, names: Collection[str]) -> list[int]:
    found = {401, 403, 405, 422, 429, 500, 503}
    if "{" in path or method in ("post", "put"):
        found |= {404}
    if method != "get":
        found |= {400, 409, 413, 415}
    if "If-Match" in names:
        found |= {412}
    return sorted(found)


def _add_problem_responses(operation: dict[str, Any]) -> None:
    told = operation["responses"]
    told.pop("422", None)
    for status in operation.pop("x-problems"):
        told.setdefault(str(status), {"$ref": f"#/components/responses/Problem{status}"})
    operation["responses"] = dict(sorted(told.items()))


# --- Problems --------------------------------------------------------------------------------------------------------


def _problem_kinds() -> dict[int, list[ProblemKind]]:
    kinds = [kind for _, kind in ERROR_KINDS]
    kinds += [ProblemKind(REQUEST_PROBLEM_STATUSES[code], code, title) for code, title in HTTP_ERROR_TITLES.items()]
    found: dict[int, list[ProblemKind]] = {}
    for kind in sorted([*kinds, INTERNAL_ERROR], key=lambda kind: kind.status):
        found.setdefault(kind.status, []).append(kind)
    return found


def _problem_response(status: int, kinds: Iterable[ProblemKind]) -> dict[str, Any]:
    listed = list(kinds)
    schema = {"allOf": [{"$ref": "#/components/schemas/Problem"}]} | {
        "properties": {"status": {"const": status}, "code": {"enum": [kind.code for kind in listed]}}
    }
    content = {"schema": schema, "examples": {kind.code: {"value": _problem_example(kind)} for kind in listed}}
    answer: dict[str, Any] = {
        "description": "; ".join(f"{kind.title} (`{kind.code}`)" for kind in listed),
        "content": {"application/problem+json": content},
    }
    waits = {"description": "How many seconds to wait.", "schema": {"type": "integer", "minimum": 1}}
    if status in (429, 503):
        answer["headers"] = {"Retry-After": waits}
    elif status == 405:
        answer["headers"] = {"Allow": {"description": "What the path takes.", "schema": TEXT}}
    elif status == 401:
        answer["headers"] = {"WWW-Authenticate": {"schema": TEXT}}
    return answer


DETAIL_EXAMPLES: Mapping[str, str] = {
    "invalid_field": "limits[0].bucket_capacity: must be 0 or more, got -1",
    "not_found": "plan_id: this tenant has no plan 'pla_0000000000000000'",
    "conflict": "there is a plan called free already",
    "outdated": "plan pla_1a2b3c4d5e6f7g8h is at version 4, not 3: somebody else has changed it since it was read",
}


def _problem_example(kind: ProblemKind) -> dict[str, Any]:
    detail = DETAIL_EXAMPLES.get(kind.code, kind.title[0].lower() + kind.title[1:])
    example = {"type": problem_type(kind.code), "title": kind.title, "status": kind.status, "detail": detail}
    example["code"] = kind.code
    return example | ({"field": detail.partition(":")[0]} if kind.code == "invalid_field" else {})


# --- Underneath -----------------------------------------------------------------------------------------------------


def _without_titles(value: Any) -> Any:
    """Without the titles that pydantic makes of names."""
    if isinstance(value, dict):
        return {
            name: each if name in ("example", "examples") else _without_titles(each)
            for name, each in value.items()
            if name != "title" or not isinstance(each, str)
        }
    return [_without_titles(each) for each in value] if isinstance(value, list) else value


def _with_local_refs(value: Any) -> Any:
    """With references into this document, wherever they pointed before."""
    if isinstance(value, dict):
        if SCHEMA_REF_KEY in value:
            return {"$ref": f"#/components/schemas/{value[SCHEMA_REF_KEY]}"}
        plain = {name: _with_local_refs(each) for name, each in value.items()}
        if isinstance(plain.get("$ref"), str):
            plain["$ref"] = plain["$ref"].replace("#/$defs/", "#/components/schemas/")
        return plain
    return [_with_local_refs(each) for each in value] if isinstance(value, list) else value
