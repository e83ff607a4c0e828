"""`limitforge db`: the schema of the catalog's database."""

from pathlib import Path
from typing import Annotated

import typer

from limitforge.catalog.database.database import DEFAULT_URL, Database, newest_schema_version
from limitforge.cli.catalog.options import AsJson, DatabaseUrl, YesFlag, confirm, run_with_database
from limitforge.cli.terminal.help import command_group
from limitforge.cli.terminal.output import print_fields, print_json

HELP = """The catalog's database: make its schema, bring it up to date.

A SQLite file is made and upgraded by itself; a Postgres waits for you.

Examples:
  limitforge db status
  limitforge db upgrade --database postgresql://user@localhost/limitforge
"""

app = command_group(HELP)


@app.command()
def status(database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Tell which schema the database has, and which one is the newest."""

    async def work(opened: Database) -> dict[str, str | None]:
        is_there = not opened.is_sqlite or _file_exists(opened)  # looking at a file that is not there would make it
        found = await opened.schema_version() if is_there else None
        return {"database": opened.description, "schema": found, "newest": newest_schema_version()}

    found = run_with_database(database, work)
    if as_json:
        print_json(found)
        return
    if found["schema"] is None:
        state = "missing: run `limitforge db upgrade`"
    elif found["schema"] == found["newest"]:
        state = f"{found['schema']}, the newest"
    else:
        state = f"{found['schema']}, and {found['newest']} is the newest: run `limitforge db upgrade`"
    print_fields({"database": found["database"], "schema": state})


@app.command()
def upgrade(database: DatabaseUrl = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Make the schema, or bring it to the newest version. What is there stays."""

    async def work(opened: Database) -> None:
        before = await opened.schema_version()
        await opened.upgrade()
        _print_schema_change(opened.description, before, await opened.schema_version(), as_json=as_json)

    run_with_database(database, work)


@app.command()
def downgrade(
    to: Annotated[str, typer.Argument(metavar="TO", help="A version of the schema, or base for none at all.")],
    yes: YesFlag = False,
    database: DatabaseUrl = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier version of the schema. What that version has no place for is lost."""
    confirm(f"What schema {to} has no place for will be lost. Go on?", yes=yes)

    async def work(opened: Database) -> None:
        before = await opened.schema_version()
        await opened.downgrade(to)
        _print_schema_change(opened.description, before, await opened.schema_version(), as_json=as_json)

    run_with_database(database, work)


def _file_exists(opened: Database) -> bool:
    return Path(opened.url.database or "").exists()


def _print_schema_change(place: str, before: str | None, after: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"database": place, "before": before, "schema": after})
    else:
        print(f"The schema of {place} was {before or 'missing'}, and is {after or 'missing'} now.")
