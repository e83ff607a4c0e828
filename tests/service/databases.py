"""Databases with the schema. An SQLite file is created once and then copied: creating it takes 100 ms of CPU time."""

import asyncio
import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.service.demo_tenant import DemoTenant, create_demo_tenant
from tests.catalog.factories import open_database


def migrate(url: str) -> None:
    """Migrate this database to the newest schema."""
    if (file := _new_file(url)) is None:
        asyncio.run(_upgrade(url))
    else:
        file.write_bytes(_empty_database())


def seed_demo(url: str, peppers: str) -> DemoTenant:
    """Create the tenant, plans, keys and token of `limitforge demo` in this database."""
    if (file := _new_file(url)) is None:
        return asyncio.run(_create_demo(url, peppers))
    content, made = _demo_database(peppers)
    file.write_bytes(content)
    return made


def _new_file(url: str) -> Path | None:
    """Return the file that SQLite would create, or None if it exists or this is not SQLite."""
    file = Path(url.removeprefix("sqlite:///"))
    return file if url.startswith("sqlite:///") and not file.exists() else None


@functools.cache
def _empty_database() -> bytes:
    with _template() as file:
        asyncio.run(_upgrade(f"sqlite:///{file}"))
        return _content(file)


@functools.cache
def _demo_database(peppers: str) -> tuple[bytes, DemoTenant]:
    with _template() as file:
        made = asyncio.run(_create_demo(f"sqlite:///{file}", peppers))
        return _content(file), made


@contextlib.contextmanager
def _template() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="limitforge-template-") as folder:
        yield Path(folder) / "template.db"


def _content(file: Path) -> bytes:
    assert list(file.parent.iterdir()) == [file], "a part of it is in another file"
    return file.read_bytes()


async def _upgrade(url: str) -> None:
    async with open_database(url) as database:
        await database.upgrade()


async def _create_demo(url: str, peppers: str) -> DemoTenant:
    async with open_database(url) as database:
        await database.upgrade()
        return await create_demo_tenant(Catalog(database, peppers=Peppers.parse(peppers)), "")
