"""`limitforge policies`: which plan applies to which resources."""

from typing import Annotated

import typer

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Policy, to_public_dict
from limitforge.cli.catalog.lookup import NamesById, find_entity, find_tenant, list_entities, resolve_plan_names
from limitforge.cli.catalog.options import (
    AsJson,
    DatabaseUrl,
    TenantFilter,
    TenantOption,
    audit_actor,
    given_fields,
    run_with_catalog,
)
from limitforge.cli.plans import edit_and_warn
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_fields, print_json, print_table
from limitforge.core.limits import Mode

HELP = """Policies: which plan applies to which resources of a tenant. The most specific one does.

A resource is GET:/orders, GET:/orders/{id}, GET:/files/*, *:/orders, POST:* or *.

Examples:
  limitforge policies create "GET:/orders/{id}" --tenant acme --plan free
  limitforge policies update "GET:/orders/{id}" --tenant acme --mode monitor
  limitforge policies list --tenant acme
"""

app = command_group(HELP)

Resource = Annotated[str, typer.Argument(metavar="RESOURCE", help="Its resource, as it was written, or its id.")]
PolicyMode = Annotated[Mode | None, typer.Option(help="on decides, monitor only reports, off lets all pass.")]
Failure = Annotated[
    str | None, typer.Option(metavar="NAME", help="While the store is away: open, closed or local; none: the tenant's.")
]
Priority = Annotated[
    str | None, typer.Option(metavar="P0-P3", help="Of checks that state none; none for the tenant's.")
]
ShadowPlan = Annotated[
    str | None, typer.Option("--shadow-plan", metavar="PLAN", help="Tried beside it, and never denies; none for none.")
]


@app.command("list")
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List policies."""

    async def work(catalog: Catalog) -> None:
        found = await list_entities(catalog, Policy, tenant)
        if as_json:
            print_json([to_public_dict(each) for each in found])
            return
        names = await NamesById.load(catalog, found)
        rows = [
            (each.resource, names[each.tenant_id], names[each.plan_id], each.mode, each.failure, each.priority, each.id)
            for each in found
        ]
        columns = ("RESOURCE", "TENANT", "PLAN", "MODE", "FAILURE", "PRIORITY", "ID")
        print_table(columns, rows, "There are no policies yet.")

    run_with_catalog(database, work)


@app.command()
def show(
    resource: Resource, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Show one policy."""

    async def work(catalog: Catalog) -> None:
        policy = await find_entity(catalog, Policy, resource, tenant)
        if as_json:
            print_json(to_public_dict(policy))
            return
        names = await NamesById.load(catalog, [policy])
        print_fields(
            {
                "resource": policy.resource,
                "id": policy.id,
                "tenant": names[policy.tenant_id],
                "plan": names[policy.plan_id],
                "shadow plan": names[policy.shadow_plan_id],
                "mode": policy.mode,
                "failure": policy.failure,
                "priority": policy.priority,
                "version": policy.version,
                "created": policy.created_at,
                "updated": policy.updated_at,
            }
        )

    run_with_catalog(database, work)


@app.command()
def create(
    resource: Annotated[str, typer.Argument(metavar="RESOURCE", help="Such as GET:/orders/{id}, POST:* or *.")],
    tenant: TenantOption,
    plan: Annotated[str, typer.Option(metavar="PLAN", help="The plan that applies.")],
    mode: PolicyMode = None,
    failure: Failure = None,
    priority: Priority = None,
    shadow_plan: ShadowPlan = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create a policy."""
    fields = given_fields(plan=plan, mode=mode, failure=failure, priority=priority, shadow_plan=shadow_plan)

    async def work(catalog: Catalog) -> Policy:
        owner = await find_tenant(catalog, tenant)
        values = await resolve_plan_names(catalog, owner.id, fields)
        own = {"tenant_id": owner.id, "resource": resource, **values}
        return await edit_and_warn(catalog, lambda edit: edit.create(Policy, own))

    print_done("Created", run_with_catalog(database, work), as_json=as_json)


@app.command()
def update(
    resource: Resource,
    tenant: TenantFilter = None,
    new_resource: Annotated[
        str | None, typer.Option("--resource", metavar="NEW", help="What it applies to from now on.")
    ] = None,
    plan: Annotated[str | None, typer.Option(metavar="PLAN", help="The plan that applies.")] = None,
    mode: PolicyMode = None,
    failure: Failure = None,
    priority: Priority = None,
    shadow_plan: ShadowPlan = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change a policy: only what you name."""
    fields = given_fields(mode=mode, failure=failure, priority=priority, shadow_plan=shadow_plan)

    async def work(catalog: Catalog) -> Policy:
        policy = await find_entity(catalog, Policy, resource, tenant)
        own = {name: value for name, value in (("plan", plan), ("resource", new_resource)) if value is not None}
        changes = await resolve_plan_names(catalog, policy.tenant_id, fields | own)
        return await edit_and_warn(catalog, lambda edit: edit.update(Policy, policy.id, changes))

    print_done("Changed", run_with_catalog(database, work), as_json=as_json)


@app.command()
def delete(
    resource: Resource, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Delete a policy."""

    async def work(catalog: Catalog) -> Policy:
        policy = await find_entity(catalog, Policy, resource, tenant)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.delete(Policy, policy.id)

    print_done("Deleted", run_with_catalog(database, work), as_json=as_json)
