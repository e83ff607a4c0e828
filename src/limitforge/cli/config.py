"""`limitforge apply`, `diff`, `export` and `schema`: configuration as a file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from limitforge.catalog.config.apply import apply_document
from limitforge.catalog.config.apply import preview_document
from limitforge.catalog.config.diff import Change, changes_to_json, count_changes, format_changes
from limitforge.catalog.config.document import dump_document, parse_document
from limitforge.catalog.config.export import export_document
from limitforge.catalog.config.json_schema import json_schema as file_schema
from limitforge.catalog.config.plan_warnings import document_warnings
from limitforge.catalog.config.specs import ConfigDocument, spec_to_dict
from limitforge.catalog.config.strict_yaml import MAX_FILE_BYTES, SourceFile
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import to_datetime
from limitforge.cli.catalog.lookup import find_tenant
from limitforge.cli.catalog.options import AsJson, DatabaseUrl, TenantFilter, audit_actor, run_with_catalog
from limitforge.cli.terminal.output import print_json, print_lines, print_warnings
from limitforge.cli.terminal.progress import ProgressReporter
from limitforge.core.clock import SystemClock
from limitforge.errors import InvalidInput, LimitforgeError

EXIT_DIFFERENT = 1
EXIT_INTERRUPTED = 130  # as a shell has it for SIGINT

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
    document, source = _read_document(file)
    tally = ProgressReporter("Applied", "tenants")

    async def work(catalog: Catalog) -> list[Change]:
        if dry_run:
            return await preview_document(catalog, document, prune=prune, source=source)
        return await apply_document(
            catalog, document, audit_actor(), prune=prune, source=source, on_progress=tally.update
        )

    try:
        with tally:
            changes = run_with_catalog(database, work)
    except (KeyboardInterrupt, LimitforgeError) as error:
        if tally.total:
            done = f"{tally.done:,} of {tally.total:,} tenants are applied, each of them entirely"
            print(f"Stopped: {done}. Run the same command again to finish.", file=sys.stderr)
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise
    _print_changes(changes, is_applied=not dry_run, for_programs=json)
    print_warnings(run_with_catalog(database, lambda catalog: _document_warnings(catalog, document)))


def diff(file: File, prune: Prune = False, database: DatabaseUrl = DEFAULT_URL, json: AsJson = False) -> None:
    """Tell what `apply` would change. The exit status is 1 if there is anything, and 0 if not.

    Examples:
      limitforge diff plans.yaml
      limitforge diff plans.yaml --json | jq '.changes[].action'

    """
    document, source = _read_document(file)

    async def work(catalog: Catalog) -> list[Change]:
        return await preview_document(catalog, document, prune=prune, source=source)

    changes = run_with_catalog(database, work)
    _print_changes(changes, is_applied=False, for_programs=json)
    print_warnings(run_with_catalog(database, lambda catalog: _document_warnings(catalog, document)))
    if changes:
        raise typer.Exit(EXIT_DIFFERENT)


def export(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, json: AsJson = False) -> None:
    """Print the catalog as a file that `apply` takes: everything, or one tenant.

    Keys are in it by their hashes, so whoever has the file can't use them.
    What has expired is left out.

    Examples:
      limitforge export > plans.yaml
      limitforge export --tenant acme

    """

    async def work(catalog: Catalog) -> ConfigDocument:
        name = None if tenant is None else (await find_tenant(catalog, tenant)).name
        return await export_document(catalog, tenant=name)

    document = run_with_catalog(database, work)
    if json:
        print_json(spec_to_dict(document))
    else:
        sys.stdout.write(dump_document(document))


def schema() -> None:
    """Print the JSON Schema of the file, so that editors complete and check it.

    With the YAML extension of an editor, a first line says where it is:

      # yaml-language-server: $schema=limitforge.schema.json

    Examples:
      limitforge schema > limitforge.schema.json

    """
    print_json(file_schema(), indent=2)


def _read_document(file: str) -> tuple[ConfigDocument, SourceFile]:
    try:
        if file == "-":
            content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                content = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        reason = error.strerror if isinstance(error, OSError) else None
        raise InvalidInput(file, f"can't be read: {reason or error}") from None
    return parse_document(content, "stdin" if file == "-" else file, to_datetime(SystemClock().now_us()))


async def _document_warnings(catalog: Catalog, document: ConfigDocument) -> list[str]:
    async with catalog.database.reading() as connection:
        return await document_warnings(connection, document)


def _print_changes(changes: list[Change], *, is_applied: bool, for_programs: bool) -> None:
    if for_programs:
        print_json({"applied": is_applied, "changes": changes_to_json(changes)})
        return
    if not changes:
        print("Nothing to change.")
        return
    print_lines(format_changes(changes), _COLOURS)
    created, updated, deleted = count_changes(changes)
    if is_applied:
        print(f"\n{created} created, {updated} changed, {deleted} deleted.")
    else:
        print(f"\n{created} to create, {updated} to change, {deleted} to delete.")
