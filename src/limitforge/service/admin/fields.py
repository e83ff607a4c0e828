"""The field types that request bodies and queries are made of.

They reject wrong types and unknown fields. Other rules are left to the catalog, whose errors name the field too.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import Depends, Header, Path
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError

from limitforge.catalog.database.pages import MAX_PAGE_SIZE
from limitforge.catalog.fields import field_docs
from limitforge.catalog.model import Entity
from limitforge.core.keys import MAX_KEY_PART_BYTES
from limitforge.errors import InvalidInput, VersionConflict

MAX_HEADER_LENGTH = 128
ID_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"
"""The form of every id. An id of another form is unknown without a lookup."""


def optional() -> Any:
    """Return the default of an optional field. A field left out is not changed, or gets the catalog's default."""
    return Field(default_factory=lambda: None)  # a factory keeps the default null out of the JSON Schema


Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
PathId = Annotated[str, Path(pattern=ID_PATTERN, description="Its id.")]
FailureBehaviour = Literal["open", "closed", "local"]
Filter = Annotated[str, StringConstraints(max_length=MAX_KEY_PART_BYTES, pattern=r"^[^\x00]*$")]
"""A value that a list is filtered by. It must match exactly."""


def list_of(enum_type: type[StrEnum]) -> Any:
    """Describe a list of values of an enum."""
    return WithJsonSchema({"type": "array", "items": {"enum": list(enum_type)}})


def _parse_timestamp(value: object) -> datetime:
    problem = "must be a time such as 2026-12-31T00:00:00Z"
    if isinstance(value, str):
        try:
            timestamp = msgspec.convert(value, datetime)
            if timestamp.tzinfo is None:
                problem = "must have a time zone, such as 2026-12-31T00:00:00Z"
            else:
                return timestamp.astimezone(UTC)
        except (msgspec.ValidationError, OverflowError):
            pass
    raise PydanticCustomError("timestamp", problem)


Timestamp = Annotated[
    datetime, BeforeValidator(_parse_timestamp), WithJsonSchema({"type": "string", "format": "date-time"})
]


class RequestBody(BaseModel):
    """The base of request bodies. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    def given_fields(self) -> dict[str, Any]:
        """Return the fields that the request contains, without the defaults of the others."""
        return self.model_dump(exclude_unset=True)


class EntityBody(RequestBody):
    """The base of bodies that create or change an entity.

    A subclass declares the names and types of fields. OpenAPI takes their descriptions and constraints from the entity,
    which also validates them.
    """

    entity: ClassVar[type[Entity]]

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        docs = field_docs(cls.entity)
        for name, field in handler.resolve_ref_schema(schema).get("properties", {}).items():
            if name in docs:
                field.update({**docs[name].schema, "description": docs[name].description})
        return schema


class ListQuery(BaseModel):
    """The query parameters that every list accepts. Subclasses add filters."""

    model_config = ConfigDict(extra="forbid")

    cursor: Annotated[
        str | None,
        Field(
            description="The cursor of the previous page.",
            max_length=4_096,
            json_schema_extra={"pattern": "^[A-Za-z0-9_-]+$"},
        ),
    ] = None
    limit: Annotated[int, Field(description="The largest number of items to return.", ge=1, le=MAX_PAGE_SIZE)] = 100


def _parse_if_match(
    if_match: Annotated[
        str | None,
        Header(
            alias="If-Match",
            max_length=MAX_HEADER_LENGTH,
            description="The ETag of the version to change. If it has changed since, the answer is 412.",
            examples=['"3"'],
            json_schema_extra={"pattern": r'^(\*|(W/)?"[0-9]{1,18}")$'},
        ),
    ] = None,
) -> int | None:
    """Return the version in an `If-Match` header.

    A compressing proxy makes an ETag weak. A weak ETag is accepted, because it still names the version.
    """
    if if_match is None or if_match == "*":
        return None
    tag = if_match.removeprefix("W/")
    if len(tag) < 2 or not tag.startswith('"') or not tag.endswith('"'):
        raise InvalidInput("if-match", 'must be an ETag from a response, such as "3"')
    version = tag[1:-1]
    if not version.isascii() or not version.isdigit():
        raise VersionConflict(f"if-match: unknown version {tag}")
    return int(version)


IfMatch = Annotated[int | None, Depends(_parse_if_match)]
