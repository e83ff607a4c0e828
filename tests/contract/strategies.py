"""Random limits: small enough for collisions, large enough for arithmetic errors."""

from functools import cache
from typing import Any

from hypothesis import strategies as st

from limitforge import InvalidLimit, Limit, limit_from_fields

NAMES = ("a", "b", "c", "d")
RESOURCES = ("GET:/orders", "GET:/orders", "GET:/orders", "POST:/orders", "*")
SUBJECTS = ("user:1", "user:1", "user:1", "user:2", "")
TENANTS = ("default", "default", "default", "globex")
PRIORITIES = ("P0", "P1", "P2", "P3")
SCOPES = ("subject", "subject", "subject", "caller", "resource", "tenant", "global")

_USUAL = [1, 2, 3, 3, 4, 5, 5, 7, 10, 10, 20]
_RARE = [0, None, 100]
_LARGE = [999_983, 2**40 + 1]
_RATES = [1, 1, 2, 3, 10, 1_000, "0.8333", "0.000001", 0.5, 100 / 60, 1 / 3, 7 / 9, "123.456789", 10_000_000, 2**40]
_WINDOWS = [0.001, 0.01, 1, 2, 10, 10, 60, 60, 3_600, 86_400, 86_400, "0.333333", 4_320_000]
_ZONES = ["UTC", "America/New_York", "Europe/Berlin", "Pacific/Apia", "America/Sao_Paulo", "Asia/Kolkata"]

_FIELDS: dict[str, dict[str, list[Any]]] = {
    "token_bucket": {"bucket_capacity": [*_USUAL, *_RARE, *_LARGE, 2**52 - 1], "refill_rate_per_sec": _RATES},
    "leaky_bucket": {"bucket_capacity": [*_USUAL, *_RARE, *_LARGE, 2**52 - 1], "leak_rate_per_sec": _RATES},
    "fixed_window": {"limit": [*_USUAL, *_RARE, *_LARGE, 2**52 - 1], "window_seconds": _WINDOWS},
    "sliding_window": {"limit": [*_USUAL, *_RARE, 1_000], "window_seconds": _WINDOWS},
    "sliding_window_counter": {"limit": [*_USUAL, *_RARE, *_LARGE, 2**41], "window_seconds": _WINDOWS},
    "concurrency": {"max_concurrent": [*_USUAL, *_RARE, 1_000], "lease_ttl_seconds": _WINDOWS},
    "quota": {
        "limit": [*_USUAL, *_RARE, *_LARGE, 2**52 - 1],
        "period": ["day", "week", "month", "year"],
        "time_zone": _ZONES,
    },
}
ALGORITHMS = tuple(_FIELDS)

# Numbers whose products exceed 2^53, where doubles are inexact: levels in tiny fractions, long windows, large counts.
_SEVERE: dict[str, dict[str, list[Any]]] = {
    "token_bucket": {
        "bucket_capacity": [3, 7, 100, 4_000],
        "refill_rate_per_sec": ["0.8333", "0.000777", "123.456789", 1 / 3, "3.000001"],
    },
    "leaky_bucket": {
        "bucket_capacity": [3, 7, 100, 4_000],
        "leak_rate_per_sec": ["0.8333", "0.000777", "123.456789", 1 / 3, "3.000001"],
    },
    "sliding_window_counter": {
        "limit": [999_983, 2**40 + 1, 2**41],
        "window_seconds": [86_400, 86_400, 86_400, "86400.000001", 4_320_000],
    },
}


def _choices(fields: dict[str, dict[str, list[Any]]]) -> dict[str, dict[str, st.SearchStrategy[Any]]]:
    return {
        algorithm: {field: st.sampled_from(values) for field, values in options.items()}
        for algorithm, options in fields.items()
    }


# Building a strategy takes as long as a draw, so build it once.
_USUAL_CHOICES, _SEVERE_CHOICES = _choices(_FIELDS), _choices(_FIELDS | _SEVERE)
_ALGORITHM, _NAME, _SCOPE = map(st.sampled_from, (ALGORITHMS, NAMES, SCOPES))
_MODE = st.sampled_from(["on", "on", "on", "on", "on", "on", "monitor", "off"])
_COUNTS = st.sampled_from(["cost", "cost", "cost", "requests"])
_KIND_OF_WINDOW: st.SearchStrategy[dict[str, Any]] = st.sampled_from([{}, {"align": "first_hit"}, {"spread": True}])
_DAY_OF_MONTH = st.integers(1, 31)
_EXTRA = st.sampled_from(["", "", "", "shares", "count_denied"])
_SHARES = st.dictionaries(st.sampled_from(PRIORITIES[1:]), st.integers(0, 100), min_size=1)


@cache
@st.composite
def limits(
    draw: st.DrawFn,
    name: str | None = None,
    algorithm: str | None = None,
    scope: str | None = None,
    *,
    severe: bool = False,
) -> Limit:
    """Draw any limit. The few combinations that are refused are replaced by a simple one."""
    algorithm = algorithm or draw(_ALGORITHM)
    options = (_SEVERE_CHOICES if severe else _USUAL_CHOICES)[algorithm]
    fields: dict[str, Any] = {field: draw(values) for field, values in options.items()}
    fields["algorithm"] = algorithm
    fields["name"] = name or draw(_NAME)
    fields["scope"] = scope or draw(_SCOPE)
    fields["mode"] = draw(_MODE)
    fields["counts"] = draw(_COUNTS)
    if algorithm == "fixed_window":
        fields.update(draw(_KIND_OF_WINDOW))
    if fields.get("period") in ("month", "year"):
        fields["anchor_day"] = draw(_DAY_OF_MONTH)
    extra = draw(_EXTRA)
    if extra == "shares":
        fields["shares"] = draw(_SHARES)
    elif extra == "count_denied" and algorithm != "concurrency":
        fields["count_denied"] = True
    try:
        return limit_from_fields(fields)
    except InvalidLimit:  # a capacity that this rate can't carry, or a window too long for a counter
        return limit_from_fields(fields | _TAME[algorithm])


_TAME: dict[str, dict[str, Any]] = {
    "token_bucket": {"bucket_capacity": 5, "refill_rate_per_sec": 1},
    "leaky_bucket": {"bucket_capacity": 5, "leak_rate_per_sec": 1},
    "sliding_window_counter": {"window_seconds": 10},
}


def costs() -> st.SearchStrategy[int]:
    """Draw costs that mostly fit a few times, and sometimes never."""
    return st.sampled_from([1] * 12 + [2] * 4 + [3, 3, 4, 5, 0, 0, 0, 10, 21, 1_000, 500_000, 2**40, 2**52 - 1])


def steps_us() -> st.SearchStrategy[int]:
    """Draw time steps: none, a microsecond, past the edges of windows, days, and backwards."""
    hairs = [0, 1, 999, 1_000, 333_333]
    seconds = [500_000, 1_000_000, 1_000_001, 1_999_999, 10_000_000, 29_999_999, 60_000_000]
    days = [3_600_000_000, 86_400_000_000, 31 * 86_400_000_000, 366 * 86_400_000_000]
    back = [-1, -1_000, -1_000_000, -60_000_000, -86_400_000_000]
    return st.one_of(st.sampled_from(hairs * 3 + seconds * 3 + days + back), st.integers(0, 20_000_000))
