"""What the commands of the catalog have in common: their options, and how they come by a catalog."""

import asyncio
import contextlib
import getpass
import os
import re
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from alembic.util import CommandError

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.errors import InvalidInput

DATABASE_VARIABLE = "LIMITFORGE_DATABASE_URL"
PEPPERS_VARIABLE = "LIMITFORGE_PEPPERS"
ACTOR_VARIABLE = "LIMITFORGE_ACTOR"
NONE_WORD = "none"

DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        envvar=DATABASE_VARIABLE,
        help="Where the catalog is: sqlite:///FILE or postgresql://...",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
TenantOption = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose: the name or id of a tenant.")]
TenantFilter = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only of this tenant, by its name or id.")
]
YesFlag = Annotated[bool, typer.Option("--yes", help="Don't ask.")]

Result = TypeVar("Result")

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:ms|s|m|h|d|w))+")
_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d|w)")


def run_with_catalog(url: str, work: Callable[[Catalog], Awaitable[Result]], *, with_peppers: bool = False) -> Result:
    """Do something with the catalog. A SQLite file is made, and brought up to date, if need be."""

    async def with_database(database: Database) -> Result:
        peppers = peppers_from_environment() if with_peppers else None
        await database.ensure_schema()
        return await work(Catalog(database, peppers=peppers))

    return run_with_database(url, with_database)


def run_with_database(url: str, work: Callable[[Database], Awaitable[Result]]) -> Result:
    """Do something with the database, whatever its schema is."""

    async def run() -> Result:
        database = Database(url)
        try:
            return await work(database)
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except CommandError as error:  # of a schema that this release does not know
        raise InvalidInput("database", str(error)) from None


def audit_actor() -> str:
    """Who the audit log says it was."""
    given = os.environ.get(ACTOR_VARIABLE)
    if given:
        return given
    with contextlib.suppress(KeyError, OSError, ImportError):
        return f"cli:{getpass.getuser()}"
    return "cli"


def peppers_from_environment() -> Peppers:
    given = os.environ.get(PEPPERS_VARIABLE)
    if not given:
        raise InvalidInput(
            PEPPERS_VARIABLE,
            "is not set, and secrets are hashed under it. Keep it as you keep a password: without it no key works "
            f"any more. A new one, ready to paste:\n\n  export {PEPPERS_VARIABLE}='{Peppers.generate()}'\n",
        )
    try:
        return Peppers.parse(given)
    except InvalidInput as error:
        raise InvalidInput(PEPPERS_VARIABLE, error.problem) from None


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something can't be undone; where nobody can be asked, `--yes` must be there."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput("--yes", "is needed where nobody can be asked")
    typer.confirm(question, abort=True)


def parse_duration(option: str, text: str) -> float:
    """`90s`, `15m`, `24h`, `7d`, `1h30m`."""
    if not _DURATION.fullmatch(text):
        raise InvalidInput(option, f"must be a duration such as 90s, 15m, 24h or 7d, got {text[:64]!r}")
    return round(sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)), 6)


def parse_time(option: str, text: str, now: datetime) -> datetime:
    """A time, or how long from now."""
    if _DURATION.fullmatch(text):
        try:
            return now + timedelta(seconds=parse_duration(option, text))
        except OverflowError:
            raise InvalidInput(option, "is too far away") from None
    try:
        at = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        at = None
    if at is None or at.tzinfo is None:
        raise InvalidInput(option, f"must be a time such as 2026-12-31T00:00:00Z, or 90d from now, got {text[:64]!r}")
    return at


def parse_json_object(option: str, text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text.encode(errors="replace"))
    except msgspec.DecodeError as error:
        raise InvalidInput(option, f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInput(option, 'must be a JSON object, such as {"team": "web"}')
    return found


def given_fields(**options: Any) -> dict[str, Any]:
    """Those that were given; the word `none` takes a value away."""
    return {name: None if value == NONE_WORD else value for name, value in options.items() if value is not None}
