"""The client's address behind trusted proxies."""

import pytest

from limitforge.errors import InvalidInput
from limitforge.service.http.trusted_proxies import TrustedProxies

INSIDE = TrustedProxies.parse("10.0.0.0/8, 127.0.0.1, fd00::/8")


def forwarded(*values: str, name: str = "x-forwarded-for") -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for value in values]


def test_without_listed_proxies_no_field_is_trusted() -> None:
    assert TrustedProxies().client_address("10.0.0.1", forwarded("203.0.113.7")) == "10.0.0.1"


def test_an_unlisted_peer_is_not_trusted() -> None:
    assert INSIDE.client_address("198.51.100.9", forwarded("203.0.113.7")) == "198.51.100.9"


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ((), "10.0.0.1"),
        (("203.0.113.7",), "203.0.113.7"),
        (("1.2.3.4, 203.0.113.7",), "203.0.113.7"),  # the leftmost address was made up by the client
        (("203.0.113.7, 10.9.9.9",), "203.0.113.7"),
        (("203.0.113.7", "10.9.9.9"), "203.0.113.7"),  # two fields are one list
        (("10.2.2.2, 10.3.3.3",), "10.2.2.2"),
        (("203.0.113.7:4711",), "203.0.113.7"),
        (("[2001:db8::1]:4711",), "2001:db8::1"),
        (("2001:DB8::1",), "2001:db8::1"),
        (("::ffff:203.0.113.7",), "203.0.113.7"),
        (("203.0.113.7, unknown",), "10.0.0.1"),
        (("203.0.113.7, nonsense, 10.5.5.5",), "10.5.5.5"),
        (("203.0.113.7,",), "10.0.0.1"),
        (("\xff",), "10.0.0.1"),
        ((", ".join(["1.1.1.1"] * 10_000 + ["10.0.0.9"] * 100),), "10.0.0.9"),
    ],
)
def test_the_list_is_read_from_the_right_up_to_the_first_that_is_not_listed(
    values: tuple[str, ...], source: str
) -> None:
    assert INSIDE.client_address("10.0.0.1", forwarded(*values)) == source


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ("for=203.0.113.7", "203.0.113.7"),
        ('For="203.0.113.7:4711";proto=https;by=10.0.0.1', "203.0.113.7"),
        ('proto=http;for="[2001:db8::1]:4711"', "2001:db8::1"),
        ("for=1.2.3.4, for=203.0.113.7, for=10.0.0.3", "203.0.113.7"),
        ("for=_hidden", "10.0.0.1"),
        ("for=unknown", "10.0.0.1"),
        ("by=203.0.113.7", "10.0.0.1"),
    ],
)
def test_forwarded_is_read_the_same_way(value: str, source: str) -> None:
    assert INSIDE.client_address("10.0.0.1", forwarded(value, name="forwarded")) == source


def test_two_fields_that_disagree_are_both_ignored() -> None:
    mine, theirs = forwarded("203.0.113.7"), forwarded("for=9.9.9.9", name="forwarded")
    assert INSIDE.client_address("10.0.0.1", [*theirs, *mine]) == "10.0.0.1"
    assert INSIDE.client_address("10.0.0.1", [*forwarded("for=203.0.113.7", name="forwarded"), *mine]) == "203.0.113.7"


@pytest.mark.parametrize("text", ["here", "10.0.0.0/33", "10.0.0.1/8", "10.0.0.0/8;::1"])
def test_an_invalid_network_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInput, match="addresses or networks") as refused:
        TrustedProxies.parse(text)
    assert refused.value.field == "trusted_proxies"
