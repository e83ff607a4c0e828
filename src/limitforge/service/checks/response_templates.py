"""Answers that only differ in their numbers, written down once for each plan.

Nearly every check is decided by limits that are as the plan says, and can be answered by filling in numbers: two
formats, no object in between. Whatever has more to say (overrides, monitored or unlimited limits, a store that was
away) is answered by `answers.decided`, and both say the same, byte for byte.
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

MAX_TEMPLATES = 4_096  # of a process: tenants with equal plans share one
MAX_DENIAL_FORMATS = 64  # of a template: which limit binds, and which had no room

_encode = msgspec.json.Encoder().encode
_NUMBER: Any = msgspec.Raw(b"%d")


class ResponseFormat(msgspec.Struct, frozen=True, gc=False):
    """An answer with a place for each of its numbers."""

    headers: bytes
    body: bytes


class ResponseTemplate:
    """Answers the checks of one plan. Its limits all have a size, and are all enforced."""

    __slots__ = ("_admitted", "_delayed", "_denied", "_headers", "_names", "_sizes")

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...], headers: HeaderTemplate) -> None:
        self._names = names
        self._sizes = sizes
        self._headers = headers
        each = range(len(names))
        self._admitted = [self._build_format(binding) for binding in each]
        self._delayed = [self._build_format(binding, is_delayed=True) for binding in each]
        self._denied: dict[tuple[int, int], ResponseFormat] = {}
        """By the limit that binds, and those that have no room, a bit each."""

    @classmethod
    def compile(cls, selection: Selection) -> "ResponseTemplate | None":
        """None if its limits are not such that only numbers differ."""
        plan = selection.limits.plan(Priority.P0)
        sizes = tuple(rule.limit.size for rule in plan.rules)
        if not sizes or not selection.headers.has_format_string or not all(rule.enforced for rule in plan.rules):
            return None
        if plan.takes_lease or any(size is None or size > MAX_INTEGER for size in sizes):
            return None
        return cls(plan.names, cast("tuple[int, ...]", sizes), selection.headers)

    def render(self, outcome: Outcome) -> Response | None:
        """None where there is more to say."""
        if not outcome.allowed:
            return self._render_denial(outcome)
        numbers: list[int] = []
        for size, (limit, left, reset_us, wait_us, is_open) in zip(self._sizes, outcome.rows, strict=True):
            if limit != size or wait_us or is_open >= OVERFLOWED:
                return None  # it is another by an override, looked at without room, or an overflow bucket decided
            numbers += (left, reset_us)
        return self.render_admission(outcome.now_us, numbers, outcome.delay_us)

    def render_admission(self, now_us: int, numbers: list[int], delay_us: int = -1) -> Response:
        """What each limit has left, and in how many microseconds it resets, come in turns."""
        fields, states = [0, 0], [0, 0, 0]
        at = binding = bound_us = bound_ms = 0
        least = MAX_INTEGER + 1
        pairs = iter(numbers)
        for left, reset_us in zip(pairs, pairs):  # noqa: B905 - the same one twice
            reset_ms = (reset_us + 999) // 1_000
            fields += (left, (reset_ms + 999) // 1_000)
            states += (left, reset_ms)
            if left < least or (left == least and reset_ms > bound_ms):
                binding, least, bound_us, bound_ms = at, left, reset_us, reset_ms
            at += 1  # noqa: SIM113 - counting by hand is faster
        reset_at = (now_us + bound_us + 999_999) // 1_000_000
        fields[0] = states[0] = least
        fields[1] = reset_at if self._headers.is_epoch else (bound_ms + 999) // 1_000
        states[1], states[2] = reset_at, bound_ms
        if delay_us < 0:
            form = self._admitted[binding]
        else:
            form = self._delayed[binding]
            states.insert(3, -(-delay_us // 1_000))
        return Response(200, JSON_TYPE, form.headers % tuple(fields), form.body % tuple(states))

    def _render_denial(self, outcome: Outcome) -> Response | None:
        fields, states = [0, 0], [0, 0, 0, 0]
        at = binding = shut = left = bound_us = bound_ms = 0
        longest_ms = -1
        for size, (limit, own_left, reset_us, wait_us, is_open) in zip(self._sizes, outcome.rows):  # noqa: B905
            if limit != size or wait_us < 0 or is_open >= OVERFLOWED:
                return None  # it is another by an override, waiting never helps, or an overflow bucket decided
            reset_ms, retry_ms = (reset_us + 999) // 1_000, (wait_us + 999) // 1_000
            if retry_ms:
                shut += 1 << at
                fields += (own_left, (retry_ms + 999) // 1_000)
                states += (own_left, reset_ms, retry_ms)
            else:
                fields += (own_left, (reset_ms + 999) // 1_000)
                states += (own_left, reset_ms)
            if retry_ms > longest_ms:
                binding, longest_ms, left, bound_us, bound_ms = at, retry_ms, own_left, reset_us, reset_ms
            at += 1  # noqa: SIM113
        form = self._denied.get((binding, shut)) or self._denial_format(binding, shut)
        reset_at = (outcome.now_us + bound_us + 999_999) // 1_000_000
        seconds = (longest_ms + 999) // 1_000 or 1
        fields[0], fields[1] = left, reset_at if self._headers.is_epoch else (bound_ms + 999) // 1_000
        fields.append(seconds)
        states[:4] = left, reset_at, bound_ms, longest_ms
        states.append(seconds)
        return Response(429, PROBLEM_JSON, form.headers % tuple(fields), form.body % tuple(states))

    def _denial_format(self, binding: int, shut: int) -> ResponseFormat:
        form = self._build_format(binding, shut)
        if len(self._denied) < MAX_DENIAL_FORMATS:
            self._denied[binding, shut] = form
        return form

    def _build_format(self, binding: int, shut: int | None = None, *, is_delayed: bool = False) -> ResponseFormat:
        """Of a denial if it is told which limits had no room."""
        allowed, names = shut is None, [name.replace("%", "%%") for name in self._names]
        has_room = [allowed or not (shut or 0) >> at & 1 for at in range(len(names))]
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
                        retry_after_ms=0 if room else _NUMBER,
                        allowed=room,
                        monitored=False,
                    )
                    for name, size, room in zip(names, self._sizes, has_room, strict=True)
                },
            )
        )
        if not allowed:
            violated = [name for name, room in zip(names, has_room, strict=True) if not room]
            body = merge_problem(body, quota_problem(names[binding], "%d", violated))
        return ResponseFormat(self._headers.format_string(self._sizes[binding], allowed=allowed), body)


class TemplateCache:
    """The templates of a process."""

    def __init__(self) -> None:
        self._templates: dict[HeaderTemplate, ResponseTemplate | None] = {}

    def get(self, selection: Selection) -> ResponseTemplate | None:
        try:
            return self._templates[selection.headers]
        except KeyError:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
        return self._templates.setdefault(selection.headers, ResponseTemplate.compile(selection))
