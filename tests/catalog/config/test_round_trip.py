"""After any edits, a catalog that is exported, applied to an empty database and exported again stays the same."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, text

from limitforge import ManualClock
from limitforge.catalog.config import document
from limitforge.catalog.config.apply import apply_document
from limitforge.catalog.config.export import export_document
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import tables
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import OPERATOR, Key, Override, Plan, Policy, Tenant, to_datetime
from limitforge.errors import Conflict, InvalidInput, NotFound
from tests.catalog.conftest import PEPPERS

NAMES = st.sampled_from(["a", "no", "x/1.0", "Z"])
MODES = st.sampled_from(["on", "monitor", "off"])
FAILURES = st.sampled_from([None, "open", "closed", "local"])
PRIORITIES = st.sampled_from([None, "P0", "P3"])
RESOURCES = st.sampled_from(["*", "GET:/a", "GET:/a/{id}", "GET:/a/{other}", "POST:*", "*:/a", "ü: on"])
SUBJECTS = st.sampled_from(["user:42", "on", "a\nb", "日本語", "- x", " "])
FIELDS: list[dict[str, Any]] = [
    {"name": "x", "algorithm": "fixed_window", "limit": 5, "window_seconds": 0.5, "spread": True},
    {"name": "y", "algorithm": "quota", "limit": None, "period": "month", "time_zone": "UTC"},
    {"name": "z", "algorithm": "concurrency", "max_concurrent": 0, "lease_ttl_seconds": 9, "mode": "monitor"},
    {"name": "w", "algorithm": "token_bucket", "bucket_capacity": "9", "refill_rate_per_sec": 1 / 3},
]
LIMITS = st.sampled_from(["x=100/minute", "x=token:7/hour; y=3/second", "y=leaky:5/minute"]) | st.lists(
    st.sampled_from(FIELDS), max_size=3, unique_by=lambda limit: str(limit["name"])
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, "", "on", "1", "é\n"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "on", "1", "<"]), inner, max_size=2)
    ),
    max_leaves=4,
)
METADATA = st.dictionaries(st.sampled_from(["team", "no", "1"]), JSON, max_size=2)
CHANGES = st.dictionaries(
    st.sampled_from(["x", "y", "z", "w"]),
    st.sampled_from(["unlimited", "blocked", {"limit": 7}, {"window_seconds": 2}, {"refill_rate_per_sec": 0.25}]),
    min_size=1,
    max_size=2,
)

Step = Callable[[Edit, "World"], Awaitable[object]]


class World:
    """The entities that exist. Numbers choose one, modulo how many there are."""

    def __init__(self, entities: dict[type[Any], list[Any]]) -> None:
        self._entities = entities

    def pick(self, kind: type[Any], number: int, **having: str) -> Any:
        found = [e for e in self._entities[kind] if all(getattr(e, name) == value for name, value in having.items())]
        if not found:
            raise NotFound(f"there is no {kind.kind}")
        return found[number % len(found)]


NUMBERS = st.integers(0, 9)

TENANTS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "mode": MODES,
        "failure": FAILURES,
        "priority": PRIORITIES,
        "time_zone": st.sampled_from(["UTC", "Europe/Berlin"]),
        "lanes": st.sampled_from([1, 3, {"count": 2}, {"count": 2, "then": 4, "at": 2e9}]),
        "suspended": st.booleans(),
    }
)
PLANS = st.fixed_dictionaries({"name": NAMES, "limits": LIMITS})
POLICIES = st.fixed_dictionaries({"resource": RESOURCES, "mode": MODES, "failure": FAILURES, "priority": PRIORITIES})
KEYS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "type": st.sampled_from(["live", "test"]),
        "metadata": METADATA,
        "scopes": st.sampled_from(
            [["check"], ["usage"], ["usage", "check"], ["plans", "check"], ["plans", "usage", "check"]]
        ),
    }
)
OVERRIDES = st.fixed_dictionaries(
    {
        "resource": RESOURCES,
        "subject": SUBJECTS,
        "limits": CHANGES,
        "ttl_seconds": st.sampled_from([1, 3_600.5, 10**8]),
        "reason": st.sampled_from(["", "a: b"]),
    }
)
TENANT_CHANGES: Any = st.sampled_from([{"name": "renamed"}, {"mode": "off"}, {"lanes": 1}, {"time_zone": "Asia/Tokyo"}])


def add_tenant(fields: Any) -> Step:
    return lambda edit, _: edit.create(Tenant, fields)


def add_plan(number: int, fields: Any) -> Step:
    return lambda edit, world: edit.create(Plan, {"tenant_id": world.pick(Tenant, number).id, **fields})


def add_policy(number: int, shadow: int | None, fields: Any) -> Step:
    def step(edit: Edit, world: World) -> Awaitable[object]:
        plan = world.pick(Plan, number)
        own = {"tenant_id": plan.tenant_id, "plan_id": plan.id}
        beside = None if shadow is None else world.pick(Plan, shadow, tenant_id=plan.tenant_id).id
        return edit.create(Policy, {**fields, **own, "shadow_plan_id": beside})

    return step


def add_key(number: int, with_plan: bool, fields: Any) -> Step:
    def step(edit: Edit, world: World) -> Awaitable[object]:
        tenant = world.pick(Tenant, number)
        plan = world.pick(Plan, number, tenant_id=tenant.id).id if with_plan else None
        return edit.create_key({"tenant_id": tenant.id, "plan_id": plan, **fields})

    return step


def set_override(number: int, fields: Any) -> Step:
    return lambda edit, world: edit.set_override({"tenant_id": world.pick(Tenant, number).id, **fields})


def change_tenant(number: int, plan: int | None, fields: Any) -> Step:
    def step(edit: Edit, world: World) -> Awaitable[object]:
        tenant = world.pick(Tenant, number)
        default = None if plan is None else world.pick(Plan, plan, tenant_id=tenant.id).id
        return edit.update(Tenant, tenant.id, {**fields, "default_plan_id": default})

    return step


def change_operator(plan: int | None, mode: str) -> Step:
    def step(edit: Edit, world: World) -> Awaitable[object]:
        default = None if plan is None else world.pick(Plan, plan, tenant_id=OPERATOR).id
        return edit.update(Tenant, OPERATOR, {"mode": mode, "default_plan_id": default})

    return step


def change_plan(number: int, limits: Any) -> Step:
    return lambda edit, world: edit.update(Plan, world.pick(Plan, number).id, {"limits": limits})


def rotate_key(number: int, grace: int) -> Step:
    return lambda edit, world: edit.rotate_key(world.pick(Key, number).id, grace)


def disable_key(number: int, disabled: bool) -> Step:
    return lambda edit, world: edit.set_key_disabled(world.pick(Key, number).id, disabled=disabled)


def remove(kind: type[Any], number: int) -> Step:
    return lambda edit, world: edit.delete(kind, world.pick(kind, number).id)


PERHAPS = st.none() | NUMBERS
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(add_tenant, TENANTS),
    st.builds(add_plan, NUMBERS, PLANS),
    st.builds(add_plan, st.just(0), PLANS),  # the operator's
    st.builds(add_policy, NUMBERS, PERHAPS, POLICIES),
    st.builds(add_key, NUMBERS, st.booleans(), KEYS),
    st.builds(set_override, st.integers(1, 2), OVERRIDES),
    st.builds(change_tenant, NUMBERS, PERHAPS, TENANT_CHANGES),
    st.builds(change_operator, PERHAPS, MODES),
    st.builds(change_plan, NUMBERS, LIMITS),
    st.builds(rotate_key, NUMBERS, st.sampled_from([0, 1, 3_600])),
    st.builds(disable_key, NUMBERS, st.booleans()),
    st.builds(remove, st.sampled_from([Tenant, Plan, Policy, Key, Override]), NUMBERS),
)


def tenant_called(name: str) -> st.SearchStrategy[Step]:
    return st.builds(lambda fields: add_tenant({**fields, "name": name}), TENANTS)


# Begin with two tenants with plans, so that most edits find what they need. Number 0 is the operator.
BEGINNINGS = st.tuples(
    tenant_called("a"), tenant_called("b"), *(st.builds(add_plan, st.just(number), PLANS) for number in (1, 1, 2))
)


async def world_of(catalog: Catalog) -> World:
    tenants = [await catalog.get(Tenant, OPERATOR), *(await catalog.list_page(Tenant)).items]
    found: dict[type[Any], list[Any]] = {Tenant: tenants}
    for kind in (Plan, Policy, Key, Override):
        found[kind] = (await catalog.list_page(kind)).items
    return World(found)


async def empty_database(database: Database) -> None:
    """Empty a database, which is a hundred times as fast as a new one."""
    async with database.writing() as connection:
        await connection.execute(text("UPDATE tenants SET default_plan_id = NULL, mode = 'on', time_zone = 'UTC'"))
        for table in (
            tables.outbox,
            tables.overrides,
            tables.policies,
            tables.secrets,
            tables.keys,
            tables.plan_versions,
        ):
            await connection.execute(delete(table))
        await connection.execute(delete(tables.plans))
        await connection.execute(delete(tables.tenants).where(tables.tenants.c.id != OPERATOR))


@pytest.fixture(scope="module")
def runner() -> Any:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def databases(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("round-trip")
    found = [Database(f"sqlite:///{folder}/{name}.db") for name in ("one", "two")]
    for database in found:
        runner.run(database.upgrade())
    yield found
    for database in found:
        runner.run(database.close())


async def round_trip(databases: list[Database], edits: list[Step]) -> None:
    clock = ManualClock()
    first, second = (Catalog(database, peppers=Peppers.parse(PEPPERS), clock=clock) for database in databases)
    for database in databases:
        await empty_database(database)
    for step in edits:
        try:
            async with first.edit("test") as edit:
                await step(edit, await world_of(first))
        except (Conflict, InvalidInput, NotFound):
            continue
    for later in (timedelta(0), timedelta(minutes=10)):  # once more when something has expired
        clock.advance_us(int(later.total_seconds() * 1e6))
        now = to_datetime(clock.now_us())
        exported = await export_document(first)
        written = document.dump_document(exported)
        wanted, source = document.parse_document(written.encode(), "exported.yaml", now)
        assert wanted == exported
        await apply_document(second, wanted, "test", prune=True, source=source)
        assert await export_document(second) == exported
        assert document.dump_document(await export_document(second)) == written
        assert await apply_document(second, wanted, "test", prune=True) == []


@settings(max_examples=max(5, settings().max_examples // 8))
@given(beginning=BEGINNINGS, edits=st.lists(STEPS, max_size=25))
def test_any_sequence_of_edits_survives_the_way_through_a_file(
    beginning: tuple[Step, ...], edits: list[Step], databases: list[Database], runner: asyncio.Runner
) -> None:
    runner.run(round_trip(databases, [*beginning, *edits]))
