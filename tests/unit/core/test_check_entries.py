"""The general form of a check: entries that are decided together, each with a limit, resource, subject and cost."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from limitforge import Decision, Entry, FixedWindow, InvalidInput, Limit, SlidingWindow, SyncLimiter
from limitforge.core.keys import Layer

MAX_COST = 2**52 - 1


def window(name: str, limit: int = 10, **fields: Any) -> Limit:
    return FixedWindow(name=name, limit=limit, window_seconds=60, **fields)


def remaining(decision: Decision) -> dict[str, int | None]:
    return {name: state.remaining for name, state in decision.limits.items()}


# -- merging


def test_entries_of_one_limit_and_key_are_one_with_their_costs_added(limiter: SyncLimiter) -> None:
    limit = window("a")
    decision = limiter.check_entries([Entry(limit, "r", "s", 3), Entry(limit, "r", "s", 4)])
    assert remaining(decision) == {"a": 3}
    assert limiter.check("r", "s", limits=limit, cost=0).remaining == 3


def test_merged_entries_are_allowed_or_denied_together(limiter: SyncLimiter) -> None:
    limit = window("a")
    decision = limiter.check_entries([Entry(limit, "r", "s", 6), Entry(limit, "r", "s", 6)])
    assert (decision.allowed, decision.retry_after_ms, decision.remaining) == (False, None, 10)


def test_entries_are_merged_if_they_differ_only_in_what_the_scope_ignores(limiter: SyncLimiter) -> None:
    per_tenant = window("t", scope="tenant")
    caller = window("c", scope="caller")
    decision = limiter.check_entries(
        [
            Entry(per_tenant, "r1", "s1"),
            Entry(per_tenant, "r2", "s2"),
            Entry(caller, "r1", "s1"),
            Entry(caller, "r2", "s1"),
        ]
    )
    assert remaining(decision) == {"t": 8, "c": 8}


def test_merged_entries_of_a_limit_that_counts_requests_count_as_one(limiter: SyncLimiter) -> None:
    limit = window("a", counts="requests")
    assert remaining(limiter.check_entries([Entry(limit, "r", "s", 3), Entry(limit, "r", "s", 4)])) == {"a": 9}
    assert remaining(limiter.check_entries([Entry(limit, "r", "s", 0), Entry(limit, "r", "s", 5)])) == {"a": 8}
    assert remaining(limiter.check_entries([Entry(limit, "r", "s", 0), Entry(limit, "r", "s", 0)])) == {"a": 8}


def test_different_limits_with_one_key_are_refused(limiter: SyncLimiter) -> None:
    entries = [Entry(window("a", 10), "r", "s"), Entry(window("a", 11), "r", "s")]
    with pytest.raises(InvalidInput) as refused:
        limiter.check_entries(entries)
    assert refused.value.field == "entries[1].limit"
    assert limiter.check("r", "s", limits=window("a"), cost=0).remaining == 10


def test_limits_of_one_name_and_different_algorithms_are_apart(limiter: SyncLimiter) -> None:
    log = Entry(SlidingWindow(name="a", limit=10, window_seconds=60), "r", "s", 2)
    decision = limiter.check_entries([Entry(window("a"), "r", "s", 1), log])
    assert decision.allowed
    assert sorted(state.remaining or 0 for state in decision.limits.values()) == [8, 9]


def test_entries_with_keys_of_their_own_are_decided_together(limiter: SyncLimiter) -> None:
    limit = window("a")
    entries = [Entry(limit, "r", "one", 2), Entry(limit, "r", "two", 11)]
    assert not limiter.check_entries(entries).allowed
    assert limiter.check("r", "one", limits=limit, cost=0).remaining == 10


# -- names


def test_a_name_that_only_one_limit_has_is_reported_bare(limiter: SyncLimiter) -> None:
    entries = [Entry(window(layer.name), "r", "s", 1, layer) for layer in (Layer.OPERATOR, Layer.TENANT, Layer.POLICY)]
    assert list(limiter.check_entries(entries).limits) == ["OPERATOR", "TENANT", "POLICY"]


def test_a_name_in_several_layers_is_reported_with_its_layer(limiter: SyncLimiter) -> None:
    """All limits that share it: a reader of `burst` must not have to know which plan came first."""
    entries = [
        Entry(window("burst", 10), "r", "s", 1, Layer.OPERATOR),
        Entry(window("burst", 20), "r", "s", 1, Layer.TENANT),
        Entry(window("burst", 30), "r", "s", 1, Layer.POLICY),
        Entry(window("daily", 40), "r", "s", 1, Layer.POLICY),
    ]
    decision = limiter.check_entries(entries)
    assert remaining(decision) == {"operator:burst": 9, "tenant:burst": 19, "policy:burst": 29, "daily": 39}
    assert decision.binding == "operator:burst"


def test_equal_names_in_joined_plans_count_apart(limiter: SyncLimiter) -> None:
    limit = window("burst", 1)
    for layer in (Layer.OPERATOR, Layer.TENANT, Layer.POLICY):
        assert limiter.check_entries([Entry(limit, "r", "s", 1, layer)]).allowed
        assert not limiter.check_entries([Entry(limit, "r", "s", 1, layer)]).allowed


def test_several_buckets_of_one_limit_are_all_reported(limiter: SyncLimiter) -> None:
    limit = window("burst")
    decision = limiter.check_entries([Entry(limit, "r", subject, cost) for cost, subject in enumerate("abc", start=1)])
    assert [state.remaining for state in decision.limits.values()] == [9, 8, 7]
    assert len(set(decision.limits)) == 3
    assert all("burst" in name for name in decision.limits)
    assert decision.binding == list(decision.limits)[2]


# -- costs


def test_costs_are_given_by_name_and_the_others_take_the_cost(limiter: SyncLimiter) -> None:
    limits = [window("requests", 100, counts="requests"), window("elements", 100), window("bytes", 100)]
    decision = limiter.check("r", "s", limits=limits, cost=2, costs={"elements": 50, "requests": 7})
    assert remaining(decision) == {"requests": 99, "elements": 50, "bytes": 98}


def test_a_cost_of_0_by_name_takes_nothing_from_that_limit(limiter: SyncLimiter) -> None:
    limits = [window("full", 0), window("other")]
    decision = limiter.check("r", "s", limits=limits, costs={"full": 0})
    assert decision.allowed
    assert remaining(decision) == {"full": 0, "other": 9}


def test_a_limit_that_counts_requests_takes_1_for_any_cost_above_0(limiter: SyncLimiter) -> None:
    limit = window("a", counts="requests")
    assert limiter.check("r", "s", limits=limit, cost=MAX_COST).remaining == 9
    assert limiter.check("r", "s", limits=limit, cost=0).remaining == 9


def test_a_cost_for_an_unknown_limit_is_refused(limiter: SyncLimiter) -> None:
    with pytest.raises(InvalidInput) as refused:
        limiter.check("r", "s", limits=[window("a"), window("b")], costs={"c": 1})
    assert refused.value.field == "costs.c"
    assert "a, b" in refused.value.problem


@pytest.mark.parametrize("cost", [-1, MAX_COST + 1, pytest.param(10**5_000, id="huge"), 1.0, "1", True, None])
def test_a_cost_is_an_integer_from_0_to_below_2_to_the_52(cost: Any, limiter: SyncLimiter) -> None:
    limit = window("a")
    wrong: list[tuple[str, dict[str, Any]]] = [("cost", {"cost": cost}), ("costs.a", {"costs": {"a": cost}})]
    for field, options in wrong:
        with pytest.raises(InvalidInput) as refused:
            limiter.check("r", "s", limits=limit, **options)
        assert refused.value.field == field
    with pytest.raises(InvalidInput) as refused:
        limiter.check_entries([Entry(limit, "r", "s"), Entry(limit, "r", "s", cost)])
    assert refused.value.field == "entries[1].cost"


def test_the_largest_cost_is_a_cost(limiter: SyncLimiter) -> None:
    decision = limiter.check("r", "s", limits=[window("a", MAX_COST)], cost=MAX_COST)
    assert (decision.allowed, decision.remaining) == (True, 0)


def test_costs_of_one_bucket_may_not_add_up_to_more_than_one_cost(limiter: SyncLimiter) -> None:
    limit = window("a", MAX_COST)
    assert limiter.check_entries([Entry(limit, "r", "s", MAX_COST - 1), Entry(limit, "r", "s", 1)]).allowed
    with pytest.raises(InvalidInput) as refused:
        limiter.check_entries([Entry(limit, "r", "s", MAX_COST), Entry(limit, "r", "s", 1)])
    assert refused.value.field == "entries[1].cost"
    assert str(MAX_COST) in refused.value.problem


# -- what is there


def test_a_limit_that_is_off_is_ignored(limiter: SyncLimiter) -> None:
    off = window("off", 0, mode="off")
    on = window("on")
    assert list(limiter.check("r", "s", limits=[off, on]).limits) == ["on"]
    assert list(limiter.check_entries([Entry(off, "r", "s"), Entry(on, "r", "s")]).limits) == ["on"]
    alone = limiter.check_entries([Entry(off, "r", "s")])
    assert (alone.allowed, alone.binding, alone.limits) == (True, None, {})


def test_without_any_limit_everything_is_allowed(limiter: SyncLimiter) -> None:
    for decision in (limiter.check("r", "s", limits=[]), limiter.check_entries([])):
        assert (decision.allowed, decision.limits, decision.binding, decision.retry_after_ms) == (True, {}, None, 0)


def test_a_check_has_at_most_32_buckets(limiter: SyncLimiter) -> None:
    limit = window("a")
    assert len(limiter.check_entries([Entry(limit, "r", str(n)) for n in range(32)]).limits) == 32
    with pytest.raises(InvalidInput, match="32"):
        limiter.check_entries([Entry(limit, "r", str(n)) for n in range(33)])
    assert limiter.check_entries([Entry(limit, "r2", "s", 0) for _ in range(33)]).allowed


@pytest.mark.parametrize("entry", [None, "5/minute", window("a"), ("a", "b", "c")])
def test_an_invalid_entry_is_refused(entry: Any, limiter: SyncLimiter) -> None:
    with pytest.raises(InvalidInput) as refused:
        limiter.check_entries([entry])
    assert refused.value.field == "entries[0]"


@pytest.mark.parametrize("limit", [None, "5/minute", 5])
def test_an_entry_without_a_limit_is_refused(limit: Any, limiter: SyncLimiter) -> None:
    with pytest.raises(InvalidInput) as refused:
        limiter.check_entries([Entry(limit, "r", "s")])
    assert refused.value.field.startswith("entries[0]")


@pytest.mark.parametrize("layer", ["x", None, 5])
def test_an_entry_in_an_unknown_layer_is_refused(layer: Any, limiter: SyncLimiter) -> None:
    with pytest.raises(InvalidInput) as refused:
        limiter.check_entries([Entry(window("a"), "r", "s", 1, layer)])
    assert refused.value.field.startswith("entries[0]")


def test_an_entry_names_its_wrong_part(limiter: SyncLimiter) -> None:
    for field in ("resource", "subject"):
        entry = msgspec.structs.replace(Entry(window("a"), "r", "s"), **{field: "x" * 513})
        with pytest.raises(InvalidInput) as refused:
            limiter.check_entries([Entry(window("a"), "r", "s"), entry])
        assert refused.value.field == f"entries[1].{field}"


def test_two_limits_that_are_equal_in_value_are_the_same_limit(limiter: SyncLimiter) -> None:
    one = window("a")
    assert limiter.check_entries([Entry(one, "r", "s"), Entry(replace(one), "r", "s")]).remaining == 8
