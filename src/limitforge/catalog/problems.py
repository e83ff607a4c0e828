"""What is wrong with a configuration file: all of it, each by line and field, in words that say what to write."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from limitforge.catalog.markup import Source
from limitforge.catalog.model import KeyKind, KeyScope
from limitforge.core.check import Failure
from limitforge.core.exact import shown
from limitforge.core.limits import Mode, Priority
from limitforge.errors import InvalidFile, InvalidInput

_CHOICES: Mapping[str, Iterable[StrEnum]] = {
    "mode": (Mode.ON, Mode.MONITOR, Mode.OFF),
    "failure": tuple(failure for failure in Failure if failure is not Failure.RAISE),
    "priority": Priority,
    "type": KeyKind,
    "scopes": KeyScope,
}


class Problems:
    """All that is wrong with a document; `source` is where it was read."""

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._found: list[tuple[int, str, str]] = []

    def add(self, path: str, problem: str) -> None:
        if self._source is None:
            self._found.append((0, path, problem))
        else:
            self._found.append((self._source.line(path), path, _clearer(path, problem, self._source)))

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """What is refused in here is wrong there."""
        try:
            yield
        except InvalidInput as error:
            self.add(joined(path, error.field), error.problem)

    def stop(self) -> None:
        """Refuse the document if anything was wrong."""
        if self._found:
            name = "configuration" if self._source is None else self._source.name
            raise InvalidFile(name, sorted(self._found, key=lambda found: found[0]))


def _clearer(path: str, problem: str, source: Source) -> str:
    """The problem in words that say what to write."""
    field = re.sub(r"\[[0-9]+\]$", "", path).rpartition(".")[2]
    if problem.startswith("invalid RFC3339"):
        return f"must be a time such as 2026-12-31T00:00:00Z, got {shown(source.value(path))}"
    if field in _CHOICES and problem.startswith(("invalid enum", "must be text", "must be str")):
        return f"must be one of {', '.join(_CHOICES[field])}, got {kind_of(source.value(path))}"
    if problem.startswith("must be text") and isinstance(source.value(path), int | float):
        return f"{problem}: put it in quotes"
    return problem


def kind_of(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return str(value).lower() if isinstance(value, bool) else shown(value)


def joined(path: str, field: str) -> str:
    if field in ("", "value"):  # the second is what a conversion calls the whole
        return path
    field = field.replace("lanes.lanes", "lanes", 1)  # lanes call themselves so wherever they are
    return f"{path}.{field}" if path else field
