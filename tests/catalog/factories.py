"""Create entities of a catalog, and read rows of its database."""

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, TypeVar

from sqlalchemy import select, text

from limitforge.catalog.credentials import Credential
from limitforge.catalog.database import tables
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import AuditEntry, Entity, Key, Override, Plan, Policy, Tenant, Token
from limitforge.errors import LimitforgeError

AnyEntity = TypeVar("AnyEntity", bound=Entity)

ACTOR = "test:ann"
MINUTE_US = 60_000_000

# Unusual but valid values for text fields.
UNUSUAL_TEXTS = (
    "ü",
    "日本語",
    "🙂",
    "a b",
    "'; DROP TABLE tenants; --",
    "%s",
    "\\",
    '"',
    "\u202e",
    "\x7f",
    "null",
    "{}",
    ":x",
)


@contextlib.asynccontextmanager
async def open_database(url: str) -> AsyncIterator[Database]:
    """Open a database, and close it even if the test fails."""
    database = Database(url)
    try:
        yield database
    finally:
        await database.close()


def url_of(database: Database) -> str:
    """Return the URL of a database, with its password."""
    return database.url.render_as_string(hide_password=False)


async def new_tenant(catalog: Catalog, name: str = "acme", **fields: Any) -> Tenant:
    async with catalog.edit(ACTOR) as edit:
        return await edit.create(Tenant, {"name": name, **fields})


async def new_plan(catalog: Catalog, tenant_id: str, name: str = "free", **fields: Any) -> Plan:
    async with catalog.edit(ACTOR) as edit:
        given = fields or {"limits": "burst=100/minute"}
        return await edit.create(Plan, {"tenant_id": tenant_id, "name": name, **given})


async def new_policy(catalog: Catalog, plan: Plan, resource: str = "*", **fields: Any) -> Policy:
    async with catalog.edit(ACTOR) as edit:
        given = {"tenant_id": plan.tenant_id, "plan_id": plan.id, "resource": resource}
        return await edit.create(Policy, {**given, **fields})


async def new_key(catalog: Catalog, tenant_id: str, name: str = "web", **fields: Any) -> tuple[Key, Credential]:
    async with catalog.edit(ACTOR) as edit:
        return await edit.create_key({"tenant_id": tenant_id, "name": name, **fields})


async def new_token(catalog: Catalog, name: str = "ci", **fields: Any) -> tuple[Token, Credential]:
    async with catalog.edit(ACTOR) as edit:
        return await edit.create_token({"name": name, **fields})


async def new_override(catalog: Catalog, tenant_id: str, subject: str = "user:42", **fields: Any) -> Override:
    given: dict[str, Any] = {"tenant_id": tenant_id, "subject": subject, "limits": {"burst": {"limit": 500}}}
    if "expires_at" not in fields:
        given["ttl_seconds"] = 3_600
    async with catalog.edit(ACTOR) as edit:
        return await edit.set_override({**given, **fields})


async def update(catalog: Catalog, entity: AnyEntity, changes: Mapping[str, Any], **options: Any) -> AnyEntity:
    async with catalog.edit(ACTOR) as edit:
        return await edit.update(type(entity), entity.id, changes, **options)


async def delete(catalog: Catalog, entity: AnyEntity, **options: Any) -> AnyEntity:
    async with catalog.edit(ACTOR) as edit:
        return await edit.delete(type(entity), entity.id, **options)


class Customer:
    """A tenant with one of everything."""

    def __init__(self, tenant: Tenant, plan: Plan, policy: Policy, key: Key, token: Token, override: Override) -> None:
        self.tenant = tenant
        self.plan = plan
        self.policy = policy
        self.key = key
        self.token = token
        self.override = override

    @property
    def entities(self) -> tuple[Entity, ...]:
        return self.tenant, self.plan, self.policy, self.key, self.token, self.override


async def new_customer(catalog: Catalog, name: str = "acme") -> Customer:
    """Create a tenant with one of everything. Its default, its policy and its key use the same plan."""
    async with catalog.edit(ACTOR) as edit:
        tenant = await edit.create(Tenant, {"name": name})
        own = {"tenant_id": tenant.id}
        plan = await edit.create(Plan, {**own, "name": "free", "limits": "burst=100/minute"})
        tenant = await edit.update(Tenant, tenant.id, {"default_plan_id": plan.id})
        policy = await edit.create(Policy, {**own, "resource": "GET:/orders/{id}", "plan_id": plan.id})
        key, _ = await edit.create_key({**own, "name": "web", "plan_id": plan.id})
        token, _ = await edit.create_token({**own, "name": f"{name}-ci"})
        override = await edit.set_override(
            {**own, "subject": "user:42", "limits": {"burst": {"limit": 500}}, "ttl_seconds": 3_600}
        )
    return Customer(await catalog.get(Tenant, tenant.id), plan, policy, key, token, override)


async def table_contents(database: Database, leave_out: Iterable[str] = ()) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all tables. If they are equal, nothing was changed and nothing was logged."""
    async with database.reading() as connection:
        return {
            table.name: sorted((tuple(row) for row in await connection.execute(select(table))), key=repr)
            for table in tables.metadata.sorted_tables
            if table.name not in leave_out
        }


async def rows(database: Database, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    async with database.reading() as connection:
        return [tuple(row) for row in await connection.execute(text(statement), values)]


async def execute(database: Database, statement: str, **values: Any) -> None:
    """Execute plain SQL, without the checks of Python."""
    async with database.writing() as connection:
        await connection.execute(text(statement), values)


async def audit_of(catalog: Catalog, **which: Any) -> list[AuditEntry]:
    """Return audit entries, oldest first."""
    return list(reversed((await catalog.audit_page(size=1_000, **which)).items))


def field_of(error: LimitforgeError) -> str:
    """Return the field that an error names: its text begins with it."""
    return str(error).partition(":")[0]
