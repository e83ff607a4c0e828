"""Match resources against the patterns of policies.

    GET:/orders          exactly this resource; the same holds for `login` and other text without braces or a star
    GET:/orders/{id}     a parameter is one segment that is not empty; a route template (`{order_id}`) matches as well
    GET:/files/*         one or more further segments
    *:/orders            a path as above, with any method
    POST:*               any path of a method, that is all resources that start with `POST:`
    *                    any resource

The most specific pattern applies. Paths are compared segment by segment from the left, in this order of precedence: a
literal, `{}`, a trailing `*`, a pattern without a path. Between equal paths, a method takes precedence over `*`.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec

from limitforge.core.exact import short_repr
from limitforge.core.keys import MAX_KEY_PART_BYTES, parse_key_part
from limitforge.errors import InvalidInput

MAX_SEGMENTS = 32
MAX_SEARCH_STEPS = 1_024
"""The worst case of a search. Sets of patterns that could exceed it are refused. It takes about ten segments that each
have both a literal and a parameter, in every combination.
"""
PATTERN_CACHE_SIZE = 1_024  # tenants often have the same patterns
MATCH_CACHE_SIZE = 128  # small, since each tenant has a matcher and a search takes only a microsecond

T = TypeVar("T")

_WILDCARD = "*"
_PARAMETER = "{}"


class Pattern(msgspec.Struct, frozen=True):
    """A parsed pattern."""

    text: str
    canonical: str
    """The text without the names of parameters. Patterns with equal canonical text match the same resources."""
    method: str
    """`*` for any method; empty for literal text that has no method."""
    segments: tuple[str, ...] | None
    """The segments of its path: literals, `{}`, and `*` at the end. None if it has no path."""

    @staticmethod
    def parse(text: str) -> "Pattern":
        if not isinstance(text, str):
            raise InvalidInput("resource", f"must be a string, got {type(text).__name__}")
        return _parse(text)

    @property
    def is_literal(self) -> bool:
        """True if exactly one resource matches."""
        return _WILDCARD not in self.canonical and _PARAMETER not in self.canonical

    @property
    def is_template(self) -> bool:
        """True if it has parameters and a fixed number of segments, so that it can label the resources that match."""
        return self.segments is not None and _PARAMETER in self.segments and self.segments[-1] != _WILDCARD


class PolicyMatcher(Generic[T]):
    """Finds the value of the most specific pattern that matches a resource.

    The time of a search does not grow with the number of patterns. A matcher is immutable and thread-safe.
    """

    def __init__(self, policies: Iterable[tuple[Pattern, T]]) -> None:
        # Values are boxed in tuples of one, so that None can be a value.
        self._literals: dict[str, tuple[T]] = {}
        self._methods: dict[str, tuple[T]] = {}
        self._catch_all: tuple[T] | None = None
        self._paths = _TrieNode()
        self._cache: dict[str, tuple[T | None]] = {}
        known: dict[str, Pattern] = {}
        for pattern, value in policies:
            if pattern.canonical in known:
                other = known[pattern.canonical].text
                raise InvalidInput("resource", f"{short_repr(pattern.text)} matches the same as {short_repr(other)}")
            known[pattern.canonical] = pattern
            self._add(pattern, (value,))
        if _max_steps(self._paths) > MAX_SEARCH_STEPS:
            raise InvalidInput(
                "resource", f"too many patterns overlap: a search might take over {MAX_SEARCH_STEPS} steps"
            )

    def match(self, resource: str) -> T | None:
        """Return the value of the most specific pattern that matches, or None."""
        found = self._literals.get(resource) or self._cache.get(resource)
        return found[0] if found is not None else self._match_and_cache(resource)

    def _match_and_cache(self, resource: str) -> T | None:
        found: tuple[T | None] = self._search(resource) or (None,)
        cache = self._cache
        if len(cache) >= MATCH_CACHE_SIZE:
            self._cache = cache = {}  # a new dict, since another thread may be reading the old one
        if len(resource) <= MAX_KEY_PART_BYTES:
            cache[resource] = found
        return found[0]

    def _search(self, resource: str) -> tuple[T] | None:
        found: tuple[T] | None = None
        method, path = _split(resource)
        if method:
            if path.startswith("/"):
                # Segments beyond the longest pattern stay together: only a trailing star matches them.
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
    """A node of the trie of path segments."""

    literals: dict[str, "_TrieNode"] = {}
    parameter: "_TrieNode | None" = None
    exact: dict[str, Any] = {}
    """The values of patterns that end here, by method."""
    wildcards: dict[str, Any] = {}
    """The values of patterns that end with a star after this node, by method."""


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


def _find_most_specific(node: _TrieNode, segments: list[str], index: int, method: str) -> Any:
    """Search in the order of specificity, so that the first match is the most specific one."""
    if index == len(segments):
        return node.exact.get(method) or node.exact.get(_WILDCARD)
    segment = segments[index]
    child = node.literals.get(segment)
    found = None if child is None else _find_most_specific(child, segments, index + 1, method)
    if found is None and node.parameter is not None and segment:
        found = _find_most_specific(node.parameter, segments, index + 1, method)
    return found or node.wildcards.get(method) or node.wildcards.get(_WILDCARD)


def _max_steps(node: _TrieNode) -> int:
    """Return the number of nodes of the longest search: each tries at most one literal, and then the parameter."""
    literal = max(map(_max_steps, node.literals.values()), default=0)
    return 1 + literal + (0 if node.parameter is None else _max_steps(node.parameter))


@lru_cache(PATTERN_CACHE_SIZE)
def _parse(text: str) -> Pattern:
    if not text:
        raise InvalidInput("resource", "must not be empty")
    text = parse_key_part("resource", text)
    method, path = _split(text)
    if method and path.startswith("/"):
        segments = _parse_segments(path)
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
    """Return the method and the path; both are empty if there is no method."""
    method, colon, path = resource.partition(":")
    return (method, path) if colon and "/" not in method else ("", "")


def _parse_segments(path: str) -> tuple[str, ...]:
    parts = path[1:].split("/")
    if len(parts) > MAX_SEGMENTS:
        raise InvalidInput("resource", f"at most {MAX_SEGMENTS} segments, got {len(parts)}")
    last = len(parts) - 1
    return tuple(_parse_segment(part, is_last=index == last) for index, part in enumerate(parts))


def _parse_segment(part: str, *, is_last: bool) -> str:
    if part == _WILDCARD and is_last:
        return part
    if part[:1] == "{" and part[-1:] == "}":
        _refuse_wildcards(part[1:-1])
        return _PARAMETER
    _refuse_wildcards(part)
    return part


def _refuse_wildcards(text: str) -> None:
    """Refuse stars and braces in text that must be literal."""
    if _WILDCARD in text:
        raise InvalidInput(
            "resource",
            f"a star must be the whole method, the whole path or the last segment; not in {short_repr(text)}",
        )
    if text.count("{") != text.count("}"):
        raise InvalidInput("resource", f"the braces in {short_repr(text)} are not balanced")
    if "{" in text:
        raise InvalidInput("resource", f"a parameter must be a whole segment in braces; not in {short_repr(text)}")
