"""Holds: what a part of a check takes in its slot until the limits of other slots are known, to the microsecond."""

from collections.abc import Iterator

import pytest
import redis as redis_py

from limitforge import Concurrency, FixedWindow, LeakyBucket, Limit, Quota, SlidingWindow, TokenBucket
from limitforge.stores.redis.multi_step.cross_slot import TENTATIVE_TTL_US, HoldAction
from tests.contract.script_client import NOW_US, ScriptClient, ending, key_of

MINUTE_US = 60_000_000
DAY_US = 86_400_000_000
WINDOW = FixedWindow(name="window", limit=10, window_seconds=86_400)
OTHER = FixedWindow(name="other", limit=10, window_seconds=86_400)
SLOW = TokenBucket(name="slow", bucket_capacity=10, refill_rate_per_sec="0.001")
SLOTS = Concurrency(name="slots", max_concurrent=10, lease_ttl_seconds=600)
EVERY: list[Limit] = [
    WINDOW,
    SLOW,
    LeakyBucket(name="leaky", bucket_capacity=10, leak_rate_per_sec="0.001"),
    SlidingWindow(name="log", limit=10, window_seconds=3_600),
    Quota(name="quota", limit=10, period="day"),
]
each_limit = pytest.mark.parametrize("limit", EVERY, ids=lambda limit: limit.name)


@pytest.fixture
def script(redis_url: str) -> Iterator[ScriptClient]:
    with redis_py.Redis.from_url(redis_url) as client:
        yield ScriptClient(client)


@each_limit
def test_a_part_of_a_reservation_goes_back_after_five_seconds_unless_it_is_confirmed(
    script: ScriptClient, limit: Limit
) -> None:
    script.hold(limit, cost=3, ttl_us=MINUTE_US, uses_tentative_ttl=True, refund=False)
    script.now_us = NOW_US + 5_000_000 - 1
    assert script.remaining(limit) == 7
    script.now_us += 1
    assert script.remaining(limit) == 10


@pytest.mark.parametrize("refund", [True, False])
def test_a_confirmed_reservation_lapses_counted_from_when_it_was_taken(script: ScriptClient, refund: bool) -> None:
    script.hold(WINDOW, cost=3, ttl_us=MINUTE_US, uses_tentative_ttl=True)
    script.now_us += 1_000_000
    assert script.finish(ending(HoldAction.CONFIRM, WINDOW, ttl_us=MINUTE_US, refunds_on_lapse=refund)) != [None]
    script.now_us = NOW_US + MINUTE_US - 1
    assert script.check(WINDOW, cost=0).rows[0][4] == 1  # the reservation is open
    assert script.remaining(WINDOW) == 7
    script.now_us += 1
    assert script.check(WINDOW, cost=0).rows[0][4] == 0
    assert script.remaining(WINDOW) == (10 if refund else 7)


@each_limit
def test_what_is_confirmed_stays_and_what_is_refunded_goes_back(script: ScriptClient, limit: Limit) -> None:
    script.hold(limit, cost=3)
    script.hold(limit, cost=1, token=b"another.")
    script.now_us += TENTATIVE_TTL_US - 1
    assert script.finish(ending(HoldAction.CONFIRM, limit)) != [None]
    assert script.finish(ending(HoldAction.REFUND, limit)) == [[(-1, 0)]]  # nothing is left to undo
    script.now_us += 1
    assert script.remaining(limit) == 7
    script.hold(limit, cost=2)
    ((source, _),) = script.finish(ending(HoldAction.REFUND, limit))[0]
    assert source >= 0
    assert script.remaining(limit) == 7


def test_a_confirmation_when_the_hold_has_lapsed_changes_nothing(script: ScriptClient) -> None:
    script.hold(WINDOW, cost=3)
    script.now_us += TENTATIVE_TTL_US
    assert script.finish(ending(HoldAction.CONFIRM, WINDOW)) == [None]
    assert script.remaining(WINDOW) == 10


def test_a_part_is_confirmed_for_all_its_limits_or_none_of_them(script: ScriptClient) -> None:
    """One bucket is ahead of the clock, so its hold has lapsed and was refunded."""
    script.hold(WINDOW, OTHER, cost=3)
    script.now_us += TENTATIVE_TTL_US
    script.check(OTHER, cost=1)
    script.now_us = NOW_US + 1
    assert script.finish(ending(HoldAction.CONFIRM, WINDOW, OTHER)) == [None]
    assert script.remaining(WINDOW) == 7
    script.now_us = NOW_US + TENTATIVE_TTL_US
    assert (script.remaining(WINDOW), script.remaining(OTHER)) == (10, 9)


def test_a_monitored_limit_that_holds_nothing_does_not_hinder_the_others(script: ScriptClient) -> None:
    script.hold(WINDOW, OTHER, cost=3)
    script.now_us += TENTATIVE_TTL_US
    script.check(OTHER, cost=1)
    script.now_us = NOW_US + 1
    ((_, other),) = script.finish(ending(HoldAction.CONFIRM, WINDOW, OTHER, may_be_missing=[False, True]))
    assert other == (-1, 0)
    script.now_us = NOW_US + TENTATIVE_TTL_US
    assert script.remaining(WINDOW) == 7


@each_limit
def test_what_was_forgotten_with_its_bucket_is_confirmed(script: ScriptClient, limit: Limit) -> None:
    script.hold(limit, cost=3)
    script.redis.delete(key_of(limit))
    assert script.finish(ending(HoldAction.CONFIRM, limit)) == [[(-1, 0)]]
    script.now_us += TENTATIVE_TTL_US - 1
    assert script.finish(ending(HoldAction.CONFIRM, limit)) == [[(-1, 0)]]
    script.now_us += 1
    assert script.finish(ending(HoldAction.CONFIRM, limit)) == [None]


@pytest.mark.parametrize("limit", [WINDOW, EVERY[-1]], ids=lambda limit: limit.name)
def test_what_was_confirmed_goes_back_to_its_own_count_only(script: ScriptClient, limit: Limit) -> None:
    script.hold(limit, cost=3)
    ((ends, starts),) = script.finish(ending(HoldAction.CONFIRM, limit))[0]
    assert ends == NOW_US + DAY_US
    for elsewhere in ((ends + 1, starts), (ends, starts + 1), (ends - 1, starts), (ends, starts - 1)):
        assert script.finish(ending(HoldAction.UNDO_CONFIRM, limit, amounts=[3], sources=[elsewhere])) == [[(-1, 0)]]
        assert script.remaining(limit) == 7
    script.finish(ending(HoldAction.UNDO_CONFIRM, limit, amounts=[2], sources=[(ends, starts)]))
    assert script.remaining(limit) == 9


def test_a_count_that_began_after_a_reset_is_another_one(script: ScriptClient) -> None:
    script.hold(WINDOW, cost=3)
    ((ends, starts),) = script.finish(ending(HoldAction.CONFIRM, WINDOW))[0]
    script.redis.delete(key_of(WINDOW))
    script.now_us += 1_000
    script.check(WINDOW, cost=5)
    script.finish(ending(HoldAction.UNDO_CONFIRM, WINDOW, amounts=[3], sources=[(ends, starts)]))
    assert script.remaining(WINDOW) == 5


def test_one_call_ends_many_holds_in_order(script: ScriptClient) -> None:
    script.hold(SLOW, WINDOW, cost=3)
    script.hold(SLOW, OTHER, cost=1, token=b"another.")
    (sources,) = script.finish(ending(HoldAction.CONFIRM, SLOW, WINDOW))
    given = ending(HoldAction.UNDO_CONFIRM, SLOW, WINDOW, amounts=[2, 3], sources=sources)
    back = ending(HoldAction.REFUND, SLOW, OTHER)
    back.token = b"another."
    assert script.finish(given, back, ending(HoldAction.CONFIRM, SLOW)) == [[(-1, 0)] * 2, [(0, 0)] * 2, [(-1, 0)]]
    assert [script.remaining(limit) for limit in (SLOW, WINDOW, OTHER)] == [9, 10, 10]


def test_slots_go_back_when_another_slot_had_no_room(script: ScriptClient) -> None:
    script.hold(SLOTS, WINDOW, cost=3)
    script.hold(SLOTS, cost=2, token=b"another.")
    assert script.remaining(SLOTS) == 5
    assert script.finish(ending(HoldAction.REFUND, SLOTS, WINDOW)) == [[(0, 0), (0, 0)]]
    assert (script.remaining(SLOTS), script.remaining(WINDOW)) == (8, 10)
    assert script.finish(ending(HoldAction.REFUND, SLOTS)) == [[(-1, 0)]]
    assert script.remaining(SLOTS) == 8


@pytest.mark.parametrize("poison", [b"\x01\x63\x03", b"\x01\x00\x03", b"\x01", b"", b"\x01\x06\x17" + 30 * b"\xff"])
def test_a_foreign_value_fails_its_own_hold_only(script: ScriptClient, poison: bytes) -> None:
    script.hold(WINDOW, cost=3)
    script.hold(OTHER, cost=2)
    script.redis.set(key_of(OTHER), poison)
    answers = script.finish(ending(HoldAction.REFUND, OTHER), ending(HoldAction.REFUND, WINDOW))
    assert answers == [[(-1, 0)], [(0, 0)]]
    assert script.remaining(WINDOW) == 10
    assert script.redis.get(key_of(OTHER)) == poison
