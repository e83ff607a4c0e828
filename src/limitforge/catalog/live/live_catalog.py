"""The catalog of one process: a cache that follows the database.

The outbox in the database is the authoritative log of changes. Messages of Redis and notifications of Postgres only
make a process read it sooner, so none of them has to arrive.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Self

import msgspec

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import writes
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.outbox import NOTIFY_CHANNEL
from limitforge.catalog.history import RevisionHistory, Stamp
from limitforge.catalog.live.background import BackgroundTasks
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.entries import CacheStatus
from limitforge.catalog.live.change_applier import ChangeApplier
from limitforge.catalog.live.change_listener import ChangeListener
from limitforge.catalog.live.database_source import DatabaseSource
from limitforge.catalog.live.outbox_reader import OutboxReader
from limitforge.catalog.live.outbox_relay import OutboxRelay
from limitforge.catalog.live.overrides.full_sync import FullOverrideSync
from limitforge.catalog.live.overrides.override_sync import OverrideStore, OverrideSync
from limitforge.catalog.live.overrides.reconciler import OverrideReconciler, ReconcilerStatus
from limitforge.catalog.live.publisher import ChangePublisher
from limitforge.catalog.live.shared_copies import SharedCopies
from limitforge.catalog.live.shared_redis import SharedRedis
from limitforge.catalog.live.signing import Signer
from limitforge.catalog.model import Tenant, to_datetime
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import CatalogError, CatalogUnavailable, StoreError
from limitforge.observability.events import log_event

POLL_SECONDS = 0.5
POLL_WHILE_NOTIFIED_SECONDS = 5.0  # while Postgres notifies this process of changes
LAST_USED_SECONDS = 10.0
SYNC_OVERRIDES_SECONDS = 60.0
CLEAN_UP_SECONDS = 3_600.0
MIN_PAUSE_SECONDS = 0.05  # between two reads of the outbox: one read covers many commits of an apply
APPLY_MESSAGE_SECONDS = (
    1.0  # limit for one message, so that the next one is not delayed; reading the outbox applies the rest
)

_log = logging.getLogger(__name__)


class LiveCatalogStatus(msgspec.Struct, frozen=True):
    """`database` is ok or degraded; `since` is when that began (epoch seconds).

    `listening` names the active subscriptions.
    """

    database: str
    since: float
    listening: tuple[str, ...]
    revision: int
    cache: CacheStatus
    overrides: ReconcilerStatus = ReconcilerStatus()


class LiveCatalog:
    """A catalog and its cache, kept up to date from `start` until `close`.

    `catalog_redis` is the Redis that all processes share. `override_store` is the limiter in whose store overrides take
    effect: in that Redis, or in this process only. `on_tenant_loaded` is called with each tenant that is read, before
    any check of it is decided. `on_overrides_restored` is called with the number of lost overrides that were set again,
    and `on_redis_memory_limit` with the memory limit of the smallest server. `cache_options` are arguments of
    `CatalogCache`.
    """

    def __init__(
        self,
        database: Database,
        peppers: Peppers,
        *,
        catalog_redis: SharedRedis | None = None,
        override_store: OverrideStore | None = None,
        on_tenant_loaded: Callable[[Tenant], None] | None = None,
        key_prefix: str = "lf",
        clock: Clock | None = None,
        on_overrides_restored: Callable[[int], None] | None = None,
        on_redis_memory_limit: Callable[[int], None] | None = None,
        **cache_options: Any,
    ) -> None:
        self._clock = clock = clock or SystemClock()
        self._database = database
        self._catalog_redis = catalog_redis
        self._signer = Signer(peppers)
        self._copies = None if catalog_redis is None else SharedCopies(catalog_redis, key_prefix, self._signer)
        self._history = history = RevisionHistory()
        source = DatabaseSource(database)
        self.cache = CatalogCache(
            source,
            peppers,
            copies=self._copies,
            history=history,
            on_tenant_loaded=on_tenant_loaded,
            clock=clock,
            **cache_options,
        )
        self.catalog = Catalog(database, peppers=peppers, clock=clock, on_commit=self._apply_own_change)
        self._override_sync: OverrideSync | None = None
        self._full_sync: FullOverrideSync | None = None
        self._reconciler: OverrideReconciler | None = None
        if override_store is not None:
            override_sync = self._override_sync = OverrideSync(source, override_store, clock, on_tenant_loaded)
            self._full_sync = FullOverrideSync(
                database, override_sync, override_store, history, catalog_redis=catalog_redis, prefix=key_prefix
            )
            if catalog_redis is not None:
                self._reconciler = OverrideReconciler(
                    source,
                    override_store,
                    override_sync,
                    clock,
                    catalog_redis=catalog_redis,
                    prefix=key_prefix,
                    on_overrides_restored=on_overrides_restored,
                    on_redis_memory_limit=on_redis_memory_limit,
                )
        self._applier = ChangeApplier(database, self.cache, self._override_sync if catalog_redis is None else None)
        self._reader = OutboxReader(
            database,
            self.catalog,
            history,
            self.cache,
            self._applier,
            self._copies,
            clock,
            on_changes=self._wake_relay,
            on_loaded_restored_database=self._loaded_restored_database,
            on_restore_detected=self._restore_detected,
            on_error=self._database_failed,
        )
        self._publisher: ChangePublisher | None = None
        self._relay: OutboxRelay | None = None
        if catalog_redis is not None and self._copies is not None:
            self._publisher = ChangePublisher(
                database,
                catalog_redis,
                self._copies,
                self._signer,
                self._override_sync,
                key_prefix=key_prefix,
                history=history,
            )
            self._relay = OutboxRelay(
                database,
                catalog_redis,
                self._publisher,
                key_prefix=key_prefix,
                clock=clock,
                catch_up=self.catch_up,
                on_redis_status=self._note_redis_status,
            )
        self._listeners = {
            "redis": ChangeListener(
                "redis", self._listen_to_redis, on_subscribed=self._redis_subscribed, on_ended=self._wake_reader
            ),
            "postgres": ChangeListener(
                "postgres", self._listen_to_postgres, on_subscribed=self._wake_reader, on_ended=self._wake_reader
            ),
        }
        self._background = BackgroundTasks()
        self._wake = asyncio.Event()
        self._full_sync_task: asyncio.Task[None] | None = None
        self._is_database_ok = True
        self._since_us = clock.now_us()
        self._is_redis_unreachable = False

    # --- Life cycle -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the outbox, and start the background tasks.

        Raises `InvalidInput` if the database has another schema, and `CatalogUnavailable` if it can't be reached and
        there are no copies in Redis to start from.
        """
        if self._background.tasks:
            return
        self.cache.open()
        try:
            await self._database.ensure_schema()
            await self.catch_up()
            self._wake_relay()
            if self._override_sync is not None and self._catalog_redis is None:
                await self._override_sync.sync_all()
        except CatalogUnavailable as error:
            if self._catalog_redis is None:
                raise
            self._database_failed(error)
        self._start_tasks()

    def _start_tasks(self) -> None:
        background = self._background
        background.start(self._follow_outbox())
        background.start(self._applier.run_deferred(background.run_to_completion))
        if self._relay is not None:
            background.start(self._relay.run(background.run_to_completion))
        background.start_periodic("write_last_used", lambda: LAST_USED_SECONDS, self.write_last_used)
        background.start_periodic("clean_up", lambda: CLEAN_UP_SECONDS, self._clean_up)
        if self._override_sync is not None:
            background.start_periodic("request_full_sync", lambda: SYNC_OVERRIDES_SECONDS, self._request_full_sync)
        if self._reconciler is not None:
            background.start_periodic("reconcile_overrides", self._reconciler.pause_seconds, self._reconciler.step)
        if self._catalog_redis is not None:
            background.start(self._listeners["redis"].run())
        if not self._database.is_sqlite:
            background.start(self._listeners["postgres"].run())

    async def close(self) -> None:
        await self._background.close()
        with contextlib.suppress(CatalogError):
            await self.write_last_used()
        await self.cache.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def status(self) -> LiveCatalogStatus:
        """Return the status without I/O."""
        cache = self.cache.status()
        is_ok = self._is_database_ok and cache.stale_since is None
        since = self._since_us / US_PER_SECOND
        return LiveCatalogStatus(
            "ok" if is_ok else "degraded",
            cache.stale_since if self._is_database_ok and cache.stale_since is not None else since,
            tuple(sorted(listener.name for listener in self._listeners.values() if listener.is_active)),
            0 if self._history.head is None else self._history.head.revision,
            cache,
            ReconcilerStatus() if self._reconciler is None else self._reconciler.status(),
        )

    # --- Changes ----------------------------------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Apply all changes since this process last read the outbox, and detect a database that was restored."""
        await self._reader.catch_up()

    async def _apply_own_change(self, announcements: Sequence[Announcement]) -> None:
        """Apply and publish a committed change of this process before its caller continues. Errors do not undo it."""
        first = announcements[0]
        if self._history.head is None:  # not started: the history of this process begins with its own first change
            self._history.reset(Stamp(first.timeline, first.revision - 1, first.previous_id))
        try:
            await self._applier.apply(announcements)
            is_known = self._reader.advance(announcements) or self._history.contains(first.stamp)
            if not is_known:
                await self.catch_up()  # there are changes of other processes, or the database was restored
            if self._publisher is not None:
                await self._publisher.publish(announcements)
        except StoreError as error:
            self._note_redis_status(error)
            self._wake_relay()
        except CatalogError as error:
            self._wake_relay()
            log_event(
                _log,
                logging.WARNING,
                "catalog.publish_failed",
                "a change is committed but not published yet, will retry",
                error=error,
            )

    async def _apply_message(self, announcements: Sequence[Announcement]) -> None:
        """Apply the changes of a message, unless they are from a lost timeline, which the database does not have."""
        current = [each for each in announcements if not self._history.is_from_other_history(each.stamp)]
        if not current:
            return
        self._reader.note_message(max(each.stamp for each in current), max(each.timeline for each in current))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(APPLY_MESSAGE_SECONDS):
                await self._applier.apply_or_defer(current)

    async def _listen_to_redis(self) -> AsyncGenerator[None, None]:
        if self._catalog_redis is None or self._publisher is None:
            return
        channel = self._publisher.channel
        async with contextlib.aclosing(self._catalog_redis.listen(channel)) as messages:
            async for message in messages:
                if message is None:
                    self._wake.set()
                    yield
                    continue
                content = self._signer.verify(channel, message)
                if content is None:
                    continue  # forged, or signed with a pepper that this process lacks: the outbox has the changes
                try:
                    announcements = msgspec.msgpack.decode(content, type=list[Announcement])
                except msgspec.MsgspecError:
                    log_event(
                        _log,
                        logging.WARNING,
                        "catalog.message_unreadable",
                        "could not decode a message of another release, reading the outbox instead",
                        channel=channel,
                    )
                    continue
                await self._apply_message(announcements)
                # A message may have only a part of a revision, so only reading the outbox advances the head.
                self._wake.set()

    async def _listen_to_postgres(self) -> AsyncGenerator[None, None]:
        async with contextlib.aclosing(self._database.notifications(NOTIFY_CHANNEL)) as notifications:
            async for _ in notifications:
                self._wake.set()
                yield

    def _redis_subscribed(self) -> None:
        """Check for missed messages. Redis may also have been replaced or restored."""
        self._reader.request_redis_head_check()
        if not self._is_database_ok:
            self.cache.revalidate_all()
        if self._full_sync is not None:
            self._full_sync.request()
            self._wake.set()

    async def _follow_outbox(self) -> None:
        while True:
            try:
                await self._background.run_to_completion(self._read_outbox())
            except CatalogError as error:
                self._database_failed(error)
                head = await self._reader.read_redis_head()
                if head is not None:  # another process may have detected a restored database
                    self._reader.note_timeline(head.timeline)
            except StoreError as error:
                self._note_redis_status(error)
            except Exception:  # noqa: BLE001 - later changes must be applied all the same
                log_event(
                    _log, logging.ERROR, "catalog.outbox_failed", "could not read the outbox, will retry", exc_info=True
                )
            pause = POLL_WHILE_NOTIFIED_SECONDS if self._listeners["postgres"].is_active else POLL_SECONDS
            if self._full_sync is not None and self._full_sync.is_pending:
                pause = POLL_SECONDS
            await asyncio.sleep(MIN_PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()

    async def _read_outbox(self) -> None:
        await self.catch_up()
        self.cache.confirm_up_to_date()
        self._database_recovered()
        await self._reader.write_redis_head()
        if self._full_sync is not None and self._full_sync.is_due and self._full_sync_task is None:
            # It may take long, so the outbox is read meanwhile.
            self._full_sync_task = self._background.start_work(self._run_full_sync(self._full_sync))

    def _wake_reader(self) -> None:
        self._wake.set()

    def _wake_relay(self) -> None:
        if self._relay is not None:
            self._relay.wake()

    def _loaded_restored_database(self) -> None:
        if self._catalog_redis is not None and self._full_sync is not None:
            self._full_sync.request_after_restore()  # the process that began this timeline may have been killed

    def _restore_detected(self) -> None:
        if self._override_sync is not None:
            self._override_sync.reset()
        if self._full_sync is not None:
            self._full_sync.request_after_restore()
        if self._relay is not None:
            self._relay.reset()

    # --- Periodic tasks ---------------------------------------------------------------------------------------------

    async def write_last_used(self) -> None:
        """Write when keys were last used, all of them in one statement."""
        last_used = self.cache.callers.take_last_used()
        if not last_used:
            return
        try:
            async with self._database.writing() as connection:
                await writes.record_key_use(connection, {key: to_datetime(at_us) for key, at_us in last_used.items()})
        except CatalogError:
            self.cache.callers.restore_last_used(last_used)
            raise

    async def _request_full_sync(self) -> None:
        """Compare overrides after the next read of the outbox, which also shows that the database answers."""
        if self._full_sync is not None:
            self._full_sync.request()
            self._wake.set()

    async def _run_full_sync(self, full_sync: FullOverrideSync) -> None:
        try:
            await full_sync.run()
            if not full_sync.is_pending:
                self._note_redis_status(None)
        except StoreError as error:
            self._note_redis_status(error)
        except CatalogError as error:
            self._database_failed(error)
        except Exception:  # noqa: BLE001 - it is retried
            log_event(
                _log,
                logging.ERROR,
                "overrides.sync_failed",
                "could not compare overrides with the store, will retry",
                exc_info=True,
            )
        finally:
            self._full_sync_task = None

    async def _clean_up(self) -> None:
        async with self._database.writing() as connection:
            await writes.remove_expired(connection, to_datetime(self._clock.now_us()))

    # --- Outages ----------------------------------------------------------------------------------------------------

    def _database_failed(self, error: CatalogError) -> None:
        if self._is_database_ok:
            self._is_database_ok, self._since_us = False, self._clock.now_us()
            log_event(
                _log,
                logging.WARNING,
                "catalog.database_unreachable",
                "could not read the database, using copies and cached configuration",
                error=error,
            )
        self._reader.request_redis_head_check()  # another database, or a restored one, may come back
        self.cache.mark_unreachable()

    def _database_recovered(self) -> None:
        self.cache.mark_reachable()
        if not self._is_database_ok:
            self._is_database_ok, self._since_us = True, self._clock.now_us()
            log_event(_log, logging.WARNING, "catalog.database_reachable", "the database is reachable again")

    def _note_redis_status(self, error: StoreError | None) -> None:
        if (error is not None) is self._is_redis_unreachable:
            return
        self._is_redis_unreachable = error is not None
        if error is None:
            log_event(_log, logging.WARNING, "catalog.redis_reachable", "Redis is reachable again")
        else:
            log_event(
                _log,
                logging.WARNING,
                "catalog.redis_unreachable",
                "Redis is unreachable, pending writes will be retried",
                error=error,
            )
