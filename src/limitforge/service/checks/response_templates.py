"""Responses that differ only in their numbers, prepared as format strings once for each plan.

Nearly every check is decided by the limits of its plan alone. Its response is two format strings, filled with numbers
without an object in between. Any other case (overrides, monitored or unlimited limits, decisions of a failure
behaviour) is rendered by `responses.decision_response`. Both give the same bytes for the same decision.
"""

from typing import Any, cast

import msgspec
from msgspec import UNSET

from limitforge.catalog.snapshot import Selection
from limitforge.core.decision import OVERFLOWED, LimitState, Outcome
from limitforge.core.headers import MAX_INTEGER, HeaderTemplate
from limitforge.core.limits import Priority
from limitforge.service.checks.responses import JSON_TYPE, DecisionBody, Response, merge_problem, quota_problem
from limitforge.service.problems import PROBLEM_JSON

MAX_TEMPLATES = 4_096  # per process; tenants with equal plans share one
MAX_DENIAL_FORMATS = 64  # per template; one for each binding limit and set of exhausted limits

_encode = msgspec.json.Encoder().encode
_NUMBER: Any = msgspec.Raw(b"%d")


class ResponseFormat(msgspec.Struct, frozen=True, gc=False):
    """Format strings of the header fields and the body."""

    headers: bytes
    body: bytes


class ResponseTemplate:
    """Renders the responses of one plan, all of whose limits are finite and enforced."""

    __slots__ = ("_admitted", "_delayed", "_denied", "_headers", "_names", "_sizes")

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...], headers: HeaderTemplate) -> None:
        self._names = names
        self._sizes = sizes
        self._headers = headers
        indexes = range(len(names))
        self._admitted = [self._build_format(binding) for binding in indexes]
        self._delayed = [self._build_format(binding, is_delayed=True) for binding in indexes]
        self._denied: dict[tuple[int, int], ResponseFormat] = {}
        """By the index of the binding limit, and a bit mask of the exhausted limits."""

    @classmethod
    def compile(cls, selection: Selection) -> "ResponseTemplate | None":
        """Return the template of a plan, or None if its responses differ in more than numbers."""
        plan = selection.limits.plan(Priority.P0)
        sizes = tuple(rule.limit.size for rule in plan.rules)
        if not sizes or not selection.headers.has_format_string or not all(rule.enforced for rule in plan.rules):
            return None
        if plan.takes_lease or any(size is None or size > MAX_INTEGER for size in sizes):
            return None
        return cls(plan.names, cast("tuple[int, ...]", sizes), selection.headers)

    def render(self, outcome: Outcome) -> Response | None:
        """Return the response to an outcome, or None if the template does not fit it."""
        if not outcome.allowed:
            return self._render_denial(outcome)
        remaining_and_reset_us: list[int] = []
        for size, (limit, remaining, reset_us, wait_us, flags) in zip(self._sizes, outcome.rows, strict=True):
            if limit != size or wait_us or flags & OVERFLOWED:
                return None  # an override applies, a peek found no capacity, or an overflow bucket decided
            remaining_and_reset_us += (remaining, reset_us)
        return self.render_admission(outcome.now_us, remaining_and_reset_us, outcome.delay_us)

    def render_admission(self, now_us: int, remaining_and_reset_us: list[int], delay_us: int = -1) -> Response:
        """Return the response to an allowed check, from each limit's remaining capacity and time to reset in turn."""
        fields, states = [0, 0], [0, 0, 0]  # the numbers of the header fields and of the body
        index = binding = binding_us = binding_ms = 0
        least = MAX_INTEGER + 1
        numbers = iter(remaining_and_reset_us)
        for remaining, reset_us in zip(numbers, numbers):  # noqa: B905 - one iterator twice
            reset_ms = (reset_us + 999) // 1_000
            fields += (remaining, (reset_ms + 999) // 1_000)
            states += (remaining, reset_ms)
            if remaining < least or (remaining == least and reset_ms > binding_ms):
                binding, least, binding_us, binding_ms = index, remaining, reset_us, reset_ms
            index += 1  # noqa: SIM113 - faster than enumerate
        reset_at = (now_us + binding_us + 999_999) // 1_000_000
        fields[0] = states[0] = least
        fields[1] = reset_at if self._headers.is_epoch else (binding_ms + 999) // 1_000
        states[1], states[2] = reset_at, binding_ms
        if delay_us < 0:
            response_format = self._admitted[binding]
        else:
            response_format = self._delayed[binding]
            states.insert(3, -(-delay_us // 1_000))
        return Response(200, JSON_TYPE, response_format.headers % tuple(fields), response_format.body % tuple(states))

    def _render_denial(self, outcome: Outcome) -> Response | None:
        fields, states = [0, 0], [0, 0, 0, 0]
        index = binding = exhausted = binding_remaining = binding_us = binding_ms = 0
        longest_ms = -1
        for size, (limit, remaining, reset_us, wait_us, flags) in zip(self._sizes, outcome.rows):  # noqa: B905
            if limit != size or wait_us < 0 or flags & OVERFLOWED:
                return None  # an override applies, waiting never helps, or an overflow bucket decided
            reset_ms, retry_ms = (reset_us + 999) // 1_000, (wait_us + 999) // 1_000
            if retry_ms:
                exhausted += 1 << index
                fields += (remaining, (retry_ms + 999) // 1_000)
                states += (remaining, reset_ms, retry_ms)
            else:
                fields += (remaining, (reset_ms + 999) // 1_000)
                states += (remaining, reset_ms)
            if retry_ms > longest_ms:
                binding, longest_ms = index, retry_ms
                binding_remaining, binding_us, binding_ms = remaining, reset_us, reset_ms
            index += 1  # noqa: SIM113
        response_format = self._denied.get((binding, exhausted)) or self._denial_format(binding, exhausted)
        reset_at = (outcome.now_us + binding_us + 999_999) // 1_000_000
        retry_seconds = (longest_ms + 999) // 1_000 or 1
        fields[0] = binding_remaining
        fields[1] = reset_at if self._headers.is_epoch else (binding_ms + 999) // 1_000
        fields.append(retry_seconds)
        states[:4] = binding_remaining, reset_at, binding_ms, longest_ms
        states.append(retry_seconds)
        return Response(
            429, PROBLEM_JSON, response_format.headers % tuple(fields), response_format.body % tuple(states)
        )

    def _denial_format(self, binding: int, exhausted: int) -> ResponseFormat:
        response_format = self._build_format(binding, exhausted)
        if len(self._denied) < MAX_DENIAL_FORMATS:
            self._denied[binding, exhausted] = response_format
        return response_format

    def _build_format(self, binding: int, exhausted: int | None = None, *, is_delayed: bool = False) -> ResponseFormat:
        """Build the format of a denial by these limits, or of an allowed check if `exhausted` is None."""
        allowed, names = exhausted is None, [name.replace("%", "%%") for name in self._names]
        has_capacity = [not (exhausted or 0) >> index & 1 for index in range(len(names))]
        body = _encode(
            DecisionBody(
                allowed=allowed,
                limit=self._sizes[binding],
                remaining=_NUMBER,
                reset_at=_NUMBER,
                reset_after_ms=_NUMBER,
                retry_after_ms=0 if allowed else _NUMBER,
                delay_ms=_NUMBER if is_delayed else UNSET,
                binding=names[binding],
                limits={
                    name: LimitState(
                        limit=size,
                        remaining=_NUMBER,
                        reset_after_ms=_NUMBER,
                        retry_after_ms=0 if is_allowed else _NUMBER,
                        allowed=is_allowed,
                        monitored=False,
                    )
                    for name, size, is_allowed in zip(names, self._sizes, has_capacity, strict=True)
                },
            )
        )
        if not allowed:
            violated = [name for name, is_allowed in zip(names, has_capacity, strict=True) if not is_allowed]
            body = merge_problem(body, quota_problem(names[binding], "%d", violated))
        return ResponseFormat(self._headers.format_string(self._sizes[binding], allowed=allowed), body)


class TemplateCache:
    """The templates of a process, by the header template of a plan."""

    def __init__(self) -> None:
        self._templates: dict[HeaderTemplate, ResponseTemplate | None] = {}

    def get(self, selection: Selection) -> ResponseTemplate | None:
        """Return the template of the selected plan, or None if it has none."""
        try:
            return self._templates[selection.headers]
        except KeyError:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
        return self._templates.setdefault(selection.headers, ResponseTemplate.compile(selection))
