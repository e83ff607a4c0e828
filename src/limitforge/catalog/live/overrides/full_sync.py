"""Compare the overrides of all tenants with the store, when changes may have been missed and after a restore.

One of all processes does it at a time.
"""

import contextlib
import random
import time
from uuid import uuid4

from limitforge.catalog.database import queries
from limitforge.catalog.database.database import Database
from limitforge.catalog.history import RevisionHistory
from limitforge.catalog.live.overrides.override_sync import (
    MAX_FAILURES,
    OverrideStore,
    OverrideSync,
    log_invalid_tenant,
)
from limitforge.catalog.live.shared_redis import SharedRedis
from limitforge.errors import CatalogError, CatalogUnavailable, StoreError

LOCK_SECONDS = 30.0  # until another process takes over from one that was killed
RETRY_SECONDS = 5.0
RESTORED_SECONDS = 30 * 86_400.0  # how long it is known that the overrides of a timeline were compared


class FullOverrideSync:
    """The comparisons that are pending. `run` performs them; those that fail remain pending."""

    def __init__(
        self,
        database: Database,
        override_sync: OverrideSync,
        store: OverrideStore,
        history: RevisionHistory,
        *,
        catalog_redis: SharedRedis | None,
        prefix: str,
    ) -> None:
        self._database = database
        self._override_sync = override_sync
        self._store = store
        self._history = history
        self._catalog_redis = catalog_redis
        self._lock = f"{prefix}:{{%mirror}}:"  # a fixed name, so that two releases exclude each other
        self._owner = uuid4().bytes
        self._is_requested = False
        self._is_requested_after_restore = False
        self._remaining: dict[str, bool] | None = None  # tenants to compare after a restore; see `_compare`
        self._next_run_at = 0.0

    @property
    def is_pending(self) -> bool:
        return self._is_requested or self._is_requested_after_restore

    @property
    def is_due(self) -> bool:
        return self.is_pending and time.monotonic() >= self._next_run_at

    def request(self) -> None:
        """Compare all tenants that have overrides in the database."""
        self._override_sync.forget_failures()
        self._is_requested = True

    def request_after_restore(self) -> None:
        """Compare every tenant, since the store may have overrides that the database has lost."""
        self._is_requested_after_restore, self._remaining, self._next_run_at = True, None, 0.0

    async def run(self) -> None:
        """Perform the pending comparisons. Raises `StoreError` or `CatalogError`; they are due again after a pause."""
        self._next_run_at = time.monotonic() + RETRY_SECONDS
        if self._is_requested_after_restore:
            await self._compare_after_restore()
        if self._is_requested:
            await self._compare_tenants_with_overrides()
        self._next_run_at = 0.0

    async def _compare_tenants_with_overrides(self) -> None:
        """Compare tenants with overrides, unless another process just did. An empty Redis has no lock."""
        self._is_requested = False
        try:
            if await self._has_lock(self._lock):
                await self._override_sync.sync_pending_tenants()
        except BaseException:
            self._is_requested = True
            raise

    async def _compare_after_restore(self) -> None:
        timeline = 0 if self._history.head is None else self._history.head.timeline
        done_key = f"{self._lock}{timeline}"
        if await self._is_done(done_key):
            self._is_requested_after_restore = False
            return
        if not await self._has_lock(f"{done_key}:working"):
            self._next_run_at = 0.0  # look again whether the process that has the lock is done
            return
        if self._remaining is None:
            async with self._database.reading() as connection:
                tenants = {tenant_id: lanes > 1 for tenant_id, lanes in await queries.tenant_lanes(connection)}
                overridden = await queries.tenants_with_overrides(connection)
            self._remaining = tenants | dict.fromkeys(overridden, True)
        left = self._remaining
        await self._compare(left, f"{done_key}:working")
        if self._remaining is left:  # the database was not restored again meanwhile
            self._is_requested_after_restore, self._remaining = False, None
            if self._catalog_redis is not None:
                with contextlib.suppress(StoreError):
                    await self._catalog_redis.claim(done_key, RESTORED_SECONDS)

    async def _compare(self, left: dict[str, bool], lock: str) -> None:
        """Set the overrides of these tenants again, and remove the tenants that are done from `left`.

        All overrides are set, since their plans may have had other algorithms in the lost time. The value in `left` is
        True for tenants that have overrides in the database, or more than one lane: the store can be asked for the
        overrides of the latter only after the tenant was read. Raises the last error after all tenants were tried.
        """
        failure: StoreError | None = None
        failures, renewed = 0, time.monotonic()
        for tenant_id in random.sample(
            list(left), len(left)
        ):  # so that the same failing tenants do not always come first
            try:
                if left[tenant_id] or await self._has_overrides(tenant_id):
                    await self._override_sync.sync_tenant(tenant_id, force=True)
            except CatalogUnavailable:
                raise
            except CatalogError as error:
                log_invalid_tenant(tenant_id, error)
            except StoreError as error:  # of the tenant's server: tenants on other servers are compared all the same
                failure, failures = error, failures + 1
                if failures >= MAX_FAILURES:
                    break
                continue
            failures = 0
            del left[tenant_id]
            if time.monotonic() > renewed + LOCK_SECONDS / 3:
                renewed = time.monotonic()
                await self._has_lock(lock)
        if failure is not None:
            raise failure

    async def _is_done(self, done_key: str) -> bool:
        with contextlib.suppress(StoreError):
            return self._catalog_redis is not None and await self._catalog_redis.get(done_key) is not None
        return False

    async def _has_overrides(self, tenant_id: str) -> bool:
        return bool((await self._store.list_overrides(tenant=tenant_id, cursor=None, page=1)).overrides)

    async def _has_lock(self, lock: str) -> bool:
        """Take or extend a lock. Return False if another process has it.

        If the server of the lock fails, return True: several processes may then do the work.
        """
        try:
            return self._catalog_redis is None or await self._catalog_redis.acquire_lock(
                lock, self._owner, LOCK_SECONDS
            )
        except StoreError:
            return True
