"""Has overrides in the store compared with the database: when something may have been missed, and after a restore those
of every tenant. Of several nodes one does it.
"""

import contextlib
import logging
import random
import time
from uuid import uuid4

from limitforge.catalog.database import queries
from limitforge.catalog.database.database import Database
from limitforge.catalog.history import RevisionHistory
from limitforge.catalog.live.override_sync import MAX_FAILURES, OverrideSink, OverrideSync
from limitforge.catalog.live.shared_backend import SharedBackend
from limitforge.errors import CatalogError, CatalogUnavailable, StoreError

LEASE_SECONDS = 30.0  # until another node takes over from one that was killed
AGAIN_SECONDS = 5.0  # how soon what failed is tried again
RESTORED_SECONDS = 30 * 86_400.0  # how long it is remembered that the overrides of a timeline were compared

_log = logging.getLogger(__name__)


class FullOverrideSync:
    """What is still to be compared. `run` does it; what fails stays to be done."""

    def __init__(
        self,
        database: Database,
        override_sync: OverrideSync,
        sink: OverrideSink,
        history: RevisionHistory,
        *,
        shared: SharedBackend | None,
        prefix: str,
    ) -> None:
        self._database = database
        self._mirror = override_sync
        self._sink = sink
        self._history = history
        self._shared = shared
        self._lease = f"{prefix}:{{%mirror}}:"
        self._name = uuid4().bytes
        self._is_asked = False
        self._is_after_restore = False
        self._left: dict[str, bool] | None = None  # tenants to compare after a restore; see `_compare`
        self._not_before = 0.0

    @property
    def is_pending(self) -> bool:
        return self._is_asked or self._is_after_restore

    @property
    def is_due(self) -> bool:
        return self.is_pending and time.monotonic() >= self._not_before

    def request(self) -> None:
        """Compare all tenants that have overrides."""
        self._mirror.forget_failures()
        self._is_asked = True

    def request_after_restore(self) -> None:
        """Compare every tenant: the store may have overrides that the database never heard of."""
        self._is_after_restore, self._left, self._not_before = True, None, 0.0

    async def run(self) -> None:
        """Do what is owed. Raises `StoreError` or `CatalogError`; then it is due again after a while."""
        self._not_before = time.monotonic() + AGAIN_SECONDS
        if self._is_after_restore:
            await self._every_tenant()
        if self._is_asked:
            await self._all()
        self._not_before = 0.0

    async def _all(self) -> None:
        """Compare overrides, unless another node has just done it. A Redis that came back empty has no lease."""
        self._is_asked = False
        try:
            if await self._leads(self._lease):
                await self._mirror.sync_failed()
        except BaseException:
            self._is_asked = True
            raise

    async def _every_tenant(self) -> None:
        timeline = 0 if self._history.head is None else self._history.head.timeline
        done = f"{self._lease}{timeline}"
        if await self._is_done(done):
            self._is_after_restore = False
            return
        if not await self._leads(f"{done}:working"):
            self._not_before = 0.0  # until it is done by who leads
            return
        if self._left is None:
            async with self._database.reading() as connection:
                tenants = {tenant_id: lanes > 1 for tenant_id, lanes in await queries.tenant_lanes(connection)}
                overridden = await queries.tenants_with_overrides(connection)
            self._left = tenants | dict.fromkeys(overridden, True)
        left = self._left
        await self._compare(left, f"{done}:working")
        if self._left is left:  # it was not restored once more meanwhile
            self._is_after_restore, self._left = False, None
            if self._shared is not None:
                with contextlib.suppress(StoreError):
                    await self._shared.claim(done, RESTORED_SECONDS)

    async def _compare(self, left: dict[str, bool], lease: str) -> None:
        """Set the overrides of these tenants anew, since their plans may have had another algorithm in the lost time,
        and remove the tenants that are done. True marks those that have some in the database, or that have lanes: their
        place in the store is known once they were read. Raises what failed, after the rest was tried.
        """
        failure: StoreError | None = None
        failures, renewed = 0, time.monotonic()
        for tenant_id in random.sample(list(left), len(left)):  # so that none is always behind a row of failures
            try:
                if left[tenant_id] or await self._has_any(tenant_id):
                    await self._mirror.sync_tenant(tenant_id, force=True)
            except CatalogUnavailable:
                raise
            except CatalogError as error:
                _log.warning("catalog.invalid_tenant tenant=%s: its overrides are not updated: %s", tenant_id, error)
            except StoreError as error:  # of its server: those of others are compared all the same
                failure, failures = error, failures + 1
                if failures >= MAX_FAILURES:
                    break
                continue
            failures = 0
            del left[tenant_id]
            if time.monotonic() > renewed + LEASE_SECONDS / 3:
                renewed = time.monotonic()
                await self._leads(lease)
        if failure is not None:
            raise failure

    async def _is_done(self, done: str) -> bool:
        with contextlib.suppress(StoreError):
            return self._shared is not None and await self._shared.get(done) is not None
        return False

    async def _has_any(self, tenant_id: str) -> bool:
        return bool((await self._sink.list_overrides(tenant=tenant_id, cursor=None, page=1)).overrides)

    async def _leads(self, lease: str) -> bool:
        """Take or extend a lease; False if another node has it. If its server fails, several nodes may do the work."""
        try:
            return self._shared is None or await self._shared.acquire_lock(lease, self._name, LEASE_SECONDS)
        except StoreError:
            return True
