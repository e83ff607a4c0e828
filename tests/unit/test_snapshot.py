"""Which limits a snapshot selects: the plans, their layers and modes, and the other settings of a policy."""

from itertools import product
from typing import Any

import pytest

from limitforge import Decision, SyncLimiter
from limitforge.catalog.model import OPERATOR, Plan, Policy, Tenant, TenantConfig, build_entity
from limitforge.catalog.snapshot import MAX_SELECTIONS, Selection, Snapshot
from limitforge.core.keys import Layer
from limitforge.core.limits import Mode
from limitforge.errors import NotFound

MODES = (Mode.OFF, Mode.MONITOR, Mode.ON)


def plan(name: str, limit: int = 10, *, limit_name: str | None = None, tenant_id: str = "acme", **fields: Any) -> Plan:
    """Return a plan with one limit. The id of the plan and the name of the limit are its name."""
    window = {"algorithm": "fixed_window", "name": limit_name or name, "limit": limit, "window_seconds": 60, **fields}
    return Plan(id=name, tenant_id=tenant_id, name=name, limits=(window,))


def policy(resource: str = "*", plan_id: str = "special", **fields: Any) -> Policy:
    own = {"id": f"pol {resource}", "tenant_id": "acme", "resource": resource, "plan_id": plan_id}
    return build_entity(Policy, {**own, **fields})


PLANS = (plan("default"), plan("keys"), plan("special"), plan("named"), plan("candidate"))


def snapshot(
    *policies: Policy,
    tenant: dict[str, Any] | None = None,
    operator: dict[str, Any] | None = None,
    plans: tuple[Plan, ...] = PLANS,
    everyone: Plan | None = None,
) -> Snapshot:
    everyone = everyone or plan("everyone", tenant_id=OPERATOR)
    return Snapshot(
        TenantConfig(build_entity(Tenant, {"id": "acme", "name": "acme", **(tenant or {})}), plans, policies),
        TenantConfig(build_entity(Tenant, {"id": OPERATOR, "name": OPERATOR, **(operator or {})}), (everyone,), ()),
    )


def joined(selection: Selection) -> list[tuple[Layer, str]]:
    return [(layer, plan.name) for layer, plan in selection.plans]


def decided(selection: Selection) -> Decision:
    limiter = SyncLimiter.connect("memory://")
    try:
        return limiter.check("r", "s", limits=selection.limits)
    finally:
        limiter.close()


# -- which plans


@pytest.mark.parametrize(
    ("of_operator", "default", "of_key", "of_policy", "named"), list(product([False, True], repeat=5))
)
def test_which_plans_join(of_operator: bool, default: bool, of_key: bool, of_policy: bool, named: bool) -> None:
    """The plans of the operator, the tenant (the key's plan, else the default) and the policy join.

    A plan that the check names replaces the last two.
    """
    shot = snapshot(
        *([policy()] if of_policy else []),
        tenant={"default_plan_id": "default" if default else None},
        operator={"default_plan_id": "everyone" if of_operator else None},
    )
    selection = shot.select("GET:/orders", "keys" if of_key else None, "named" if named else None)
    expected: list[tuple[Layer, str]] = [(Layer.OPERATOR, "everyone")] if of_operator else []
    if named:
        expected.append((Layer.POLICY, "named"))
    else:
        if of_key or default:
            expected.append((Layer.TENANT, "keys" if of_key else "default"))
        if of_policy:
            expected.append((Layer.POLICY, "special"))
    assert joined(selection) == expected
    rules = selection.limits.plan("P0").rules
    assert [(rule.layer, rule.limit.name) for rule in rules] == [(layer.value, name) for layer, name in expected]
    assert list(decided(selection).limits) == [name for _, name in expected]
    assert selection.is_matched is bool(expected)
    assert (selection.policy is not None) == of_policy


def test_nothing_that_applies_is_allowed_and_unmatched() -> None:
    selection = snapshot(policy("GET:/orders")).select("GET:/other")
    assert (selection.is_matched, selection.policy, selection.mode) == (False, None, Mode.ON)
    decision = decided(selection)
    assert (decision.allowed, decision.limits, decision.binding) == (True, {}, None)


def test_the_most_specific_policy_applies_and_no_other() -> None:
    shot = snapshot(
        policy("*", "default"), policy("GET:*", "keys"), policy("GET:/orders/{id}", "special"), policy("login", "named")
    )
    for resource, name in (
        ("POST:/x", "default"),
        ("GET:/x", "keys"),
        ("GET:/orders/7", "special"),
        ("login", "named"),
    ):
        assert joined(shot.select(resource)) == [(Layer.POLICY, name)]


@pytest.mark.parametrize("plan_id", ["none", "", "everyone", "globexs", "x" * 100_000, "\0"])
def test_a_plan_that_is_not_the_tenants_is_not_found(plan_id: str) -> None:
    """Nor can it name the operator's plan, which applies in any case."""
    shot = snapshot(policy(), operator={"default_plan_id": "everyone"})
    for _ in range(2):
        with pytest.raises(NotFound, match=r"^plan_id: this tenant has no plan") as refused:
            shot.select("GET:/orders", None, plan_id)
        assert len(str(refused.value)) < 200


def test_a_key_whose_plan_is_not_known_here_yet_has_the_default() -> None:
    """The key may be newer than the snapshot."""
    shot = snapshot(tenant={"default_plan_id": "default"})
    assert joined(shot.select("r", "brand-new")) == [(Layer.TENANT, "default")]


# -- modes


@pytest.mark.parametrize(("operator_mode", "own"), list(product(MODES, MODES)))
def test_a_limit_has_the_weakest_of_the_modes_that_are_for_it(operator_mode: Mode, own: Mode) -> None:
    """The operator's mode applies to all limits, the tenant's to all but the operator's, the policy's to its plan."""
    plans = tuple(plan(name, 0, mode=own) for name in ("default", "special"))
    for tenant_mode, policy_mode in product(MODES, MODES):
        shot = snapshot(
            policy(mode=policy_mode),
            tenant={"default_plan_id": "default", "mode": tenant_mode},
            operator={"default_plan_id": "everyone", "mode": operator_mode},
            plans=plans,
            everyone=plan("everyone", 0, tenant_id=OPERATOR, mode=own),
        )
        expected = {
            "everyone": min(operator_mode, own, key=MODES.index),
            "default": min(operator_mode, own, tenant_mode, key=MODES.index),
            "special": min(operator_mode, own, tenant_mode, policy_mode, key=MODES.index),
        }
        decision = decided(shot.select("r"))
        there = {name: mode for name, mode in expected.items() if mode is not Mode.OFF}
        found = {name: Mode.MONITOR if state.monitored else Mode.ON for name, state in decision.limits.items()}
        assert found == there, (tenant_mode, policy_mode)
        assert decision.allowed is (Mode.ON not in there.values())
        assert set(decision.would_deny) == {name for name, mode in there.items() if mode is Mode.MONITOR}


@pytest.mark.parametrize("operator_mode", MODES)
def test_a_plan_that_the_check_names_has_no_mode_of_a_policy(operator_mode: Mode) -> None:
    for tenant_mode in MODES:
        shot = snapshot(policy(mode="off"), tenant={"mode": tenant_mode}, operator={"mode": operator_mode})
        weakest = min(operator_mode, tenant_mode, key=MODES.index)
        decision = decided(shot.select("r", None, "named"))
        assert list(decision.limits) == ([] if weakest is Mode.OFF else ["named"])
        assert shot.select("r", None, "named").mode is weakest


@pytest.mark.parametrize(
    ("operator_mode", "tenant_mode", "policy_mode", "plans", "expected"),
    [
        ("on", "on", "on", "all", "on"),
        ("off", "on", "on", "all", "off"),  # the kill switch
        ("monitor", "on", "on", "all", "monitor"),
        ("monitor", "off", "on", "all", "monitor"),  # the operator's limits are monitored
        ("on", "off", "on", "all", "on"),  # and here enforced
        ("on", "off", "on", "own", "off"),
        ("on", "monitor", "on", "own", "monitor"),
        ("on", "monitor", "off", "own", "monitor"),
        ("on", "on", "off", "own", "on"),  # the tenant's default still decides
        ("on", "on", "off", "policys", "off"),
        ("on", "on", "monitor", "policys", "monitor"),
        ("on", "monitor", "on", "none", "monitor"),
        ("off", "on", "on", "none", "off"),
    ],
)
def test_a_selection_is_off_or_monitored_if_all_of_it_is(
    operator_mode: str, tenant_mode: str, policy_mode: str, plans: str, expected: str
) -> None:
    shot = snapshot(
        *([policy(mode=policy_mode)] if plans in ("all", "own", "policys") else []),
        tenant={"default_plan_id": "default" if plans in ("all", "own") else None, "mode": tenant_mode},
        operator={"default_plan_id": "everyone" if plans == "all" else None, "mode": operator_mode},
    )
    assert shot.select("r").mode == expected


def test_the_kill_switch_reaches_every_limit() -> None:
    shot = snapshot(
        policy(shadow_plan_id="candidate"),
        tenant={"default_plan_id": "default"},
        operator={"default_plan_id": "everyone"},
        plans=tuple(plan(each.name, 0) for each in PLANS),
        everyone=plan("everyone", 0, tenant_id=OPERATOR),
    )
    assert not decided(shot.select("r")).allowed
    for mode, names in ((Mode.MONITOR, ["everyone", "default", "special"]), (Mode.OFF, [])):
        operator = Tenant(id=OPERATOR, name=OPERATOR, mode=mode, default_plan_id="everyone")
        switched = shot.with_operator(TenantConfig(operator, shot.operator.plans, ()))
        decision = decided(switched.select("r"))
        assert (decision.allowed, list(decision.limits), list(decision.would_deny)) == (True, names, names)
        assert switched.select("r").mode is mode
        assert (switched.select("r").shadow is None) == (mode is Mode.OFF)
        assert not decided(shot.select("r")).allowed  # what a check under way holds stays as it was


# -- failure, priority, counted resource, shadow


@pytest.mark.parametrize("field", ["failure", "priority"])
def test_a_policy_takes_precedence_over_its_tenant(field: str) -> None:
    first, second = ("closed", "local") if field == "failure" else ("P1", "P3")
    for policy_value, tenant_value, expected in (
        (first, second, first),
        (None, second, second),
        (first, None, first),
        (None, None, None),
    ):
        fields: dict[str, Any] = {field: policy_value}
        shot = snapshot(policy("GET:*", **fields), tenant={field: tenant_value})
        assert getattr(shot.select("GET:/x"), field) == expected
        assert getattr(shot.select("POST:/x"), field) == tenant_value


def test_failure_and_priority_are_independent() -> None:
    selection = snapshot(policy(failure="open"), tenant={"failure": "closed", "priority": "P2"}).select("r")
    assert (selection.failure, selection.priority) == ("open", "P2")


@pytest.mark.parametrize(
    ("policy_resource", "resource", "counted"),
    [
        ("GET:/orders/{id}", "GET:/orders/1", "GET:/orders/{id}"),
        ("GET:/orders/{id}/lines/{line}", "GET:/orders/1/lines/2", "GET:/orders/{id}/lines/{line}"),
        ("GET:/orders/{id}", "GET:/orders/{order}", "GET:/orders/{id}"),
        ("GET:/orders", "GET:/orders", None),
        ("GET:/files/*", "GET:/files/a/b", None),
        ("GET:/files/{owner}/*", "GET:/files/me/b", None),
        ("GET:*", "GET:/orders", None),
        ("*", "GET:/orders", None),
        ("login", "login", None),
    ],
)
def test_resources_that_match_a_policy_with_parameters_are_counted_as_one(
    policy_resource: str, resource: str, counted: str | None
) -> None:
    assert snapshot(policy(policy_resource)).select(resource).counted_resource == counted


def test_without_a_policy_each_resource_is_counted_by_itself() -> None:
    assert snapshot(tenant={"default_plan_id": "default"}).select("GET:/orders/{id}").counted_resource is None


def test_a_shadow_plan_is_evaluated_unless_a_mode_is_off() -> None:
    for operator_mode, tenant_mode, policy_mode in product(MODES, MODES, MODES):
        shot = snapshot(
            policy(mode=policy_mode, shadow_plan_id="candidate"),
            tenant={"mode": tenant_mode},
            operator={"mode": operator_mode},
        )
        shadow = shot.select("r").shadow
        assert (shadow is None) == (Mode.OFF in (operator_mode, tenant_mode, policy_mode))
        if shadow is not None:
            assert [limit.name for limit in shadow] == ["candidate"]
    assert snapshot(policy()).select("r").shadow is None
    assert snapshot(policy("GET:*", shadow_plan_id="candidate")).select("POST:/x").shadow is None


# -- made once


def test_checks_that_are_decided_alike_share_a_selection() -> None:
    shot = snapshot(policy("GET:/orders/{id}"), tenant={"default_plan_id": "default"})
    first = shot.select("GET:/orders/1")
    assert shot.select("GET:/orders/2") is first
    assert shot.select("GET:/orders/2", "keys") is not first
    assert shot.select("GET:/orders/2", None, "named") is not first
    assert shot.select("GET:/other") is not first
    assert shot.select("GET:/other") is shot.select("GET:/another")


def test_the_number_of_selections_is_bounded() -> None:
    shot = snapshot(tenant={"default_plan_id": "default"})
    for number in range(MAX_SELECTIONS + 100):
        shot.select("r", f"unknown-{number}")
        assert len(shot._selections) <= MAX_SELECTIONS
    assert joined(shot.select("r")) == [(Layer.TENANT, "default")]


def test_snapshots_of_equal_configurations_are_equal() -> None:
    one, other = snapshot(policy()), snapshot(policy())
    assert one == other
    assert one != snapshot(policy(mode="off"))
    assert one != snapshot(policy(), operator={"mode": "off"})
    assert one != object()
    one.select("r")
    assert one == other


def test_the_headers_are_those_of_the_limits_that_decide() -> None:
    shot = snapshot(policy(), tenant={"default_plan_id": "default"}, operator={"default_plan_id": "everyone"})
    selection = shot.select("r")
    headers = b"".join(value for _, value in selection.headers.fields(decided(selection)))
    assert all(name.encode() in headers for name in ("everyone", "default", "special"))
