"""The catalog on one node: what it remembers, and how it hears of changes made elsewhere.

The outbox in the database is the truth about changes. Messages (Redis, Postgres) only make a node look sooner, so none
of them has to arrive: a node that missed some reads on from the revision that it had reached. At each look it also sees
whether the database still has that revision: one that was restored does not, and then everything is read anew.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Self

import msgspec

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import catalog_revision, outbox, writes
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.outbox import NOTIFY_CHANNEL, Announcement
from limitforge.catalog.history import RevisionHistory, Stamp
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.cache.entries import CacheStatus
from limitforge.catalog.live.full_override_sync import FullOverrideSync
from limitforge.catalog.live.outbox_relay import OutboxRelay, sync_changed_overrides
from limitforge.catalog.live.override_reconciler import OverrideReconciler, ReconcilerStatus
from limitforge.catalog.live.override_sync import OverrideSink, OverrideSync
from limitforge.catalog.live.shared_backend import SharedBackend
from limitforge.catalog.live.shared_copies import SharedCopies
from limitforge.catalog.live.signing import Signer
from limitforge.catalog.live.sources import DatabaseSource
from limitforge.catalog.model import OPERATOR, Tenant, to_datetime
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import CatalogError, CatalogUnavailable, LimitforgeError, StoreError

POLL_SECONDS = 0.5
POLL_WHEN_TOLD_SECONDS = 5.0  # while Postgres itself tells of changes
USED_SECONDS = 10.0
MIRROR_SECONDS = 60.0
TIDY_SECONDS = 3_600.0
SHORTEST_PAUSE_SECONDS = 0.05  # between two looks at the outbox: one look does for many commits of an apply
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
BATCH = 100  # revisions that are read at once
SLICE = 100  # tenants that are acted on at once: a revocation may have to wait for them
FEW = 10  # tenants that one person changes in one go: more are an apply
RECENT = 2_000  # rows of the outbox that a node looks at when it starts: copies of older revisions are not taken
HEAD_AGAIN_SECONDS = 60.0  # how often the place that history has reached is written to Redis again
CANCEL_SECONDS = 1.0
MESSAGE_SECONDS = 1.0  # what a message may wait for; what it began goes on

_log = logging.getLogger(__name__)


class LiveCatalogStatus(msgspec.Struct, frozen=True):
    """`database` is ok or degraded, since `since` (epoch seconds); `listening` names what tells of changes at once."""

    database: str
    since: float
    listening: tuple[str, ...]
    revision: int
    cache: CacheStatus
    overrides: ReconcilerStatus = ReconcilerStatus()


class LiveCatalog:
    """A catalog with its memory, kept up to date until it is closed.

    `shared` is what nodes share (a Redis); `sink` is where overrides act: in that same Redis, or in this process alone;
    `placed` hears of each tenant that is read, before anything of it is decided. `on_restored` is called with the
    number of overrides that the store had lost, each time some are set again.
    """

    def __init__(
        self,
        database: Database,
        peppers: Peppers,
        *,
        shared: SharedBackend | None = None,
        sink: OverrideSink | None = None,
        on_tenant_loaded: Callable[[Tenant], None] | None = None,
        key_prefix: str = "lf",
        clock: Clock | None = None,
        on_restored: Callable[[int], None] | None = None,
        on_memory: Callable[[int], None] | None = None,
        **bounds: Any,
    ) -> None:
        self._clock = clock or SystemClock()
        self._database = database
        self._source = DatabaseSource(database)
        self._shared = shared
        self._signer = Signer(peppers)
        self._copies = None if shared is None else SharedCopies(shared, key_prefix, self._signer)
        self._override_sync = None if sink is None else OverrideSync(self._source, sink, self._clock, on_tenant_loaded)
        self._history = RevisionHistory()
        self._reconciler: OverrideReconciler | None = None
        if sink is not None and shared is not None and self._override_sync is not None:
            self._reconciler = OverrideReconciler(
                self._source,
                sink,
                self._override_sync,
                self._clock,
                shared=shared,
                prefix=key_prefix,
                on_restored=on_restored,
                on_memory=on_memory,
            )
        self._relay: OutboxRelay | None = None
        if shared is not None and self._copies is not None:
            self._relay = OutboxRelay(
                database,
                shared,
                self._copies,
                self._signer,
                self._override_sync,
                key_prefix=key_prefix,
                clock=self._clock,
                history=self._history,
                catch_up=self.catch_up,
                on_redis_status=self._store_is,
            )
        self.cache = CatalogCache(
            self._source,
            peppers,
            copies=self._copies,
            history=self._history,
            on_tenant_loaded=on_tenant_loaded,
            clock=self._clock,
            **bounds,
        )
        self.catalog = Catalog(database, peppers=peppers, clock=self._clock, on_commit=self._wrote)
        self._following = asyncio.Lock()
        self._head_put_us = 0
        self._newest_heard: Stamp | None = None
        self._is_shared_doubtful = True  # whether Redis may hold what the database has lost
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._work: set[asyncio.Task[None]] = set()
        self._listening: set[str] = set()
        self._is_ok = True
        self._since_us = self._clock.now_us()
        self._deferred: dict[str, Announcement] = {}  # by tenant: what is acted on in slices, beside reading the outbox
        self._has_later = asyncio.Event()
        self._full_sync: FullOverrideSync | None = None
        if self._override_sync is not None and sink is not None:
            self._full_sync = FullOverrideSync(
                database, self._override_sync, sink, self._history, shared=shared, prefix=key_prefix
            )
        self._repairing: asyncio.Task[None] | None = None
        self._is_store_away = False

    async def start(self) -> None:
        """Ready once the schema is. A database that is away is no reason not to start where nodes share copies."""
        if self._tasks:
            return
        self.cache.open()
        try:
            await self._database.ensure_schema()
            await self.catch_up()  # one that is started again reads on from where it was
            if self._relay is not None:
                self._relay.wake()
            if self._override_sync is not None and self._shared is None:
                await self._override_sync.sync_all()
        except CatalogUnavailable as error:
            if self._shared is None:
                raise
            self._failed(error)
        self._run_all()

    def _run_all(self) -> None:
        """Begin all work that goes on until the node is closed."""
        self._run(self._watch())
        self._run(self._act_later())
        if self._relay is not None:
            self._run(self._relay.run(self._unbroken))
        self._run(self._every(lambda: USED_SECONDS, self.write_last_used))
        self._run(self._every(lambda: TIDY_SECONDS, self._tidy))
        if self._override_sync is not None:
            self._run(self._every(lambda: MIRROR_SECONDS, self._compare_soon))
        if self._reconciler is not None:
            self._run(self._every(self._reconciler.pause_seconds, self._reconciler.step))
        if self._shared is not None:
            self._run(self._listen("redis", self._redis_messages))
        if not self._database.is_sqlite:
            self._run(self._listen("postgres", self._postgres_notices))

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        while tasks:
            for task in tasks:
                task.cancel()  # again, if need be: a library may swallow one that comes at a bad moment
            tasks = list((await asyncio.wait(tasks, timeout=CANCEL_SECONDS))[1])
        if self._work:
            await asyncio.wait(self._work, timeout=CANCEL_SECONDS)
        while self._work:
            for task in list(self._work):
                task.cancel()
            await asyncio.wait(self._work, timeout=CANCEL_SECONDS)
        with contextlib.suppress(CatalogError):
            await self.write_last_used()
        await self.cache.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def status(self) -> LiveCatalogStatus:
        """How it is doing, without asking anybody."""
        cache = self.cache.status()
        is_ok = self._is_ok and cache.stale_since is None
        since = self._since_us / US_PER_SECOND
        return LiveCatalogStatus(
            "ok" if is_ok else "degraded",
            cache.stale_since if self._is_ok and cache.stale_since is not None else since,
            tuple(sorted(self._listening)),
            0 if self._history.head is None else self._history.head.revision,
            cache,
            ReconcilerStatus() if self._reconciler is None else self._reconciler.status(),
        )

    async def write_last_used(self) -> None:
        """When keys were last used, for all of them in one go."""
        used = self.cache.callers.take_last_used()
        if not used:
            return
        try:
            async with self._database.writing() as connection:
                await writes.touch_keys(connection, {key: to_datetime(at_us) for key, at_us in used.items()})
        except CatalogError:
            self.cache.callers.restore_last_used(used)
            raise

    # --- Own changes -------------------------------------------------------------------------------------------------

    async def _wrote(self, announcements: Sequence[Announcement]) -> None:
        """Act on a change of this node's own before its caller hears of it. It is committed: nothing here undoes it."""
        first = announcements[0]
        if self._history.head is None:  # it was not started: its own first change is where it begins
            self._history.reset(Stamp(first.timeline, first.revision - 1, first.previous_id))
        try:
            await self._act(announcements)
            is_known = self._advance(announcements) or self._history.contains(first.stamp)
            if not is_known:
                await self.catch_up()  # others have written too, or the database was restored
            if self._relay is not None:
                await self._relay.publish(announcements)
        except StoreError as error:
            self._store_is(error)
            if self._relay is not None:
                self._relay.wake()
        except CatalogError as error:
            if self._relay is not None:
                self._relay.wake()
            _log.warning("a change is committed and not yet published, will retry: %s", error)

    # --- Changes made elsewhere --------------------------------------------------------------------------------------

    async def _act(self, announcements: Sequence[Announcement]) -> None:
        await self.cache.apply_changes(announcements)
        if self._shared is None and self._override_sync is not None:
            await sync_changed_overrides(self._override_sync, self._database, announcements)

    async def _act_on_rows(self, rows: Sequence[Announcement]) -> None:
        """Act on some rows. On revocations, the operator's and changes of few tenants at once; on those of many, as an
        apply makes them, in slices beside reading the outbox.
        """
        sizes = Counter(row.revision for row in rows)
        at_once: list[Announcement] = []
        later: list[Announcement] = []
        for row in rows:
            is_of_few = sizes[row.revision] <= FEW and len(at_once) < SLICE
            is_urgent = row.revokes or row.tenant_id == OPERATOR or is_of_few
            (at_once if is_urgent else later).append(row)
        await self._act(at_once)
        if later:
            await self.cache.apply_changes([msgspec.structs.replace(row, config=False) for row in later])
            self._add_later(later)

    def _add_later(self, rows: Sequence[Announcement]) -> None:
        for row in rows:
            if row.config or row.overrides:
                known = self._deferred.pop(row.tenant_id, row)
                newest = max(known, row, key=lambda each: each.stamp)  # messages may come late
                self._deferred[row.tenant_id] = msgspec.structs.replace(
                    newest,
                    config=known.config or row.config,
                    overrides=known.overrides or row.overrides,
                    keys=(),
                    gone=(),
                )
        self._has_later.set()

    async def _act_later(self) -> None:
        while True:
            await self._has_later.wait()
            slice_ = [self._deferred.pop(tenant_id) for tenant_id in list(self._deferred)[:SLICE]]
            if not self._deferred:
                self._has_later.clear()
            try:
                await self._unbroken(self._act(slice_))
            except (CatalogError, StoreError) as error:
                _log.warning("could not apply a configuration change, keeping the previous one: %s", error)
            except Exception:  # noqa: BLE001 - later changes must be acted on all the same
                _log.exception("could not apply a configuration change, keeping the previous one")

    async def _watch(self) -> None:
        """Read the outbox, again and again."""
        while True:
            try:
                await self._unbroken(self._look())
            except CatalogError as error:
                self._failed(error)
                await self._look_at_shared()
            except StoreError as error:
                self._store_is(error)
            except Exception:  # noqa: BLE001 - whatever it is: go on, or nobody hears of changes any more
                _log.exception("something is wrong with how changes are heard of")
            pause = POLL_WHEN_TOLD_SECONDS if "postgres" in self._listening else POLL_SECONDS
            if self._full_sync is not None and self._full_sync.is_pending:
                pause = POLL_SECONDS
            await asyncio.sleep(SHORTEST_PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()

    async def _look(self) -> None:
        await self.catch_up()
        self.cache.confirm_up_to_date()
        self._recovered()
        await self._put_head()
        if self._full_sync is not None and self._full_sync.is_due and self._repairing is None:
            self._repairing = asyncio.get_running_loop().create_task(self._repair_overrides(self._full_sync))
            self._work.add(self._repairing)
            self._repairing.add_done_callback(self._ended)

    async def _unbroken(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that goes on to its end when the node is closed: a driver that is cut off in the middle of a statement
        may leave a thread behind.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """What went wrong is told to who waits; where nobody does any more, it does not matter."""
        self._work.discard(task)
        if not task.cancelled():
            task.exception()

    async def catch_up(self) -> None:
        """Act on all that was written since this node last looked, and notice a database that was restored."""
        async with self._following:
            is_doubtful, self._is_shared_doubtful = self._is_shared_doubtful, False
            heard = self._newest_heard  # the database had it, since a message comes after its commit
            try:
                shared = await self._shared_head() if is_doubtful else None
                if self._history.head is None:
                    await self._begin()
                while not await self._follow():
                    pass
                for lost in (shared, heard):
                    if lost is not None and self._history.has_lost(lost):
                        await self._restored(lost)
                        break
            except BaseException as error:
                self._is_shared_doubtful |= is_doubtful
                if isinstance(error, CatalogError):
                    self._failed(error)
                raise

    async def _begin(self) -> None:
        """Start from what the database has now. What was not published yet is looked at as if it came later: copies
        may be older than that. What this node took from copies before was never compared with the database.
        """
        async with self._database.reading() as connection:
            head = await catalog_revision.read_last_stamp(connection)
            recent = await outbox.recent_stamps(connection, RECENT)
            owed = [] if self._shared is None else await outbox.unpublished_announcements(connection, 1)
        self._history.reset(head, recent)
        if owed:
            first = owed[0].announcement
            self._history.rewind(first.revision - 1, first.previous_id)
        if head.timeline and self._shared is not None and self._full_sync is not None:
            self._full_sync.request_after_restore()  # the node that began this timeline may not have come to an end
        self.cache.clear()

    async def _follow(self) -> bool:
        """Act on the next batch of changes; True at the end of them. The chain of ids tells a database that goes on
        from one that was restored, also if that has meanwhile come further than this node.
        """
        seen = self._history.head
        if seen is None:
            return True
        async with self._database.reading() as connection:
            head = await catalog_revision.read_last_stamp(connection)
            rows = [] if head == seen else await outbox.announcements_after(connection, seen.revision, BATCH)
        if head == seen:
            return True
        is_gap = not rows or rows[0].revision != seen.revision + 1
        is_other = not is_gap and rows[0].previous_id != seen.change_id
        if is_gap and self._history.head != seen:
            return False  # this node has moved on by a message or a change of its own: look again from there
        if head.timeline != seen.timeline or head.revision <= seen.revision or is_other:
            await self._restored(seen)
            return True
        if is_gap:
            _log.warning("this node missed more than is kept: everything that it remembers is read again")
            await self._begin()
            return True
        await self._put_head(head)
        await self._act_on_rows(rows)
        for row in rows:  # rows of earlier timelines, or of a release without ids, are of this history too
            is_last = row.revision == head.revision
            self._history.advance(head if is_last else msgspec.structs.replace(row.stamp, timeline=seen.timeline))
        if self._relay is not None:
            self._relay.wake()
        return rows[-1].revision >= head.revision

    async def _restored(self, lost: Stamp) -> None:
        """The database no longer has a revision that it had: discard everything, here and, by a new timeline, in Redis
        and on every node.
        """
        _log.warning(
            "catalog.restored revision=%d change_id=%d: the database no longer has this change; everything that was "
            "remembered of it is read again",
            lost.revision,
            lost.change_id,
        )
        self._history.reject_timeline(lost.timeline)
        self.cache.clear()  # also if the rest of this fails, and has to be tried again
        self._deferred.clear()  # changes of the lost history
        self._newest_heard = None
        if self._override_sync is not None:
            self._override_sync.reset()
        if self._full_sync is not None:
            self._full_sync.request_after_restore()
        if self._relay is not None:
            self._relay.reset()
        await self.catalog.begin_timeline(lost.timeline)
        await self._begin()
        await self._put_head(self._history.head)

    def _advance(self, announcements: Sequence[Announcement]) -> bool:
        """Move on by one revision; False if it is not the next one of the history that this node follows."""
        if not announcements or not self._history.is_next(announcements[0].stamp, announcements[0].previous_id):
            return False
        self._history.advance(announcements[0].stamp)
        return True

    # --- What Redis knows of history ---------------------------------------------------------------------------------

    async def _shared_head(self) -> Stamp | None:
        """How far nodes have seen the history of the database; None if that is not known."""
        try:
            return None if self._copies is None else await self._copies.head()
        except StoreError:
            return None

    async def _put_head(self, head: Stamp | None = None) -> None:
        """Tell the others how far history is: at once where it has moved on, otherwise once a minute."""
        now_us = self._clock.now_us()
        stamp = head or self._history.head
        is_due = head is not None or now_us >= self._head_put_us + HEAD_AGAIN_SECONDS * US_PER_SECOND
        if self._copies is None or stamp is None or not is_due:
            return
        await self._copies.refresh_head(stamp)
        self._head_put_us = now_us

    async def _look_at_shared(self) -> None:
        """While the database is away: see whether other nodes have found that it was restored."""
        head = await self._shared_head()
        if head is not None:
            self._heard_of_timeline(head.timeline)

    def _heard_of_timeline(self, timeline: int) -> None:
        if timeline > self._history.newest_timeline:
            self._history.newest_timeline = timeline
            self.cache.revalidate_all()

    # --- Owed --------------------------------------------------------------------------------------------------------

    async def _repair_overrides(self, repair: FullOverrideSync) -> None:
        """Compare overrides beside reading the outbox, since it may take long."""
        try:
            await repair.run()
            if not repair.is_pending:
                self._store_is(None)
        except StoreError as error:
            self._store_is(error)
        except CatalogError as error:
            self._failed(error)
        except Exception:  # noqa: BLE001 - it is tried again
            _log.exception("could not compare overrides with the store, will retry")
        finally:
            self._repairing = None

    async def _redis_messages(self) -> AsyncGenerator[None, None]:
        if self._shared is None or self._relay is None:
            return
        async with contextlib.aclosing(self._shared.listen(self._relay.channel)) as messages:
            async for message in messages:
                if message is None:
                    self._wake.set()
                    yield
                    continue
                content = self._signer.verify(self._relay.channel, message)
                if content is None:  # forged, or sealed with a pepper that this node lacks: the outbox has the changes
                    continue
                try:
                    announcements = msgspec.msgpack.decode(content, type=list[Announcement])
                except msgspec.MsgspecError:
                    _log.warning("a message on %s is of another release", self._relay.channel)
                    continue
                await self._heard(announcements)
                self._wake.set()  # a message may hold a part of a revision: only the outbox says how far this is

    async def _heard(self, announcements: Sequence[Announcement]) -> None:
        """Act on a message. One of a lost timeline is not: the database has nothing of what it says. The next message
        does not wait for a database that does not answer.
        """
        current = [each for each in announcements if not self._history.contradicts(each.stamp)]
        if not current:
            return
        self._heard_of_timeline(max(each.timeline for each in current))
        self._newest_heard = max(self._newest_heard or Stamp(), *(each.stamp for each in current))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MESSAGE_SECONDS):
                await self._act_on_rows(current)

    async def _postgres_notices(self) -> AsyncGenerator[None, None]:
        async with contextlib.aclosing(self._database.notifications(NOTIFY_CHANNEL)) as notices:
            async for _ in notices:
                self._wake.set()
                yield

    async def _listen(self, name: str, messages: Callable[[], AsyncGenerator[None, None]]) -> None:
        """For as long as the node lives; yields of `messages` tell that somebody listens."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                async with contextlib.aclosing(messages()) as heard:
                    async for _ in heard:
                        if name not in self._listening:
                            self._listening.add(name)
                            pause = FIRST_PAUSE_SECONDS
                            self._subscribed(name)
                        if name == "redis":
                            await self._compare_soon()
            except LimitforgeError as error:
                if pause == FIRST_PAUSE_SECONDS:
                    _log.warning("can't hear of changes by %s, and look for them instead: %s", name, error)
            except Exception:  # noqa: BLE001 - whatever it is: go on, or nobody listens any more
                _log.exception("something is wrong with how changes are heard of by %s", name)
            self._listening.discard(name)
            self._wake.set()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _subscribed(self, name: str) -> None:
        """Messages may have been missed, and this may be another Redis, or an older state of it."""
        if name == "redis":
            self._is_shared_doubtful = True
            if not self._is_ok:
                self.cache.revalidate_all()

    # --- From time to time -------------------------------------------------------------------------------------------

    async def _compare_soon(self) -> None:
        """Have overrides compared, by who reads the outbox: without a database there is nothing to compare."""
        if self._full_sync is not None:
            self._full_sync.request()
            self._wake.set()

    async def _tidy(self) -> None:
        async with self._database.writing() as connection:
            await writes.remove_expired(connection, to_datetime(self._clock.now_us()))

    async def _every(self, pause: Callable[[], float], work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(pause())
            try:
                await self._unbroken(work())
            except (CatalogError, StoreError) as error:
                _log.warning("%s failed, and will be tried again: %s", work.__name__.strip("_"), error)
            except Exception:  # noqa: BLE001 - whatever it is: it must not end here for good
                _log.exception("%s broke, and will be tried again", work.__name__.strip("_"))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    def _failed(self, error: CatalogError) -> None:
        if self._is_ok:
            self._is_ok, self._since_us = False, self._clock.now_us()
            _log.warning("the catalog is degraded: %s", error)
        self._is_shared_doubtful = True  # it may be another database, or a restored one, that comes back
        self.cache.mark_unreachable()

    def _store_is(self, error: StoreError | None) -> None:
        """Note that Redis is away, or back."""
        if (error is not None) is not self._is_store_away:
            self._is_store_away = error is not None
            if error is None:
                _log.warning("Redis is reachable again")
            else:
                _log.warning("Redis is unreachable; pending writes will be retried: %s", error)

    def _recovered(self) -> None:
        self.cache.mark_reachable()
        if not self._is_ok:
            self._is_ok, self._since_us = True, self._clock.now_us()
            _log.warning("the catalog is well again")
