"""`limitforge keys`: what callers show."""

from datetime import datetime
from typing import Annotated, Any

import typer

from limitforge.catalog.config.specs import KeySpec, SecretSpec
from limitforge.catalog.config.specs import spec_to_dict as plain_spec
from limitforge.catalog.config.strict_yaml import dump_yaml
from limitforge.catalog.credentials import PREFIXES, Credential, new_id
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Key, KeyScope, KeyType, to_datetime, to_public_dict
from limitforge.cli.catalog.lookup import NamesById, find_entity, find_tenant, list_entities, resolve_plan_names
from limitforge.cli.catalog.options import (
    NONE_WORD,
    AsJson,
    DatabaseUrl,
    TenantFilter,
    TenantOption,
    audit_actor,
    given_fields,
    parse_duration,
    parse_json_object,
    parse_time,
    peppers_from_environment,
    run_with_catalog,
)
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_fields, print_json, print_secret, print_table

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

app = command_group(HELP)

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
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List keys."""

    async def work(catalog: Catalog) -> None:
        found = await list_entities(catalog, Key, tenant)
        if as_json:
            print_json([to_public_dict(each) for each in found])
            return
        names, now = await NamesById.load(catalog, found), to_datetime(catalog.clock.now_us())
        rows = [
            (
                each.name,
                names[each.tenant_id],
                each.type,
                names[each.plan_id],
                _key_state(each, now),
                each.last_used_at,
                each.id,
            )
            for each in found
        ]
        columns = ("NAME", "TENANT", "TYPE", "PLAN", "STATE", "LAST USED", "ID")
        print_table(columns, rows, "There are no keys yet.")

    run_with_catalog(database, work)


@app.command()
def show(name: Name, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what is known of a key. The key itself can't be shown again."""

    async def work(catalog: Catalog) -> None:
        key = await find_entity(catalog, Key, name, tenant)
        if as_json:
            print_json(to_public_dict(key))
            return
        names, now = await NamesById.load(catalog, [key]), to_datetime(catalog.clock.now_us())
        secrets = [
            f"pepper {each.pepper}" + (f" until {each.expires_at:%Y-%m-%d %H:%M:%S}" if each.expires_at else "")
            for each in key.secrets
        ]
        print_fields(
            {
                "name": key.name,
                "id": key.id,
                "tenant": names[key.tenant_id],
                "state": _key_state(key, now),
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

    run_with_catalog(database, work)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 letters, digits or -_./ characters.")],
    tenant: TenantOption,
    kind: Annotated[KeyType, typer.Option("--type", help="Test keys are the first to be shed.")] = KeyType.LIVE,
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
        fields = _key_fields(catalog, plan=plan, scope=scope, expires=expires, metadata=metadata)
        values = await resolve_plan_names(catalog, owner.id, fields)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.create_key({"tenant_id": owner.id, "name": name, "type": kind, **values})

    key, credential = run_with_catalog(database, work, with_peppers=True)
    print_secret(key, credential.text, as_json=as_json)


@app.command()
def update(
    name: Name,
    tenant: TenantFilter = None,
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
        key = await find_entity(catalog, Key, name, tenant)
        fields = _key_fields(catalog, plan=plan, scope=scope, expires=expires, metadata=metadata)
        if new_name is not None:
            fields["name"] = new_name
        changes = await resolve_plan_names(catalog, key.tenant_id, fields)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.update(Key, key.id, changes)

    print_done("Changed", run_with_catalog(database, work), as_json=as_json)


@app.command()
def rotate(
    name: Name,
    tenant: TenantFilter = None,
    grace: Annotated[str, typer.Option(metavar="TIME", help="How long the old one goes on, such as 24h.")] = "0s",
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a new secret for a key and print it, this once. It works at once, the old one until the grace ends."""
    grace_seconds = parse_duration("--grace", grace)

    async def work(catalog: Catalog) -> tuple[Key, Credential]:
        key = await find_entity(catalog, Key, name, tenant)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.rotate_key(key.id, grace_seconds)

    key, credential = run_with_catalog(database, work, with_peppers=True)
    print_secret(key, credential.text, as_json=as_json)


@app.command()
def disable(
    name: Name, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Refuse a key, until it is enabled again. Every node does so within a second."""
    print_done("Disabled", _set_disabled(database, name, tenant, disabled=True), as_json=as_json)


@app.command()
def enable(
    name: Name, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Let a disabled key in again."""
    print_done("Enabled", _set_disabled(database, name, tenant, disabled=False), as_json=as_json)


@app.command()
def delete(
    name: Name, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Delete a key. Every node refuses it within a second."""

    async def work(catalog: Catalog) -> Key:
        key = await find_entity(catalog, Key, name, tenant)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.delete(Key, key.id)

    print_done("Deleted", run_with_catalog(database, work), as_json=as_json)


@app.command()
def make(
    name: Annotated[str, typer.Option(metavar="NAME", help="What the key is called.")],
    kind: Annotated[KeyType, typer.Option("--type", help="Test keys are the first to be shed.")] = KeyType.LIVE,
    as_json: AsJson = False,
) -> None:
    """Make a key for a configuration file: print it, this once, and the lines for the file. No database is needed."""
    identity = new_id("key")
    peppers = peppers_from_environment()
    credential = Credential.generate(PREFIXES[kind], identity.removeprefix("key_"), peppers)
    kept = peppers.hash_credential(credential)
    spec = KeySpec(id=identity, name=name, type=kind, secrets=(SecretSpec(hash=kept.hash, pepper=kept.pepper),))
    Key(id=identity, tenant_id="", name=name)  # refuses a name that can't be one
    if as_json:
        print_json({"key": credential.text, "entry": plain_spec(spec)})
        return
    lines = "".join(f"      {line}\n" for line in dump_yaml([plain_spec(spec)]).splitlines())
    print(f"The key, which is shown this once:\n\n  {credential.text}\n")
    print(f"For the file, under `keys` of its tenant:\n\n{lines}", end="")


def _key_fields(
    catalog: Catalog, *, plan: str | None, scope: list[KeyScope] | None, expires: str | None, metadata: str | None
) -> dict[str, Any]:
    fields = given_fields(plan=plan, scopes=tuple(scope) if scope else None)
    if expires is not None:
        now = to_datetime(catalog.clock.now_us())
        fields["expires_at"] = None if expires == NONE_WORD else parse_time("--expires", expires, now)
    if metadata is not None:
        fields["metadata"] = parse_json_object("--metadata", metadata)
    return fields


def _set_disabled(database: str, name: str, tenant: str | None, *, disabled: bool) -> Key:
    async def work(catalog: Catalog) -> Key:
        key = await find_entity(catalog, Key, name, tenant)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.disable_key(key.id, disabled=disabled)

    return run_with_catalog(database, work)


def _key_state(key: Key, now: datetime) -> str:
    if key.disabled:
        return "disabled"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"
