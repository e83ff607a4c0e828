"""`limitforge plans`: named sets of limits, and their history."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from limitforge.catalog.config.plan_warnings import plan_warnings
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.model import Plan, Policy, to_public_dict
from limitforge.cli.catalog.lookup import NamesById, find_entity, find_tenant, list_entities
from limitforge.cli.catalog.options import (
    AsJson,
    DatabaseUrl,
    TenantFilter,
    TenantOption,
    audit_actor,
    run_with_catalog,
)
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_fields, print_json, print_table, print_warnings
from limitforge.errors import InvalidInput

HELP = """Plans: named sets of limits. Every change is a new version, and the old ones stay.

Limits are text such as "100/minute; 10/second", or JSON: a list of limits,
each with its fields, or the fields of the only one.

Examples:
  limitforge plans create free --tenant acme --limits "100/minute; 1000/hour"
  limitforge plans update free --tenant acme --limits "200/minute"
  limitforge plans history free --tenant acme
  limitforge plans rollback free --tenant acme
"""

app = command_group(HELP)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name or id.")]
PlanOrPolicy = TypeVar("PlanOrPolicy", Plan, Policy)
LIMITS_HELP = 'Text such as "100/minute; 10/second", or JSON.'


@app.command("list")
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List plans with their limits."""

    async def work(catalog: Catalog) -> None:
        found = await list_entities(catalog, Plan, tenant)
        if as_json:
            print_json([to_public_dict(each) for each in found])
            return
        names = await NamesById.load(catalog, found)
        rows = [
            (each.name, names[each.tenant_id], each.version, describe_limits(each.limits), each.id) for each in found
        ]
        print_table(("NAME", "TENANT", "VERSION", "LIMITS", "ID"), rows, "There are no plans yet.")

    run_with_catalog(database, work)


@app.command()
def show(name: Name, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show one plan with all fields of its limits."""

    async def work(catalog: Catalog) -> None:
        plan = await find_entity(catalog, Plan, name, tenant)
        if as_json:
            print_json(to_public_dict(plan))
            return
        names = await NamesById.load(catalog, [plan])
        fields: dict[str, Any] = {"name": plan.name, "id": plan.id, "tenant": names[plan.tenant_id]}
        for limit in plan.limits:
            numbers = {field: value for field, value in limit.items() if field != "name"}
            fields[f"limit {limit['name']}"] = ", ".join(
                f"{field} {_format_number(value)}" for field, value in numbers.items()
            )
        print_fields({**fields, "version": plan.version, "created": plan.created_at, "updated": plan.updated_at})

    run_with_catalog(database, work)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 letters, digits or -_./ characters.")],
    tenant: TenantOption,
    limits: Annotated[str, typer.Option(metavar="LIMITS", help=LIMITS_HELP)],
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create a plan."""

    async def work(catalog: Catalog) -> Plan:
        owner = await find_tenant(catalog, tenant)
        fields = {"tenant_id": owner.id, "name": name, **_parse_limits_option(limits)}
        return await edit_and_warn(catalog, lambda edit: edit.create(Plan, fields))

    print_done("Created", run_with_catalog(database, work), as_json=as_json)


@app.command()
def update(
    name: Name,
    tenant: TenantFilter = None,
    limits: Annotated[str | None, typer.Option(metavar="LIMITS", help=LIMITS_HELP)] = None,
    new_name: Annotated[
        str | None, typer.Option("--name", metavar="NEW", help="What it is called from now on.")
    ] = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change a plan: all of its limits at once, or its name."""

    async def work(catalog: Catalog) -> Plan:
        plan = await find_entity(catalog, Plan, name, tenant)
        changes = {} if limits is None else _parse_limits_option(limits)
        if changes and "limits" not in changes:
            changes = {"limits": [{"name": plan.name, **changes}]}
        fields = changes if new_name is None else {**changes, "name": new_name}
        return await edit_and_warn(catalog, lambda edit: edit.update(Plan, plan.id, fields))

    print_done("Changed", run_with_catalog(database, work), as_json=as_json)


@app.command()
def history(
    name: Name, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """List the versions of a plan, the newest first."""

    async def work(catalog: Catalog) -> None:
        plan = await find_entity(catalog, Plan, name, tenant)
        found = await catalog.plan_versions(plan.id)
        if as_json:
            print_json(found)
            return
        rows = [
            (each["version"], each["created_at"], each["created_by"], describe_limits(each["limits"])) for each in found
        ]
        print_table(("VERSION", "SINCE", "BY", "LIMITS"), rows, "There are no versions.")

    run_with_catalog(database, work)


@app.command()
def rollback(
    name: Name,
    tenant: TenantFilter = None,
    to: Annotated[int | None, typer.Option(metavar="N", help="A version; the one before, if none is named.")] = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Bring back the limits of an earlier version, as a new version."""

    async def work(catalog: Catalog) -> Plan:
        plan = await find_entity(catalog, Plan, name, tenant)
        return await edit_and_warn(catalog, lambda edit: edit.roll_back_plan(plan.id, to))

    print_done("Rolled back", run_with_catalog(database, work), as_json=as_json)


@app.command()
def delete(
    name: Name, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Delete a plan that nobody uses any more."""

    async def work(catalog: Catalog) -> Plan:
        plan = await find_entity(catalog, Plan, name, tenant)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.delete(Plan, plan.id)

    print_done("Deleted", run_with_catalog(database, work), as_json=as_json)


async def edit_and_warn(catalog: Catalog, change: Callable[[Edit], Awaitable[PlanOrPolicy]]) -> PlanOrPolicy:
    """Change a plan or a policy, and warn where its limits count apart from others of their name."""
    async with catalog.edit(audit_actor()) as edit:
        entity = await change(edit)
        plan_id = entity.id if isinstance(entity, Plan) else entity.plan_id
        warnings = await plan_warnings(edit.connection, entity.tenant_id, plan_id)
    print_warnings(warnings)
    return entity


def describe_limits(limits: Any) -> str:
    """Limits in a few words each."""
    return "; ".join(f"{limit['name']}: {_describe_limit(limit)}" for limit in limits)


def _describe_limit(limit: Mapping[str, Any]) -> str:
    match limit["algorithm"]:
        case "token_bucket":
            said = f"{_format_size(limit['bucket_capacity'])}, refilled {_format_number(limit.get('refill_rate_per_sec'))}/s"
        case "leaky_bucket":
            said = (
                f"queue of {_format_size(limit['bucket_capacity'])}, {_format_number(limit.get('leak_rate_per_sec'))}/s"
            )
        case "concurrency":
            said = f"{_format_size(limit['max_concurrent'])} at once"
        case "quota":
            said = f"{_format_size(limit['limit'])} a {limit['period']}"
        case _:
            said = f"{_format_size(limit['limit'])} in {_format_number(limit['window_seconds'])} s"
    extra = [str(limit[field]) for field in ("scope", "mode") if field in limit]
    return f"{said} ({', '.join(extra)})" if extra else said


def _format_size(size: Any) -> str:
    return "unlimited" if size is None else _format_number(size)


def _format_number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _parse_limits_option(text: str) -> dict[str, Any]:
    """Fields of a plan: `limits`, or those of its only limit."""
    if not text.lstrip().startswith(("[", "{")):
        return {"limits": text}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidInput("--limits", f"is not JSON: {error}") from None
    return {"limits": found} if isinstance(found, list) else found
