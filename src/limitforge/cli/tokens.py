"""`limitforge tokens`: the tokens for the admin API."""

from typing import Annotated, Any

from limitforge.catalog.credentials import Credential
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Token, TokenScope, to_datetime, to_public_dict
from limitforge.cli.catalog.connect import audit_actor, run_with_catalog
from limitforge.cli.catalog.edit import delete_entity
from limitforge.cli.catalog.lookup import NamesById, find_entity, find_tenant, list_entities
from limitforge.cli.catalog.options import (
    AsJson,
    CreatedName,
    DatabaseUrl,
    ExpiresOption,
    NameOrId,
    NewName,
    TenantFilter,
    field_option,
)
from limitforge.cli.catalog.show import print_entity
from limitforge.cli.catalog.values import parse_expiry
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_json, print_secret, print_table

HELP = """Tokens for the admin API. A token is printed once, when it is created.

Examples:
  limitforge tokens create dashboard
  limitforge tokens create deploy --scope read --scope write --expires 90d
  limitforge tokens create acme-admin --scope write --tenant acme
  limitforge tokens list
"""

app = command_group(HELP)

ScopesOption = Annotated[list[TokenScope] | None, field_option(Token, "scopes", "--scope", note="Repeat it for both.")]


@app.command("list")
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List admin tokens."""

    async def work(catalog: Catalog) -> None:
        tokens = await list_entities(catalog, Token, tenant)
        if as_json:
            print_json([to_public_dict(token) for token in tokens])
            return
        names = await NamesById.load(catalog, tokens)
        rows = [
            (
                token.name,
                token.scopes,
                names[token.tenant_id] or "all",
                token.expires_at,
                token.last_used_at,
                token.id,
            )
            for token in tokens
        ]
        print_table(("NAME", "SCOPES", "TENANT", "EXPIRES", "LAST USED", "ID"), rows, "There are no tokens yet.")

    run_with_catalog(database, work)


@app.command()
def show(name: NameOrId, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a token without its secret."""

    async def work(catalog: Catalog) -> None:
        token = await find_entity(catalog, Token, name, None)
        changes: dict[str, Any] = {"secrets": None}
        if token.tenant_id is None:
            changes["tenant_id"] = "all"
        await print_entity(catalog, token, as_json=as_json, **changes)

    run_with_catalog(database, work)


@app.command()
def create(
    name: CreatedName,
    scope: ScopesOption = None,
    tenant: Annotated[str | None, field_option(Token, "tenant_id", "--tenant", metavar="NAME")] = None,
    expires: ExpiresOption = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create an admin token and print it. It can't be printed again. Without a scope it may only read."""

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
    name: NameOrId,
    new_name: NewName = None,
    scope: ScopesOption = None,
    expires: ExpiresOption = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a token."""

    async def work(catalog: Catalog) -> Token:
        token = await find_entity(catalog, Token, name, None)
        changes = _token_fields(catalog, scope, expires)
        if new_name is not None:
            changes["name"] = new_name
        async with catalog.edit(audit_actor()) as edit:
            return await edit.update(Token, token.id, changes)

    print_done("Changed", run_with_catalog(database, work), as_json=as_json)


@app.command()
def delete(name: NameOrId, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Delete a token. It is rejected at once."""
    print_done("Deleted", delete_entity(database, Token, name), as_json=as_json)


def _token_fields(catalog: Catalog, scope: list[TokenScope] | None, expires: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"scopes": tuple(scope)} if scope else {}
    if expires is not None:
        fields["expires_at"] = parse_expiry("--expires", expires, to_datetime(catalog.clock.now_us()))
    return fields
