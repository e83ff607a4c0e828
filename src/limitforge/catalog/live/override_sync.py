"""Overrides in the store as the database has them. The database is the truth: whatever the store lost, or kept too
long, is put right.
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

EXPIRY_TOLERANCE_SECONDS = 2.0  # two expiries that differ by less are the same
PAGE = 500
PARALLEL = 32  # overrides that are written at once
CONFIGS = 100  # tenants whose plans are in memory at once while overrides are restored
DELETED_SECONDS = 600  # how far back deletions are looked for, and how many of them
MAX_DELETED = 200
MAX_TENANTS = 10_000  # whose last deletion is remembered
MAX_FAILURES = 10  # tenants in a row whose servers fail: then the store is away as a whole, and the rest waits

_log = logging.getLogger(__name__)


class OverrideSink(Protocol):
    """Where overrides act: a limiter."""

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

    async def missing_overrides(self, places: Iterable[tuple[str, str, str]]) -> list[int]:
        """Return the positions of those overrides, each (tenant, resource, subject), that are not in force."""


class OverrideSync:
    """Compares both, and changes only what differs. Each change is decided by what the database says just before it."""

    def __init__(
        self,
        source: OverrideSource,
        sink: OverrideSink,
        clock: Clock | None = None,
        on_tenant_loaded: Callable[[Tenant], None] | None = None,
    ) -> None:
        self._source = source
        self._placed = on_tenant_loaded
        self._sink = sink
        self._clock = clock or SystemClock()
        self._deleted: dict[str, int] = {}  # by tenant: the number of the last deletion that was carried out
        self._failed: frozenset[str] | None = None  # tenants whose servers failed; None if not all were tried

    def reset(self) -> None:
        """Forget which deletions were carried out: the database was restored, and counts them afresh."""
        self._deleted.clear()
        self._failed = None

    def forget_failures(self) -> None:
        """Reconcile all tenants the next time, and not only those that failed."""
        self._failed = None

    async def sync_all(self) -> int:
        """Reconcile all tenants that have overrides, and return how many changes it took.

        Raises `PartialFailure` with the tenants whose servers failed.
        """
        self._failed = None
        return await self._reconcile_noting(await self._source.tenants_with_overrides())

    async def sync_failed(self) -> int:
        """Reconcile those that failed in the last `reconcile_all`; all, if that did not come to its end."""
        return await (self.sync_all() if self._failed is None else self._reconcile_noting(self._failed))

    async def _reconcile_noting(self, tenants: Collection[str]) -> int:
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
        after_each: Callable[[], Awaitable[None]] | None = None,
    ) -> int:
        """Reconcile these tenants, and return how many changes it took. `between` is called after each of them.

        A server that fails does not affect tenants on others. Raises `PartialFailure` with the tenants that failed.
        """
        left = list(tenants)
        random.shuffle(left)  # so that none is always behind a row of failures
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
                _log.warning("catalog.invalid_tenant tenant=%s: its overrides are not updated: %s", tenant_id, error)
            except StoreError as error:
                failed[tenant_id] = error
                failures += 1
            if after_each is not None:
                await after_each()
        if failed:
            why = next(iter(failed.values()))
            raise PartialFailure(f"the overrides of some tenants could not be written: {why}", (*failed, *left))
        return changes

    async def sync_tenant(self, tenant_id: str, *, force: bool = False) -> int:
        """One tenant. `anew` also sets what looks right: their plans' other numbers may have changed."""
        config = await self._source.config(tenant_id)
        if config is not None and self._placed is not None:
            self._placed(config.tenant)
        wanted = {} if config is None else await self._wanted(tenant_id)
        there = await self._there(tenant_id)
        changes = 0
        for place, override in wanted.items():
            if config is not None and (force or not _is_same(override, there.get(place))):
                changes += await self._set(config, override)
        # A store that lost its index does not list what was deleted, and would go on to apply it.
        since = self._now() - timedelta(seconds=DELETED_SECONDS)
        known = self._deleted.get(tenant_id, 0)
        deleted = await self._source.deleted_overrides(tenant_id, known, since, MAX_DELETED)
        places = {(each.resource, each.subject) for each in deleted}
        for place in (there.keys() | places) - wanted.keys():
            changes += await self._delete(tenant_id, config, *place)
        if deleted:
            if len(self._deleted) >= MAX_TENANTS:
                self._deleted.clear()
            self._deleted[tenant_id] = deleted[-1].number
        return changes

    async def load_tenant(self, tenant_id: str) -> None:
        """Let the sink know how many lanes a tenant has."""
        config = await self._source.config(tenant_id)
        if config is not None and self._placed is not None:
            self._placed(config.tenant)

    async def restore(self, ids: Iterable[str]) -> tuple[list[Override], list[Override]]:
        """Set these overrides as the database has them. Return those that are set, and those that can't be in force.

        What a server does not take now is in neither list.
        """
        by_tenant: dict[str, list[Override]] = {}
        for override in await self._source.overrides_by_id(ids):
            by_tenant.setdefault(override.tenant_id, []).append(override)
        done: list[Override] = []
        refused: list[Override] = []
        tenants = list(by_tenant)
        for start in range(0, len(tenants), CONFIGS):
            some = tenants[start : start + CONFIGS]
            configs = await self._source.configs(some)
            if self._placed is not None:
                for config in configs.values():
                    self._placed(config.tenant)
            overrides = [each for tenant_id in some if tenant_id in configs for each in by_tenant[tenant_id]]
            for override, is_set in zip(overrides, await self._write_all(configs, overrides), strict=True):
                if is_set is not None:
                    (done if is_set else refused).append(override)
            await self._confirm(configs, [each for each in done if each.tenant_id in configs])
        return done, refused

    async def _write_all(self, configs: Mapping[str, TenantConfig], overrides: list[Override]) -> list[bool | None]:
        """Set all of them, some at once; None for one that the store did not take."""
        answers: list[bool | None] = []
        for start in range(0, len(overrides), PARALLEL):
            writes = [self._write(configs[each.tenant_id], each) for each in overrides[start : start + PARALLEL]]
            for answer in await asyncio.gather(*writes, return_exceptions=True):
                if isinstance(answer, BaseException) and not isinstance(answer, StoreError):
                    raise answer
                answers.append(None if isinstance(answer, BaseException) else answer)
        return answers

    async def _confirm(self, configs: Mapping[str, TenantConfig], written: list[Override]) -> None:
        """Write again what was changed, deleted or given another plan while it was written."""
        current = {each.id: each for each in await self._source.overrides_by_id(each.id for each in written)}
        revisions = await self._source.revisions(configs)
        changed = {each for each, config in configs.items() if revisions.get(each) != config.tenant.revision}
        for override in written:
            if override.tenant_id not in changed and current.get(override.id) == override:
                continue
            latest = await self._source.config(override.tenant_id)
            if latest is None:
                await self._sink.delete_override(override.resource, override.subject, tenant=override.tenant_id)
            else:
                await self._set(latest, override)

    async def _wanted(self, tenant_id: str) -> dict[tuple[str, str], Override]:
        now = self._now()
        overrides = await self._source.overrides(tenant_id)
        return {(each.resource, each.subject): each for each in overrides if each.expires_at > now}

    async def _there(self, tenant_id: str) -> dict[tuple[str, str], Any]:
        there: dict[tuple[str, str], Any] = {}
        cursor: str | None = None
        while True:
            page = await self._sink.list_overrides(tenant=tenant_id, cursor=cursor, page=PAGE)
            there.update({(each.resource, each.subject): each for each in page.overrides})
            cursor = page.cursor
            if cursor is None:
                return there

    async def _set(self, config: TenantConfig, override: Override) -> int:
        """As the database has it, also if that changes while it is written."""
        current = await self._current(override)
        while current is not None:
            if not await self._write(config, current):
                break
            written, current = current, await self._current(override)
            if current == written:
                return 1
        await self._sink.delete_override(override.resource, override.subject, tenant=override.tenant_id)
        return 1

    async def _write(self, config: TenantConfig, override: Override) -> bool:
        """False if it can't be in force: then it must not be there."""
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
            await self._sink.set_override(
                override.resource,
                override.subject,
                {name: change for name, (change, _) in known.items()},
                limits=[limit for _, limit in known.values()],
                ttl_seconds=round(seconds, 3),
                tenant=override.tenant_id,
            )
        except InvalidInput as error:
            _log.warning("override %s no longer fits its plan, and is not in force: %s", override.id, error)
            return False
        return True

    async def _delete(self, tenant_id: str, config: TenantConfig | None, resource: str, subject: str) -> int:
        wanted = await self._source.override(tenant_id, resource, subject)
        if wanted is not None and wanted.expires_at > self._now():
            return 0
        done = int(await self._sink.delete_override(resource, subject, tenant=tenant_id))
        wanted = await self._source.override(tenant_id, resource, subject)
        if wanted is not None and config is not None:
            await self._set(config, wanted)  # it was set meanwhile
        return done

    async def _current(self, override: Override) -> Override | None:
        return await self._source.override(override.tenant_id, override.resource, override.subject)

    def _now(self) -> datetime:
        return to_datetime(self._clock.now_us())


def _is_same(wanted: Override, there: Any) -> bool:
    if there is None:
        return False
    apart = abs(wanted.expires_at.timestamp() - there.expires_at)
    return bool(there.limits == wanted.limits) and apart < EXPIRY_TOLERANCE_SECONDS
