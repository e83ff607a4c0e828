"""The YAML of configuration files: what is parsed, what is refused, and that a dump parses to the same values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge.catalog.config import strict_yaml
from limitforge.errors import InvalidFile


def parse(text: str | bytes) -> Any:
    return strict_yaml.parse_yaml(text if isinstance(text, bytes) else text.encode(), "plans.yaml").root.value


def error_of(text: str | bytes) -> str:
    with pytest.raises(InvalidFile) as refused:
        parse(text)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("mode: on", "on"),
        ("mode: off", "off"),
        ("mode: no", "no"),
        ("mode: Yes", "Yes"),
        ("mode: true", True),
        ("mode: False", False),
        ("mode: ~", None),
        ("mode:", None),
        ("mode: 12", 12),
        ("mode: -12", -12),
        ("mode: 0100", 100),
        ("mode: 1.5", 1.5),
        ("mode: 1e3", 1000.0),
        ("mode: 1e400", "1e400"),
        ("mode: .nan", ".nan"),
        ("mode: 0x1f", "0x1f"),
        ("mode: 1_000", "1_000"),
        ("mode: 12:30:45", "12:30:45"),
        ("mode: 2026-12-31", "2026-12-31"),
        ("mode: 2026-12-31T00:00:00Z", "2026-12-31T00:00:00Z"),
        ("mode: '12'", "12"),
        ("mode: !!str 12", "12"),
        ("mode: |\n  a\n  b\n", "a\nb\n"),
        ("mode: = ", "="),
    ],
)
def test_words_stay_words_and_times_stay_text(text: str, value: Any) -> None:
    found = parse(text)["mode"]
    assert (found, type(found)) == (value, type(value))


def test_json_is_read_too() -> None:
    document = {"a": [1, 2.5, None, True, "on", {"b": "\u00fc/\t"}], "c": {}}
    assert parse(json.dumps(document)) == document
    assert parse(json.dumps(document, indent="\t")) == document


def test_a_file_may_start_with_a_byte_order_mark() -> None:
    assert parse(b"\xef\xbb\xbfa: 1") == {"a": 1}


def test_anchors_merges_and_aliases_are_followed() -> None:
    text = """
base: &base {mode: on, lanes: 2}
other: &other [1, 2]
tenants:
  - {<<: *base, name: a, mode: off}
  - <<: [*base, {name: b}]
  - *other
"""
    assert parse(text)["tenants"] == [
        {"mode": "off", "lanes": 2, "name": "a"},
        {"mode": "on", "lanes": 2, "name": "b"},
        [1, 2],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plans.yaml:1: is empty"),
        ("# nothing\n", "plans.yaml:1: is empty"),
        ("a: 1\nb: 2\na: 3", "plans.yaml:3: 'a' occurs twice in one mapping"),
        ("a: {b: 1, 'b': 2}", "plans.yaml:1: 'b' occurs twice in one mapping"),
        ("a: 1\n---\nb: 2", "plans.yaml:2: holds more than one document"),
        (
            "a: 1\nb: [1,\n",
            "plans.yaml:2: is not valid YAML: while parsing a flow node: did not find expected node content",
        ),
        ("a: 1\n b: 2", "plans.yaml:2: is not valid YAML: mapping values are not allowed in this context"),
        ("a: 1\n\nb: \x07", "plans.yaml:3: has the character U+0007, which YAML forbids"),
        (b"a: 1\nb: \xff", "plans.yaml:2: is not UTF-8"),
        ("a: !!python/object/apply:os.system [ls]", "the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("a: !secret x", "the tag '!secret' is not supported"),
        ("a: !!int '3'", "is not supported"),
        ("? [a]\n: b", "plans.yaml:1: the name of a field must be text"),
        ("a: &a x\n*a : 1", "plans.yaml:2: the name of a field must be text"),
        ("a: *b", "plans.yaml:1: *b refers to no anchor that ends before it"),
        ("a: &a [*a]", "*a refers to no anchor that ends before it"),
        ("a:\n  <<: 3", "plans.yaml:2: << takes a mapping, or a list of them"),
        ("[" * 65 + "]" * 65, "plans.yaml:1: is nested deeper than 64 levels"),
        ("a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 40 + "*a" + "]" * 40, "is nested deeper than 64 levels"),
        (b"a: " + b"x" * strict_yaml.MAX_FILE_BYTES, "plans.yaml:1: must be at most 16 MiB"),
    ],
)
def test_an_invalid_file_is_refused_with_its_line(text: str | bytes, message: str) -> None:
    assert message in error_of(text)


def test_nesting_up_to_the_bound_is_read() -> None:
    parse("[" * 64 + "]" * 64)


def test_aliases_count_as_often_as_they_are_used() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]" for at in range(1, 9)]
    assert "plans.yaml:6: holds more than 1000000 values" in error_of("\n".join(lines))


def test_merges_count_as_often_as_they_are_used() -> None:
    lines = ["a0: &a0 {" + ", ".join(f"f{at}: 1" for at in range(1_000)) + "}", "b:"]
    lines += ["  - {<<: *a0}"] * 1_100
    assert "holds more than 1000000 values" in error_of("\n".join(lines))


def test_every_field_has_its_line() -> None:
    source = strict_yaml.parse_yaml(
        b"""
tenants:
  - name: acme
    limits:
      api/v1.0:
        limit: 5
  - plans: [{name: a},
            {name: b}]
""",
        "plans.yaml",
    )
    lines = {
        "tenants": 2,
        "tenants[0]": 3,
        "tenants[0].limits.api/v1.0.limit": 6,
        "tenants[0].limits.api/v1.0.other": 5,
        "tenants[0].nothing": 3,
        "tenants[1].plans[1].name": 8,
        "tenants[1].plans[7]": 7,
        "": 2,
    }
    assert {path: source.line_of(path) for path in lines} == lines
    assert source.value_of("tenants[0].limits.api/v1.0.limit") == 5


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
AWKWARD = [
    *("on", "No", "NULL", "~", "", " ", "1", "1.0", "1e3", "0x1", "2026-01-01", "a: b", "a #b", "- a", "*", "&a", "!x"),
    *("GET:/orders/{id}", "user:42", "{a}", "[a]", "'", '"', "\\", "\n", "\t", "a\nb", "a:", "=", "<<"),
    *("\x85", "\u2028", "\ufeff", "\x00"),
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(AWKWARD)
VALUES = st.recursive(
    SCALARS | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXT.filter(lambda name: name != "<<"), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(value=VALUES)
def test_what_is_written_is_read_as_the_same(value: Any) -> None:
    assert parse(strict_yaml.dump_yaml(value)) == value
