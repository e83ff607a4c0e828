"""Compile SQL statements once per worker, instead of once for each engine that a test creates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import LRUCache

from limitforge.catalog.database import database as databases

CAPACITY = 5_000


class StatementCache(LRUCache[Any, Any]):
    """Compiled statements by kind of database. SQLAlchemy's own key has the dialect of one engine."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_without_dialect(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_without_dialect(key), value)


def _without_dialect(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key[0].name, *key[1:]


@contextmanager
def compiled_once() -> Iterator[None]:
    """Let all engines that are created inside this block share their compiled statements."""
    compiled = StatementCache(CAPACITY)

    def made(*given: Any, **options: Any) -> AsyncEngine:
        engine = create_async_engine(*given, **options)
        engine.sync_engine._compiled_cache = compiled
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "create_async_engine", made)
        yield
