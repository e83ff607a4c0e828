"""A cached head matches exactly the requests that the parser reads alike."""

import pytest

from limitforge.service.checks.request_credentials import Credentials
from limitforge.service.http.head_cache import MAX_CACHED_HEAD_BYTES, CachedHead

KEY = "lf_live_one"
WHO = Credentials.from_key(KEY, "192.0.2.1")


def request(body: bytes, *lines: str, key: str = KEY, length: str | None = None) -> bytes:
    fields = lines or ("Host: a", f"X-Api-Key: {key}", "Content-Type: application/json")
    head = "\r\n".join(["POST /v1/check HTTP/1.1", *fields, f"Content-Length: {length or len(body)}", "", ""])
    return head.encode() + body


def known(*lines: str) -> CachedHead:
    head = CachedHead.from_request(request(b"{}", *lines), b"{}", 100, WHO)
    assert head is not None
    return head


def test_the_same_head_is_recognized_with_any_body() -> None:
    head = known()
    for body in (b"{}", b"[]", b"x" * 100, b"x" * 7, b"{}"):
        assert head.match_body(request(body)) == body
        assert head.credentials is WHO


@pytest.mark.parametrize(
    "lines", [(), ("x-api-key: lf_live_one", "host: a"), ("Host: a", "Content-Type: application/json")]
)
def test_the_length_may_come_before_or_behind_the_key(lines: tuple[str, ...]) -> None:
    original = request(b"{}", *lines)
    reordered = original.replace(b"Content-Length: 2\r\n", b"").replace(b"1.1\r\n", b"1.1\r\nContent-Length: 2\r\n")
    head = CachedHead.from_request(reordered, b"{}", 100, WHO)
    assert head is not None
    assert head.match_body(reordered.replace(b": 2\r\n", b": 3\r\n").replace(b"{}", b"{ }")) == b"{ }"
    assert head.match_body(reordered) == b"{}"


def test_another_key_is_another_caller_from_the_same_place() -> None:
    head = known()
    assert head.match_body(request(b"[]", key="lf_test_two")) == b"[]"
    assert head.credentials == Credentials.from_key("lf_test_two", "192.0.2.1")
    assert head.match_body(request(b"{}")) == b"{}"
    assert head.credentials == WHO


@pytest.mark.parametrize("key", ["", "a b", "é", "a\tb", "x" * 129, "a\nb", "a:b", "a\x00"])
def test_a_key_that_is_none_is_left_to_the_parser(key: str) -> None:
    assert known().match_body(request(b"{}", key=key)) is None


@pytest.mark.parametrize("length", ["02", "+2", "2 ", "0x2", "2_0", "1", "3", "20000000", "", "-2", "٢"])
def test_a_length_that_is_none_or_a_wrong_one_is_left_to_the_parser(length: str) -> None:
    assert known().match_body(request(b"{}", length=length or " ")) is None


def test_a_body_that_is_too_long_or_not_there_yet_is_left_to_the_parser() -> None:
    head = known()
    assert head.match_body(request(b"x" * 101)) is None
    assert head.match_body(request(b"x" * 10)[:-1]) is None
    assert head.match_body(request(b"{}") + request(b"{}")) is None
    assert head.match_body(b"") is None
    assert head.match_body(request(b"{}")[:40]) is None


@pytest.mark.parametrize(
    "other",
    [
        ("Host: b", "X-Api-Key: lf_live_one", "Content-Type: application/json"),
        ("Host: a", "X-Api-Key: lf_live_one", "Content-Type: text/html"),
        ("Host: a", "X-Api-Key: lf_live_one", "Content-Type: application/json", "Expect: 100-continue"),
        ("Host: a", "X-Api-Key: lf_live_one", "Transfer-Encoding: chunked", "Content-Type: application/json"),
    ],
)
def test_a_head_that_differs_in_anything_else_is_left_to_the_parser(other: tuple[str, ...]) -> None:
    assert known().match_body(request(b"{}", *other)) is None


def test_a_client_that_sends_two_keys_must_send_both_again() -> None:
    both = ("Host: a", "X-Api-Key: lf_live_one", "Authorization: Bearer lf_live_one")
    head = known(*both)
    assert head.match_body(request(b"[]", *both)) == b"[]"
    assert (
        head.match_body(request(b"[]", "Host: a", "X-Api-Key: lf_live_two", "Authorization: Bearer lf_live_one"))
        is None
    )


def test_a_body_in_chunks_or_a_very_long_head_is_not_remembered() -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert CachedHead.from_request(chunked, b"{}", 100, WHO) is None
    assert (
        CachedHead.from_request(request(b"{}", "Host: a", f"X-A: {'a' * MAX_CACHED_HEAD_BYTES}"), b"{}", 100, WHO)
        is None
    )
