"""The cached keys, and the ids of keys that are known not to exist."""

import contextlib

from limitforge.catalog.announcements import Announcement
from limitforge.catalog.credentials import Credential
from limitforge.catalog.history import Stamp
from limitforge.catalog.live.cache.copy_validator import CopyValidator
from limitforge.catalog.live.cache.entries import CachedKey, CallerIndex
from limitforge.catalog.live.cache.freshness import Freshness
from limitforge.catalog.live.cache.lookup_limiter import LookupLimiter
from limitforge.catalog.live.cache.reader import ConfigReader
from limitforge.catalog.live.cache.single_flight import SingleFlight
from limitforge.catalog.model import Key
from limitforge.core.clock import Clock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import CatalogError, UnknownKey

UNKNOWN_US = 10 * US_PER_SECOND  # how long an id that was not found is not looked up again
MAX_UNKNOWN = 10_000


class KeyCache:
    """Finds keys, reads them again from time to time, and applies announced changes."""

    def __init__(
        self,
        caller_index: CallerIndex,
        reader: ConfigReader,
        validator: CopyValidator,
        flights: SingleFlight,
        freshness: Freshness,
        clock: Clock,
        *,
        lookup_limiter: LookupLimiter | None,
        lookup_seconds: float,
        max_keys: int,
    ) -> None:
        self.keys: dict[str, CachedKey] = {}
        self.unknown: dict[str, int] = {}  # until when
        self.loads = 0
        self._caller_index = caller_index
        self._reader = reader
        self._validator = validator
        self._flights = flights
        self._freshness = freshness
        self._clock = clock
        self._lookup_limiter = lookup_limiter or LookupLimiter()
        self._copy_limiter = LookupLimiter.for_copies()
        self._lookup_seconds = lookup_seconds
        self._max_keys = max_keys

    async def find(self, credential: Credential, client: str) -> CachedKey:
        """Return a key; look it up if it is not in memory.

        Raises `UnknownKey` if it does not exist, and `TooManyUnknownKeys` if `client` has sent too many such keys.
        """
        key_id = f"key_{credential.id}"
        now_us = self._clock.now_us()
        entry = self.keys.get(key_id)
        if entry is not None and now_us < entry.usable_until_us:
            if now_us >= entry.fresh_until_us:
                self.renew_or_reread(entry)
            return entry
        unknown_until_us = self.unknown.get(key_id)
        if unknown_until_us is not None and now_us < unknown_until_us:
            raise UnknownKey("unknown or expired key")
        if credential.has_keyed_checksum:  # only we can make such a key, so it exists or existed
            return await self._read(key_id)
        # Each client has a lookup of its own, since the limiter may refuse one client and allow another.
        return await self._flights.run(("limited", key_id, client), lambda _: self._read_limited(key_id, client))

    def renew_or_reread(self, entry: CachedKey) -> None:
        """Renew an entry that is no longer fresh: at once if it is known to be current, else by a background read."""
        is_confirmed = self._freshness.is_confirmed(self._clock.now_us())
        if is_confirmed and entry.is_from_database and not entry.has_unread_change:
            self._freshness.mark_confirmed(entry)
            return
        self._freshness.retry_soon(entry)
        key_id, needs_newer = entry.key.id, is_confirmed or entry.has_unread_change
        self._flights.start_in_background(
            ("key", key_id), lambda must_be_newer: self._load(key_id, must_be_newer=must_be_newer or needs_newer)
        )

    def apply_removal(self, key_id: str, announcement: Announcement) -> None:
        """Forget a key that a tenant no longer has."""
        name = ("key", key_id)
        known = self.keys.get(key_id)
        newest = self._validator.required_stamp(name) if known is None else known.stamp
        if newest.includes(announcement.stamp):  # the announcement is late: another tenant has the key now
            return
        self.forget(key_id)
        self._flights.mark_changed(name)
        self._validator.require(name, announcement.stamp)

    def note_change(self, key_id: str, announcement: Announcement) -> bool:
        """Note an announced change of a key. Return True if `apply_change` must follow."""
        name = ("key", key_id)
        self.unknown.pop(key_id, None)
        self._validator.require(name, announcement.stamp)
        known = self.keys.get(key_id)
        if known is not None and known.stamp.includes(announcement.stamp):
            return False
        self._flights.mark_changed(name)
        return known is not None or name in self._flights

    async def apply_change(self, key_id: str, announcement: Announcement) -> None:
        """Read a key again if it is still cached."""
        known = self.keys.get(key_id)
        is_revoked = key_id in announcement.revoked
        if known is not None and is_revoked and await self._revoke_by_copy(known, announcement.stamp):
            return
        if key_id in self.keys or ("key", key_id) in self._flights:
            known = self.keys.get(key_id)
            if known is not None:
                known.has_unread_change, known.fresh_until_us = True, 0
            with contextlib.suppress(UnknownKey):
                await self._read(key_id, must_be_newer=True)

    def forget(self, key_id: str) -> None:
        """Remove a key, and remember for a while that it does not exist."""
        entry = self.keys.pop(key_id, None)
        if entry is not None:
            self._caller_index.remove_callers_of(entry)
        self.unknown.pop(key_id, None)
        self.unknown[key_id] = self._clock.now_us() + UNKNOWN_US
        if len(self.unknown) > MAX_UNKNOWN:
            del self.unknown[next(iter(self.unknown))]

    def forget_tenant(self, tenant_id: str) -> None:
        for key_id in [each.key.id for each in self.keys.values() if each.key.tenant_id == tenant_id]:
            self.forget(key_id)

    async def _revoke_by_copy(self, known: CachedKey, stamp: Stamp) -> bool:
        """Stop serving the old state of a key that lost rights without waiting for the database.

        Return True if a copy has the new state. Otherwise the key is not served until it has been read.
        """
        copy = await self._reader.copy_of_key(known.key.id)
        if self.keys.get(known.key.id) is not known:
            return False
        if copy is not None and copy.value is not None and self._validator.is_current(copy, stamp, known):
            self._store(copy.value, copy.stamp, is_from_database=False)
            return True
        del self.keys[known.key.id]
        self._caller_index.remove_callers_of(known)
        return False

    async def _read_limited(self, key_id: str, client: str) -> CachedKey:
        """Look up a key that may be made up: from a copy, else from the database if the limiter allows it."""
        if self._reader.has_copies and await self._has_copy(key_id, client):
            return await self._read(key_id)
        return await self._lookup_limiter.run(client, lambda: self._read(key_id), seconds=self._lookup_seconds)

    async def _has_copy(self, key_id: str, client: str) -> bool:
        """Return True if a usable copy exists. False also on errors, or if `client` asked for too many unknown keys."""

        async def find() -> None:
            copy, known = await self._reader.copy_of_key(key_id), self.keys.get(key_id)
            if copy is None or not self._validator.may_replace_database_read(
                copy, ("key", key_id), known, must_be_newer=False
            ):
                raise UnknownKey("no copy")

        try:
            await self._copy_limiter.run(client, find, seconds=self._lookup_seconds)
        except CatalogError:
            return False
        return True

    async def _read(self, key_id: str, *, must_be_newer: bool = False) -> CachedKey:
        return await self._flights.run(
            ("key", key_id),
            lambda must_be_newer: self._load(key_id, must_be_newer=must_be_newer),
            must_be_newer=must_be_newer,
        )

    async def _load(self, key_id: str, *, must_be_newer: bool) -> CachedKey:
        while True:
            clear_count = self._validator.clear_count
            result = await self._reader.read_key(key_id, self.keys.get(key_id), must_be_newer=must_be_newer)
            if self._validator.is_read_valid(clear_count, ("key", key_id), result.stamp):
                break
        self.loads += 1
        if result.value is None:
            self.forget(key_id)
            raise UnknownKey("unknown or expired key")
        return self._store(result.value, result.stamp, is_from_database=result.is_from_database)

    def _store(self, key: Key, stamp: Stamp, *, is_from_database: bool) -> CachedKey:
        entry = self.keys.pop(key.id, None)
        if entry is None or entry.key != key:
            if entry is not None:
                self._caller_index.remove_callers_of(entry)
            entry = CachedKey(key)
        self._freshness.mark_read_now(entry)
        entry.has_unread_change = False
        entry.is_from_database, entry.stamp = is_from_database, stamp
        self.keys[key.id] = entry
        while len(self.keys) > self._max_keys:
            oldest = next(iter(self.keys))
            self._caller_index.remove_callers_of(self.keys.pop(oldest))
        return entry
