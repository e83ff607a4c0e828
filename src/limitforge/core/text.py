"""Parse the text form of limits: `"100/minute; 10/second"`, `"burst=token:20 per 15 seconds"`."""

import re

from limitforge.core.exact import MAX_EXACT, US_PER_SECOND, Rate
from limitforge.core.limits import (
    UNIT_SECONDS,
    FixedWindow,
    LeakyBucket,
    Limit,
    SlidingWindow,
    SlidingWindowCounter,
    TokenBucket,
    period_name,
)
from limitforge.errors import InvalidLimit

MAX_TEXT = 4_096
MAX_DIGITS = 40
EXACT_UP_TO = 20  # above this the estimate of a counter is precise enough, and needs far less memory than a log

_UNITS = {f"{unit}{plural}": unit for unit in UNIT_SECONDS for plural in ("", "s")} | {
    "s": "second",
    "sec": "second",
    "m": "minute",
    "min": "minute",
    "h": "hour",
    "d": "day",
}
_PREFIXES = ("fixed", "sliding", "counter", "token", "leaky")
_WORD = re.compile(r"[A-Za-z]+")
_DIGITS = re.compile(r"[0-9]+")
_SPACE = re.compile(r"\s*")
_ANYTHING = re.compile(r"[^\s;]+|;|$")


def parse_limits(text: str) -> list[Limit]:
    """Return the limits of `text`, in order. Raise `InvalidLimit` that points at the wrong token."""
    if not isinstance(text, str):
        raise InvalidLimit("limits", f"must be text such as '100/minute', got {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise InvalidLimit("limits", f"at most {MAX_TEXT} characters, got {len(text)}")
    limits: list[Limit] = []
    position = 0
    for item in text.split(";"):
        if item.strip():
            limits.append(_LimitParser(text, position, position + len(item)).parse())
        position += len(item) + 1
    if not limits:
        raise InvalidLimit("limits", "must hold at least one limit, such as '100/minute'")
    return limits


class _LimitParser:
    """Parses one limit of the text, from left to right."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.text = text
        self.start = self.position = start
        self.end = end

    def parse(self) -> Limit:
        name = self._name()
        prefix = self._prefix()
        count = self._number("how many, such as 100")
        if not (self._literal("/") or self._literal("per")):
            raise self._error("'/' or 'per'")
        times = self._number("a number") if self._peek(_DIGITS) else 1
        unit = self._unit()
        if self._peek(_ANYTHING).strip():
            raise self._error("';' or the end")
        seconds = times * UNIT_SECONDS[unit]
        default = "sliding" if count <= EXACT_UP_TO else "counter"
        try:
            return _build(name or period_name(seconds * US_PER_SECOND), prefix or default, count, seconds)
        except InvalidLimit as error:
            raise InvalidLimit(error.field, f"{error.problem}{self._point_at_limit()}") from None

    def _point_at_limit(self) -> str:
        """Return carets under the whole limit, for an error that is not about a single token."""
        item = self.text[self.start : self.end]
        position = self.start + len(item) - len(item.lstrip())
        return _point_at(self.text, position, len(item.strip()))

    def _name(self) -> str:
        head, equals, _ = self.text[self.position : self.end].partition("=")
        if not equals:
            return ""
        if not head.strip():
            raise self._error("a name before '='")
        self.position += len(head) + 1
        return head.strip()

    def _prefix(self) -> str:
        word = self._peek(_WORD)
        if not word:
            return ""
        if word.lower() not in _PREFIXES:
            raise self._error(f"a number, or one of {', '.join(f'{known}:' for known in _PREFIXES)}")
        self.position += len(word)
        if not self._literal(":"):
            raise self._error("':'")
        return word.lower()

    def _number(self, what: str) -> int:
        digits = self._peek(_DIGITS)
        if not digits:
            raise self._error(what)
        if len(digits) > MAX_DIGITS or int(digits) > MAX_EXACT:
            raise self._error("a smaller number", digits)
        self.position += len(digits)
        return int(digits)

    def _unit(self) -> str:
        word = self._peek(_WORD)
        unit = _UNITS.get(word.lower())
        if unit is None:
            raise self._error("a unit: second, minute, hour or day")
        self.position += len(word)
        return unit

    def _literal(self, literal: str) -> bool:
        self._peek(_ANYTHING)
        if self.text[self.position : self.end].lower().startswith(literal):
            self.position += len(literal)
            return True
        return False

    def _peek(self, pattern: re.Pattern[str]) -> str:
        """Skip white space, and return what matches the pattern there."""
        self.position = _SPACE.match(self.text, self.position, self.end).end()  # type: ignore[union-attr]
        found = pattern.match(self.text, self.position, self.end)
        return found.group() if found else ""

    def _error(self, expected: str, token: str = "") -> InvalidLimit:
        token = token or self._peek(_ANYTHING)
        position = self.position
        found = repr(token) if token else "the end"
        carets = _point_at(self.text, position, len(token))
        return InvalidLimit("limits", f"expected {expected}, got {found} at character {position + 1}{carets}")


def _point_at(text: str, position: int, length: int) -> str:
    """Return a line of the text, with carets under a part of it."""
    start = text.rfind("\n", 0, position) + 1
    line = text[start:].partition("\n")[0]
    return f"\n  {line}\n  {' ' * (position - start)}{'^' * max(length, 1)}"


def _build(name: str, prefix: str, count: int, seconds: int) -> Limit:
    match prefix:
        case "fixed":
            return FixedWindow(name=name, limit=count, window_seconds=seconds)
        case "sliding":
            return SlidingWindow(name=name, limit=count, window_seconds=seconds)
        case "counter":
            return SlidingWindowCounter(name=name, limit=count, window_seconds=seconds)
        case "token":
            return TokenBucket(name=name, bucket_capacity=count, refill_rate_per_sec=_rate(count, seconds))
        case _:
            return LeakyBucket(name=name, bucket_capacity=count, leak_rate_per_sec=_rate(count, seconds))


def _rate(count: int, seconds: int) -> Rate:
    """Return the rate of exactly `count` per window. A blocked bucket may have any rate."""
    return Rate.per_window("limits", max(count, 1), seconds * US_PER_SECOND)
