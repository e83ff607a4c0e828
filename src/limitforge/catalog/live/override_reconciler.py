"""Find overrides of the catalog that the store has lost, and set them again.

A Redis that evicts keys, is flushed or fails over to an empty replica loses overrides without a message. One node at a
time goes through the overrides of the catalog, a page at a time, and asks the store which of them are gone. A pass over
a small catalog takes one page, so a lost override is back within about a second. Larger ones go faster while Redis
evicts keys, or while anything is found missing.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from uuid import uuid4

import msgspec

from limitforge.catalog.database.override_queries import OverrideRow
from limitforge.catalog.live.override_sync import EXPIRY_TOLERANCE_SECONDS, OverrideSink, OverrideSync
from limitforge.catalog.live.shared_backend import MemoryUsage, SharedBackend
from limitforge.catalog.live.sources import OverrideSource
from limitforge.catalog.model import Override, to_datetime
from limitforge.core.clock import Clock
from limitforge.errors import CatalogError, StoreError

PAGE = 1_000  # overrides that are looked at in one step
CALL = 100  # of them in one call to the store
PAUSE_SECONDS = 1.0  # between two steps
FAST_PAUSE_SECONDS = 0.1  # at least, while overrides get lost
FAST_PASS_SECONDS = 2.0  # what the pauses of a pass come to while overrides get lost
LEAD_SECONDS = 5.0  # how soon another node takes over from one that has died
MEMORY_SECONDS = 60.0  # how often a node that does not lead asks how Redis uses its memory
PENDING_SECONDS = 10.0  # for how long an unpublished change is left to the node that publishes it
REFUSED_SECONDS = 60.0  # how soon an override that can't be in force is tried again
MAX_REFUSED = 10_000
LOG_SECONDS = 10.0
SAFE_POLICY = "noeviction"

_log = logging.getLogger(__name__)


class ReconcilerStatus(msgspec.Struct, frozen=True):
    """`restored` counts the overrides that this process has set again, `passes` how often it looked at all of them.

    `evicting` has the servers that may evict overrides when they are full, each with its `maxmemory-policy`.
    """

    restored: int = 0
    passes: int = 0
    evicting: dict[str, str] = {}


class OverrideReconciler:
    """Call `step` again and again, with `pause_seconds` in between. Without `shared`, each process sweeps by itself."""

    def __init__(
        self,
        source: OverrideSource,
        sink: OverrideSink,
        override_sync: OverrideSync,
        clock: Clock,
        *,
        shared: SharedBackend | None = None,
        prefix: str = "lf",
        on_restored: Callable[[int], None] | None = None,
        on_memory: Callable[[int], None] | None = None,
    ) -> None:
        """`on_memory` is called with the bytes that the smallest server may use, 0 if none has a limit."""
        self._source = source
        self._sink = sink
        self._mirror = override_sync
        self._clock = clock
        self._shared = shared
        self._lease = f"{prefix}:{{%sweep}}:"
        self._name = uuid4().hex.encode()
        self._on_restored = on_restored
        self._on_memory = on_memory
        self._after: OverrideRow | None = None
        self._pages = 0  # of this pass
        self._pages_before = 1  # of the last one
        self._is_losing = False  # whether anything was missing or evicted in this pass
        self._is_fast = False
        self._worked_seconds = 0.0
        self._lanes: dict[str, object] = {}
        self._refused: set[tuple[str, int]] = set()
        self._refused_at = 0.0
        self._memory: Mapping[str, MemoryUsage] = {}
        self._memory_at: float | None = None
        self._has_evicted = False
        self._evicted_since_log = False
        self._unlogged: dict[str, int] = {}
        self._logged_at: float | None = None
        self._is_failing = False
        self._error: Exception | None = None
        self._restored = 0
        self._passes = 0

    def status(self) -> ReconcilerStatus:
        return ReconcilerStatus(self._restored, self._passes, self._evicting())

    def pause_seconds(self) -> float:
        """Return how long to wait before the next step: at least as long as the last one took."""
        pause = PAUSE_SECONDS
        if self._is_fast:
            pages = max(self._pages, self._pages_before)
            pause = min(max(FAST_PASS_SECONDS / pages, FAST_PAUSE_SECONDS), PAUSE_SECONDS)
        return max(pause, self._worked_seconds)

    async def step(self) -> None:
        """Look at the next page, if this node leads. What can't be reached now is looked at again in the next pass."""
        began, was_failing = time.monotonic(), self._is_failing
        self._is_failing = False
        try:
            is_leader = self._shared is None or await self._shared.acquire_lock(self._lease, self._name, LEAD_SECONDS)
            await self._ask_memory(is_leader=is_leader)
            if is_leader:
                await self._look()
        except CatalogError as error:
            self._failed(error)
            await self._step_down()
        except StoreError as error:
            self._failed(error)
        finally:
            self._worked_seconds = time.monotonic() - began
            self._log_restored()
            if self._is_failing and not was_failing:
                _log.warning("overrides.sweep_failed error=%s", self._error)
            elif was_failing and not self._is_failing:
                _log.warning("overrides.sweep_resumed")

    async def _step_down(self) -> None:
        """Let another node lead: this one can't read the catalog."""
        if self._shared is not None:
            with contextlib.suppress(StoreError):
                await self._shared.release_lock(self._lease, self._name)

    # --- One page ----------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        expires_after = to_datetime(self._clock.now_us()) + timedelta(seconds=EXPIRY_TOLERANCE_SECONDS)
        rows = await self._source.override_rows(self._after, expires_after, PAGE)
        self._pages += 1
        self._after = rows[-1] if len(rows) == PAGE else None
        await self._place(rows)
        is_losing = await self._restore(await self._missing(rows))
        if is_losing or self._has_evicted:
            self._is_losing = self._is_fast = True
            self._has_evicted = False
        if self._after is None:
            self._is_fast, self._is_losing = self._is_losing, False
            self._pages_before, self._pages = self._pages, 0
            self._passes += 1

    async def _place(self, rows: Sequence[OverrideRow]) -> None:
        """Learn the lanes of tenants that have several: their keys are elsewhere."""
        for row in rows:
            if row.lanes != self._lanes.get(row.tenant_id, 1):
                await self._mirror.load_tenant(row.tenant_id)
                self._lanes[row.tenant_id] = row.lanes

    async def _missing(self, rows: Sequence[OverrideRow]) -> list[OverrideRow]:
        chunks = [rows[start : start + CALL] for start in range(0, len(rows), CALL)]
        found = await asyncio.gather(*(self._missing_of(chunk) for chunk in chunks))
        return [row for some in found for row in some]

    async def _missing_of(self, rows: Sequence[OverrideRow]) -> list[OverrideRow]:
        """Ask the store. If a server of several is away, ask for halves: those on the others can be restored."""
        try:
            places = [(row.tenant_id, row.resource, row.subject) for row in rows]
            return [rows[at] for at in await self._sink.missing_overrides(places)]
        except StoreError as error:
            if len(rows) == 1:
                self._failed(error)
                return []
        half = len(rows) // 2
        return [*await self._missing_of(rows[:half]), *await self._missing_of(rows[half:])]

    async def _restore(self, missing: Sequence[OverrideRow]) -> bool:
        """Set them again; False if none of them should be there.

        Some can't be in force under their tenant's plans. Those of a tenant with an unpublished change are not lost:
        the node that publishes the change sets them.
        """
        now = time.monotonic()
        if now - self._refused_at > REFUSED_SECONDS or len(self._refused) > MAX_REFUSED:
            self._refused, self._refused_at = set(), now
        rows = [row for row in missing if (row.id, row.version) not in self._refused]
        if not rows:
            return False
        since = to_datetime(self._clock.now_us()) - timedelta(seconds=PENDING_SECONDS)
        pending = await self._source.pending_tenants({row.tenant_id for row in rows}, since)
        restored, refused = await self._mirror.restore([row.id for row in rows if row.tenant_id not in pending])
        self._refused.update((each.id, each.version) for each in refused)
        self._count(restored)
        return bool(restored)

    # --- What is told of it ------------------------------------------------------------------------------------------

    def _count(self, restored: Sequence[Override]) -> None:
        if not restored:
            return
        self._restored += len(restored)
        if self._on_restored is not None:
            self._on_restored(len(restored))
        for override in restored:
            self._unlogged[override.tenant_id] = self._unlogged.get(override.tenant_id, 0) + 1

    def _log_restored(self) -> None:
        """Log one line for all tenants, at most once in `LOG_SECONDS`."""
        now = time.monotonic()
        if not self._unlogged or (self._logged_at is not None and now - self._logged_at < LOG_SECONDS):
            return
        _log.warning(
            "overrides.restored count=%d tenants=%d tenant=%s reason=%s",
            sum(self._unlogged.values()),
            len(self._unlogged),
            max(self._unlogged, key=self._unlogged.__getitem__),
            "evicted" if self._evicted_since_log else "missing",
        )
        self._unlogged, self._logged_at, self._evicted_since_log = {}, now, False

    def _failed(self, error: Exception) -> None:
        self._is_failing, self._error = True, error

    # --- Memory of the servers ---------------------------------------------------------------------------------------

    async def _ask_memory(self, *, is_leader: bool) -> None:
        """Ask each server how many keys it has evicted. Without the right to INFO, a sweep only takes longer."""
        now = time.monotonic()
        if self._shared is None:
            return
        if not is_leader and self._memory_at is not None and now - self._memory_at < MEMORY_SECONDS:
            return
        self._memory_at = now
        try:
            memory = await self._shared.memory()
        except StoreError:
            return
        before, self._memory = self._memory, memory
        if self._on_memory is not None:
            self._on_memory(min((each.limit_bytes for each in memory.values() if each.limit_bytes), default=0))
        for server, is_now in memory.items():
            known = before.get(server)
            if known is not None and known.evicted != is_now.evicted:
                self._has_evicted = self._evicted_since_log = True
            if _evicts(is_now) and (known is None or known.policy != is_now.policy or not _evicts(known)):
                _log.warning(
                    "store.evicts_keys server=%s policy=%s advice=%s",
                    server,
                    is_now.policy,
                    "set maxmemory-policy noeviction, or counters and overrides are dropped when it is full",
                )

    def _evicting(self) -> dict[str, str]:
        return {server: memory.policy for server, memory in self._memory.items() if _evicts(memory)}


def _evicts(memory: MemoryUsage) -> bool:
    return memory.limit_bytes > 0 and memory.policy != SAFE_POLICY
