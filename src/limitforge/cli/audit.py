"""`limitforge audit`: who changed what, and when."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer

from limitforge.catalog.catalog import Catalog
from limitforge.catalog.database import DEFAULT_URL
from limitforge.catalog.model import AuditEntry
from limitforge.cli.looks import group
from limitforge.cli.naming import find_tenant
from limitforge.cli.options import AsJson, DatabaseUrl, OfOwner, in_catalog
from limitforge.cli.output import print_json, print_table, words

HELP = """The audit log: every change, who made it and when, before and after. Nothing in it can be changed.

Examples:
  limitforge audit list --tenant acme
  limitforge audit list --entity pla_0123456789abcdef --limit 10
  limitforge audit list --json
"""

app = group(HELP)

_BOOKKEEPING = {"version", "updated_at", "created_at", "revision"}


@app.command("list")
def list_all(
    tenant: OfOwner = None,
    entity: Annotated[str | None, typer.Option(metavar="ID", help="Only of the one with this id.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1_000, help="How many, the newest first.")] = 50,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List changes, the newest first."""

    async def work(catalog: Catalog) -> list[AuditEntry]:
        owner = None if tenant is None else (await _tenant_id(catalog, tenant))
        page = await catalog.audit(size=limit, tenant_id=owner, entity_id=entity)
        return page.items

    found = in_catalog(database, work)
    if as_json:
        print_json([msgspec.to_builtins(each) for each in found])
        return
    rows = [(each.at, each.actor, each.action, _called(each), _differences(each)) for each in found]
    print_table(("AT", "BY", "WHAT", "WHICH", "CHANGES"), rows, "There are no changes yet.")


async def _tenant_id(catalog: Catalog, tenant: str) -> str:
    """One that is gone still has its entries, by its id."""
    return tenant if tenant.startswith("ten_") else (await find_tenant(catalog, tenant)).id


def _called(entry: AuditEntry) -> str:
    entity = entry.after or entry.before or {}
    for field in ("name", "subject", "resource"):
        if field in entity:
            return str(entity[field])
    return entry.entity_id


def _differences(entry: AuditEntry) -> str:
    if entry.before is None or entry.after is None:
        return ""
    before, after = _flat(entry.before), _flat(entry.after)
    return ", ".join(
        f"{name}: {words(before.get(name))} -> {words(after.get(name))}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    )


def _flat(entity: Mapping[str, Any]) -> dict[str, Any]:
    """By field; the limits of a plan each by its name and field."""
    found: dict[str, Any] = {}
    for name, value in entity.items():
        if name == "limits" and isinstance(value, list):
            for limit in value:
                found |= {f"{limit['name']}.{field}": each for field, each in limit.items() if field != "name"}
        elif name == "secrets":
            found[name] = len(value)
        elif name not in _BOOKKEEPING:
            found[name] = value
    return found
