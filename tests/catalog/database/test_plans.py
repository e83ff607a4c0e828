"""Plans: their shapes, their limits, their versions, and what uses them."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from limitforge import Limits, ManualClock, Quota, TokenBucket
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import OPERATOR, Plan, Tenant
from limitforge.catalog.snapshot import Snapshot
from limitforge.core.limits import Limit, limit_from_fields
from limitforge.errors import Conflict, InvalidInput, NotFound, VersionConflict
from tests.catalog.factories import (
    ACTOR,
    MINUTE_US,
    delete,
    new_customer,
    new_key,
    new_plan,
    new_policy,
    new_tenant,
    table_contents,
    update,
)

WINDOW = {"algorithm": "fixed_window", "limit": 5, "window_seconds": 60}
MONTHLY = {"algorithm": "quota", "name": "monthly", "limit": 1_000, "period": "month"}


async def limits_of(catalog: Catalog, plan: Plan) -> list[Limit]:
    """Return the compiled limits of a plan."""
    tenant = await catalog.get(Tenant, plan.tenant_id)
    return list((await catalog.get(Plan, plan.id)).compile(tenant.time_zone))


# -- shapes


async def test_a_plan_of_several_limits_keeps_them_in_order(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    limits = [{**WINDOW, "name": name} for name in ("z", "a", "m")]
    plan = await new_plan(catalog, tenant.id, "free", limits=limits)
    assert await catalog.get(Plan, plan.id) == plan
    assert [limit.name for limit in await limits_of(catalog, plan)] == ["z", "a", "m"]
    assert (plan.version, plan.tenant_id, plan.name) == (1, tenant.id, "free")


async def test_a_flat_plan_has_one_limit_named_after_it(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    fields = {"algorithm": "token_bucket", "bucket_capacity": 100, "refill_rate_per_sec": 20}
    flat = await new_plan(catalog, tenant.id, "gold", **fields)
    full = await new_plan(catalog, tenant.id, "also-gold", limits=[{**fields, "name": "gold"}])
    assert flat.limits == full.limits
    assert await limits_of(catalog, flat) == [TokenBucket(name="gold", bucket_capacity=100, refill_rate_per_sec=20)]
    assert await catalog.get(Plan, flat.id) == flat


async def test_a_plan_may_be_given_as_text(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    text = "100/minute; burst=token:10/second; 5 per 15 minutes"
    plan = await new_plan(catalog, tenant.id, limits=text)
    assert await limits_of(catalog, plan) == list(Limits.parse(text))
    assert [limit.name for limit in await limits_of(catalog, plan)] == ["minute", "burst", "15-minutes"]


async def test_a_plan_may_be_given_as_limits(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    bucket = TokenBucket(name="burst", bucket_capacity=5, refill_rate_per_sec=100 / 60)
    plan = await new_plan(catalog, tenant.id, limits=[bucket])
    assert await limits_of(catalog, plan) == [bucket]
    assert await catalog.get(Plan, plan.id) == plan


LIMITS: list[dict[str, Any]] = [
    {"algorithm": "token_bucket", "name": "a", "bucket_capacity": 5, "refill_rate_per_sec": 0.333333},
    {"algorithm": "token_bucket", "name": "a", "bucket_capacity": 5, "refill_rate_per_sec": 1 / 3},
    {"algorithm": "leaky_bucket", "name": "a", "bucket_capacity": 5, "leak_rate_per_sec": "0.5"},
    {"algorithm": "sliding_window", "name": "a", "limit": 1_000, "window_seconds": 0.001},
    {"algorithm": "sliding_window_counter", "name": "a", "limit": 2**41, "window_seconds": 86_400},
    {"algorithm": "concurrency", "name": "a", "max_concurrent": 3, "lease_ttl_seconds": 30},
    {"algorithm": "quota", "name": "a", "limit": 2**52 - 1, "period": "year", "anchor_day": 31},
    {**WINDOW, "name": "a", "shares": {"P1": 90, "P3": 0}, "scope": "tenant", "counts": "requests"},
    {**WINDOW, "name": "a", "count_denied": True, "mode": "monitor", "align": "first_hit"},
    {**WINDOW, "name": "a", "consistency": "prepaid", "spread": True, "charge_after_outage": True},
    {**WINDOW, "name": "a", "limit": Decimal(7), "window_seconds": Decimal("0.5")},
    {**WINDOW, "name": "a", "limit": 0},
]


async def test_every_field_of_a_limit_comes_back_as_it_was_meant(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    for number, fields in enumerate(LIMITS):
        plan = await new_plan(catalog, tenant.id, f"plan-{number}", limits=[fields])
        assert await limits_of(catalog, plan) == [limit_from_fields(fields)]
        assert await catalog.get(Plan, plan.id) == plan
        assert await update(catalog, plan, {"limits": plan.limits}) == plan  # the limits that were read can be written


UNLIMITED: list[dict[str, Any]] = [
    {"algorithm": "token_bucket", "limit": None},
    {"algorithm": "token_bucket", "bucket_capacity": None},
    {"algorithm": "leaky_bucket", "limit": None},
    {"algorithm": "fixed_window", "limit": None, "window_seconds": 60},
    {"algorithm": "sliding_window", "limit": None, "window_seconds": 60},
    {"algorithm": "sliding_window_counter", "limit": None, "window_seconds": 60},
    {"algorithm": "concurrency", "limit": None, "lease_ttl_seconds": 60},
    {"algorithm": "quota", "limit": None, "period": "day"},
]


async def test_an_unlimited_limit_stays_unlimited_in_both_shapes(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    for number, fields in enumerate(UNLIMITED):
        for plan in (
            await new_plan(catalog, tenant.id, f"flat-{number}", **fields),
            await new_plan(catalog, tenant.id, f"full-{number}", limits=[fields]),
        ):
            assert [limit.size for limit in await limits_of(catalog, plan)] == [None]
            assert await catalog.get(Plan, plan.id) == plan


async def test_a_field_beside_the_limits_is_refused(catalog: Catalog, database: Database) -> None:
    """A caller that sets `mode: off` there expects an effect."""
    tenant = await new_tenant(catalog)
    before = await table_contents(database)
    for field in ("mode", "bogus", "scope", "id", "version"):
        with pytest.raises(InvalidInput) as refused:
            await new_plan(catalog, tenant.id, limits="100/minute", **{field: "off"})
        assert refused.value.field == field
        assert await table_contents(database) == before


async def test_a_plan_without_a_name_is_refused(catalog: Catalog) -> None:
    """The limits are valid in either shape."""
    tenant = await new_tenant(catalog)
    for fields in ({"limits": "100/minute"}, {"limits": [WINDOW]}, WINDOW):
        with pytest.raises(InvalidInput) as refused:
            async with catalog.edit(ACTOR) as edit:
                await edit.create(Plan, {"tenant_id": tenant.id, **fields})
        assert refused.value.field == "name"


# -- global limits


async def test_only_the_operators_plan_may_have_global_limits(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    plan = await new_plan(catalog, tenant.id, "own")
    limits = [{**WINDOW, "name": "own"}, {**WINDOW, "scope": "global"}]
    before = await table_contents(database)
    with pytest.raises(InvalidInput, match="only the operator") as refused:
        await new_plan(catalog, tenant.id, "wide", limits=limits)
    assert refused.value.field == "limits[1].scope"
    with pytest.raises(InvalidInput, match="only the operator"):
        await update(catalog, plan, {"limits": limits})
    assert await table_contents(database) == before
    assert (await new_plan(catalog, OPERATOR, "wide", limits=limits)).tenant_id == OPERATOR


async def test_what_is_wrong_in_a_flat_plan_is_named_as_it_was_written(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    before = await table_contents(database)
    wrong: list[tuple[str, object]] = [("limit", -1), ("bogus", 1), ("algorithm", "guess"), ("scope", "global")]
    for field, value in wrong:
        with pytest.raises(InvalidInput) as refused:
            await new_plan(catalog, tenant.id, "flat", **{**WINDOW, field: value})
        assert refused.value.field == field
    assert await table_contents(database) == before


# -- time zones


async def zones(catalog: Catalog, tenant_id: str, plan_id: str) -> list[str]:
    snapshot = Snapshot(await catalog.tenant_config(tenant_id), await catalog.tenant_config(OPERATOR))
    limits = snapshot.select("r", None, plan_id).limits
    return [limit.calendar.time_zone for limit in limits if isinstance(limit, Quota)]


async def test_a_quota_lives_in_its_tenants_time_zone_unless_it_names_one(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog, time_zone="America/New_York")
    limits = [
        {**MONTHLY, "name": "own"},
        {**MONTHLY, "name": "named", "time_zone": "Asia/Tokyo"},
        {**MONTHLY, "name": "utc", "time_zone": "UTC"},
    ]
    plan = await new_plan(catalog, tenant.id, limits=limits)
    assert await zones(catalog, tenant.id, plan.id) == ["America/New_York", "Asia/Tokyo", "UTC"]
    await update(catalog, tenant, {"time_zone": "Europe/Berlin"})
    assert await zones(catalog, tenant.id, plan.id) == ["Europe/Berlin", "Asia/Tokyo", "UTC"]
    plan = await update(catalog, plan, {"limits": [*plan.limits, {**MONTHLY, "name": "more"}]})
    assert await zones(catalog, tenant.id, plan.id) == ["Europe/Berlin", "Asia/Tokyo", "UTC", "Europe/Berlin"]
    async with catalog.edit(ACTOR) as edit:
        await edit.roll_back_plan(plan.id)
    assert await zones(catalog, tenant.id, plan.id) == ["Europe/Berlin", "Asia/Tokyo", "UTC"]


async def test_a_flat_quota_keeps_a_utc_that_it_names(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog, time_zone="America/New_York")
    quota = {"algorithm": "quota", "limit": 5, "period": "day"}
    own = await new_plan(catalog, tenant.id, "own", **quota)
    utc = await new_plan(catalog, tenant.id, "utc", **quota, time_zone="UTC")
    assert await zones(catalog, tenant.id, own.id) == ["America/New_York"]
    assert await zones(catalog, tenant.id, utc.id) == ["UTC"]


async def test_the_operators_quotas_live_in_the_operators_time_zone(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog, time_zone="America/New_York")
    plan = await new_plan(catalog, OPERATOR, limits=[{**MONTHLY, "scope": "global"}])
    operator = await catalog.get(Tenant, OPERATOR)
    await update(catalog, operator, {"time_zone": "Asia/Tokyo", "default_plan_id": plan.id})
    snapshot = Snapshot(await catalog.tenant_config(tenant.id), await catalog.tenant_config(OPERATOR))
    (limit,) = snapshot.select("r").limits
    assert isinstance(limit, Quota)
    assert limit.calendar.time_zone == "Asia/Tokyo"


# -- versions


async def test_a_change_is_a_new_version_and_the_old_ones_stay(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    plan = await new_plan(catalog, tenant.id, limits="burst=1/minute")
    clock.advance_us(MINUTE_US)
    async with catalog.edit("cli:bob") as edit:
        second = await edit.update(Plan, plan.id, {"limits": "burst=2/minute"}, expected_version=1)
    assert (second.version, second.id) == (2, plan.id)
    newest, oldest = await catalog.plan_versions(plan.id)
    assert (newest["version"], newest["created_by"], newest["limits"]) == (2, "cli:bob", list(second.limits))
    assert (oldest["version"], oldest["created_by"], oldest["limits"]) == (1, ACTOR, list(plan.limits))
    assert newest["created_at"] - oldest["created_at"] == timedelta(minutes=1)
    assert await catalog.get(Plan, plan.id) == second


async def test_a_plan_is_rolled_back_by_a_new_version(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    plan = await new_plan(catalog, tenant.id, limits="burst=1/minute")
    for number in (2, 3, 4):
        await update(catalog, plan, {"limits": f"burst={number}/minute"})

    async def rolled_back(to: int | None = None, **options: Any) -> Plan:
        async with catalog.edit(ACTOR) as edit:
            return await edit.roll_back_plan(plan.id, to, **options)

    back = await rolled_back()
    assert (back.version, [limit.size for limit in await limits_of(catalog, back)]) == (5, [3])
    back = await rolled_back(1, expected_version=5)
    assert (back.version, [limit.size for limit in await limits_of(catalog, back)]) == (6, [1])
    assert back.limits == plan.limits
    assert [row["version"] for row in await catalog.plan_versions(plan.id)] == [6, 5, 4, 3, 2, 1]
    with pytest.raises(VersionConflict):
        await rolled_back(2, expected_version=5)
    for unknown in (0, -1, 7, 2**70):
        with pytest.raises(NotFound, match=f"has no version {unknown}"):
            await rolled_back(unknown)


async def test_the_first_version_of_a_plan_has_none_before_it(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    plan = await new_plan(catalog, tenant.id)
    before = await table_contents(database)
    with pytest.raises(NotFound, match="no version 0"):
        async with catalog.edit(ACTOR) as edit:
            await edit.roll_back_plan(plan.id)
    assert await table_contents(database) == before


async def test_a_plan_stays_its_tenants(catalog: Catalog, database: Database) -> None:
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")
    before = await table_contents(database)
    with pytest.raises(InvalidInput, match="can't be changed") as refused:
        await update(catalog, acme.plan, {"tenant_id": globex.tenant.id})
    assert refused.value.field == "tenant_id"
    assert await table_contents(database) == before
    assert (await update(catalog, acme.plan, {"tenant_id": acme.tenant.id, "name": "gold"})).name == "gold"


async def test_plans_of_two_tenants_may_have_one_name(catalog: Catalog, database: Database) -> None:
    acme, globex = await new_tenant(catalog, "acme"), await new_tenant(catalog, "globex")
    plan, twin = await new_plan(catalog, acme.id, "free"), await new_plan(catalog, globex.id, "free")
    other = await new_plan(catalog, acme.id, "gold")
    assert await catalog.get_by_name_or_id(Plan, "free", tenant_id=globex.id) == twin
    with pytest.raises(Conflict, match="pass an id instead"):
        await catalog.get_by_name_or_id(Plan, "free")
    with pytest.raises(NotFound):
        await catalog.get_by_name_or_id(Plan, plan.id, tenant_id=globex.id)
    before = await table_contents(database)
    with pytest.raises(Conflict, match="plan called free"):
        await new_plan(catalog, acme.id, "free")
    with pytest.raises(Conflict, match="plan called free"):
        await update(catalog, other, {"name": "free"})
    assert await table_contents(database) == before


# -- deleting


async def test_a_plan_in_use_stays_and_says_by_whom(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    other = await new_plan(catalog, tenant.id, "other")
    plan = await new_plan(catalog, tenant.id, "gold")
    await update(catalog, tenant, {"default_plan_id": plan.id})
    policy = await new_policy(catalog, plan, "GET:/orders")
    shadow = await new_policy(catalog, other, "POST:/orders", shadow_plan_id=plan.id)
    key, _ = await new_key(catalog, tenant.id, "mobile", plan_id=plan.id)
    before = await table_contents(database)
    with pytest.raises(Conflict) as refused:
        await delete(catalog, plan)
    for user in ("the tenant (its default plan)", "policy GET:/orders", "policy POST:/orders", "key mobile"):
        assert user in str(refused.value)
    assert await table_contents(database) == before
    await update(catalog, tenant, {"default_plan_id": None})
    await update(catalog, shadow, {"shadow_plan_id": None})
    await update(catalog, key, {"plan_id": other.id})
    with pytest.raises(Conflict, match="in use by policy GET:/orders: "):
        await delete(catalog, plan)
    await update(catalog, policy, {"plan_id": other.id})
    await delete(catalog, plan)
    assert [each.name for each in await catalog.list_for_tenant(Plan, tenant.id)] == ["other"]
    assert await catalog.plan_versions(plan.id) == []


async def test_the_operators_plan_in_use_stays(catalog: Catalog) -> None:
    plan = await new_plan(catalog, OPERATOR)
    await update(catalog, await catalog.get(Tenant, OPERATOR), {"default_plan_id": plan.id})
    with pytest.raises(Conflict, match=r"in use by the tenant \(its default plan\)"):
        await delete(catalog, plan)


async def test_a_plan_may_have_10_limits(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    ten = [{**WINDOW, "name": f"limit-{number}"} for number in range(10)]
    plan = await new_plan(catalog, tenant.id, limits=ten)
    assert len(plan.limits) == 10
    before = await table_contents(database)
    for eleven in ([*ten, WINDOW], "; ".join(f"5/{number} minutes" for number in range(1, 12))):
        with pytest.raises(InvalidInput, match="at most 10") as refused:
            await new_plan(catalog, tenant.id, "more", limits=eleven)
        assert refused.value.field == "limits"
    assert await table_contents(database) == before
