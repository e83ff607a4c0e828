"""Warnings about limits with one name that keep separate counts in several plans of a tenant."""

import logging
from textwrap import dedent
from typing import Any

import pytest

from limitforge import ManualClock
from limitforge.catalog.config import document
from limitforge.catalog.config.apply import apply_document
from limitforge.catalog.config.document_warnings import document_warnings
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.plan_warnings import plan_warnings
from limitforge.catalog.live.database_source import DatabaseSource
from limitforge.catalog.model import OPERATOR, Plan, Tenant, to_datetime
from limitforge.catalog.plan_limits import normalize_limits
from limitforge.catalog.plan_warnings import MAX_WARNINGS, find_differing_limits
from tests.catalog.environments import one_database
from tests.catalog.factories import ACTOR, new_plan, new_policy, new_tenant, update
from tests.catalog.replicas import cache_of, create_account, events_of

HOURLY: dict[str, Any] = {"name": "w", "algorithm": "fixed_window", "limit": 10, "window_seconds": 3_600}
DAILY: dict[str, Any] = {"name": "w", "algorithm": "quota", "limit": 10, "period": "day"}


def differing(*plans: dict[str, Any], used: str = "", default: str = "", zone: str = "UTC") -> list[tuple[str, ...]]:
    """Return the plans with differing limits. They are called a, b, c; `used` are the plans of policies."""
    named = {name: normalize_limits([limit]) for name, limit in zip("abc", plans, strict=False)}
    return [each.plans for each in find_differing_limits(named, set(used), default or None, zone)]


# --- What differs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["caller", "tenant"])
@pytest.mark.parametrize(
    ("limit", "change"),
    [
        (HOURLY, {"window_seconds": 60}),
        (HOURLY, {"align": "first_hit"}),
        (HOURLY, {"spread": True}),
        ({**HOURLY, "algorithm": "sliding_window_counter"}, {"window_seconds": 60}),
        (DAILY, {"period": "month"}),
        (DAILY, {"time_zone": "Asia/Tokyo"}),
        ({**DAILY, "period": "month"}, {"anchor_day": 2}),
    ],
)
def test_limits_of_one_name_with_other_windows_differ_where_they_meet(
    limit: dict[str, Any], change: dict[str, Any], scope: str
) -> None:
    one = {**limit, "scope": scope}
    for places in ({"used": "ab"}, {"default": "a"}, {}):
        assert differing(one, {**one, **change}, **places) == [("a", "b")]
        assert differing(one, {**one, "limit": 99}, **places) == []


@pytest.mark.parametrize(
    "other",
    [
        {"name": "v", "window_seconds": 60},
        {"algorithm": "sliding_window_counter", "window_seconds": 60},
        {"scope": "tenant", "window_seconds": 60},
        {"window_seconds": "3600.0"},
    ],
    ids=["another name", "another algorithm", "another scope", "the same window"],
)
def test_other_limits_do_not(other: dict[str, Any]) -> None:
    one = {**HOURLY, "scope": "caller"}
    assert differing(one, {**one, **other}, used="ab") == []


def test_what_is_converted_never_differs() -> None:
    log = {"name": "w", "algorithm": "sliding_window", "limit": 5, "window_seconds": 60, "scope": "caller"}
    assert differing(log, {**log, "window_seconds": 90}, used="ab") == []


def test_plans_of_policies_and_of_keys_never_meet() -> None:
    one = {**HOURLY, "scope": "caller"}
    assert differing(one, {**one, "window_seconds": 60}, used="a", default="b") == []
    assert differing(one, {**one, "window_seconds": 60}, used="ab", default="b") == [("a", "b")]


def test_a_resource_has_one_policy_and_may_have_several_keys() -> None:
    one = {**HOURLY, "scope": "resource"}
    assert differing(one, {**one, "window_seconds": 60}, used="ab") == []
    assert differing(one, {**one, "window_seconds": 60}) == [("a", "b")]
    assert differing(HOURLY, {**HOURLY, "window_seconds": 60}) == []


def test_the_tenants_time_zone_is_that_of_a_quota_without_one() -> None:
    one = {**DAILY, "scope": "caller"}
    assert differing(one, {**one, "time_zone": "UTC"}, used="ab") == []
    assert differing(one, {**one, "time_zone": "UTC"}, used="ab", zone="Asia/Tokyo") == [("a", "b")]


# --- Warnings --------------------------------------------------------------------------------------------------------


def wide(seconds: int, limit: int = 10) -> list[dict[str, Any]]:
    return [{**HOURLY, "limit": limit, "window_seconds": seconds, "scope": "tenant"}]


async def warnings_of(catalog: Catalog, plan: Plan) -> list[str]:
    async with catalog.database.reading() as connection:
        return await plan_warnings(connection, plan.tenant_id, plan.id)


@one_database
async def test_a_plan_is_warned_of_those_that_it_meets(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    one = await new_plan(catalog, tenant.id, "one", limits=wide(3_600))
    two = await new_plan(catalog, tenant.id, "two", limits=wide(60))
    calm = await new_plan(catalog, tenant.id, "calm", limits="100/minute")
    for plan in (one, two):
        [warning] = await warnings_of(catalog, plan)
        assert "limit w " in warning
        assert "one, two" in warning
        assert "different names, or the same window" in warning
    assert await warnings_of(catalog, calm) == []
    await new_policy(catalog, one, "GET:/a")
    assert await warnings_of(catalog, one) == []
    await new_policy(catalog, two, "GET:/b")
    assert len(await warnings_of(catalog, one)) == 1
    await update(catalog, two, {"limits": wide(3_600, 99)})
    assert await warnings_of(catalog, one) == []


@one_database
async def test_the_operator_has_one_plan_at_a_time(catalog: Catalog) -> None:
    await new_plan(catalog, OPERATOR, "one", limits=wide(3_600))
    assert await warnings_of(catalog, await new_plan(catalog, OPERATOR, "two", limits=wide(60))) == []


FILE = """
    tenants:
      - name: acme
        {sections}
"""
PLANS = (
    "plans: [{name: one, limits: [{name: w, algorithm: fixed_window, limit: 10, window_seconds: 3600, scope: caller}]},"
    " {name: two, limits: [{name: w, algorithm: fixed_window, limit: 10, window_seconds: 60, scope: caller}]}]"
)
POLICIES = "policies: [{resource: 'GET:/a', plan: one}, {resource: 'GET:/b', plan: two}]"


async def warned(catalog: Catalog, *sections: str) -> list[str]:
    """Return the warnings about a document, before and after it is applied."""
    text = dedent(FILE).replace("{sections}", "\n    ".join(sections))
    wanted, _ = document.parse_document(text.encode(), "plans.yaml", to_datetime(catalog.clock.now_us()))
    found = []
    for _ in range(2):
        async with catalog.database.reading() as connection:
            found.append(await document_warnings(connection, wanted))
        await apply_document(catalog, wanted, ACTOR)
    assert found[0] == found[1]
    return found[0]


@one_database
async def test_a_file_is_warned_of_what_it_leaves(catalog: Catalog) -> None:
    [warning] = await warned(catalog, PLANS, POLICIES)
    assert warning.startswith("tenant acme: limit w ")


@one_database
async def test_a_file_that_has_only_the_plans_or_only_the_policies_is_warned_all_the_same(catalog: Catalog) -> None:
    assert len(await warned(catalog, PLANS)) == 1  # nothing uses them yet: they may be those of keys
    assert len(await warned(catalog, POLICIES)) == 1
    assert len(await warned(catalog, PLANS)) == 1
    assert await warned(catalog, "policies: [{resource: 'GET:/a', plan: one}]") == []
    assert await warned(catalog, "mode: monitor") == []


@one_database
async def test_warnings_have_a_bound(catalog: Catalog) -> None:
    tenants = [
        {
            "name": f"t{number}",
            "plans": [{"name": name, "limits": wide(seconds)} for name, seconds in (("a", 60), ("b", 90))],
        }
        for number in range(MAX_WARNINGS + 5)
    ]
    wanted, _ = document.parse_document(str({"tenants": tenants}).encode(), "plans.yaml", to_datetime(0))
    async with catalog.database.reading() as connection:
        assert len(await document_warnings(connection, wanted)) == MAX_WARNINGS + 1


@one_database
async def test_a_node_logs_them_once_per_revision(
    database: Database, catalog: Catalog, peppers: Peppers, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    account = await create_account(catalog)
    one = await new_plan(catalog, account.tenant.id, "one", limits=wide(3_600))
    two = await new_plan(catalog, account.tenant.id, "two", limits=wide(60))
    for resource, plan in (("GET:/a", one), ("GET:/b", two)):
        await new_policy(catalog, plan, resource)

    async def load() -> list[tuple[str, dict[str, Any]]]:
        caplog.clear()
        cache = cache_of(DatabaseSource(database), peppers, clock)
        await cache.callers.find(account.text)
        await cache.close()
        return events_of(each for each in caplog.records if "limits_differ" in each.message)

    with caplog.at_level(logging.WARNING):
        revision = (await catalog.get(Tenant, account.tenant.id)).revision
        fields = {"tenant": account.tenant.id, "revision": revision, "limit": "w", "plans": "one,two"}
        assert await load() == [("catalog.limits_differ", fields)]
        assert await load() == []
        await update(catalog, await catalog.get(Tenant, account.tenant.id), {"mode": "monitor"})
        assert len(await load()) == 1
