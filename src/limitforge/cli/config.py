"""`limitforge apply`, `diff`, `export` and `schema`: configuration as a file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from limitforge.catalog.apply import apply as apply_document
from limitforge.catalog.apply import preview
from limitforge.catalog.catalog import Catalog
from limitforge.catalog.changes import Change, as_json, counts, describe
from limitforge.catalog.database import DEFAULT_URL
from limitforge.catalog.document import dump, read
from limitforge.catalog.export import export as export_document
from limitforge.catalog.markup import MAX_BYTES, Source
from limitforge.catalog.model import at_time
from limitforge.catalog.plan_warnings import document_warnings
from limitforge.catalog.schema import schema as file_schema
from limitforge.catalog.specs import Document, plain
from limitforge.cli.naming import find_tenant
from limitforge.cli.options import AsJson, DatabaseUrl, OfOwner, actor, in_catalog
from limitforge.cli.output import print_json, print_lines, print_warnings
from limitforge.cli.progress import Tally
from limitforge.core.clock import SystemClock
from limitforge.errors import InvalidInput, LimitforgeError

DIFFERENT = 1
INTERRUPTED = 130  # as a shell has it for SIGINT

File = Annotated[str, typer.Argument(metavar="FILE", help="A YAML or JSON file, or - to read it from stdin.")]
Prune = Annotated[bool, typer.Option("--prune", help="Tenants that the file does not name are deleted.")]

_COLOURS = {"+": "green", "  +": "green", "-": "red", "  -": "red", "~": "yellow"}


def apply(
    file: File,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would change.")] = False,
    prune: Prune = False,
    database: DatabaseUrl = DEFAULT_URL,
    json: AsJson = False,
) -> None:
    """Bring the catalog to what FILE says, each tenant of it entirely or not at all.

    FILE is checked as a whole before anything is written. An apply that is
    interrupted leaves whole tenants: run it again to finish.

    A list that FILE has (plans, policies, keys or overrides of a tenant) is
    the whole truth about it; one that it lacks is left alone, and so are
    tenants that it does not name. Applied again, it changes nothing.

    Examples:
      limitforge apply plans.yaml --dry-run
      limitforge apply plans.yaml
      limitforge export | limitforge apply - --database postgresql://...

    """
    document, source = _read(file)
    tally = Tally("Applied", "tenants")

    async def work(catalog: Catalog) -> list[Change]:
        if dry_run:
            return await preview(catalog, document, prune=prune, source=source)
        return await apply_document(catalog, document, actor(), prune=prune, source=source, report=tally.update)

    try:
        with tally:
            changes = in_catalog(database, work)
    except (KeyboardInterrupt, LimitforgeError) as error:
        if tally.total:
            done = f"{tally.done:,} of {tally.total:,} tenants are applied, each of them entirely"
            print(f"Stopped: {done}. Run the same command again to finish.", file=sys.stderr)
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
        raise
    _print(changes, is_applied=not dry_run, for_programs=json)
    print_warnings(in_catalog(database, lambda catalog: _warnings(catalog, document)))


def diff(file: File, prune: Prune = False, database: DatabaseUrl = DEFAULT_URL, json: AsJson = False) -> None:
    """Tell what `apply` would change. The exit status is 1 if there is anything, and 0 if not.

    Examples:
      limitforge diff plans.yaml
      limitforge diff plans.yaml --json | jq '.changes[].action'

    """
    document, source = _read(file)

    async def work(catalog: Catalog) -> list[Change]:
        return await preview(catalog, document, prune=prune, source=source)

    changes = in_catalog(database, work)
    _print(changes, is_applied=False, for_programs=json)
    print_warnings(in_catalog(database, lambda catalog: _warnings(catalog, document)))
    if changes:
        raise typer.Exit(DIFFERENT)


def export(tenant: OfOwner = None, database: DatabaseUrl = DEFAULT_URL, json: AsJson = False) -> None:
    """Print the catalog as a file that `apply` takes: everything, or one tenant.

    Keys are in it by their hashes, so whoever has the file can't use them.
    What has expired is left out.

    Examples:
      limitforge export > plans.yaml
      limitforge export --tenant acme

    """

    async def work(catalog: Catalog) -> Document:
        name = None if tenant is None else (await find_tenant(catalog, tenant)).name
        return await export_document(catalog, tenant=name)

    document = in_catalog(database, work)
    if json:
        print_json(plain(document))
    else:
        sys.stdout.write(dump(document))


def schema() -> None:
    """Print the JSON Schema of the file, so that editors complete and check it.

    With the YAML extension of an editor, a first line says where it is:

      # yaml-language-server: $schema=limitforge.schema.json

    Examples:
      limitforge schema > limitforge.schema.json

    """
    print_json(file_schema(), indent=2)


def _read(file: str) -> tuple[Document, Source]:
    try:
        if file == "-":
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                content = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        reason = error.strerror if isinstance(error, OSError) else None
        raise InvalidInput(file, f"can't be read: {reason or error}") from None
    return read(content, "stdin" if file == "-" else file, at_time(SystemClock().now_us()))


async def _warnings(catalog: Catalog, document: Document) -> list[str]:
    async with catalog.database.reading() as connection:
        return await document_warnings(connection, document)


def _print(changes: list[Change], *, is_applied: bool, for_programs: bool) -> None:
    if for_programs:
        print_json({"applied": is_applied, "changes": as_json(changes)})
        return
    if not changes:
        print("Nothing to change.")
        return
    print_lines(describe(changes), _COLOURS)
    created, updated, deleted = counts(changes)
    if is_applied:
        print(f"\n{created} created, {updated} changed, {deleted} deleted.")
    else:
        print(f"\n{created} to create, {updated} to change, {deleted} to delete.")
