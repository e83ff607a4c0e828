"""`limitforge db`: the schema of the catalog's database."""

from pathlib import Path
from typing import Annotated

import typer

from limitforge.catalog.database.database import DEFAULT_URL, Database, newest_schema_version
from limitforge.cli.catalog.connect import run_with_database
from limitforge.cli.catalog.options import AsJson, DatabaseUrl, YesFlag, confirm
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_fields, print_json

HELP = """The schema of the catalog's database: show, create and upgrade it.

The schema of a SQLite file is created and upgraded automatically. Upgrade a
Postgres database with `limitforge db upgrade`.

Examples:
  limitforge db status
  limitforge db upgrade --database postgresql://user@localhost/limitforge
"""

app = command_group(HELP)


@app.command()
def status(database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the version of the schema, and the newest version."""

    async def work(opened: Database) -> dict[str, str | None]:
        exists = not opened.is_sqlite or _file_exists(opened)  # opening a missing SQLite file would create it
        version = await opened.schema_version() if exists else None
        return {"database": opened.description, "schema": version, "newest": newest_schema_version()}

    versions = run_with_database(database, work)
    if as_json:
        print_json(versions)
        return
    if versions["schema"] is None:
        state = "missing: run `limitforge db upgrade`"
    elif versions["schema"] == versions["newest"]:
        state = f"{versions['schema']}, the newest"
    else:
        state = f"{versions['schema']}, but {versions['newest']} is the newest: run `limitforge db upgrade`"
    print_fields({"database": versions["database"], "schema": state})


@app.command()
def upgrade(database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Create the schema, or upgrade it to the newest version. Data is kept."""

    async def work(opened: Database) -> None:
        before = await opened.schema_version()
        await opened.upgrade()
        _print_schema_change(opened.description, before, await opened.schema_version(), as_json=as_json)

    run_with_database(database, work)


@app.command()
def downgrade(
    to: Annotated[str, typer.Argument(metavar="TO", help="A version of the schema, or base to remove it.")],
    yes: YesFlag = False,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier version of the schema. Data that it can't hold is lost."""
    confirm(f"Data that schema {to} can't hold will be lost. Continue?", yes=yes)

    async def work(opened: Database) -> None:
        before = await opened.schema_version()
        await opened.downgrade(to)
        _print_schema_change(opened.description, before, await opened.schema_version(), as_json=as_json)

    run_with_database(database, work)


def _file_exists(opened: Database) -> bool:
    return Path(opened.url.database or "").exists()


def _print_schema_change(description: str, before: str | None, after: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"database": description, "before": before, "schema": after})
    else:
        print(f"The schema of {description} was {before or 'missing'}, and is {after or 'missing'} now.")
