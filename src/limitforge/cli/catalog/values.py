"""Parse the values of options: durations, times and JSON objects."""

import re
from datetime import datetime, timedelta
from typing import Any

import msgspec

from limitforge.errors import InvalidInput

NONE_WORD = "none"

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:ms|s|m|h|d|w))+")
_DURATION_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d|w)")


def parse_duration(option: str, text: str) -> float:
    """Return the seconds of a duration such as `90s`, `15m`, `24h`, `7d` or `1h30m`."""
    if not _DURATION.fullmatch(text):
        raise InvalidInput(option, f"must be a duration such as 90s, 15m, 24h or 7d, got {text[:64]!r}")
    return round(sum(float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(text)), 6)


def parse_time(option: str, text: str, now: datetime) -> datetime:
    """Return a time, which `text` states as a time or as a duration from `now`."""
    if _DURATION.fullmatch(text):
        try:
            return now + timedelta(seconds=parse_duration(option, text))
        except OverflowError:
            raise InvalidInput(option, "is too far in the future") from None
    try:
        time = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidInput(
            option, f"must be a time such as 2026-12-31T00:00:00Z, or a duration such as 90d, got {text[:64]!r}"
        )
    return time


def parse_expiry(option: str, text: str, now: datetime) -> datetime | None:
    """Return a time, or None for the word `none`."""
    return None if text == NONE_WORD else parse_time(option, text, now)


def parse_json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text.encode(errors="replace"))
    except msgspec.DecodeError as error:
        raise InvalidInput(option, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(option, 'must be a JSON object, such as {"team": "web"}')
    return value


def given_fields(**options: Any) -> dict[str, Any]:
    """Return the options that are not None. The word `none` becomes None, which clears a field."""
    return {name: None if value == NONE_WORD else value for name, value in options.items() if value is not None}
