"""Parse a replay file: cases of limits and timed steps. The whole file is validated before the first step runs.

Every error is an `InvalidInput` that names the case, the step and the field.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from limitforge.core.exact import validate_cost
from limitforge.core.limits import limit_from_fields
from limitforge.core.plan import Limits
from limitforge.errors import InvalidInput
from limitforge.request import DEFAULT_PRIORITY

MAX_BYTES = 64 * 2**20
LAST_SECOND = 7_258_118_400  # the year 2200; both stores are exact until then

_TIME_FIELDS = {"at_ms", "at_us"}
_CHECK_FIELDS = {"cost", "costs", "priority", "lease"}
_STEP_FIELDS = (
    *sorted(_TIME_FIELDS),
    "cost",
    "costs",
    "priority",
    "lease",
    "release",
    "renew",
    "expect",
    "comment",
    "name",
    "note",
)


@dataclass(frozen=True, slots=True)
class CheckStep:
    """A check. `lease` is a label for the slots that it takes."""

    at_us: int
    cost: int
    costs: Mapping[str, int] | None
    priority: str
    lease: str | None
    expect: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ReleaseStep:
    at_us: int
    label: str
    expect: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class RenewStep:
    at_us: int
    label: str
    expect: Mapping[str, Any] | None


Step = CheckStep | ReleaseStep | RenewStep


@dataclass(frozen=True, slots=True)
class Case:
    """Limits, and the steps to run against them. `at_us` of a step is in microseconds since 1970."""

    title: str
    limits: Limits
    steps: tuple[Step, ...]


def parse_cases(text: bytes) -> list[Case]:
    """Parse the content of a file."""
    if len(text) > MAX_BYTES:
        raise InvalidInput("the file", f"must be at most {MAX_BYTES // 2**20} MiB")
    try:
        cases = json.loads(text, object_pairs_hook=_unique_object, parse_constant=_refuse_constant)
    except InvalidInput:
        raise
    except ValueError as error:
        raise InvalidInput("the file", f"is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidInput("the file", "is nested too deeply") from None
    if not isinstance(cases, list):
        raise InvalidInput("the file", f"must be a list of cases, got {_describe_json(cases)}")
    return [_parse_case(number, case) for number, case in enumerate(cases, start=1)]


def _parse_case(number: int, given: object) -> Case:
    name = given.get("name") if isinstance(given, dict) else None
    title = f"case {number} ({_quoted(name)})" if isinstance(name, str) and name else f"case {number}"
    with _error_context(title):
        # Unknown fields of a case are allowed as comments. A misspelt field is noticed, because all are required.
        if not isinstance(given, dict):
            raise InvalidInput("", f"must be an object with base_ms, limits and steps, got {_describe_json(given)}")
        base_ms = _integer("base_ms", _required(given, "base_ms"))
        limits = Limits(*(_parse_limit(index, fields) for index, fields in enumerate(_list(given, "limits"))))
        steps = enumerate(_list(given, "steps"), start=1)
        return Case(title, limits, tuple(_parse_step(index, step, base_ms, limits) for index, step in steps))


def _parse_limit(index: int, fields: object) -> Any:
    with _error_context(f"limits[{index}]"):
        if not isinstance(fields, dict):
            raise InvalidInput("", f"must be an object with the fields of a limit, got {_describe_json(fields)}")
        return limit_from_fields(fields)


def _parse_step(number: int, given: object, base_ms: int, limits: Limits) -> Step:
    with _error_context(f"step {number}"):
        if not isinstance(given, dict):
            raise InvalidInput("", f"must be an object with at_ms or at_us, got {_describe_json(given)}")
        for field in given:
            if field not in _STEP_FIELDS:
                raise InvalidInput(
                    _quoted(field), f"is not a field of a step; the fields are {', '.join(_STEP_FIELDS)}"
                )
        at_us = _parse_time(given, base_ms)
        expect = given.get("expect")
        if expect is not None and not isinstance(expect, dict):
            raise InvalidInput("expect", f"must be an object, got {_describe_json(expect)}")
        for step_type, field in ((ReleaseStep, "release"), (RenewStep, "renew")):
            if field in given:
                _refuse_combination(field, given)
                return step_type(at_us, _parse_label(field, given[field]), expect)
        return _parse_check(given, at_us, expect, limits)


def _parse_check(given: Mapping[str, Any], at_us: int, expect: Mapping[str, Any] | None, limits: Limits) -> CheckStep:
    priority = given.get("priority", DEFAULT_PRIORITY)
    if not isinstance(priority, str):
        raise InvalidInput("priority", f"must be text such as 'P1', got {_describe_json(priority)}")
    names = limits.plan(priority).names
    return CheckStep(
        at_us,
        validate_cost("cost", given.get("cost", 1)),
        _parse_costs(given["costs"], names) if "costs" in given else None,
        priority,
        _parse_label("lease", given["lease"]) if "lease" in given else None,
        expect,
    )


def _parse_costs(costs: object, names: Collection[str]) -> dict[str, int]:
    if not isinstance(costs, dict):
        raise InvalidInput("costs", f"must map names of limits to costs, got {_describe_json(costs)}")
    for name in costs:
        if name not in names:
            raise InvalidInput("costs", f"unknown limit {_quoted(name)}; the limits are {', '.join(names) or 'none'}")
    return {name: validate_cost(f"costs.{name}", cost) for name, cost in costs.items()}


def _parse_time(given: Mapping[str, Any], base_ms: int) -> int:
    fields = sorted(_TIME_FIELDS & given.keys())
    if len(fields) != 1:
        raise InvalidInput("at_ms", "is required (or at_us)" if not fields else "can't be combined with at_us")
    (field,) = fields
    at_us = base_ms * 1_000 + _integer(field, given[field]) * (1_000 if field == "at_ms" else 1)
    if not 0 <= at_us <= LAST_SECOND * 1_000_000:
        raise InvalidInput(field, f"is out of range: base_ms + {field} must be between the years 1970 and 2200")
    return at_us


def _refuse_combination(field: str, given: Mapping[str, Any]) -> None:
    for other in (*sorted(_CHECK_FIELDS), "release", "renew"):
        if other != field and other in given:
            raise InvalidInput(other, f"can't be combined with {field}")


def _parse_label(field: str, label: object) -> str:
    if not isinstance(label, str):
        raise InvalidInput(field, f"must be a label (text), got {_describe_json(label)}")
    return label


def _list(given: Mapping[str, Any], field: str) -> list[Any]:
    value = _required(given, field)
    if not isinstance(value, list):
        raise InvalidInput(field, f"must be a list, got {_describe_json(value)}")
    return value


def _required(given: Mapping[str, Any], field: str) -> Any:
    if field not in given:
        raise InvalidInput(field, "is required")
    return given[field]


def _integer(field: str, value: object) -> int:
    if type(value) is not int:
        raise InvalidInput(field, f"must be an integer, got {_describe_json(value)}")
    return value


@contextmanager
def _error_context(location: str) -> Iterator[None]:
    """Add the location to the field of every `InvalidInput`."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{location}, {error.field}" if error.field else location, error.problem) from None


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InvalidInput("the file", f"has an object with a duplicate field {_quoted(duplicate)}")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _describe_json(value: object) -> str:
    """Describe a wrong value with the terms of JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"{value!r:.60}"
