"""`limitforge tokens`: who may see and change the catalog over HTTP."""

from typing import Annotated, Any

import typer

from limitforge.catalog.credentials import Credential
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Token, TokenScope, to_datetime, to_public_dict
from limitforge.cli.catalog.lookup import NamesById, find_entity, find_tenant, list_entities
from limitforge.cli.catalog.options import (
    NONE_WORD,
    AsJson,
    DatabaseUrl,
    TenantFilter,
    audit_actor,
    parse_time,
    run_with_catalog,
)
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_fields, print_json, print_secret, print_table

HELP = """Admin tokens: who may see and change the catalog over HTTP. A token is printed once.

Examples:
  limitforge tokens create dashboard
  limitforge tokens create deploy --scope read --scope write --expires 90d
  limitforge tokens create acme-admin --scope write --tenant acme
  limitforge tokens list
"""

app = command_group(HELP)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name or id.")]
Scopes = Annotated[list[TokenScope] | None, typer.Option("--scope", help="What it may do; give it twice for both.")]
Expires = Annotated[
    str | None, typer.Option(metavar="WHEN", help="Such as 90d, or 2026-12-31T00:00:00Z; none for never.")
]


@app.command("list")
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List admin tokens."""

    async def work(catalog: Catalog) -> None:
        found = await list_entities(catalog, Token, tenant)
        if as_json:
            print_json([to_public_dict(each) for each in found])
            return
        names = await NamesById.load(catalog, found)
        rows = [
            (each.name, each.scopes, names[each.tenant_id] or "all", each.expires_at, each.last_used_at, each.id)
            for each in found
        ]
        print_table(("NAME", "SCOPES", "TENANT", "EXPIRES", "LAST USED", "ID"), rows, "There are no tokens yet.")

    run_with_catalog(database, work)


@app.command()
def show(name: Name, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what is known of a token. The token itself can't be shown again."""

    async def work(catalog: Catalog) -> None:
        token = await find_entity(catalog, Token, name, None)
        if as_json:
            print_json(to_public_dict(token))
            return
        names = await NamesById.load(catalog, [token])
        print_fields(
            {
                "name": token.name,
                "id": token.id,
                "scopes": token.scopes,
                "tenant": names[token.tenant_id] or "all",
                "expires": token.expires_at,
                "last used": token.last_used_at,
                "version": token.version,
                "created": token.created_at,
                "updated": token.updated_at,
            }
        )

    run_with_catalog(database, work)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 letters, digits or -_./ characters.")],
    scope: Scopes = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only for this tenant.")] = None,
    expires: Expires = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create an admin token and print it, this once. Without a scope it may read."""

    async def work(catalog: Catalog) -> tuple[Token, Credential]:
        fields = {"name": name, **_token_fields(catalog, scope, expires)}
        if tenant is not None:
            fields["tenant_id"] = (await find_tenant(catalog, tenant)).id
        async with catalog.edit(audit_actor()) as edit:
            return await edit.create_token(fields)

    token, credential = run_with_catalog(database, work, with_peppers=True)
    print_secret(token, credential.text, as_json=as_json)


@app.command()
def update(
    name: Name,
    new_name: Annotated[
        str | None, typer.Option("--name", metavar="NEW", help="What it is called from now on.")
    ] = None,
    scope: Scopes = None,
    expires: Expires = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change a token: only what you name."""

    async def work(catalog: Catalog) -> Token:
        token = await find_entity(catalog, Token, name, None)
        changes = _token_fields(catalog, scope, expires)
        if new_name is not None:
            changes["name"] = new_name
        async with catalog.edit(audit_actor()) as edit:
            return await edit.update(Token, token.id, changes)

    print_done("Changed", run_with_catalog(database, work), as_json=as_json)


@app.command()
def delete(name: Name, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Delete a token: it is refused from now on."""

    async def work(catalog: Catalog) -> Token:
        token = await find_entity(catalog, Token, name, None)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.delete(Token, token.id)

    print_done("Deleted", run_with_catalog(database, work), as_json=as_json)


def _token_fields(catalog: Catalog, scope: list[TokenScope] | None, expires: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"scopes": tuple(scope)} if scope else {}
    if expires is not None:
        now = to_datetime(catalog.clock.now_us())
        fields["expires_at"] = None if expires == NONE_WORD else parse_time("--expires", expires, now)
    return fields
