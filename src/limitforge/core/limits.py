"""The seven kinds of limit. Each validates itself when it is built, so that no limit can fail later.

The fields have the names of the wire format. A check takes `Limits` (in `plan.py`): several limits, or their text.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from limitforge.core.algorithms.base import UNLIMITED, Algorithm
from limitforge.core.algorithms.concurrency import ConcurrencyAlgorithm
from limitforge.core.algorithms.fixed_window import FixedWindowAlgorithm, WindowKind
from limitforge.core.algorithms.leaky_bucket import LeakyBucketAlgorithm
from limitforge.core.algorithms.quota import QuotaAlgorithm
from limitforge.core.algorithms.sliding_window import SlidingWindowAlgorithm
from limitforge.core.algorithms.sliding_window_counter import SlidingWindowCounterAlgorithm
from limitforge.core.algorithms.token_bucket import TokenBucketAlgorithm
from limitforge.core.calendar import Calendar, Period, zone
from limitforge.core.exact import (
    FIFTY_DAYS_US,
    MAX_COUNTER_LIMIT,
    MAX_ENTRIES,
    MAX_EXACT,
    TEN_YEARS_US,
    US_PER_SECOND,
    Number,
    Rate,
    format_seconds,
    parse_duration_us,
    parse_integer,
    short_repr,
)
from limitforge.errors import InvalidLimit

Choice = TypeVar("Choice", bound=StrEnum)

# Earlier releases named limits after their text, algorithm first, and stored plans still have such names.
NAME = re.compile(r"(?:(?:fixed|sliding|counter|token|leaky):)?[A-Za-z0-9_./-]{1,64}")
UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}


class Scope(StrEnum):
    """The parts of (tenant, resource, subject) that name the bucket."""

    SUBJECT = "subject"
    """Tenant, resource and subject."""
    CALLER = "caller"
    """Tenant and subject."""
    RESOURCE = "resource"
    """Tenant and resource."""
    TENANT = "tenant"
    """The tenant."""
    GLOBAL = "global"
    """None of them: one bucket for all checks."""


UNBUDGETED_SCOPES = (Scope.TENANT, Scope.GLOBAL)
"""Scopes with few buckets, which do not count towards `new_buckets_per_minute`."""


class Mode(StrEnum):
    """`on` enforces a limit, `monitor` decides and reports but never denies, `off` ignores the limit."""

    OFF = "off"
    MONITOR = "monitor"
    ON = "on"


class Counts(StrEnum):
    """What a limit counts: the cost of a check (cost), or 1 for any cost above 0 (requests)."""

    COST = "cost"
    REQUESTS = "requests"


class Consistency(StrEnum):
    """Who decides about a limit."""

    EXACT = "exact"
    """The store decides every check."""
    PREPAID = "prepaid"
    """This process spends a share of the limit that it debited in advance in the store."""
    LOCAL = "local"
    """This process decides alone, with the limit divided by the number of processes."""


class Align(StrEnum):
    """When a fixed window begins: aligned to the clock, or with the first cost that is taken."""

    CLOCK = "clock"
    FIRST_HIT = "first_hit"


class Priority(StrEnum):
    """The importance of a check, for limits with `shares`. P0 may use the whole limit."""

    P0 = "P0"
    P1 = "P1"
    P2 = "P2"
    P3 = "P3"


# The same values as plain strings, for type checkers of programs that build limits.
ScopeName = Literal["subject", "caller", "resource", "tenant", "global"]
ModeName = Literal["off", "monitor", "on"]
CountsName = Literal["cost", "requests"]
AlignName = Literal["clock", "first_hit"]
ConsistencyName = Literal["exact", "prepaid", "local"]
PeriodName = Literal["day", "week", "month", "year"]


class PriorityShares(dict[str, int]):
    """Percents by priority, immutable."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the shares of a limit can't be changed; build another limit")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type["PriorityShares"], tuple[dict[str, int]]]:
        return PriorityShares, (dict(self),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The fields that all kinds of limit share. Build one of the seven kinds, or use `limit_from_fields`.

    `name` is the period by default. `scope`, `mode`, `counts` and `consistency` are explained at their enums.
    `count_denied` takes the cost of denied checks too, up to twice the limit. `charge_after_outage` charges what was
    admitted without the store once it is back. `shares` maps priorities to the percent of the limit that they may use.
    Raises `InvalidLimit`, naming the field, if a value is invalid.
    """

    algorithm: ClassVar[str]
    size_field: ClassVar[str] = "limit"
    consistencies: ClassVar[tuple[str, ...]] = ("exact", "local")
    max_size: ClassVar[int] = MAX_EXACT - 1

    name: str = ""
    scope: Scope | ScopeName = Scope.SUBJECT
    mode: Mode | ModeName = Mode.ON
    counts: Counts | CountsName = Counts.COST
    count_denied: bool = False
    charge_after_outage: bool = False
    consistency: Consistency | ConsistencyName = Consistency.EXACT
    shares: Mapping[str, int] = field(default_factory=dict, hash=False)
    compiled: Algorithm = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.name:
            _validate_name(self.name)
        _set(self, "scope", _parse_choice("scope", Scope, self.scope))
        _set(self, "mode", _parse_choice("mode", Mode, self.mode))
        _set(self, "counts", _parse_choice("counts", Counts, self.counts))
        for flag in ("count_denied", "charge_after_outage"):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidLimit(flag, f"must be true or false, got {short_repr(getattr(self, flag))}")
        _set(self, "shares", _parse_shares(self.shares))
        if self.count_denied and self.shares:
            raise InvalidLimit("count_denied", "can't be combined with shares")
        _set(self, "consistency", _parse_choice("consistency", Consistency, self.consistency))
        if self.consistency not in self.consistencies:
            raise InvalidLimit("consistency", f"of a {self.algorithm} must be {' or '.join(self.consistencies)}")
        if self.consistency is Consistency.PREPAID and (self.shares or self.count_denied):
            raise InvalidLimit("consistency", "prepaid can't be combined with shares or count_denied")
        size = getattr(self, self.size_field)
        if size is not None:
            _set(self, self.size_field, parse_integer(self.size_field, size, maximum=self.max_size))
        _set(self, "compiled", self._compile())
        if not self.name:
            _set(self, "name", self._default_name())

    @property
    def shape(self) -> str:
        """The part of the definition that is in the bucket's key: limits that differ in it never share a count.

        Empty if a changed definition converts the stored state instead of starting afresh.
        """
        return ""

    @property
    def size(self) -> int | None:
        """The capacity, limit or number of slots. None if unlimited, 0 if blocked."""
        size: int | None = getattr(self, self.size_field)
        return size

    def percent(self, priority: Priority) -> int:
        """Return the percent of this limit that a priority may use."""
        return self.shares.get(priority, 100)

    def _compile(self) -> Algorithm:
        raise NotImplementedError

    def _default_name(self) -> str:
        """Return the name of an unnamed limit: its period, so that a changed number keeps the counter."""
        raise NotImplementedError

    def _size_or_unlimited(self) -> int:
        return UNLIMITED if self.size is None else self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket(Limit):
    size_field: ClassVar[str] = "bucket_capacity"

    bucket_capacity: Number | None

    def _level_parameters(self, rate_field: str) -> tuple[int, int, int]:
        """Return (capacity, tokens, per_us). Raise `InvalidLimit` if a level would not stay exact."""
        capacity = self._size_or_unlimited()
        value = getattr(self, rate_field)
        if value is None:
            if self.size is None:
                return capacity, 1, 1
            raise InvalidLimit(rate_field, "is required")
        rate = value if isinstance(value, Rate) else Rate.parse(rate_field, value)
        if capacity * rate.per_us > MAX_EXACT:
            raise InvalidLimit("bucket_capacity", f"at most {MAX_EXACT // rate.per_us} at this rate, got {capacity}")
        if capacity * rate.per_us > TEN_YEARS_US * rate.tokens:
            ten_years = f"ten years ({TEN_YEARS_US // US_PER_SECOND} seconds)"
            raise InvalidLimit(
                rate_field, f"a capacity of {capacity} may take at most {ten_years} to fill or drain at this rate"
            )
        return capacity, rate.tokens, rate.per_us


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBucket(_Bucket):
    """Allows bursts up to `bucket_capacity`, refilled continuously: enforces the mean rate and tolerates bursts.

    `bucket_capacity` is a whole number; None means unlimited, 0 blocked. `refill_rate_per_sec` is in tokens per second:
    a number, a decimal string or a `Rate`. It is required unless the capacity is None.
    """

    algorithm: ClassVar[str] = "token_bucket"
    consistencies: ClassVar[tuple[str, ...]] = tuple(Consistency)

    refill_rate_per_sec: Number | Rate | None = field(default=None, compare=False)

    def _compile(self) -> Algorithm:
        return TokenBucketAlgorithm(*self._level_parameters("refill_rate_per_sec"))

    def _default_name(self) -> str:
        return "bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakyBucket(_Bucket):
    """A queue that drains at a constant rate: each allowed check learns how long to wait (`delay_ms`).

    `bucket_capacity` is how much fits into the queue; None means unlimited, 0 blocked. `leak_rate_per_sec` is how much
    drains per second, like the refill rate of a `TokenBucket`.
    """

    algorithm: ClassVar[str] = "leaky_bucket"

    leak_rate_per_sec: Number | Rate | None = field(default=None, compare=False)

    def _compile(self) -> Algorithm:
        return LeakyBucketAlgorithm(*self._level_parameters("leak_rate_per_sec"))

    def _default_name(self) -> str:
        return "leaky"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Windowed(Limit):
    limit: Number | None
    window_seconds: Number = field(compare=False)  # `compiled` has the exact number

    def _default_name(self) -> str:
        return period_name(self._window_us())

    def _window_us(self) -> int:
        return parse_duration_us("window_seconds", self.window_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWindow(_Windowed):
    """A count per window: cheap and simple, but twice the limit may pass around the edge of a window.

    `limit` is a whole number; None means unlimited, 0 blocked. `window_seconds` is from 0.001 to ten years. Windows are
    aligned to the clock; with `align="first_hit"` the first cost opens one. `spread` gives each key a phase of its own,
    so that windows don't all end at once.
    """

    algorithm: ClassVar[str] = "fixed_window"
    consistencies: ClassVar[tuple[str, ...]] = tuple(Consistency)

    align: Align | AlignName = Align.CLOCK
    spread: bool = False

    @property
    def shape(self) -> str:
        return format_seconds(self._window_us()) + (
            "s" if self.spread else "h" if self.align is Align.FIRST_HIT else ""
        )

    def _compile(self) -> Algorithm:
        _set(self, "align", _parse_choice("align", Align, self.align))
        if not isinstance(self.spread, bool):
            raise InvalidLimit("spread", f"must be true or false, got {short_repr(self.spread)}")
        if self.spread and self.align is Align.FIRST_HIT:
            raise InvalidLimit("spread", "can't be combined with align: first_hit")
        kind = (
            WindowKind.SPREAD
            if self.spread
            else WindowKind.FIRST_HIT
            if self.align is Align.FIRST_HIT
            else WindowKind.ALIGNED
        )
        return FixedWindowAlgorithm(self._size_or_unlimited(), self._window_us(), int(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(_Windowed):
    """An exact log: at most `limit` (up to 1,000) in any window. Each cost expires exactly one window later.

    `limit` is a whole number; None means unlimited, 0 blocked. `window_seconds` is from 0.001 to ten years.
    """

    algorithm: ClassVar[str] = "sliding_window"
    max_size: ClassVar[int] = MAX_ENTRIES

    def _compile(self) -> Algorithm:
        return SlidingWindowAlgorithm(self._size_or_unlimited(), self._window_us())


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowCounter(_Windowed):
    """An estimate from the counts of two windows: as cheap as a fixed window, without its edge.

    `limit` is a whole number; None means unlimited, 0 blocked. `window_seconds` is from 0.001 to 50 days.
    """

    algorithm: ClassVar[str] = "sliding_window_counter"
    max_size: ClassVar[int] = MAX_COUNTER_LIMIT

    @property
    def shape(self) -> str:
        return format_seconds(self._window_us())

    def _compile(self) -> Algorithm:
        return SlidingWindowCounterAlgorithm(self._size_or_unlimited(), self._window_us())

    def _window_us(self) -> int:
        return parse_duration_us("window_seconds", self.window_seconds, maximum_us=FIFTY_DAYS_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency(Limit):
    """At most `max_concurrent` slots at once (up to 1,000); None means unlimited, 0 blocked.

    An allowed check has a `lease_id`. Its slots are free again when the lease is released, or `lease_ttl_seconds` after
    it was taken or renewed.
    """

    algorithm: ClassVar[str] = "concurrency"
    size_field: ClassVar[str] = "max_concurrent"
    consistencies: ClassVar[tuple[str, ...]] = ("exact",)
    max_size: ClassVar[int] = MAX_ENTRIES

    max_concurrent: Number | None
    lease_ttl_seconds: Number = field(compare=False)

    def _compile(self) -> Algorithm:
        for flag in ("count_denied", "charge_after_outage"):
            if getattr(self, flag):
                raise InvalidLimit(flag, "does not apply to a concurrency limit")
        return ConcurrencyAlgorithm(
            self._size_or_unlimited(), parse_duration_us("lease_ttl_seconds", self.lease_ttl_seconds)
        )

    def _default_name(self) -> str:
        return "concurrency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota(Limit):
    """A count per calendar day, week, month or year.

    `limit` is a whole number; None means unlimited, 0 blocked. `time_zone` is an IANA name. `anchor_day` is the day on
    which months begin, or that day of January on which years begin; 29 to 31 mean the last day of a shorter month.
    """

    algorithm: ClassVar[str] = "quota"
    consistencies: ClassVar[tuple[str, ...]] = tuple(Consistency)

    limit: Number | None
    period: Period | PeriodName
    time_zone: str = "UTC"
    anchor_day: int = 1
    calendar: Calendar = field(init=False, repr=False, compare=False, hash=False)

    def _compile(self) -> Algorithm:
        _set(self, "period", _parse_choice("period", Period, self.period))
        if not isinstance(self.time_zone, str):
            raise InvalidLimit("time_zone", f"must be a name such as 'Europe/Berlin', got {short_repr(self.time_zone)}")
        zone(self.time_zone)
        _set(self, "anchor_day", parse_integer("anchor_day", self.anchor_day, minimum=1, maximum=31))
        if self.anchor_day != 1 and self.period not in (Period.MONTH, Period.YEAR):
            raise InvalidLimit("anchor_day", f"does not apply to a period of one {self.period}")
        _set(self, "calendar", Calendar(Period(self.period), self.time_zone, self.anchor_day))
        return QuotaAlgorithm(self._size_or_unlimited(), self.calendar.calendar_hash)

    @property
    def shape(self) -> str:
        return f"{self.period}/{self.anchor_day}/{self.time_zone}"

    def _default_name(self) -> str:
        return str(self.period)


LIMIT_TYPES: Mapping[str, type[Limit]] = {
    kind.algorithm: kind
    for kind in (TokenBucket, LeakyBucket, FixedWindow, SlidingWindow, SlidingWindowCounter, Concurrency, Quota)
}


def period_name(window_us: int) -> str:
    """Return the default name of a limit with this window: `minute`, `15-minutes`, `0.25-seconds`."""
    for unit, seconds in reversed(UNIT_SECONDS.items()):
        times, rest = divmod(window_us, seconds * US_PER_SECOND)
        if times and not rest:
            return unit if times == 1 else f"{times}-{unit}s"
    return f"{format_seconds(window_us)}-seconds"


def limit_from_fields(given: Mapping[str, Any]) -> Limit:
    """Return the limit of a mapping with the fields of the wire format, including `algorithm`.

    Raises `InvalidLimit`, naming the field, if a field is unknown, missing or invalid.
    """
    if not isinstance(given, Mapping):
        raise InvalidLimit("limit", f"must be a mapping of fields, got {type(given).__name__}")
    values = dict(given)
    algorithm = values.pop("algorithm", None)
    kind = LIMIT_TYPES.get(algorithm) if isinstance(algorithm, str) else None
    if kind is None:
        raise InvalidLimit("algorithm", f"must be one of {', '.join(LIMIT_TYPES)}, got {short_repr(algorithm)}")
    if values.get("limit", 0) is None and kind.size_field not in values:
        values[kind.size_field] = values.pop("limit")  # every algorithm understands `limit: null` as unlimited
    known = {f.name: f for f in fields(kind) if f.init}
    for name in values:
        if name not in known:
            raise InvalidLimit(str(name)[:64], f"is not a field of {algorithm}; its fields are {', '.join(known)}")
    if "name" in values:
        _validate_name(values["name"])
    try:
        return kind(**values)
    except TypeError:
        missing = sorted(_REQUIRED[kind.algorithm] - values.keys())
        raise InvalidLimit(", ".join(missing), f"is required by {algorithm}") from None


def limit_to_fields(limit: Limit) -> dict[str, Any]:
    """Return the fields of a limit, without those at their default, as plain values for `limit_from_fields`."""
    plain: dict[str, Any] = {"algorithm": limit.algorithm}
    required = _REQUIRED[limit.algorithm]
    for f in fields(limit):
        if f.init:
            value = getattr(limit, f.name)
            if f.name == "name" or f.name in required or value not in (f.default, {}):
                plain[f.name] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): percent for key, percent in value.items()}
    if isinstance(value, Rate) and Rate.parse("rate", value.per_second) == value:
        return value.per_second
    return value


_REQUIRED = {
    algorithm: frozenset(
        f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING
    )
    for algorithm, kind in LIMIT_TYPES.items()
}


def _set(limit: Limit, name: str, value: object) -> None:
    object.__setattr__(limit, name, value)


def _validate_name(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidLimit("name", f"must be 1 to 64 letters, digits or -_./ characters, got {short_repr(name)}")
    return name


def _parse_choice(field_name: str, kind: type[Choice], value: object) -> Choice:
    try:
        return kind(value)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidLimit(field_name, f"must be one of {', '.join(kind)}, got {short_repr(value)}") from None


def _parse_shares(shares: object) -> Mapping[str, int]:
    if not isinstance(shares, Mapping):
        raise InvalidLimit("shares", f"must map priorities to percents, such as {{'P2': 80}}, got {short_repr(shares)}")
    checked: dict[str, int] = {}
    for priority, percent in shares.items():
        known = _parse_choice("shares", Priority, priority)
        checked[known] = parse_integer(f"shares.{known}", percent, maximum=100)
        if known is Priority.P0 and checked[known] != 100:
            raise InvalidLimit("shares.P0", "is always 100: P0 is never shed")
    return PriorityShares(checked)
