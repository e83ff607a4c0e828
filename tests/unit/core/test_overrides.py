"""Overrides: what they may change, which checks they affect, and when they end."""

import json
from decimal import Decimal
from typing import Any

import pytest

from limitforge import (
    Concurrency,
    Entry,
    FixedWindow,
    InvalidInput,
    LeakyBucket,
    Limit,
    Limits,
    ManualClock,
    Override,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    SyncLimiter,
    TokenBucket,
)
from limitforge.core.keys import Layer

BURST = SlidingWindow(name="burst", limit=5, window_seconds=60)
EVERY: dict[str, Limit] = {
    "token_bucket": TokenBucket(name="a", bucket_capacity=10, refill_rate_per_sec=1),
    "leaky_bucket": LeakyBucket(name="a", bucket_capacity=10, leak_rate_per_sec=1),
    "fixed_window": FixedWindow(name="a", limit=10, window_seconds=60),
    "sliding_window": SlidingWindow(name="a", limit=10, window_seconds=60),
    "sliding_window_counter": SlidingWindowCounter(name="a", limit=10, window_seconds=60),
    "concurrency": Concurrency(name="a", max_concurrent=10, lease_ttl_seconds=60),
    "quota": Quota(name="a", limit=10, period="day"),
}
every_algorithm = pytest.mark.parametrize("algorithm", EVERY)


def override(
    limiter: SyncLimiter, changes: Any, *, limits: Any = BURST, resource: str = "r", subject: str = "s", **options: Any
) -> Override:
    return limiter.set_override(resource, subject, changes, limits=limits, **{"ttl_seconds": 3_600, **options})


def refusal(limiter: SyncLimiter, changes: Any, **options: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as refused:
        override(limiter, changes, **options)
    return refused.value


# -- what it may say


@every_algorithm
def test_limit_means_the_size_of_any_limit(algorithm: str, limiter: SyncLimiter) -> None:
    limit = EVERY[algorithm]
    override(limiter, {"a": {"limit": 500}}, limits=limit)
    assert limiter.check("r", "s", limits=limit).limit == 500
    override(limiter, {"a": {limit.size_field: 600}}, limits=limit)
    assert limiter.check("r", "s", limits=limit).limit == 600


@every_algorithm
def test_a_limit_may_be_unlimited_or_blocked(algorithm: str, limiter: SyncLimiter) -> None:
    limit = EVERY[algorithm]
    override(limiter, {"a": "unlimited"}, limits=limit)
    free = limiter.check("r", "s", limits=limit, cost=10_000)
    assert (free.allowed, free.limits["a"].limit, free.limits["a"].remaining) == (True, None, None)
    override(limiter, {"a": "blocked"}, limits=limit)
    denied = limiter.check("r", "s", limits=limit)
    assert (denied.allowed, denied.limit, denied.remaining, denied.retry_after_ms) == (False, 0, 0, None)


@pytest.mark.parametrize(
    ("algorithm", "changes", "reset_after_ms"),
    [
        ("token_bucket", {"refill_rate_per_sec": 4}, 1_000),
        ("leaky_bucket", {"leak_rate_per_sec": 4}, 1_000),
        ("sliding_window", {"window_seconds": 30}, 30_000),
        ("concurrency", {"lease_ttl_seconds": 30}, 30_000),
    ],
)
def test_rates_windows_and_expiries_may_change(
    algorithm: str, changes: dict[str, int], reset_after_ms: int, limiter: SyncLimiter
) -> None:
    limit = EVERY[algorithm]
    override(limiter, {"a": changes}, limits=limit)
    assert limiter.check("r", "s", limits=limit, cost=4).reset_after_ms == reset_after_ms


def test_what_an_override_does_not_name_stays_as_it_is(limiter: SyncLimiter) -> None:
    limits = Limits.parse("burst=5/minute; daily=100/day")
    override(limiter, {"burst": {"limit": 7}}, limits=limits)
    decision = limiter.check("r", "s", limits=limits)
    assert {name: state.limit for name, state in decision.limits.items()} == {"burst": 7, "daily": 100}
    assert decision.limits["burst"].reset_after_ms == 60_000


def test_shares_are_shares_of_the_overridden_limit(limiter: SyncLimiter) -> None:
    limit = SlidingWindow(name="burst", limit=10, window_seconds=60, shares={"P2": 50})
    override(limiter, {"burst": {"limit": 100}}, limits=limit)
    decision = limiter.check("r", "s", limits=limit, priority="P2", cost=0)
    assert (decision.limit, decision.remaining) == (100, 50)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (None, "limits"),
        ({}, "limits"),
        ("blocked", "limits"),
        (["burst"], "limits"),
        ({"daily": "blocked"}, "limits.daily"),
        ({5: "blocked"}, "limits.5"),
        ({"burst": None}, "limits.burst"),
        ({"burst": {}}, "limits.burst"),
        ({"burst": "free"}, "limits.burst"),
        ({"burst": 5}, "limits.burst"),
        ({"burst": ["limit"]}, "limits.burst"),
        ({"burst": {"name": "x"}}, "limits.burst.name"),
        ({"burst": {"scope": "tenant"}}, "limits.burst.scope"),
        ({"burst": {"mode": "off"}}, "limits.burst.mode"),
        ({"burst": {"shares": {}}}, "limits.burst.shares"),
        ({"burst": {"refill_rate_per_sec": 5}}, "limits.burst.refill_rate_per_sec"),
        ({"burst": {"bucket_capacity": 5}}, "limits.burst.bucket_capacity"),
        ({"burst": {5: 5}}, "limits.burst.5"),
        ({"burst": {"limit": -1}}, "limits.burst.limit"),
        ({"burst": {"limit": 1_001}}, "limits.burst.limit"),
        ({"burst": {"limit": "many"}}, "limits.burst.limit"),
        ({"burst": {"window_seconds": 0}}, "limits.burst.window_seconds"),
        ({"burst": {"window_seconds": None}}, "limits.burst.window_seconds"),
    ],
)
def test_an_impossible_change_is_refused_by_name(changes: Any, field: str, limiter: SyncLimiter) -> None:
    assert refusal(limiter, changes).field == field
    assert limiter.get_override("r", "s") is None


@pytest.mark.parametrize(("field", "value"), [("period", "week"), ("time_zone", "Asia/Tokyo"), ("anchor_day", 2)])
def test_the_calendar_of_a_quota_cannot_be_overridden(field: str, value: object, limiter: SyncLimiter) -> None:
    error = refusal(limiter, {"a": {field: value}}, limits=EVERY["quota"])
    assert error.field == f"limits.a.{field}"


def test_the_bounds_of_a_limit_hold_for_its_override(limiter: SyncLimiter) -> None:
    error = refusal(limiter, {"a": {"limit": 4_504, "refill_rate_per_sec": "0.999999"}}, limits=EVERY["token_bucket"])
    assert error.field == "limits.a.bucket_capacity"
    assert "4503" in error.problem


def test_an_unknown_limit_is_refused_and_the_known_ones_are_named(limiter: SyncLimiter) -> None:
    limits = Limits.parse("one=5/minute; two=5/hour")
    assert "one, two" in refusal(limiter, {"three": "blocked"}, limits=limits).problem


@pytest.mark.parametrize("ttl_seconds", [0, -1, 3_650 * 86_400 + 1, "soon", None, float("nan")])
def test_an_override_has_a_ttl_within_bounds(ttl_seconds: Any, limiter: SyncLimiter) -> None:
    assert refusal(limiter, {"burst": "blocked"}, ttl_seconds=ttl_seconds).field == "ttl_seconds"


# -- which checks it affects


@pytest.mark.parametrize("scope", ["resource", "tenant", "global"])
def test_an_override_reaches_limits_of_a_subject_only(scope: str, limiter: SyncLimiter) -> None:
    shared = SlidingWindow(name="shared", limit=5, window_seconds=60, scope=scope)  # type: ignore[arg-type]
    error = refusal(limiter, {"shared": "blocked"}, limits=shared)
    assert error.field == "limits.shared"
    assert scope in error.problem


@pytest.mark.parametrize("scope", ["subject", "caller"])
def test_an_override_reaches_exactly_its_subject_resource_and_tenant(scope: str, limiter: SyncLimiter) -> None:
    limit = SlidingWindow(name="burst", limit=5, window_seconds=60, scope=scope)  # type: ignore[arg-type]
    override(limiter, {"burst": {"limit": 9}}, limits=limit)
    assert limiter.check("r", "s", limits=limit).limit == 9
    assert limiter.check("r", "t", limits=limit).limit == 5
    assert limiter.check("q", "s", limits=limit).limit == 5
    assert limiter.check("r", "s", limits=limit, tenant="other").limit == 5


def test_an_override_never_reaches_the_operators_limits(limiter: SyncLimiter) -> None:
    override(limiter, {"burst": {"limit": 9}})
    limits = {place: limiter.check_entries([Entry(BURST, "r", "s", 1, place)]).limit for place in Layer}
    assert limits[Layer.OPERATOR] == 5
    assert limits[Layer.TENANT] == limits[Layer.POLICY] == 9


def test_an_override_of_the_exact_resource_takes_precedence_over_one_for_any_resource(limiter: SyncLimiter) -> None:
    override(limiter, {"burst": {"limit": 9}}, resource="*")
    assert limiter.check("r", "s", limits=BURST).limit == 9
    override(limiter, {"burst": {"limit": 7}}, resource="r")
    assert limiter.check("r", "s", limits=BURST).limit == 7
    assert limiter.check("q", "s", limits=BURST).limit == 9
    limiter.delete_override("r", "s")
    assert limiter.check("r", "s", limits=BURST).limit == 9


def test_a_limit_that_the_exact_override_does_not_name_has_the_numbers_of_the_other(limiter: SyncLimiter) -> None:
    limits = Limits.parse("burst=5/minute; daily=100/day")
    override(limiter, {"burst": {"limit": 9}, "daily": {"limit": 900}}, limits=limits, resource="*")
    override(limiter, {"burst": {"limit": 7}}, limits=limits, resource="r")
    decision = limiter.check("r", "s", limits=limits)
    assert {name: state.limit for name, state in decision.limits.items()} == {"burst": 7, "daily": 900}


def test_an_override_is_ignored_once_the_algorithm_has_changed(limiter: SyncLimiter) -> None:
    override(limiter, {"burst": {"limit": 9}})
    changed = FixedWindow(name="burst", limit=5, window_seconds=60)
    assert limiter.check("r", "s", limits=changed).limit == 5
    assert limiter.check("r", "s", limits=BURST).limit == 9


def test_an_override_is_in_force_from_the_next_check_on(limiter: SyncLimiter) -> None:
    limiter.check("r", "s", limits=BURST, cost=5)
    assert not limiter.check("r", "s", limits=BURST).allowed
    override(limiter, {"burst": {"limit": 8}})
    decision = limiter.check("r", "s", limits=BURST)
    assert (decision.allowed, decision.remaining) == (True, 2)
    limiter.delete_override("r", "s")
    denied = limiter.check("r", "s", limits=BURST)
    assert (denied.allowed, denied.limit, denied.remaining, denied.retry_after_ms) == (False, 5, 0, 60_000)


# -- when it ends


def test_an_override_expires_by_itself(limiter: SyncLimiter, clock: ManualClock) -> None:
    made = override(limiter, {"burst": "blocked"}, ttl_seconds=10.5)
    assert made.expires_at == 1_700_006_410.5
    clock.advance_us(10_499_999)
    assert not limiter.check("r", "s", limits=BURST).allowed
    assert limiter.get_override("r", "s") == made
    clock.advance_us(1)
    assert limiter.check("r", "s", limits=BURST).allowed
    assert limiter.get_override("r", "s") is None
    assert limiter.list_overrides().overrides == []
    assert not limiter.delete_override("r", "s")


def test_after_an_exact_override_expires_the_one_for_any_resource_applies(
    limiter: SyncLimiter, clock: ManualClock
) -> None:
    override(limiter, {"burst": {"limit": 9}}, resource="*", ttl_seconds=100)
    override(limiter, {"burst": {"limit": 7}}, ttl_seconds=10)
    clock.advance_us(10_000_000)
    assert limiter.check("r", "s", limits=BURST).limit == 9


def test_setting_an_override_again_replaces_it(limiter: SyncLimiter) -> None:
    limits = Limits.parse("burst=5/minute; daily=100/day")
    override(limiter, {"burst": {"limit": 9}}, limits=limits)
    override(limiter, {"daily": {"limit": 900}}, limits=limits)
    decision = limiter.check("r", "s", limits=limits)
    assert {name: state.limit for name, state in decision.limits.items()} == {"burst": 5, "daily": 900}


def test_waits_ignore_that_an_override_will_expire(limiter: SyncLimiter) -> None:
    override(limiter, {"burst": "blocked"}, ttl_seconds=1)
    assert limiter.check("r", "s", limits=BURST).retry_after_ms is None


# -- reading and removing


def test_an_override_can_be_read_as_it_was_set(limiter: SyncLimiter) -> None:
    changes = {"burst": {"limit": 9, "window_seconds": "1.5"}}
    made = override(limiter, changes, tenant="acme")
    assert made == limiter.get_override("r", "s", tenant="acme")
    assert (made.tenant, made.resource, made.subject, made.limits) == ("acme", "r", "s", changes)
    assert limiter.get_override("*", "s", tenant="acme") is None
    assert limiter.get_override("r", "s") is None


def test_an_override_stays_as_it_was_set_when_its_arguments_change(limiter: SyncLimiter) -> None:
    changes = {"burst": {"limit": 9}}
    override(limiter, changes)
    changes["burst"]["limit"] = 1
    found = limiter.get_override("r", "s")
    assert found is not None
    assert found.limits == {"burst": {"limit": 9}}


@pytest.mark.parametrize("number", [9, "9", 9.0, Decimal(9)])
def test_an_override_takes_numbers_like_a_limit_and_is_read_as_plain_values(number: Any, limiter: SyncLimiter) -> None:
    """Every store keeps it as JSON or may."""
    made = override(limiter, {"burst": {"limit": number}})
    assert limiter.check("r", "s", limits=BURST).limit == 9
    assert json.loads(json.dumps(made.limits)) == made.limits


def test_deleting_returns_whether_there_was_anything(limiter: SyncLimiter) -> None:
    override(limiter, {"burst": "blocked"})
    assert not limiter.delete_override("*", "s")
    assert not limiter.delete_override("r", "t")
    assert limiter.delete_override("r", "s")
    assert not limiter.delete_override("r", "s")
    assert limiter.check("r", "s", limits=BURST).allowed


def test_clearing_removes_all_of_one_tenant_and_counts_its_subjects(limiter: SyncLimiter) -> None:
    for subject in ("s", "t"):
        for resource in ("r", "*"):
            override(limiter, {"burst": "blocked"}, subject=subject, resource=resource)
    override(limiter, {"burst": "blocked"}, tenant="other")
    assert limiter.clear_overrides() == 2
    assert limiter.clear_overrides() == 0
    assert limiter.list_overrides().overrides == []
    assert len(limiter.list_overrides(tenant="other").overrides) == 1


def test_overrides_are_listed_page_by_page(limiter: SyncLimiter, clock: ManualClock) -> None:
    subjects = [f"user:{n:02}" for n in range(25)]
    for subject in reversed(subjects):
        override(limiter, {"burst": "blocked"}, subject=subject)
    override(limiter, {"burst": "unlimited"}, subject="user:03", resource="*")
    override(limiter, {"burst": "unlimited"}, tenant="other")
    pages = []
    cursor = None
    while True:
        page = limiter.list_overrides(cursor=cursor, page=10)
        pages.append([(each.subject, each.resource) for each in page.overrides])
        cursor = page.cursor
        if cursor is None:
            break
    assert [len({subject for subject, _ in page}) for page in pages] == [10, 10, 5]
    listed = [each for page in pages for each in page]
    assert sorted(listed) == sorted([*((subject, "r") for subject in subjects), ("user:03", "*")])
    assert [subject for subject, _ in listed] == sorted(subject for subject, _ in listed)


def test_a_page_that_ends_with_the_last_subject_is_the_last(limiter: SyncLimiter) -> None:
    for subject in "abcd":
        override(limiter, {"burst": "blocked"}, subject=subject)
    first = limiter.list_overrides(page=2)
    second = limiter.list_overrides(page=2, cursor=first.cursor)
    assert [each.subject for each in second.overrides] == ["c", "d"]
    assert second.cursor is None
    assert limiter.list_overrides(tenant="unknown") == type(first)([], None)


def test_overrides_that_are_set_or_deleted_between_pages_affect_no_others(limiter: SyncLimiter) -> None:
    for subject in "bdfh":
        override(limiter, {"burst": "blocked"}, subject=subject)
    first = limiter.list_overrides(page=2)
    limiter.delete_override("r", "d")
    for subject in "ag":
        override(limiter, {"burst": "blocked"}, subject=subject)
    rest = limiter.list_overrides(page=10, cursor=first.cursor)
    assert [each.subject for each in rest.overrides] == ["f", "g", "h"]


def test_subjects_of_any_bytes_are_listed(limiter: SyncLimiter) -> None:
    for subject in ("", b"\xff\xfe", "é", "\0"):
        limiter.set_override("r", subject, {"burst": "blocked"}, limits=BURST, ttl_seconds=60)
    cursor, found = None, 0
    for _ in range(4):
        page = limiter.list_overrides(page=1, cursor=cursor)
        cursor, found = page.cursor, found + len(page.overrides)
    assert (found, cursor) == (4, None)


@pytest.mark.parametrize("cursor", ["x", "é", 5, b"x"])
def test_a_cursor_that_no_list_returned_is_refused(cursor: Any, limiter: SyncLimiter) -> None:
    with pytest.raises(InvalidInput) as refused:
        limiter.list_overrides(cursor=cursor)
    assert refused.value.field == "cursor"


@pytest.mark.parametrize("page", [0, -1, 1_001, 1.5, "5", None, True])
def test_a_page_has_from_1_to_1000_subjects(page: Any, limiter: SyncLimiter) -> None:
    limiter.list_overrides(page=1)
    limiter.list_overrides(page=1_000)
    with pytest.raises(InvalidInput) as refused:
        limiter.list_overrides(page=page)
    assert refused.value.field == "page"


def test_a_subject_has_at_most_64_overrides(limiter: SyncLimiter, clock: ManualClock) -> None:
    for n in range(64):
        override(limiter, {"burst": "blocked"}, resource=f"r{n}", ttl_seconds=60)
    override(limiter, {"burst": {"limit": 9}}, resource="r0", ttl_seconds=60)  # replacing is no more
    error = refusal(limiter, {"burst": "blocked"}, resource="*")
    assert error.field == "resource"
    assert "64" in error.problem
    override(limiter, {"burst": "blocked"}, subject="another")
    clock.advance_us(60_000_000)
    override(limiter, {"burst": "blocked"}, resource="*")
