"""`limitforge tenants`: accounts whose traffic is limited."""

from typing import Annotated, Any

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Tenant, to_public_dict
from limitforge.cli.catalog.connect import audit_actor, run_with_catalog
from limitforge.cli.catalog.edit import delete_entity
from limitforge.cli.catalog.lookup import NamesById, find_tenant, list_entities, resolve_plan_names
from limitforge.cli.catalog.options import (
    AsJson,
    CreatedName,
    DatabaseUrl,
    FailureOption,
    ModeOption,
    NameOrId,
    NewName,
    PriorityOption,
    TimeZoneOption,
    YesFlag,
    confirm,
    field_option,
)
from limitforge.cli.catalog.show import print_entity
from limitforge.cli.catalog.values import given_fields
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_json, print_table

HELP = """Tenants: accounts whose traffic is limited.

Examples:
  limitforge tenants create acme --time-zone Europe/Berlin
  limitforge tenants update acme --default-plan free
  limitforge tenants suspend acme
  limitforge tenants list --json
"""

app = command_group(HELP)

LanesOption = Annotated[
    int | None, field_option(Tenant, "lanes", "--lanes", metavar="N", note="A change resets its counters.")
]


@app.command("list")
def list_all(database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List all tenants."""

    async def work(catalog: Catalog) -> None:
        tenants = await list_entities(catalog, Tenant)
        if as_json:
            print_json([to_public_dict(tenant) for tenant in tenants])
            return
        names = await NamesById.load(catalog, tenants)
        rows = [
            (
                tenant.name,
                tenant.mode,
                names[tenant.default_plan_id],
                tenant.time_zone,
                tenant_state(tenant),
                tenant.id,
            )
            for tenant in tenants
        ]
        print_table(("NAME", "MODE", "DEFAULT PLAN", "TIME ZONE", "STATE", "ID"), rows, "There are no tenants yet.")

    run_with_catalog(database, work)


@app.command()
def show(name: NameOrId, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show one tenant."""

    async def work(catalog: Catalog) -> None:
        tenant = await find_tenant(catalog, name)
        await print_entity(
            catalog,
            tenant,
            as_json=as_json,
            state=tenant_state(tenant),
            lanes=None if tenant.lanes == 1 else to_public_dict(tenant)["lanes"],
            suspended=None,
            revision=None,
        )

    run_with_catalog(database, work)


@app.command()
def create(
    name: CreatedName,
    mode: ModeOption = None,
    time_zone: TimeZoneOption = None,
    failure: FailureOption = None,
    priority: PriorityOption = None,
    lanes: LanesOption = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create a tenant. Create its plans next, and then its keys."""
    fields = given_fields(mode=mode, time_zone=time_zone, failure=failure, priority=priority, lanes=lanes)

    async def work(catalog: Catalog) -> Tenant:
        async with catalog.edit(audit_actor()) as edit:
            return await edit.create(Tenant, {"name": name, **fields})

    print_done("Created", run_with_catalog(database, work), as_json=as_json)


@app.command()
def update(
    name: NameOrId,
    new_name: NewName = None,
    mode: ModeOption = None,
    default_plan: Annotated[
        str | None, field_option(Tenant, "default_plan_id", "--default-plan", metavar="PLAN", clearable=True)
    ] = None,
    time_zone: TimeZoneOption = None,
    failure: FailureOption = None,
    priority: PriorityOption = None,
    lanes: LanesOption = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a tenant."""
    fields = given_fields(
        mode=mode, default_plan=default_plan, time_zone=time_zone, failure=failure, priority=priority, lanes=lanes
    )
    if new_name is not None:
        fields["name"] = new_name
    print_done("Changed", change_tenant(database, name, fields), as_json=as_json)


@app.command()
def suspend(name: NameOrId, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Suspend a tenant. Its keys are rejected until it is resumed."""
    print_done("Suspended", change_tenant(database, name, {"suspended": True}), as_json=as_json)


@app.command()
def resume(name: NameOrId, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Resume a suspended tenant."""
    print_done("Resumed", change_tenant(database, name, {"suspended": False}), as_json=as_json)


@app.command()
def delete(name: NameOrId, yes: YesFlag = False, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Delete a tenant with its plans, policies, keys and overrides. Its audit log is kept."""
    confirm(f"Delete tenant {name} with its plans, policies, keys and overrides?", yes=yes)
    print_done("Deleted", delete_entity(database, Tenant, name), as_json=as_json)


def change_tenant(database: str, name: str, fields: dict[str, Any]) -> Tenant:
    """Change a tenant or the operator. `fields` refers to plans by name."""

    async def work(catalog: Catalog) -> Tenant:
        tenant = await find_tenant(catalog, name)
        changes = await resolve_plan_names(catalog, tenant.id, fields)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.update(Tenant, tenant.id, changes)

    return run_with_catalog(database, work)


def tenant_state(tenant: Tenant) -> str:
    return "suspended" if tenant.suspended else "active"
