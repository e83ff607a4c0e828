"""How long cached entries are served without reading them again, and whether the database is available."""

import logging

from limitforge.catalog.live.cache.entries import CachedTenant, CacheEntry
from limitforge.core.clock import LONG_AGO_US, Clock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import CatalogUnavailable
from limitforge.observability.events import log_event

FRESH_SECONDS = 60.0
STALE_SECONDS = 3_600.0
RETRY_US = US_PER_SECOND  # how soon a failed read is repeated
OUTAGE_FRESH_US = 10 * US_PER_SECOND  # how often entries are compared with their copies while the database is down

_log = logging.getLogger(__name__)


class DatabaseHealth:
    """What the cache knows of the database.

    Two states, because either kind of read may fail without the other. `LiveCatalog` sets `is_unreachable` (by
    `CatalogCache.mark_unreachable`) while it can't read the outbox; it also keeps `_is_database_ok` for its status and
    log event. The reads of the cache itself set `stale_since_us` when one fails; the next success of any of them, or of
    reading the outbox, clears it. `LiveCatalog.status` reports the database as degraded in both states.
    """

    def __init__(self, clock: Clock) -> None:
        self.is_unreachable = False
        """True if copies are to be used without asking the database first."""
        self.stale_since_us: int | None = None
        """Since when outdated entries are served, because the database can't be read."""
        self._clock = clock

    def read_failed(self, error: CatalogUnavailable | None = None) -> None:
        if self.stale_since_us is None:
            self.stale_since_us = self._clock.now_us()
            log_event(
                _log,
                logging.WARNING,
                "catalog.cache_stale",
                "the database is unavailable, serving cached configuration that may be out of date",
                error=error or "no database",
            )

    def read_succeeded(self) -> None:
        if self.stale_since_us is not None:
            self.stale_since_us = None
            log_event(
                _log,
                logging.WARNING,
                "catalog.cache_current",
                "the database is available, cached configuration is current again",
            )


class Freshness:
    """Sets the times until which entries are fresh and usable.

    An entry is fresh for a minute after a read. A process that has seen all changes up to now knows that its entries
    are current without reading them: `confirm` says so, and `mark_confirmed` then renews an entry.
    """

    def __init__(
        self,
        clock: Clock,
        health: DatabaseHealth,
        fresh_seconds: float = FRESH_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._clock = clock
        self._health = health
        self._fresh_us, self._stale_us = int(fresh_seconds * US_PER_SECOND), int(stale_seconds * US_PER_SECOND)
        self._confirmed_us = self._failed_us = LONG_AGO_US

    def mark_read_now(self, entry: CacheEntry) -> None:
        """Start the times of an entry that was just read."""
        now_us = self._clock.now_us()
        is_unreachable = self._health.is_unreachable
        entry.fresh_until_us = now_us + (min(self._fresh_us, OUTAGE_FRESH_US) if is_unreachable else self._fresh_us)
        entry.usable_until_us = now_us + self._stale_us

    def mark_confirmed(self, entry: CacheEntry) -> None:
        """Renew an entry as if it had been read when this process had last seen all changes."""
        entry.fresh_until_us = self._confirmed_us + self._fresh_us
        entry.usable_until_us = self._confirmed_us + self._stale_us

    def retry_soon(self, entry: CacheEntry) -> None:
        """Serve the entry for a second before it is read again."""
        entry.fresh_until_us = self._clock.now_us() + RETRY_US

    def keep_stale(self, entry: CachedTenant) -> CachedTenant:
        """Go on serving an entry that could not be read again."""
        entry.is_stale = True
        self.retry_soon(entry)
        self._health.read_failed()
        return entry

    def is_usable(self, entry: CacheEntry | None) -> bool:
        return entry is not None and self._clock.now_us() < entry.usable_until_us

    def is_confirmed(self, now_us: int) -> bool:
        """Return True if this process has seen all changes up to a moment less than `fresh_seconds` ago."""
        return now_us < self._confirmed_us + self._fresh_us

    def confirm(self) -> None:
        """Note that this process has seen all changes up to now. Ignored for a while after a change was not applied."""
        now_us = self._clock.now_us()
        if now_us - self._failed_us > self._fresh_us:
            self._confirmed_us = now_us

    def unconfirm(self) -> None:
        """Note that changes may have been missed."""
        self._confirmed_us = LONG_AGO_US

    def note_unapplied_change(self) -> None:
        """Note that a change could not be applied, so that entries must be read to be known as current."""
        self._failed_us = self._clock.now_us()
