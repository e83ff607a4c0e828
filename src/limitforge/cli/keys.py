"""`limitforge keys`: the API keys of callers."""

from datetime import datetime
from typing import Annotated, Any

import typer

from limitforge.catalog.config.specs import KeySpec, SecretSpec, spec_to_dict
from limitforge.catalog.config.strict_yaml import dump_yaml
from limitforge.catalog.credentials import PREFIXES, Credential, new_id
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import Key, KeyScope, KeyType, to_datetime, to_public_dict
from limitforge.cli.catalog.connect import audit_actor, peppers_from_environment, run_with_catalog
from limitforge.cli.catalog.edit import delete_entity
from limitforge.cli.catalog.lookup import NamesById, find_entity, find_tenant, list_entities, resolve_plan_names
from limitforge.cli.catalog.options import (
    AsJson,
    CreatedName,
    DatabaseUrl,
    ExpiresOption,
    NameOrId,
    NewName,
    TenantFilter,
    TenantOption,
    field_option,
)
from limitforge.cli.catalog.show import print_entity
from limitforge.cli.catalog.values import given_fields, parse_duration, parse_expiry, parse_json_object
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_done, print_json, print_secret, print_table

HELP = """API keys: a key is printed once, when it is created; only its hash is stored.

LIMITFORGE_PEPPERS must be set to create keys.

Examples:
  limitforge keys create web --tenant acme
  limitforge keys create ci --tenant acme --type test --expires 90d
  limitforge keys create browser --tenant acme --scope check --scope usage
  limitforge keys rotate web --tenant acme --grace 24h
  limitforge keys disable web --tenant acme
  limitforge keys make --name web
"""

app = command_group(HELP)

PlanOption = Annotated[str | None, field_option(Key, "plan_id", "--plan", metavar="PLAN", clearable=True)]
ScopesOption = Annotated[list[KeyScope] | None, field_option(Key, "scopes", "--scope", note="Repeat it for several.")]
TypeOption = Annotated[KeyType, field_option(Key, "type", "--type")]
MetadataOption = Annotated[str | None, field_option(Key, "metadata", metavar="JSON")]


@app.command("list")
def list_all(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List keys."""

    async def work(catalog: Catalog) -> None:
        keys = await list_entities(catalog, Key, tenant)
        if as_json:
            print_json([to_public_dict(key) for key in keys])
            return
        names, now = await NamesById.load(catalog, keys), to_datetime(catalog.clock.now_us())
        rows = [
            (
                key.name,
                names[key.tenant_id],
                key.type,
                names[key.plan_id],
                _key_state(key, now),
                key.last_used_at,
                key.id,
            )
            for key in keys
        ]
        columns = ("NAME", "TENANT", "TYPE", "PLAN", "STATE", "LAST USED", "ID")
        print_table(columns, rows, "There are no keys yet.")

    run_with_catalog(database, work)


@app.command()
def show(
    name: NameOrId, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Show a key without its secret."""

    async def work(catalog: Catalog) -> None:
        key = await find_entity(catalog, Key, name, tenant)
        secrets = [
            f"pepper {secret.pepper}" + (f" until {secret.expires_at:%Y-%m-%d %H:%M:%S}" if secret.expires_at else "")
            for secret in key.secrets
        ]
        state = _key_state(key, to_datetime(catalog.clock.now_us()))
        await print_entity(catalog, key, as_json=as_json, state=state, disabled=None, secrets=secrets)

    run_with_catalog(database, work)


@app.command()
def create(
    name: CreatedName,
    tenant: TenantOption,
    kind: TypeOption = KeyType.LIVE,
    plan: PlanOption = None,
    scope: ScopesOption = None,
    expires: ExpiresOption = None,
    metadata: MetadataOption = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It can't be printed again."""

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
    name: NameOrId,
    tenant: TenantFilter = None,
    new_name: NewName = None,
    plan: PlanOption = None,
    scope: ScopesOption = None,
    expires: ExpiresOption = None,
    metadata: MetadataOption = None,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a key."""

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
    name: NameOrId,
    tenant: TenantFilter = None,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old secret stays valid, such as 24h.")
    ] = "0s",
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Create a new secret for a key and print it. The old secret stays valid until the grace period ends."""
    grace_seconds = parse_duration("--grace", grace)

    async def work(catalog: Catalog) -> tuple[Key, Credential]:
        key = await find_entity(catalog, Key, name, tenant)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.rotate_key(key.id, grace_seconds)

    key, credential = run_with_catalog(database, work, with_peppers=True)
    print_secret(key, credential.text, as_json=as_json)


@app.command()
def disable(
    name: NameOrId, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Disable a key until it is enabled again. All nodes reject it within a second."""
    print_done("Disabled", _set_disabled(database, name, tenant, disabled=True), as_json=as_json)


@app.command()
def enable(
    name: NameOrId, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Enable a disabled key."""
    print_done("Enabled", _set_disabled(database, name, tenant, disabled=False), as_json=as_json)


@app.command()
def delete(
    name: NameOrId, tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False
) -> None:
    """Delete a key. All nodes reject it within a second."""
    print_done("Deleted", delete_entity(database, Key, name, tenant), as_json=as_json)


@app.command()
def make(
    name: Annotated[str, field_option(Key, "name", metavar="NAME")],
    kind: TypeOption = KeyType.LIVE,
    as_json: AsJson = False,
) -> None:
    """Generate a key for a configuration file, and print it with the lines for the file. It needs no database."""
    key_id = new_id("key")
    peppers = peppers_from_environment()
    credential = Credential.generate(PREFIXES[kind], key_id.removeprefix("key_"), peppers)
    secret = peppers.hash_credential(credential)
    Key(id=key_id, tenant_id="", name=name)  # validates the name
    spec = KeySpec(id=key_id, name=name, type=kind, secrets=(SecretSpec(hash=secret.hash, pepper=secret.pepper),))
    entry = spec_to_dict(spec)
    if as_json:
        print_json({"key": credential.text, "entry": entry})
        return
    lines = "".join(f"      {line}\n" for line in dump_yaml([entry]).splitlines())
    print(f"The key, which is shown only once:\n\n  {credential.text}\n")
    print(f"For the file, under `keys` of its tenant:\n\n{lines}", end="")


def _key_fields(
    catalog: Catalog, *, plan: str | None, scope: list[KeyScope] | None, expires: str | None, metadata: str | None
) -> dict[str, Any]:
    fields = given_fields(plan=plan, scopes=tuple(scope) if scope else None)
    if expires is not None:
        fields["expires_at"] = parse_expiry("--expires", expires, to_datetime(catalog.clock.now_us()))
    if metadata is not None:
        fields["metadata"] = parse_json_object("--metadata", metadata)
    return fields


def _set_disabled(database: str, name: str, tenant: str | None, *, disabled: bool) -> Key:
    async def work(catalog: Catalog) -> Key:
        key = await find_entity(catalog, Key, name, tenant)
        async with catalog.edit(audit_actor()) as edit:
            return await edit.set_key_disabled(key.id, disabled=disabled)

    return run_with_catalog(database, work)


def _key_state(key: Key, now: datetime) -> str:
    if key.disabled:
        return "disabled"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"
