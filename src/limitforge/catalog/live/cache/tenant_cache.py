"""The cached tenants, each with a compiled snapshot of its configuration."""

from collections.abc import Callable

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.history import Stamp
from limitforge.catalog.live.cache.copy_validator import CopyValidator, includes_change
from limitforge.catalog.live.cache.entries import CachedTenant, CallerIndex
from limitforge.catalog.live.cache.freshness import Freshness
from limitforge.catalog.live.cache.operator_cache import OperatorCache
from limitforge.catalog.live.cache.reader import ConfigReader
from limitforge.catalog.live.cache.single_flight import SingleFlight
from limitforge.catalog.model import Tenant, TenantConfig
from limitforge.catalog.plan_warnings import log_plan_warnings
from limitforge.catalog.snapshot import Snapshot
from limitforge.core.clock import Clock
from limitforge.core.headers import HeaderOptions
from limitforge.errors import CatalogUnavailable, UnknownKey


class TenantCache:
    """Finds tenants, reads them again from time to time, and applies announced changes."""

    def __init__(  # noqa: PLR0913 - the parts of `CatalogCache`, and the bounds
        self,
        cached_tenants: dict[str, CachedTenant],
        operator: OperatorCache,
        caller_index: CallerIndex,
        reader: ConfigReader,
        validator: CopyValidator,
        flights: SingleFlight,
        freshness: Freshness,
        clock: Clock,
        *,
        on_loaded: Callable[[Tenant], None] | None,
        on_deleted: Callable[[str], None],
        header_options: HeaderOptions,
        max_tenants: int,
    ) -> None:
        """`on_loaded` is called with each tenant that is read, and `on_deleted` with the id of one that is gone."""
        self.loads = 0
        self._cached_tenants = cached_tenants
        self._operator = operator
        self._caller_index = caller_index
        self._reader = reader
        self._validator = validator
        self._flights = flights
        self._freshness = freshness
        self._clock = clock
        self._on_loaded = on_loaded
        self._on_deleted = on_deleted
        self._header_options = header_options
        self._max_tenants = max_tenants

    async def find(self, tenant_id: str) -> CachedTenant:
        """Return a tenant; read it first if it is not in memory. Raises `UnknownKey` if it does not exist."""
        now_us = self._clock.now_us()
        entry = self._cached_tenants.get(tenant_id)
        if entry is None or now_us >= entry.usable_until_us:
            entry = await self._read(tenant_id)
        elif now_us >= entry.fresh_until_us:
            self.renew_or_reread(tenant_id, entry)
        if entry.is_deleted:
            raise UnknownKey("unknown or expired key")
        return entry

    def renew_or_reread(self, tenant_id: str, entry: CachedTenant) -> None:
        """Renew an entry that is no longer fresh: at once if it is known to be current, else by a background read."""
        is_confirmed = self._freshness.is_confirmed(self._clock.now_us())
        if is_confirmed and entry.is_from_database and not entry.is_stale:
            self._freshness.mark_confirmed(entry)
            if self._cached_tenants.get(tenant_id) is entry:  # keep the least recently used entry at the front
                self._cached_tenants[tenant_id] = self._cached_tenants.pop(tenant_id)
            return
        self._freshness.retry_soon(entry)
        self._flights.start_in_background(
            ("tenant", tenant_id),
            lambda must_be_newer: self._load(tenant_id, must_be_newer=must_be_newer or is_confirmed),
        )

    async def apply_change(self, announcement: Announcement) -> None:
        """Read a tenant again if it is cached and lacks this change."""
        tenant_id, stamp = announcement.tenant_id, announcement.stamp
        self._validator.require(tenant_id, stamp)
        entry = self._cached_tenants.get(tenant_id)
        if entry is not None and includes_change(entry, announcement):
            return
        self._flights.mark_changed(("tenant", tenant_id))
        is_revoked = tenant_id in announcement.revoked
        if entry is not None and is_revoked and await self._suspend_by_copy(tenant_id, entry, stamp):
            return
        if tenant_id in self._cached_tenants or ("tenant", tenant_id) in self._flights:
            await self._read(tenant_id, must_be_newer=True)

    def forget(self, tenant_id: str) -> None:
        entry = self._cached_tenants.pop(tenant_id)
        entry.usable_until_us = 0  # callers that hold it must look it up again
        self._caller_index.remove_callers_of(entry)

    def clear(self) -> None:
        for tenant_id in list(self._cached_tenants):
            self.forget(tenant_id)

    async def _suspend_by_copy(self, tenant_id: str, known: CachedTenant, stamp: Stamp) -> bool:
        """Stop serving the old state of a suspended tenant without waiting for the database.

        Return True if a copy has the new state. Otherwise the tenant is forgotten.
        """
        copy = await self._reader.copy_of_tenant(tenant_id)
        if self._cached_tenants.get(tenant_id) is not known:
            return False
        if copy is not None and copy.value is not None and self._validator.is_current(copy, stamp, known):
            operator = self._operator.entry
            if operator is not None:
                self._store(tenant_id, copy.value, operator, copy.stamp, is_from_database=False)
                return True
        self.forget(tenant_id)
        return False

    async def _read(self, tenant_id: str, *, must_be_newer: bool = False) -> CachedTenant:
        return await self._flights.run(
            ("tenant", tenant_id),
            lambda must_be_newer: self._load(tenant_id, must_be_newer=must_be_newer),
            must_be_newer=must_be_newer,
        )

    async def _load(self, tenant_id: str, *, must_be_newer: bool) -> CachedTenant:
        await self._operator.find()
        self.loads += 1
        while True:
            clear_count, known = self._validator.clear_count, self._cached_tenants.get(tenant_id)
            try:
                result = await self._reader.read_tenant(tenant_id, known, must_be_newer=must_be_newer)
            except CatalogUnavailable:
                if known is None or not self._freshness.is_usable(known):
                    raise
                return self._freshness.keep_stale(known)
            operator = await self._operator.find()
            if self._validator.is_read_valid(clear_count, tenant_id, result.stamp):
                break
        if result.value is None:
            return self._remove(tenant_id, operator)
        return self._store(tenant_id, result.value, operator, result.stamp, is_from_database=result.is_from_database)

    def _store(
        self, tenant_id: str, config: TenantConfig, operator: CachedTenant, stamp: Stamp, *, is_from_database: bool
    ) -> CachedTenant:
        if self._on_loaded is not None:
            self._on_loaded(config.tenant)
        entry = self._cached_tenants.get(tenant_id)
        if entry is None or entry.snapshot.config != config:
            log_plan_warnings(config)
            snapshot = Snapshot(config, operator.snapshot.config, self._header_options)
            if entry is None:
                entry = CachedTenant(snapshot)
            else:
                entry.snapshot = snapshot
        elif entry.snapshot.operator is not operator.snapshot.config:
            entry.snapshot = entry.snapshot.with_operator(operator.snapshot.config)
        self._cached_tenants.pop(tenant_id, None)  # keep the least recently used entry at the front
        self._freshness.mark_read_now(entry)
        entry.is_stale = entry.is_deleted = False
        entry.is_from_database, entry.stamp = is_from_database, stamp
        self._cached_tenants[tenant_id] = entry
        while len(self._cached_tenants) > self._max_tenants:
            self.forget(next(iter(self._cached_tenants)))
        return entry

    def _remove(self, tenant_id: str, operator: CachedTenant) -> CachedTenant:
        """Remove a tenant that was deleted, with its keys. Callers may still hold its entry, so mark that as well."""
        entry = self._cached_tenants.pop(tenant_id, None) or CachedTenant(operator.snapshot)
        entry.is_deleted, entry.usable_until_us = True, 0
        self._on_deleted(tenant_id)
        return entry
