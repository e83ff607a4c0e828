"""Leases of slots, reservations and overrides."""

import dataclasses
from itertools import product

import pytest

from limitforge import (
    Concurrency,
    FixedWindow,
    InvalidInput,
    LeakyBucket,
    Limits,
    ManualClock,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    SyncLimiter,
    TokenBucket,
    UnknownReservation,
)
from tests.contract.conftest import FEW, on_few_stores

SLOTS = Concurrency(name="slots", max_concurrent=2, lease_ttl_seconds=30)
TOKENS = FixedWindow(name="tokens", limit=100, window_seconds=60)
SECOND = 1_000_000

METERED = [
    TokenBucket(name="m", bucket_capacity=100, refill_rate_per_sec="0.001"),
    LeakyBucket(name="m", bucket_capacity=100, leak_rate_per_sec="0.001"),
    FixedWindow(name="m", limit=100, window_seconds=86_400),
    FixedWindow(name="m", limit=100, window_seconds=86_400, align="first_hit"),
    FixedWindow(name="m", limit=100, window_seconds=86_400, spread=True),
    SlidingWindow(name="m", limit=100, window_seconds=86_400),
    SlidingWindowCounter(name="m", limit=100, window_seconds=86_400),
    Quota(name="m", limit=100, period="month"),
]
each_metered = pytest.mark.parametrize(
    ("limiter", "limit"),
    list(product(FEW, METERED)),
    indirect=["limiter"],
    ids=lambda given: given if isinstance(given, str) else f"{given.algorithm}-{given.name}",
)


def left(limiter: SyncLimiter, limits: object) -> int | None:
    return limiter.check("r", "s", limits=limits, cost=0).remaining  # type: ignore[arg-type]


# -- leases


def test_a_lease_has_no_slot_of_a_monitored_limit_that_had_no_room(limiter: SyncLimiter) -> None:
    watched = Concurrency(name="watched", max_concurrent=1, lease_ttl_seconds=30, mode="monitor")
    limiter.check("r", "s", limits=[SLOTS, watched])
    decision = limiter.check("r", "s", limits=[SLOTS, watched])
    assert decision.would_deny == ("watched",)
    assert limiter.renew(decision.lease_id or "")  # all that it holds is live


def test_a_crashed_holders_slot_comes_back_by_itself(limiter: SyncLimiter, clock: ManualClock) -> None:
    assert limiter.check("r", "s", limits=SLOTS, cost=2).allowed
    denied = limiter.check("r", "s", limits=SLOTS)
    assert denied.retry_after_ms == 30_000
    clock.advance_us(30 * SECOND - 1)
    assert not limiter.check("r", "s", limits=SLOTS).allowed
    clock.advance_us(1)
    assert limiter.check("r", "s", limits=SLOTS).allowed


def test_a_renewed_lease_starts_its_ttl_again(limiter: SyncLimiter, clock: ManualClock) -> None:
    lease = limiter.check("r", "s", limits=SLOTS, cost=2).lease_id or ""
    clock.advance_us(20 * SECOND)
    assert limiter.renew(lease)
    clock.advance_us(20 * SECOND)
    assert not limiter.check("r", "s", limits=SLOTS).allowed
    clock.advance_us(10 * SECOND)
    assert not limiter.renew(lease)


def test_releasing_is_idempotent_and_frees_no_other_slot(limiter: SyncLimiter, clock: ManualClock) -> None:
    first = limiter.check("r", "s", limits=SLOTS).lease_id or ""
    limiter.check("r", "s", limits=SLOTS)
    limiter.release(first)
    limiter.release(first)
    assert left(limiter, SLOTS) == 1
    assert not limiter.renew(first)
    clock.advance_us(31 * SECOND)
    limiter.check("r", "s", limits=SLOTS)
    limiter.release(first)
    assert left(limiter, SLOTS) == 1


def test_one_lease_covers_all_slots_of_its_check(limiter: SyncLimiter) -> None:
    wide = Concurrency(name="wide", max_concurrent=5, lease_ttl_seconds=30, scope="tenant")
    lease = limiter.check("r", "s", limits=Limits(SLOTS, wide), cost=2).lease_id or ""
    limiter.check("r", "other", limits=wide)
    limiter.release(lease)
    look = limiter.check("r", "s", limits=Limits(SLOTS, wide), cost=0)
    assert {name: state.remaining for name, state in look.limits.items()} == {"slots": 2, "wide": 4}
    assert look.lease_id is None


def test_renewing_extends_what_is_live_and_tells_that_not_all_was(limiter: SyncLimiter, clock: ManualClock) -> None:
    brief = Concurrency(name="brief", max_concurrent=5, lease_ttl_seconds=10)
    lease = limiter.check("r", "s", limits=Limits(SLOTS, brief)).lease_id or ""
    clock.advance_us(15 * SECOND)
    assert not limiter.renew(lease)
    clock.advance_us(20 * SECOND)
    assert left(limiter, SLOTS) == 1


def test_leases_keep_the_end_that_they_were_taken_with(limiter: SyncLimiter, clock: ManualClock) -> None:
    limiter.check("r", "s", limits=SLOTS)
    shorter = dataclasses.replace(SLOTS, lease_ttl_seconds=1, max_concurrent=1)
    clock.advance_us(10 * SECOND)
    assert limiter.check("r", "s", limits=shorter).retry_after_ms == 20_000


def test_an_id_that_is_not_a_lease_is_refused(limiter: SyncLimiter) -> None:
    for lease_id in ("", "nonsense", "AAAA", "!!!", "x" * 100_000):
        refused = None
        try:
            limiter.release(lease_id)
        except InvalidInput as error:
            refused = error
        assert refused is not None, lease_id[:10]
        assert "lease_id" in str(refused), lease_id[:10]


# -- reserve and settle


@each_metered
def test_settling_less_gives_back_and_more_takes(limiter: SyncLimiter, limit: FixedWindow) -> None:
    less = limiter.reserve("r", "s", limits=limit, cost=30).reservation_id or ""
    more = limiter.reserve("r", "s", limits=limit, cost=30).reservation_id or ""
    assert left(limiter, limit) == 40
    assert limiter.settle(less, 10).outcome == "settled"
    assert left(limiter, limit) == 60
    limiter.settle(more, 50)
    assert left(limiter, limit) == 40


@each_metered
def test_settling_is_idempotent(limiter: SyncLimiter, limit: FixedWindow, clock: ManualClock) -> None:
    reservation = limiter.reserve("r", "s", limits=limit, cost=30).reservation_id or ""
    first = limiter.settle(reservation, 20)
    clock.advance_us(3_600 * SECOND)
    assert limiter.settle(reservation, 99) == first
    assert first.cost == 20
    assert (left(limiter, limit) or 0) >= 80


@each_metered
def test_more_is_taken_without_asking_for_room_up_to_twice_the_limit(limiter: SyncLimiter, limit: FixedWindow) -> None:
    reservation = limiter.reserve("r", "s", limits=limit, cost=1).reservation_id or ""
    limiter.settle(reservation, 10**9)
    assert left(limiter, limit) == 0
    denied = limiter.check("r", "s", limits=limit)
    assert not denied.allowed
    assert denied.retry_after_ms


@each_metered
@pytest.mark.parametrize(("on_lapse", "remaining"), [("keep", 70), ("refund", 100)])
def test_an_unsettled_one_lapses(
    limiter: SyncLimiter, clock: ManualClock, limit: FixedWindow, on_lapse: str, remaining: int
) -> None:
    reservation = limiter.reserve("r", "s", limits=limit, cost=30, ttl_seconds=10, on_lapse=on_lapse).reservation_id
    clock.advance_us(10 * SECOND - 1)
    assert left(limiter, limit) == 70
    clock.advance_us(1)
    assert left(limiter, limit) == remaining
    assert limiter.settle(reservation or "", 5).outcome == "lapsed"
    assert left(limiter, limit) == remaining
    assert limiter.check("r", "s", limits=limit, cost=remaining).allowed


def test_what_is_given_back_after_its_window_ended_is_dropped(limiter: SyncLimiter, clock: ManualClock) -> None:
    reservation = limiter.reserve("r", "s", limits=TOKENS, cost=100, ttl_seconds=300).reservation_id or ""
    clock.advance_us(60 * SECOND)
    limiter.check("r", "s", limits=TOKENS, cost=40)
    limiter.settle(reservation, 10)
    assert left(limiter, TOKENS) == 60


def test_more_is_taken_in_the_window_of_the_settlement(limiter: SyncLimiter, clock: ManualClock) -> None:
    month = Quota(name="month", limit=100, period="month", time_zone="America/New_York")
    plan = Limits(TOKENS, month)
    reservation = limiter.reserve("r", "s", limits=plan, cost=10, ttl_seconds=100 * 86_400).reservation_id or ""
    clock.advance_us(70 * 86_400 * SECOND)
    limiter.settle(reservation, 25)
    look = limiter.check("r", "s", limits=plan, cost=0)
    assert {name: state.remaining for name, state in look.limits.items()} == {"tokens": 85, "month": 85}


def test_a_settlement_acts_on_the_plan_that_is_in_force(limiter: SyncLimiter) -> None:
    small = TokenBucket(name="b", bucket_capacity=10, refill_rate_per_sec="0.001")
    reservation = limiter.reserve("r", "s", limits=small, cost=10).reservation_id or ""
    large = TokenBucket(name="b", bucket_capacity=1_000, refill_rate_per_sec=1_000)
    clockless = limiter.check("r", "s", limits=large, cost=0)
    assert clockless.remaining == 0
    limiter.settle(reservation, 4)
    assert left(limiter, large) == 6


def test_requests_settle_as_one_and_costs_by_name(limiter: SyncLimiter) -> None:
    plan = Limits(FixedWindow(name="requests", limit=10, window_seconds=60, counts="requests"), TOKENS)
    reservation = limiter.reserve("r", "s", limits=plan, cost=50).reservation_id or ""
    limiter.settle(reservation, 20, costs={"tokens": 70})
    look = limiter.check("r", "s", limits=plan, cost=0)
    assert {name: state.remaining for name, state in look.limits.items()} == {"requests": 9, "tokens": 30}


def test_a_denied_reservation_holds_nothing(limiter: SyncLimiter) -> None:
    denied = limiter.reserve("r", "s", limits=TOKENS, cost=101)
    assert (denied.allowed, denied.reservation_id) == (False, None)
    assert left(limiter, TOKENS) == 100


def test_slots_are_untouched_by_a_settlement(limiter: SyncLimiter) -> None:
    decision = limiter.reserve("r", "s", limits=Limits(SLOTS, TOKENS), cost=2)
    limiter.settle(decision.reservation_id or "", 0)
    look = limiter.check("r", "s", limits=Limits(SLOTS, TOKENS), cost=0)
    assert {name: state.remaining for name, state in look.limits.items()} == {"slots": 0, "tokens": 100}
    limiter.release(decision.lease_id or "")
    assert left(limiter, SLOTS) == 2


def test_a_result_is_remembered_for_a_day(limiter: SyncLimiter, clock: ManualClock) -> None:
    reserved = limiter.reserve("r", "s", limits=TOKENS, cost=10, ttl_seconds=60).reservation_id or ""
    settlement = limiter.settle(reserved, 5)
    clock.advance_us(86_400 * SECOND - 1)
    assert limiter.settle(reserved, 7) == settlement
    clock.advance_us(1)
    with pytest.raises(UnknownReservation):
        limiter.settle(reserved, 7)


@pytest.mark.parametrize("first_lapses", [30, 90])
def test_reservations_lapse_in_time_in_any_order(limiter: SyncLimiter, clock: ManualClock, first_lapses: int) -> None:
    limit = FixedWindow(name="hour", limit=10, window_seconds=3_600)
    for ttl, cost in ((first_lapses, 1), (60, 2)):
        limiter.reserve("r", "s", limits=limit, cost=cost, ttl_seconds=ttl, on_lapse="refund")
    freed = []
    for pause in (29, 1, 29, 1, 29, 1):
        clock.advance_us(pause * SECOND)
        freed.append(left(limiter, limit))
    assert freed == ([7, 8, 8, 10, 10, 10] if first_lapses == 30 else [7, 7, 7, 9, 9, 10])


def test_a_forgotten_reservation_is_unknown(limiter: SyncLimiter, clock: ManualClock) -> None:
    reservation = limiter.reserve("r", "s", limits=TOKENS, cost=1, ttl_seconds=10).reservation_id or ""
    clock.advance_us((10 + 86_400) * SECOND)
    with pytest.raises(UnknownReservation):
        limiter.settle(reservation, 1)


@each_metered
def test_a_reservation_after_the_clock_stepped_back_lasts_its_ttl(
    limiter: SyncLimiter, clock: ManualClock, limit: FixedWindow
) -> None:
    limiter.check("r", "s", limits=limit)
    clock.advance_us(-120 * SECOND)
    held = limiter.reserve("r", "s", limits=limit, cost=30, ttl_seconds=60, on_lapse="refund").reservation_id or ""
    assert left(limiter, limit) == 69
    assert limiter.settle(held, 10).outcome == "settled"
    assert left(limiter, limit) == 89


def test_an_id_of_the_largest_check_can_be_used(limiter: SyncLimiter) -> None:
    plan = [
        Concurrency(name=f"{number:02}-{'n' * 60}", max_concurrent=5, lease_ttl_seconds=60) for number in range(16)
    ] + [FixedWindow(name=f"{number:02}-{'n' * 60}", limit=5, window_seconds=60) for number in range(16, 32)]
    tenant, resource, subject = "{" * 512, "r" * 512, b"\xff" * 512
    decision = limiter.reserve(resource, subject, limits=plan, cost=2, tenant=tenant)
    limiter.settle(decision.reservation_id or "", 1)
    limiter.release(decision.lease_id or "")
    look = limiter.check(resource, subject, limits=plan, cost=0, tenant=tenant)
    assert [state.remaining for state in look.limits.values()] == [5] * 16 + [4] * 16


# -- overrides


def test_raising_an_override_lets_a_denied_caller_in_at_once(limiter: SyncLimiter, clock: ManualClock) -> None:
    assert limiter.check("r", "s", limits=TOKENS, cost=100).allowed
    assert not limiter.check("r", "s", limits=TOKENS).allowed
    limiter.set_override("r", "s", {"tokens": {"limit": 150}}, limits=TOKENS, ttl_seconds=20)
    decision = limiter.check("r", "s", limits=TOKENS)
    assert (decision.allowed, decision.limit, decision.remaining) == (True, 150, 49)
    clock.advance_us(20 * SECOND)
    assert not limiter.check("r", "s", limits=TOKENS).allowed


@pytest.mark.parametrize(("word", "limit"), [("unlimited", None), ("blocked", 0)])
def test_an_override_can_lift_or_block(limiter: SyncLimiter, word: str, limit: int | None) -> None:
    for each in METERED:
        limiter.set_override("*", "s", {"m": word}, limits=each, ttl_seconds=20)
        decision = limiter.check("r", "s", limits=each)
        assert (decision.allowed, decision.limits["m"].limit) == (word == "unlimited", limit)


def test_an_exact_override_wins_over_any_resource(limiter: SyncLimiter) -> None:
    limiter.set_override("*", "s", {"tokens": {"limit": 7}}, limits=TOKENS, ttl_seconds=20)
    limiter.set_override("r", "s", {"tokens": {"limit": 9}}, limits=TOKENS, ttl_seconds=20)
    assert limiter.check("r", "s", limits=TOKENS).limit == 9
    assert limiter.check("r2", "s", limits=TOKENS).limit == 7
    assert limiter.check("r", "s2", limits=TOKENS).limit == 100
    assert limiter.check("r", "s", limits=TOKENS, tenant="other").limit == 100


def test_an_override_is_ignored_once_the_algorithm_changed(limiter: SyncLimiter) -> None:
    limiter.set_override("r", "s", {"tokens": {"limit": 7}}, limits=TOKENS, ttl_seconds=20)
    log = SlidingWindow(name="tokens", limit=50, window_seconds=60)
    assert limiter.check("r", "s", limits=log).limit == 50


def test_an_override_changes_window_rate_and_expiry(limiter: SyncLimiter, clock: ManualClock) -> None:
    bucket = TokenBucket(name="b", bucket_capacity=10, refill_rate_per_sec=1)
    limiter.set_override("r", "s", {"b": {"refill_rate_per_sec": 100}}, limits=bucket, ttl_seconds=20)
    assert limiter.check("r", "s", limits=bucket, cost=10).reset_after_ms == 100
    limiter.set_override("r", "s", {"tokens": {"window_seconds": 5}}, limits=TOKENS, ttl_seconds=20)
    assert limiter.check("r", "s", limits=TOKENS).reset_after_ms == 5_000
    limiter.set_override("r", "s", {"slots": {"lease_ttl_seconds": 7, "limit": 3}}, limits=SLOTS, ttl_seconds=20)
    decision = limiter.check("r", "s", limits=SLOTS)
    assert (decision.limit, decision.reset_after_ms) == (3, 7_000)


def test_overrides_are_listed_by_pages_and_cleared_by_tenant(limiter: SyncLimiter, clock: ManualClock) -> None:
    for number in range(25):
        for resource in ("r", "*"):
            limiter.set_override(resource, f"s{number:02}", {"tokens": "blocked"}, limits=TOKENS, ttl_seconds=60)
    limiter.set_override("r", "brief", {"tokens": "blocked"}, limits=TOKENS, ttl_seconds=1)
    limiter.set_override("r", "s", {"tokens": "blocked"}, limits=TOKENS, ttl_seconds=60, tenant="other")
    clock.advance_us(SECOND)
    found, cursor = [], None
    while True:
        page = limiter.list_overrides(cursor=cursor, page=10)
        found += page.overrides
        cursor = page.cursor
        if cursor is None:
            break
    assert [(o.subject, o.resource) for o in found] == [(f"s{n:02}", r) for n in range(25) for r in ("*", "r")]
    assert found[0].limits == {"tokens": "blocked"}
    assert limiter.clear_overrides() == 25
    assert limiter.list_overrides().overrides == []
    assert len(limiter.list_overrides(tenant="other").overrides) == 1


@on_few_stores
def test_missing_overrides_are_reported_by_position(limiter: SyncLimiter, clock: ManualClock) -> None:
    for number in range(300):
        limiter.set_override("r", f"s{number}", {"tokens": "blocked"}, limits=TOKENS, ttl_seconds=60)
    limiter.set_override("*", "brief", {"tokens": "blocked"}, limits=TOKENS, ttl_seconds=1)
    limiter.set_override("r", "s", {"tokens": "blocked"}, limits=TOKENS, ttl_seconds=60, tenant="other")
    places = [("default", "r", f"s{number}") for number in range(300)]
    others = [("default", "*", "s1"), ("default", "*", "brief"), ("other", "r", "s"), ("other", "r", "s1")]
    assert limiter.missing_overrides([*places, *others]) == [300, 303]
    clock.advance_us(SECOND)
    limiter.delete_override("r", "s7")
    assert limiter.missing_overrides([*places, *others]) == [7, 300, 301, 303]
    assert limiter.missing_overrides([]) == []


def test_one_override_is_got_and_deleted(limiter: SyncLimiter, clock: ManualClock) -> None:
    limiter.set_override("r", "s", {"tokens": {"limit": 9}}, limits=TOKENS, ttl_seconds=60)
    override = limiter.get_override("r", "s")
    assert override is not None
    assert override.expires_at == clock.now_us() / 1e6 + 60
    assert limiter.get_override("*", "s") is None
    assert limiter.delete_override("r", "s")
    assert not limiter.delete_override("r", "s")
    assert limiter.check("r", "s", limits=TOKENS).limit == 100


def test_a_subject_may_have_a_bounded_number_of_overrides(limiter: SyncLimiter) -> None:
    for number in range(64):
        limiter.set_override(f"r{number}", "s", {"tokens": "blocked"}, limits=TOKENS, ttl_seconds=60)
    with pytest.raises(InvalidInput, match="at most 64 overrides"):
        limiter.set_override("one more", "s", {"tokens": "blocked"}, limits=TOKENS, ttl_seconds=60)
    limiter.set_override("r0", "s", {"tokens": "unlimited"}, limits=TOKENS, ttl_seconds=60)
