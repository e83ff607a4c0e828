"""Exact numbers: parse the caller's numbers into integers that Python and Lua represent without loss.

Numbers in Lua are doubles, so every product in the script must stay below 2^53. The bounds in this module ensure that.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from limitforge.errors import InvalidInput, InvalidLimit

MAX_EXACT = 2**52
MAX_PER_US = 2**42
MAX_COUNT = MAX_EXACT - 1
MAX_COUNTER_LIMIT = 2**41
MAX_ENTRIES = 1_000  # of a sliding window, or slots of a concurrency limit
US_PER_SECOND = 1_000_000
MIN_DURATION_US = 1_000
TEN_YEARS_US = 3_650 * 86_400 * US_PER_SECOND
FIFTY_DAYS_US = 50 * 86_400 * US_PER_SECOND

_DECIMALS = 6
_MAX_DENOMINATOR = 10_000
_MAX_DIGITS = 40
_PLAIN_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)")

Number = int | str | float | Decimal


@dataclass(frozen=True, slots=True)
class Rate:
    """Exactly `tokens` per `per_us` microseconds, in lowest terms."""

    tokens: int
    per_us: int

    def __post_init__(self) -> None:
        if not (1 <= self.tokens <= MAX_EXACT and 1 <= self.per_us <= MAX_PER_US):
            raise InvalidLimit("rate", f"must be 1 to {MAX_EXACT} tokens per 1 to {MAX_PER_US} microseconds")

    @classmethod
    def parse(cls, field: str, per_second: object) -> "Rate":
        """Return the rate of a number per second. Raise `InvalidLimit`, naming `field`, if it is out of bounds.

        A number with at most 6 decimals is exact. A float with more becomes the nearest fraction of 10,000ths or less.
        """
        exact = _to_fraction(field, per_second)
        if exact is None:
            if not isinstance(per_second, float):
                raise InvalidLimit(field, f"at most {_DECIMALS} decimals, got {short_repr(per_second)}")
            exact = Fraction(per_second).limit_denominator(_MAX_DENOMINATOR)
        if exact <= 0:
            near = f", which is 0 in {_MAX_DENOMINATOR}ths" if exact == 0 and per_second else ""
            raise InvalidLimit(field, f"must be above 0, got {short_repr(per_second)}{near}")
        per_us = exact / US_PER_SECOND
        return cls._checked(field, per_us.numerator, per_us.denominator)

    @property
    def per_second(self) -> float:
        """The nearest float. Nearly every rate is equal to the one that is parsed from it."""
        return self.tokens * US_PER_SECOND / self.per_us

    @classmethod
    def per_window(cls, field: str, count: int, window_us: int) -> "Rate":
        """Return the rate of exactly `count` per window."""
        if window_us < MIN_DURATION_US:
            raise InvalidLimit("window_seconds", f"must be at least 0.001, got {window_us / US_PER_SECOND}")
        exact = Fraction(count, window_us)
        return cls._checked(field, exact.numerator, exact.denominator)

    @classmethod
    def _checked(cls, field: str, tokens: int, per_us: int) -> "Rate":
        if tokens > MAX_EXACT:
            raise InvalidLimit(field, f"at most {MAX_EXACT} tokens a microsecond in lowest terms")
        if per_us > MAX_PER_US:
            raise InvalidLimit(
                field, f"as a fraction of microseconds its denominator may be at most {MAX_PER_US}, got {per_us}"
            )
        return cls(tokens, per_us)


def parse_integer(field: str, value: object, *, minimum: int = 0, maximum: int = MAX_COUNT) -> int:
    """Return a whole number within its bounds from an integer, an integral float or a decimal string.

    Raise `InvalidLimit`, naming `field`, for anything else.
    """
    if type(value) is int:
        number = value
    else:
        exact = _to_fraction(field, value)
        if exact is None or exact.denominator != 1:
            raise InvalidLimit(field, f"must be a whole number, got {short_repr(value)}")
        number = exact.numerator
    if not minimum <= number <= maximum:
        raise InvalidLimit(field, f"must be from {minimum} to {maximum}, got {short_repr(value)}")
    return number


def parse_duration_us(field: str, seconds: object, *, maximum_us: int = TEN_YEARS_US) -> int:
    """Return seconds with at most 6 decimals as microseconds. Raise `InvalidLimit` if they are out of bounds."""
    exact = _to_fraction(field, seconds)
    if exact is None:
        raise InvalidLimit(field, f"at most {_DECIMALS} decimals, got {short_repr(seconds)}")
    micros = exact * US_PER_SECOND
    if not MIN_DURATION_US <= micros <= maximum_us:
        raise InvalidLimit(
            field, f"must be from 0.001 to {maximum_us // US_PER_SECOND} seconds, got {short_repr(seconds)}"
        )
    return micros.numerator


def format_seconds(micros: int) -> str:
    """Write microseconds as decimal seconds, exactly and without trailing zeros."""
    seconds, rest = divmod(micros, US_PER_SECOND)
    return f"{seconds}.{rest:06}".rstrip("0").rstrip(".") if rest else str(seconds)


def validate_cost(field: str, value: object) -> int:
    """Return a cost if it is an integer from 0 to below 2^52, else raise `InvalidInput`.

    Every check has a cost, so for speed no other types are converted.
    """
    if type(value) is not int:
        raise InvalidInput(field, f"must be an integer, got {short_repr(value)}")
    if not 0 <= value <= MAX_COUNT:
        raise InvalidInput(field, f"must be from 0 to {MAX_COUNT}, got {short_repr(value)}")
    return value


def percent_of(limit: int, percent: int) -> int:
    """Return floor(limit * percent / 100), in steps that are exact in Lua too."""
    hundreds, rest = divmod(limit, 100)
    return hundreds * percent + rest * percent // 100


def _to_fraction(field: str, value: object) -> Fraction | None:
    """Return the exact number; None if it has more than 6 decimals."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise InvalidLimit(field, f"must be a number, got {short_repr(value)}")
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, str) and (len(value) > _MAX_DIGITS or not _PLAIN_NUMBER.fullmatch(value.strip())):
        raise InvalidLimit(field, f"must be a plain decimal number, got {short_repr(value)}")
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if not number.is_finite() or abs(number.adjusted()) > _MAX_DIGITS:
        raise InvalidLimit(field, f"must be a finite number of at most {_MAX_DIGITS} digits, got {short_repr(value)}")
    exact = Fraction(number)
    return exact if (10**_DECIMALS * exact).denominator == 1 else None


def short_repr(value: object) -> str:
    """Return a short representation of any value, for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."
