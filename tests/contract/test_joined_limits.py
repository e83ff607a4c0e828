"""Limits of three layers that decide together: all or nothing, each in its own bucket, on every store."""

from typing import Any

import pytest

from limitforge import (
    Concurrency,
    Decision,
    FixedWindow,
    InvalidInput,
    LeakyBucket,
    Limit,
    Limits,
    ManualClock,
    Quota,
    Request,
    SlidingWindow,
    SlidingWindowCounter,
    SyncLimiter,
    TokenBucket,
)
from limitforge.core.join import PlanPart, join_limits
from limitforge.core.keys import Layer
from limitforge.core.limits import Mode
from tests.contract.conftest import on_few_stores

PLACES = (Layer.OPERATOR, Layer.TENANT, Layer.POLICY)
NAMES = ("operator:a", "tenant:a", "policy:a")

# Each in another slot of a cluster: the operator's for all tenants, the tenant's for all its subjects, the policy's for
# one subject.
SCOPES = ("global", "tenant", "subject")


def window(name: str, limit: int = 10, **fields: Any) -> Limit:
    return FixedWindow(name=name, limit=limit, window_seconds=60, **fields)


def three(*sizes: int, name: str = "a", scopes: tuple[str, ...] = SCOPES, **fields: Any) -> Limits:
    """Return windows of one name in all three layers."""
    return join_limits(
        *(
            PlanPart(Limits(window(name, size, scope=scope, **fields)), place)
            for size, scope, place in zip(sizes, scopes, PLACES, strict=True)
        )
    )


def left(limiter: SyncLimiter, limits: Limits, subject: str = "s", **options: Any) -> list[int | None]:
    decision = limiter.check("r", subject, limits=limits, cost=0, **options)
    return [state.remaining for state in decision.limits.values()]


@on_few_stores
@pytest.mark.parametrize("scopes", [SCOPES, ("subject",) * 3, ("resource", "caller", "subject")])
def test_a_layer_without_room_denies_and_takes_nothing_from_the_others(
    limiter: SyncLimiter, scopes: tuple[str, ...]
) -> None:
    for short in range(3):
        sizes = [10, 10, 10]
        sizes[short] = 3
        limits = three(*sizes, scopes=scopes)
        assert limiter.check("r", "s", limits=limits, cost=2).allowed
        denied = limiter.check("r", "s", limits=limits, cost=2)
        assert (denied.allowed, denied.binding) == (False, NAMES[short])
        assert [state.allowed for state in denied.limits.values()] == [place != short for place in range(3)]
        assert left(limiter, limits) == [size - 2 for size in sizes]
        assert limiter.check("r", "s", limits=limits, cost=1).allowed
        assert left(limiter, limits) == [size - 3 for size in sizes]
        limiter.reset("r", "s", limits=limits)


def test_equal_names_are_reported_with_their_layer_and_unique_ones_without(limiter: SyncLimiter) -> None:
    limits = join_limits(
        PlanPart(Limits(window("a", 10, scope="global"), window("above", 10, scope="tenant")), Layer.OPERATOR),
        PlanPart(Limits(window("a", 20)), Layer.TENANT),
        PlanPart(Limits(window("b", 30)), Layer.POLICY),
    )
    decision = limiter.check("r", "s", limits=limits)
    assert {name: state.remaining for name, state in decision.limits.items()} == {
        "operator:a": 9,
        "above": 9,
        "tenant:a": 19,
        "b": 29,
    }
    assert decision.binding == "operator:a"


def test_limits_of_one_name_in_several_layers_count_apart(limiter: SyncLimiter) -> None:
    alone = [
        join_limits(PlanPart(Limits(window("a", 10, scope=scope)), place))
        for scope, place in zip(SCOPES, PLACES, strict=True)
    ]
    for times, limits in enumerate(alone):
        for _ in range(times):
            limiter.check("r", "s", limits=limits)
    together = three(10, 10, 10)
    assert left(limiter, together) == [10, 9, 8]
    limiter.check("r", "s", limits=together)
    assert [left(limiter, limits) for limits in alone] == [[9], [8], [7]]


def test_a_wide_scope_is_shared_by_everyone_in_it(limiter: SyncLimiter) -> None:
    limits = three(10, 10, 10)
    limiter.check("r", "s", limits=limits, tenant="acme")
    limiter.check("r", "another", limits=limits, tenant="acme")
    limiter.check("r", "s", limits=limits, tenant="globex")
    assert left(limiter, limits, tenant="acme") == [7, 8, 9]
    assert left(limiter, limits, tenant="globex") == [7, 9, 9]
    assert left(limiter, limits, "new", tenant="globex") == [7, 9, 10]


def test_the_longest_wait_of_all_layers_is_exactly_enough(limiter: SyncLimiter, clock: ManualClock) -> None:
    limits = join_limits(
        PlanPart(
            Limits(TokenBucket(name="a", bucket_capacity=1, refill_rate_per_sec=4, scope="global")), Layer.OPERATOR
        ),
        PlanPart(
            Limits(TokenBucket(name="a", bucket_capacity=1, refill_rate_per_sec=0.5, scope="tenant")), Layer.TENANT
        ),
        PlanPart(Limits(TokenBucket(name="a", bucket_capacity=1, refill_rate_per_sec=2)), Layer.POLICY),
    )
    assert limiter.check("r", "s", limits=limits).allowed
    denied = limiter.check("r", "s", limits=limits)
    assert (denied.allowed, denied.binding, denied.retry_after_ms) == (False, "tenant:a", 2_000)
    clock.advance_us(2_000_000 - 1)
    assert not limiter.check("r", "s", limits=limits).allowed
    clock.advance_us(1)
    assert limiter.check("r", "s", limits=limits).allowed


def test_a_wait_that_never_helps_in_one_layer_never_helps(limiter: SyncLimiter) -> None:
    denied = limiter.check("r", "s", limits=three(10, 0, 1), cost=1)
    assert (denied.allowed, denied.binding, denied.retry_after_ms) == (False, "tenant:a", None)


ALGORITHMS: list[tuple[Limit, ...]] = [
    tuple(TokenBucket(name="x", bucket_capacity=5, refill_rate_per_sec=1, scope=scope) for scope in SCOPES),  # type: ignore[arg-type]
    tuple(LeakyBucket(name="x", bucket_capacity=5, leak_rate_per_sec=1, scope=scope) for scope in SCOPES),  # type: ignore[arg-type]
    tuple(FixedWindow(name="x", limit=5, window_seconds=60, spread=True, scope=scope) for scope in SCOPES),  # type: ignore[arg-type]
    tuple(SlidingWindow(name="x", limit=5, window_seconds=60, scope=scope) for scope in SCOPES),  # type: ignore[arg-type]
    tuple(SlidingWindowCounter(name="x", limit=5, window_seconds=60, scope=scope) for scope in SCOPES),  # type: ignore[arg-type]
    tuple(Quota(name="x", limit=5, period="day", scope=scope) for scope in SCOPES),  # type: ignore[arg-type]
]


@on_few_stores
@pytest.mark.parametrize("kinds", ALGORITHMS, ids=lambda kinds: kinds[0].algorithm)
def test_every_algorithm_counts_in_its_layer(limiter: SyncLimiter, kinds: tuple[Limit, ...]) -> None:
    limits = join_limits(*(PlanPart(Limits(limit), place) for limit, place in zip(kinds, PLACES, strict=True)))
    costs = {"operator:x": 1, "tenant:x": 2, "policy:x": 3}
    assert limiter.check("r", "s", limits=limits, costs=costs).allowed
    denied = limiter.check("r", "s", limits=limits, costs=costs)
    assert (denied.allowed, denied.binding) == (False, "policy:x")
    assert left(limiter, limits) == [4, 3, 2]


# -- modes


def test_a_monitored_layer_denies_nothing_and_takes_only_what_it_has_room_for(limiter: SyncLimiter) -> None:
    for monitored in range(3):
        sizes = [5, 5, 5]
        sizes[monitored] = 1
        parts = [
            PlanPart(Limits(window("a", size, scope=scope)), place, Mode.MONITOR if at == monitored else Mode.ON)
            for at, (size, scope, place) in enumerate(zip(sizes, SCOPES, PLACES, strict=True))
        ]
        limits = join_limits(*parts)
        first, second = (limiter.check("r", "s", limits=limits) for _ in range(2))
        assert (first.allowed, first.would_deny) == (True, ())
        assert (second.allowed, second.would_deny) == (True, (NAMES[monitored],))
        assert second.limits[NAMES[monitored]].monitored
        assert left(limiter, limits) == [0 if at == monitored else 3 for at in range(3)]
        limiter.reset("r", "s", limits=limits)


def test_a_layer_that_is_off_is_ignored(limiter: SyncLimiter) -> None:
    parts = [PlanPart(Limits(window("a", 1, scope=scope)), place) for scope, place in zip(SCOPES, PLACES, strict=True)]
    off = join_limits(parts[0]._replace(mode=Mode.OFF), parts[1], parts[2]._replace(mode=Mode.OFF))
    assert list(limiter.check("r", "s", limits=off).limits) == ["a"]
    assert left(limiter, join_limits(*parts)) == [1, 0, 1]


# -- costs


COSTS: list[tuple[dict[str, int], list[int]]] = [
    ({}, [2, 2, 2, 2]),
    ({"a": 3}, [3, 3, 3, 2]),
    ({"tenant:a": 3}, [2, 3, 2, 2]),
    ({"a": 3, "policy:a": 4}, [3, 3, 4, 2]),
    ({"a": 0}, [0, 0, 0, 2]),
    ({"b": 5}, [2, 2, 2, 5]),
    ({"policy:b": 5, "operator:a": 0}, [0, 2, 2, 5]),
]


def test_costs_go_by_name_and_by_name_with_layer(limiter: SyncLimiter) -> None:
    limits = with_another()
    for costs, taken in COSTS:
        assert limiter.check("r", "s", limits=limits, cost=2, costs=costs).allowed
        assert left(limiter, limits) == [10 - cost for cost in taken]
        limiter.reset("r", "s", limits=limits)


def with_another() -> Limits:
    """Return windows of one name in all layers, and one more in the policy."""
    return join_limits(
        PlanPart(Limits(window("a", scope="global")), Layer.OPERATOR),
        PlanPart(Limits(window("a", scope="tenant")), Layer.TENANT),
        PlanPart(Limits(window("a"), window("b")), Layer.POLICY),
    )


def test_a_cost_for_a_name_that_no_layer_has_is_refused_and_takes_nothing(limiter: SyncLimiter) -> None:
    limits = three(10, 10, 10)
    for name in ("b", "policy:b", "shadow:a", ":a", "Operator:a"):
        with pytest.raises(InvalidInput) as refused:
            limiter.check("r", "s", limits=limits, costs={name: 1})
        assert refused.value.field == f"costs.{name}"
    assert left(limiter, limits) == [10, 10, 10]


# -- slots


def test_one_lease_holds_the_slots_of_all_layers(limiter: SyncLimiter, clock: ManualClock) -> None:
    limits = join_limits(
        *(
            PlanPart(Limits(Concurrency(name="slots", max_concurrent=size, lease_ttl_seconds=60, scope=scope)), place)  # type: ignore[arg-type]
            for size, scope, place in zip((3, 2, 1), SCOPES, PLACES, strict=True)
        )
    )
    held = limiter.check("r", "s", limits=limits)
    assert held.allowed
    assert not limiter.check("r", "s", limits=limits).allowed
    assert left(limiter, limits) == [2, 1, 0]
    another = limiter.check("r", "another", limits=limits)
    assert another.allowed
    assert not limiter.check("r", "a third", limits=limits).allowed
    clock.advance_us(30_000_000)
    assert limiter.renew(held.lease_id or "")
    clock.advance_us(30_000_000)  # the end of the other window
    assert left(limiter, limits) == [2, 1, 0]
    limiter.release(held.lease_id or "")
    assert left(limiter, limits) == [3, 2, 1]


# -- reset


def test_a_reset_deletes_the_counts_of_all_layers(limiter: SyncLimiter) -> None:
    limits = three(10, 10, 10)
    limiter.check("r", "s", limits=limits, cost=4)
    limiter.check("r", "another", limits=limits, cost=1)
    limiter.reset("r", "s", limits=limits)
    assert left(limiter, limits) == [10, 10, 10]
    assert left(limiter, limits, "another") == [10, 10, 9]


def test_a_reset_of_one_layer_leaves_the_others(limiter: SyncLimiter) -> None:
    limits = three(10, 10, 10)
    limiter.check("r", "s", limits=limits, cost=4)
    limiter.reset("r", "s", limits=join_limits(PlanPart(Limits(window("a", 10, scope="tenant")), Layer.TENANT)))
    assert left(limiter, limits) == [6, 10, 6]


# -- reserving


SETTLED: list[tuple[int, dict[str, int], list[int]]] = [
    (2, {}, [2, 2, 2]),
    (0, {}, [0, 0, 0]),
    (8, {}, [8, 8, 8]),
    (12, {}, [12, 12, 12]),
    (2, {"tenant:a": 7}, [2, 7, 2]),
    (2, {"a": 1, "policy:a": 6}, [1, 1, 6]),
]


def test_a_reservation_is_settled_in_every_layer(limiter: SyncLimiter) -> None:
    limits = three(10, 10, 10)
    for cost, costs, taken in SETTLED:
        held = limiter.reserve("r", "s", limits=limits, cost=5)
        assert held.allowed
        assert left(limiter, limits) == [5, 5, 5]
        for _ in range(2):  # idempotent
            limiter.settle(held.reservation_id or "", cost, costs=costs)
            assert left(limiter, limits) == [max(10 - each, 0) for each in taken]
        limiter.reset("r", "s", limits=limits)


def test_a_reservation_that_one_layer_denies_holds_nothing_in_the_others(limiter: SyncLimiter) -> None:
    for short in range(3):
        sizes = [10, 10, 10]
        sizes[short] = 4
        limits = three(*sizes)
        denied = limiter.reserve("r", "s", limits=limits, cost=5)
        assert (denied.allowed, denied.binding, denied.reservation_id) == (False, NAMES[short], None)
        assert left(limiter, limits) == sizes


@pytest.mark.parametrize(("on_lapse", "remaining"), [("keep", 5), ("refund", 10)])
def test_an_unsettled_reservation_lapses_in_every_layer(
    limiter: SyncLimiter, clock: ManualClock, on_lapse: str, remaining: int
) -> None:
    limits = three(10, 10, 10)
    limiter.reserve("r", "s", limits=limits, cost=5, ttl_seconds=5, on_lapse=on_lapse)
    clock.advance_us(5_000_000)
    limiter.check("r", "s", limits=limits, cost=0)
    limiter.check("r", "s", limits=limits, costs={"a": 1})
    assert left(limiter, limits) == 3 * [remaining - 1]


# -- changes while it counts


def test_another_plan_in_the_same_layer_keeps_the_count(limiter: SyncLimiter) -> None:
    limiter.check("r", "s", limits=three(10, 10, 10), cost=4)
    assert left(limiter, three(20, 5, 3)) == [16, 1, 0]
    moved = join_limits(
        PlanPart(Limits(TokenBucket(name="a", bucket_capacity=10, refill_rate_per_sec=1)), Layer.POLICY)
    )
    assert left(limiter, moved) == [10]  # another algorithm has another bucket


def test_an_override_reaches_all_layers_but_the_operators(limiter: SyncLimiter) -> None:
    limits = three(10, 10, 10, scopes=("subject", "caller", "subject"))
    limiter.check("r", "s", limits=limits, cost=4)
    limiter.set_override("r", "s", {"a": {"limit": 50}}, limits=window("a"), ttl_seconds=60)
    assert left(limiter, limits) == [6, 46, 46]
    limiter.delete_override("r", "s")
    assert left(limiter, limits) == [6, 6, 6]


# -- batches, shares, shadows


def test_checks_of_a_batch_see_what_the_earlier_ones_took_in_every_layer(limiter: SyncLimiter) -> None:
    limits = three(10, 7, 10, scopes=("subject",) * 3)
    answers = limiter.check_many(
        [Request(resource="r", subject="s", limits=limits, cost=cost) for cost in (3, 3, 3, 1)]
    )
    assert [answer.allowed for answer in answers if isinstance(answer, Decision)] == [True, True, False, True]
    assert left(limiter, limits) == [3, 0, 3]


def test_a_priority_has_its_share_in_every_layer_that_gives_one(limiter: SyncLimiter) -> None:
    limits = join_limits(
        PlanPart(Limits(window("a", 10, scope="global", shares={"P3": 50})), Layer.OPERATOR),
        PlanPart(Limits(window("a", 10, scope="tenant")), Layer.TENANT),
        PlanPart(Limits(window("a", 10, shares={"P3": 80})), Layer.POLICY),
    )
    assert left(limiter, limits, priority="P3") == [5, 10, 8]
    denied = limiter.check("r", "s", limits=limits, cost=6, priority="P3")
    assert (denied.allowed, denied.binding) == (False, "operator:a")
    assert limiter.check("r", "s", limits=limits, cost=6).allowed


def test_a_shadow_plan_beside_joined_limits_has_buckets_of_its_own(limiter: SyncLimiter) -> None:
    limits, shadow = three(10, 10, 10), window("a", 1)
    first, second = (limiter.check("r", "s", limits=limits, shadow=shadow) for _ in range(2))
    assert first.shadow is not None
    assert second.shadow is not None
    assert (first.allowed, first.shadow.allowed) == (True, True)
    assert (second.allowed, second.shadow.allowed) == (True, False)
    assert left(limiter, limits) == [8, 8, 8]
