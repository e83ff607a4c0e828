"""`limitforge plans`: named sets of limits, and their versions."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.database.plan_warnings import plan_warnings
from limitforge.catalog.model import Plan, Policy, to_public_dict
from limitforge.cli.catalog.connect import audit_actor, run_with_catalog
from limitforge.cli.catalog.edit import delete_entity
from limitforge.cli.catalog.lookup import NamesById, find_entity, find_tenant, list_entities
from limitforge.cli.catalog.options import (
    AsJson,
    CreatedName,
    DatabaseUrl,
    NameOrId,
    NewName,
    TenantFilter,
    TenantOption,
)
from limitforge.cli.catalog.show import print_entity
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_json, print_table, print_warnings
from limitforge.errors import InvalidInput

HELP = """Plans: named sets of limits. A change adds a version, and old versions are kept.

Limits are text such as "100/minute; 10/second", or JSON: a list of limits with
their fields, or the fields of a single limit.

Examples:
  limitforge plans create free --tenant acme --limits "100/minute; 1000/hour"
  limitforge plans update free --tenant acme --limits "200/minute"
  limitforge plans history free --tenant acme
  limitforge plans rollback free --tenant acme
"""

app = command_group(HELP)

PlanOrPolicy = TypeVar("PlanOrPolicy", Plan, Policy)
LIMITS_HELP = 'Text such as "100/minute; 10/second", or JSON.'


@app.command("list")
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List plans with their limits."""

    async def work(catalog: Catalog) -> None:
        plans = await list_entities(catalog, Plan, tenant)
        if as_json:
            print_json([to_public_dict(plan) for plan in plans])
            return
        names = await NamesById.load(catalog, plans)
        rows = [
            (plan.name, names[plan.tenant_id], plan.version, describe_limits(plan.limits), plan.id) for plan in plans
        ]
        print_table(("NAME", "TENANT", "VERSION", "LIMITS", "ID"), rows, "There are no plans yet.")

    run_with_catalog(database, work)


@app.command()
def show(
    name: NameOrId, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Show one plan with all fields of its limits."""

    async def work(catalog: Catalog) -> None:
        plan = await find_entity(catalog, Plan, name, tenant)
        limits = {
            f"limit {limit['name']}": ", ".join(
                f"{field} {_format_number(value)}" for field, value in limit.items() if field != "name"
            )
            for limit in plan.limits
        }
        await print_entity(catalog, plan, as_json=as_json, **limits, limits=None)

    run_with_catalog(database, work)


@app.command()
def create(
    name: CreatedName,
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
    name: NameOrId,
    tenant: TenantFilter = None,
    limits: Annotated[str | None, typer.Option(metavar="LIMITS", help=LIMITS_HELP)] = None,
    new_name: NewName = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change the name of a plan, or all of its limits."""

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
    name: NameOrId, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """List the versions of a plan, the newest first."""

    async def work(catalog: Catalog) -> None:
        plan = await find_entity(catalog, Plan, name, tenant)
        versions = await catalog.plan_versions(plan.id)
        if as_json:
            print_json(versions)
            return
        rows = [
            (version["version"], version["created_at"], version["created_by"], describe_limits(version["limits"]))
            for version in versions
        ]
        print_table(("VERSION", "SINCE", "BY", "LIMITS"), rows, "There are no versions.")

    run_with_catalog(database, work)


@app.command()
def rollback(
    name: NameOrId,
    tenant: TenantFilter = None,
    to: Annotated[
        int | None, typer.Option(metavar="N", help="The version to restore; the previous one by default.")
    ] = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Restore the limits of an earlier version, as a new version."""

    async def work(catalog: Catalog) -> Plan:
        plan = await find_entity(catalog, Plan, name, tenant)
        return await edit_and_warn(catalog, lambda edit: edit.roll_back_plan(plan.id, to))

    print_done("Rolled back", run_with_catalog(database, work), as_json=as_json)


@app.command()
def delete(
    name: NameOrId, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Delete a plan. A plan that is still in use can't be deleted."""
    print_done("Deleted", delete_entity(database, Plan, name, tenant), as_json=as_json)


async def edit_and_warn(catalog: Catalog, change: Callable[[Edit], Awaitable[PlanOrPolicy]]) -> PlanOrPolicy:
    """Change a plan or a policy, and warn if some of its limits count separately from others of their name."""
    async with catalog.edit(audit_actor()) as edit:
        entity = await change(edit)
        plan_id = entity.id if isinstance(entity, Plan) else entity.plan_id
        warnings = await plan_warnings(edit.connection, entity.tenant_id, plan_id)
    print_warnings(warnings)
    return entity


def describe_limits(limits: Any) -> str:
    """Return a short text such as "burst: 10, refilled 2/s; hourly: 1000 in 3600 s"."""
    return "; ".join(f"{limit['name']}: {_describe_limit(limit)}" for limit in limits)


def _describe_limit(limit: Mapping[str, Any]) -> str:
    match limit["algorithm"]:
        case "token_bucket":
            size, rate = _format_size(limit["bucket_capacity"]), _format_number(limit.get("refill_rate_per_sec"))
            description = f"{size}, refilled {rate}/s"
        case "leaky_bucket":
            size, rate = _format_size(limit["bucket_capacity"]), _format_number(limit.get("leak_rate_per_sec"))
            description = f"queue of {size}, {rate}/s"
        case "concurrency":
            description = f"{_format_size(limit['max_concurrent'])} at once"
        case "quota":
            description = f"{_format_size(limit['limit'])} a {limit['period']}"
        case _:
            description = f"{_format_size(limit['limit'])} in {_format_number(limit['window_seconds'])} s"
    extra = [str(limit[field]) for field in ("scope", "mode") if field in limit]
    return f"{description} ({', '.join(extra)})" if extra else description


def _format_size(size: Any) -> str:
    return "unlimited" if size is None else _format_number(size)


def _format_number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _parse_limits_option(text: str) -> dict[str, Any]:
    """Return fields of a plan: `limits`, or the fields of its single limit."""
    if not text.lstrip().startswith(("[", "{")):
        return {"limits": text}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidInput("--limits", f"is not valid JSON: {error}") from None
    return {"limits": value} if isinstance(value, list) else value
