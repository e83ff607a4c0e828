"""Which policy applies to a resource.

    GET:/orders          this very resource; `login` too, or anything else without braces or a star
    GET:/orders/{id}     one segment each, which is not empty; so a route template (`{order_id}`) matches as well
    GET:/files/*         one or more further segments
    *:/orders            a path as above, with any method
    POST:*               any path of a method: whatever starts with `POST:`
    *                    anything

The most specific one applies. Paths are compared segment by segment from the left: a literal goes before `{}`, that
before a trailing `*`, that before no path at all. Only between equal paths does a method go before `*`.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec

from limitforge.core.exact import short_repr
from limitforge.core.keys import MAX_KEY_PART_BYTES
from limitforge.core.keys import parse_key_part as bounded
from limitforge.errors import InvalidInput

MAX_SEGMENTS = 32
MAX_SEARCH_STEPS = 1_024
"""How many places a search may come to, at the worst; a table that could need more is refused. It takes paths of ten
segments to get there, with a literal and a parameter at each, in every combination.
"""
PATTERN_CACHE_SIZE = 1_024  # patterns that are remembered: tenants of one file have much the same ones
MATCH_CACHE_SIZE = 128  # every tenant has a table, and a search costs a microsecond

T = TypeVar("T")

_WILDCARD = "*"
_PARAMETER = "{}"


class Pattern(msgspec.Struct, frozen=True):
    """A pattern that was parsed. `canonical` is its text without the names of parameters: two that are equal in it
    match the same resources.
    """

    text: str
    canonical: str
    method: str
    """`*` for any; empty for a literal that is no path of a method."""
    segments: tuple[str, ...] | None
    """Of its path: literals, `{}`, and `*` at the end; None if it has no path."""

    @staticmethod
    def parse(text: str) -> "Pattern":
        if not isinstance(text, str):
            raise InvalidInput("resource", f"must be a string, got {type(text).__name__}")
        return _parse(text)

    @property
    def is_literal(self) -> bool:
        """Whether one resource matches, and no other."""
        return _WILDCARD not in self.canonical and _PARAMETER not in self.canonical

    @property
    def is_template(self) -> bool:
        """Whether it can stand for the resources that match it: it has parameters, and says how many segments."""
        return self.segments is not None and _PARAMETER in self.segments and self.segments[-1] != _WILDCARD


class PolicyMatcher(Generic[T]):
    """Finds what belongs to the most specific pattern that matches, in time that does not grow with their number. It
    never changes, and may be asked by several threads.
    """

    def __init__(self, policies: Iterable[tuple[Pattern, T]]) -> None:
        self._literals: dict[str, tuple[T]] = {}
        self._methods: dict[str, tuple[T]] = {}
        self._catch_all: tuple[T] | None = None
        self._paths = _TrieNode()
        self._cache: dict[str, tuple[T | None]] = {}
        known: dict[str, Pattern] = {}
        for pattern, value in policies:
            if pattern.canonical in known:
                twin = known[pattern.canonical]
                raise InvalidInput(
                    "resource", f"{short_repr(pattern.text)} matches the same as {short_repr(twin.text)}"
                )
            known[pattern.canonical] = pattern
            self._add(pattern, (value,))
        if _max_steps(self._paths) > MAX_SEARCH_STEPS:
            raise InvalidInput(
                "resource", f"too many patterns overlap: a search might take over {MAX_SEARCH_STEPS} steps"
            )

    def match(self, resource: str) -> T | None:
        """What belongs to the most specific pattern; None if none matches."""
        found = self._literals.get(resource) or self._cache.get(resource)
        return found[0] if found is not None else self._match_and_cache(resource)

    def _match_and_cache(self, resource: str) -> T | None:
        found: tuple[T | None] = self._search(resource) or (None,)
        memo = self._cache
        if len(memo) >= MATCH_CACHE_SIZE:
            self._cache = memo = {}  # a new one, since another thread may be reading the old one
        if len(resource) <= MAX_KEY_PART_BYTES:
            memo[resource] = found
        return found[0]

    def _search(self, resource: str) -> tuple[T] | None:
        found: tuple[T] | None = None
        method, path = _split(resource)
        if method:
            if path.startswith("/"):  # what is longer than any pattern is cut: only a trailing star can match it
                found = _find_most_specific(self._paths, path.split("/", MAX_SEGMENTS + 1), 1, method)
            found = found or self._methods.get(method)
        return found or self._catch_all

    def _add(self, pattern: Pattern, entry: tuple[T]) -> None:
        if pattern.is_literal:
            self._literals[pattern.canonical] = entry
        elif pattern.segments is not None:
            _insert(self._paths, pattern.segments, pattern.method, entry)
        elif pattern.method == _WILDCARD:
            self._catch_all = entry
        else:
            self._methods[pattern.method] = entry


class _TrieNode(msgspec.Struct):
    """Where some segments lead. What ends here, and what goes on from here with a star, is kept by method."""

    literals: dict[str, "_TrieNode"] = {}
    parameter: "_TrieNode | None" = None
    exact: dict[str, Any] = {}
    wildcards: dict[str, Any] = {}


def _insert(node: _TrieNode, segments: tuple[str, ...], method: str, entry: object) -> None:
    for segment in segments:
        if segment == _WILDCARD:
            node.wildcards[method] = entry
            return
        if segment == _PARAMETER:
            if node.parameter is None:
                node.parameter = _TrieNode()
            node = node.parameter
        else:
            node = node.literals.setdefault(segment, _TrieNode())
    node.exact[method] = entry


def _find_most_specific(node: _TrieNode, segments: list[str], at: int, method: str) -> Any:
    """The first that is found in the order of specificity is the most specific."""
    if at == len(segments):
        return node.exact.get(method) or node.exact.get(_WILDCARD)
    segment = segments[at]
    child = node.literals.get(segment)
    found = None if child is None else _find_most_specific(child, segments, at + 1, method)
    if found is None and node.parameter is not None and segment:
        found = _find_most_specific(node.parameter, segments, at + 1, method)
    return found or node.wildcards.get(method) or node.wildcards.get(_WILDCARD)


def _max_steps(node: _TrieNode) -> int:
    """How many nodes the longest search comes to: at each, one literal at most fits, and then the parameter."""
    literal = max(map(_max_steps, node.literals.values()), default=0)
    return 1 + literal + (0 if node.parameter is None else _max_steps(node.parameter))


@lru_cache(PATTERN_CACHE_SIZE)
def _parse(text: str) -> Pattern:
    if not text:
        raise InvalidInput("resource", "must not be empty")
    text = bounded("resource", text)
    method, path = _split(text)
    if method and path.startswith("/"):
        segments = _segments(path)
        _refuse_wildcards(method if method != _WILDCARD else "")
        return Pattern(text, f"{method}:/{'/'.join(segments)}", method, segments)
    if text == _WILDCARD:
        return Pattern(text, text, _WILDCARD, None)
    if path == _WILDCARD and method not in ("", _WILDCARD):
        _refuse_wildcards(method)
        return Pattern(text, text, method, None)
    _refuse_wildcards(text)
    return Pattern(text, text, "", None)


def _split(resource: str) -> tuple[str, str]:
    """Method and path; both empty if it has no method."""
    method, colon, path = resource.partition(":")
    return (method, path) if colon and "/" not in method else ("", "")


def _segments(path: str) -> tuple[str, ...]:
    parts = path[1:].split("/")
    if len(parts) > MAX_SEGMENTS:
        raise InvalidInput("resource", f"at most {MAX_SEGMENTS} segments, got {len(parts)}")
    last = len(parts) - 1
    return tuple(_segment(part, is_last=at == last) for at, part in enumerate(parts))


def _segment(part: str, *, is_last: bool) -> str:
    if part == _WILDCARD and is_last:
        return part
    if part[:1] == "{" and part[-1:] == "}":
        _refuse_wildcards(part[1:-1])
        return _PARAMETER
    _refuse_wildcards(part)
    return part


def _refuse_wildcards(text: str) -> None:
    """Only literal text is left here."""
    if _WILDCARD in text:
        raise InvalidInput(
            "resource",
            f"a star stands alone, for a method, for its path, or as the last segment; not in {short_repr(text)}",
        )
    if text.count("{") != text.count("}"):
        raise InvalidInput("resource", f"the braces in {short_repr(text)} are not balanced")
    if "{" in text:
        raise InvalidInput("resource", f"a parameter is a whole segment of a path in braces; not in {short_repr(text)}")
