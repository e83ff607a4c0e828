"""Find overrides that the store has lost, and set them again.

A Redis that evicts keys, is flushed, or fails over to an empty replica loses overrides without a message. One process
at a time reads the overrides of the catalog page by page, and asks the store which of them are missing. A small catalog
fits into one page, so a lost override is back within about a second. Passes over larger catalogs speed up while Redis
evicts keys or overrides are missing.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from uuid import uuid4

import msgspec

from limitforge.catalog.live.overrides.eviction_watch import EvictionWatch
from limitforge.catalog.live.overrides.override_sync import EXPIRY_TOLERANCE_SECONDS, OverrideStore, OverrideSync
from limitforge.catalog.live.shared_redis import SharedRedis
from limitforge.catalog.live.sources import OverrideSource
from limitforge.catalog.model import Override, to_datetime
from limitforge.catalog.override_rows import OverrideRow
from limitforge.core.clock import Clock
from limitforge.errors import CatalogError, StoreError
from limitforge.observability.events import log_event

OVERRIDES_PER_STEP = 1_000  # overrides in one step
TARGETS_PER_CALL = 100  # overrides in one call to the store
PAUSE_SECONDS = 1.0  # between two steps
FAST_PAUSE_SECONDS = 0.1  # the shortest pause while overrides are missing
FAST_PASS_SECONDS = 2.0  # the sum of the pauses of a pass while overrides are missing
LOCK_SECONDS = 5.0  # until another process takes over from one that was killed
PENDING_SECONDS = 10.0  # how long an unpublished change is left to the process that publishes it
REFUSED_SECONDS = 60.0  # until an override that its plan does not allow is tried again
MAX_REFUSED = 10_000
LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)


class ReconcilerStatus(msgspec.Struct, frozen=True):
    """`restored` counts the overrides that this process has set again, `passes` its passes over all overrides.

    `evicting` has the servers that may evict overrides when they are full, each with its `maxmemory-policy`.
    """

    restored: int = 0
    passes: int = 0
    evicting: dict[str, str] = {}


class OverrideReconciler:
    """Restores lost overrides. Call `step` repeatedly, with `pause_seconds` in between.

    Without `catalog_redis`, each process reconciles on its own.
    """

    def __init__(
        self,
        source: OverrideSource,
        store: OverrideStore,
        override_sync: OverrideSync,
        clock: Clock,
        *,
        catalog_redis: SharedRedis | None = None,
        prefix: str = "lf",
        on_overrides_restored: Callable[[int], None] | None = None,
        on_redis_memory_limit: Callable[[int], None] | None = None,
    ) -> None:
        """`on_overrides_restored` is called with the number of overrides that were set.

        `on_redis_memory_limit` is an argument of `EvictionWatch`.
        """
        self._source = source
        self._store = store
        self._override_sync = override_sync
        self._clock = clock
        self._catalog_redis = catalog_redis
        self._lock = f"{prefix}:{{%sweep}}:"  # a fixed name, so that two releases exclude each other
        self._owner = uuid4().hex.encode()
        self._eviction_watch = EvictionWatch(catalog_redis, on_redis_memory_limit)
        self._restore_log = RestoreLog(on_overrides_restored)
        self._after: OverrideRow | None = None
        self._pages = 0  # of this pass
        self._previous_pages = 1  # of the pass before
        self._found_losses = False  # True if anything was missing or evicted in this pass
        self._is_hurrying = False
        self._has_evicted = False
        self._step_seconds = 0.0
        self._lanes: dict[str, object] = {}
        self._refused: set[tuple[str, int]] = set()
        self._refused_at = 0.0
        self._error: Exception | None = None
        self._passes = 0

    def status(self) -> ReconcilerStatus:
        return ReconcilerStatus(self._restore_log.restored, self._passes, self._eviction_watch.evicting_servers())

    def pause_seconds(self) -> float:
        """Return the pause before the next step: at least as long as the last step took."""
        pause = PAUSE_SECONDS
        if self._is_hurrying:
            pages = max(self._pages, self._previous_pages)
            pause = min(max(FAST_PASS_SECONDS / pages, FAST_PAUSE_SECONDS), PAUSE_SECONDS)
        return max(pause, self._step_seconds)

    async def step(self) -> None:
        """Compare the next page, if this process is the leader. The next pass retries what could not be reached."""
        started, was_failing = time.monotonic(), self._error is not None
        self._error = None
        try:
            is_leader = self._catalog_redis is None or await self._catalog_redis.acquire_lock(
                self._lock, self._owner, LOCK_SECONDS
            )
            if await self._eviction_watch.poll(is_leader=is_leader):
                self._has_evicted = self._restore_log.has_evicted = True
            if is_leader:
                await self._compare_page()
        except CatalogError as error:
            self._error = error
            await self._release_leadership()
        except StoreError as error:
            self._error = error
        finally:
            self._step_seconds = time.monotonic() - started
            self._restore_log.log()
            if self._error is not None and not was_failing:
                log_event(
                    _log,
                    logging.WARNING,
                    "overrides.reconcile_failed",
                    "could not compare overrides with the store, will retry",
                    error=self._error,
                )
            elif was_failing and self._error is None:
                log_event(
                    _log, logging.WARNING, "overrides.reconcile_recovered", "comparing overrides with the store again"
                )

    async def _release_leadership(self) -> None:
        """Let another process lead: this one can't read the catalog."""
        if self._catalog_redis is not None:
            with contextlib.suppress(StoreError):
                await self._catalog_redis.release_lock(self._lock, self._owner)

    async def _compare_page(self) -> None:
        expires_after = to_datetime(self._clock.now_us()) + timedelta(seconds=EXPIRY_TOLERANCE_SECONDS)
        rows = await self._source.override_rows(self._after, expires_after, OVERRIDES_PER_STEP)
        self._pages += 1
        self._after = rows[-1] if len(rows) == OVERRIDES_PER_STEP else None
        await self._load_lanes(rows)
        is_losing = await self._restore(await self._find_missing(rows))
        if is_losing or self._has_evicted:
            self._found_losses = self._is_hurrying = True
            self._has_evicted = False
        if self._after is None:
            self._is_hurrying, self._found_losses = self._found_losses, False
            self._previous_pages, self._pages = self._pages, 0
            self._passes += 1

    async def _load_lanes(self, rows: Sequence[OverrideRow]) -> None:
        """Load tenants whose number of lanes has changed, since the limiter then uses other keys."""
        for row in rows:
            if row.lanes != self._lanes.get(row.tenant_id, 1):
                await self._override_sync.load_tenant(row.tenant_id)
                self._lanes[row.tenant_id] = row.lanes

    async def _find_missing(self, rows: Sequence[OverrideRow]) -> list[OverrideRow]:
        chunks = [rows[start : start + TARGETS_PER_CALL] for start in range(0, len(rows), TARGETS_PER_CALL)]
        found = await asyncio.gather(*(self._find_missing_in(chunk) for chunk in chunks))
        return [row for missing in found for row in missing]

    async def _find_missing_in(self, rows: Sequence[OverrideRow]) -> list[OverrideRow]:
        """Ask the store. If a server fails, split the call: overrides on other servers can still be restored."""
        try:
            targets = [(row.tenant_id, row.resource, row.subject) for row in rows]
            return [rows[index] for index in await self._store.missing_overrides(targets)]
        except StoreError as error:
            if len(rows) == 1:
                self._error = error
                return []
        half = len(rows) // 2
        return [*await self._find_missing_in(rows[:half]), *await self._find_missing_in(rows[half:])]

    async def _restore(self, missing: Sequence[OverrideRow]) -> bool:
        """Set missing overrides again. Return False if none of them was lost.

        Two kinds of overrides are missing but not lost: those that their plans no longer allow, and those of tenants
        with an unpublished change. The process that publishes the change will set the latter.
        """
        now = time.monotonic()
        if now - self._refused_at > REFUSED_SECONDS or len(self._refused) > MAX_REFUSED:
            self._refused, self._refused_at = set(), now
        rows = [row for row in missing if (row.id, row.version) not in self._refused]
        if not rows:
            return False
        since = to_datetime(self._clock.now_us()) - timedelta(seconds=PENDING_SECONDS)
        pending = await self._source.tenants_with_unpublished_changes({row.tenant_id for row in rows}, since)
        restored, refused = await self._override_sync.restore([row.id for row in rows if row.tenant_id not in pending])
        self._refused.update((each.id, each.version) for each in refused)
        self._restore_log.add(restored)
        return bool(restored)


class RestoreLog:
    """Counts restored overrides, and logs one line for all tenants at most once in `LOG_SECONDS`."""

    def __init__(self, on_overrides_restored: Callable[[int], None] | None) -> None:
        self.restored = 0
        self.has_evicted = False
        """True if a server has evicted keys since the last line."""
        self._on_overrides_restored = on_overrides_restored
        self._unlogged: dict[str, int] = {}  # by tenant
        self._logged_at: float | None = None

    def add(self, restored: Sequence[Override]) -> None:
        if not restored:
            return
        self.restored += len(restored)
        if self._on_overrides_restored is not None:
            self._on_overrides_restored(len(restored))
        for override in restored:
            self._unlogged[override.tenant_id] = self._unlogged.get(override.tenant_id, 0) + 1

    def log(self) -> None:
        now = time.monotonic()
        if not self._unlogged or (self._logged_at is not None and now - self._logged_at < LOG_SECONDS):
            return
        log_event(
            _log,
            logging.WARNING,
            "overrides.restored",
            "the store had lost overrides, they are set again",
            count=sum(self._unlogged.values()),
            tenants=len(self._unlogged),
            tenant=max(self._unlogged, key=self._unlogged.__getitem__),
            reason="evicted" if self.has_evicted else "missing",
        )
        self._unlogged, self._logged_at, self.has_evicted = {}, now, False
