"""From the catalog to a decision: checks are decided by what was written."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from limitforge import Decision, Limiter, ManualClock
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import OPERATOR, Plan, Tenant
from limitforge.catalog.snapshot import Snapshot
from limitforge.errors import NotFound
from tests.catalog.environments import one_database
from tests.catalog.factories import new_plan, new_policy, new_tenant, update

WINDOW = {"algorithm": "fixed_window", "window_seconds": 60}


class World:
    """A catalog, and a limiter in memory. Every check reads the catalog again."""

    def __init__(self, catalog: Catalog, limiter: Limiter) -> None:
        self.catalog = catalog
        self.limiter = limiter

    async def snapshot(self, tenant_id: str) -> Snapshot:
        return Snapshot(await self.catalog.tenant_config(tenant_id), await self.catalog.tenant_config(OPERATOR))

    async def check(
        self,
        tenant: Tenant,
        resource: str = "GET:/orders",
        *,
        key_plan: Plan | None = None,
        plan_id: str | None = None,
        **options: Any,
    ) -> Decision:
        snapshot = await self.snapshot(tenant.id)
        selection = snapshot.select(resource, None if key_plan is None else key_plan.id, plan_id)
        return await self.limiter.check(
            selection.counted_resource or resource,
            options.pop("subject", "s"),
            limits=selection.limits,
            tenant=tenant.id,
            shadow=selection.shadow,
            priority=selection.priority or "P0",
            **options,
        )

    async def remaining(self, tenant: Tenant, resource: str = "GET:/orders", **options: Any) -> dict[str, int | None]:
        decision = await self.check(tenant, resource, cost=0, **options)
        return {name: state.remaining for name, state in decision.limits.items()}


@pytest.fixture
async def world(catalog: Catalog, clock: ManualClock) -> AsyncIterator[World]:
    limiter = Limiter.connect("memory://", clock=clock)
    yield World(catalog, limiter)
    await limiter.close()


async def plan_of(catalog: Catalog, tenant_id: str, name: str, **limits: int) -> Plan:
    """Create a plan of windows by their names and limits."""
    given = [{**WINDOW, "name": limit, "limit": number} for limit, number in limits.items()]
    return await new_plan(catalog, tenant_id, name, limits=given)


async def with_operator(catalog: Catalog, plan: Plan | None, **fields: Any) -> None:
    operator = await catalog.get(Tenant, OPERATOR)
    await update(catalog, operator, {"default_plan_id": None if plan is None else plan.id, **fields})


@one_database
async def test_equal_names_of_joined_plans_are_reported_with_their_plans(catalog: Catalog, world: World) -> None:
    tenant = await new_tenant(catalog)
    default = await plan_of(catalog, tenant.id, "default", burst=20, daily=50)
    special = await plan_of(catalog, tenant.id, "special", burst=30)
    await with_operator(catalog, await plan_of(catalog, OPERATOR, "everyone", burst=10))
    await update(catalog, tenant, {"default_plan_id": default.id})
    await new_policy(catalog, special, "GET:/orders")
    decision = await world.check(tenant, cost=4)
    assert {name: state.remaining for name, state in decision.limits.items()} == {
        "operator:burst": 6,
        "tenant:burst": 16,
        "daily": 46,
        "policy:burst": 26,
    }
    assert decision.binding == "operator:burst"
    assert await world.remaining(tenant, "GET:/elsewhere") == {"operator:burst": 10, "tenant:burst": 20, "daily": 50}
    await with_operator(catalog, None)
    assert await world.remaining(tenant, "GET:/elsewhere") == {"burst": 20, "daily": 50}


@one_database
async def test_a_customer_who_moves_to_another_plan_keeps_what_was_counted(catalog: Catalog, world: World) -> None:
    tenant = await new_tenant(catalog)
    free = await plan_of(catalog, tenant.id, "free", burst=10, old=5)
    gold = await plan_of(catalog, tenant.id, "gold", burst=100, new=50)
    await update(catalog, tenant, {"default_plan_id": free.id})
    await world.check(tenant, cost=4)
    await update(catalog, tenant, {"default_plan_id": gold.id})
    assert await world.remaining(tenant) == {"burst": 96, "new": 50}
    await world.check(tenant, cost=10)
    await update(catalog, tenant, {"default_plan_id": free.id})
    assert await world.remaining(tenant) == {"burst": 0, "old": 1}  # 14 of 10 are used


@one_database
async def test_a_key_that_gets_a_plan_of_its_own_keeps_what_its_subject_has_counted(
    catalog: Catalog, world: World
) -> None:
    """Both plans count in the tenant's buckets."""
    tenant = await new_tenant(catalog)
    default = await plan_of(catalog, tenant.id, "default", burst=10)
    own = await plan_of(catalog, tenant.id, "own", burst=50)
    await update(catalog, tenant, {"default_plan_id": default.id})
    await world.check(tenant, cost=4)
    assert await world.remaining(tenant, key_plan=own) == {"burst": 46}


@one_database
async def test_a_plan_that_is_asked_for_counts_where_the_policys_does(catalog: Catalog, world: World) -> None:
    tenant = await new_tenant(catalog)
    default = await plan_of(catalog, tenant.id, "default", burst=10)
    special = await plan_of(catalog, tenant.id, "special", burst=20)
    await update(catalog, tenant, {"default_plan_id": default.id})
    await new_policy(catalog, special, "*")
    await world.check(tenant, cost=3)
    assert await world.remaining(tenant, plan_id=default.id) == {"burst": 7}
    await world.check(tenant, cost=3, plan_id=default.id)
    assert await world.remaining(tenant) == {"tenant:burst": 7, "policy:burst": 14}


@one_database
async def test_another_tenants_plan_can_not_be_asked_for(catalog: Catalog, world: World) -> None:
    acme, globex = await new_tenant(catalog, "acme"), await new_tenant(catalog, "globex")
    theirs = await plan_of(catalog, globex.id, "theirs", burst=10)
    operators = await plan_of(catalog, OPERATOR, "everyone", burst=10)
    for plan_id in (theirs.id, operators.id, "pla_none"):
        with pytest.raises(NotFound, match=r"^plan_id: this tenant has no plan"):
            await world.check(acme, plan_id=plan_id)


async def test_a_change_of_numbers_acts_on_the_next_check_and_a_rollback_too(catalog: Catalog, world: World) -> None:
    tenant = await new_tenant(catalog)
    plan = await plan_of(catalog, tenant.id, "free", burst=3)
    await update(catalog, tenant, {"default_plan_id": plan.id})
    assert [(await world.check(tenant)).allowed for _ in range(4)] == [True, True, True, False]
    await update(catalog, plan, {"limits": [{**WINDOW, "name": "burst", "limit": 5}]})
    assert [(await world.check(tenant)).allowed for _ in range(3)] == [True, True, False]
    async with catalog.edit("test") as edit:
        await edit.roll_back_plan(plan.id)
    assert await world.remaining(tenant) == {"burst": 0}


async def test_the_kill_switch_lets_everything_pass(catalog: Catalog, world: World) -> None:
    tenant = await new_tenant(catalog)
    plan = await plan_of(catalog, tenant.id, "free", burst=0)
    await update(catalog, tenant, {"default_plan_id": plan.id})
    everyone = await plan_of(catalog, OPERATOR, "everyone", above=0)
    await with_operator(catalog, everyone)
    assert not (await world.check(tenant)).allowed
    await with_operator(catalog, everyone, mode="monitor")
    decision = await world.check(tenant)
    assert (decision.allowed, decision.would_deny) == (True, ("above", "burst"))
    await with_operator(catalog, everyone, mode="off")
    decision = await world.check(tenant)
    assert (decision.allowed, decision.limits) == (True, {})
    await with_operator(catalog, everyone, mode="on")
    assert not (await world.check(tenant)).allowed


@one_database
async def test_resources_of_one_template_are_one_bucket(catalog: Catalog, world: World) -> None:
    tenant = await new_tenant(catalog)
    plan = await plan_of(catalog, tenant.id, "free", burst=10)
    await new_policy(catalog, plan, "GET:/orders/{id}")
    await new_policy(catalog, plan, "GET:/files/*")
    for number in range(3):
        await world.check(tenant, f"GET:/orders/{number}")
        await world.check(tenant, f"GET:/files/{number}")
    assert await world.remaining(tenant, "GET:/orders/9") == {"burst": 7}
    assert await world.remaining(tenant, "GET:/files/1") == {"burst": 9}
    assert await world.remaining(tenant, "GET:/files/9") == {"burst": 10}


@one_database
async def test_a_quota_ends_with_the_tenants_day(catalog: Catalog, world: World, clock: ManualClock) -> None:
    clock.set_us(1_700_006_400_000_000)  # midnight in UTC, seven in the evening in New York
    daily = {"algorithm": "quota", "limit": 10, "period": "day"}
    for zone, named, hours in (
        ("UTC", {}, 24),
        ("America/New_York", {}, 5),
        ("America/New_York", {"time_zone": "UTC"}, 24),
        ("UTC", {"time_zone": "Asia/Tokyo"}, 15),
    ):
        tenant = await new_tenant(catalog, f"{zone}-{len(named)}-{hours}", time_zone=zone)
        plan = await new_plan(catalog, tenant.id, limits=[{**daily, **named}])
        await update(catalog, tenant, {"default_plan_id": plan.id})
        decision = await world.check(tenant)
        assert decision.reset_after_ms == hours * 3_600_000


@one_database
async def test_a_shadow_plan_is_judged_beside_the_live_one(catalog: Catalog, world: World) -> None:
    tenant = await new_tenant(catalog)
    live = await plan_of(catalog, tenant.id, "live", burst=10)
    candidate = await plan_of(catalog, tenant.id, "candidate", burst=1)
    await new_policy(catalog, live, "*", shadow_plan_id=candidate.id)
    first, second = [await world.check(tenant) for _ in range(2)]
    assert first.shadow is not None
    assert second.shadow is not None
    assert (first.shadow.allowed, second.allowed, second.shadow.allowed) == (True, True, False)
    assert await world.remaining(tenant) == {"burst": 8}


@one_database
async def test_tenants_and_their_subjects_count_apart(catalog: Catalog, world: World) -> None:
    tenants = []
    for name in ("acme", "globex"):
        tenant = await new_tenant(catalog, name)
        plan = await plan_of(catalog, tenant.id, "free", burst=10)
        await update(catalog, tenant, {"default_plan_id": plan.id})
        tenants.append(tenant)
    await world.check(tenants[0], cost=4)
    assert await world.remaining(tenants[0]) == {"burst": 6}
    assert await world.remaining(tenants[0], subject="another") == {"burst": 10}
    assert await world.remaining(tenants[1]) == {"burst": 10}


# --- One name, two windows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["caller", "tenant"])
@pytest.mark.parametrize("name", ["", "w"], ids=["unnamed", "named alike"])
@one_database
async def test_two_policies_with_windows_of_one_tenant_each_keep_to_their_limit(
    world: World, scope: str, name: str
) -> None:
    tenant = await new_tenant(world.catalog)
    for resource, limit, seconds in (("GET:/a", 3, 3_600), ("GET:/b", 8, 60)):
        fields = {"algorithm": "fixed_window", "limit": limit, "window_seconds": seconds, "scope": scope}
        plan = await new_plan(
            world.catalog, tenant.id, resource[-1], limits=[fields | ({"name": name} if name else {})]
        )
        await new_policy(world.catalog, plan, resource)
    admitted = {"GET:/a": 0, "GET:/b": 0}
    for _ in range(12):
        for resource in admitted:
            admitted[resource] += (await world.check(tenant, resource)).allowed
    assert admitted == {"GET:/a": 3, "GET:/b": 8}


@one_database
async def test_a_changed_number_of_an_unnamed_limit_keeps_its_count(world: World) -> None:
    tenant = await new_tenant(world.catalog)
    plan = await new_plan(world.catalog, tenant.id, limits="100/minute")
    tenant = await update(world.catalog, tenant, {"default_plan_id": plan.id})
    await world.check(tenant, cost=70)
    await update(world.catalog, plan, {"limits": "80/minute"})
    assert await world.remaining(tenant) == {"minute": 10}
