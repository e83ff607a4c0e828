"""Validate single fields of entities. Each check raises `InvalidInput` with the name of the field."""

import json
import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from limitforge.core.check import Failure
from limitforge.core.exact import short_repr
from limitforge.core.lanes import Lanes
from limitforge.errors import InvalidInput

NAME_PATTERN = re.compile(r"[A-Za-z0-9_./-]{1,64}")
MAX_METADATA_BYTES = 4_096

_SURROGATE = re.compile("[\ud800-\udfff]")


def is_storable(value: str) -> bool:
    """Return True if a database can store this text, and can be searched for it."""
    return "\0" not in value and _SURROGATE.search(value) is None


def validate_name(field: str, name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidInput(field, f"must be 1 to 64 letters, digits or -_./ characters, got {short_repr(name)}")


def validate_text(field: str, value: str, maximum: int) -> None:
    if len(value) > maximum:
        raise InvalidInput(field, f"must be at most {maximum} characters")
    validate_storable(field, value)


def validate_storable(field: str, value: str) -> None:
    if not is_storable(value):
        raise InvalidInput(field, "must be valid Unicode without NUL characters, which databases can't store")


def validate_metadata(metadata: dict[str, Any]) -> None:
    """Refuse metadata that does not survive JSON (in the database) and MessagePack (in Redis)."""
    try:
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode()
        survives = (
            len(text) > MAX_METADATA_BYTES or msgspec.msgpack.decode(msgspec.msgpack.encode(metadata)) == metadata
        )
        survives = survives and json.loads(text) == metadata
    except (ValueError, TypeError, RecursionError, OverflowError, msgspec.MsgspecError):
        raise InvalidInput("metadata", "must be JSON: text, numbers of up to 64 bits, lists, mappings") from None
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidInput("metadata", f"at most {MAX_METADATA_BYTES} bytes of JSON, got {len(text)}")
    if not survives:
        raise InvalidInput("metadata", "must have only text keys")


def validate_failure(failure: Failure | None) -> None:
    if failure is Failure.RAISE:
        raise InvalidInput("failure", "must be one of open, closed, local; raise exists only in the library")


def validate_scopes(scopes: tuple[StrEnum, ...], kind: type[StrEnum]) -> None:
    if not scopes or len(set(scopes)) != len(scopes):
        raise InvalidInput("scopes", f"must be one or more of {', '.join(kind)}, each once")


def validate_time(field: str, value: datetime | None) -> None:
    if value is not None and value.tzinfo is None:
        raise InvalidInput(field, "must have a time zone, such as 2026-12-31T00:00:00Z")
    try:
        if value is not None:
            value.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(field, "must be in the years 1 to 9999, in UTC too") from None


def validate_lanes(count: int) -> None:
    try:
        Lanes(count)
    except InvalidInput as error:
        raise InvalidInput("lanes", error.problem) from None
