"""`limitforge policies`: the plans that apply to the resources of a tenant."""

from typing import Annotated

import typer

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Policy, to_public_dict
from limitforge.cli.catalog.connect import run_with_catalog
from limitforge.cli.catalog.edit import delete_entity
from limitforge.cli.catalog.lookup import NamesById, find_entity, find_tenant, list_entities, resolve_plan_names
from limitforge.cli.catalog.options import (
    AsJson,
    DatabaseUrl,
    FailureOption,
    ModeOption,
    PriorityOption,
    TenantFilter,
    TenantOption,
    field_option,
)
from limitforge.cli.catalog.show import print_entity
from limitforge.cli.catalog.values import given_fields
from limitforge.cli.plans import edit_and_warn
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_json, print_table

HELP = """Policies: the plans that apply to the resources of a tenant.

If several policies match a resource, the most specific one applies. A resource
is GET:/orders, GET:/orders/{id}, GET:/files/*, *:/orders, POST:* or *.

Examples:
  limitforge policies create "GET:/orders/{id}" --tenant acme --plan free
  limitforge policies update "GET:/orders/{id}" --tenant acme --mode monitor
  limitforge policies list --tenant acme
"""

app = command_group(HELP)

ResourceOrId = Annotated[str, typer.Argument(metavar="RESOURCE", help="Its resource, exactly as created, or its id.")]
ShadowPlan = Annotated[
    str | None, field_option(Policy, "shadow_plan_id", "--shadow-plan", metavar="PLAN", clearable=True)
]


@app.command("list")
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List policies."""

    async def work(catalog: Catalog) -> None:
        policies = await list_entities(catalog, Policy, tenant)
        if as_json:
            print_json([to_public_dict(policy) for policy in policies])
            return
        names = await NamesById.load(catalog, policies)
        rows = [
            (
                policy.resource,
                names[policy.tenant_id],
                names[policy.plan_id],
                policy.mode,
                policy.failure,
                policy.priority,
                policy.id,
            )
            for policy in policies
        ]
        columns = ("RESOURCE", "TENANT", "PLAN", "MODE", "FAILURE", "PRIORITY", "ID")
        print_table(columns, rows, "There are no policies yet.")

    run_with_catalog(database, work)


@app.command()
def show(
    resource: ResourceOrId, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Show one policy."""

    async def work(catalog: Catalog) -> None:
        await print_entity(catalog, await find_entity(catalog, Policy, resource, tenant), as_json=as_json)

    run_with_catalog(database, work)


@app.command()
def create(
    resource: Annotated[str, typer.Argument(metavar="RESOURCE", help="Such as GET:/orders/{id}, POST:* or *.")],
    tenant: TenantOption,
    plan: Annotated[str, field_option(Policy, "plan_id", "--plan", metavar="PLAN")],
    mode: ModeOption = None,
    failure: FailureOption = None,
    priority: PriorityOption = None,
    shadow_plan: ShadowPlan = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create a policy."""
    fields = given_fields(plan=plan, mode=mode, failure=failure, priority=priority, shadow_plan=shadow_plan)

    async def work(catalog: Catalog) -> Policy:
        owner = await find_tenant(catalog, tenant)
        values = {"tenant_id": owner.id, "resource": resource, **await resolve_plan_names(catalog, owner.id, fields)}
        return await edit_and_warn(catalog, lambda edit: edit.create(Policy, values))

    print_done("Created", run_with_catalog(database, work), as_json=as_json)


@app.command()
def update(
    resource: ResourceOrId,
    tenant: TenantFilter = None,
    new_resource: Annotated[str | None, typer.Option("--resource", metavar="NEW", help="The new resource.")] = None,
    plan: Annotated[str | None, field_option(Policy, "plan_id", "--plan", metavar="PLAN")] = None,
    mode: ModeOption = None,
    failure: FailureOption = None,
    priority: PriorityOption = None,
    shadow_plan: ShadowPlan = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a policy."""
    fields = given_fields(mode=mode, failure=failure, priority=priority, shadow_plan=shadow_plan)
    # Not through given_fields: the word `none` is a valid name of a plan, and of a resource.
    fields |= {name: value for name, value in (("plan", plan), ("resource", new_resource)) if value is not None}

    async def work(catalog: Catalog) -> Policy:
        policy = await find_entity(catalog, Policy, resource, tenant)
        changes = await resolve_plan_names(catalog, policy.tenant_id, fields)
        return await edit_and_warn(catalog, lambda edit: edit.update(Policy, policy.id, changes))

    print_done("Changed", run_with_catalog(database, work), as_json=as_json)


@app.command()
def delete(
    resource: ResourceOrId, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Delete a policy."""
    print_done("Deleted", delete_entity(database, Policy, resource, tenant), as_json=as_json)
