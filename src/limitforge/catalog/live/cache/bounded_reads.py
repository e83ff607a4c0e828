"""Run a bounded number of database reads at once, and let no check wait for one past its deadline."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from limitforge.errors import CatalogUnavailable

LOOKUP_SECONDS = 1.0
MAX_READS = 5  # as `database.POOL_SIZE`: a database that hangs then blocks no more than the connections of the pool
CLOSE_SECONDS = 1.0

Found = TypeVar("Found")


class BoundedReads:
    """Runs reads with a deadline.

    A read that misses its deadline is not cancelled, since a driver that is interrupted during a statement may leave a
    thread or a connection behind. It ends by the database's own timeout, and occupies its slot until then.
    """

    def __init__(self, seconds: float = LOOKUP_SECONDS) -> None:
        self.seconds = seconds
        self._slots = asyncio.Semaphore(MAX_READS)
        self._reads: set[asyncio.Future[Any]] = set()

    async def read(self, read: Callable[[], Awaitable[Found]], *, has_deadline: bool) -> Found:
        """Return the result of `read`.

        With a deadline, raises `CatalogUnavailable` when it passes. The wait for a free slot counts. Without one, only
        the database's own timeouts apply.
        """
        if not has_deadline:
            async with self._slots:
                return await read()
        try:
            async with asyncio.timeout(self.seconds) as deadline:
                await self._slots.acquire()
        except TimeoutError:
            raise self._timed_out() from None
        task = asyncio.ensure_future(read())
        self._reads.add(task)
        task.add_done_callback(self._release_slot)
        left = max((deadline.when() or 0) - asyncio.get_running_loop().time(), 0)
        done, _ = await asyncio.wait([task], timeout=left)
        if not done:
            raise self._timed_out()
        return task.result()

    async def close(self) -> None:
        while self._reads:
            await asyncio.wait(list(self._reads), timeout=CLOSE_SECONDS)
            for task in self._reads:
                task.cancel()

    def _release_slot(self, task: asyncio.Future[Any]) -> None:
        self._reads.discard(task)
        self._slots.release()
        if not task.cancelled():
            task.exception()  # mark the error as retrieved: the task that waited for it may have timed out

    def _timed_out(self) -> CatalogUnavailable:
        return CatalogUnavailable(f"the database did not answer a lookup within {self.seconds:g} s")
