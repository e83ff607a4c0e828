"""Format decisions as HTTP header fields: the legacy fields, and those of two IETF drafts.

    X-RateLimit-Limit: 100                                             legacy
    X-RateLimit-Remaining: 50
    X-RateLimit-Reset: 1700006430
    RateLimit-Limit: 100                                               draft-06
    RateLimit-Remaining: 50
    RateLimit-Reset: 30
    RateLimit-Policy: "burst";q=100;w=60,"daily";q=1000;w=86400        draft-11
    RateLimit: "burst";r=50;t=30,"daily";r=980;t=40000
    Retry-After: 0                                                     all styles

Names are in lower case, as ASGI and HTTP/2 require. `encode_lines` writes them as above.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from math import inf

import msgspec

from limitforge.core.algorithms.fixed_window import FixedWindowAlgorithm
from limitforge.core.algorithms.level import LevelAlgorithm
from limitforge.core.algorithms.sliding_window import SlidingWindowAlgorithm
from limitforge.core.algorithms.sliding_window_counter import SlidingWindowCounterAlgorithm
from limitforge.core.calendar import Period
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.decision import Decision, LimitState
from limitforge.core.exact import US_PER_SECOND, short_repr
from limitforge.core.limits import Concurrency, Limit, Priority, Quota
from limitforge.core.plan import Limits, LimitsLike, Plan
from limitforge.errors import InvalidInput

MAX_INTEGER = 999_999_999_999_999
"""The largest integer of a structured field (RFC 9651, section 3.3.1)."""

PERIOD_SECONDS = {Period.DAY: 86_400, Period.WEEK: 604_800, Period.MONTH: 31 * 86_400, Period.YEAR: 366 * 86_400}
"""The window of a quota as `w`: its longest period, without clock changes. `t` says when the current one ends."""

Header = tuple[bytes, bytes]
"""A field's name, in lower case, and its value."""


class HeaderStyle(StrEnum):
    """A family of rate limit header fields."""

    LEGACY = "legacy"
    DRAFT_06 = "draft-06"
    DRAFT_11 = "draft-11"


class ResetUnit(StrEnum):
    """The meaning of `X-RateLimit-Reset`: seconds since 1970 (epoch), or seconds from now (delta)."""

    EPOCH = "epoch"
    DELTA = "delta"


DEFAULT_STYLES = frozenset({HeaderStyle.LEGACY, HeaderStyle.DRAFT_11})


class HeaderOptions(msgspec.Struct, frozen=True):
    """The styles of header fields to send, and the unit of `X-RateLimit-Reset`."""

    styles: frozenset[HeaderStyle] = DEFAULT_STYLES
    reset: ResetUnit = ResetUnit.EPOCH


_RETRY_NOW = (b"retry-after", b"0")

_LINE_STARTS = {
    name.lower(): name + b": "
    for name in (
        *(b"X-RateLimit-Limit", b"X-RateLimit-Remaining", b"X-RateLimit-Reset"),
        *(b"RateLimit-Limit", b"RateLimit-Remaining", b"RateLimit-Reset"),
        *(b"RateLimit-Policy", b"RateLimit", b"Retry-After"),
    )
}


def encode_block(headers: Iterable[Header]) -> bytes:
    """Return the fields as lines of HTTP/1.1, with the names as they are."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def parse_block(block: bytes) -> list[Header]:
    """Return the fields of a block that `encode_block` made."""
    return [(name, value) for name, _, value in [line.partition(b": ") for line in block.split(b"\r\n")[:-1]]]


def encode_lines(headers: Iterable[Header]) -> bytes:
    """Return the fields as lines of HTTP/1.1, with the usual capitals in the names."""
    return b"".join([b"%b%b\r\n" % (_LINE_STARTS[name], value) for name, value in headers])


class _LimitFields(msgspec.Struct, frozen=True):
    """The constant text of one limit's items in `RateLimit` and `RateLimit-Policy`. An override may change the size."""

    name: str
    limit: Limit | None
    size: int | None
    policy: str
    state: str

    @classmethod
    def of(cls, name: str, limit: Limit | None = None) -> "_LimitFields":
        quoted = _quote(name)
        size = None if limit is None else limit.size
        return cls(quoted, limit, size, "" if size is None else _policy_item(quoted, limit, size), f"{quoted};r=")

    def policy_of(self, size: int | None) -> str:
        """Return the item of `RateLimit-Policy` for a limit of this size."""
        if size == self.size:
            return self.policy
        return "" if size is None else _policy_item(self.name, self.limit, size)


class HeaderTemplate:
    """Formats the decisions of one plan as header fields. `compile` prepares the text that never changes."""

    __slots__ = (
        "_clock",
        "_draft_06",
        "_draft_11",
        "_items",
        "_legacy",
        "_policy",
        "is_epoch",
    )

    def __init__(
        self,
        items: Mapping[str, _LimitFields],
        styles: Collection[HeaderStyle],
        reset: ResetUnit,
        clock: Clock,
    ) -> None:
        self._items = items
        self._policy = ",".join(item.policy for item in items.values() if item.policy).encode()
        self._legacy = HeaderStyle.LEGACY in styles
        self._draft_06 = HeaderStyle.DRAFT_06 in styles
        self._draft_11 = HeaderStyle.DRAFT_11 in styles
        self._clock = clock
        self.is_epoch = reset is ResetUnit.EPOCH
        """True if `X-RateLimit-Reset` is a time, false if it is a duration."""

    @classmethod
    def compile(
        cls,
        limits: Plan | LimitsLike,
        styles: Collection[HeaderStyle] = DEFAULT_STYLES,
        reset: ResetUnit = ResetUnit.EPOCH,
        clock: Clock | None = None,
    ) -> "HeaderTemplate":
        """Return a template for decisions of these limits, of any priority.

        `styles` are the families of fields to send, `reset` the unit of `X-RateLimit-Reset`. `clock` (the system clock)
        gives the reset time of decisions whose limits are all monitored: they have no `reset_at`. Raises `InvalidLimit`
        if the limits are invalid.
        """
        plan = limits if isinstance(limits, Plan) else Limits.of(limits).plan(Priority.P0)
        items = {name: _LimitFields.of(name, rule.limit) for name, rule in zip(plan.names, plan.rules, strict=True)}
        return cls(items, styles, reset, clock or SystemClock())

    def fields(self, decision: Decision) -> list[Header]:
        """Return the fields of a decision. Without known limits there is only the Retry-After of a denial."""
        headers: list[Header] = []
        if decision.limits:
            if self._legacy or self._draft_06:
                self._add_binding(headers, decision)
            if self._draft_11:
                self._add_draft_11(headers, decision.limits)
            if decision.allowed:
                headers.append(_RETRY_NOW)
        if not decision.allowed and decision.retry_after_ms is not None:
            headers.append((b"retry-after", b"%d" % (-(-decision.retry_after_ms // 1_000) or 1)))
        return headers

    def block(self, decision: Decision) -> bytes:
        """Return the fields as lines of HTTP/1.1."""
        return encode_block(self.fields(decision))

    @property
    def has_format_string(self) -> bool:
        """True if the styles are the default ones: `format_string` supports no others."""
        return self._legacy and self._draft_11 and not self._draft_06

    def format_string(self, size: int, *, allowed: bool) -> bytes:
        """Return a %-format for the block of a decision whose limits all have the parameters of the plan.

        `size` is the size of the binding limit. The arguments of the format are remaining and reset of the binding
        limit, then remaining and reset seconds of each limit, then for a denial the seconds to wait.
        """
        policy = self._policy.decode().replace("%", "%%")
        states = ",".join([item.state.replace("%", "%%") + "%d;t=%d" for item in self._items.values()])
        return (
            f"x-ratelimit-limit: {size}\r\nx-ratelimit-remaining: %d\r\nx-ratelimit-reset: %d\r\n"
            f"ratelimit-policy: {policy}\r\nratelimit: {states}\r\nretry-after: {0 if allowed else '%d'}\r\n"
        ).encode()

    def _add_binding(self, headers: list[Header], decision: Decision) -> None:
        """Add the fields of the binding limit; if all limits are monitored, of the one that would bind."""
        limit, remaining = decision.limit, decision.remaining
        reset_ms, reset_at = decision.reset_after_ms, decision.reset_at
        if limit is None or remaining is None or reset_ms is None or reset_at is None:
            state = _would_bind(decision.limits.values())
            if state is None or state.limit is None:
                return
            limit, reset_ms = state.limit, state.reset_after_ms
            remaining = state.remaining if state.allowed and state.remaining is not None else 0
            reset_at = -(-(self._clock.now_us() + reset_ms * 1_000) // US_PER_SECOND)
        seconds = -(-reset_ms // 1_000)
        if self._legacy:
            headers += (
                (b"x-ratelimit-limit", b"%d" % limit),
                (b"x-ratelimit-remaining", b"%d" % remaining),
                (b"x-ratelimit-reset", b"%d" % (reset_at if self.is_epoch else seconds)),
            )
        if self._draft_06:
            headers += (
                (b"ratelimit-limit", b"%d" % min(limit, MAX_INTEGER)),
                (b"ratelimit-remaining", b"%d" % min(remaining, MAX_INTEGER)),
                (b"ratelimit-reset", b"%d" % seconds),
            )

    def _add_draft_11(self, headers: list[Header], limits: Mapping[str, LimitState]) -> None:
        items = self._items
        is_as_planned = len(limits) == len(items)
        states: list[str] = []
        for name, state in limits.items():
            item = items.get(name)
            if item is None:
                item, is_as_planned = _LimitFields.of(name), False
            limit, remaining = state.limit, state.remaining
            if limit != item.size:
                is_as_planned = False
            if limit is None or remaining is None:
                continue
            remaining = min(remaining, MAX_INTEGER)
            wait_ms = state.reset_after_ms if state.allowed else state.retry_after_ms
            if wait_ms is None:
                states.append(f"{item.state}{remaining}")
            else:
                states.append(f"{item.state}{remaining};t={-(-wait_ms // 1_000)}")
        if states:
            headers.append((b"ratelimit-policy", self._policy if is_as_planned else self._policy_of(limits)))
            headers.append((b"ratelimit", ",".join(states).encode()))

    def _policy_of(self, limits: Mapping[str, LimitState]) -> bytes:
        """Return `RateLimit-Policy` with the parameters of overrides, or of limits that are not in the plan."""
        items = (
            (self._items.get(name) or _LimitFields.of(name)).policy_of(state.limit) for name, state in limits.items()
        )
        return ",".join(item for item in items if item).encode()


def _would_bind(states: Collection[LimitState]) -> LimitState | None:
    """Return the limit that would bind if all were enforced: longest wait, else least remaining, then longest reset."""
    known = [state for state in states if state.limit is not None]
    denied = [state for state in known if not state.allowed]
    if denied:
        return max(denied, key=lambda state: inf if state.retry_after_ms is None else state.retry_after_ms)
    return max(known, key=lambda state: (-(state.remaining or 0), state.reset_after_ms), default=None)


def _policy_item(quoted: str, limit: Limit | None, size: int) -> str:
    if isinstance(limit, Concurrency):
        return f'{quoted};q={size};qu="concurrent-requests"'
    window_us = None if limit is None else _window_us(limit, size)
    window = "" if window_us is None else f";w={max(-(-window_us // US_PER_SECOND), 1)}"
    return f"{quoted};q={min(size, MAX_INTEGER)}{window}"


def _window_us(limit: Limit, size: int) -> int | None:
    """Return the window of a limit of this size; for a bucket, the time until it is full.

    None for a bucket that is unlimited in its plan: it need not have a rate there.
    """
    algorithm = limit.compiled
    if isinstance(algorithm, LevelAlgorithm):
        return None if limit.size is None else -(-size * algorithm.per_us // algorithm.tokens)
    if isinstance(algorithm, FixedWindowAlgorithm | SlidingWindowAlgorithm | SlidingWindowCounterAlgorithm):
        return algorithm.window_us
    return PERIOD_SECONDS[Period(limit.period)] * US_PER_SECOND if isinstance(limit, Quota) else None


def _quote(text: str) -> str:
    """Return a string of a structured field (RFC 9651, section 4.1.6).

    The names of limits have no characters that must be escaped or refused, but `_LimitFields` accepts any name.
    """
    if not text.isascii() or not text.isprintable():
        raise InvalidInput("name", f"must be printable ASCII in a header, got {short_repr(text)}")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
