"""Collect all errors of a configuration file, each with its line, its field and what to write instead."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from limitforge.catalog.config.strict_yaml import SourceFile
from limitforge.catalog.model import KeyScope, KeyType
from limitforge.core.check import Failure
from limitforge.core.exact import short_repr
from limitforge.core.limits import Mode, Priority
from limitforge.errors import InvalidFile, InvalidInput

_CHOICES: Mapping[str, Iterable[StrEnum]] = {
    "mode": (Mode.ON, Mode.MONITOR, Mode.OFF),
    "failure": tuple(failure for failure in Failure if failure is not Failure.RAISE),
    "priority": Priority,
    "type": KeyType,
    "scopes": KeyScope,
}


class Diagnostics:
    """The errors of a document. `source` is the file from which it was read."""

    def __init__(self, source: SourceFile | None) -> None:
        self._source = source
        self._found: list[tuple[int, str, str]] = []

    def add(self, path: str, problem: str) -> None:
        """Add an error of the field with this path."""
        if self._source is None:
            self._found.append((0, path, problem))
        else:
            self._found.append((self._source.line_of(path), path, _clarify(path, problem, self._source)))

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Add an `InvalidInput` that is raised in this block as an error of the field with this path."""
        try:
            yield
        except InvalidInput as error:
            self.add(join_path(path, error.field), error.problem)

    def raise_if_any(self) -> None:
        """Raise `InvalidFile` with all errors, sorted by line."""
        if self._found:
            name = "configuration" if self._source is None else self._source.name
            raise InvalidFile(name, sorted(self._found, key=lambda found: found[0]))


def _clarify(path: str, problem: str, source: SourceFile) -> str:
    """Return a clearer description of a problem, with what to write instead."""
    field = re.sub(r"\[[0-9]+\]$", "", path).rpartition(".")[2]
    if problem.startswith("invalid RFC3339"):
        return f"must be a time such as 2026-12-31T00:00:00Z, got {short_repr(source.value_of(path))}"
    if field in _CHOICES and problem.startswith(("invalid enum", "must be text", "must be str")):
        return f"must be one of {', '.join(_CHOICES[field])}, got {describe_value(source.value_of(path))}"
    if problem.startswith("must be text") and isinstance(source.value_of(path), int | float):
        return f"{problem}: put it in quotes"
    return problem


def describe_value(value: object) -> str:
    """Describe a value for an error message."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return str(value).lower() if isinstance(value, bool) else short_repr(value)


def join_path(path: str, field: str) -> str:
    """Return the path of a field inside a path."""
    if field in ("", "value"):  # a conversion calls the whole value `value`
        return path
    field = field.replace("lanes.lanes", "lanes", 1)  # errors of lanes already contain the name of their field
    return f"{path}.{field}" if path else field
