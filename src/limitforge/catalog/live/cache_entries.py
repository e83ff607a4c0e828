"""What a node remembers of one key and of one tenant, and who presented a right key."""

from typing import Any

import msgspec

from limitforge.catalog.history import Stamp
from limitforge.catalog.model import Key, KeyScope
from limitforge.catalog.snapshot import Snapshot
from limitforge.errors import Forbidden


class CachedTenant(msgspec.Struct, eq=False):
    """A tenant as this node knows it; callers hold it, so that a new snapshot reaches them all at once."""

    snapshot: Snapshot
    fresh_until_us: int
    usable_until_us: int
    fingerprints: set[bytes]
    """The fingerprints of its callers, who are forgotten with it."""
    is_stale: bool = False
    """Whether it could not be read again when it was time to."""
    is_deleted: bool = False
    is_from_database: bool = False
    """Whether it was read from the database, and not from a copy."""
    stamp: Stamp = Stamp()
    """How new it is at least."""


class CachedKey(msgspec.Struct, eq=False):
    """A key as this node knows it, with the fingerprints of those secrets of it that were seen and recognised."""

    key: Key
    fresh_until_us: int
    usable_until_us: int
    fingerprints: set[bytes]
    has_unread_change: bool = False
    """Whether it is known to have changed, and could not be read since: a copy of it may be the old one."""
    is_from_database: bool = False
    stamp: Stamp = Stamp()


class Caller(msgspec.Struct, eq=False):
    """Whoever presented a right key. Recognised once, until the key changes or ends."""

    key: Key
    tenant: CachedTenant
    cached_key: CachedKey
    expires_at_us: int
    """When the key, or this secret of it, stops being good."""
    routes: dict[tuple[str, str | None, str | None], Any] = {}
    """What whoever serves this caller has worked out for it: it goes when the caller does."""

    @property
    def snapshot(self) -> Snapshot:
        return self.tenant.snapshot

    @property
    def is_stale(self) -> bool:
        """Whether it is served from memory because the database can't be reached."""
        return self.tenant.is_stale

    def require(self, scope: KeyScope) -> None:
        """Refuse a right key that may not do this."""
        if self.key.disabled:
            raise Forbidden("this key is disabled")
        if self.tenant.snapshot.config.tenant.suspended:
            raise Forbidden("this tenant is suspended")
        if scope not in self.key.scopes:
            raise Forbidden(f"this key lacks the scope {scope}")


class CacheStatus(msgspec.Struct, frozen=True):
    """`stale_since` is when the database was first missed (epoch seconds), None while all is well."""

    tenants: int
    keys: int
    unknown: int
    loads: int
    stale_since: float | None
