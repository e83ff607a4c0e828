"""The cached configuration of the operator, whose plan and mode apply to all tenants."""

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.live.cache.copy_validator import CopyValidator, includes_change
from limitforge.catalog.live.cache.entries import CachedTenant
from limitforge.catalog.live.cache.freshness import Freshness
from limitforge.catalog.live.cache.reader import ConfigReader
from limitforge.catalog.live.cache.single_flight import SingleFlight
from limitforge.catalog.model import OPERATOR
from limitforge.catalog.snapshot import Snapshot
from limitforge.core.clock import Clock
from limitforge.errors import CatalogUnavailable

READ_NAME = "operator"


class OperatorCache:
    """Holds the operator's configuration. A change of it gives each cached tenant a new snapshot."""

    def __init__(
        self,
        cached_tenants: dict[str, CachedTenant],
        reader: ConfigReader,
        validator: CopyValidator,
        flights: SingleFlight,
        freshness: Freshness,
        clock: Clock,
    ) -> None:
        self.entry: CachedTenant | None = None
        self._cached_tenants = cached_tenants
        self._reader = reader
        self._validator = validator
        self._flights = flights
        self._freshness = freshness
        self._clock = clock

    async def find(self) -> CachedTenant:
        """Return the operator; read it first if it is not in memory."""
        entry, now_us = self.entry, self._clock.now_us()
        if entry is None or now_us >= entry.usable_until_us:
            return await self._flights.run(READ_NAME, self._load)
        if now_us >= entry.fresh_until_us:
            self._flights.start_in_background(READ_NAME, self._load)
            self._freshness.retry_soon(entry)
        return entry

    async def apply_change(self, announcement: Announcement) -> None:
        """Read the operator again if it is cached and lacks this change."""
        self._validator.require(OPERATOR, announcement.stamp)
        if self.entry is not None and includes_change(self.entry, announcement):
            return
        self._flights.mark_changed(READ_NAME)
        if self.entry is not None or READ_NAME in self._flights:
            await self._flights.run(READ_NAME, self._load, must_be_newer=True)

    def ensure_read_from_database(self) -> None:
        """Read the operator from the database in the background if it was only read from a copy."""
        if self.entry is not None and not self.entry.is_from_database:
            self._flights.start_in_background(READ_NAME, lambda _: self._load(must_be_newer=True))

    async def _load(self, must_be_newer: bool) -> CachedTenant:  # noqa: FBT001 - as single flights call it
        try:
            while True:
                clear_count = self._validator.clear_count
                result = await self._reader.read_tenant(OPERATOR, self.entry, must_be_newer=must_be_newer)
                if self._validator.is_read_valid(clear_count, OPERATOR, result.stamp):
                    break
        except CatalogUnavailable:
            if self.entry is None or not self._freshness.is_usable(self.entry):
                raise
            stale = self._freshness.keep_stale(self.entry)
            for tenant in self._cached_tenants.values():  # a lookup of any tenant then reads the operator again
                tenant.fresh_until_us = min(tenant.fresh_until_us, stale.fresh_until_us)
            return stale
        config = result.value
        if config is None:
            raise CatalogUnavailable("the database has no operator: run `limitforge db upgrade`")
        entry = self.entry
        if entry is None or entry.snapshot.config != config:
            entry = CachedTenant(Snapshot(config, config))
            for tenant in self._cached_tenants.values():
                tenant.snapshot = tenant.snapshot.with_operator(config)
        self._freshness.mark_read_now(entry)
        entry.is_stale, entry.is_from_database, entry.stamp = False, result.is_from_database, result.stamp
        self.entry = entry
        return entry
