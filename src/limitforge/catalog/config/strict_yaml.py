"""Parse and dump the subset of YAML that configuration files use, with the line of every field.

It is stricter than YAML 1.1: only `true` and `false` are booleans, so `on`, `off` and `no` remain text; times remain
text; duplicate keys are rejected, and so are tags that would construct objects. Sizes are bounded, and an alias counts
each time it is used.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import yaml

from limitforge.core.exact import short_repr
from limitforge.errors import InvalidFile

MAX_FILE_BYTES = 16 * 2**20
MAX_NODES = 1_000_000
MAX_DEPTH = 64

_MERGE_KEY = "<<"
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_INTEGER = re.compile(r"[-+]?[0-9]{1,40}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]{1,40}|[0-9]{1,40}(?:\.[0-9]{0,40})?)(?:[eE][-+]?[0-9]{1,3})?")
_HARMLESS_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq"))
_INDEX = re.compile(r"\[(?P<index>[0-9]+)\]")
_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z/][A-Za-z0-9_./{}@+-]*(?::[A-Za-z0-9_./{}@+-]+)*")
_AMBIGUOUS_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
"""Words that other YAML parsers may not read as text, so they are quoted."""
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader is twenty times as fast


class YamlNode(msgspec.Struct, eq=False, gc=False):
    """A value, with the line on which it starts. Aliases share the node of their anchor."""

    value: Any
    line: int
    fields: dict[str, tuple[int, "YamlNode"]] = {}
    """The values of a mapping by name, each with the line of that name."""
    items: list["YamlNode"] = []
    size: int = 1
    depth_below: int = 1


class SourceFile(msgspec.Struct, frozen=True, eq=False):
    """A parsed file: its plain values, and the line of each."""

    name: str
    root: YamlNode

    def line_of(self, path: str) -> int:
        """Return the line of a field such as `tenants[0].plans[1].limits`, or of its nearest existing parent."""
        return self._find(path)[0]

    def value_of(self, path: str) -> Any:
        """Return the value of a field, or of its nearest existing parent."""
        return self._find(path)[1].value

    def _find(self, path: str) -> tuple[int, YamlNode]:
        node, line = self.root, self.root.line
        while path:
            index = _INDEX.match(path)
            if index is not None:
                position = int(index["index"])
                if position >= len(node.items):
                    break
                node, path = node.items[position], path[index.end() :]
                line = node.line
            else:
                path = path.removeprefix(".")
                name = next((name for name in _name_candidates(path) if name in node.fields), None)
                if name is None:
                    break
                line, node = node.fields[name]
                path = path[len(name) :]
        return line, node


def parse_yaml(content: bytes, name: str) -> SourceFile:
    """Parse a file that holds exactly one document. Raises `InvalidFile`."""
    if len(content) > MAX_FILE_BYTES:
        raise _error(name, 1, f"must be at most {MAX_FILE_BYTES // 2**20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _error(name, content.count(b"\n", 0, error.start) + 1, "is not UTF-8") from None
    try:
        root = _Composer(name).compose(yaml.parse(text, Loader=_Loader))
    except yaml.reader.ReaderError as error:
        code = error.character if isinstance(error.character, int) else ord(error.character)
        problem = f"has the character U+{code:04X}, which YAML forbids"
        raise _error(name, text.count("\n", 0, error.position) + 1, problem) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else min(mark.line, text.count("\n", 0, len(text.rstrip()))) + 1
        problem = ": ".join(filter(None, (error.context, error.problem)))
        raise _error(name, line, f"is not valid YAML: {problem}") from None
    return SourceFile(name, root)


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML in block style."""
    return (
        "".join(f"{line}\n" for line in _dump_lines(value))
        if isinstance(value, dict | list | tuple)
        else f"{_dump_scalar(value)}\n"
    )


# --- Reading ---------------------------------------------------------------------------------------------------------


class _OpenCollection(msgspec.Struct, eq=False):
    """A mapping or list whose end has not been parsed yet."""

    node: YamlNode
    anchor: str | None
    key: tuple[str, int] | None = None
    merged: list[YamlNode] = []


class _Composer:
    """Composes the events of the parser into nodes, without recursion, so that hostile files stay within bounds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stack: list[_OpenCollection] = []
        self._anchors: dict[str, YamlNode] = {}
        self._nodes = 0
        self._root: YamlNode | None = None

    def compose(self, events: Iterator[Any]) -> YamlNode:
        """Return the root node."""
        for event in events:
            line = event.start_mark.line + 1
            match event:
                case yaml.ScalarEvent():
                    self._scalar(event, line)
                case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                    self._open_collection(event, line)
                case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                    self._close_collection()
                case yaml.AliasEvent(anchor=str() as anchor):
                    self._alias(anchor, line)
                case yaml.DocumentStartEvent() if self._root is not None:
                    raise _error(self._name, line, "holds more than one document")
        if self._root is None:
            raise _error(self._name, 1, "is empty")
        return self._root

    def _scalar(self, event: Any, line: int) -> None:
        self._check_tag(event.tag, line)
        inside = self._stack[-1] if self._stack else None
        if inside is not None and isinstance(inside.node.value, dict) and inside.key is None:
            self._set_key(inside, event.value, line)
            return
        is_text = not event.implicit[0] or event.tag is not None
        node = YamlNode(event.value if is_text else resolve_scalar(event.value), line)
        self._count(1, line)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._attach(node, line)

    def _set_key(self, inside: _OpenCollection, name: str, line: int) -> None:
        if name in inside.node.fields:
            raise _error(self._name, line, f"{short_repr(name)} occurs twice in one mapping")
        inside.key = (name, line)

    def _open_collection(self, event: Any, line: int) -> None:
        self._check_tag(event.tag, line)
        if self._stack and isinstance(self._stack[-1].node.value, dict) and self._stack[-1].key is None:
            raise _error(self._name, line, "the name of a field must be text")
        self._count(1, line)
        if len(self._stack) >= MAX_DEPTH:
            raise _error(self._name, line, f"is nested deeper than {MAX_DEPTH} levels")
        value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        self._stack.append(_OpenCollection(YamlNode(value, line), event.anchor))

    def _close_collection(self) -> None:
        ended = self._stack.pop()
        node = ended.node
        for other in ended.merged:
            for name, entry in other.fields.items():
                if name not in node.fields:
                    node.fields[name] = entry
                    node.value[name] = entry[1].value
        if ended.anchor is not None:
            self._anchors[ended.anchor] = node
        self._attach(node, node.line)

    def _alias(self, anchor: str, line: int) -> None:
        node = self._anchors.get(anchor)
        if node is None:
            raise _error(self._name, line, f"*{anchor} refers to no anchor that ends before it")
        if self._stack and isinstance(self._stack[-1].node.value, dict) and self._stack[-1].key is None:
            raise _error(self._name, line, "the name of a field must be text")
        self._count(node.size, line)
        if len(self._stack) + node.depth_below > MAX_DEPTH:
            raise _error(self._name, line, f"is nested deeper than {MAX_DEPTH} levels")
        self._attach(node, line)

    def _attach(self, node: YamlNode, line: int) -> None:
        """Attach a node to the innermost open collection, or make it the root."""
        if not self._stack:
            self._root = node
            return
        inside = self._stack[-1]
        parent = inside.node
        if inside.key is None:
            parent.items.append(node)
            parent.value.append(node.value)
        elif inside.key[0] == _MERGE_KEY:
            inside.merged += self._merged(node, line)
            inside.key = None
        else:
            name, key_line = inside.key
            parent.fields[name] = (key_line, node)
            parent.value[name] = node.value
            inside.key = None
        parent.size += node.size
        parent.depth_below = max(parent.depth_below, node.depth_below + 1)

    def _merged(self, node: YamlNode, line: int) -> list[YamlNode]:
        nodes = node.items if isinstance(node.value, list) else [node]
        if not all(isinstance(each.value, dict) for each in nodes):
            raise _error(self._name, line, "<< takes a mapping, or a list of them")
        return nodes

    def _count(self, size: int, line: int) -> None:
        self._nodes += size
        if self._nodes > MAX_NODES:
            raise _error(self._name, line, f"holds more than {MAX_NODES} values")

    def _check_tag(self, tag: str | None, line: int) -> None:
        if tag is not None and tag not in _HARMLESS_TAGS:
            raise _error(self._name, line, f"the tag {short_repr(tag)} is not supported")


def resolve_scalar(text: str) -> Any:
    """Return the value of text without quotes: null, a boolean, a number, or the text."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return text if number in (float("inf"), float("-inf")) else number
    return text


def _name_candidates(path: str) -> Iterator[str]:
    """Yield possible names of the next field, the longest first, since names may contain dots."""
    end = len(path)
    while end > 0:
        yield path[:end]
        end = max(path.rfind(".", 0, end), path.rfind("[", 0, end))


def _error(name: str, line: int, problem: str) -> InvalidFile:
    return InvalidFile(name, [(line, "", problem)])


# --- Writing ---------------------------------------------------------------------------------------------------------


def _dump_lines(value: Mapping[str, Any] | Sequence[Any]) -> Iterator[str]:
    if isinstance(value, Mapping):
        if not value:
            yield "{}"
        for name, each in value.items():
            if isinstance(each, dict | list | tuple) and each:
                yield f"{_dump_scalar(name)}:"
                yield from (f"  {line}" for line in _dump_lines(each))
            else:
                yield f"{_dump_scalar(name)}: {_dump_scalar(each)}"
        return
    if not value:
        yield "[]"
    for each in value:
        lines = iter(_dump_lines(each)) if isinstance(each, dict | list | tuple) else iter((_dump_scalar(each),))
        yield f"- {next(lines)}"
        yield from (f"  {line}" for line in lines)


def _dump_scalar(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, str):
        if _NEEDS_NO_QUOTES.fullmatch(value) and value.lower() not in _AMBIGUOUS_WORDS:
            return value
        return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(value, ensure_ascii=False))
    return json.dumps(value)


def format_time(value: datetime) -> str:
    """Format a time in UTC, with a fraction only if there is one."""
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
