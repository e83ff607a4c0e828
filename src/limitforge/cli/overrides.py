"""`limitforge overrides`: other numbers for one subject, for a while."""

import json
from typing import Annotated, Any

import typer

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Override, to_datetime, to_public_dict
from limitforge.cli.catalog.lookup import NamesById, find_tenant, list_entities
from limitforge.cli.catalog.options import (
    AsJson,
    DatabaseUrl,
    TenantFilter,
    TenantOption,
    audit_actor,
    parse_json_object,
    parse_time,
    run_with_catalog,
)
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import format_value, print_fields, print_json, print_table
from limitforge.core.overrides import ANY_RESOURCE, BLOCKED_WORD, UNLIMITED_WORD
from limitforge.errors import InvalidInput, NotFound

HELP = """Overrides: other numbers for one subject, for a while.

A limit is named with its new number, or with unlimited or blocked.

Examples:
  limitforge overrides set user:42 --tenant acme --limit burst=500 --for 24h
  limitforge overrides set user:13 --tenant acme --limit burst=blocked --for 7d
  limitforge overrides list --tenant acme
  limitforge overrides delete user:42 --tenant acme
"""

app = command_group(HELP)

Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="Whose numbers, such as user:42.")]
Resource = Annotated[str, typer.Option(metavar="RESOURCE", help="On which resource; * for all of them.")]


@app.command("list")
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the overrides that have not expired."""

    async def work(catalog: Catalog) -> None:
        now = to_datetime(catalog.clock.now_us())
        found = [each for each in await list_entities(catalog, Override, tenant) if each.expires_at > now]
        if as_json:
            print_json([to_public_dict(each) for each in found])
            return
        names = await NamesById.load(catalog, found)
        rows = [
            (
                each.subject,
                each.resource,
                names[each.tenant_id],
                _describe_limits(each.limits),
                each.expires_at,
                each.reason,
            )
            for each in found
        ]
        columns = ("SUBJECT", "RESOURCE", "TENANT", "LIMITS", "UNTIL", "REASON")
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
    """Show one override, with who set it and why."""

    async def work(catalog: Catalog) -> None:
        override = await _find_override(catalog, subject, tenant, resource)
        if as_json:
            print_json(to_public_dict(override))
            return
        names = await NamesById.load(catalog, [override])
        print_fields(
            {
                "subject": override.subject,
                "resource": override.resource,
                "tenant": names[override.tenant_id],
                "id": override.id,
                "limits": _describe_limits(override.limits),
                "until": override.expires_at,
                "reason": override.reason,
                "set by": override.set_by,
                "version": override.version,
                "created": override.created_at,
                "updated": override.updated_at,
            }
        )

    run_with_catalog(database, work)


@app.command("set")
def set_override(
    subject: Subject,
    tenant: TenantOption,
    resource: Resource = ANY_RESOURCE,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="A limit and its number, unlimited or blocked; repeat it for more."),
    ] = None,
    limits: Annotated[
        str | None, typer.Option(metavar="JSON", help='Other fields too: {"burst": {"refill_rate_per_sec": 9}}.')
    ] = None,
    duration: Annotated[str | None, typer.Option("--for", metavar="TIME", help="How long, such as 24h.")] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Or when it ends: 2026-12-31T00:00:00Z.")] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for whoever asks later.")] = "",
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Set an override, in place of the one that is there."""
    if (duration is None) == (until is None):
        raise InvalidInput("--for", "or --until is needed, and only one of them: every override ends")
    changes = _parse_limit_changes(limit or [], limits)

    async def work(catalog: Catalog) -> Override:
        owner = await find_tenant(catalog, tenant)
        now = to_datetime(catalog.clock.now_us())
        ends = parse_time("--for", duration, now) if duration is not None else parse_time("--until", until or "", now)
        fields = {"tenant_id": owner.id, "resource": resource, "subject": subject, "limits": changes}
        async with catalog.edit(audit_actor()) as edit:
            return await edit.set_override({**fields, "expires_at": ends, "reason": reason})

    _print_done("Set", run_with_catalog(database, work), as_json=as_json)


@app.command()
def delete(
    subject: Subject,
    tenant: TenantOption,
    resource: Resource = ANY_RESOURCE,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Delete an override before it ends."""

    async def work(catalog: Catalog) -> Override:
        override = await _find_override(catalog, subject, tenant, resource)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.delete(Override, override.id)

    _print_done("Deleted", run_with_catalog(database, work), as_json=as_json)


async def _find_override(catalog: Catalog, subject: str, tenant: str, resource: str) -> Override:
    for override in await list_entities(catalog, Override, tenant):
        if (override.subject, override.resource) == (subject, resource) or override.id == subject:
            return override
    raise NotFound(f"there is no override of {subject!r} on {resource!r} of tenant {tenant}")


def _parse_limit_changes(pairs: list[str], text: str | None) -> dict[str, Any]:
    changes = {} if text is None else parse_json_object("--limits", text)
    for pair in pairs:
        name, equals, number = pair.rpartition("=")
        if not equals:
            raise InvalidInput("--limit", f"must be a name, = and a number, unlimited or blocked, got {pair[:64]!r}")
        if number in (UNLIMITED_WORD, BLOCKED_WORD):
            changes[name] = number
        elif number.isascii() and number.isdigit():
            changes[name] = {"limit": int(number)}
        else:
            raise InvalidInput("--limit", f"{name[:64]} must be a number, unlimited or blocked, got {number[:64]!r}")
    if not changes:
        raise InvalidInput("--limit", "is needed, such as --limit burst=500")
    return changes


def _describe_limits(limits: dict[str, Any]) -> str:
    said = []
    for name, change in limits.items():
        if isinstance(change, dict):
            fields = [json.dumps(value) if field == "limit" else f"{field} {value}" for field, value in change.items()]
            said.append(f"{name}: {', '.join(fields)}")
        else:
            said.append(f"{name}: {change}")
    return "; ".join(said)


def _print_done(verb: str, override: Override, *, as_json: bool) -> None:
    if as_json:
        print_json(to_public_dict(override))
    else:
        until = format_value(override.expires_at)
        print(
            f"{verb} override of {format_value(override.subject)} on {format_value(override.resource)}, until {until} UTC."
        )
