"""Open the catalog for one command, with the settings of the environment."""

import asyncio
import contextlib
import getpass
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from alembic.util import CommandError

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.errors import InvalidInput

PEPPERS_VARIABLE = "LIMITFORGE_PEPPERS"
ACTOR_VARIABLE = "LIMITFORGE_ACTOR"

Result = TypeVar("Result")


def run_with_catalog(url: str, work: Callable[[Catalog], Awaitable[Result]], *, with_peppers: bool = False) -> Result:
    """Run `work` with the catalog. Create the schema of a SQLite file first, or upgrade it."""

    async def work_with_database(database: Database) -> Result:
        peppers = peppers_from_environment() if with_peppers else None
        await database.ensure_schema()
        return await work(Catalog(database, peppers=peppers))

    return run_with_database(url, work_with_database)


def run_with_database(url: str, work: Callable[[Database], Awaitable[Result]]) -> Result:
    """Run `work` with the database, without looking at its schema."""

    async def run() -> Result:
        database = Database(url)
        try:
            return await work(database)
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except CommandError as error:  # the table of Alembic has several schema versions
        raise InvalidInput("database", str(error)) from None


def audit_actor() -> str:
    """Return the actor that the audit log shows: the environment variable, or the user of the operating system."""
    actor = os.environ.get(ACTOR_VARIABLE)
    if actor:
        return actor
    with contextlib.suppress(KeyError, OSError, ImportError):
        return f"cli:{getpass.getuser()}"
    return "cli"


def peppers_from_environment() -> Peppers:
    """Read the peppers. Raises `InvalidInput`, with new peppers to paste if none are set."""
    text = os.environ.get(PEPPERS_VARIABLE)
    if not text:
        raise InvalidInput(
            PEPPERS_VARIABLE,
            "is required: it is the secret that API keys are hashed with. Keep it: if it is lost, all keys are "
            f"invalid. To use a new one:\n\n  export {PEPPERS_VARIABLE}='{Peppers.generate_text()}'\n",
        )
    try:
        return Peppers.parse(text)
    except InvalidInput as error:
        raise InvalidInput(PEPPERS_VARIABLE, error.problem) from None
