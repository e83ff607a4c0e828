"""Overrides: changed limits for one subject, their actor, and their expiry."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from limitforge import Limiter, ManualClock
from limitforge.catalog.database import queries, writes
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import OPERATOR, Override, to_datetime
from limitforge.core.overrides import MAX_PER_SUBJECT
from limitforge.errors import Conflict, InvalidInput, NotFound, VersionConflict
from tests.catalog.environments import one_database
from tests.catalog.factories import (
    ACTOR,
    MINUTE_US,
    UNUSUAL_TEXTS,
    delete,
    new_customer,
    new_override,
    new_plan,
    new_policy,
    new_tenant,
    table_contents,
    update,
)

WINDOW = {"algorithm": "fixed_window", "limit": 5, "window_seconds": 60}


async def test_an_override_says_who_set_it_and_until_when(catalog: Catalog, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    override = await new_override(
        catalog, customer.tenant.id, "bob", resource="GET:/orders", ttl_seconds=90.5, reason="a launch"
    )
    found = await catalog.get(Override, override.id)
    assert found == override
    assert (found.resource, found.subject, found.limits) == ("GET:/orders", "bob", {"burst": {"limit": 500}})
    assert (found.reason, found.set_by, found.version) == ("a launch", ACTOR, 1)
    assert found.expires_at == to_datetime(clock.now_us()) + timedelta(seconds=90.5)


async def test_the_end_may_be_a_moment(catalog: Catalog, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    for end in ("2027-01-01T02:00:00+02:00", datetime(2027, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))):
        override = await new_override(catalog, customer.tenant.id, expires_at=end)
        assert override.expires_at == datetime(2027, 1, 1, tzinfo=UTC)
        assert (await catalog.get(Override, override.id)).expires_at == datetime(2027, 1, 1, tzinfo=UTC)


async def test_another_override_of_the_same_takes_its_place(catalog: Catalog, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    first = await new_override(catalog, customer.tenant.id, "bob", reason="first")
    clock.advance_us(MINUTE_US)
    async with catalog.edit("cli:eve") as edit:
        fields = {"tenant_id": customer.tenant.id, "subject": "bob", "limits": {"burst": "unlimited"}}
        second = await edit.set_override({**fields, "ttl_seconds": 5}, expected_version=1)
    assert (second.id, second.version, second.set_by, second.reason) == (first.id, 2, "cli:eve", "")
    assert (second.created_at, second.updated_at) == (first.created_at, first.created_at + timedelta(minutes=1))
    assert await catalog.get(Override, first.id) == second
    with pytest.raises(VersionConflict):
        async with catalog.edit(ACTOR) as edit:
            await edit.set_override({**fields, "ttl_seconds": 5}, expected_version=1)
    with pytest.raises(NotFound):
        async with catalog.edit(ACTOR) as edit:
            await edit.set_override({**fields, "subject": "another", "ttl_seconds": 5}, expected_version=1)


async def test_overrides_of_other_resources_and_tenants_stay_apart(catalog: Catalog) -> None:
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")
    made = {acme.override.id, globex.override.id}
    made.add((await new_override(catalog, acme.tenant.id, resource="GET:/orders")).id)
    made.add((await new_override(catalog, acme.tenant.id, "someone")).id)
    assert len(made) == 4
    assert {each.id for each in await catalog.list_for_tenant(Override, globex.tenant.id)} == {globex.override.id}


async def test_the_actor_of_the_last_change_is_recorded_as_set_by(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    async with catalog.edit("cli:eve") as edit:
        await edit.update(Override, customer.override.id, {"limits": {"burst": "blocked"}})
    found = await catalog.get(Override, customer.override.id)
    assert (found.limits, found.set_by) == ({"burst": "blocked"}, "cli:eve")


@one_database
async def test_an_override_can_not_be_moved(catalog: Catalog, database: Database) -> None:
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")
    before = await table_contents(database)
    for field, value in (("tenant_id", globex.tenant.id), ("subject", "x"), ("resource", "x")):
        with pytest.raises(InvalidInput, match="can't be changed") as refused:
            await update(catalog, acme.override, {field: value})
        assert refused.value.field == field
    assert await table_contents(database) == before


async def test_an_expired_override_is_refused(catalog: Catalog, database: Database, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    before = await table_contents(database)
    for end in (to_datetime(clock.now_us()), to_datetime(clock.now_us() - 1), "1970-01-01T00:00:00Z"):
        with pytest.raises(InvalidInput, match="future") as refused:
            await new_override(catalog, customer.tenant.id, expires_at=end)
        assert refused.value.field == "expires_at"
        with pytest.raises(InvalidInput, match="future") as refused:
            await update(catalog, customer.override, {"expires_at": end})
        assert refused.value.field == "expires_at"
    assert await table_contents(database) == before


@one_database
async def test_an_override_that_the_store_could_not_take_is_refused(
    catalog: Catalog, database: Database, clock: ManualClock
) -> None:
    """The store accepts a TTL of at most ten years, so a longer override would never be in force."""
    customer = await new_customer(catalog)
    before = await table_contents(database)
    longest = to_datetime(clock.now_us()) + timedelta(days=3_650)
    with pytest.raises(InvalidInput) as refused:
        await new_override(catalog, customer.tenant.id, expires_at=longest + timedelta(days=1))
    assert refused.value.field == "expires_at"
    assert await table_contents(database) == before
    await new_override(catalog, customer.tenant.id, expires_at=longest)


@one_database
async def test_what_the_catalog_takes_the_limiter_takes(catalog: Catalog, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    limiter = Limiter.connect("memory://", clock=clock)
    for change in ("unlimited", "blocked", {"limit": 0}, {"limit": None}, {"limit": 2**41}, {"window_seconds": "0.5"}):
        override = await new_override(catalog, customer.tenant.id, limits={"burst": change})
        found = await catalog.get(Override, override.id)
        assert found.limits == {"burst": change}
        limits = customer.plan.compile("UTC")
        await limiter.set_override("r", "s", found.limits, limits=limits, ttl_seconds=60)
    await limiter.close()


async def test_numbers_may_be_decimals(catalog: Catalog) -> None:
    """Overrides accept decimals, as plans do."""
    customer = await new_customer(catalog)
    override = await new_override(catalog, customer.tenant.id, limits={"burst": {"window_seconds": Decimal("0.5")}})
    found = await catalog.get(Override, override.id)
    assert found.limits == {"burst": {"window_seconds": "0.5"}}


@one_database
async def test_an_invalid_field_is_refused_by_its_name(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)
    await new_plan(catalog, customer.tenant.id, "wide", limits=[{**WINDOW, "name": "wide", "scope": "tenant"}])
    await new_plan(catalog, OPERATOR, "everyone", limits=[{**WINDOW, "name": "above"}])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"limits": {}}, "limits"),
        ({"limits": []}, "limits"),
        ({"limits": None}, "limits"),
        ({"limits": "burst=5/minute"}, "limits"),
        ({"limits": {"none": "blocked"}}, "limits.none"),
        ({"limits": {"above": "blocked"}}, "limits.above"),
        ({"limits": {"wide": "blocked"}}, "limits.wide"),
        ({"limits": {"burst": {}}}, "limits.burst"),
        ({"limits": {"burst": "free"}}, "limits.burst"),
        ({"limits": {"burst": 5}}, "limits.burst"),
        ({"limits": {"burst": None}}, "limits.burst"),
        ({"limits": {"burst": {"limit": -1}}}, "limits.burst.limit"),
        ({"limits": {"burst": {"limit": 2**53}}}, "limits.burst.limit"),
        ({"limits": {"burst": {"limit": 1.5}}}, "limits.burst.limit"),
        ({"limits": {"burst": {"limit": float("nan")}}}, "limits.burst.limit"),
        ({"limits": {"burst": {"name": "x"}}}, "limits.burst.name"),
        ({"limits": {"burst": {"bucket_capacity": 5}}}, "limits.burst.bucket_capacity"),
        ({"limits": {"x" * 5_000: "blocked"}}, "limits"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"ttl_seconds": -1}, "ttl_seconds"),
        ({"ttl_seconds": float("inf")}, "ttl_seconds"),
        ({"ttl_seconds": None}, "ttl_seconds"),
        ({"ttl_seconds": True}, "ttl_seconds"),
        ({"ttl_seconds": 2**53}, "ttl_seconds"),
        ({"ttl_seconds": 60, "expires_at": "2030-01-01T00:00:00Z"}, "ttl_seconds"),
        ({"expires_at": "2030-01-01T00:00:00"}, "expires_at"),
        ({"expires_at": "tomorrow"}, "expires_at"),
        ({"expires_at": 1_900_000_000}, "expires_at"),
        ({"expires_at": None}, "expires_at"),
        ({"expires_at": "9999-12-31T23:59:59-12:00"}, "expires_at"),
        ({"subject": ""}, "subject"),
        ({"subject": "a\0b"}, "subject"),
        ({"subject": "\ud800"}, "subject"),
        ({"subject": "x" * 513}, "subject"),
        ({"subject": "ü" * 257}, "subject"),
        ({"subject": 5}, "subject"),
        ({"resource": ""}, "resource"),
        ({"resource": "a\0b"}, "resource"),
        ({"resource": "\ud800"}, "resource"),
        ({"resource": "x" * 513}, "resource"),
        ({"reason": "x" * 513}, "reason"),
        ({"reason": "a\0b"}, "reason"),
        ({"reason": "\ud800"}, "reason"),
        ({"reason": None}, "reason"),
        ({"set_by": "the boss"}, "set_by"),
        ({"id": "ovr_1"}, "id"),
        ({"bogus": 1}, "bogus"),
    ]
    before = await table_contents(database)
    outcomes: list[tuple[dict[str, Any], str]] = []
    for fields, _ in wrong:
        try:
            await new_override(catalog, customer.tenant.id, **fields)
            outcomes.append((fields, "was not refused"))
        except InvalidInput as refused:
            outcomes.append((fields, refused.field))
        except Exception as error:  # noqa: BLE001 - any other error is reported
            outcomes.append((fields, repr(error)))
    assert outcomes == wrong
    assert await table_contents(database) == before


@one_database
async def test_an_override_without_an_expiry_is_refused_with_what_to_give(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    fields = {"tenant_id": customer.tenant.id, "subject": "s", "limits": {"burst": "blocked"}}
    with pytest.raises(InvalidInput, match="ttl_seconds"):
        async with catalog.edit(ACTOR) as edit:
            await edit.set_override(fields)


async def test_a_subject_and_a_reason_may_be_any_text(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    for given in (*UNUSUAL_TEXTS, "x" * 512, "🙂" * 128, " ", "\n"):
        override = await new_override(catalog, customer.tenant.id, given, resource=given, reason=given)
        found = await catalog.get(Override, override.id)
        assert (found.subject, found.resource, found.reason) == (given, given, given)
    page = await catalog.list_page(Override, size=1_000, tenant_id=customer.tenant.id)
    assert len(page.items) == 1 + len(UNUSUAL_TEXTS) + 4


@one_database
async def test_an_override_is_validated_against_the_limit_that_it_changes(catalog: Catalog) -> None:
    """The limit is that of the policy for its resource, else of the default plan, else of any other plan."""
    tenant = await new_tenant(catalog)
    bucket = {"algorithm": "token_bucket", "name": "burst", "bucket_capacity": 5, "refill_rate_per_sec": 1}
    slots = {"algorithm": "concurrency", "name": "burst", "max_concurrent": 5, "lease_ttl_seconds": 60}
    default = await new_plan(catalog, tenant.id, "default", limits=[bucket])
    special = await new_plan(catalog, tenant.id, "special", limits=[slots])
    await new_plan(catalog, tenant.id, "a-third", limits=[{**WINDOW, "name": "burst"}, {**WINDOW, "name": "rare"}])
    await update(catalog, tenant, {"default_plan_id": default.id})
    await new_policy(catalog, special, "GET:/export/{id}")

    async def can(resource: str, **change: Any) -> bool:
        try:
            await new_override(catalog, tenant.id, resource=resource, limits={"burst": change})
        except InvalidInput:
            return False
        return True

    assert await can("GET:/export/1", lease_ttl_seconds=5)
    assert not await can("GET:/export/1", refill_rate_per_sec=5)
    assert await can("GET:/orders", refill_rate_per_sec=5)
    assert await can("*", refill_rate_per_sec=5)
    assert not await can("*", lease_ttl_seconds=5)
    assert not await can("*", window_seconds=5)
    await new_override(catalog, tenant.id, limits={"rare": {"window_seconds": 5}})


@one_database
async def test_a_subject_may_have_64_overrides(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)
    async with catalog.edit(ACTOR) as edit:
        fields = {"tenant_id": customer.tenant.id, "limits": {"burst": "blocked"}, "ttl_seconds": 60}
        for number in range(MAX_PER_SUBJECT):
            await edit.set_override({**fields, "subject": "bob", "resource": f"r{number}"})
    before = await table_contents(database)
    with pytest.raises(Conflict, match="64"):
        await new_override(catalog, customer.tenant.id, "bob", resource="one more")
    assert await table_contents(database) == before
    await new_override(catalog, customer.tenant.id, "bob", resource="r0")
    await new_override(catalog, customer.tenant.id, "eve", resource="one more")


@one_database
async def test_expired_overrides_are_not_counted(catalog: Catalog, clock: ManualClock) -> None:
    """They are removed from the database once an hour, and have expired in the store before."""
    customer = await new_customer(catalog)
    async with catalog.edit(ACTOR) as edit:
        fields = {"tenant_id": customer.tenant.id, "limits": {"burst": "blocked"}, "ttl_seconds": 60}
        for number in range(MAX_PER_SUBJECT):
            await edit.set_override({**fields, "subject": "bob", "resource": f"r{number}"})
    clock.advance_us(2 * MINUTE_US)
    assert (await new_override(catalog, customer.tenant.id, "bob", resource="one more")).version == 1


async def test_only_what_has_expired_is_removed(catalog: Catalog, database: Database, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    await new_override(catalog, customer.tenant.id, "bob", ttl_seconds=60)
    await new_override(catalog, customer.tenant.id, "eve", ttl_seconds=60.000_001)
    clock.advance_us(MINUTE_US)
    async with database.writing() as connection:
        await writes.remove_expired(connection, to_datetime(clock.now_us()))
    left = await catalog.list_for_tenant(Override, customer.tenant.id)
    assert [each.subject for each in left] == ["eve", "user:42"]
    async with database.reading() as connection:
        assert await queries.tenants_with_overrides(connection) == [customer.tenant.id]


async def test_a_deleted_override_is_gone(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    with pytest.raises(VersionConflict):
        await delete(catalog, customer.override, expected_version=2)
    assert await delete(catalog, customer.override, expected_version=1) == customer.override
    with pytest.raises(NotFound):
        await catalog.get(Override, customer.override.id)


@one_database
async def test_another_window_for_one_resource_of_a_caller_wide_limit_is_refused(
    catalog: Catalog, database: Database
) -> None:
    tenant = await new_tenant(catalog)
    plan = await new_plan(catalog, tenant.id, limits=[{**WINDOW, "name": "w", "scope": "caller"}])
    await update(catalog, tenant, {"default_plan_id": plan.id})
    before = await table_contents(database)
    changes = {"w": {"limit": 9, "window_seconds": 600}}
    with pytest.raises(InvalidInput) as refused:
        await new_override(catalog, tenant.id, resource="GET:/orders", limits=changes)
    assert refused.value.field == "limits.w.window_seconds"
    assert "'*'" in refused.value.problem
    assert await table_contents(database) == before
    await new_override(catalog, tenant.id, resource="*", limits=changes)
    await new_override(catalog, tenant.id, resource="GET:/orders", limits={"w": {"limit": 9}})
