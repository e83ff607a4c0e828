"""Joined limits: their layers, the names under which they are reported, and their modes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitforge import (
    Concurrency,
    Decision,
    Entry,
    FixedWindow,
    InvalidInput,
    InvalidLimit,
    Layer,
    Limit,
    Limits,
    Quota,
    Request,
    SyncLimiter,
)
from limitforge.core.check import Check, build_check, build_check_from_entries
from limitforge.core.join import PlanPart, join_limits
from limitforge.core.keys import Keys, layer_of
from limitforge.core.limits import Mode
from limitforge.core.plan import weakest_mode
from tests.contract.strategies import limits as any_limit

KEYS = Keys("lf", {"spread": 4})
LAYERS = (Layer.OPERATOR, Layer.TENANT, Layer.POLICY)


def window(name: str, limit: int = 10, **fields: Any) -> Limit:
    return FixedWindow(name=name, limit=limit, window_seconds=60, **fields)


def in_all_layers(*names: str) -> list[PlanPart]:
    """Return limits of 10, 20 and 30 with these names in the three layers."""
    return [
        PlanPart(Limits(*(window(name, 10 * number) for name in names)), layer)
        for number, layer in enumerate(LAYERS, start=1)
    ]


def remaining(decision: Decision) -> dict[str, int | None]:
    return {name: state.remaining for name, state in decision.limits.items()}


def peek(limiter: SyncLimiter, limits: Limits) -> dict[str, int | None]:
    return remaining(limiter.check("r", "s", limits=limits, cost=0))


def check_for(limits: Limits, *, cost: int = 1, costs: Any = None, priority: str = "P0", **options: Any) -> Check:
    return build_check(KEYS, limits, "r", "s", cost, costs, options.pop("tenant", "acme"), priority, **options)


def costs_of(limits: Limits, costs: Any, cost: int = 1) -> dict[str, int]:
    check = check_for(limits, cost=cost, costs=costs)
    return dict(zip(check.names, (debit[2] for debit in check.debits), strict=True))


# -- decisions


def test_joined_plans_decide_together(limiter: SyncLimiter) -> None:
    limits = join_limits(
        PlanPart(Limits(window("a", 2)), Layer.OPERATOR), PlanPart(Limits(window("b", 1)), Layer.TENANT)
    )
    first, second = (limiter.check("r", "s", limits=limits) for _ in range(2))
    assert (first.allowed, second.allowed, second.binding) == (True, False, "b")
    assert remaining(second) == {"a": 1, "b": 0}


def test_each_limit_is_counted_in_the_layer_of_its_part() -> None:
    check = check_for(join_limits(*in_all_layers("burst")))
    assert [key for _, key, *_ in check.debits] == [
        "lf:{acme}:so:1:r:1:s:burst:f60",
        "lf:{acme}:st:1:r:1:s:burst:f60",
        "lf:{acme}:sp:1:r:1:s:burst:f60",
    ]


def test_scopes_and_layers_that_alternate_are_kept_apart() -> None:
    mixed = Limits(*(window(scope, scope=scope) for scope in ("tenant", "subject", "caller", "resource", "global")))
    keys = [key for _, key, *_ in check_for(join_limits(*(PlanPart(mixed, layer) for layer in LAYERS))).debits]
    assert len(set(keys)) == 15
    assert [layer_of(key) for key in keys] == [layer for layer in LAYERS for _ in mixed]


def test_a_plan_counts_the_same_alone_and_joined(limiter: SyncLimiter) -> None:
    policy = Limits(window("a"))
    limiter.check("r", "s", limits=policy, cost=3)
    assert (
        peek(limiter, join_limits(PlanPart(Limits(window("b")), Layer.TENANT), PlanPart(policy, Layer.POLICY)))["a"]
        == 7
    )


def test_one_plan_may_be_in_two_layers(limiter: SyncLimiter) -> None:
    plan = Limits(window("a"))
    limits = join_limits(PlanPart(plan, Layer.TENANT), PlanPart(plan, Layer.POLICY))
    limiter.check("r", "s", limits=limits, costs={"tenant:a": 2, "policy:a": 5})
    assert peek(limiter, limits) == {"tenant:a": 8, "policy:a": 5}


def test_joining_nothing_limits_nothing(limiter: SyncLimiter) -> None:
    for limits in (join_limits(), join_limits(PlanPart(Limits(), Layer.TENANT))):
        decision = limiter.check("r", "s", limits=limits)
        assert (decision.allowed, decision.limits) == (True, {})


def test_a_part_may_be_given_as_text_or_as_a_limit(limiter: SyncLimiter) -> None:
    limits = join_limits(PlanPart("burst=10/second", Layer.TENANT), PlanPart(window("a"), Layer.POLICY))
    assert peek(limiter, limits) == {"burst": 10, "a": 10}


def test_joined_limits_can_be_checked_in_a_batch(limiter: SyncLimiter) -> None:
    limits = join_limits(*in_all_layers("a"))
    answers = limiter.check_many(Request(resource="r", subject="s", limits=limits, cost=4) for _ in range(3))
    assert [answer.allowed for answer in answers if isinstance(answer, Decision)] == [True, True, False]


def test_slots_of_all_parts_are_one_lease(limiter: SyncLimiter) -> None:
    slots = Limits(Concurrency(name="slots", max_concurrent=1, lease_ttl_seconds=60))
    limits = join_limits(PlanPart(slots, Layer.TENANT), PlanPart(slots, Layer.POLICY))
    held = limiter.check("r", "s", limits=limits)
    assert not limiter.check("r", "s", limits=limits).allowed
    limiter.release(held.lease_id or "")
    assert peek(limiter, limits) == {"tenant:slots": 1, "policy:slots": 1}


def test_a_quota_counts_in_its_layer(limiter: SyncLimiter) -> None:
    quota = Limits(Quota(name="q", limit=5, period="day"))
    limits = join_limits(PlanPart(quota, Layer.TENANT), PlanPart(quota, Layer.POLICY))
    assert remaining(limiter.check("r", "s", limits=limits, costs={"policy:q": 2})) == {"tenant:q": 4, "policy:q": 3}


# -- the same as entries


@st.composite
def parts(draw: st.DrawFn) -> list[PlanPart]:
    layers = draw(st.lists(st.sampled_from(LAYERS), unique=True))
    plans = st.lists(any_limit(), max_size=3, unique_by=lambda limit: limit.name)
    return [PlanPart(Limits(*draw(plans)), layer, draw(st.sampled_from(Mode))) for layer in layers]


def facts_of(check: Check) -> tuple[object, ...]:
    debits = [
        (
            rule.limit.name,
            rule.layer,
            rule.script_args,
            rule.enforced,
            rule.count_denied,
            rule.delays,
            rule.prepaid,
            *rest,
        )
        for rule, *rest in check.debits
    ]
    return debits, check.names, len(check.lease), check.is_dynamic, check.weight_us, check.is_hybrid


@given(parts(), st.integers(0, 5), st.sampled_from(["P0", "P2"]), st.sampled_from(["acme", "spread"]))
def test_joined_limits_are_the_same_check_as_their_entries(
    parts: list[PlanPart], cost: int, priority: str, tenant: str
) -> None:
    entries = [
        Entry(replace(limit, mode=weakest_mode(Mode(limit.mode), part.mode)), "r", "s", cost, part.layer)
        for part in parts
        for limit in Limits.of(part.limits)
    ]
    joined = check_for(join_limits(*parts), cost=cost, priority=priority, tenant=tenant)
    assert facts_of(joined) == facts_of(build_check_from_entries(KEYS, entries, tenant=tenant, priority=priority))


# -- names


def test_a_unique_name_is_reported_bare_and_another_with_its_layer(limiter: SyncLimiter) -> None:
    policy = PlanPart(Limits(window("burst", 30), window("daily", 40)), Layer.POLICY)
    decision = limiter.check("r", "s", limits=join_limits(*in_all_layers("burst")[:2], policy))
    assert remaining(decision) == {"operator:burst": 9, "tenant:burst": 19, "policy:burst": 29, "daily": 39}
    assert decision.binding == "operator:burst"


def test_limits_that_are_off_do_not_make_a_name_ambiguous(limiter: SyncLimiter) -> None:
    off = PlanPart(Limits(window("burst", mode="off")), Layer.OPERATOR)
    part_off = PlanPart(Limits(window("burst")), Layer.TENANT, Mode.OFF)
    assert peek(limiter, join_limits(off, part_off, PlanPart(Limits(window("burst", 30)), Layer.POLICY))) == {
        "burst": 30
    }


def test_a_limit_is_found_by_its_name_or_with_its_layer() -> None:
    limits = join_limits(
        PlanPart(Limits(window("a"), window("b", 1)), Layer.TENANT), PlanPart(Limits(window("b", 2)), Layer.POLICY)
    )
    assert [limits[name].size for name in ("a", "tenant:a", "tenant:b", "policy:b")] == [10, 10, 1, 2]
    for unclear in ("b", "c", "policy:a", "operator:b"):
        with pytest.raises(KeyError):
            limits[unclear]
    assert ([limit.name for limit in limits], len(limits)) == (["a", "b", "b"], 3)
    assert repr(limits).startswith("join_limits(")


# -- modes


@pytest.mark.parametrize(
    ("own", "of_part", "effective"),
    [
        ("on", Mode.ON, Mode.ON),
        ("on", Mode.MONITOR, Mode.MONITOR),
        ("monitor", Mode.ON, Mode.MONITOR),
        ("monitor", Mode.OFF, Mode.OFF),
        ("off", Mode.ON, Mode.OFF),
        ("off", Mode.MONITOR, Mode.OFF),
    ],
)
def test_a_limit_has_the_weaker_mode_of_its_own_and_its_parts(
    own: str, of_part: Mode, effective: Mode, limiter: SyncLimiter
) -> None:
    decision = limiter.check(
        "r", "s", limits=join_limits(PlanPart(Limits(window("a", 0, mode=own)), Layer.TENANT, of_part))
    )
    assert decision.allowed is (effective is not Mode.ON)
    assert decision.would_deny == (("a",) if effective is Mode.MONITOR else ())
    assert list(decision.limits) == ([] if effective is Mode.OFF else ["a"])


def test_a_monitored_part_denies_nothing_and_hinders_no_other(limiter: SyncLimiter) -> None:
    limits = join_limits(
        PlanPart(Limits(window("a", 0)), Layer.TENANT, Mode.MONITOR), PlanPart(Limits(window("b", 1)), Layer.POLICY)
    )
    first, second = (limiter.check("r", "s", limits=limits) for _ in range(2))
    assert (first.allowed, first.would_deny, first.binding) == (True, ("a",), "b")
    assert (second.allowed, second.binding) == (False, "b")


def test_a_monitored_part_counts_no_denials(limiter: SyncLimiter) -> None:
    counting = Limits(window("a", 1, count_denied=True))
    limits = join_limits(PlanPart(counting, Layer.TENANT, Mode.MONITOR), PlanPart(Limits(window("b", 0)), Layer.POLICY))
    assert not limiter.check("r", "s", limits=limits).allowed
    assert peek(limiter, limits)["a"] == 1


def test_the_same_limits_have_another_mode_in_another_join(limiter: SyncLimiter) -> None:
    plan = Limits(window("a", 0))
    modes = (Mode.ON, Mode.MONITOR, Mode.OFF, Mode.ON)
    assert [
        limiter.check("r", "s", limits=join_limits(PlanPart(plan, Layer.TENANT, mode))).allowed for mode in modes
    ] == [
        False,
        True,
        True,
        False,
    ]


# -- costs


def test_a_bare_name_that_several_have_is_a_cost_for_all_of_them() -> None:
    limits = join_limits(*in_all_layers("burst", "daily"))
    assert costs_of(limits, {"burst": 7}) == {
        "operator:burst": 7,
        "operator:daily": 1,
        "tenant:burst": 7,
        "tenant:daily": 1,
        "policy:burst": 7,
        "policy:daily": 1,
    }


def test_a_name_with_its_layer_is_a_cost_for_one() -> None:
    limits = join_limits(*in_all_layers("burst"))
    assert costs_of(limits, {"tenant:burst": 7}) == {"operator:burst": 1, "tenant:burst": 7, "policy:burst": 1}


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_with_its_layer_takes_precedence_over_the_bare_one(order: int) -> None:
    costs = dict([("burst", 5), ("policy:burst", 7)][::order])
    assert costs_of(join_limits(*in_all_layers("burst")), costs) == {
        "operator:burst": 5,
        "tenant:burst": 5,
        "policy:burst": 7,
    }


@pytest.mark.parametrize("name", ["burst", "policy:burst"])
def test_a_name_stays_known_when_other_plans_are_joined(name: str) -> None:
    """A caller that sends costs must not fail because another plan was added, removed or switched off."""
    policy = PlanPart(Limits(window("burst")), Layer.POLICY)
    for mode in Mode:
        assert (
            7
            in costs_of(join_limits(PlanPart(Limits(window("burst")), Layer.TENANT, mode), policy), {name: 7}).values()
        )
    assert costs_of(join_limits(policy), {name: 7}) == {"burst": 7}


def test_the_name_of_a_limit_that_is_off_is_known() -> None:
    off = PlanPart(Limits(window("burst")), Layer.TENANT, Mode.OFF)
    limits = join_limits(off, PlanPart(Limits(window("a"), window("b", mode="off")), Layer.POLICY))
    assert costs_of(limits, {"burst": 7, "tenant:burst": 8, "b": 9}) == {"a": 1}


@pytest.mark.parametrize("name", ["c", "policy:burst", "shadow:burst", "tenant:", "tenant:tenant:burst"])
def test_a_cost_for_an_unknown_name_is_refused(name: str) -> None:
    limits = join_limits(
        PlanPart(Limits(window("burst")), Layer.TENANT), PlanPart(Limits(window("daily")), Layer.POLICY)
    )
    with pytest.raises(InvalidInput) as refused:
        costs_of(limits, {name: 1})
    assert refused.value.field == f"costs.{name}"
    assert "burst, daily" in refused.value.problem


def test_a_limit_that_counts_requests_takes_1_of_a_cost_by_name() -> None:
    counted = PlanPart(Limits(window("a", counts="requests")), Layer.TENANT)
    limits = join_limits(counted, PlanPart(Limits(window("a")), Layer.POLICY))
    assert costs_of(limits, {"a": 7}) == {"tenant:a": 1, "policy:a": 7}


# -- overrides


def test_an_override_reaches_all_but_the_operators_limits(limiter: SyncLimiter) -> None:
    limiter.set_override("r", "s", {"burst": {"limit": 99}}, limits=window("burst"), ttl_seconds=60)
    assert peek(limiter, join_limits(*in_all_layers("burst"))) == {
        "operator:burst": 10,
        "tenant:burst": 99,
        "policy:burst": 99,
    }


def test_an_override_of_joined_limits_must_name_a_limit_that_it_can_change(limiter: SyncLimiter) -> None:
    limits = join_limits(PlanPart(Limits(window("a")), Layer.OPERATOR), PlanPart(Limits(window("b")), Layer.TENANT))
    limiter.set_override("r", "s", {"b": {"limit": 99}}, limits=limits, ttl_seconds=60)
    assert peek(limiter, limits) == {"a": 10, "b": 99}
    with pytest.raises(InvalidInput) as refused:
        limiter.set_override("r", "s", {"a": {"limit": 99}}, limits=limits, ttl_seconds=60)
    assert refused.value.field == "limits.a"


def test_an_override_of_a_name_in_several_plans_is_refused(limiter: SyncLimiter) -> None:
    """It would give all of them the numbers of one."""
    limits = join_limits(*in_all_layers("a"), PlanPart(Limits(window("b")), Layer.POLICY))
    limiter.set_override("r", "s", {"b": "blocked"}, limits=limits, ttl_seconds=60)
    with pytest.raises(InvalidInput) as refused:
        limiter.set_override("r", "s", {"a": {"limit": 99}}, limits=limits, ttl_seconds=60)
    assert refused.value.field == "limits.a"
    invalid: Any = None
    with pytest.raises(InvalidInput) as refused:
        limiter.set_override("r", "s", invalid, limits=limits, ttl_seconds=60)
    assert refused.value.field == "limits"


# -- reset, reserve and settle


def test_a_reset_forgets_the_buckets_of_all_layers_and_modes(limiter: SyncLimiter) -> None:
    limiter.check("r", "s", limits=join_limits(*in_all_layers("a")), cost=5)
    tenants = PlanPart(Limits(window("a", 20)), Layer.TENANT, Mode.MONITOR)
    limits = join_limits(
        PlanPart(Limits(window("a", 10, mode="off")), Layer.OPERATOR),
        tenants,
        PlanPart(Limits(window("a", 30)), Layer.POLICY, Mode.OFF),
    )
    limiter.reset("r", "s", limits=limits)
    assert peek(limiter, join_limits(*in_all_layers("a"))) == {"operator:a": 10, "tenant:a": 20, "policy:a": 30}


def test_a_reservation_is_settled_by_the_names_that_a_check_knows(limiter: SyncLimiter) -> None:
    limits = join_limits(*in_all_layers("burst"), PlanPart(Limits(window("daily", 40)), Layer.POLICY))
    for costs, left in (
        ({"burst": 2, "daily": 3}, [8, 18, 28, 37]),
        ({"burst": 2, "policy:burst": 4, "policy:daily": 3}, [8, 18, 26, 37]),
        ({"operator:burst": 0}, [10, 19, 29, 39]),
    ):
        held = limiter.reserve("r", "s", limits=limits, cost=5)
        limiter.settle(held.reservation_id or "", 1, costs=costs)
        assert list(peek(limiter, limits).values()) == left
        limiter.reset("r", "s", limits=limits)


@pytest.mark.parametrize("name", ["tenant:daily", "c", "shadow:burst"])
def test_settling_by_an_unknown_name_is_refused(name: str, limiter: SyncLimiter) -> None:
    limits = join_limits(*in_all_layers("burst"), PlanPart(Limits(window("daily", 40)), Layer.POLICY))
    held = limiter.reserve("r", "s", limits=limits, cost=5)
    with pytest.raises(InvalidInput) as refused:
        limiter.settle(held.reservation_id or "", 1, costs={name: 1})
    assert refused.value.field == f"costs.{name}"


# -- shadows


def test_a_shadow_plan_is_decided_beside_joined_limits(limiter: SyncLimiter) -> None:
    decision = limiter.check("r", "s", limits=join_limits(*in_all_layers("a")), shadow=window("a", 0), costs={"a": 2})
    assert decision.allowed
    assert decision.shadow is not None
    assert (decision.shadow.allowed, list(decision.shadow.limits)) == (False, ["a"])


def test_joined_limits_cannot_be_a_shadow_plan() -> None:
    limits = join_limits(*in_all_layers("a"))
    with pytest.raises(InvalidLimit, match="layers"):
        check_for(Limits(window("a")), shadow=limits)
    for layer in (Layer.OPERATOR, Layer.TENANT, Layer.SHADOW):
        with pytest.raises(InvalidLimit, match="layers"):
            limits.plan("P0", layer)


def test_limits_of_one_plan_can_be_compiled_for_any_layer() -> None:
    limits = Limits(window("a"))
    for layer in Layer:
        plan = limits.plan("P0", layer)
        assert [rule.layer for rule in plan.rules] == [layer.value]
        assert limits.plan("P0", layer) is plan
    assert limits.plan("P0") is limits.plan("P0", Layer.POLICY) is limits.plans["P0"]


# -- what can't be joined


def test_at_most_32_limits_are_joined() -> None:
    many = [PlanPart(Limits(*(window(f"{layer}{n}") for n in range(16))), layer) for layer in LAYERS]
    assert len(join_limits(*many[:2])) == 32
    with pytest.raises(InvalidLimit, match="32") as refused:
        join_limits(*many[:2], PlanPart(Limits(window("a", mode="off")), Layer.POLICY))
    assert refused.value.field == "limits"


def test_two_limits_of_one_name_and_layer_are_refused() -> None:
    one, other = Limits(window("a")), Limits(window("b"))
    assert len(join_limits(PlanPart(one, Layer.POLICY), PlanPart(other, Layer.POLICY))) == 2
    with pytest.raises(InvalidLimit, match="policy layer are called 'a'"):
        join_limits(PlanPart(one, Layer.POLICY), PlanPart(Limits(window("a", 5)), Layer.POLICY))


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (PlanPart(Limits(), Layer.SHADOW), "parts[1].layer"),
        (PlanPart(Limits(), "p"), "parts[1].layer"),  # type: ignore[arg-type]
        (PlanPart(Limits(), Layer.POLICY, "on"), "parts[1].mode"),  # type: ignore[arg-type]
        (PlanPart(join_limits(), Layer.POLICY), "limits"),
        (PlanPart(5, Layer.POLICY), "limits"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_part_is_refused(part: PlanPart, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        join_limits(PlanPart(Limits(), Layer.TENANT), part)
    assert refused.value.field == field


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(InvalidInput) as refused:
        check_for(join_limits(*in_all_layers("a")), priority="P9")
    assert refused.value.field == "priority"


# -- compiled once


def test_joining_again_uses_what_was_compiled() -> None:
    members = in_all_layers("a", "b")
    one, other = join_limits(*members), join_limits(*members)
    assert one.plan("P0") is one.plans["P0"] is one.plan("P0")
    assert [*map(id, one.plan("P0").rules)] == [*map(id, other.plan("P0").rules)]
