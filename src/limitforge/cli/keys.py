"""`limitforge keys`: what callers show."""

from datetime import datetime
from typing import Annotated, Any

import typer

from limitforge.catalog.catalog import Catalog
from limitforge.catalog.credentials import PREFIXES, Credential, new_id
from limitforge.catalog.database import DEFAULT_URL
from limitforge.catalog.markup import write
from limitforge.catalog.model import Key, KeyKind, KeyScope, at_time, plain
from limitforge.catalog.specs import KeySpec, SecretSpec
from limitforge.catalog.specs import plain as plain_spec
from limitforge.cli.looks import group
from limitforge.cli.naming import Names, everything, find, find_tenant, with_plan_ids
from limitforge.cli.options import (
    NONE,
    AsJson,
    DatabaseUrl,
    OfOwner,
    Owner,
    actor,
    given,
    in_catalog,
    json_object,
    moment,
    peppers_given,
    seconds,
)
from limitforge.cli.output import print_done, print_fields, print_json, print_secret, print_table

HELP = """API keys: what callers show. A key is printed once, when it is made; only its hash is kept.

LIMITFORGE_PEPPERS must be set where keys are made.

Examples:
  limitforge keys create web --tenant acme
  limitforge keys create ci --tenant acme --type test --expires 90d
  limitforge keys create browser --tenant acme --scope check --scope usage
  limitforge keys rotate web --tenant acme --grace 24h
  limitforge keys disable web --tenant acme
  limitforge keys make --name web
"""

app = group(HELP)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name or id.")]
KeyPlan = Annotated[
    str | None, typer.Option("--plan", metavar="PLAN", help="Instead of the tenant's default; none for none.")
]
Scopes = Annotated[
    list[KeyScope] | None,
    typer.Option("--scope", help="What it may do; give it once for each. Leave plans out for keys in pages and apps."),
]
Expires = Annotated[
    str | None, typer.Option(metavar="WHEN", help="Such as 90d, or 2026-12-31T00:00:00Z; none for never.")
]
Metadata = Annotated[
    str | None, typer.Option(metavar="JSON", help='What else to remember of it, such as {"team": "web"}.')
]


@app.command("list")
def list_all(tenant: OfOwner = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List keys."""

    async def work(catalog: Catalog) -> None:
        found = await everything(catalog, Key, tenant)
        if as_json:
            print_json([plain(each) for each in found])
            return
        names, now = await Names.of(catalog, found), at_time(catalog.clock.now_us())
        rows = [
            (
                each.name,
                names[each.tenant_id],
                each.type,
                names[each.plan_id],
                _state(each, now),
                each.last_used_at,
                each.id,
            )
            for each in found
        ]
        columns = ("NAME", "TENANT", "TYPE", "PLAN", "STATE", "LAST USED", "ID")
        print_table(columns, rows, "There are no keys yet.")

    in_catalog(database, work)


@app.command()
def show(name: Name, tenant: OfOwner = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what is known of a key. The key itself can't be shown again."""

    async def work(catalog: Catalog) -> None:
        key = await find(catalog, Key, name, tenant)
        if as_json:
            print_json(plain(key))
            return
        names, now = await Names.of(catalog, [key]), at_time(catalog.clock.now_us())
        secrets = [
            f"pepper {each.pepper}" + (f" until {each.expires_at:%Y-%m-%d %H:%M:%S}" if each.expires_at else "")
            for each in key.secrets
        ]
        print_fields(
            {
                "name": key.name,
                "id": key.id,
                "tenant": names[key.tenant_id],
                "state": _state(key, now),
                "type": key.type,
                "plan": names[key.plan_id],
                "scopes": key.scopes,
                "expires": key.expires_at,
                "metadata": key.metadata,
                "last used": key.last_used_at,
                "secrets": secrets,
                "version": key.version,
                "created": key.created_at,
                "updated": key.updated_at,
            }
        )

    in_catalog(database, work)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 letters, digits or -_./ characters.")],
    tenant: Owner,
    kind: Annotated[KeyKind, typer.Option("--type", help="Test keys are the first to be shed.")] = KeyKind.LIVE,
    plan: KeyPlan = None,
    scope: Scopes = None,
    expires: Expires = None,
    metadata: Metadata = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it, this once."""

    async def work(catalog: Catalog) -> tuple[Key, Credential]:
        owner = await find_tenant(catalog, tenant)
        fields = _fields(catalog, plan=plan, scope=scope, expires=expires, metadata=metadata)
        values = await with_plan_ids(catalog, owner.id, fields)
        async with catalog.edit(actor()) as edit:
            return await edit.create_key({"tenant_id": owner.id, "name": name, "type": kind, **values})

    key, credential = in_catalog(database, work, with_peppers=True)
    print_secret(key, credential.text, as_json=as_json)


@app.command()
def update(
    name: Name,
    tenant: OfOwner = None,
    new_name: Annotated[
        str | None, typer.Option("--name", metavar="NEW", help="What it is called from now on.")
    ] = None,
    plan: KeyPlan = None,
    scope: Scopes = None,
    expires: Expires = None,
    metadata: Metadata = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change a key: only what you name."""

    async def work(catalog: Catalog) -> Key:
        key = await find(catalog, Key, name, tenant)
        fields = _fields(catalog, plan=plan, scope=scope, expires=expires, metadata=metadata)
        if new_name is not None:
            fields["name"] = new_name
        changes = await with_plan_ids(catalog, key.tenant_id, fields)
        async with catalog.edit(actor()) as edit:
            return await edit.update(Key, key.id, changes)

    print_done("Changed", in_catalog(database, work), as_json=as_json)


@app.command()
def rotate(
    name: Name,
    tenant: OfOwner = None,
    grace: Annotated[str, typer.Option(metavar="TIME", help="How long the old one goes on, such as 24h.")] = "0s",
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a new secret for a key and print it, this once. It works at once, the old one until the grace ends."""
    grace_seconds = seconds("--grace", grace)

    async def work(catalog: Catalog) -> tuple[Key, Credential]:
        key = await find(catalog, Key, name, tenant)
        async with catalog.edit(actor()) as edit:
            return await edit.rotate_key(key.id, grace_seconds)

    key, credential = in_catalog(database, work, with_peppers=True)
    print_secret(key, credential.text, as_json=as_json)


@app.command()
def disable(name: Name, tenant: OfOwner = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Refuse a key, until it is enabled again. Every node does so within a second."""
    print_done("Disabled", _switch(database, name, tenant, disabled=True), as_json=as_json)


@app.command()
def enable(name: Name, tenant: OfOwner = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Let a disabled key in again."""
    print_done("Enabled", _switch(database, name, tenant, disabled=False), as_json=as_json)


@app.command()
def delete(name: Name, tenant: OfOwner = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Delete a key. Every node refuses it within a second."""

    async def work(catalog: Catalog) -> Key:
        key = await find(catalog, Key, name, tenant)
        async with catalog.edit(actor()) as edit:
            return await edit.delete(Key, key.id)

    print_done("Deleted", in_catalog(database, work), as_json=as_json)


@app.command()
def make(
    name: Annotated[str, typer.Option(metavar="NAME", help="What the key is called.")],
    kind: Annotated[KeyKind, typer.Option("--type", help="Test keys are the first to be shed.")] = KeyKind.LIVE,
    as_json: AsJson = False,
) -> None:
    """Make a key for a configuration file: print it, this once, and the lines for the file. No database is needed."""
    identity = new_id("key")
    peppers = peppers_given()
    credential = Credential.make(PREFIXES[kind], identity.removeprefix("key_"), peppers)
    kept = peppers.seal(credential)
    spec = KeySpec(id=identity, name=name, type=kind, secrets=(SecretSpec(hash=kept.hash, pepper=kept.pepper),))
    Key(id=identity, tenant_id="", name=name)  # refuses a name that can't be one
    if as_json:
        print_json({"key": credential.text, "entry": plain_spec(spec)})
        return
    lines = "".join(f"      {line}\n" for line in write([plain_spec(spec)]).splitlines())
    print(f"The key, which is shown this once:\n\n  {credential.text}\n")
    print(f"For the file, under `keys` of its tenant:\n\n{lines}", end="")


def _fields(
    catalog: Catalog, *, plan: str | None, scope: list[KeyScope] | None, expires: str | None, metadata: str | None
) -> dict[str, Any]:
    fields = given(plan=plan, scopes=tuple(scope) if scope else None)
    if expires is not None:
        now = at_time(catalog.clock.now_us())
        fields["expires_at"] = None if expires == NONE else moment("--expires", expires, now)
    if metadata is not None:
        fields["metadata"] = json_object("--metadata", metadata)
    return fields


def _switch(database: str, name: str, tenant: str | None, *, disabled: bool) -> Key:
    async def work(catalog: Catalog) -> Key:
        key = await find(catalog, Key, name, tenant)
        async with catalog.edit(actor()) as edit:
            return await edit.disable_key(key.id, disabled=disabled)

    return in_catalog(database, work)


def _state(key: Key, now: datetime) -> str:
    if key.disabled:
        return "disabled"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"
