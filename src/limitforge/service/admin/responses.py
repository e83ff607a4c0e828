"""The responses of the admin API, and how OpenAPI describes them."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response

from limitforge.catalog.database.pages import Page
from limitforge.catalog.model import Entity, to_public_dict
from limitforge.core.headers import parse_block
from limitforge.errors import LimitforgeError
from limitforge.service.checks.responses import problem_response

SCHEMA_REF_KEY = "x-schema"

_encode = msgspec.json.Encoder().encode


def json_response(
    content: Any, status: int = 200, *, etag: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    all_headers = {**({} if etag is None else {"etag": etag}), **(headers or {})}
    return Response(_encode(content), status, all_headers, "application/json")


def error_response(error: LimitforgeError) -> Response:
    """Return the problem document of an error with its header fields."""
    problem = problem_response(error)
    response = Response(problem.body, problem.status, media_type=problem.content_type.decode())
    response.raw_headers += parse_block(problem.headers)
    return response


def entity_response(entity: Entity, **fields: Any) -> Response:
    """Return an entity with its version as the ETag; `fields` are added to it."""
    return json_response({**to_public_dict(entity), **fields}, etag=format_etag(entity.version))


def warning_fields(warnings: list[str]) -> dict[str, Any]:
    """Return the `warnings` field, if there are any."""
    return {"warnings": warnings} if warnings else {}


def page_response(page: Page) -> Response:
    items = [to_public_dict(item) if isinstance(item, Entity) else item for item in page.items]
    return json_response({"items": items, "cursor": page.cursor})


def no_content_response() -> Response:
    return Response(status_code=204)


def format_etag(version: int) -> str:
    return f'"{version}"'


# --- For OpenAPI -----------------------------------------------------------------------------------------------------


def describe_response(
    schema: str, *, status: int = 200, example: Any = None, description: str = "The current state."
) -> Any:
    """Return the `responses` argument of a route that returns one object."""
    content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    if example is not None:
        content["example"] = example
    return {status: {"description": description, "content": {"application/json": content}}}


def describe_page(schema: str) -> Any:
    """Return the `responses` argument of a route that returns a page of a list."""
    page = {
        "type": "object",
        "properties": {
            "items": {"type": "array", "items": {"$ref": f"#/components/schemas/{schema}"}},
            "cursor": {"type": ["string", "null"], "description": "For the next page; null on the last page."},
        },
        "required": ["items", "cursor"],
    }
    return {200: {"description": "One page of the list.", "content": {"application/json": {"schema": page}}}}


def schema_ref(name: str) -> dict[str, Any]:
    """Refer to a schema of the OpenAPI document that pydantic does not know."""
    return {SCHEMA_REF_KEY: name}


NO_CONTENT: Any = {204: {"description": "Deleted."}}
