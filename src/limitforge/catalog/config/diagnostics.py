"""What is wrong with a configuration file: all of it, each by line and field, in words that say what to write."""

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
    """All that is wrong with a document; `source` is where it was read."""

    def __init__(self, source: SourceFile | None) -> None:
        self._source = source
        self._found: list[tuple[int, str, str]] = []

    def add(self, path: str, problem: str) -> None:
        if self._source is None:
            self._found.append((0, path, problem))
        else:
            self._found.append((self._source.line_of(path), path, _clarify(path, problem, self._source)))

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """What is refused in here is wrong there."""
        try:
            yield
        except InvalidInput as error:
            self.add(join_path(path, error.field), error.problem)

    def raise_if_any(self) -> None:
        """Refuse the document if anything was wrong."""
        if self._found:
            name = "configuration" if self._source is None else self._source.name
            raise InvalidFile(name, sorted(self._found, key=lambda found: found[0]))


def _clarify(path: str, problem: str, source: SourceFile) -> str:
    """The problem in words that say what to write."""
    field = re.sub(r"\[[0-9]+\]$", "", path).rpartition(".")[2]
    if problem.startswith("invalid RFC3339"):
        return f"must be a time such as 2026-12-31T00:00:00Z, got {short_repr(source.value_of(path))}"
    if field in _CHOICES and problem.startswith(("invalid enum", "must be text", "must be str")):
        return f"must be one of {', '.join(_CHOICES[field])}, got {describe_value(source.value_of(path))}"
    if problem.startswith("must be text") and isinstance(source.value_of(path), int | float):
        return f"{problem}: put it in quotes"
    return problem


def describe_value(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return str(value).lower() if isinstance(value, bool) else short_repr(value)


def join_path(path: str, field: str) -> str:
    if field in ("", "value"):  # the second is what a conversion calls the whole
        return path
    field = field.replace("lanes.lanes", "lanes", 1)  # lanes call themselves so wherever they are
    return f"{path}.{field}" if path else field
