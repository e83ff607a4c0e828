"""Invalid bodies are charged to the key that sent them, and to no other."""

import pytest

from limitforge.core.clock import ManualClock
from limitforge.errors import InvalidInput, UnknownKey
from limitforge.service.checks import invalid_bodies
from limitforge.service.checks.body_sizes import SMALL_BODY_BYTES
from limitforge.service.checks.invalid_bodies import BURST_BYTES, BYTES_PER_SECOND, MAX_KEYS, InvalidBodyBudget
from limitforge.service.problems import HttpError

MALFORMED = HttpError(400, "malformed_json", "it is not JSON")
LARGE = 1_048_576


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def budget(clock: ManualClock) -> InvalidBodyBudget:
    return InvalidBodyBudget(clock)


def spend(budget: InvalidBodyBudget, key_id: str = "key_a") -> None:
    budget.charge(key_id, BURST_BYTES)


def test_a_key_that_has_spent_its_budget_is_refused_until_retry_after(
    budget: InvalidBodyBudget, clock: ManualClock
) -> None:
    spend(budget)
    budget.charge("key_a", 3 * BYTES_PER_SECOND - 1)
    with pytest.raises(HttpError) as refused:
        budget.require_budget("key_a")
    assert (refused.value.status, refused.value.code) == (429, "too_many_refusals")
    assert refused.value.headers == {"retry-after": "3"}
    clock.advance_us(2_000_000)
    with pytest.raises(HttpError):
        budget.require_budget("key_a")
    clock.advance_us(1_000_000)
    budget.require_budget("key_a")


def test_another_key_is_not_charged(budget: InvalidBodyBudget) -> None:
    spend(budget)
    budget.require_budget("key_b")


def test_an_occasional_error_has_no_effect(budget: InvalidBodyBudget, clock: ManualClock) -> None:
    for _ in range(1_000):
        budget.charge("key_a", LARGE)
        clock.advance_us(2_000_000)
        budget.require_budget("key_a")


def test_a_long_pause_gives_no_more_than_the_burst(budget: InvalidBodyBudget, clock: ManualClock) -> None:
    budget.charge("key_a", 1)
    clock.advance_us(3_600_000_000)
    budget.charge("key_a", BURST_BYTES)
    with pytest.raises(HttpError):
        budget.require_budget("key_a")


@pytest.mark.parametrize(
    ("error", "size", "is_charged"),
    [
        (MALFORMED, LARGE, True),
        (HttpError(413, "body_too_large", "too large"), LARGE, True),
        (InvalidInput("cost", "is wrong"), LARGE, True),
        (MALFORMED, SMALL_BODY_BYTES, False),
        (UnknownKey("who is it"), LARGE, False),
        (HttpError(429, "too_many_refusals", "refused unread"), LARGE, False),
    ],
)
def test_only_large_bodies_that_are_invalid_are_charged(
    budget: InvalidBodyBudget, error: Exception, size: int, *, is_charged: bool
) -> None:
    for _ in range(BURST_BYTES // SMALL_BODY_BYTES):
        budget.charge_error(error, "key_a", size)
    if is_charged:
        with pytest.raises(HttpError):
            budget.require_budget("key_a")
    else:
        budget.require_budget("key_a")


def test_only_so_many_keys_are_remembered_and_the_last_charged_stay(
    budget: InvalidBodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_KEYS <= 10_000
    monkeypatch.setattr(invalid_bodies, "MAX_KEYS", 3)
    spend(budget, "key_a")
    for name in ("key_b", "key_c"):
        spend(budget, name)
    budget.charge("key_a", 1)
    spend(budget, "key_d")
    for name in ("key_a", "key_c", "key_d"):
        with pytest.raises(HttpError):
            budget.require_budget(name)
    budget.require_budget("key_b")
