"""Every wrong field of tenants, plans and policies is refused by its name, and leaves nothing behind."""

from collections.abc import Awaitable, Callable
from typing import Any

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.errors import Conflict, InvalidInput, NotFound
from tests.catalog.environments import one_database
from tests.catalog.factories import field_of, new_customer, new_plan, new_policy, new_tenant, table_contents, update

Make = Callable[..., Awaitable[Any]]
Wrong = list[tuple[dict[str, Any], str]]

WINDOW = {"algorithm": "fixed_window", "limit": 5, "window_seconds": 60}

BAD_NAMES: Wrong = [
    ({"name": name}, "name")
    for name in ("", " ", "a b", "a\n", "\na", "é", "a:b", "a\0", "\ud800", "a" * 65, "ⅷ", "٣", "a,b", None, 5, ["a"])
]
BAD_MODES: Wrong = [({"mode": mode}, "mode") for mode in ("ON", "maybe", "", None, True, 1)]
BAD_FAILURES: Wrong = [({"failure": failure}, "failure") for failure in ("raise", "shut", "", 5)]
BAD_PRIORITIES: Wrong = [({"priority": priority}, "priority") for priority in ("P4", "p0", "", 0)]

NO_LANES: list[Any] = [0, -1, 1_025, 2**70, True, "2", None, 1.5, []]
BAD_LANES: Wrong = [({"lanes": lanes}, "lanes") for lanes in NO_LANES]

TENANTS: Wrong = [
    *BAD_NAMES,
    *BAD_MODES,
    *BAD_FAILURES,
    *BAD_PRIORITIES,
    *(
        ({"time_zone": zone}, "time_zone")
        for zone in (
            "Mars/Phobos",
            "",
            "UTC+1",
            "../etc/passwd",
            "/etc/passwd",
            "\0",
            "\ud800",
            "Europe",
            None,
            1,
            "x" * 5_000,
        )
    ),
    *BAD_LANES,
    ({"lanes": {"count": 0}}, "lanes.count"),
    ({"lanes": {"count": 2, "then": 0, "at": 1e9}}, "lanes.then"),
    ({"lanes": {"count": 2, "then": 4, "at": float("nan")}}, "lanes.at"),
    ({"lanes": {"count": 2, "then": 4}}, "lanes"),
    ({"lanes": {"number": 2}}, "lanes.number"),
    ({"suspended": 1}, "suspended"),
    ({"suspended": None}, "suspended"),
    ({"default_plan_id": 5}, "default_plan_id"),
    ({"default_plan_id": "pla_none"}, "default_plan_id"),
    ({"id": "ten_1"}, "id"),
    ({"revision": 5}, "revision"),
    ({"version": 5}, "version"),
    ({"created_at": "2026-01-01T00:00:00Z"}, "created_at"),
    ({"bogus": 1}, "bogus"),
]

PLANS: Wrong = [
    *BAD_NAMES,
    ({"limits": None}, "limits"),
    ({"limits": ""}, "limits"),
    ({"limits": "nonsense"}, "limits"),
    ({"limits": "\ud800"}, "limits"),
    ({"limits": WINDOW}, "limits"),
    ({"limits": 5}, "limits"),
    ({"limits": "1/minute; 1/minute"}, "limits"),
    ({"limits": [WINDOW, WINDOW]}, "limits"),
    ({"limits": [{**WINDOW, "name": str(number)} for number in range(11)]}, "limits"),
    ({"limits": [{**WINDOW, "limit": -1}]}, "limits[0].limit"),
    ({"limits": [WINDOW, {**WINDOW, "name": "b", "limit": 2**53}]}, "limits[1].limit"),
    ({"limits": [{**WINDOW, "limit": 1.5}]}, "limits[0].limit"),
    ({"limits": [{**WINDOW, "limit": float("nan")}]}, "limits[0].limit"),
    ({"limits": [{**WINDOW, "limit": "5\0"}]}, "limits[0].limit"),
    ({"limits": [{**WINDOW, "window_seconds": 0}]}, "limits[0].window_seconds"),
    ({"limits": [{**WINDOW, "window_seconds": float("inf")}]}, "limits[0].window_seconds"),
    ({"limits": [{**WINDOW, "algorithm": "guess"}]}, "limits[0].algorithm"),
    ({"limits": [{**WINDOW, "bogus": 1}]}, "limits[0].bogus"),
    ({"limits": [{**WINDOW, "name": "a b"}]}, "limits[0].name"),
    ({"limits": [{**WINDOW, "name": ""}]}, "limits[0].name"),
    ({"limits": [{**WINDOW, "mode": "maybe"}]}, "limits[0].mode"),
    ({"limits": [{**WINDOW, "scope": "galaxy"}]}, "limits[0].scope"),
    ({"limits": [{**WINDOW, "scope": "global"}]}, "limits[0].scope"),
    ({"limits": [{**WINDOW, "shares": {"P9": 5}}]}, "limits[0].shares"),
    ({"limits": [{"algorithm": "quota", "limit": 5, "period": "day", "time_zone": "x"}]}, "limits[0].time_zone"),
    ({"limits": [{"algorithm": "quota", "limit": 5, "period": "day", "time_zone": None}]}, "limits[0].time_zone"),
    ({"limits": [{"algorithm": "fixed_window", "limit": 5}]}, "limits[0].window_seconds"),
    ({"limits": ["1/minute"]}, "limits[0]"),
    ({"limits": [5]}, "limits[0]"),
    ({"limits": "1/minute", "algorithm": "quota"}, "algorithm"),
    ({"tenant_id": "ten_none"}, "tenant_id"),
    ({"tenant_id": None}, "tenant_id"),
    ({"tenant_id": 5}, "tenant_id"),
]

POLICIES: Wrong = [
    *BAD_MODES,
    *BAD_FAILURES,
    *BAD_PRIORITIES,
    *(
        ({"resource": resource}, "resource")
        for resource in (
            "",
            "a*b",
            "GET:/a/*/b",
            "GET:/{a",
            "GET:/x{a}",
            "GET:/" + "a/" * 32,
            "x" * 513,
            "\ud800",
            None,
            5,
        )
    ),
    ({"plan_id": None}, "plan_id"),
    ({"plan_id": 5}, "plan_id"),
    ({"plan_id": "pla_none"}, "plan_id"),
    ({"shadow_plan_id": "pla_none"}, "shadow_plan_id"),
    ({"shadow_plan_id": 5}, "shadow_plan_id"),
    ({"tenant_id": "ten_none"}, "tenant_id"),
    ({"pattern": "x"}, "pattern"),
    ({"id": "pol_1"}, "id"),
    ({"bogus": 1}, "bogus"),
]


async def outcomes(database: Database, make: Make, wrong: Wrong) -> Wrong:
    """Return the error that each field gets."""
    found: Wrong = []
    before = await table_contents(database)
    for fields, _ in wrong:
        try:
            await make(fields)
            said = "was not refused"
        except (InvalidInput, NotFound, Conflict) as refused:
            said = field_of(refused)
        except Exception as error:  # noqa: BLE001 - any other error is reported
            said = repr(error)
        found.append((fields, said))
    assert await table_contents(database) == before
    return found


def differing(outcomes: Wrong, wrong: Wrong) -> Wrong:
    return [one for one, other in zip(outcomes, wrong, strict=True) if one != other]


def changeable(wrong: Wrong, *fixed: str) -> Wrong:
    """Return the cases that an update may be tried with."""
    return [(fields, field) for fields, field in wrong if not set(fixed) & set(fields)]


@one_database
async def test_wrong_fields_of_a_tenant(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)

    async def create(fields: dict[str, Any]) -> None:
        await new_tenant(catalog, **{"name": "globex", **fields})

    async def change(fields: dict[str, Any]) -> None:
        await update(catalog, customer.tenant, fields)

    assert differing(await outcomes(database, create, TENANTS), TENANTS) == []
    assert differing(await outcomes(database, change, TENANTS), TENANTS) == []


@one_database
async def test_wrong_fields_of_a_plan(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)

    async def create(fields: dict[str, Any]) -> None:
        await new_plan(catalog, **{"tenant_id": customer.tenant.id, "name": "gold", "limits": "1/minute", **fields})

    async def change(fields: dict[str, Any]) -> None:
        await update(catalog, customer.plan, fields)

    assert differing(await outcomes(database, create, PLANS), PLANS) == []
    wrong = changeable(PLANS, "tenant_id")
    assert differing(await outcomes(database, change, wrong), wrong) == []


@one_database
async def test_wrong_fields_of_a_policy(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)

    async def create(fields: dict[str, Any]) -> None:
        await new_policy(catalog, customer.plan, **{"resource": "POST:*", **fields})

    async def change(fields: dict[str, Any]) -> None:
        await update(catalog, customer.policy, fields)

    assert differing(await outcomes(database, create, POLICIES), POLICIES) == []
    wrong = changeable(POLICIES, "tenant_id")
    assert differing(await outcomes(database, change, wrong), wrong) == []
