"""Which policy applies: what patterns match, which one is the most specific, and how many are accepted."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from limitforge import InvalidInput
from limitforge.catalog.patterns import MATCH_CACHE_SIZE, Pattern, PolicyMatcher


def table(patterns: Sequence[str]) -> PolicyMatcher[str]:
    """Return a matcher in which each pattern's value is its text."""
    return PolicyMatcher((Pattern.parse(text), text) for text in patterns)


# -- compared with brute force


def expression(text: str) -> re.Pattern[str]:
    """Return a pattern as a regular expression."""
    if text == "*":
        return re.compile(".*", re.DOTALL)
    if not re.search(r"[*{]", text):
        return re.compile(re.escape(text))
    method, path = text.split(":", 1)
    start = "[^:/]+" if method == "*" else re.escape(method)
    if path == "*":
        return re.compile(f"{start}:.*", re.DOTALL)
    parts = [".*" if part == "*" else "[^/]+" if "{" in part else re.escape(part) for part in path.split("/")]
    return re.compile(f"{start}:{'/'.join(parts)}", re.DOTALL)


def rank(text: str) -> tuple[list[int], bool]:
    """Return a sort key: the smallest is the most specific of the patterns that match a resource."""
    method, _, path = text.partition(":")
    if text == "*":
        return [4], True
    if path == "*":
        return [3], False
    return [2 if part == "*" else 1 if "{" in part else 0 for part in path.split("/")], method == "*"


def by_brute_force(patterns: Sequence[str], resource: str) -> str | None:
    return min((text for text in patterns if expression(text).fullmatch(resource)), key=rank, default=None)


METHODS = ("GET", "GET", "POST")
PATHS = st.lists(st.sampled_from(["a", "a", "b", "{x}", "{y}", "{}", ""]), min_size=1, max_size=5).map("/".join)
PATTERNS = st.one_of(
    st.builds("{}:/{}{}".format, st.sampled_from([*METHODS, "*"]), PATHS, st.sampled_from(["", "", "/*"])),
    st.builds("{}:/{}{}".format, st.sampled_from([*METHODS, "*"]), PATHS, st.sampled_from(["", "", "/*"])),
    st.sampled_from(["*", "GET:*", "POST:*", "GET:/*", "*:/*", "login", "GET:a", "a/b:/a", ":/a", "/a", "a"]),
)
RESOURCES = st.one_of(
    st.builds(
        "{}:/{}".format,
        st.sampled_from([*METHODS, "PUT", ""]),
        st.lists(st.sampled_from(["a", "a", "b", "c", "{x}", "{}", "", "*"]), min_size=1, max_size=6).map("/".join),
    ),
    st.sampled_from(["*", "GET:*", "GET:", "GET", "login", "GET:a", "a/b:/a", ":/a", "/a", "a", "", "GET:\n", "*:/a"]),
)


@given(
    st.lists(PATTERNS, max_size=25, unique_by=lambda text: Pattern.parse(text).canonical),
    st.lists(RESOURCES, min_size=1, max_size=25),
)
@example(["GET:/a/{x}", "*:/a/b", "GET:/a/*"], ["GET:/a/b", "GET:/a/c", "GET:/a/b/c", "POST:/a/c"])
def test_the_most_specific_pattern_applies(patterns: list[str], resources: list[str]) -> None:
    policies = table(patterns)
    for resource in resources * 2:  # the second time from the cache
        assert policies.match(resource) == by_brute_force(patterns, resource)


def test_it_is_found_among_all_variants_of_a_long_path() -> None:
    patterns = [f"GET:/{'/'.join(parts)}" for parts in product(["a", "{}"], ["b", "{}"], ["c", "{}"], "de", ["f", "*"])]
    policies = table(patterns)
    for parts in product("ax", "bx", "cx", "dex", ["f", "x", "f/f"]):
        resource = f"GET:/{'/'.join(parts)}"
        assert policies.match(resource) == by_brute_force(patterns, resource)


# -- one by one


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*", ["GET:/orders", "login", ""], []),
        ("POST:*", ["POST:/", "POST:/a/b", "POST:x"], ["GET:/a", "POST", "XPOST:/a", "/POST:/a"]),
        ("GET:/orders", ["GET:/orders"], ["GET:/orders/", "POST:/orders", "GET:/orders/1", "get:/orders"]),
        ("GET:/a/{id}", ["GET:/a/1", "GET:/a/{order_id}"], ["GET:/a", "GET:/a/", "GET:/a/1/x", "POST:/a/1"]),
        ("GET:/files/*", ["GET:/files/a", "GET:/files/a/b", "GET:/files/"], ["GET:/files", "GET:/filesystem/a"]),
        ("GET:/*", ["GET:/", "GET:/a/b"], ["GET:", "GET:a", "POST:/"]),
        ("*:/orders", ["GET:/orders", "POST:/orders"], ["/orders", ":/orders", "GET:/orders/1", "a/b:/orders"]),
        ("*:/orders/{id}", ["GET:/orders/1"], ["GET:/orders"]),
        ("*:/files/*", ["GET:/files/a/b"], ["GET:/files"]),
        ("llm.tokens", ["llm.tokens"], ["llm.tokens.more", "llm", "GET:/llm.tokens"]),
        ("llm:tokens", ["llm:tokens"], ["llm:", "llm:tokens/1"]),
        ("GET:/{a}/{b}", ["GET:/x/y"], ["GET:/x", "GET:/x/", "GET://y"]),
    ],
)
def test_a_pattern_matches_these_and_no_others(pattern: str, matching: list[str], others: list[str]) -> None:
    policies = table([pattern])
    assert [policies.match(resource) for resource in matching] == [pattern] * len(matching)
    assert [policies.match(resource) for resource in others] == [None] * len(others)


def test_the_path_is_compared_before_the_method() -> None:
    order = [
        "GET:/orders/new",
        "*:/orders/new",
        "GET:/orders/{id}",
        "*:/orders/{id}",
        "GET:/orders/*",
        "*:/orders/*",
        "GET:/{a}/new",
        "*:/{a}/new",
        "GET:/*",
        "*:/*",
        "GET:*",
        "*",
    ]
    for at, pattern in enumerate(order):
        assert table(order[at:]).match("GET:/orders/new") == pattern
        assert table(order[at:][::-1]).match("GET:/orders/new") == pattern


def test_a_dead_end_is_left_again() -> None:
    policies = table(["GET:/a/b/c", "GET:/a/{x}/d", "GET:/{x}/b/{y}/e", "GET:/a/*", "POST:/a/b/d"])
    assert policies.match("GET:/a/b/d") == "GET:/a/{x}/d"
    assert policies.match("GET:/a/b/f/e") == "GET:/a/*"
    assert policies.match("GET:/b/b/f/e") == "GET:/{x}/b/{y}/e"


def test_a_path_longer_than_any_pattern_matches_a_trailing_star_only() -> None:
    deep = "GET:/" + "/".join(["{}"] * 32)
    starred = "GET:/" + "/".join(["a"] * 31) + "/*"
    policies = table([deep, starred])
    assert policies.match("GET:/" + "/".join("b" * 32)) == deep
    assert policies.match("GET:/" + "/".join("b" * 33)) is None
    for count in (32, 33, 34, 250):
        assert policies.match("GET:/" + "/".join("a" * count)) == starred


def test_without_policies_nothing_matches() -> None:
    assert table([]).match("GET:/orders") is None


def test_a_value_may_be_anything() -> None:
    policies = PolicyMatcher(
        [(Pattern.parse("*"), 0), (Pattern.parse("login"), None), (Pattern.parse("GET:/{x}"), False)]
    )
    assert [policies.match(resource) for resource in ("x", "login", "GET:/a")] == [0, None, False]


# -- parsing


@pytest.mark.parametrize(
    ("text", "canonical", "template"),
    [
        ("*", "*", False),
        ("POST:*", "POST:*", False),
        ("GET:/orders", "GET:/orders", False),
        ("GET:/orders/{id}", "GET:/orders/{}", True),
        ("GET:/orders/{}", "GET:/orders/{}", True),
        ("GET:/{a}/x/{long name!}", "GET:/{}/x/{}", True),
        ("*:/orders/{id}", "*:/orders/{}", True),
        ("GET:/orders/{id}/*", "GET:/orders/{}/*", False),
        ("*:/files/*", "*:/files/*", False),
        ("GET:/", "GET:/", False),
        ("login", "login", False),
        ("bücher", "bücher", False),
    ],
)
def test_the_canonical_form_has_no_names_of_parameters(text: str, canonical: str, template: bool) -> None:
    pattern = Pattern.parse(text)
    assert (pattern.text, pattern.canonical, pattern.is_template) == (text, canonical, template)
    assert Pattern.parse(canonical).canonical == canonical


def test_patterns_that_differ_in_the_names_of_parameters_are_one() -> None:
    for one, other in (("GET:/orders/{id}", "GET:/orders/{x}"), ("*", "*"), ("login", "login"), ("GET:*", "GET:*")):
        with pytest.raises(InvalidInput) as refused:
            table([one, "GET:/other", other])
        assert refused.value.field == "resource"
        assert one in refused.value.problem
    same = Pattern.parse("*:/a")
    with pytest.raises(InvalidInput):
        PolicyMatcher([(same, 1), (same, 1)])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        (None, "string"),
        (b"login", "string"),
        ("x" * 513, "512 bytes"),
        ("ü" * 257, "512 bytes"),
        ("\udc80", "Unicode"),
        ("GET:/" + "/".join("a" * 33), "32 segments"),
        ("GET:/{id", "balanced"),
        ("GET:/id}", "balanced"),
        ("GET:/{a/b}", "balanced"),
        ("GET:/{{a}", "balanced"),
        ("log{in", "balanced"),
        ("GET:/{a}.json", "whole segment"),
        ("GET:/}a{", "whole segment"),
        ("GET:/{a}{b}", "whole segment"),
        ("{login}", "whole segment"),
        ("/orders/{id}", "whole segment"),
        (":/{id}", "whole segment"),
        ("{method}:/orders", "whole segment"),
        ("GET:{id}", "whole segment"),
        ("GET:/a/*/b", "star"),
        ("GET:/a*", "star"),
        ("GET:/{*}", "star"),
        ("GET:/**", "star"),
        ("G*:/a", "star"),
        ("log*", "star"),
        ("**", "star"),
        ("*:*", "star"),
        (":*", "star"),
        ("a/b:*", "star"),
        ("/files/*", "star"),
    ],
)
def test_an_invalid_pattern_is_refused_with_the_reason(text: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as refused:
        Pattern.parse(text)
    assert refused.value.field == "resource"


def test_32_segments_and_512_bytes_are_a_pattern() -> None:
    assert Pattern.parse("GET:/" + "/".join(["{x}"] * 32)).is_template
    assert Pattern.parse("x" * 512).canonical == "x" * 512


# -- many


def test_10_000_policies_are_distinguished() -> None:
    kinds = ("GET:/s{}/items", "POST:/s{}/items/{{id}}", "*:/s{}/files/*", "GET:/users/{{id}}/s{}")
    policies = table([kind.format(number) for number in range(2_500) for kind in kinds])
    for number in Random(1).sample(range(2_500), 500):
        expected = {
            f"GET:/s{number}/items": kinds[0],
            f"POST:/s{number}/items/7": kinds[1],
            f"PUT:/s{number}/files/a/b": kinds[2],
            f"GET:/users/42/s{number}": kinds[3],
            f"GET:/s{number}/items/7": None,
            f"GET:/users/42/s{number}/more": None,
        }
        for resource, kind in expected.items():
            assert policies.match(resource) == (kind and kind.format(number))


def test_policies_that_overlap_at_every_level_are_refused_before_a_search_takes_long() -> None:
    def overlapping(levels: int) -> list[str]:
        return [f"GET:/{'/'.join(parts)}/end" for parts in product(["a", "{}"], repeat=levels)]

    assert table(overlapping(8)).match("GET:/a/x/a/a/x/a/a/a/end") == "GET:/a/{}/a/a/{}/a/a/a/end"
    with pytest.raises(InvalidInput, match="overlap") as refused:
        table(overlapping(9))
    assert refused.value.field == "resource"


def test_it_remembers_a_bounded_number_of_answers() -> None:
    policies = table(["GET:/orders/{id}", "login"])
    for number in range(3 * MATCH_CACHE_SIZE):
        assert policies.match(f"GET:/orders/{number}") == "GET:/orders/{id}"
        assert policies.match(f"unknown{number}") is None
    assert 0 < len(policies._cache) <= MATCH_CACHE_SIZE


def test_threads_may_share_a_table() -> None:
    policies = table(["GET:/orders/{id}", "GET:/users/*", "login"])

    def hammer(seed: int) -> bool:
        random = Random(seed)
        return all(
            policies.match(f"GET:/orders/{number}") == "GET:/orders/{id}"
            and policies.match(f"GET:/users/{number}/x") == "GET:/users/*"
            and policies.match(f"PUT:/orders/{number}") is None
            for number in (random.randrange(3_000) for _ in range(3_000))
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(hammer, range(8)))
    assert len(policies._cache) <= MATCH_CACHE_SIZE + 4


def test_a_resource_that_is_too_long_to_be_a_key_is_matched_and_not_remembered() -> None:
    policies = PolicyMatcher([(Pattern.parse("GET:/x/{id}"), "x")])
    assert policies.match("GET:/x/" + "1" * 60_000) == "x"
    assert policies._cache == {}
