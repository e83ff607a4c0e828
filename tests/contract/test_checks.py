"""Decisions: several limits, costs, modes, priority shares, entries, batches, shadow plans."""

import dataclasses

import pytest

from limitforge import (
    Concurrency,
    Decision,
    Entry,
    FixedWindow,
    InvalidInput,
    LeakyBucket,
    Limits,
    ManualClock,
    Request,
    SlidingWindow,
    SyncLimiter,
    TokenBucket,
)
from limitforge.core.keys import Layer

MINUTE = FixedWindow(name="minute", limit=5, window_seconds=60)
BURST = TokenBucket(name="burst", bucket_capacity=3, refill_rate_per_sec=1)


def test_the_readme_line_works(limiter: SyncLimiter) -> None:
    decision = limiter.check("GET:/orders", "user:42", limits="100/minute; 10/second", cost=1)
    assert decision.allowed
    assert decision.binding == "second"
    assert (decision.limit, decision.remaining) == (10, 9)
    assert list(decision.limits) == ["minute", "second"]


def test_a_denial_by_one_limit_takes_nothing_from_the_other(limiter: SyncLimiter) -> None:
    plan = Limits(MINUTE, BURST)
    for _ in range(3):
        assert limiter.check("r", "s", limits=plan).allowed
    denied = limiter.check("r", "s", limits=plan)
    assert not denied.allowed
    assert denied.binding == "burst"
    assert denied.limits["minute"].remaining == 2
    assert denied.limits["minute"].allowed


def test_a_cost_above_the_limit_is_denied_for_ever_and_burns_nothing(limiter: SyncLimiter) -> None:
    denied = limiter.check("r", "s", limits=MINUTE, cost=6)
    assert (denied.allowed, denied.retry_after_ms) == (False, None)
    assert limiter.check("r", "s", limits=MINUTE, cost=5).allowed


def test_a_peek_takes_nothing_and_is_always_allowed(limiter: SyncLimiter) -> None:
    blocked = FixedWindow(name="none", limit=0, window_seconds=60)
    for limits in (MINUTE, blocked, Limits(MINUTE, blocked)):
        look = limiter.check("r", "s", limits=limits, cost=0)
        assert (look.allowed, look.retry_after_ms) == (True, 0)
    assert limiter.check("r", "s", limits=MINUTE, cost=0).remaining == 5


def test_a_scope_says_who_shares_a_bucket(limiter: SyncLimiter) -> None:
    for scope, shares_resource, shares_subject, shares_tenant in (
        ("subject", False, False, False),
        ("caller", True, False, False),
        ("resource", False, True, False),
        ("tenant", True, True, False),
        ("global", True, True, True),
    ):
        limit = FixedWindow(name=scope, limit=1, window_seconds=60, scope=scope)  # type: ignore[arg-type]
        assert limiter.check("r1", "s1", limits=limit, tenant="t1").allowed, scope
        assert limiter.check("r2", "s1", limits=limit, tenant="t1").allowed is not shares_resource, scope
        assert limiter.check("r1", "s2", limits=limit, tenant="t1").allowed is not shares_subject, scope
        assert limiter.check("r1", "s1", limits=limit, tenant="t2").allowed is not shares_tenant, scope


def test_costs_are_for_all_limits_or_by_name(limiter: SyncLimiter) -> None:
    plan = Limits(
        FixedWindow(name="requests", limit=10, window_seconds=60, counts="requests"),
        FixedWindow(name="elements", limit=100, window_seconds=60),
        FixedWindow(name="bytes", limit=1_000, window_seconds=60),
    )
    decision = limiter.check("r", "s", limits=plan, cost=50, costs={"bytes": 700})
    assert {name: state.remaining for name, state in decision.limits.items()} == {
        "requests": 9,
        "elements": 50,
        "bytes": 300,
    }
    with pytest.raises(InvalidInput, match=r"costs\.nope: no limit of that name"):
        limiter.check("r", "s", limits=plan, costs={"nope": 1})


def test_a_peek_is_not_a_request(limiter: SyncLimiter) -> None:
    requests = FixedWindow(name="requests", limit=10, window_seconds=60, counts="requests")
    assert [limiter.check("r", "s", limits=requests, cost=cost).remaining for cost in (0, 7, 0)] == [10, 9, 9]


def test_unlimited_is_reported_and_never_binds(limiter: SyncLimiter) -> None:
    unlimited = FixedWindow(name="free", limit=None, window_seconds=60)
    alone = limiter.check("r", "s", limits=unlimited, cost=10**9)
    assert (alone.allowed, alone.binding, alone.limit, alone.remaining, alone.reset_at) == (
        True,
        None,
        None,
        None,
        None,
    )
    assert alone.limits["free"].limit is None
    assert limiter.check("r", "s", limits=Limits(unlimited, MINUTE)).binding == "minute"


def test_a_monitored_limit_reports_and_lets_pass(limiter: SyncLimiter) -> None:
    watched = dataclasses.replace(BURST, mode="monitor")
    plan = Limits(MINUTE, watched)
    decisions = [limiter.check("r", "s", limits=plan) for _ in range(6)]
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False]
    assert [decision.would_deny for decision in decisions] == [()] * 3 + [("burst",)] * 3
    assert all(decision.binding == "minute" for decision in decisions)


def test_a_limit_that_is_off_is_not_there(limiter: SyncLimiter) -> None:
    off = dataclasses.replace(BURST, mode="off")
    decision = limiter.check("r", "s", limits=Limits(off, MINUTE), cost=5)
    assert decision.allowed
    assert list(decision.limits) == ["minute"]
    assert limiter.check("r", "s", limits=off, cost=10**6).allowed


def test_shares_keep_room_for_what_matters_more(limiter: SyncLimiter) -> None:
    limit = TokenBucket(name="b", bucket_capacity=10, refill_rate_per_sec=1, shares={"P1": 90, "P2": 80, "P3": 70})
    admitted = {
        priority: sum(limiter.check("r", "s", limits=limit, priority=priority).allowed for _ in range(10))
        for priority in ("P3", "P2", "P1", "P0")
    }
    assert admitted == {"P3": 7, "P2": 1, "P1": 1, "P0": 1}


def test_a_counted_denial_pushes_the_wait_out(limiter: SyncLimiter) -> None:
    limit = dataclasses.replace(BURST, count_denied=True)
    waits = [limiter.check("r", "s", limits=limit).retry_after_ms for _ in range(9)]
    assert waits == [0, 0, 0, 2_000, 3_000, 4_000, 4_000, 4_000, 4_000]


def test_a_leaky_bucket_reports_the_longest_delay(limiter: SyncLimiter) -> None:
    slow = LeakyBucket(name="slow", bucket_capacity=10, leak_rate_per_sec=1)
    fast = LeakyBucket(name="fast", bucket_capacity=10, leak_rate_per_sec=4)
    delays = [limiter.check("r", "s", limits=Limits(fast, slow)).delay_ms for _ in range(3)]
    assert delays == [0, 1_000, 2_000]
    assert limiter.check("r", "s", limits=Limits(fast, slow), cost=0).delay_ms is None


def test_entries_decide_together_and_are_merged_by_key(limiter: SyncLimiter) -> None:
    per_user = FixedWindow(name="per-user", limit=3, window_seconds=60, scope="caller")
    per_route = FixedWindow(name="per-route", limit=10, window_seconds=60, scope="resource")
    decision = limiter.check_entries(
        [
            Entry(per_user, "GET:/a", "u1", 1),
            Entry(per_user, "GET:/b", "u1", 1),
            Entry(per_user, "GET:/a", "u2", 1),
            Entry(per_route, "GET:/a", "u1", 4),
        ]
    )
    assert [state.remaining for state in decision.limits.values()] == [1, 2, 6]
    with pytest.raises(InvalidInput, match="differs from an earlier limit called 'per-user'"):
        limiter.check_entries([Entry(per_user, "r", "u1"), Entry(dataclasses.replace(per_user, limit=4), "r", "u1")])


def test_equal_names_in_different_places_stay_apart(limiter: SyncLimiter) -> None:
    limit = FixedWindow(name="w", limit=2, window_seconds=60)
    decision = limiter.check_entries(
        [Entry(limit, "r", "s", 1, Layer.OPERATOR), Entry(limit, "r", "s", 2, Layer.TENANT)]
    )
    assert {name: state.remaining for name, state in decision.limits.items()} == {"operator:w": 1, "tenant:w": 0}


def test_checks_of_a_batch_see_what_earlier_ones_took(limiter: SyncLimiter) -> None:
    requests = [Request(resource="r", subject="s", limits=MINUTE, cost=cost) for cost in (3, 3, 2, 1)]
    answers = limiter.check_many(requests)
    assert [isinstance(answer, Decision) and answer.allowed for answer in answers] == [True, False, True, False]


def test_a_long_batch_is_split_in_order(limiter: SyncLimiter) -> None:
    limit = SlidingWindow(name="w", limit=1_000, window_seconds=60)
    answers = limiter.check_many([Request(resource="r", subject="s", limits=limit) for _ in range(1_005)])
    allowed = [isinstance(answer, Decision) and answer.allowed for answer in answers]
    assert allowed == [True] * 1_000 + [False] * 5


def test_a_shadow_plan_is_evaluated_and_changes_nothing(limiter: SyncLimiter) -> None:
    candidate = Limits(FixedWindow(name="minute", limit=2, window_seconds=60), BURST)
    decisions = [limiter.check("r", "s", limits=MINUTE, shadow=candidate) for _ in range(6)]
    assert [decision.allowed for decision in decisions] == [True] * 5 + [False]
    assert [decision.shadow.allowed for decision in decisions if decision.shadow] == [True, True] + [False] * 4
    assert decisions[-1].shadow is not None
    assert decisions[-1].shadow.limits["burst"].remaining == 1
    assert limiter.check("r", "s", limits=MINUTE).shadow is None


def test_a_shadow_plan_is_evaluated_when_the_live_one_denies(limiter: SyncLimiter) -> None:
    none = FixedWindow(name="none", limit=0, window_seconds=60)
    decisions = [limiter.check("r", "s", limits=none, shadow=BURST) for _ in range(4)]
    assert [decision.shadow.allowed for decision in decisions if decision.shadow] == [True, True, True, False]


def test_a_reset_forgets_what_was_counted_and_nothing_else(limiter: SyncLimiter) -> None:
    plan = Limits(MINUTE, BURST)
    for subject in ("s1", "s2"):
        limiter.check("r", subject, limits=plan, cost=3)
    limiter.reset("r", "s1", limits=MINUTE)
    first, second = (limiter.check("r", subject, limits=plan, cost=0) for subject in ("s1", "s2"))
    assert (first.limits["minute"].remaining, first.limits["burst"].remaining) == (5, 0)
    assert second.limits["minute"].remaining == 2


def test_reset_at_is_the_stores_time_plus_the_reset_rounded_up(limiter: SyncLimiter, clock: ManualClock) -> None:
    clock.set_us(1_700_006_400_000_001)
    decision = limiter.check("r", "s", limits=BURST)
    assert decision.reset_at == 1_700_006_402
    assert limiter.check("r", "s", limits=MINUTE).reset_at == 1_700_006_460


def test_the_same_algorithm_and_name_is_needed_to_share_a_bucket(limiter: SyncLimiter) -> None:
    window = FixedWindow(name="w", limit=1, window_seconds=60)
    log = SlidingWindow(name="w", limit=1, window_seconds=60)
    other = FixedWindow(name="w2", limit=1, window_seconds=60)
    assert all(limiter.check("r", "s", limits=limit).allowed for limit in (window, log, other))
    assert not any(limiter.check("r", "s", limits=limit).allowed for limit in (window, log, other))


def test_a_check_without_limits_is_allowed(limiter: SyncLimiter) -> None:
    decision = limiter.check("r", "s", limits=[], cost=5)
    assert (decision.allowed, decision.binding, decision.limits) == (True, None, {})


BAD_INPUT: list[tuple[str, dict[str, object]]] = [
    ("cost", {"cost": -1}),
    ("cost", {"cost": 2**52}),
    ("cost", {"cost": 1.5}),
    ("cost", {"cost": True}),
    ("priority", {"priority": "P4"}),
    ("subject", {"subject": "x" * 513}),
    ("subject", {"subject": 42}),
    ("resource", {"resource": "ü" * 257}),
    ("tenant", {"tenant": "t" * 513}),
    ("limits", {"limits": "100/fortnight"}),
    ("limits", {"limits": 100}),
]


def refused_field(limiter: SyncLimiter, given: dict[str, object]) -> str | None:
    arguments: dict[str, object] = {"resource": "r", "subject": "s", "limits": MINUTE, **given}
    try:
        limiter.check(**arguments)  # type: ignore[arg-type]
    except InvalidInput as refused:
        return refused.field
    return None


def test_bad_input_is_refused_by_name(limiter: SyncLimiter) -> None:
    for field, given in BAD_INPUT:
        assert refused_field(limiter, given) == field, given


def test_slots_and_rates_decide_together(limiter: SyncLimiter) -> None:
    plan = Limits(Concurrency(name="slots", max_concurrent=2, lease_ttl_seconds=30), BURST)
    first = limiter.check("r", "s", limits=plan)
    second = limiter.check("r", "s", limits=plan)
    third = limiter.check("r", "s", limits=plan)
    assert (third.allowed, third.binding, third.lease_id) == (False, "slots", None)
    assert third.limits["burst"].remaining == 1
    limiter.release(first.lease_id or "")
    assert limiter.check("r", "s", limits=plan).allowed
    assert second.lease_id
