"""The entries of the configuration cache: tenants, keys, and the callers who presented a valid key."""

from typing import Any

import msgspec

from limitforge.catalog.history import Stamp
from limitforge.catalog.model import Key, KeyScope
from limitforge.catalog.snapshot import Snapshot
from limitforge.errors import Forbidden


class CacheEntry(msgspec.Struct, eq=False, kw_only=True):
    """State that cached tenants and cached keys have in common."""

    fresh_until_us: int = 0
    """The entry is served without reading it again until then."""
    usable_until_us: int = 0
    """The entry is served while it is being read again, or the database is unavailable, until then."""
    fingerprints: set[bytes] = msgspec.field(default_factory=set)
    """The fingerprints of the keys that callers presented. Removing the entry removes these callers."""
    is_from_database: bool = False
    """True if the entry was read from the database, False if it was read from a copy."""
    stamp: Stamp = Stamp()
    """The entry includes all changes up to this one, and perhaps later ones."""


class CachedTenant(CacheEntry, eq=False):
    """A tenant in memory. Callers hold a reference to it, so a new snapshot takes effect for all of them at once."""

    snapshot: Snapshot
    is_stale: bool = False
    """True after the last attempt to read it again has failed."""
    is_deleted: bool = False


class CachedKey(CacheEntry, eq=False):
    """A key in memory, with the fingerprints of those of its secrets that callers have presented."""

    key: Key
    has_unread_change: bool = False
    """True if the key has changed and could not be read since. A copy of it may then be out of date."""


class Caller(msgspec.Struct, eq=False):
    """An authenticated caller. It stays in memory until its key changes or expires."""

    key: Key
    tenant: CachedTenant
    cached_key: CachedKey
    expires_at_us: int
    """When the key, or the secret of it that the caller presented, expires."""
    prepared_resources: dict[tuple[str, str | None, str | None], Any] = {}
    """Data that the service derives for this caller. It is discarded together with the caller."""

    @property
    def snapshot(self) -> Snapshot:
        return self.tenant.snapshot

    @property
    def is_stale(self) -> bool:
        """True while the tenant is served from memory because the database is unavailable."""
        return self.tenant.is_stale

    def require(self, scope: KeyScope) -> None:
        """Raise `Forbidden` if the key is disabled or lacks `scope`, or if the tenant is suspended."""
        if self.key.disabled:
            raise Forbidden("this key is disabled")
        if self.tenant.snapshot.config.tenant.suspended:
            raise Forbidden("this tenant is suspended")
        if scope not in self.key.scopes:
            raise Forbidden(f"this key lacks the scope {scope}")


class CallerIndex:
    """Callers by the fingerprint of the key that they presented."""

    def __init__(self) -> None:
        self.by_fingerprint: dict[bytes, Caller] = {}

    def add(self, fingerprint: bytes, caller: Caller) -> None:
        self.by_fingerprint[fingerprint] = caller
        caller.cached_key.fingerprints.add(fingerprint)
        caller.tenant.fingerprints.add(fingerprint)

    def remove_callers_of(self, entry: CacheEntry) -> None:
        """Remove the callers of a tenant or of a key."""
        fingerprints, entry.fingerprints = entry.fingerprints, set()
        for fingerprint in fingerprints:
            caller = self.by_fingerprint.pop(fingerprint, None)
            if caller is not None:
                caller.tenant.fingerprints.discard(fingerprint)
                caller.cached_key.fingerprints.discard(fingerprint)


class CacheStatus(msgspec.Struct, frozen=True):
    """The size of the cache. `stale_since` is when the database became unavailable (epoch seconds), else None."""

    tenants: int
    keys: int
    unknown: int
    loads: int
    stale_since: float | None
