"""Reads of the database on behalf of checks: a few at a time, and none of them makes a check wait past its deadline."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from limitforge.errors import CatalogUnavailable

LOOKUP_SECONDS = 1.0
AT_ONCE = 5  # as many as the database has idle connections for; a frozen one then holds no more than these
CLOSE_SECONDS = 1.0

Found = TypeVar("Found")


class BoundedReads:
    """Runs reads with a deadline.

    A read that passes it goes on by itself until the database's own time limit, and keeps its slot: a driver that is
    cut off in the middle of a statement may leave a thread or a connection behind.
    """

    def __init__(self, seconds: float = LOOKUP_SECONDS) -> None:
        self.seconds = seconds
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._reads: set[asyncio.Future[Any]] = set()

    async def read(self, read: Callable[[], Awaitable[Found]], *, has_deadline: bool) -> Found:
        """Return what `read` finds. With a deadline the wait for a free slot counts too: `CatalogUnavailable` ends it.
        Without one, only the database's own time limits apply.
        """
        if not has_deadline:
            async with self._slots:
                return await read()
        try:
            async with asyncio.timeout(self.seconds) as deadline:
                await self._slots.acquire()
        except TimeoutError:
            raise self._too_late() from None
        task = asyncio.ensure_future(read())
        self._reads.add(task)
        task.add_done_callback(self._ended)
        left = max((deadline.when() or 0) - asyncio.get_running_loop().time(), 0)
        done, _ = await asyncio.wait([task], timeout=left)
        if not done:
            raise self._too_late()
        return task.result()

    async def close(self) -> None:
        while self._reads:
            await asyncio.wait(list(self._reads), timeout=CLOSE_SECONDS)
            for task in self._reads:
                task.cancel()

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._reads.discard(task)
        self._slots.release()
        if not task.cancelled():
            task.exception()  # nobody may be waiting any more

    def _too_late(self) -> CatalogUnavailable:
        return CatalogUnavailable(f"the database did not answer a look-up within {self.seconds:g} s")
