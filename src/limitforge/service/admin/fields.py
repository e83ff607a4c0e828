"""What fields of bodies and queries are made of. Whatever the catalog itself refuses by name is left to it."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, Header, Path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from limitforge.catalog.database.queries import MAX_PAGE_SIZE
from limitforge.catalog.model import NAME_PATTERN
from limitforge.core.keys import MAX_KEY_PART_BYTES
from limitforge.errors import InvalidInput, VersionConflict

MAX_HEADER_LENGTH = 128
ID_PATTERN = "^[A-Za-z0-9_.-]{1,64}$"
"""What an id may look like: anything else is nobody's, and needs no look-up."""


def optional() -> Any:
    """A field that may be left out, and then is not changed or has the catalog's default."""
    return Field(default_factory=lambda: None)


def documented(description: str, **more: Any) -> Any:
    """For the reference alone: the catalog has the last word, and better ones."""
    return Field(description=description, json_schema_extra=more or None)


Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
PathId = Annotated[str, Path(pattern=ID_PATTERN, description="Its id.")]
Name = Annotated[str, documented("1 to 64 letters, digits or -_./ characters.", pattern=f"^{NAME_PATTERN.pattern}$")]
KeyPart = Annotated[str, documented("1 to 512 bytes of UTF-8.", minLength=1, maxLength=MAX_KEY_PART_BYTES)]
StrictBool = Annotated[bool, Strict()]
StrictInt = Annotated[int, Strict()]
StrictFloat = Annotated[float, Strict()]
FailureBehaviour = Literal["open", "closed", "local"]
Filter = Annotated[str, StringConstraints(max_length=MAX_KEY_PART_BYTES, pattern=r"^[^\x00]*$")]
"""What a list is narrowed by: exactly this."""


def unique_list_of(kind: type[StrEnum]) -> Any:
    """One or more words, each once."""
    words = {"type": "array", "items": {"enum": list(kind)}, "minItems": 1, "uniqueItems": True}
    return WithJsonSchema(words)


def _parse_timestamp(value: object) -> datetime:
    problem = "must be a time such as 2026-12-31T00:00:00Z"
    if isinstance(value, str):
        try:
            at = msgspec.convert(value, datetime)
            if at.tzinfo is None:
                problem = "must say its time zone, such as 2026-12-31T00:00:00Z"
            else:
                return at.astimezone(UTC)
        except (msgspec.ValidationError, OverflowError):
            pass
    raise PydanticCustomError("moment", problem)


Timestamp = Annotated[
    datetime, BeforeValidator(_parse_timestamp), WithJsonSchema({"type": "string", "format": "date-time"})
]


class RequestBody(BaseModel):
    """What a call takes. What it does not know is refused."""

    model_config = ConfigDict(extra="forbid")

    def given_fields(self) -> dict[str, Any]:
        """What was said, and nothing that was not."""
        return self.model_dump(exclude_unset=True)


class ListQuery(BaseModel):
    """What every list takes."""

    model_config = ConfigDict(extra="forbid")

    cursor: Annotated[
        str | None,
        Field(
            description="Where the page before this one ended.",
            max_length=4_096,
            json_schema_extra={"pattern": "^[A-Za-z0-9_-]+$"},
        ),
    ] = None
    limit: Annotated[int, Field(description="How many at most.", ge=1, le=MAX_PAGE_SIZE)] = 100

    def arguments(self) -> dict[str, Any]:
        return self.model_dump()


def _parse_if_match(
    if_match: Annotated[
        str | None,
        Header(
            alias="If-Match",
            max_length=MAX_HEADER_LENGTH,
            description="The ETag of what was read. If somebody has changed it since, the answer is 412.",
            examples=['"3"'],
            json_schema_extra={"pattern": r'^(\*|(W/)?"[0-9]{1,18}")$'},
        ),
    ] = None,
) -> int | None:
    """A proxy that compresses makes ETags weak; ours say no more than a number, so a weak one says the same."""
    if if_match is None or if_match == "*":
        return None
    tag = if_match.removeprefix("W/")
    if len(tag) < 2 or not tag.startswith('"') or not tag.endswith('"'):
        raise InvalidInput("if-match", 'must be an ETag that was answered, such as "3"')
    version = tag[1:-1]
    if not version.isascii() or not version.isdigit():
        raise VersionConflict(f"if-match: no version of it is called {tag}")
    return int(version)


IfMatch = Annotated[int | None, Depends(_parse_if_match)]
