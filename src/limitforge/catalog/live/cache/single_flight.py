"""Share one running read among all tasks that want the same entity."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from limitforge.errors import CatalogUnavailable, UnknownKey

CLOSE_SECONDS = 1.0

Loaded = TypeVar("Loaded")
Load = Callable[[bool], Awaitable[Loaded]]
"""A function that reads an entity.

Its argument is True if the entity is known to have changed, which makes copies of it outdated.
"""


class SingleFlight:
    """Runs at most one read per name. An entity that changes while it is being read is read once more."""

    def __init__(self, on_background_error: Callable[[BaseException], None]) -> None:
        """`on_background_error` receives the errors of reads that were started by `start_in_background`."""
        self._on_background_error = on_background_error
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        self._changed: set[Hashable] = set()  # running reads that must be repeated
        self._is_closed = False

    def __contains__(self, name: Hashable) -> bool:
        return name in self._running

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, name: Hashable, load: Load[Loaded], *, must_be_newer: bool = False) -> Loaded:
        """Join the running read of this name, or start one with `load(must_be_newer)`."""
        if self._is_closed and name not in self._running:
            raise CatalogUnavailable("this process is shutting down")
        read = self._running.get(name) or self._start(name, load, must_be_newer=must_be_newer)
        try:
            loaded: Loaded = await asyncio.shield(read)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if read.cancelled() and (task is None or not task.cancelling()):
                raise CatalogUnavailable("this process is shutting down") from None
            raise
        return loaded

    def start_in_background(self, name: Hashable, load: Load[Any]) -> None:
        """Start a read unless one of this name is running."""
        if name not in self._running and not self._is_closed:
            self._start(name, load, must_be_newer=False).add_done_callback(self._report)

    def mark_changed(self, name: Hashable) -> None:
        """Repeat the running read of this name, if there is one."""
        if name in self._running:
            self._changed.add(name)

    def open(self) -> None:
        """Accept reads again after `close`."""
        self._is_closed = False

    async def close(self) -> None:
        """Wait for running reads, then cancel those that still run: a cancelled driver may leave a thread behind."""
        self._is_closed = True
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=CLOSE_SECONDS)
        while self._running:
            for read in self._running.values():
                read.cancel()
            await asyncio.wait(list(self._running.values()), timeout=CLOSE_SECONDS)
            for name, read in list(self._running.items()):
                if read.done():  # it was cancelled before it began, and has not removed itself
                    del self._running[name]

    def _start(self, name: Hashable, load: Load[Any], *, must_be_newer: bool) -> asyncio.Task[Any]:
        self._changed.discard(name)
        read = asyncio.get_running_loop().create_task(self._read(name, load, must_be_newer=must_be_newer))
        self._running[name] = read
        read.add_done_callback(_retrieve_error)
        return read

    async def _read(self, name: Hashable, load: Load[Loaded], *, must_be_newer: bool) -> Loaded:
        try:
            while True:
                try:
                    loaded = await load(must_be_newer)
                except UnknownKey:
                    if name not in self._changed:
                        raise
                else:
                    if name not in self._changed:
                        return loaded
                self._changed.discard(name)
                must_be_newer = True
        finally:
            self._changed.discard(name)
            del self._running[name]

    def _report(self, read: asyncio.Task[Any]) -> None:
        error = None if read.cancelled() else read.exception()
        if error is not None:
            self._on_background_error(error)


def _retrieve_error(read: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging an error as never retrieved, where all tasks that waited for it were cancelled."""
    if not read.cancelled():
        read.exception()
