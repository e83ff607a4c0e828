"""Apply announced changes to the cache of this process: urgent ones at once, those of a large `apply` in slices."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.database.database import Database
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.live.overrides.override_sync import OverrideSync
from limitforge.catalog.live.publisher import sync_changed_overrides
from limitforge.catalog.model import OPERATOR
from limitforge.errors import CatalogError, StoreError
from limitforge.observability.events import log_event

TENANTS_PER_SLICE = 100  # tenants whose changes are applied together: a revocation may have to wait for them
MAX_URGENT_TENANTS = 10  # an edit of more tenants comes from an apply, and may wait

_log = logging.getLogger(__name__)


class ChangeApplier:
    """Applies changes to the cache, and to the overrides of a store that this process does not share."""

    def __init__(self, database: Database, cache: CatalogCache, local_override_sync: OverrideSync | None) -> None:
        """`local_override_sync` is None if the store is shared: the publisher writes its overrides."""
        self.deferred: dict[str, Announcement] = {}  # by tenant
        self._has_deferred = asyncio.Event()
        self._database = database
        self._cache = cache
        self._local_override_sync = local_override_sync

    async def apply(self, announcements: Sequence[Announcement]) -> None:
        """Apply these changes now."""
        await self._cache.apply_changes(announcements)
        if self._local_override_sync is not None:
            await sync_changed_overrides(self._local_override_sync, self._database, announcements)

    async def apply_or_defer(self, announcements: Sequence[Announcement]) -> None:
        """Apply urgent changes now, and defer the others.

        Revocations, changes of the operator, and revisions that change few tenants are urgent. Changes of keys are
        applied now in any case.
        """
        sizes = Counter(each.revision for each in announcements)
        urgent: list[Announcement] = []
        deferred: list[Announcement] = []
        for each in announcements:
            is_small = sizes[each.revision] <= MAX_URGENT_TENANTS and len(urgent) < TENANTS_PER_SLICE
            is_urgent = each.revokes or each.tenant_id == OPERATOR or is_small
            if is_urgent:
                urgent.append(each)
            else:
                deferred.append(each)
        await self.apply(urgent)
        if deferred:
            await self._cache.apply_changes([msgspec.structs.replace(each, config=False) for each in deferred])
            self._defer(deferred)

    async def run_deferred(self, run_to_completion: Callable[[Coroutine[Any, Any, None]], Awaitable[None]]) -> None:
        """Apply deferred changes in slices, until cancelled."""
        while True:
            await self._has_deferred.wait()
            announcements = [self.deferred.pop(tenant_id) for tenant_id in list(self.deferred)[:TENANTS_PER_SLICE]]
            if not self.deferred:
                self._has_deferred.clear()
            try:
                await run_to_completion(self.apply(announcements))
            except (CatalogError, StoreError) as error:
                log_event(
                    _log,
                    logging.WARNING,
                    "catalog.change_not_applied",
                    "could not apply a configuration change, keeping the previous one",
                    error=error,
                )
            except Exception:  # noqa: BLE001 - later changes must be applied all the same
                log_event(
                    _log,
                    logging.ERROR,
                    "catalog.change_not_applied",
                    "could not apply a configuration change, keeping the previous one",
                    exc_info=True,
                )

    def clear(self) -> None:
        """Discard deferred changes: they belong to a lost history."""
        self.deferred.clear()

    def _defer(self, announcements: Sequence[Announcement]) -> None:
        for each in announcements:
            if each.config or each.overrides:
                known = self.deferred.pop(each.tenant_id, each)
                newest = max(known, each, key=lambda one: one.stamp)  # messages may be late
                self.deferred[each.tenant_id] = msgspec.structs.replace(
                    newest,
                    config=known.config or each.config,
                    overrides=known.overrides or each.overrides,
                    keys=(),
                    gone=(),
                )
        self._has_deferred.set()
