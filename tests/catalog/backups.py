"""Back up and restore the database of a catalog while processes use it, as in `docs/operations.md`."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import unquote

from sqlalchemy.engine import make_url

from tests.postgres import _run, program_path
from tests.servers import ServerFailed

ATTEMPTS = 20


async def back_up(url: str, folder: Path) -> Path:
    """Write a consistent copy of the database to a file."""
    file = folder / "backup"
    if url.startswith("sqlite"):
        await asyncio.to_thread(_copy, _file(url), str(file))
    else:
        await asyncio.to_thread(_run, program_path("pg_dump"), "--format=custom", f"--file={file}", "-d", _libpq(url))
    return file


async def restore(url: str, file: Path) -> None:
    """Replace the contents of the database by a backup, in one transaction."""
    if url.startswith("sqlite"):
        await asyncio.to_thread(_copy, str(file), _file(url))
    else:
        await asyncio.to_thread(restore_postgres, _libpq(url), file)


def restore_postgres(url: str, file: Path) -> None:
    """Restore, and retry after a deadlock with a process that was reading: Postgres then rolled the restore back."""
    for attempt in range(ATTEMPTS):
        try:
            _run(program_path("pg_restore"), "--clean", "--if-exists", "--single-transaction", "-d", url, str(file))
        except ServerFailed as error:
            if "deadlock detected" not in str(error) or attempt == ATTEMPTS - 1:
                raise
        else:
            return


def _copy(source: str, target: str) -> None:
    with contextlib.closing(sqlite3.connect(source)) as one, contextlib.closing(sqlite3.connect(target)) as other:
        one.backup(other)


def _file(url: str) -> str:
    return str(make_url(url).database)


def _libpq(url: str) -> str:
    return unquote(url.replace("+asyncpg", ""))
