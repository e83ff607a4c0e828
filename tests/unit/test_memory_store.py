"""The memory store: bounded, never evicts leases and reservations, thread-safe."""

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from limitforge import (
    Concurrency,
    Decision,
    FixedWindow,
    Limit,
    ManualClock,
    Request,
    SlidingWindow,
    StoreUnavailable,
    SyncLimiter,
)
from limitforge.stores.memory.store import MemoryStore

DAY_US = 86_400_000_000

SECOND = SlidingWindow(name="second", limit=5, window_seconds=1)
HOUR = SlidingWindow(name="hour", limit=5, window_seconds=3_600)
SLOTS = Concurrency(name="slots", max_concurrent=5, lease_ttl_seconds=3_600)


class SmallStore:
    """A store with room for few keys, with a limiter and a clock."""

    def __init__(self, max_keys: int, seed: int = 1) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock, max_keys=max_keys)
        self.store._states._random = random.Random(seed)
        self.limiter = SyncLimiter(self.store)

    def check(self, limits: Limit | list[Limit], subject: object, **options: Any) -> Decision:
        return self.limiter.check("r", str(subject), limits=limits, **options)

    def used(self, limit: Limit, subject: object) -> int:
        return (limit.size or 0) - (self.check(limit, subject, cost=0).remaining or 0)

    def reserve(self, limit: Limit, subject: object, **options: Any) -> Decision:
        return self.limiter.reserve("r", str(subject), limits=limit, **{"cost": 1, **options})


# -- the bound, and what makes room


def test_no_more_buckets_are_kept_than_fit() -> None:
    small = SmallStore(10)
    for subject in range(100):
        assert small.check(HOUR, subject).allowed
        assert len(small.store) <= 10
    assert len(small.store) == 10
    assert small.store.evictions == 90


def test_a_check_of_several_limits_makes_room_for_all_of_them() -> None:
    small = SmallStore(10)
    limits: list[Limit] = [SECOND, HOUR, FixedWindow(name="fixed", limit=5, window_seconds=60)]
    for subject in range(20):
        decision = small.check(limits, subject)
        assert decision.allowed
        assert len(small.store) <= 10
        assert [small.used(limit, subject) for limit in limits] == [1, 1, 1]


def test_an_expired_bucket_makes_room_first_without_an_eviction() -> None:
    small = SmallStore(100)
    small.check(HOUR, "live")
    for subject in range(99):
        small.check(SECOND, subject)
    small.clock.advance_us(1_000_000)
    for subject in range(30):
        small.check(HOUR, f"new {subject}")
    assert small.store.evictions == 0
    assert small.used(HOUR, "live") == 1


def test_a_bucket_that_was_extended_makes_room_once_it_has_expired() -> None:
    """The store remembers when a bucket expires. Here it was used again, and expires later."""
    small = SmallStore(3)
    for limit, subject in ((SECOND, "first"), (SECOND, "second"), (HOUR, "live")):
        small.check(limit, subject)
    for wait_ms, limit, subject in (
        (2_000, SECOND, "used"),
        (500, SECOND, "brief"),
        (400, SECOND, "used"),
        (300, HOUR, "new"),
    ):
        small.clock.advance_us(1_000 * wait_ms)
        small.check(limit, subject)
    assert (small.store.evictions, small.used(SECOND, "brief")) == (
        1,
        0,
    )  # nothing has expired, and this one expires next
    small.clock.advance_us(800_000)
    small.check(HOUR, "newer")
    assert small.store.evictions == 1
    assert [small.used(HOUR, subject) for subject in ("live", "new", "newer")] == [1, 1, 1]


def test_a_bucket_that_had_expired_when_written_makes_room_once_it_expires_again() -> None:
    small = SmallStore(2)
    small.check(SECOND, "s")
    small.check(HOUR, "other")
    small.clock.advance_us(2_000_000)
    small.check([SECOND, HOUR], "s")  # needs room, but not that of its own bucket
    assert small.store.evictions == 1
    small.clock.advance_us(2_000_000)
    small.check(HOUR, "new")
    assert small.store.evictions == 1
    assert [small.used(HOUR, subject) for subject in ("s", "new")] == [1, 1]


def test_a_reset_bucket_makes_room_without_an_eviction() -> None:
    small = SmallStore(2)
    small.check(SECOND, "brief")
    small.check(HOUR, "reset")
    small.clock.advance_us(2_000_000)
    small.check(HOUR, "live")
    small.limiter.reset("r", "reset", limits=HOUR)
    small.check(HOUR, "new")
    assert small.store.evictions == 0
    assert [small.used(HOUR, subject) for subject in ("live", "new")] == [1, 1]


def test_of_eight_buckets_the_one_that_would_be_over_first_is_evicted() -> None:
    small = SmallStore(400)
    for subject in range(200):
        small.check(HOUR, subject)
        small.check(SECOND, subject)
    for subject in range(100):
        small.check(HOUR, f"new {subject}")
    assert small.store.evictions == 100
    lost = sum(small.used(HOUR, subject) == 0 for subject in range(200))
    assert lost <= 5  # none of the eight is short with a chance of 1 in 256 at first, of 1 in 10 at the end


def test_a_bucket_that_is_written_again_needs_no_room() -> None:
    small = SmallStore(3)
    for _ in range(5):
        for subject in range(3):
            assert small.check(HOUR, subject).allowed
    assert small.store.evictions == 0
    assert not small.check(HOUR, 0).allowed


def test_a_denial_a_peek_and_an_unlimited_limit_need_no_room() -> None:
    small = SmallStore(1)
    small.check(HOUR, "kept")
    unlimited = SlidingWindow(name="free", limit=None, window_seconds=1)
    for subject in range(10):
        small.check(HOUR, subject, cost=0)
        small.check(HOUR, subject, cost=6)
        small.check(unlimited, subject)
    assert small.store.evictions == 0
    assert small.used(HOUR, "kept") == 1


@pytest.mark.parametrize("leases", [1, 2, 6, 7, 8, 9, 20])
@pytest.mark.parametrize("seed", range(5))
def test_the_only_bucket_that_may_go_is_found_wherever_it_is(leases: int, seed: int) -> None:
    for place in range(leases + 1):
        small = SmallStore(leases + 1, seed)
        for subject in range(leases + 1):
            small.check(HOUR if subject == place else SLOTS, subject)
        assert small.check(HOUR, "new").allowed
        assert small.store.evictions == 1


# -- what must stay


def test_leases_are_never_evicted() -> None:
    small = SmallStore(10)
    for subject in range(5):
        assert small.check(SLOTS, f"lease {subject}").lease_id is not None
    for subject in range(100):
        assert small.check(HOUR, subject).allowed
    assert [small.used(SLOTS, f"lease {subject}") for subject in range(5)] == [1] * 5


def test_open_reservations_are_never_evicted() -> None:
    small = SmallStore(10)
    reserved = [small.reserve(HOUR, f"held {n}", cost=4).reservation_id for n in range(5)]
    for subject in range(100):
        assert small.check(HOUR, subject).allowed
    for n, reservation_id in enumerate(reserved):
        assert reservation_id is not None
        assert small.limiter.settle(reservation_id, 1).outcome == "settled"
        assert small.used(HOUR, f"held {n}") == 1


def test_overrides_are_never_evicted() -> None:
    small = SmallStore(10)
    for subject in range(10):
        small.limiter.set_override("*", str(subject), {"hour": {"limit": 50}}, limits=HOUR, ttl_seconds=3_600)
    for subject in range(100):
        assert small.check(HOUR, f"other {subject}").allowed
    assert [small.check(HOUR, subject).limit for subject in range(10)] == [50] * 10


def test_a_released_lease_and_a_settled_reservation_may_go() -> None:
    small = SmallStore(2)
    lease_id = small.check(SLOTS, "a").lease_id
    reservation_id = small.reserve(HOUR, "b").reservation_id
    with pytest.raises(StoreUnavailable):
        small.check(HOUR, "c")
    assert lease_id is not None
    small.limiter.release(lease_id)
    assert small.check(HOUR, "c").allowed
    assert reservation_id is not None
    small.limiter.settle(reservation_id, 1)
    assert small.check(HOUR, "d").allowed


def test_a_reservation_that_has_lapsed_may_go() -> None:
    small = SmallStore(3)
    for subject in range(3):
        small.reserve(HOUR, subject, ttl_seconds=60)
    small.clock.advance_us(60_000_000)
    assert small.check(HOUR, "new").allowed


def test_a_bucket_stays_for_its_last_open_reservation() -> None:
    small = SmallStore(4)
    for subject in ("a", "b"):
        for ttl_seconds in (60, 120):
            small.reserve(HOUR, subject, ttl_seconds=ttl_seconds)
        small.check(Concurrency(name="long", max_concurrent=1, lease_ttl_seconds=3_600), subject)
    small.clock.advance_us(60_000_000)
    with pytest.raises(StoreUnavailable):
        small.check(HOUR, "new")
    small.clock.advance_us(60_000_000)
    assert small.check(HOUR, "new").allowed


def test_a_store_full_of_leases_refuses_and_says_what_to_do() -> None:
    small = SmallStore(3)
    for subject in range(3):
        small.check(SLOTS, subject)
    with pytest.raises(StoreUnavailable, match="max_keys"):
        small.check(HOUR, "new")
    assert small.check(SLOTS, 0).allowed  # existing buckets still work
    small.clock.advance_us(3_600_000_000)
    assert small.check(HOUR, "new").allowed  # the leases have expired


def test_a_refused_check_leaves_nothing_behind() -> None:
    small = SmallStore(3)
    for subject in range(3):
        small.check(SLOTS, subject)
    before = dict(small.store._states)
    with pytest.raises(StoreUnavailable):
        small.check([SLOTS, HOUR], 0)
    with pytest.raises(StoreUnavailable):
        small.reserve(HOUR, "new")
    assert small.store._states == before
    assert small.store._records == {}
    assert small.used(SLOTS, 0) == 1


def test_a_check_makes_no_room_at_the_expense_of_its_own_buckets() -> None:
    small = SmallStore(2)
    small.check(HOUR, "a")
    small.check(SLOTS, "b")
    with pytest.raises(StoreUnavailable):
        small.check([HOUR, SECOND], "a")
    assert len(small.store) == 2
    assert small.used(HOUR, "a") == 1


def test_a_shadow_plan_that_does_not_fit_spoils_no_live_check() -> None:
    small = SmallStore(1)
    assert small.check(SLOTS, "a").allowed
    decision = small.check(SLOTS, "a", shadow=SLOTS)
    assert (decision.allowed, decision.remaining) == (True, 3)
    assert small.used(SLOTS, "a") == 2


def test_in_a_batch_only_the_check_that_does_not_fit_fails() -> None:
    small = SmallStore(1)
    small.check(SLOTS, "a")
    requests = [Request(resource="r", subject=subject, limits=SLOTS) for subject in ("a", "b", "a")]
    first, second, third = small.limiter.check_many(requests)
    assert isinstance(second, StoreUnavailable)
    assert isinstance(first, Decision)
    assert isinstance(third, Decision)
    assert (first.remaining, third.remaining) == (3, 2)


# -- nothing piles up


def test_resets_leave_nothing_behind() -> None:
    small = SmallStore(10)
    for _ in range(1_000):
        small.check(HOUR, "a")
        small.limiter.reset("r", "a", limits=HOUR)
    assert small.used(HOUR, "a") == 0
    assert len(small.store._states._sampling_pool) <= 10


def test_nothing_live_goes_while_anything_is_over() -> None:
    small = SmallStore(100)
    for number in range(50):
        small.check(SECOND, f"brief {number}")
        small.check(HOUR, f"long {number}")
    small.clock.advance_us(2_000_000)
    for number in range(50):
        assert small.check(HOUR, f"new {number}").allowed
    assert small.store.evictions == 0
    assert all(small.used(HOUR, f"long {number}") == 1 for number in range(50))


def test_eviction_copes_with_buckets_that_were_reset() -> None:
    for seed in range(50):
        small = SmallStore(6, seed)
        for subject in range(6):
            small.check(HOUR, subject)
        for subject in (1, 2, 4):
            small.limiter.reset("r", str(subject), limits=HOUR)
        for subject in range(20):
            assert small.check(HOUR, f"new {subject}").allowed
            assert len(small.store) <= 6


def test_records_of_reservations_do_not_pile_up() -> None:
    small = SmallStore(1_000_000)
    for n in range(6_000):
        small.reserve(SECOND, n % 3, ttl_seconds=1)
        small.clock.advance_us(DAY_US // 1_000)
    assert len(small.store._records) < 3_000  # about a thousand are not pruned yet


def test_a_store_takes_reservations_again_once_old_ones_are_forgotten() -> None:
    small = SmallStore(5)
    for n in range(5):
        assert small.reserve(SECOND, n, ttl_seconds=1).allowed
    small.clock.advance_us(2 * DAY_US)
    for n in range(5):
        assert small.reserve(SECOND, n, ttl_seconds=1).allowed


def test_a_store_takes_overrides_again_once_old_ones_have_expired() -> None:
    small = SmallStore(5)
    for n in range(5):
        small.limiter.set_override("*", str(n), {"hour": "unlimited"}, limits=HOUR, ttl_seconds=1)
    small.clock.advance_us(2_000_000)
    for n in range(5, 10):
        small.limiter.set_override("*", str(n), {"hour": "unlimited"}, limits=HOUR, ttl_seconds=1)
    known = [small.limiter.get_override("*", str(n)) for n in range(10)]
    assert [each is not None for each in known] == [False] * 5 + [True] * 5


# -- batches


def test_checks_of_a_batch_see_what_the_earlier_ones_took(limiter: SyncLimiter) -> None:
    requests = [Request(resource="r", subject="s", limits=HOUR, cost=cost) for cost in (2, 4, 3, 1, 0)]
    answers = limiter.check_many(requests)
    assert [isinstance(answer, Decision) and answer.allowed for answer in answers] == [True, False, True, False, True]


# -- threads


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_eager_threads")
@pytest.mark.parametrize(
    "limits",
    [
        "fixed:100/day",
        "sliding:100/day",
        "counter:100/day",
        "token:100/day",
        "leaky:100/day",
        "fixed:500/day; sliding=100/day",
    ],
)
def test_threads_that_hammer_one_limit_get_exactly_what_it_allows(limits: str) -> None:
    limiter = SyncLimiter.connect("memory://", clock=ManualClock())

    def hammer(_: int) -> int:
        return sum(limiter.check("r", "s", limits=limits).allowed for _ in range(50))

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(hammer, range(8))) == 100


@pytest.mark.usefixtures("_eager_threads")
def test_threads_that_take_and_release_never_hold_more_slots_than_there_are() -> None:
    limiter = SyncLimiter.connect("memory://", clock=ManualClock())
    held: list[int] = []
    most = 0

    def hammer(_: int) -> None:
        nonlocal most
        for _ in range(50):
            decision = limiter.check("r", "s", limits=SLOTS)
            if decision.lease_id is not None:
                held.append(1)
                most = max(most, len(held))
                held.pop()
                limiter.release(decision.lease_id)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(hammer, range(8)))
    assert 1 <= most <= 5
    assert limiter.check("r", "s", limits=SLOTS, cost=0).remaining == 5


@pytest.mark.usefixtures("_eager_threads")
def test_threads_share_a_store_that_evicts() -> None:
    small = SmallStore(8)

    def hammer(thread: int) -> None:
        for n in range(100):
            assert small.check(HOUR, f"{thread} {n % 13}", cost=0).allowed
            small.check(HOUR, f"{thread} {n % 13}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(hammer, range(8)))
    assert len(small.store) <= 8
    assert set(small.store._states) <= set(small.store._states._sampling_pool)
    assert len(small.store._states._sampling_pool) <= 2 * 8
