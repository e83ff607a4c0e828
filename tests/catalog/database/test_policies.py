"""Policies: which plan applies to which resources."""

import pytest

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Plan, Policy
from limitforge.errors import Conflict, InvalidInput, NotFound
from tests.catalog.environments import one_database
from tests.catalog.factories import (
    ACTOR,
    UNUSUAL_TEXTS,
    delete,
    new_customer,
    new_plan,
    new_policy,
    new_tenant,
    table_contents,
    update,
)


async def test_a_policy_needs_a_tenant_a_resource_and_a_plan(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    plan = await new_plan(catalog, tenant.id)
    policy = await new_policy(catalog, plan, "GET:/orders")
    assert await catalog.get(Policy, policy.id) == policy
    assert await catalog.get_by_name_or_id(Policy, "GET:/orders", tenant_id=tenant.id) == policy
    assert (policy.mode, policy.failure, policy.priority, policy.shadow_plan_id) == ("on", None, None, None)


async def test_every_field_of_a_policy_is_kept(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    plan, shadow = await new_plan(catalog, tenant.id), await new_plan(catalog, tenant.id, "candidate")
    fields = {"mode": "monitor", "failure": "local", "priority": "P3", "shadow_plan_id": shadow.id}
    policy = await new_policy(catalog, plan, "GET:/orders/{id}", **fields)
    found = await catalog.get(Policy, policy.id)
    assert found == policy
    assert {field: getattr(found, field) for field in fields} == fields
    changed = await update(
        catalog, policy, {"mode": "off", "resource": "POST:*", "failure": None, "plan_id": shadow.id}
    )
    found = await catalog.get(Policy, policy.id)
    assert found == changed
    assert (found.resource, found.mode, found.failure, found.priority) == ("POST:*", "off", None, "P3")


async def test_two_policies_that_match_the_same_can_not_both_be_there(catalog: Catalog, database: Database) -> None:
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")
    assert acme.policy.resource == globex.policy.resource  # policies of two tenants may match the same
    other = await new_policy(catalog, acme.plan, "GET:/orders/{id}/lines")
    before = await table_contents(database)
    for twin in ("GET:/orders/{id}", "GET:/orders/{order_id}", "GET:/orders/{}"):
        with pytest.raises(Conflict, match="policy for GET:/orders/"):
            await new_policy(catalog, acme.plan, twin)
        with pytest.raises(Conflict, match="policy for GET:/orders/"):
            await update(catalog, other, {"resource": twin})
    assert await table_contents(database) == before
    renamed = await update(catalog, acme.policy, {"resource": "GET:/orders/{order_id}"})
    assert (renamed.id, renamed.version) == (acme.policy.id, 2)
    await new_policy(catalog, acme.plan, "*:/orders/{id}")


@one_database
async def test_a_policys_plans_are_its_tenants_own(catalog: Catalog, database: Database) -> None:
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")
    before = await table_contents(database)
    for plan_id in (globex.plan.id, "pla_none", ""):
        for field in ("plan_id", "shadow_plan_id"):
            with pytest.raises(NotFound, match=f"^{field}: unknown plan"):
                await new_policy(catalog, acme.plan, "GET:/new", **{field: plan_id})
            with pytest.raises(NotFound, match=f"^{field}: unknown plan"):
                await update(catalog, acme.policy, {field: plan_id})
    with pytest.raises(NotFound, match=r"^tenant_id: unknown tenant"):
        await new_policy(catalog, acme.plan, "GET:/new", tenant_id="ten_none")
    with pytest.raises(InvalidInput, match="can't be changed"):
        await update(catalog, acme.policy, {"tenant_id": globex.tenant.id, "plan_id": globex.plan.id})
    assert await table_contents(database) == before


async def test_a_resource_may_be_any_text(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    plan = await new_plan(catalog, tenant.id)
    for resource in (*(f"GET:/{text}" for text in UNUSUAL_TEXTS if text != "{}"), "x" * 512, "ü" * 256, " ", "a:b:c"):
        policy = await new_policy(catalog, plan, resource)
        assert (await catalog.get(Policy, policy.id)).resource == resource


async def test_a_resource_that_no_database_can_hold_is_refused(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)
    before = await table_contents(database)
    for resource in ("GET:/a\0b", "\0", "\ud800", "x" * 513, "ü" * 257, ""):
        with pytest.raises(InvalidInput) as refused:
            await new_policy(catalog, customer.plan, resource)
        assert refused.value.field == "resource"
        with pytest.raises(InvalidInput) as refused:
            await update(catalog, customer.policy, {"resource": resource})
        assert refused.value.field == "resource"
    assert await table_contents(database) == before


@one_database
async def test_patterns_that_would_be_slow_to_search_are_refused_as_a_whole(
    catalog: Catalog, database: Database
) -> None:
    """Each pattern is valid alone, but not all combinations of literals and parameters together."""
    tenant = await new_tenant(catalog)
    plan = await new_plan(catalog, tenant.id)
    before = await table_contents(database)
    with pytest.raises(InvalidInput, match="overlap") as refused:
        await create_all(catalog, plan, [f"GET:/{path}/{'b/' * 25}b" for path in every_path(6)])
    assert refused.value.field == "resource"
    assert await table_contents(database) == before
    await create_all(catalog, plan, [f"GET:/{path}/b" for path in every_path(6)])


def every_path(length: int) -> list[str]:
    """Return every path with this number of segments, each of them a literal or a parameter."""
    return ["/".join("a" if number >> bit & 1 else "{x}" for bit in range(length)) for number in range(2**length)]


async def create_all(catalog: Catalog, plan: Plan, resources: list[str]) -> None:
    async with catalog.edit(ACTOR) as edit:
        for resource in resources:
            await edit.create(Policy, {"tenant_id": plan.tenant_id, "plan_id": plan.id, "resource": resource})


@one_database
async def test_a_tenant_has_no_more_plans_and_policies_than_it_may(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limitforge.catalog.database.entity_validation.MAX_PLANS_PER_TENANT", 2)
    monkeypatch.setattr("limitforge.catalog.database.entity_validation.MAX_POLICIES_PER_TENANT", 3)
    tenant, other = await new_tenant(catalog), await new_tenant(catalog, "other")
    plan = await new_plan(catalog, tenant.id)
    await new_plan(catalog, tenant.id, "second")
    with pytest.raises(Conflict, match="at most 2 plan entries"):
        await new_plan(catalog, tenant.id, "third")
    await new_plan(catalog, other.id)
    policies = [await new_policy(catalog, plan, f"GET:/{at}") for at in range(3)]
    with pytest.raises(Conflict, match="at most 3 policy entries"):
        await new_policy(catalog, plan, "GET:/more")
    await update(catalog, policies[0], {"mode": "off"})  # existing policies may change
    await update(catalog, plan, {"limits": "burst=5/minute"})


async def test_deleting_a_policy_leaves_its_plan(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    assert await delete(catalog, customer.policy) == customer.policy
    config = await catalog.tenant_config(customer.tenant.id)
    assert (config.policies, config.plans) == ((), (customer.plan,))
    await new_policy(catalog, customer.plan, customer.policy.resource)
