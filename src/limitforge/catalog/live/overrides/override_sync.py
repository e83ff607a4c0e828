"""Write the overrides of a database or file to the limiter's store.

The source is authoritative: overrides that the store has lost are set again, and those that it should not have are
deleted.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Protocol

from limitforge.catalog.live.sources import OverrideSource
from limitforge.catalog.model import Override, Tenant, TenantConfig, to_datetime
from limitforge.catalog.snapshot import limits_for_override
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.overrides import OverridePage
from limitforge.core.plan import LimitsLike
from limitforge.errors import CatalogError, CatalogUnavailable, InvalidInput, PartialFailure, StoreError
from limitforge.observability.events import log_event

EXPIRY_TOLERANCE_SECONDS = 2.0  # expiries that differ by less count as equal
OVERRIDES_PER_PAGE = 500
MAX_PARALLEL_WRITES = 32
TENANTS_PER_CHUNK = 100  # tenants whose plans are in memory at once while overrides are restored
DELETED_SECONDS = 600  # how far back deletions are read
MAX_DELETED = 200  # deletions that are read
MAX_REMEMBERED_TENANTS = 10_000  # tenants whose last deletion is remembered
MAX_FAILURES = 10  # tenants in a row whose servers fail: then the whole store is down, and the others have to wait

_log = logging.getLogger(__name__)


class OverrideStore(Protocol):
    """The limiter in whose store overrides take effect."""

    async def set_override(
        self,
        resource: str,
        subject: str,
        changes: Mapping[str, Any],
        *,
        limits: LimitsLike,
        ttl_seconds: float,
        tenant: str,
    ) -> object: ...

    async def delete_override(self, resource: str, subject: str, *, tenant: str) -> bool: ...

    async def list_overrides(self, *, tenant: str, cursor: str | None, page: int) -> OverridePage: ...

    async def missing_overrides(self, targets: Iterable[tuple[str, str, str]]) -> list[int]:
        """Return the positions of the targets, each (tenant, resource, subject), that have no live override."""


class OverrideSync:
    """Compares the overrides of tenants with the store, and writes the differences.

    Each write follows a read of the source, and is repeated if the override changed meanwhile.
    """

    def __init__(
        self,
        source: OverrideSource,
        store: OverrideStore,
        clock: Clock | None = None,
        on_tenant_loaded: Callable[[Tenant], None] | None = None,
    ) -> None:
        self._source = source
        self._on_tenant_loaded = on_tenant_loaded
        self._store = store
        self._clock = clock or SystemClock()
        self._deleted: dict[str, int] = {}  # by tenant: the number of the last deletion that was carried out
        self._failed: frozenset[str] | None = None  # tenants whose servers failed; None if not all were tried

    def reset(self) -> None:
        """Forget which deletions were carried out: the database was restored, and numbers them from the start."""
        self._deleted.clear()
        self._failed = None

    def forget_failures(self) -> None:
        """Make the next `sync_pending_tenants` compare all tenants."""
        self._failed = None

    async def sync_all(self) -> int:
        """Sync all tenants that have overrides, and return the number of changes.

        Raises `PartialFailure` with the tenants whose servers failed.
        """
        self._failed = None
        return await self._sync_and_note_failures(await self._source.tenants_with_overrides())

    async def sync_pending_tenants(self) -> int:
        """Sync the tenants that failed in the last `sync_all`; all tenants if it did not finish."""
        return await (self.sync_all() if self._failed is None else self._sync_and_note_failures(self._failed))

    async def _sync_and_note_failures(self, tenants: Collection[str]) -> int:
        try:
            changes = await self.sync_tenants(tenants)
        except PartialFailure as error:
            self._failed = error.failed
            raise
        self._failed = frozenset()
        return changes

    async def sync_tenants(
        self,
        tenants: Collection[str],
        force: Collection[str] = (),
        on_tenant_synced: Callable[[], Awaitable[None]] | None = None,
    ) -> int:
        """Sync these tenants, and return the number of changes. `force` are the tenants to sync with `force=True`.

        A server that fails does not affect tenants on others. Raises `PartialFailure` with the tenants that failed.
        """
        left = list(tenants)
        random.shuffle(left)  # so that the same failing tenants do not always come first
        failed: dict[str, StoreError] = {}
        failures = changes = 0
        while left and failures < MAX_FAILURES:
            tenant_id = left.pop()
            try:
                changes += await self.sync_tenant(tenant_id, force=tenant_id in force)
                failures = 0
            except CatalogUnavailable:
                raise
            except CatalogError as error:
                log_invalid_tenant(tenant_id, error)
            except StoreError as error:
                failed[tenant_id] = error
                failures += 1
            if on_tenant_synced is not None:
                await on_tenant_synced()
        if failed:
            why = next(iter(failed.values()))
            raise PartialFailure(f"the overrides of some tenants could not be written: {why}", (*failed, *left))
        return changes

    async def sync_tenant(self, tenant_id: str, *, force: bool = False) -> int:
        """Sync one tenant, and return the number of changes.

        `force` also sets overrides that look equal: their plans may have changed.
        """
        config = await self.load_tenant(tenant_id)
        wanted = {} if config is None else await self._wanted(tenant_id)
        stored = await self._stored(tenant_id)
        changes = 0
        for key, override in wanted.items():
            if config is not None and (force or not _is_same(override, stored.get(key))):
                changes += await self._write_latest(config, override)
        # A store that lost its index does not list deleted overrides, and would still apply them.
        since = self._now() - timedelta(seconds=DELETED_SECONDS)
        known = self._deleted.get(tenant_id, 0)
        deleted = await self._source.deleted_overrides(tenant_id, known, since, MAX_DELETED)
        deleted_keys = {(each.resource, each.subject) for each in deleted}
        for key in (stored.keys() | deleted_keys) - wanted.keys():
            changes += await self._delete(tenant_id, config, *key)
        if deleted:
            if len(self._deleted) >= MAX_REMEMBERED_TENANTS:
                self._deleted.clear()
            self._deleted[tenant_id] = deleted[-1].deletion_number
        return changes

    async def load_tenant(self, tenant_id: str) -> TenantConfig | None:
        """Read a tenant, and tell the limiter how many lanes it has."""
        config = await self._source.config(tenant_id)
        if config is not None and self._on_tenant_loaded is not None:
            self._on_tenant_loaded(config.tenant)
        return config

    async def restore(self, ids: Iterable[str]) -> tuple[list[Override], list[Override]]:
        """Set these overrides again. Return those that were set, and those that their plans do not allow.

        Overrides that a server did not accept are in neither list.
        """
        by_tenant: dict[str, list[Override]] = {}
        for override in await self._source.overrides_by_id(ids):
            by_tenant.setdefault(override.tenant_id, []).append(override)
        restored: list[Override] = []
        refused: list[Override] = []
        tenants = list(by_tenant)
        for start in range(0, len(tenants), TENANTS_PER_CHUNK):
            chunk = tenants[start : start + TENANTS_PER_CHUNK]
            configs = await self._source.configs(chunk)
            if self._on_tenant_loaded is not None:
                for config in configs.values():
                    self._on_tenant_loaded(config.tenant)
            overrides = [each for tenant_id in chunk if tenant_id in configs for each in by_tenant[tenant_id]]
            for override, is_set in zip(overrides, await self._write_all(configs, overrides), strict=True):
                if is_set is not None:
                    (restored if is_set else refused).append(override)
            await self._rewrite_changed(configs, [each for each in restored if each.tenant_id in configs])
        return restored, refused

    async def _write_all(self, configs: Mapping[str, TenantConfig], overrides: list[Override]) -> list[bool | None]:
        """Set all of them, some at once. The result is None for one that a server did not accept."""
        results: list[bool | None] = []
        for start in range(0, len(overrides), MAX_PARALLEL_WRITES):
            chunk = overrides[start : start + MAX_PARALLEL_WRITES]
            writes = [self._write_once(configs[each.tenant_id], each) for each in chunk]
            for result in await asyncio.gather(*writes, return_exceptions=True):
                if isinstance(result, BaseException) and not isinstance(result, StoreError):
                    raise result
                results.append(None if isinstance(result, BaseException) else result)
        return results

    async def _rewrite_changed(self, configs: Mapping[str, TenantConfig], written: list[Override]) -> None:
        """Write overrides again that were changed or deleted, or got another plan, while they were written."""
        current = {each.id: each for each in await self._source.overrides_by_id(each.id for each in written)}
        revisions = await self._source.revisions(configs)
        changed = {each for each, config in configs.items() if revisions.get(each) != config.tenant.revision}
        for override in written:
            if override.tenant_id not in changed and current.get(override.id) == override:
                continue
            latest = await self._source.config(override.tenant_id)
            if latest is None:
                await self._store.delete_override(override.resource, override.subject, tenant=override.tenant_id)
            else:
                await self._write_latest(latest, override)

    async def _wanted(self, tenant_id: str) -> dict[tuple[str, str], Override]:
        now = self._now()
        overrides = await self._source.overrides(tenant_id)
        return {(each.resource, each.subject): each for each in overrides if each.expires_at > now}

    async def _stored(self, tenant_id: str) -> dict[tuple[str, str], Any]:
        stored: dict[tuple[str, str], Any] = {}
        cursor: str | None = None
        while True:
            page = await self._store.list_overrides(tenant=tenant_id, cursor=cursor, page=OVERRIDES_PER_PAGE)
            stored.update({(each.resource, each.subject): each for each in page.overrides})
            cursor = page.cursor
            if cursor is None:
                return stored

    async def _write_latest(self, config: TenantConfig, override: Override) -> int:
        """Write the current state of an override; repeat that if it changes meanwhile."""
        current = await self._current(override)
        while current is not None:
            if not await self._write_once(config, current):
                break
            written, current = current, await self._current(override)
            if current == written:
                return 1
        await self._store.delete_override(override.resource, override.subject, tenant=override.tenant_id)
        return 1

    async def _write_once(self, config: TenantConfig, override: Override) -> bool:
        """Write an override. Return False if its plans do not allow it; the store must not have it then."""
        known = {}
        for name, change in override.limits.items():
            try:
                known[name] = (change, limits_for_override(config, override.resource, [name])[name])
            except InvalidInput:
                continue  # no plan has that limit any more
        seconds = (override.expires_at - self._now()).total_seconds()
        if not known or seconds < 0.001:
            return False
        try:
            await self._store.set_override(
                override.resource,
                override.subject,
                {name: change for name, (change, _) in known.items()},
                limits=[limit for _, limit in known.values()],
                ttl_seconds=round(seconds, 3),
                tenant=override.tenant_id,
            )
        except InvalidInput as error:
            log_event(
                _log,
                logging.WARNING,
                "overrides.invalid",
                "an override is not valid for its plan any more, not applying it",
                override=override.id,
                error=error,
            )
            return False
        return True

    async def _delete(self, tenant_id: str, config: TenantConfig | None, resource: str, subject: str) -> int:
        wanted = await self._source.override(tenant_id, resource, subject)
        if wanted is not None and wanted.expires_at > self._now():
            return 0
        deleted = int(await self._store.delete_override(resource, subject, tenant=tenant_id))
        wanted = await self._source.override(tenant_id, resource, subject)
        if wanted is not None and config is not None:
            await self._write_latest(config, wanted)  # it was set meanwhile
        return deleted

    async def _current(self, override: Override) -> Override | None:
        return await self._source.override(override.tenant_id, override.resource, override.subject)

    def _now(self) -> datetime:
        return to_datetime(self._clock.now_us())


def log_invalid_tenant(tenant_id: str, error: CatalogError) -> None:
    log_event(
        _log,
        logging.WARNING,
        "catalog.invalid_tenant",
        "the database holds invalid configuration, not updating the overrides of this tenant",
        tenant=tenant_id,
        error=error,
    )


def _is_same(wanted: Override, stored: Any) -> bool:
    if stored is None:
        return False
    difference = abs(wanted.expires_at.timestamp() - stored.expires_at)
    return bool(stored.limits == wanted.limits) and difference < EXPIRY_TOLERANCE_SECONDS
