"""`limitforge apply`, `diff`, `export` and `schema`: configuration as code."""

import sys
from typing import Annotated

import typer

from limitforge.catalog.config.apply import apply_document, preview_document
from limitforge.catalog.config.diff import Change, changes_to_json, count_changes, format_changes
from limitforge.catalog.config.document import dump_document, parse_document
from limitforge.catalog.config.document_warnings import document_warnings
from limitforge.catalog.config.export import export_document
from limitforge.catalog.config.json_schema import json_schema
from limitforge.catalog.config.specs import ConfigDocument, spec_to_dict
from limitforge.catalog.config.strict_yaml import MAX_FILE_BYTES, SourceFile
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import DEFAULT_URL
from limitforge.catalog.model import to_datetime
from limitforge.cli.catalog.connect import audit_actor, run_with_catalog
from limitforge.cli.catalog.lookup import find_tenant
from limitforge.cli.catalog.options import AsJson, DatabaseUrl, TenantFilter
from limitforge.cli.terminal.input import read_file
from limitforge.cli.terminal.output import print_json, print_lines, print_warnings
from limitforge.cli.terminal.progress import ProgressReporter
from limitforge.core.clock import SystemClock
from limitforge.errors import LimitforgeError

EXIT_DIFFERENT = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, like a shell

File = Annotated[str, typer.Argument(metavar="FILE", help="A YAML or JSON file, or - for the standard input.")]
Prune = Annotated[bool, typer.Option("--prune", help="Also delete the tenants that are not in the file.")]

_COLOURS = {"+": "green", "  +": "green", "-": "red", "  -": "red", "~": "yellow"}


def apply(
    file: File,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the changes, like diff.")] = False,
    prune: Prune = False,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change the catalog to match FILE.

    The whole FILE is validated before anything is written. Each tenant is
    written in one transaction. After an interruption, run the command again to
    finish.

    A list in FILE (the plans, policies, keys or overrides of a tenant) is
    complete: entries that are missing from it are deleted. A list that is
    absent stays unchanged, and so do tenants that are absent. The command is
    idempotent.

    Examples:
      limitforge apply plans.yaml --dry-run
      limitforge apply plans.yaml
      limitforge export | limitforge apply - --database postgresql://...

    """
    document, source = _read_document(file)
    progress = ProgressReporter("Applied", "tenants")

    async def work(catalog: Catalog) -> list[Change]:
        if dry_run:
            return await preview_document(catalog, document, prune=prune, source=source)
        return await apply_document(
            catalog, document, audit_actor(), prune=prune, source=source, on_progress=progress.update
        )

    try:
        with progress:
            changes = run_with_catalog(database, work)
    except (KeyboardInterrupt, LimitforgeError) as error:
        if progress.total:
            done = f"{progress.done:,} of {progress.total:,} tenants were applied completely, and the others not at all"
            print(f"Stopped: {done}. Run the same command again to finish.", file=sys.stderr)
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise
    _print_changes(changes, is_applied=not dry_run, as_json=as_json)
    print_warnings(run_with_catalog(database, lambda catalog: _document_warnings(catalog, document)))


def diff(file: File, prune: Prune = False, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Print the changes that `apply` would make. The exit status is 1 if there are any, otherwise 0.

    Examples:
      limitforge diff plans.yaml
      limitforge diff plans.yaml --json | jq '.changes[].action'

    """
    document, source = _read_document(file)

    async def work(catalog: Catalog) -> list[Change]:
        return await preview_document(catalog, document, prune=prune, source=source)

    changes = run_with_catalog(database, work)
    _print_changes(changes, is_applied=False, as_json=as_json)
    print_warnings(run_with_catalog(database, lambda catalog: _document_warnings(catalog, document)))
    if changes:
        raise typer.Exit(EXIT_DIFFERENT)


def export(tenant: TenantFilter = None, database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Print the catalog, or one tenant, as a file for `apply`.

    The file contains hashes of keys, which can't be used as keys. It does not
    contain what has expired.

    Examples:
      limitforge export > plans.yaml
      limitforge export --tenant acme

    """

    async def work(catalog: Catalog) -> ConfigDocument:
        name = None if tenant is None else (await find_tenant(catalog, tenant)).name
        return await export_document(catalog, tenant=name)

    document = run_with_catalog(database, work)
    if as_json:
        print_json(spec_to_dict(document))
    else:
        sys.stdout.write(dump_document(document))


def schema() -> None:
    """Print the JSON Schema of the file. Editors use it to complete and check the file.

    With the YAML extension of an editor, name the schema in the first line:

      # yaml-language-server: $schema=limitforge.schema.json

    Examples:
      limitforge schema > limitforge.schema.json

    """
    print_json(json_schema(), indent=2)


def _read_document(file: str) -> tuple[ConfigDocument, SourceFile]:
    content = read_file(file, MAX_FILE_BYTES)
    return parse_document(content, "stdin" if file == "-" else file, to_datetime(SystemClock().now_us()))


async def _document_warnings(catalog: Catalog, document: ConfigDocument) -> list[str]:
    async with catalog.database.reading() as connection:
        return await document_warnings(connection, document)


def _print_changes(changes: list[Change], *, is_applied: bool, as_json: bool) -> None:
    if as_json:
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
