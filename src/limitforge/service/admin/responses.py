"""What admin calls answer, and how the reference describes it: as the catalog's own types are written."""

from typing import Any

import msgspec
from fastapi import Response

from limitforge.catalog.database.queries import Page
from limitforge.catalog.model import Entity, to_public_dict

SCHEMA_REF_KEY = "x-schema"

_encode = msgspec.json.Encoder().encode


def json_response(content: Any, status: int = 200, **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(_encode(content), status, named, "application/json")


def entity_response(entity: Entity, **more: Any) -> Response:
    """One thing, with its version as the ETag."""
    return json_response({**to_public_dict(entity), **more}, etag=format_etag(entity.version))


def warning_fields(warnings: list[str]) -> dict[str, Any]:
    """What an answer says more where something may not do what it looks like."""
    return {"warnings": warnings} if warnings else {}


def page_response(page: Page) -> Response:
    items = [to_public_dict(item) if isinstance(item, Entity) else item for item in page.items]
    return json_response({"items": items, "cursor": page.cursor})


def no_content_response() -> Response:
    return Response(status_code=204)


def format_etag(version: int) -> str:
    return f'"{version}"'


# --- For the reference -----------------------------------------------------------------------------------------------


def describe_response(
    schema: str, *, status: int = 200, example: Any = None, description: str = "What it is now."
) -> Any:
    """The `responses` of a route that answers one thing."""
    content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    if example is not None:
        content["example"] = example
    return {status: {"description": description, "content": {"application/json": content}}}


def describe_page(schema: str) -> Any:
    page = {
        "type": "object",
        "properties": {
            "items": {"type": "array", "items": {"$ref": f"#/components/schemas/{schema}"}},
            "cursor": {"type": ["string", "null"], "description": "For the next page; null after the last."},
        },
        "required": ["items", "cursor"],
    }
    return {200: {"description": "A page of them.", "content": {"application/json": {"schema": page}}}}


def schema_ref(name: str) -> dict[str, Any]:
    """A schema that is described in the document, and of which pydantic need not know."""
    return {SCHEMA_REF_KEY: name}


NO_CONTENT: Any = {204: {"description": "It is gone."}}
