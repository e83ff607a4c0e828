"""The schema: upgrades and downgrades on both databases, equal to `tables.py`, and safe with concurrent processes."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, insert, inspect, text

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import tables
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database, newest_schema_version
from limitforge.catalog.model import Key, Plan, Tenant
from limitforge.errors import CatalogUnavailable, InvalidInput
from tests.catalog.conftest import PEPPERS
from tests.catalog.factories import execute, new_customer, open_database, rows, table_contents, url_of
from tests.postgres import PostgresServer


@pytest.fixture
async def bare(database_url: str) -> AsyncIterator[Database]:
    """Return a database without a schema."""
    async with open_database(database_url) as database:
        yield database


@pytest.fixture
async def another(bare: Database, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    """Return another database of the same kind without a schema."""
    if bare.is_sqlite:
        async with open_database(f"sqlite:///{tmp_path}/another.db") as database:
            yield database
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = f"test_{uuid4().hex}"
    async with open_database(server.create_database(name)) as database:
        yield database
    server.drop_database(name)


def described(connection: Connection) -> dict[str, Any]:
    """Return everything that a database reports about its tables."""
    inspector = inspect(connection)
    found: dict[str, Any] = {}
    for table in inspector.get_table_names():
        if table == "alembic_version":
            continue
        found[table] = {
            "columns": [
                (each["name"], str(each["type"]), each["nullable"], each["default"])
                for each in inspector.get_columns(table)
            ],
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": sorted(inspector.get_foreign_keys(table), key=repr),
            "unique": sorted(inspector.get_unique_constraints(table), key=repr),
            "checks": sorted((each["name"], str(each["sqltext"])) for each in inspector.get_check_constraints(table)),
            "indexes": sorted(inspector.get_indexes(table), key=repr),
        }
    return found


async def schema(database: Database) -> dict[str, Any]:
    async with database.reading() as connection:
        return await connection.run_sync(described)


async def triggers(database: Database) -> list[tuple[Any, ...]]:
    """Return the triggers, and the functions that Postgres needs for them."""
    if database.is_sqlite:
        return await rows(database, "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name")
    return await rows(
        database,
        "SELECT proname AS name, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace "
        "UNION SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal ORDER BY name",
    )


async def test_the_schema_goes_up_and_down_and_up_again(bare: Database) -> None:
    assert await bare.schema_version() is None
    await bare.upgrade()
    assert await bare.schema_version() == newest_schema_version()
    first = await schema(bare), await triggers(bare)
    await bare.downgrade("base")
    assert (await bare.schema_version(), await schema(bare), await triggers(bare)) == (None, {}, [])
    await bare.upgrade()
    assert (await schema(bare), await triggers(bare)) == first


async def test_a_downgrade_takes_all_that_was_in_it(catalog: Catalog, database: Database) -> None:
    await new_customer(catalog)
    await database.downgrade("base")
    await database.upgrade()
    kept = {table: len(found) for table, found in (await table_contents(database)).items() if found}
    assert kept == {"revision": 1, "tenants": 1}


async def test_a_new_schema_holds_the_operator_and_nothing_else(catalog: Catalog) -> None:
    operator = await catalog.get(Tenant, "operator")
    assert (operator.name, operator.mode, operator.time_zone, operator.default_plan_id) == (
        "operator",
        "on",
        "UTC",
        None,
    )
    assert (operator.lanes, operator.suspended, operator.version, operator.revision) == (1, False, 1, 0)
    assert operator.created_at.tzinfo is not None
    assert (await catalog.list_page(Tenant)).items == []


async def test_alembic_finds_no_difference_between_the_schema_and_the_tables(database: Database) -> None:
    def differences(connection: Connection) -> list[Any]:
        options = {"compare_type": True, "compare_server_default": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), tables.metadata))

    async with database.reading() as connection:
        assert await connection.run_sync(differences) == []


async def test_the_migrated_schema_is_the_one_that_the_tables_would_make(bare: Database, another: Database) -> None:
    """This includes constraints, which Alembic does not compare."""
    await bare.upgrade()
    async with another.writing() as connection:
        await connection.run_sync(tables.metadata.create_all)
    migrated, made = await schema(bare), await schema(another)
    assert migrated == made
    assert len(migrated) == len(tables.metadata.tables)
    assert sum(len(table["checks"]) for table in migrated.values()) > 20


async def test_several_that_upgrade_at_once_do_not_disturb_each_other(database_url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        databases = [await stack.enter_async_context(open_database(database_url)) for _ in range(4)]
        await asyncio.gather(*(database.upgrade() for database in databases))
        assert [await database.schema_version() for database in databases] == 4 * [newest_schema_version()]
        assert await rows(databases[0], "SELECT id FROM tenants") == [("operator",)]
        assert await rows(databases[0], "SELECT id, value FROM revision") == [(1, 0)]


async def test_several_that_prepare_a_new_file_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = f"sqlite:///{tmp_path}/new.db"
        databases = [await stack.enter_async_context(open_database(url)) for _ in range(8)]
        await asyncio.gather(*(database.ensure_schema() for database in databases))
        assert await rows(databases[0], "SELECT id FROM tenants") == [("operator",)]


async def test_a_new_file_that_another_is_making_is_waited_for(tmp_path: Path) -> None:
    """The switch to WAL needs the lock, for which SQLite itself does not wait."""
    file = tmp_path / "new.db"
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("CREATE TABLE mine (id INTEGER)")
        async with open_database(f"sqlite:///{file}") as database:
            preparing = asyncio.create_task(database.ensure_schema())
            await asyncio.sleep(0.1)
            other.execute("COMMIT")
            await preparing
            assert await database.schema_version() == newest_schema_version()


async def test_upgrading_what_is_new_keeps_everything(catalog: Catalog, database: Database) -> None:
    await new_customer(catalog)
    before = await table_contents(database)
    await database.upgrade()
    await database.ensure_schema()
    assert await table_contents(database) == before


async def test_what_was_written_is_there_for_the_next_one_who_opens_it(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)
    config = await catalog.tenant_config(customer.tenant.id)
    await database.close()
    async with open_database(url_of(database)) as later:
        await later.ensure_schema()
        assert await Catalog(later).tenant_config(customer.tenant.id) == config
        assert await Catalog(later).list_for_tenant(Plan, customer.tenant.id) == [customer.plan]


async def test_keys_of_an_earlier_release_may_name_plans_and_its_nodes_work_on(bare: Database) -> None:
    """A process of the earlier release knows neither the column nor the scope, and writes during a rolling upgrade."""
    await bare.upgrade("0003")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    own = {"version": 1, "created_at": now, "updated_at": now}
    tenant = {"id": "ten_a", "name": "a", "mode": "on", "time_zone": "UTC", "lanes": 1, "suspended": False}

    async def insert_as_before(identity: str, scopes: list[str]) -> None:
        key = {"id": identity, "tenant_id": "ten_a", "name": "k", "type": "live", "disabled": False, **own}
        async with bare.writing() as connection:
            await connection.execute(insert(tables.keys).values({**key, "scopes": scopes, "metadata": {}}))

    async with bare.writing() as connection:
        await connection.execute(insert(tables.tenants).values({**tenant, "revision": 0, **own}))
    await insert_as_before("key_before", ["check", "usage"])
    await insert_as_before("key_narrow", ["usage"])
    await bare.upgrade()
    await insert_as_before("key_during", ["check", "usage"])
    catalog = Catalog(bare, peppers=Peppers.parse(PEPPERS))
    scopes = {key.id: key.scopes for key in await catalog.list_for_tenant(Key, "ten_a")}
    assert scopes == {
        "key_before": ("check", "usage", "plans"),
        "key_during": ("check", "usage", "plans"),
        "key_narrow": ("usage", "plans"),
    }
    async with catalog.edit("test") as edit:
        await edit.update(Key, "key_before", {"scopes": ["check", "usage"]})
    written = await rows(bare, "SELECT scopes FROM keys WHERE id = 'key_before'")
    assert "plans" not in str(written), "a node of the release before would refuse the key"
    await execute(
        bare, "UPDATE keys SET scopes = '[\"check\"]' WHERE id = 'key_before'"
    )  # as the earlier release would
    assert (await catalog.get(Key, "key_before")).scopes == ("check",)
    await bare.downgrade("0003")
    await bare.upgrade()
    assert (await catalog.get(Key, "key_before")).scopes == ("check", "plans")


async def test_a_sqlite_file_is_upgraded_on_first_use(tmp_path: Path) -> None:
    async with open_database(f"sqlite:///{tmp_path}/first.db") as database:
        await database.ensure_schema()
        assert await database.schema_version() == newest_schema_version()


async def test_a_postgres_without_schema_says_what_to_run(postgres_url: str) -> None:
    async with open_database(postgres_url) as database:
        with pytest.raises(InvalidInput, match=r"missing.*limitforge db upgrade") as refused:
            await database.ensure_schema()
        assert refused.value.field == "database"
        with pytest.raises(CatalogUnavailable, match="limitforge db upgrade"):
            await Catalog(database).get(Tenant, "operator")
        with pytest.raises(CatalogUnavailable, match="limitforge db upgrade"):
            async with Catalog(database).edit("test"):
                pass
        assert await database.schema_version() is None


async def test_a_schema_of_a_later_release_is_refused_and_not_touched(database: Database) -> None:
    await execute(database, "UPDATE alembic_version SET version_num = '9999'")
    before = await schema(database)
    with pytest.raises(InvalidInput, match="9999") as refused:
        await database.ensure_schema()
    assert refused.value.field == "database"
    assert "db upgrade" not in refused.value.problem  # an upgrade would not help
    assert await schema(database) == before


@pytest.mark.parametrize("move", ["upgrade", "downgrade"])
async def test_an_unknown_schema_version_is_refused(database: Database, move: str) -> None:
    with pytest.raises(InvalidInput, match="zzz"):
        await getattr(database, move)("zzz")


async def test_an_upgrade_that_fails_leaves_nothing_behind(bare: Database) -> None:
    async with bare.writing() as connection:
        await connection.execute(text("CREATE TABLE overrides (mine INTEGER)"))
    with pytest.raises(CatalogUnavailable, match="already exists"):
        await bare.upgrade()
    assert list(await schema(bare)) == ["overrides"]
    assert (await bare.schema_version(), await triggers(bare)) == (None, [])
    await execute(bare, "DROP TABLE overrides")
    await bare.upgrade()
    assert len(await schema(bare)) == len(tables.metadata.tables)
