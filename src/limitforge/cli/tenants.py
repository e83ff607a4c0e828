"""`limitforge tenants`: whose traffic is limited."""

from typing import Annotated, Any

import typer

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Tenant, to_public_dict
from limitforge.cli.catalog.lookup import NamesById, find_tenant, list_entities, resolve_plan_names
from limitforge.cli.catalog.options import (
    AsJson,
    DatabaseUrl,
    YesFlag,
    audit_actor,
    confirm,
    given_fields,
    run_with_catalog,
)
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_fields, print_json, print_table
from limitforge.core.limits import Mode

HELP = """Tenants: whose traffic is limited.

Examples:
  limitforge tenants create acme --time-zone Europe/Berlin
  limitforge tenants update acme --default-plan free
  limitforge tenants suspend acme
  limitforge tenants list --json
"""

app = command_group(HELP)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name or id.")]
TenantMode = Annotated[Mode | None, typer.Option(help="on decides, monitor only reports, off lets all pass.")]
TimeZone = Annotated[str | None, typer.Option("--time-zone", metavar="ZONE", help="Such as Europe/Berlin, for quotas.")]
Failure = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="While the store is away: open, closed or local; none for the service's own."),
]
Priority = Annotated[
    str | None, typer.Option(metavar="P0-P3", help="Of checks that state none; none for the usual one.")
]
LaneCount = Annotated[
    int | None, typer.Option("--lanes", metavar="N", help="Spread over N lanes of a cluster; counters start afresh.")
]


@app.command("list")
def list_all(database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List all tenants."""

    async def work(catalog: Catalog) -> None:
        found = await list_entities(catalog, Tenant)
        if as_json:
            print_json([to_public_dict(each) for each in found])
            return
        names = await NamesById.load(catalog, found)
        rows = [
            (each.name, each.mode, names[each.default_plan_id], each.time_zone, _tenant_state(each), each.id)
            for each in found
        ]
        print_table(("NAME", "MODE", "DEFAULT PLAN", "TIME ZONE", "STATE", "ID"), rows, "There are no tenants yet.")

    run_with_catalog(database, work)


@app.command()
def show(name: Name, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show one tenant."""

    async def work(catalog: Catalog) -> None:
        await print_tenant(catalog, await find_tenant(catalog, name), as_json=as_json)

    run_with_catalog(database, work)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 letters, digits or -_./ characters.")],
    mode: TenantMode = None,
    time_zone: TimeZone = None,
    failure: Failure = None,
    priority: Priority = None,
    lanes: LaneCount = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create a tenant. Its plans come next, and then its keys."""
    fields = given_fields(mode=mode, time_zone=time_zone, failure=failure, priority=priority, lanes=lanes)

    async def work(catalog: Catalog) -> Tenant:
        async with catalog.edit(audit_actor()) as edit:
            return await edit.create(Tenant, {"name": name, **fields})

    print_done("Created", run_with_catalog(database, work), as_json=as_json)


@app.command()
def update(
    name: Name,
    new_name: Annotated[
        str | None, typer.Option("--name", metavar="NEW", help="What it is called from now on.")
    ] = None,
    mode: TenantMode = None,
    default_plan: Annotated[
        str | None, typer.Option(metavar="PLAN", help="For whatever no policy or key has another one; none for none.")
    ] = None,
    time_zone: TimeZone = None,
    failure: Failure = None,
    priority: Priority = None,
    lanes: LaneCount = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change a tenant: only what you name."""
    fields = given_fields(
        mode=mode, default_plan=default_plan, time_zone=time_zone, failure=failure, priority=priority, lanes=lanes
    )
    if new_name is not None:
        fields["name"] = new_name
    print_done("Changed", change_tenant(database, name, fields), as_json=as_json)


@app.command()
def suspend(name: Name, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Refuse all keys of a tenant, until it is resumed."""
    print_done("Suspended", change_tenant(database, name, {"suspended": True}), as_json=as_json)


@app.command()
def resume(name: Name, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Let the keys of a suspended tenant in again."""
    print_done("Resumed", change_tenant(database, name, {"suspended": False}), as_json=as_json)


@app.command()
def delete(name: Name, yes: YesFlag = False, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Delete a tenant with its plans, policies, keys and overrides. The audit log keeps what they were."""
    confirm(f"Delete tenant {name} and all that is its own?", yes=yes)

    async def work(catalog: Catalog) -> Tenant:
        tenant = await find_tenant(catalog, name)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.delete(Tenant, tenant.id)

    print_done("Deleted", run_with_catalog(database, work), as_json=as_json)


def change_tenant(database: str, name: str, fields: dict[str, Any]) -> Tenant:
    """Change a tenant, or the operator; plans are named by their names."""

    async def work(catalog: Catalog) -> Tenant:
        tenant = await find_tenant(catalog, name)
        changes = await resolve_plan_names(catalog, tenant.id, fields)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.update(Tenant, tenant.id, changes)

    return run_with_catalog(database, work)


async def print_tenant(catalog: Catalog, tenant: Tenant, *, as_json: bool) -> None:
    if as_json:
        print_json(to_public_dict(tenant))
        return
    names = await NamesById.load(catalog, [tenant])
    fields = {
        "name": tenant.name,
        "id": tenant.id,
        "state": None if tenant.is_operator else _tenant_state(tenant),
        "mode": tenant.mode,
        "plan" if tenant.is_operator else "default plan": names[tenant.default_plan_id] or "none",
        "time zone": tenant.time_zone,
        "failure": tenant.failure,
        "priority": tenant.priority,
        "lanes": None if tenant.lanes == 1 else to_public_dict(tenant)["lanes"],
        "version": tenant.version,
        "created": tenant.created_at,
        "updated": tenant.updated_at,
    }
    print_fields(fields)


def _tenant_state(tenant: Tenant) -> str:
    return "suspended" if tenant.suspended else "active"
