"""The configuration cache as a whole: lookups, announced changes, and status.

A lookup of a caller in memory does no I/O. An entry older than its TTL is still served while it is read again. If the
database is unavailable, it is served for longer and marked as stale.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.history import RevisionHistory
from limitforge.catalog.live.cache.bounded_reads import LOOKUP_SECONDS
from limitforge.catalog.live.cache.caller_cache import CallerCache
from limitforge.catalog.live.cache.copy_validator import CopyValidator
from limitforge.catalog.live.cache.entries import CachedTenant, CacheStatus, CallerIndex
from limitforge.catalog.live.cache.freshness import FRESH_SECONDS, STALE_SECONDS, DatabaseHealth, Freshness
from limitforge.catalog.live.cache.key_cache import KeyCache
from limitforge.catalog.live.cache.lookup_limiter import LookupLimiter
from limitforge.catalog.live.cache.operator_cache import OperatorCache
from limitforge.catalog.live.cache.reader import ConfigReader
from limitforge.catalog.live.cache.single_flight import SingleFlight
from limitforge.catalog.live.cache.tenant_cache import TenantCache
from limitforge.catalog.live.shared_copies import SharedCopies
from limitforge.catalog.live.sources import ConfigSource
from limitforge.catalog.model import OPERATOR, Tenant
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.core.headers import HeaderOptions
from limitforge.errors import CatalogUnavailable, TooManyUnknownKeys, UnknownKey
from limitforge.observability.events import log_event

MAX_CACHED_TENANTS = 10_000
MAX_CACHED_KEYS = 100_000

_log = logging.getLogger(__name__)


class CatalogCache:
    """Keys and tenants of a configuration source, for one event loop. `callers` authenticates API keys."""

    def __init__(  # noqa: PLR0913 - one argument for each bound
        self,
        source: ConfigSource,
        peppers: Peppers,
        *,
        copies: SharedCopies | None = None,
        history: RevisionHistory | None = None,
        lookup_limiter: LookupLimiter | None = None,
        clock: Clock | None = None,
        on_tenant_loaded: Callable[[Tenant], None] | None = None,
        header_options: HeaderOptions | None = None,
        fresh_seconds: float = FRESH_SECONDS,
        stale_seconds: float = STALE_SECONDS,
        lookup_seconds: float = LOOKUP_SECONDS,
        max_tenants: int = MAX_CACHED_TENANTS,
        max_keys: int = MAX_CACHED_KEYS,
    ) -> None:
        clock = clock or SystemClock()
        self._health = DatabaseHealth(clock)
        self._freshness = Freshness(clock, self._health, fresh_seconds, stale_seconds)
        self._validator = CopyValidator(history or RevisionHistory(), self._health, max_tenants)
        self._flights = SingleFlight(self._background_read_failed)
        self._reader = ConfigReader(source, copies, self._validator, self._health, self._freshness, lookup_seconds)
        self._caller_index = CallerIndex()
        self._cached_tenants: dict[str, CachedTenant] = {}
        self._operator = OperatorCache(
            self._cached_tenants, self._reader, self._validator, self._flights, self._freshness, clock
        )
        self._keys = KeyCache(
            self._caller_index,
            self._reader,
            self._validator,
            self._flights,
            self._freshness,
            clock,
            lookup_limiter=lookup_limiter,
            lookup_seconds=lookup_seconds,
            max_keys=max_keys,
        )
        self._tenants = TenantCache(
            self._cached_tenants,
            self._operator,
            self._caller_index,
            self._reader,
            self._validator,
            self._flights,
            self._freshness,
            clock,
            on_loaded=on_tenant_loaded,
            on_deleted=self._keys.forget_tenant,
            header_options=header_options or HeaderOptions(),
            max_tenants=max_tenants,
        )
        self.callers = CallerCache(peppers, self._keys, self._tenants, self._caller_index, clock, lookup_seconds)

    async def find_tenant(self, tenant_id: str) -> CachedTenant:
        """Return a tenant; read it first if it is not in memory. Raises `UnknownKey` if it does not exist."""
        return await self._tenants.find(tenant_id)

    def status(self) -> CacheStatus:
        since_us = self._health.stale_since_us
        return CacheStatus(
            tenants=len(self._cached_tenants),
            keys=len(self._keys.keys),
            unknown=len(self._keys.unknown),
            loads=self._tenants.loads + self._keys.loads,
            stale_since=None if since_us is None else since_us / US_PER_SECOND,
        )

    # --- Changes ----------------------------------------------------------------------------------------------------

    async def apply_changes(self, announcements: Sequence[Announcement]) -> None:
        """Read all cached entities again that these announcements concern, before this returns."""
        reads: list[Awaitable[Any]] = []
        for announcement in announcements:  # removals first: a key may have moved to another tenant
            for key_id in announcement.gone:
                self._keys.apply_removal(key_id, announcement)
        for announcement in announcements:
            changed = [key_id for key_id in announcement.keys if self._keys.note_change(key_id, announcement)]
            reads += [self._keys.apply_change(key_id, announcement) for key_id in changed]
            if announcement.config:
                cache = self._operator if announcement.tenant_id == OPERATOR else self._tenants
                reads.append(cache.apply_change(announcement))
        for result in await asyncio.gather(*reads, return_exceptions=True):
            if isinstance(result, CatalogUnavailable):
                self._health.read_failed(result)
            elif isinstance(result, Exception):
                self._freshness.note_unapplied_change()
                log_event(
                    _log,
                    logging.ERROR,
                    "catalog.change_not_applied",
                    "could not apply a configuration change, keeping the previous one",
                    exc_info=result,
                )
            elif isinstance(result, BaseException):
                raise result

    def clear(self) -> None:
        """Discard all entries, and repeat all running reads: the database was restored, or changes were missed."""
        self._validator.clear()
        self._freshness.unconfirm()
        self._operator.entry = None
        self._tenants.clear()
        self._keys.keys.clear()
        self._keys.unknown.clear()
        self._caller_index.by_fingerprint.clear()

    def revalidate_all(self) -> None:
        """Compare each entry with its copy at the next use: the database is unavailable, or messages were missed."""
        self._freshness.unconfirm()
        for tenant in self._cached_tenants.values():
            tenant.fresh_until_us = 0
        for key in self._keys.keys.values():
            key.fresh_until_us = 0
        if self._operator.entry is not None:
            self._operator.entry.fresh_until_us = 0

    def mark_unreachable(self) -> None:
        """Use copies without asking the database first, since it does not answer."""
        if not self._health.is_unreachable:
            self._health.is_unreachable = True
            self.revalidate_all()

    def mark_reachable(self) -> None:
        self._health.is_unreachable = False
        self._health.read_succeeded()

    def confirm_up_to_date(self) -> None:
        """Note that this process has seen all changes up to now, so that entries are current without reading them."""
        self._freshness.confirm()
        self._operator.ensure_read_from_database()  # otherwise an operator read from a copy would stay unverified

    def open(self) -> None:
        """Accept lookups again after `close`."""
        self._flights.open()

    async def close(self) -> None:
        await self._flights.close()
        await self._reader.close()

    def _background_read_failed(self, error: BaseException) -> None:
        if isinstance(error, CatalogUnavailable):
            self._health.read_failed(error)
        elif not isinstance(error, UnknownKey | TooManyUnknownKeys):
            log_event(
                _log,
                logging.ERROR,
                "catalog.refresh_failed",
                "could not read configuration again, keeping the previous one",
                exc_info=error,
            )
