"""Compare docs/reference with the code: every public name, argument, default, setting and log event."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import limitforge
from limitforge import Limit, Limiter, SyncLimiter
from limitforge.core import headers
from scripts.generate_reference import settings_page
from tests.docs.code_blocks import ROOT, find_blocks

REFERENCE = ROOT / "docs" / "reference"
SOURCE = ROOT / "src" / "limitforge"
LOG_EVENTS = REFERENCE / "log-events.md"

# Classes whose methods are documented one by one. The methods of stores and limits are for the library itself.
WITH_METHODS = ("Limiter", "ManualClock")
ONLY_ASYNC = {"submit", "prepare", "submit_prepared", "set_server_memory"}

_HEADING = re.compile(r"#{2,3} `([\w.]+)`")
_ROW = re.compile(r"\| `([\w*.-]+)` \| (.+?) \| (.+) \|")


class Section(NamedTuple):
    """A heading with a name in it, and the first table below it: the second column by the first."""

    name: str
    rows: dict[str, str]


def sections(path: Path) -> Iterator[Section]:
    name, rows = "", dict[str, str]()
    for line in path.read_text().splitlines():
        heading = _HEADING.fullmatch(line)
        if line.startswith("#"):
            if name:
                yield Section(name, rows)
            name, rows = heading[1] if heading else "", {}
        elif row := _ROW.fullmatch(line):
            rows[row[1]] = row[2]
        elif values := re.fullmatch(r"\| `(\w+)` \| (.+) \|", line):
            rows[values[1]] = ""
    if name:
        yield Section(name, rows)


SECTIONS = {each.name: each for path in sorted(REFERENCE.glob("*.md")) if path != LOG_EVENTS for each in sections(path)}


def documented(name: str) -> Any:
    """Return the object that a heading names."""
    first, _, member = name.partition(".")
    found = getattr(limitforge, first, None) or getattr(headers, first)
    return getattr(found, member) if member else found


def shown(default: Any) -> str:
    """Return a default as the pages write it."""
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, frozenset):
        return "`{" + ", ".join(f'"{each}"' for each in sorted(default)) + "}`"
    if isinstance(default, str):
        return f'`"{default}"`'
    if callable(default):
        return "a function"
    return f"`{default!r}`"


def parameters(found: Any) -> dict[str, str]:
    """Return the arguments of a function or class with their defaults, as the pages write them."""
    signature = inspect.signature(found)
    result = {}
    for name, each in signature.parameters.items():
        if name == "self" or each.kind is each.VAR_KEYWORD:
            continue
        if each.kind is each.VAR_POSITIONAL:
            result[name] = "any number"
            continue
        default = each.default
        if str(default) == "<factory>":
            default = {"hot_keys": []}.get(name, {})
        result[name] = shown(default)
    return result


def test_every_public_name_has_a_section() -> None:
    assert [name for name in limitforge.__all__ if name not in SECTIONS] == []


def test_every_public_method_has_a_section() -> None:
    missing = [
        f"{name}.{member}"
        for name in WITH_METHODS
        for member in vars(documented(name))
        if not member.startswith("_") and f"{name}.{member}" not in SECTIONS
    ]
    assert missing == []


@pytest.mark.parametrize("name", SECTIONS)
def test_arguments_and_defaults_are_those_of_the_code(name: str) -> None:
    found, rows = documented(name), SECTIONS[name].rows
    if inspect.isclass(found) and issubclass(found, Enum):
        assert list(rows) == [each.name for each in found]
        return
    if name in (
        "Clock",
        "SyncLimiter",
        "Limiter",
        "HeaderTemplate",
    ):  # created by `connect` or `compile`, or a protocol
        assert rows == {}
        return
    try:
        expected = parameters(found)
    except ValueError:  # an exception without a constructor of its own
        expected = {}
    if inspect.isclass(found) and issubclass(found, Limit) and found is not Limit:
        expected = {field: default for field, default in expected.items() if field not in parameters(Limit)}
    assert rows == expected


def test_the_limiter_for_threads_has_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, Callable[..., Any]]:
        return {name: getattr(kind, name) for name in vars(kind) if not name.startswith("_")}

    for_loops, for_threads = methods(Limiter), methods(SyncLimiter)
    assert for_threads.keys() == for_loops.keys() - ONLY_ASYNC
    for name, method in for_threads.items():
        if callable(method):
            assert parameters(method) == parameters(for_loops[name]), name


def test_every_public_name_is_in_an_example() -> None:
    code = "\n".join(
        block.text for path in sorted(REFERENCE.glob("*.md")) for block in find_blocks(path) if block.info == "python"
    )
    assert [name for name in limitforge.__all__ if not re.search(rf"\b{name}\b", code)] == []


def test_the_settings_are_those_of_the_code() -> None:
    assert (REFERENCE / "settings.md").read_text() == settings_page(), "run `make generate`"


# --- Log events ------------------------------------------------------------------------------------------------------


EVENT = re.compile(r"(?:admin|catalog|metrics|overrides|service|store|throttled|usage)\.[a-z_]+")


class Event(NamedTuple):
    levels: frozenset[str]
    fields: frozenset[str]
    is_open: bool
    """True if the source does not show all fields: they come from a mapping, or a helper logs the event."""

    def joined(self, other: "Event") -> "Event":
        return Event(self.levels | other.levels, self.fields | other.fields, self.is_open or other.is_open)


UNSEEN = Event(frozenset(), frozenset(), is_open=True)


def logged_events() -> dict[str, Event]:
    """Return all events: the arguments of calls that look like one, with level and fields if it is `log_event`."""
    found: dict[str, Event] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or _called(node) in ("warning", "error", "info", "exception"):
                continue
            for at, name in enumerate(node.args):
                if isinstance(name, ast.Constant) and isinstance(name.value, str) and EVENT.fullmatch(name.value):
                    event = _event(node) if _called(node) == "log_event" and at == 2 else UNSEEN
                    before = found.get(name.value, Event(frozenset(), frozenset(), is_open=False))
                    found[name.value] = before.joined(event)
    return found


def _event(node: ast.Call) -> Event:
    levels = {each.attr.lower() for each in ast.walk(node.args[1]) if isinstance(each, ast.Attribute)} - {"logging"}
    fields = {each.arg for each in node.keywords if each.arg and each.arg != "exc_info"}
    return Event(frozenset(levels), frozenset(fields), any(each.arg is None for each in node.keywords))


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def documented_events() -> dict[str, Event]:
    rows = (line.strip("|").split(" | ") for line in LOG_EVENTS.read_text().splitlines() if line.startswith("| `"))
    return {
        row[0].strip(" `"): Event(
            frozenset(row[1].strip().split(", ")), frozenset(re.findall(r"`(\w+)`", row[2])), is_open=False
        )
        for row in rows
    }


def test_every_log_event_is_documented() -> None:
    assert sorted(documented_events()) == sorted(logged_events())


@pytest.mark.parametrize("name", documented_events())
def test_level_and_fields_of_an_event_are_those_of_the_code(name: str) -> None:
    event, page = logged_events()[name], documented_events()[name]
    assert event.levels <= page.levels
    assert event.fields <= page.fields
    assert event.is_open or event == page
