"""The denial cache answers only checks that certainly have no room."""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import (
    Concurrency,
    Decision,
    FixedWindow,
    LeakyBucket,
    Limit,
    Limits,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    TokenBucket,
)
from limitforge.core.check import Check, build_check
from limitforge.core.keys import Keys
from limitforge.stores.redis import denial_cache as denials_module
from limitforge.stores.redis.denial_cache import Invalidation
from tests.unit.caching_store import HOUR, MINUTE_US, CachingLimiter

SECOND_US = 1_000_000

BUCKET = TokenBucket(name="bucket", bucket_capacity=2, refill_rate_per_sec=1)
THIRDS = TokenBucket(name="thirds", bucket_capacity=1, refill_rate_per_sec=3)
COUNTING = FixedWindow(name="counting", limit=3, window_seconds=60, count_denied=True)
SLOTS = Concurrency(name="slots", max_concurrent=1, lease_ttl_seconds=30)


@pytest.fixture
def process() -> CachingLimiter:
    return CachingLimiter()


def of(limits: Limit, subject: str = "u", cost: int = 1) -> Check:
    return build_check(Keys(), limits, "r", subject, cost, None, "t", "P0")


# -- for how long


@pytest.mark.parametrize(
    "limit",
    [
        HOUR,
        BUCKET,
        LeakyBucket(name="leaky", bucket_capacity=2, leak_rate_per_sec=1),
        SlidingWindow(name="log", limit=2, window_seconds=10),
        SlidingWindowCounter(name="counter", limit=30, window_seconds=10),
        Quota(name="quota", limit=2, period="day"),
        FixedWindow(name="spread", limit=2, window_seconds=3_600, spread=True),
        FixedWindow(name="blocked", limit=0, window_seconds=3_600),
    ],
    ids=lambda limit: limit.name,
)
def test_a_denied_check_is_denied_again_without_asking(process: CachingLimiter, limit: Limit) -> None:
    denied = process.deny(limit)
    assert not process.check_calls_store(limit)
    assert process.check(limit) == denied
    assert process.denials.hits == 2


def test_the_wait_shrinks_as_time_passes_and_waiting_it_out_is_enough(process: CachingLimiter) -> None:
    assert process.deny(BUCKET).retry_after_ms == 1_000
    process.clock.advance_us(400_000)
    assert process.check(BUCKET).retry_after_ms == 600
    process.clock.advance_us(599_999)
    assert process.check(BUCKET).retry_after_ms == 1
    assert process.store.calls == 3
    process.clock.advance_us(1)
    assert process.check(BUCKET).allowed


def test_waits_are_kept_in_microseconds_not_as_reported(process: CachingLimiter) -> None:
    assert process.deny(THIRDS).retry_after_ms == 334
    process.clock.advance_us(333_333)
    assert not process.check_calls_store(THIRDS)
    process.clock.advance_us(1)
    assert process.check(THIRDS).allowed


def test_reset_times_move_with_the_clock(process: CachingLimiter) -> None:
    denied = process.deny(HOUR)
    process.clock.advance_us(10 * SECOND_US)
    later = process.check(HOUR)
    assert later.reset_at == denied.reset_at
    assert later.reset_after_ms == (denied.reset_after_ms or 0) - 10_000


def test_a_denial_counts_from_when_it_was_sent_and_its_wait_from_when_it_arrived(
    process: CachingLimiter,
) -> None:
    check = of(BUCKET)
    for _ in range(2):
        assert process.store.check(of(BUCKET)).allowed
    outcome, sent_us = process.store.ask(check)
    process.clock.advance_us(300_000)  # it may have been evaluated at any moment in between
    process.store.answer(check, outcome, sent_us)
    again = process.denials.get(of(BUCKET))
    assert isinstance(again, Decision)
    assert again.retry_after_ms == 1_000
    process.clock.set_us(sent_us + 999_999)
    assert process.denials.get(of(BUCKET)) is not None
    process.clock.advance_us(1)
    assert process.denials.get(of(BUCKET)) is None


def test_no_denial_is_older_than_its_age(process: CachingLimiter) -> None:
    process.deny(HOUR)
    process.clock.advance_us(MINUTE_US - 1)
    assert not process.check_calls_store(HOUR)
    process.clock.advance_us(1)
    assert process.check_calls_store(HOUR)


@pytest.mark.parametrize("limit", [HOUR, replace(HOUR, limit=0)], ids=["cost above the limit", "blocked"])
def test_a_check_that_never_has_room_is_asked_again_after_the_maximum_age(
    process: CachingLimiter, limit: Limit
) -> None:
    assert process.deny(limit, cost=5).retry_after_ms is None
    process.clock.advance_us(MINUTE_US - 1)
    assert not process.check_calls_store(limit, cost=5)
    assert process.check(limit, cost=5).retry_after_ms is None
    process.clock.advance_us(1)
    assert process.check_calls_store(limit, cost=5)


def test_of_several_limits_the_longest_wait_is_the_one_that_counts(process: CachingLimiter) -> None:
    both = [THIRDS, HOUR]
    process.check(HOUR)
    process.check(HOUR)
    process.check(THIRDS)
    assert process.deny(both).binding == "hour"
    process.clock.advance_us(SECOND_US)
    assert not process.check_calls_store(both)
    later = process.check(both)
    assert later.limits["thirds"].allowed  # its own wait has ended
    assert not later.limits["hour"].allowed


def test_a_monitored_limit_denies_nothing_here_either(process: CachingLimiter) -> None:
    watched = replace(HOUR, mode="monitor")
    for _ in range(5):
        assert process.check(watched).allowed
    assert process.denials.count() == 0


def test_a_peek_is_never_answered_from_the_cache(process: CachingLimiter) -> None:
    process.deny(HOUR)
    assert process.check(HOUR, cost=0).allowed


def test_a_clock_that_steps_back_gets_no_denial_from_the_future(process: CachingLimiter) -> None:
    process.deny(BUCKET)
    process.clock.advance_us(-SECOND_US)
    assert process.check_calls_store(BUCKET)
    process.clock.advance_us(2 * SECOND_US)
    assert process.check(BUCKET).allowed


# -- what makes two checks the same


def test_another_cost_is_another_check(process: CachingLimiter) -> None:
    five = TokenBucket(name="five", bucket_capacity=5, refill_rate_per_sec=1)
    assert process.check(five, cost=2).allowed
    assert process.deny(five, cost=4).retry_after_ms is not None
    assert process.check(five, cost=3).allowed


def test_another_priority_is_another_check(process: CachingLimiter) -> None:
    shared = FixedWindow(name="shared", limit=2, window_seconds=3_600, shares={"P3": 50})
    process.check(shared)
    assert not process.deny(shared, priority="P3").allowed
    assert process.check(shared).allowed


def test_other_numbers_are_another_check(process: CachingLimiter) -> None:
    process.deny(HOUR)
    assert process.check(replace(HOUR, limit=3)).allowed


def test_another_mode_is_another_check(process: CachingLimiter) -> None:
    process.deny(HOUR)
    assert process.check(replace(HOUR, mode="monitor")).allowed


def test_another_subject_is_another_check(process: CachingLimiter) -> None:
    process.deny(HOUR)
    assert process.check(HOUR, subject="other").allowed


def test_another_tenant_is_another_check(process: CachingLimiter) -> None:
    process.deny(HOUR)
    assert process.check(HOUR, tenant="globex").allowed


def test_fewer_limits_are_another_check(process: CachingLimiter) -> None:
    process.deny([HOUR, replace(BUCKET, bucket_capacity=100)])
    assert process.check(replace(BUCKET, bucket_capacity=100)).allowed


def test_a_denial_of_other_limits_is_asked_because_another_may_bind(process: CachingLimiter) -> None:
    process.deny(HOUR)
    both = process.check([HOUR, replace(SLOTS, max_concurrent=0)])
    assert both.binding == "slots"


def test_another_resource_is_another_check_where_it_may_have_an_override(process: CachingLimiter) -> None:
    caller = FixedWindow(name="caller", limit=2, window_seconds=3_600, scope="caller")
    process.limiter.set_override("vip", "u", {"caller": {"limit": 100}}, limits=caller, ttl_seconds=3_600)
    process.deny(caller, resource="plain")
    assert process.check(caller, resource="vip").allowed


def test_a_few_different_checks_of_one_bucket_are_kept_side_by_side(process: CachingLimiter) -> None:
    for cost in (3, 4, 5):
        process.deny(HOUR, cost=cost)
    for cost in (3, 4, 5):
        assert not process.check_calls_store(HOUR, cost=cost)


# -- what can get room early is not kept


def test_a_bucket_with_an_open_reservation_is_asked_every_time(process: CachingLimiter) -> None:
    held = process.limiter.reserve("r", "u", limits=HOUR, cost=2)
    process.deny(HOUR)
    assert process.check_calls_store(HOUR)
    process.limiter.settle(held.reservation_id or "", 0)
    assert process.check(HOUR).allowed


def test_held_slots_are_asked_for_every_time(process: CachingLimiter) -> None:
    job = process.check(SLOTS)
    process.deny(SLOTS)
    assert process.check_calls_store(SLOTS)
    process.limiter.release(job.lease_id or "")
    assert process.check(SLOTS).allowed


def test_a_window_without_room_is_asked_while_slots_are_held_beside_it(process: CachingLimiter) -> None:
    """Slots may be released early, and the reported wait is the longest of both limits."""
    brief = FixedWindow(name="brief", limit=1, window_seconds=10)
    both = [SLOTS, brief]
    job = process.check(both)
    assert process.deny(both).retry_after_ms == 30_000
    assert process.check_calls_store(both)
    process.limiter.release(job.lease_id or "")
    assert process.check(both).retry_after_ms == 10_000
    assert not process.check_calls_store(both)


def test_a_window_without_room_denies_for_slots_that_are_free(process: CachingLimiter) -> None:
    process.deny(HOUR)
    process.deny([SLOTS, HOUR])
    assert not process.check_calls_store([SLOTS, HOUR])


def test_slots_that_are_held_are_no_matter_where_there_are_more(process: CachingLimiter) -> None:
    many = replace(SLOTS, max_concurrent=9)
    assert process.check(many).allowed
    process.deny(HOUR)
    process.deny([many, HOUR])
    assert not process.check_calls_store([many, HOUR])


def test_a_monitored_limit_that_is_reserved_keeps_nothing_from_the_cache(process: CachingLimiter) -> None:
    watched = replace(HOUR, name="watched", mode="monitor")
    process.limiter.reserve("r", "u", limits=watched, cost=2)
    process.deny([watched, HOUR])
    assert not process.check_calls_store([watched, HOUR])


def test_the_wait_for_a_settled_reservation_is_not_repeated(process: CachingLimiter) -> None:
    brief = FixedWindow(name="brief", limit=1, window_seconds=10)
    held = process.limiter.reserve("r", "u", limits=HOUR, cost=2)
    process.check(brief)
    assert process.deny([brief, HOUR]).binding == "hour"
    process.limiter.settle(held.reservation_id or "", 0)
    assert process.check([brief, HOUR]).binding == "brief"


# -- denials that count are heard of by the store


@pytest.mark.parametrize(
    "limit",
    [
        COUNTING,
        replace(BUCKET, count_denied=True),
        LeakyBucket(name="leaky", bucket_capacity=2, leak_rate_per_sec=1, count_denied=True),
        SlidingWindow(name="log", limit=2, window_seconds=10, count_denied=True),
        SlidingWindowCounter(name="counter", limit=30, window_seconds=10, count_denied=True),
        Quota(name="quota", limit=2, period="day", count_denied=True),
    ],
    ids=lambda limit: limit.name,
)
def test_a_limit_that_counts_its_denials_is_asked_for_each(process: CachingLimiter, limit: Limit) -> None:
    process.deny(limit)
    assert all(process.check_calls_store(limit) for _ in range(5))
    assert process.denials.count() == 0


def test_a_limit_that_counts_denials_is_asked_for_also_where_another_limit_denies(process: CachingLimiter) -> None:
    """The limit may lose its room meanwhile, and must count denials from then on."""
    both = [HOUR, COUNTING]
    process.deny(both)
    process.check(COUNTING)
    for _ in range(2):
        assert process.check_calls_store(both)
    used = 1_000 - (process.check(replace(COUNTING, limit=1_000), cost=0).remaining or 0)
    assert used == 5


@pytest.mark.parametrize(
    ("counting", "costs"),
    [(replace(COUNTING, mode="monitor"), {}), (COUNTING, {"counting": 0})],
    ids=["monitored", "without a cost"],
)
def test_a_limit_that_can_not_count_its_denials_now_keeps_nothing_from_the_cache(
    process: CachingLimiter, counting: Limit, costs: dict[str, int]
) -> None:
    process.deny([HOUR, counting], costs=costs)
    assert not process.check_calls_store([HOUR, counting], costs=costs)


# -- what is always judged by the store


def test_a_reservation_is_never_answered_from_the_cache(process: CachingLimiter) -> None:
    process.deny(HOUR)
    assert process.calls_store(lambda: process.limiter.reserve("r", "u", limits=HOUR, cost=1))


def test_a_shadow_plan_is_always_evaluated_by_the_store(process: CachingLimiter) -> None:
    process.deny(HOUR)
    for left in (9, 8):
        decision = process.check(HOUR, shadow=replace(HOUR, limit=10))
        assert not decision.allowed
        assert decision.shadow is not None
        assert decision.shadow.remaining == left


def test_the_denial_of_a_reservation_holds_for_a_plain_check(process: CachingLimiter) -> None:
    process.check(HOUR, cost=2)
    process.clock.advance_us(1)
    assert not process.limiter.reserve("r", "u", limits=HOUR, cost=1).allowed
    assert not process.check(HOUR).allowed


# -- forgetting


@pytest.mark.parametrize(
    "change",
    [
        lambda process: process.limiter.reset("r", "u", limits=HOUR),
        lambda process: process.limiter.set_override("r", "u", {"hour": {"limit": 9}}, limits=HOUR, ttl_seconds=60),
        lambda process: process.limiter.set_override("*", "u", {"hour": "unlimited"}, limits=HOUR, ttl_seconds=60),
    ],
    ids=["reset", "override", "override for every resource"],
)
def test_a_change_admits_at_once_what_it_affects_and_nothing_else(
    process: CachingLimiter, change: Callable[[CachingLimiter], object]
) -> None:
    process.deny(HOUR)
    process.deny(HOUR, subject="other")
    process.deny(HOUR, tenant="globex")
    change(process)
    assert process.check(HOUR).allowed
    assert not process.check_calls_store(HOUR, subject="other")
    assert not process.check_calls_store(HOUR, tenant="globex")


@pytest.mark.parametrize("how", ["deleted", "replaced", "cleared"])
def test_a_blocked_subject_is_admitted_when_the_override_is_gone(process: CachingLimiter, how: str) -> None:
    override = process.limiter.set_override
    override("r", "u", {"hour": "blocked"}, limits=HOUR, ttl_seconds=3_600)
    assert process.deny(HOUR).retry_after_ms is None
    if how == "deleted":
        process.limiter.delete_override("r", "u")
    elif how == "replaced":
        override("r", "u", {"hour": {"limit": 5}}, limits=HOUR, ttl_seconds=3_600)
    else:
        process.limiter.clear_overrides()
    assert process.check(HOUR).allowed


@pytest.mark.parametrize("reset", [HOUR, BUCKET], ids=["the one without room", "one with room"])
def test_a_denial_is_forgotten_with_any_of_its_buckets(process: CachingLimiter, reset: Limit) -> None:
    roomy = replace(BUCKET, bucket_capacity=100)
    process.deny([roomy, HOUR])
    assert not process.check_calls_store([roomy, HOUR])
    process.limiter.reset("r", "u", limits=reset)
    process.clock.advance_us(1)
    assert process.check_calls_store([roomy, HOUR])


def test_a_slot_that_is_given_back_makes_no_denial_doubtful(process: CachingLimiter) -> None:
    job = process.check(SLOTS)
    process.deny(HOUR)
    process.limiter.release(job.lease_id or "")
    process.limiter.renew(job.lease_id or "")
    assert not process.check_calls_store(HOUR)


def test_a_tenants_denials_are_forgotten_together(process: CachingLimiter) -> None:
    subjects = [str(n) for n in range(5)]
    for subject in subjects:
        process.deny(HOUR, subject=subject)
        process.deny(HOUR, subject=subject, tenant="globex")
    process.limiter.drop_denials()
    process.clock.advance_us(1)
    assert all(process.check_calls_store(HOUR, subject=subject) for subject in subjects)
    assert not any(process.check_calls_store(HOUR, subject=subject, tenant="globex") for subject in subjects)


def test_an_override_applies_also_where_another_limit_denied(process: CachingLimiter) -> None:
    """The reported wait is the longest of all limits, so a change of any of them may make it wrong."""
    shop = FixedWindow(name="shop", limit=1, window_seconds=3_600, scope="resource")
    both = [shop, HOUR]
    process.limiter.set_override("r", "u", {"hour": "blocked"}, limits=HOUR, ttl_seconds=3_600)
    process.check(shop)
    assert process.deny(both).retry_after_ms is None
    process.limiter.delete_override("r", "u")
    assert process.check(both).retry_after_ms == process.check(shop).retry_after_ms


TENANT = Keys().tenant_keys("t").tenant_prefix
DROPS = [
    Invalidation(bucket_keys=tuple(key for _, key, *_ in of(HOUR).debits)),
    Invalidation(override_keys=(Keys.overrides_key(TENANT, "u"),)),
    Invalidation(key_prefixes=(TENANT,)),
    None,
]


@pytest.mark.parametrize("pause_us", [0, 5])
@pytest.mark.parametrize("drop", DROPS, ids=["key", "subject", "tenant", "all"])
def test_an_answer_that_was_on_its_way_during_a_change_is_not_kept(
    process: CachingLimiter, drop: Invalidation | None, pause_us: int
) -> None:
    check = of(HOUR, cost=3)
    outcome, sent_us = process.store.ask(check)
    process.clock.advance_us(pause_us)
    if drop is None:
        process.denials.invalidate_all()
    else:
        process.denials.invalidate(drop)
    process.clock.advance_us(5)
    process.store.answer(check, outcome, sent_us)
    assert process.denials.get(of(HOUR, cost=3)) is None
    process.clock.advance_us(1)
    process.store.answer(check, *process.store.ask(check))
    assert process.denials.get(of(HOUR, cost=3)) is not None


@pytest.mark.parametrize("is_all", [True, False])
def test_a_reply_from_before_a_change_is_not_cached_after_many_more_changes(*, is_all: bool) -> None:
    process = CachingLimiter(max_keys=2)
    check = of(HOUR, cost=3)
    process.denials.invalidate(Invalidation(bucket_keys=("early",)))
    process.clock.advance_us(10)
    outcome, sent_us = process.store.ask(check)
    process.clock.advance_us(10)
    if is_all:
        process.denials.invalidate_all()
    else:
        process.denials.invalidate(Invalidation(bucket_keys=(check.debits[0][1],)))
    for at in range(10):
        process.clock.advance_us(1)
        process.denials.invalidate(Invalidation(bucket_keys=(f"later {at}",)))
        process.store.answer(check, outcome, sent_us)
        assert process.denials.get(check) is None


@given(
    names=st.tuples(*[st.lists(st.binary(max_size=8), max_size=3)] * 3),
)
def test_an_invalidation_carries_names_of_any_bytes(names: tuple[list[bytes], ...]) -> None:
    drop = Invalidation(*(tuple(name.decode("utf-8", "surrogateescape") for name in some) for some in names))
    assert Invalidation.decode(drop.encode()) == drop


@given(st.binary(max_size=20))
def test_an_invalid_message_is_refused(noise: bytes) -> None:
    try:
        drop = Invalidation.decode(noise)
    except ValueError:
        return
    assert Invalidation.decode(drop.encode()) == drop


# -- bounded


def test_no_more_keys_are_kept_than_fit_and_the_youngest_stay() -> None:
    process = CachingLimiter(max_keys=10)
    for subject in range(100):
        process.deny(HOUR, subject=str(subject))
        assert process.denials.count() <= 10
    for subject in range(90, 100):
        assert not process.check_calls_store(HOUR, subject=str(subject))
    assert process.check_calls_store(HOUR, subject="0")
    assert len(process.denials._keys_by_name) <= 2 * 10  # by its bucket, and by the overrides of its subject


def test_changes_are_remembered_in_a_bounded_way_too() -> None:
    process = CachingLimiter(max_keys=10)
    for subject in range(100):
        process.clock.advance_us(1)
        process.limiter.reset("r", str(subject), limits=HOUR)
    assert len(process.denials._invalidated_us) <= 10


def test_one_bucket_keeps_few_costs(process: CachingLimiter) -> None:
    for cost in range(3, 100):
        process.deny(HOUR, cost=cost)
    assert sum(len(shelf.denials) for shelf in process.denials._entries.values()) <= denials_module.MAX_DENIALS_PER_KEY


def test_expired_denials_are_removed_on_lookup(process: CachingLimiter) -> None:
    process.deny(BUCKET)
    process.clock.advance_us(SECOND_US)
    assert process.check(BUCKET).allowed
    assert process.denials.count() == 0
    assert not process.denials._keys_by_name
    assert not process.denials.has_entries


# -- threads


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_eager_threads")
def test_threads_may_add_get_and_invalidate_concurrently() -> None:
    process = CachingLimiter(max_keys=5)
    failures: list[BaseException] = []
    limits: list[Limit] = [HOUR, replace(HOUR, limit=0, name="none"), BUCKET]
    checks = [of(limit, str(subject), cost=4) for limit in limits for subject in range(5)]
    outcomes = [process.store.ask(check)[0] for check in checks]
    process.clock.advance_us(1)

    def guarded(act: Callable[[int], object]) -> None:
        try:
            for turn in range(1_000):
                act(turn)
        except BaseException as failure:  # noqa: BLE001 - shown by the test
            failures.append(failure)

    def note(turn: int) -> None:
        at = turn % len(checks)
        process.denials.add(checks[at], outcomes[at], process.clock.now_us())

    def look(turn: int) -> None:
        denied = process.denials.get(checks[turn % len(checks)])
        assert denied is None or not denied.allowed

    def drop(turn: int) -> None:
        process.clock.advance_us(1)
        process.denials.invalidate(
            (DROPS[0] or Invalidation(), DROPS[1] or Invalidation(), DROPS[2] or Invalidation())[turn % 3]
        )

    threads = [threading.Thread(target=guarded, args=(act,)) for act in (note, note, look, look, drop)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert process.denials.count() <= 5
    assert process.denials.has_entries == bool(process.denials.count())
    named = {
        name: {p for p, shelf in process.denials._entries.items() if name in shelf.invalidated_by}
        for name in process.denials._keys_by_name
    }
    assert named == process.denials._keys_by_name
    assert {name for shelf in process.denials._entries.values() for name in shelf.invalidated_by} == set(named)


# -- how much of it is kept


def test_subjects_behind_a_limit_that_all_share_are_known_each_by_itself(process: CachingLimiter) -> None:
    """Limits of the operator and the tenant come first in a check, and all callers share their buckets."""
    plan = (
        FixedWindow(name="all", limit=10**9, window_seconds=60, scope="tenant"),
        FixedWindow(name="one", limit=1, window_seconds=3_600),
    )
    for number in range(90):
        process.deny(plan, subject=str(number))
    assert not any(process.check_calls_store(plan, subject=str(number)) for number in range(90))
    assert len(process.denials._entries) == 90
    assert (
        len(process.denials._keys_by_name) == 1 + 2 * 90
    )  # the shared bucket; each own one, and each subject's overrides


def test_names_of_denials_that_made_room_for_others_are_forgotten() -> None:
    process = CachingLimiter(max_keys=3)
    plan = Limits(HOUR, FixedWindow(name="tenant", limit=10**6, window_seconds=60, scope="tenant"))
    for cost in range(3, 40):
        for subject in ("a", "b", "c", "d", "e"):
            assert not process.check(plan, subject=subject, cost=cost).allowed  # type: ignore[arg-type]
    kept = {name for shelf in process.denials._entries.values() for name in shelf.invalidated_by}
    assert set(process.denials._keys_by_name) == kept
    assert len(kept) == 3 * 2 + 1
    assert all(len(shelf.denials) <= denials_module.MAX_DENIALS_PER_KEY for shelf in process.denials._entries.values())
