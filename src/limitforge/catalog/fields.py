"""Describe the fields of structs once: what a field means, an example, and who may set it.

A struct annotates its fields with `described(...)`, `READ_ONLY` and `IMMUTABLE`. The admin API, the OpenAPI document,
the command line and the JSON Schema of configuration files read these descriptions back with `field_docs`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import msgspec

READ_ONLY = msgspec.Meta(extra_json_schema={"readOnly": True}, extra={"read_only": True})
"""Marks a field that only the catalog itself sets."""

IMMUTABLE = msgspec.Meta(extra={"immutable": True})
"""Marks a field that can be set when the entity is created, and not changed later."""


class FieldDoc(msgspec.Struct, frozen=True, kw_only=True):
    """What one field of a struct means."""

    description: str
    example: Any
    schema: dict[str, Any]
    """Keywords that JSON Schema has for it beyond its type, such as `pattern`."""
    is_read_only: bool
    is_immutable: bool


def described(description: str, *, example: Any = None, **schema: Any) -> msgspec.Meta:
    """Annotate a field with its meaning; `schema` holds further JSON Schema keywords, such as `pattern`."""
    return msgspec.Meta(
        description=description, examples=None if example is None else [example], extra_json_schema=schema
    )


@cache
def field_docs(kind: type[msgspec.Struct]) -> Mapping[str, FieldDoc]:
    """Return the documentation of each field of a struct, by name and in their order."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _field_doc(getattr(hints[name], "__metadata__", ())) for name in kind.__struct_fields__}


@cache
def settable_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names of the fields that a caller may set."""
    return tuple(name for name, doc in field_docs(kind).items() if not doc.is_read_only)


@cache
def immutable_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names of the settable fields that can't be changed after creation."""
    return tuple(name for name, doc in field_docs(kind).items() if doc.is_immutable)


def example_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return an example of a struct as plain values: the example of each of its fields."""
    return {name: doc.example for name, doc in field_docs(kind).items()}


def _field_doc(metadata: tuple[msgspec.Meta, ...]) -> FieldDoc:
    merged: dict[str, Any] = {"description": "", "example": None, "schema": {}}
    marks: dict[str, Any] = {}
    for meta in metadata:
        marks |= meta.extra or {}
        if meta.description is not None:
            merged["description"] = meta.description
            merged["example"] = (meta.examples or [None])[0]
            merged["schema"] = meta.extra_json_schema or {}
    return FieldDoc(**merged, is_read_only="read_only" in marks, is_immutable="immutable" in marks)
