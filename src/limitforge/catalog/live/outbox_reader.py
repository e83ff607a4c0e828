"""Follow the outbox of the database, and detect a database that was restored.

The outbox is the authoritative log of changes. A process reads on from the revision that it has reached. Each time it
also checks that the database still has that revision: after a restore it does not, and everything is read again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.database import catalog_revision, outbox
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.history import RevisionHistory, Stamp
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.change_applier import ChangeApplier
from limitforge.catalog.live.shared_copies import SharedCopies
from limitforge.core.clock import Clock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import CatalogError, StoreError
from limitforge.observability.events import log_event

REVISIONS_PER_READ = 100  # revisions that are read at once
RECENT_ANNOUNCEMENTS = 2_000  # announcements that are read at the start: copies of older revisions are not accepted
WRITE_HEAD_SECONDS = 60.0  # how often the head is written to Redis again

_log = logging.getLogger(__name__)


class OutboxReader:
    """Moves the history of this process to the end of the outbox, and applies the changes on the way."""

    def __init__(  # noqa: PLR0913 - it connects the database, the cache and Redis
        self,
        database: Database,
        catalog: Catalog,
        history: RevisionHistory,
        cache: CatalogCache,
        applier: ChangeApplier,
        copies: SharedCopies | None,
        clock: Clock,
        *,
        on_changes: Callable[[], None],
        on_loaded_restored_database: Callable[[], None],
        on_restore_detected: Callable[[], None],
        on_error: Callable[[CatalogError], None],
    ) -> None:
        """`on_changes` is called after changes of other processes were applied, and `on_error` if the database fails.

        `on_loaded_restored_database` is called each time the current state is loaded from a database that was ever
        restored, and `on_restore_detected` when this process detects a restore.
        """
        self._database = database
        self._catalog = catalog
        self._history = history
        self._cache = cache
        self._applier = applier
        self._copies = copies
        self._clock = clock
        self._on_changes = on_changes
        self._on_loaded_restored_database = on_loaded_restored_database
        self._on_restore_detected = on_restore_detected
        self._on_error = on_error
        self._read_lock = asyncio.Lock()
        self._head_written_us = 0
        self._newest_message: Stamp | None = None
        self._must_check_redis_head = True

    def request_redis_head_check(self) -> None:
        """Compare with the head in Redis at the next `catch_up`: the database may have lost what Redis still has."""
        self._must_check_redis_head = True

    def note_message(self, stamp: Stamp, timeline: int) -> None:
        """Note a revision that a message announced. The database had it, since messages follow the commit."""
        self.note_timeline(timeline)
        self._newest_message = max(self._newest_message or Stamp(), stamp)

    def note_timeline(self, timeline: int) -> None:
        """Stop accepting copies of older timelines."""
        if timeline > self._history.newest_timeline:
            self._history.newest_timeline = timeline
            self._cache.revalidate_all()

    async def catch_up(self) -> None:
        """Apply all changes since this process last read the outbox, and detect a database that was restored."""
        async with self._read_lock:
            must_check_redis_head, self._must_check_redis_head = self._must_check_redis_head, False
            message = self._newest_message
            try:
                redis_head = await self.read_redis_head() if must_check_redis_head else None
                if self._history.head is None:
                    await self._load_current_state()
                while not await self._read_batch():
                    pass
                for stamp in (redis_head, message):
                    if stamp is not None and self._history.has_lost(stamp):
                        await self._restart_after_restore(stamp)
                        break
            except BaseException as error:
                self._must_check_redis_head |= must_check_redis_head
                if isinstance(error, CatalogError):
                    self._on_error(error)
                raise

    def advance(self, announcements: Sequence[Announcement]) -> bool:
        """Move on by one revision. Return False if it does not follow the head of this process directly."""
        if not announcements or not self._history.is_next(announcements[0].stamp, announcements[0].previous_id):
            return False
        self._history.advance(announcements[0].stamp)
        return True

    async def read_redis_head(self) -> Stamp | None:
        """Return the newest revision that any process has seen, or None if that is not known."""
        try:
            return None if self._copies is None else await self._copies.head()
        except StoreError:
            return None

    async def write_redis_head(self, head: Stamp | None = None) -> None:
        """Write the head for other processes: at once if it has moved to `head`, otherwise once a minute."""
        now_us = self._clock.now_us()
        stamp = head or self._history.head
        is_due = head is not None or now_us >= self._head_written_us + WRITE_HEAD_SECONDS * US_PER_SECOND
        if self._copies is None or stamp is None or not is_due:
            return
        await self._copies.try_put_head(stamp)
        self._head_written_us = now_us

    async def _load_current_state(self) -> None:
        """Start from the current state of the database.

        Announcements that are not published yet are processed again, because copies may predate them. All entries that
        were read from copies are discarded, since they were never compared with this database.
        """
        async with self._database.reading() as connection:
            database_head = await catalog_revision.read_last_stamp(connection)
            recent = await outbox.recent_stamps(connection, RECENT_ANNOUNCEMENTS)
            unpublished = [] if self._copies is None else await outbox.unpublished_announcements(connection, 1)
        self._history.reset(database_head, recent)
        if unpublished:
            first = unpublished[0].announcement
            self._history.move_head_back(first.revision - 1, first.previous_id)
        if database_head.timeline:
            self._on_loaded_restored_database()
        self._cache.clear()

    async def _read_batch(self) -> bool:
        """Apply the next batch of changes. Return True at the end of the outbox.

        The chain of ids tells whether the database was restored, even if it has more revisions than this process.
        """
        seen = self._history.head
        if seen is None:
            return True
        async with self._database.reading() as connection:
            database_head = await catalog_revision.read_last_stamp(connection)
            rows = (
                []
                if database_head == seen
                else await outbox.announcements_after(connection, seen.revision, REVISIONS_PER_READ)
            )
        if database_head == seen:
            return True
        has_gap = not rows or rows[0].revision != seen.revision + 1
        has_other_id = not has_gap and rows[0].previous_id != seen.change_id
        if has_gap and self._history.head != seen:
            return False  # a message or an own change has moved the head meanwhile: read on from there
        if database_head.timeline != seen.timeline or database_head.revision <= seen.revision or has_other_id:
            await self._restart_after_restore(seen)
            return True
        if has_gap:
            log_event(
                _log,
                logging.WARNING,
                "catalog.changes_missed",
                "the outbox does not reach back to the last change seen here, discarding the cache",
                revision=seen.revision,
            )
            await self._load_current_state()
            return True
        await self.write_redis_head(database_head)
        await self._applier.apply_or_defer(rows)
        for row in rows:  # rows of older timelines and releases are part of this history
            is_last = row.revision == database_head.revision
            self._history.advance(
                database_head if is_last else msgspec.structs.replace(row.stamp, timeline=seen.timeline)
            )
        self._on_changes()
        return rows[-1].revision >= database_head.revision

    async def _restart_after_restore(self, lost_stamp: Stamp) -> None:
        """Discard everything, since the database has lost a revision.

        A new timeline makes all other processes do the same, and invalidates all copies.
        """
        log_event(
            _log,
            logging.WARNING,
            "catalog.restored",
            "the database has lost this change, probably it was restored; discarding the cache",
            revision=lost_stamp.revision,
            change_id=lost_stamp.change_id,
        )
        self._history.reject_timeline(lost_stamp.timeline)
        self._cache.clear()  # before anything else, since that may fail and be retried
        self._applier.clear()
        self._newest_message = None
        self._on_restore_detected()
        await self._catalog.begin_timeline(lost_stamp.timeline)
        await self._load_current_state()
        await self.write_redis_head(self._history.head)
