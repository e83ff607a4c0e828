"""Publish the announcements that their writers did not publish.

A process publishes its own changes at once. The relay publishes those of writers that were killed or that do not use
Redis, such as the command line. One process at a time publishes them, in batches, revocations first. Other processes
do not depend on it to learn of a change, since they read the outbox themselves.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import takewhile
from typing import Any
from uuid import uuid4

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.database import outbox
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.outbox import PendingAnnouncement
from limitforge.catalog.live.publisher import ChangePublisher
from limitforge.catalog.live.shared_redis import SharedRedis
from limitforge.catalog.model import to_datetime
from limitforge.core.clock import Clock
from limitforge.errors import CatalogError, CatalogUnavailable, LimitforgeError, StoreError, StoreUnavailable
from limitforge.observability.events import log_event

RELAY_AFTER_SECONDS = 0.2  # an announcement this old should have been published by its writer
RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 10.0
LOCK_SECONDS = 10.0  # until another process takes over from a relay that was killed
BATCH = 200  # announcements: about 0.1 s, for which a revocation may have to wait
LOCK_TAGS = ("%relay", "%relay1", "%relay4", "%relay3")  # one in each quarter of the slots of a Cluster
FIRST_POSITION = (0, "")  # before the first announcement

_log = logging.getLogger(__name__)


class RetryPass:
    """A pass over the announcements that failed, which tries them again. Pauses grow while some fail again."""

    def __init__(self) -> None:
        self.position = FIRST_POSITION
        """The position of the last announcement that this pass has tried."""
        self.has_failed = False
        """True if announcements that were tried are still unpublished."""
        self.retry_at = 0.0
        self._failed_again = False
        self._pause = RETRY_SECONDS

    @property
    def is_due(self) -> bool:
        return self.has_failed and time.monotonic() >= self.retry_at

    def note_failure(self) -> None:
        """Note that an announcement failed. The first failure sets the time of the next retry."""
        if not self.has_failed:
            self.has_failed, self.retry_at = True, time.monotonic() + RETRY_SECONDS

    def note_repeated_failure(self) -> None:
        """Note that announcements of this pass failed again, and wait twice as long before the next retry."""
        self._failed_again = True
        self._pause = min(2 * self._pause, MAX_RETRY_SECONDS)
        self.retry_at = time.monotonic() + self._pause

    def end(self) -> None:
        """Note that all announcements were tried again. If none failed, there is nothing more to retry."""
        self.has_failed, self._failed_again = self._failed_again, False
        self._pause = self._pause if self.has_failed else RETRY_SECONDS


class OutboxRelay:
    """Publishes the unpublished announcements of the outbox, while this process holds the lock."""

    def __init__(
        self,
        database: Database,
        catalog_redis: SharedRedis,
        publisher: ChangePublisher,
        *,
        key_prefix: str,
        clock: Clock,
        catch_up: Callable[[], Awaitable[None]],
        on_redis_status: Callable[[StoreError | None], None],
    ) -> None:
        """`catch_up` reads the outbox up to its end, and detects a restored database before anything is published.

        `on_redis_status` is called with the error while Redis is unreachable, and with None once it is back.
        """
        self.has_unpublished = False
        """True while there may be unpublished announcements."""
        self._database = database
        self._catalog_redis = catalog_redis
        self._publisher = publisher
        self._locks = [f"{key_prefix}:{{{tag}}}:" for tag in LOCK_TAGS]
        self._held_locks: set[str] = set()
        self._owner = uuid4().bytes
        self._clock = clock
        self._catch_up = catch_up
        self._on_redis_status = on_redis_status
        self._wake = asyncio.Event()
        self._polled_at = 0.0
        # The position of the last announcement that was tried: of revoking ones (True), and of all (False).
        self._tried = {True: FIRST_POSITION, False: FIRST_POSITION}
        self._has_untried = True  # True if there are announcements that were too recent to be tried
        self._retry_pass = RetryPass()
        self._error: LimitforgeError | None = None
        self._logged_error = ""

    def wake(self) -> None:
        """Look for unpublished announcements."""
        self.has_unpublished = True
        self._wake.set()

    def reset(self) -> None:
        """Start from the beginning: the database was restored, and continues from a lower revision."""
        self._tried = {True: FIRST_POSITION, False: FIRST_POSITION}
        self._retry_pass.position = FIRST_POSITION

    async def run(self, run_to_completion: Callable[[Coroutine[Any, Any, None]], Awaitable[None]]) -> None:
        """Publish announcements until cancelled. `run_to_completion` protects a transaction from the cancellation."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(RELAY_AFTER_SECONDS)
            self._wake.clear()
            try:
                await run_to_completion(self.publish_pending())
                if not self.has_unpublished:
                    self._on_redis_status(None)
                    self._logged_error = ""
            except StoreError as error:
                self._on_redis_status(error)
            except CatalogError as error:
                if str(error) != self._logged_error:  # an invalid tenant stays so until someone corrects it
                    log_event(
                        _log,
                        logging.WARNING,
                        "catalog.publish_failed",
                        "could not publish changes, will retry",
                        error=error,
                    )
                self._logged_error = str(error)
            except Exception:  # noqa: BLE001 - later changes must be published all the same
                log_event(
                    _log,
                    logging.ERROR,
                    "catalog.publish_failed",
                    "could not publish changes, will retry",
                    exc_info=True,
                )
            if self.has_unpublished:
                pause = RETRY_SECONDS
                if self._retry_pass.has_failed and not self._has_untried:
                    pause = max(pause, self._retry_pass.retry_at - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                self._wake.set()

    async def publish_pending(self) -> None:
        """Publish all announcements whose writers did not, unless another process is doing so.

        Raises the first error at the end. Announcements that failed stay unpublished, and the next call tries them
        again.
        """
        self.has_unpublished = True
        self._error = None
        await self._catch_up()  # before taking the lock: a process without a database must not keep others from it
        if not await self._acquire_lock():
            return
        renewal = asyncio.get_running_loop().create_task(self._renew_lock())
        try:
            await self._publish_all()
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
            for lock in self._held_locks:
                with contextlib.suppress(StoreError):
                    await self._catalog_redis.release_lock(lock, self._owner)
            self._held_locks.clear()
        if self._error is not None:
            raise self._error

    async def _publish_all(self) -> None:
        """Publish announcements that were not tried yet. Retry failed ones in between, so that they delay no others."""
        while True:
            while self._retry_pass.is_due:
                await self._retry()
            announcements = await self._next_untried()
            if not announcements:
                break
            await self._publish(announcements, self._publish_revocations)
            if not await self._acquire_lock():
                return
        async with self._database.reading() as connection:
            self.has_unpublished = bool(await outbox.unpublished_announcements(connection, 1))
            self._has_untried = bool(await outbox.unpublished_announcements(connection, 1, after=self._tried[False]))
        if not self.has_unpublished:
            self._retry_pass.has_failed = False
        if not self._retry_pass.has_failed:
            self.reset()

    async def _retry(self) -> None:
        """Retry failed announcements: all revoking ones, and the next batch of a pass over all of them."""
        async with self._database.reading() as connection:
            rows = await outbox.unpublished_announcements(connection, BATCH, after=self._retry_pass.position)
            revoking = await outbox.unpublished_announcements(connection, BATCH, revoking=True)
        self._retry_pass.position = _position(rows[-1].announcement) if len(rows) == BATCH else FIRST_POSITION
        due = {_position(row.announcement): row.announcement for row in (*revoking, *rows) if self._is_due(row)}
        if due and not await self._publish(list(due.values()), self._publish_revocations):
            self._retry_pass.note_repeated_failure()
        elif self._retry_pass.position == FIRST_POSITION:
            self._retry_pass.end()

    async def _acquire_lock(self) -> bool:
        """Take or extend the lock. Return False if another process has it. If its server fails, use the next lock."""
        first_error: StoreError | None = None
        for lock in self._locks:
            try:
                is_held = await self._catalog_redis.acquire_lock(lock, self._owner, LOCK_SECONDS)
            except StoreError as error:
                first_error = first_error or error
                continue
            if is_held:
                self._held_locks.add(lock)
            return is_held
        raise first_error or StoreUnavailable("there is no lock")

    async def _renew_lock(self) -> None:
        """Keep the lock while a batch takes long: a tenant may have thousands of overrides."""
        while True:
            await asyncio.sleep(LOCK_SECONDS / 3)
            with contextlib.suppress(StoreError):
                await self._acquire_lock()

    async def _publish(
        self, announcements: Sequence[Announcement], on_tenant_synced: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Publish announcements. Return False if that failed for some of them."""
        try:
            await self._publisher.publish(announcements, on_tenant_synced)
        except CatalogUnavailable:
            raise
        except (StoreError, CatalogError) as error:
            self._error = self._error or error
            self._retry_pass.note_failure()
            return False
        return True

    async def _next_untried(self) -> list[Announcement]:
        """Return the next batch of announcements that were not tried yet: revoking ones, else the oldest."""
        self._polled_at = time.monotonic()
        return await self._next(revoking=True) or await self._next()

    async def _next(self, *, revoking: bool = False) -> list[Announcement]:
        async with self._database.reading() as connection:
            rows = await outbox.unpublished_announcements(
                connection, BATCH, after=self._tried[revoking], revoking=revoking
            )
        due = [row.announcement for row in takewhile(self._is_due, rows)]
        if due:
            self._tried[revoking] = _position(due[-1])
            self._tried[True] = max(self._tried.values())  # a pass over all rows includes the revoking ones
        return due

    def _is_due(self, row: PendingAnnouncement) -> bool:
        """Return True if it is old enough that its writer should have published it, or if their clocks differ."""
        age = to_datetime(self._clock.now_us()) - row.at
        return abs(age.total_seconds()) >= RELAY_AFTER_SECONDS

    async def _publish_revocations(self) -> None:
        """Publish new revocations before the current batch is done."""
        if time.monotonic() - self._polled_at < RELAY_AFTER_SECONDS:
            return
        self._polled_at = time.monotonic()
        if announcements := await self._next(revoking=True):
            await self._publish(announcements)


def _position(announcement: Announcement) -> tuple[int, str]:
    return announcement.revision, announcement.tenant_id
