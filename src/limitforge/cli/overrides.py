"""`limitforge overrides`: different limits for one subject, until they expire."""

import json
from typing import Annotated, Any

import typer

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Override, to_datetime, to_public_dict
from limitforge.cli.catalog.connect import audit_actor, run_with_catalog
from limitforge.cli.catalog.lookup import NamesById, find_tenant, list_entities
from limitforge.cli.catalog.options import AsJson, DatabaseUrl, TenantFilter, TenantOption, field_option
from limitforge.cli.catalog.show import print_entity
from limitforge.cli.catalog.values import parse_json_object, parse_time
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import format_value, print_json, print_table
from limitforge.core.overrides import ANY_RESOURCE, BLOCKED_WORD, UNLIMITED_WORD
from limitforge.errors import InvalidInput, NotFound

HELP = """Overrides: different limits for one subject, until they expire.

Write NAME=NUMBER, NAME=unlimited or NAME=blocked for each limit to change.

Examples:
  limitforge overrides set user:42 --tenant acme --limit burst=500 --for 24h
  limitforge overrides set user:13 --tenant acme --limit burst=blocked --for 7d
  limitforge overrides list --tenant acme
  limitforge overrides delete user:42 --tenant acme
"""

app = command_group(HELP)

Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject, such as user:42, or the override's id.")]
Resource = Annotated[str, typer.Option(metavar="RESOURCE", help="The resource; * for any.")]


@app.command("list")
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the overrides that have not expired."""

    async def work(catalog: Catalog) -> None:
        now = to_datetime(catalog.clock.now_us())
        stored = await list_entities(catalog, Override, tenant)
        overrides = [override for override in stored if override.expires_at > now]
        if as_json:
            print_json([to_public_dict(override) for override in overrides])
            return
        names = await NamesById.load(catalog, overrides)
        rows = [
            (
                override.subject,
                override.resource,
                names[override.tenant_id],
                _describe_limits(override.limits),
                override.expires_at,
                override.reason,
            )
            for override in overrides
        ]
        columns = ("SUBJECT", "RESOURCE", "TENANT", "LIMITS", "EXPIRES", "REASON")
        print_table(columns, rows, "There are no overrides.")

    run_with_catalog(database, work)


@app.command()
def show(
    subject: Subject,
    tenant: TenantOption,
    resource: Resource = ANY_RESOURCE,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show one override, with the actor that set it and the reason."""

    async def work(catalog: Catalog) -> None:
        override = await _find_override(catalog, subject, tenant, resource)
        await print_entity(catalog, override, as_json=as_json, limits=_describe_limits(override.limits))

    run_with_catalog(database, work)


@app.command("set")
def set_override(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject, such as user:42.")],
    tenant: TenantOption,
    resource: Resource = ANY_RESOURCE,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER", help="A limit with its new number, unlimited or blocked. Repeat it for several."
        ),
    ] = None,
    limits: Annotated[
        str | None, typer.Option(metavar="JSON", help='Any fields: {"burst": {"refill_rate_per_sec": 9}}.')
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="How long it lasts, such as 24h.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="WHEN", help="When it expires, such as 2026-12-31T00:00:00Z.")
    ] = None,
    reason: Annotated[str, field_option(Override, "reason", metavar="TEXT")] = "",
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Set an override, and replace an existing one of this subject and resource."""
    if (duration is None) == (until is None):
        raise InvalidInput("--for", "exactly one of --for and --until is required")
    changes = _parse_limit_changes(limit or [], limits)

    async def work(catalog: Catalog) -> Override:
        owner = await find_tenant(catalog, tenant)
        now = to_datetime(catalog.clock.now_us())
        expiry = parse_time("--for", duration, now) if duration is not None else parse_time("--until", until or "", now)
        fields = {"tenant_id": owner.id, "resource": resource, "subject": subject, "limits": changes}
        async with catalog.edit(audit_actor()) as edit:
            return await edit.set_override({**fields, "expires_at": expiry, "reason": reason})

    _print_done("Set", run_with_catalog(database, work), as_json=as_json)


@app.command()
def delete(
    subject: Subject,
    tenant: TenantOption,
    resource: Resource = ANY_RESOURCE,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Delete an override before it expires."""

    async def work(catalog: Catalog) -> Override:
        override = await _find_override(catalog, subject, tenant, resource)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.delete(Override, override.id)

    _print_done("Deleted", run_with_catalog(database, work), as_json=as_json)


async def _find_override(catalog: Catalog, subject: str, tenant: str, resource: str) -> Override:
    for override in await list_entities(catalog, Override, tenant):
        if (override.subject, override.resource) == (subject, resource) or override.id == subject:
            return override
    raise NotFound(f"tenant {tenant} has no override of {subject!r} on {resource!r}")


def _parse_limit_changes(pairs: list[str], text: str | None) -> dict[str, Any]:
    changes = {} if text is None else parse_json_object("--limits", text)
    for pair in pairs:
        name, equals, number = pair.rpartition("=")
        if not equals:
            raise InvalidInput("--limit", f"must be NAME=NUMBER, NAME=unlimited or NAME=blocked, got {pair[:64]!r}")
        if number in (UNLIMITED_WORD, BLOCKED_WORD):
            changes[name] = number
        elif number.isascii() and number.isdigit():
            changes[name] = {"limit": int(number)}
        else:
            raise InvalidInput("--limit", f"{name[:64]} must be a number, unlimited or blocked, got {number[:64]!r}")
    if not changes:
        raise InvalidInput("--limit", "is required, such as --limit burst=500")
    return changes


def _describe_limits(limits: dict[str, Any]) -> str:
    """Return a text such as "burst: 500, window_seconds 2; daily: unlimited"."""
    descriptions = []
    for name, change in limits.items():
        if isinstance(change, dict):
            fields = [json.dumps(value) if field == "limit" else f"{field} {value}" for field, value in change.items()]
            descriptions.append(f"{name}: {', '.join(fields)}")
        else:
            descriptions.append(f"{name}: {change}")
    return "; ".join(descriptions)


def _print_done(verb: str, override: Override, *, as_json: bool) -> None:
    if as_json:
        print_json(to_public_dict(override))
        return
    subject, resource = format_value(override.subject), format_value(override.resource)
    print(f"{verb} override of {subject} on {resource}, expires {format_value(override.expires_at)} UTC.")
