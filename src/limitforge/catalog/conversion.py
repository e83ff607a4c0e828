"""Convert plain values to structs, with errors that name the wrong field by its path."""

import re
from typing import TypeVar

import msgspec

from limitforge.errors import InvalidInput

Converted = TypeVar("Converted")

_LOCATION = re.compile(r"^(?P<problem>.*?)(?: - at `\$(?P<key>\.\.\.)?\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_TYPE_NAMES = {
    "str": "text",
    "int": "a whole number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
    "str | null": "text or null",
    "datetime": "a time such as 2026-12-31T00:00:00Z",
    "datetime | null": "a time such as 2026-12-31T00:00:00Z, or null",
}


def convert(kind: type[Converted], value: object) -> Converted:
    """Convert plain values to a type. Raises `InvalidInput` with the path of the wrong field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise translate_validation_error(error) from None


def translate_validation_error(error: msgspec.ValidationError) -> InvalidInput:
    """Translate an error of msgspec: the path of the field, and what its value must be."""
    found = _LOCATION.match(str(error))
    problem, path = (found["problem"], found["path"] or "") if found else (str(error), "")
    cause = error.__cause__
    if isinstance(cause, InvalidInput):
        return InvalidInput(_join_path(path, cause.field), cause.problem)
    if missing := _MISSING_FIELD.match(problem):
        return InvalidInput(_join_path(path, missing["field"]), "is required")
    if unknown := _UNKNOWN_FIELD.match(problem):
        return InvalidInput(_join_path(path, unknown["field"][:64]), "unknown field")
    if wrong := _WRONG_TYPE.match(problem):
        expected, got = (_TYPE_NAMES.get(wrong[part], wrong[part]) for part in ("expected", "got"))
        return InvalidInput(path or "value", f"must be {expected}, got {got}")
    return InvalidInput(path or "value", problem[:1].lower() + problem[1:])


def _join_path(path: str, field: str) -> str:
    if not path or field == path or field.startswith(f"{path}."):
        return field  # some errors already contain the whole path
    return f"{path}.{field}"
