"""Lease and reservation ids as clients receive them."""

import pytest

from limitforge.catalog.credentials import Peppers
from limitforge.errors import NotFound
from limitforge.service.checks.sealed_ids import MAX_SEALED_CHARS, IdSealer

PEPPERS = "1:a pepper that the tests alone know"


@pytest.fixture
def tickets() -> IdSealer:
    return IdSealer(Peppers.parse(PEPPERS))


def seal(tickets: IdSealer, ticket: str = "an id") -> str:
    sealed = tickets.seal("acme", ticket)
    assert sealed is not None
    return sealed


@pytest.mark.parametrize("ticket", ["a", "ab", "abc", "user:42 " * 100])
def test_a_sealed_id_opens_for_its_tenant_and_for_no_other(tickets: IdSealer, ticket: str) -> None:
    sealed = seal(tickets, ticket)
    assert "user:42" not in sealed
    assert tickets.open("acme", sealed, "lease_id") == ticket
    with pytest.raises(NotFound, match="lease_id"):
        tickets.open("globex", sealed, "lease_id")


@pytest.mark.parametrize("more", ["\n", "=", "====", "!", " "])
def test_an_id_has_one_form_only(tickets: IdSealer, more: str) -> None:
    """Python's Base64 decoder ignores such characters."""
    sealed = seal(tickets)
    for form in (sealed + more, more + sealed):
        with pytest.raises(NotFound):
            tickets.open("acme", form, "lease_id")


@pytest.mark.parametrize("sealed", ["", "a", "AAAA", "é", "A" * 2 * MAX_SEALED_CHARS])
def test_an_id_that_was_never_sealed_is_not_found(tickets: IdSealer, sealed: str) -> None:
    with pytest.raises(NotFound):
        tickets.open("acme", sealed, "lease_id")


def test_an_id_of_the_pepper_before_still_opens(tickets: IdSealer) -> None:
    sealed = seal(tickets)
    rotated = IdSealer(Peppers.parse(f"2:another pepper of the tests,{PEPPERS}"))
    assert rotated.open("acme", sealed, "lease_id") == "an id"
    with pytest.raises(NotFound):
        tickets.open("acme", seal(rotated), "lease_id")
