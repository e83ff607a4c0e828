"""`limitforge audit`: all changes of the catalog."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import AuditEntry
from limitforge.cli.catalog.connect import run_with_catalog
from limitforge.cli.catalog.lookup import find_tenant
from limitforge.cli.catalog.options import AsJson, DatabaseUrl, TenantFilter
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import format_value, print_json, print_table

HELP = """The audit log: who changed what, when, before and after. It can't be edited.

Examples:
  limitforge audit list --tenant acme
  limitforge audit list --entity pla_0123456789abcdef --limit 10
  limitforge audit list --json
"""

app = command_group(HELP)

_IGNORED_FIELDS = {"version", "updated_at", "created_at", "revision"}


@app.command("list")
def list_all(
    tenant: TenantFilter = None,
    entity: Annotated[str | None, typer.Option(metavar="ID", help="Only changes of the entity with this id.")] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=1_000, help="The largest number of changes to list.")
    ] = 50,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List changes, the newest first."""

    async def work(catalog: Catalog) -> list[AuditEntry]:
        tenant_id = None if tenant is None else (await _tenant_id(catalog, tenant))
        page = await catalog.audit_page(size=limit, tenant_id=tenant_id, entity_id=entity)
        return page.items

    entries = run_with_catalog(database, work)
    if as_json:
        print_json([msgspec.to_builtins(entry) for entry in entries])
        return
    rows = [(entry.at, entry.actor, entry.action, _entity_name(entry), _describe_changes(entry)) for entry in entries]
    print_table(("AT", "BY", "ACTION", "ENTITY", "CHANGES"), rows, "There are no changes yet.")


async def _tenant_id(catalog: Catalog, tenant: str) -> str:
    """Return the id of a tenant. An id is not looked up, because a deleted tenant still has entries."""
    return tenant if tenant.startswith("ten_") else (await find_tenant(catalog, tenant)).id


def _entity_name(entry: AuditEntry) -> str:
    entity = entry.after or entry.before or {}
    for field in ("name", "subject", "resource"):
        if field in entity:
            return str(entity[field])
    return entry.entity_id


def _describe_changes(entry: AuditEntry) -> str:
    if entry.before is None or entry.after is None:
        return ""
    before, after = _flatten_fields(entry.before), _flatten_fields(entry.after)
    return ", ".join(
        f"{name}: {format_value(before.get(name))} -> {format_value(after.get(name))}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    )


def _flatten_fields(entity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an entity. A field of a limit is called `limit.field`, and secrets are only counted."""
    fields: dict[str, Any] = {}
    for name, value in entity.items():
        if name == "limits" and isinstance(value, list):
            for limit in value:
                fields |= {f"{limit['name']}.{field}": number for field, number in limit.items() if field != "name"}
        elif name == "secrets":
            fields[name] = len(value)
        elif name not in _IGNORED_FIELDS:
            fields[name] = value
    return fields
