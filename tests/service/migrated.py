"""Databases with the schema in them. A file of SQLite is made once and then copied: it takes 100 ms of CPU time."""

import asyncio
import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from limitforge.catalog.catalog import Catalog
from limitforge.catalog.credentials import Peppers
from limitforge.service.demo import Demo, seed
from tests.catalog.making import opened


def migrate(url: str) -> None:
    """Bring the schema of this database to its newest version."""
    if (file := _new_file(url)) is None:
        asyncio.run(_upgraded(url))
    else:
        file.write_bytes(_empty())


def seed_demo(url: str, peppers: str) -> Demo:
    """Make the tenant, plans, keys and token of `limitforge demo` in this database."""
    if (file := _new_file(url)) is None:
        return asyncio.run(_seeded(url, peppers))
    content, made = _with_demo(peppers)
    file.write_bytes(content)
    return made


def _new_file(url: str) -> Path | None:
    """The file that SQLite would make, or None if it is there or the database is another."""
    file = Path(url.removeprefix("sqlite:///"))
    return file if url.startswith("sqlite:///") and not file.exists() else None


@functools.cache
def _empty() -> bytes:
    with _template() as file:
        asyncio.run(_upgraded(f"sqlite:///{file}"))
        return _content(file)


@functools.cache
def _with_demo(peppers: str) -> tuple[bytes, Demo]:
    with _template() as file:
        made = asyncio.run(_seeded(f"sqlite:///{file}", peppers))
        return _content(file), made


@contextlib.contextmanager
def _template() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="limitforge-template-") as folder:
        yield Path(folder) / "template.db"


def _content(file: Path) -> bytes:
    assert list(file.parent.iterdir()) == [file], "a part of it is in another file"
    return file.read_bytes()


async def _upgraded(url: str) -> None:
    async with opened(url) as database:
        await database.upgrade()


async def _seeded(url: str, peppers: str) -> Demo:
    async with opened(url) as database:
        await database.upgrade()
        return await seed(Catalog(database, peppers=Peppers.parse(peppers)), "")
