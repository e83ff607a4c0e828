"""What a node remembers: keys, and compiled snapshots of their tenants. A warm look-up does no I/O.

What is older than its TTL is still served while it is read again; what can't be read again because the database is down
is served for longer, and says that it is stale. Everything is bounded.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from limitforge.catalog.config.plan_warnings import log_plan_warnings
from limitforge.catalog.credentials import Credential, Peppers, fingerprint
from limitforge.catalog.database.outbox import Announcement
from limitforge.catalog.history import RevisionHistory, Stamp
from limitforge.catalog.live.bounded_reads import LOOKUP_SECONDS, BoundedReads
from limitforge.catalog.live.cache_entries import CachedKey, CachedTenant, CacheStatus, Caller
from limitforge.catalog.live.copy_validator import CopyValidator, includes_change
from limitforge.catalog.live.lookup_limiter import LookupLimiter
from limitforge.catalog.live.sources import ConfigSource, SharedCopies, SharedCopy
from limitforge.catalog.model import OPERATOR, Key, Tenant, TenantConfig, to_datetime
from limitforge.catalog.snapshot import Snapshot
from limitforge.core.clock import LONG_AGO_US, Clock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.core.headers import HeaderOptions
from limitforge.errors import CatalogError, CatalogUnavailable, TooManyUnknownKeys, UnknownKey

FRESH_SECONDS = 60.0
STALE_SECONDS = 3_600.0
RETRY_SECONDS = 1.0  # how soon a refresh that failed is tried again
AWAY_SECONDS = 10.0  # how often what is in use is compared with its copy while the database is away
UNKNOWN_SECONDS = 10.0
PATIENCE = 1.5  # times the deadline of a look-up
CLOSE_SECONDS = 1.0
MAX_TENANTS = 10_000
MAX_KEYS = 100_000
MAX_UNKNOWN = 10_000

_log = logging.getLogger(__name__)
Loaded = TypeVar("Loaded")
Load = Callable[[bool], Awaitable[Loaded]]


class CatalogCache:
    """Keys and snapshots by what callers present. For one event loop."""

    def __init__(  # noqa: PLR0913 - one argument a bound
        self,
        source: ConfigSource,
        peppers: Peppers,
        *,
        copies: SharedCopies | None = None,
        history: RevisionHistory | None = None,
        guard: LookupLimiter | None = None,
        clock: Clock | None = None,
        on_tenant_loaded: Callable[[Tenant], None] | None = None,
        form: HeaderOptions | None = None,
        fresh_seconds: float = FRESH_SECONDS,
        stale_seconds: float = STALE_SECONDS,
        lookup_seconds: float = LOOKUP_SECONDS,
        max_tenants: int = MAX_TENANTS,
        max_keys: int = MAX_KEYS,
    ) -> None:
        self._origin = source
        self._peppers = peppers
        self._warm = copies
        self._accepts = CopyValidator(history or RevisionHistory(), max_tenants)
        self._lookups = BoundedReads(lookup_seconds)
        self._guard = guard or LookupLimiter()
        self._copy_guard = LookupLimiter.for_copies()
        self._clock = clock or SystemClock()
        self._now_us = self._clock.now_us
        self._placed = on_tenant_loaded
        self._form = form or HeaderOptions()
        self._fresh_us, self._stale_us = int(fresh_seconds * US_PER_SECOND), int(stale_seconds * US_PER_SECOND)
        self._max_tenants, self._max_keys = max_tenants, max_keys
        self._operator: CachedTenant | None = None
        self._tenants: dict[str, CachedTenant] = {}
        self._keys: dict[str, CachedKey] = {}
        self._callers: dict[bytes, Caller] = {}
        self._unknown: dict[str, int] = {}
        self._flights: dict[Hashable, asyncio.Task[Any]] = {}
        self._changed: set[Hashable] = set()
        """What was announced to have changed while it was being read: it is read once more."""
        self._used: dict[str, int] = {}
        self._loads = 0
        self._is_closed = False
        self._era = 0
        """How often everything was discarded: what was being read meanwhile is read again."""
        self._stale_since_us: int | None = None
        self._confirmed_us = self._doubted_us = LONG_AGO_US

    # --- Looking up --------------------------------------------------------------------------------------------------

    def cached_caller(self, text: str) -> Caller | None:
        """Whose key this is, if that is known here: no I/O. None if it must be looked up with `find`."""
        return self.cached_caller_by_fingerprint(fingerprint(text))

    def cached_caller_by_fingerprint(self, mark: bytes) -> Caller | None:
        """The same, by the key's fingerprint."""
        caller = self._callers.get(mark)
        if caller is None:
            return None
        now_us = self._now_us()
        tenant = caller.tenant
        entry = caller.cached_key
        if now_us >= caller.expires_at_us or now_us >= tenant.usable_until_us or now_us >= entry.usable_until_us:
            return None
        if now_us >= tenant.fresh_until_us or now_us >= entry.fresh_until_us:
            self._refresh_soon(caller, now_us)
        self._used[caller.key.id] = now_us
        return caller

    def is_invalid_key(self, text: str) -> bool:
        """Whether this can't be a key that was issued: no I/O."""
        try:
            Credential.parse(text, self._peppers)
        except UnknownKey:
            return True
        return False

    async def find_caller(self, text: str, client: str = "") -> Caller:
        """Whose key this is. `source` is where it came from: one that sends many wrong keys is made to wait.

        Raises `UnknownKey`, `TooManyUnknownKeys`, or `CatalogUnavailable`.
        """
        caller = self.cached_caller(text)
        if caller is not None:
            return caller
        credential = Credential.parse(text, self._peppers)
        try:
            # Each read of its own has a deadline; this one is for reads that others have begun without any.
            async with asyncio.timeout(PATIENCE * self._lookups.seconds):
                return await self._find(text, credential, client)
        except TimeoutError:
            raise CatalogUnavailable("the configuration could not be read in time") from None

    async def _find(self, text: str, credential: Credential, source: str) -> Caller:
        entry = await self._key_entry(credential, source)
        now_us = self._clock.now_us()
        self._peppers.authenticate(credential, entry.key, to_datetime(now_us))
        tenant = await self.find_tenant(entry.key.tenant_id)
        self._used[entry.key.id] = now_us
        return self._remember(text, credential, entry, tenant)

    async def find_tenant(self, tenant_id: str) -> CachedTenant:
        """The snapshot of a tenant; `UnknownKey` if it is gone."""
        now_us = self._clock.now_us()
        entry = self._tenants.get(tenant_id)
        if entry is None or now_us >= entry.usable_until_us:
            entry = await self._once(("tenant", tenant_id), lambda is_told: self._load_tenant(tenant_id, is_told))
        elif now_us >= entry.fresh_until_us:
            self._refresh_tenant_soon(tenant_id, entry, now_us)
        if entry.is_deleted:
            raise UnknownKey("no such key, or it is no longer good")
        return entry

    def take_last_used(self) -> dict[str, int]:
        """Which keys were used since this was last asked, and when."""
        used, self._used = self._used, {}
        return used

    def status(self) -> CacheStatus:
        since = None if self._stale_since_us is None else self._stale_since_us / US_PER_SECOND
        return CacheStatus(len(self._tenants), len(self._keys), len(self._unknown), self._loads, since)

    # --- Hearing of changes ------------------------------------------------------------------------------------------

    async def apply_changes(self, announcements: Sequence[Announcement]) -> None:
        """Act on changes: whatever is known here of what has changed is read again before this returns."""
        again: list[Awaitable[Any]] = []
        for told in announcements:
            for key_id in told.gone:  # first of all: a key may have moved to another tenant
                self._heard_gone(key_id, told)
        for told in announcements:
            again += [self._heard_key(key_id, told) for key_id in told.keys if self._is_affected(key_id, told)]
            if told.config:
                again.append(self._heard_config(told))
        for answer in await asyncio.gather(*again, return_exceptions=True):
            if isinstance(answer, CatalogUnavailable):
                self._missed(answer)
            elif isinstance(answer, Exception):
                self._doubted_us = self._clock.now_us()
                _log.error("a change can't be acted on: what was known before decides on", exc_info=answer)
            elif isinstance(answer, BaseException):
                raise answer

    def clear(self) -> None:
        """Discard everything that is known, and read what is asked for again: too much was missed to tell what has
        changed, or the database was restored. What is being read just now is read once more.
        """
        self._era += 1
        self._accepts.required_stamps.clear()
        self._unknown.clear()
        self._confirmed_us = LONG_AGO_US
        self._operator = None
        for tenant_id in list(self._tenants):
            self._forget_tenant(tenant_id)
        self._keys.clear()
        self._callers.clear()

    def revalidate_all(self) -> None:
        """Compare everything with its copy when it is next used: the database is away, or messages were missed."""
        self._confirmed_us = LONG_AGO_US
        for tenant in self._tenants.values():
            tenant.fresh_until_us = 0
        for key in self._keys.values():
            key.fresh_until_us = 0
        if self._operator is not None:
            self._operator.fresh_until_us = 0

    def mark_unreachable(self) -> None:
        """The database does not answer, as the node has found: copies are taken without asking it first."""
        if not self._accepts.is_database_unreachable:
            self._accepts.is_database_unreachable = True
            self.revalidate_all()

    def confirm_up_to_date(self) -> None:
        """Every change up to now was heard of: what is known here need not be read again to be believed."""
        now_us = self._clock.now_us()
        if now_us - self._doubted_us > self._fresh_us:
            self._confirmed_us = now_us
        if (
            self._operator is not None and not self._operator.is_from_database
        ):  # nobody else would come to read it again
            self._soon("operator", lambda _: self._load_operator(is_told=True))

    def mark_reachable(self) -> None:
        """The database answers, as somebody else has found."""
        self._accepts.is_database_unreachable = False
        self._recovered()

    def restore_last_used(self, used: Mapping[str, int]) -> None:
        """What could not be written is told again."""
        self._used = {**used, **self._used}

    def open(self) -> None:
        """After `close`, to be used again."""
        self._is_closed = False

    async def close(self) -> None:
        """Let what is being read come to its end, if that is soon: a driver that is cut off may leave a thread."""
        self._is_closed = True
        if self._flights:
            await asyncio.wait(list(self._flights.values()), timeout=CLOSE_SECONDS)
        while self._flights:
            for flight in self._flights.values():
                flight.cancel()
            await asyncio.wait(list(self._flights.values()), timeout=CLOSE_SECONDS)
            for name, flight in list(self._flights.items()):
                if flight.done():  # it was cancelled before it began, and has not removed itself
                    del self._flights[name]
        await self._lookups.close()

    def _heard_gone(self, key_id: str, row: Announcement) -> None:
        """Forget a key of a tenant. A message that comes late says nothing of a key that has been set up since."""
        name = ("key", key_id)
        known = self._keys.get(key_id)
        newest = self._accepts.required_stamp(name) if known is None else known.stamp
        if newest.covers(row.stamp):
            return
        self._forget_key(key_id)
        self._mark_changed(name)
        self._accepts.require(name, row.stamp)

    def _is_affected(self, key_id: str, told: Announcement) -> bool:
        """Take note of a changed key. Returns True if something of it is known here, and is older than that."""
        name = ("key", key_id)
        self._unknown.pop(key_id, None)
        self._accepts.require(name, told.stamp)
        known = self._keys.get(key_id)
        if known is not None and known.stamp.covers(told.stamp):
            return False
        self._mark_changed(name)
        return known is not None or name in self._flights

    async def _heard_key(self, key_id: str, told: Announcement) -> None:
        known = self._keys.get(key_id)
        if known is not None and key_id in told.revoked and await self._revoke_key(known, told.stamp):
            return
        if key_id in self._keys or ("key", key_id) in self._flights:
            await self._reload_key(key_id)

    async def _revoke_key(self, known: CachedKey, told: Stamp) -> bool:
        """Stop serving what is known of a key that may do less now, without waiting for the database: a copy says what
        is left of it. Without one it is not served until it was read. Returns True if a copy has said it.
        """
        copy = None if self._warm is None else await self._warm.get_key(known.key.id)
        if self._keys.get(known.key.id) is not known:
            return False
        if copy is not None and copy.value is not None and self._accepts.is_current(copy, told, known):
            self._place_key(copy.value, copy.stamp)
            return True
        del self._keys[known.key.id]
        self._forget_seen(known)
        return False

    async def _heard_config(self, told: Announcement) -> None:
        tenant_id = told.tenant_id
        self._accepts.require(tenant_id, told.stamp)
        if tenant_id == OPERATOR:
            if self._operator is not None and includes_change(self._operator, told):
                return
            self._mark_changed("operator")
            if self._operator is not None or "operator" in self._flights:
                await self._reload_operator()
            return
        entry = self._tenants.get(tenant_id)
        if entry is not None and includes_change(entry, told):
            return
        self._mark_changed(("tenant", tenant_id))
        if entry is not None and tenant_id in told.revoked and await self._revoke_tenant(tenant_id, entry, told.stamp):
            return
        if tenant_id in self._tenants or ("tenant", tenant_id) in self._flights:
            await self._reload_tenant(tenant_id)

    async def _revoke_tenant(self, tenant_id: str, known: CachedTenant, told: Stamp) -> bool:
        """The same for a tenant that was suspended."""
        copy = None if self._warm is None else await self._warm.get_config(tenant_id)
        if self._tenants.get(tenant_id) is not known:
            return False
        if copy is not None and copy.value is not None and self._accepts.is_current(copy, told, known):
            operator = self._operator
            if operator is not None:
                self._place_tenant(tenant_id, copy.value, operator, copy.stamp)
                return True
        self._forget_tenant(tenant_id)
        return False

    # --- Reading -----------------------------------------------------------------------------------------------------

    async def _once(self, name: Hashable, load: Load[Loaded], *, is_told: bool = False) -> Loaded:
        """Single flight: all who want the same wait for one load of it."""
        if self._is_closed and name not in self._flights:
            raise CatalogUnavailable("this node is ending")
        flight = self._flights.get(name) or self._start(name, load, is_told=is_told)
        try:
            loaded: Loaded = await asyncio.shield(flight)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if flight.cancelled() and (task is None or not task.cancelling()):
                raise CatalogUnavailable("this node is ending") from None
            raise
        return loaded

    def _start(self, name: Hashable, load: Load[Any], *, is_told: bool) -> asyncio.Task[Any]:
        self._changed.discard(name)
        flight = self._flights[name] = asyncio.get_running_loop().create_task(self._fly(name, load, is_told=is_told))
        flight.add_done_callback(_look_at)
        return flight

    async def _fly(self, name: Hashable, load: Load[Loaded], *, is_told: bool) -> Loaded:
        """`is_told` tells that it was announced to have changed, so that a copy of it may be out of date. What changes
        while it is read is read once more.
        """
        try:
            while True:
                try:
                    loaded = await load(is_told)
                except UnknownKey:
                    if name not in self._changed:
                        raise
                else:
                    if name not in self._changed:
                        return loaded
                self._changed.discard(name)
                is_told = True
        finally:
            self._changed.discard(name)
            del self._flights[name]

    def _mark_changed(self, name: Hashable) -> None:
        if name in self._flights:
            self._changed.add(name)

    async def _load_tenant(self, tenant_id: str, is_told: bool) -> CachedTenant:  # noqa: FBT001 - as flights call it
        await self._operator_entry()
        self._loads += 1
        while True:
            era, known = self._era, self._tenants.get(tenant_id)
            try:
                read, is_sure = await self._read_config(tenant_id, known, is_told=is_told)
            except CatalogUnavailable:
                if known is None or self._clock.now_us() >= known.usable_until_us:
                    raise
                return self._keep_stale(known)
            operator = await self._operator_entry()
            if self._is_still_right(era, tenant_id, read.stamp):
                break
        entry = self._place_tenant(tenant_id, read.value, operator, read.stamp)
        entry.is_from_database = is_sure
        return entry

    async def _read_config(
        self, tenant_id: str, known: CachedTenant | None, *, is_told: bool
    ) -> tuple[SharedCopy[TenantConfig], bool]:
        """From a copy, unless that is older than what is known or announced, or nothing but the truth will do; and
        whether it is the truth. A copy that may be out of date is better than nothing.
        """
        copy = None if self._warm is None else await self._warm.get_config(tenant_id)
        if copy is not None and self._accepts.is_sufficient(copy, tenant_id, known, is_told=is_told):
            return copy, False
        stamp = self._accepts.stamp_for_read(tenant_id)
        has_copy = copy is not None and self._accepts.is_current(copy, self._accepts.required_stamp(tenant_id), known)
        try:
            config = await self._lookups.read(
                lambda: self._origin.config(tenant_id), has_deadline=has_copy or not self._is_usable(known)
            )
        except CatalogUnavailable as error:
            if copy is None or not self._accepts.is_current(copy, self._accepts.required_stamp(tenant_id), known):
                raise
            self._missed(error)
            return copy, False
        self._recovered()
        if config is None and copy is not None and copy.value is not None:
            self._accepts.require(tenant_id, stamp)  # a copy of before the deletion may be put back again
        if self._warm is not None and config is not None:
            await self._warm.refresh_config(tenant_id, config, stamp)
        return SharedCopy(stamp, config), True

    def _is_still_right(self, era: int, name: Hashable, stamp: Stamp) -> bool:
        """Return False if what was read must be read again: a change was announced meanwhile, or all was discarded."""
        return era == self._era and stamp.covers(self._accepts.required_stamp(name))

    def _is_usable(self, known: CachedTenant | CachedKey | None) -> bool:
        return known is not None and self._clock.now_us() < known.usable_until_us

    def _place_tenant(
        self, tenant_id: str, config: TenantConfig | None, operator: CachedTenant, stamp: Stamp
    ) -> CachedTenant:
        now_us = self._clock.now_us()
        entry = self._tenants.get(tenant_id)
        if config is None:
            self._tenants.pop(tenant_id, None)
            gone = entry or CachedTenant(operator.snapshot, now_us, now_us, set())
            gone.is_deleted, gone.usable_until_us = True, 0
            for key_id in [each.key.id for each in self._keys.values() if each.key.tenant_id == tenant_id]:
                self._forget_key(key_id)
            return gone
        if self._placed is not None:
            self._placed(config.tenant)
        if entry is None or entry.snapshot.config != config:
            log_plan_warnings(config)
        if entry is None:
            entry = CachedTenant(Snapshot(config, operator.snapshot.config, self._form), 0, 0, set())
        elif entry.snapshot.config != config:
            entry.snapshot = Snapshot(config, operator.snapshot.config, self._form)
        elif entry.snapshot.operator is not operator.snapshot.config:
            entry.snapshot = entry.snapshot.with_operator(operator.snapshot.config)
        self._tenants.pop(tenant_id, None)  # so that the first of them is the one that was not read for longest
        entry.fresh_until_us, entry.usable_until_us = self._fresh_until_us(now_us), now_us + self._stale_us
        entry.is_stale = entry.is_deleted = entry.is_from_database = False
        entry.stamp = stamp
        self._tenants[tenant_id] = entry
        while len(self._tenants) > self._max_tenants:
            self._forget_tenant(next(iter(self._tenants)))
        return entry

    async def _operator_entry(self) -> CachedTenant:
        entry, now_us = self._operator, self._clock.now_us()
        if entry is None or now_us >= entry.usable_until_us:
            return await self._once("operator", self._load_operator)
        if now_us >= entry.fresh_until_us:
            self._soon("operator", self._load_operator)
            entry.fresh_until_us = now_us + int(RETRY_SECONDS * US_PER_SECOND)
        return entry

    async def _load_operator(self, is_told: bool) -> CachedTenant:  # noqa: FBT001 - as flights call it
        try:
            while True:
                era = self._era
                read, is_sure = await self._read_config(OPERATOR, self._operator, is_told=is_told)
                if self._is_still_right(era, OPERATOR, read.stamp):
                    break
        except CatalogUnavailable:
            if self._operator is None or self._clock.now_us() >= self._operator.usable_until_us:
                raise
            soon_us = self._clock.now_us() + int(RETRY_SECONDS * US_PER_SECOND)
            for entry in self._tenants.values():  # whoever asks for one of them asks for the operator too
                entry.fresh_until_us = min(entry.fresh_until_us, soon_us)
            return self._keep_stale(self._operator)
        config = read.value
        if config is None:
            raise CatalogUnavailable("the database has no operator: run `limitforge db upgrade`")
        now_us = self._clock.now_us()
        known = self._operator
        if known is None or known.snapshot.config != config:
            known = CachedTenant(Snapshot(config, config), 0, 0, set())
            for entry in self._tenants.values():
                entry.snapshot = entry.snapshot.with_operator(config)
        known.fresh_until_us, known.usable_until_us = self._fresh_until_us(now_us), now_us + self._stale_us
        known.is_stale, known.is_from_database, known.stamp = False, is_sure, read.stamp
        self._operator = known
        return known

    async def _key_entry(self, credential: Credential, source: str) -> CachedKey:
        key_id = f"key_{credential.id}"
        now_us = self._clock.now_us()
        entry = self._keys.get(key_id)
        if entry is not None and now_us < entry.usable_until_us:
            if now_us >= entry.fresh_until_us:
                self._refresh_key_soon(entry, now_us)
            return entry
        unknown_until_us = self._unknown.get(key_id)
        if unknown_until_us is not None and now_us < unknown_until_us:
            raise UnknownKey("no such key, or it is no longer good")
        if credential.has_keyed_checksum:
            return await self._read_entry(key_id)
        # A flight of its own for each source: another one that presents the same id may be refused.
        return await self._once(("guarded", key_id, source), lambda _: self._guarded(key_id, source))

    async def _guarded(self, key_id: str, source: str) -> CachedKey:
        """Read a key that may be made up: from a copy, else from the database where the guard allows it."""
        if self._warm is not None and await self._has_copy(self._warm, key_id, source):
            return await self._read_entry(key_id)
        return await self._guard.run(source, lambda: self._read_entry(key_id), seconds=self._lookups.seconds)

    async def _has_copy(self, warm: SharedCopies, key_id: str, source: str) -> bool:
        """Return False also where copies can't be read now, or `source` has asked for too many that are not there."""

        async def find() -> None:
            copy, known = await warm.get_key(key_id), self._keys.get(key_id)
            if copy is None or not self._accepts.is_sufficient(copy, ("key", key_id), known, is_told=False):
                raise UnknownKey("no copy")

        try:
            await self._copy_guard.run(source, find, seconds=self._lookups.seconds)
        except CatalogError:
            return False
        return True

    async def _read_entry(self, key_id: str) -> CachedKey:
        return await self._once(("key", key_id), lambda is_told: self._load_key(key_id, is_told=is_told))

    async def _load_key(self, key_id: str, *, is_told: bool) -> CachedKey:
        while True:
            era = self._era
            read, is_sure = await self._read_key(key_id, is_told=is_told)
            if self._is_still_right(era, ("key", key_id), read.stamp):
                break
        self._loads += 1
        if read.value is None:
            self._forget_key(key_id)
            raise UnknownKey("no such key, or it is no longer good")
        entry = self._place_key(read.value, read.stamp)
        entry.is_from_database = is_sure
        return entry

    async def _read_key(self, key_id: str, *, is_told: bool) -> tuple[SharedCopy[Key], bool]:
        """As `_read_config` does."""
        name, known = ("key", key_id), self._keys.get(key_id)
        copy = None if self._warm is None else await self._warm.get_key(key_id)
        if copy is not None and self._accepts.is_sufficient(copy, name, known, is_told=is_told):
            return copy, False
        stamp = self._accepts.stamp_for_read(name)
        try:
            has_copy = copy is not None and self._accepts.is_current(copy, self._accepts.required_stamp(name), known)
            key = await self._lookups.read(
                lambda: self._origin.key(key_id), has_deadline=has_copy or not self._is_usable(known)
            )
        except CatalogUnavailable as error:
            if copy is None or not self._accepts.is_current(copy, self._accepts.required_stamp(name), known):
                raise
            self._missed(error)
            return copy, False
        self._recovered()
        if key is None and copy is not None and copy.value is not None:
            self._accepts.require(name, stamp)  # a copy of before the deletion may be put back again
        if key is not None and self._warm is not None:
            await self._warm.refresh_key(key, stamp)
        return SharedCopy(stamp, key), True

    def _place_key(self, key: Key, stamp: Stamp) -> CachedKey:
        now_us = self._clock.now_us()
        known = self._keys.pop(key.id, None)
        if known is not None and known.key == key:
            entry = known
        else:
            if known is not None:
                self._forget_seen(known)
            entry = CachedKey(key, 0, 0, set())
        entry.fresh_until_us, entry.usable_until_us = self._fresh_until_us(now_us), now_us + self._stale_us
        entry.has_unread_change = entry.is_from_database = False
        entry.stamp = stamp
        self._keys[key.id] = entry
        while len(self._keys) > self._max_keys:
            first = next(iter(self._keys))
            self._forget_seen(self._keys.pop(first))
        return entry

    def _remember(self, text: str, credential: Credential, entry: CachedKey, tenant: CachedTenant) -> Caller:
        ends = [entry.key.expires_at]
        ends += [kept.expires_at for kept in entry.key.secrets if self._peppers.matches(credential, kept)]
        ends_us = min((int(at.timestamp() * US_PER_SECOND) for at in ends if at is not None), default=2**62)
        caller = Caller(entry.key, tenant, entry, ends_us)
        if self._keys.get(entry.key.id) is entry and not tenant.is_deleted:
            seen = fingerprint(text)
            self._callers[seen] = caller
            entry.fingerprints.add(seen)
            tenant.fingerprints.add(seen)
        return caller

    # --- Again -------------------------------------------------------------------------------------------------------

    def _refresh_soon(self, caller: Caller, now_us: int) -> None:
        if now_us >= caller.tenant.fresh_until_us:
            self._refresh_tenant_soon(caller.key.tenant_id, caller.tenant, now_us)
        if now_us >= caller.cached_key.fresh_until_us:
            self._refresh_key_soon(caller.cached_key, now_us)

    def _refresh_tenant_soon(self, tenant_id: str, entry: CachedTenant, now_us: int) -> None:
        is_confirmed = self._is_confirmed(now_us)
        if is_confirmed and entry.is_from_database and not entry.is_stale:
            self._believe(entry)
            if self._tenants.get(tenant_id) is entry:  # so that the first of them is not one that is in use
                self._tenants[tenant_id] = self._tenants.pop(tenant_id)
            return
        entry.fresh_until_us = now_us + int(RETRY_SECONDS * US_PER_SECOND)
        self._soon(("tenant", tenant_id), lambda is_told: self._load_tenant(tenant_id, is_told or is_confirmed))

    def _refresh_key_soon(self, entry: CachedKey, now_us: int) -> None:
        is_confirmed = self._is_confirmed(now_us)
        if is_confirmed and entry.is_from_database and not entry.has_unread_change:
            self._believe(entry)
            return
        entry.fresh_until_us = now_us + int(RETRY_SECONDS * US_PER_SECOND)
        no_copy = is_confirmed or entry.has_unread_change
        self._soon(("key", entry.key.id), lambda is_told: self._load_key(entry.key.id, is_told=is_told or no_copy))

    def _fresh_until_us(self, now_us: int) -> int:
        return now_us + (
            min(self._fresh_us, int(AWAY_SECONDS * US_PER_SECOND))
            if self._accepts.is_database_unreachable
            else self._fresh_us
        )

    def _is_confirmed(self, now_us: int) -> bool:
        return now_us < self._confirmed_us + self._fresh_us

    def _believe(self, entry: CachedTenant | CachedKey) -> None:
        """It would have been told if it had changed: it is as fresh as if it had been read."""
        entry.fresh_until_us = self._confirmed_us + self._fresh_us
        entry.usable_until_us = self._confirmed_us + self._stale_us

    def _soon(self, name: Hashable, load: Load[Any]) -> None:
        if name not in self._flights and not self._is_closed:
            self._start(name, load, is_told=False).add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[Any]) -> None:
        """Of a load that nobody waits for."""
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, CatalogUnavailable):
            self._missed(error)
        elif error is not None and not isinstance(error, UnknownKey | TooManyUnknownKeys):
            _log.error("could not read configuration again", exc_info=error)

    async def _reload_tenant(self, tenant_id: str) -> None:
        await self._once(("tenant", tenant_id), lambda is_told: self._load_tenant(tenant_id, is_told), is_told=True)

    async def _reload_operator(self) -> None:
        await self._once("operator", self._load_operator, is_told=True)

    async def _reload_key(self, key_id: str) -> None:
        """From a copy with the change, else from the database; until either is there it is tried again."""
        known = self._keys.get(key_id)
        if known is not None:
            known.has_unread_change, known.fresh_until_us = True, 0
        with contextlib.suppress(UnknownKey):
            await self._once(("key", key_id), lambda is_told: self._load_key(key_id, is_told=is_told), is_told=True)

    def _keep_stale(self, entry: CachedTenant) -> CachedTenant:
        entry.is_stale = True
        entry.fresh_until_us = self._clock.now_us() + int(RETRY_SECONDS * US_PER_SECOND)
        self._missed(None)
        return entry

    def _missed(self, error: CatalogUnavailable | None) -> None:
        if self._stale_since_us is None:
            self._stale_since_us = self._clock.now_us()
            _log.warning("what is remembered is served on, and may be out of date: %s", error or "no database")

    def _recovered(self) -> None:
        if self._stale_since_us is not None:
            self._stale_since_us = None
            _log.warning("the database answers again: nothing is stale any more")

    # --- Forgetting --------------------------------------------------------------------------------------------------

    def _forget_tenant(self, tenant_id: str) -> None:
        entry = self._tenants.pop(tenant_id)
        entry.usable_until_us = 0  # whoever holds it must look it up again
        for seen in entry.fingerprints:
            self._callers.pop(seen, None)
        entry.fingerprints.clear()

    def _forget_key(self, key_id: str) -> None:
        entry = self._keys.pop(key_id, None)
        if entry is not None:
            self._forget_seen(entry)
        self._unknown.pop(key_id, None)
        self._unknown[key_id] = self._clock.now_us() + int(UNKNOWN_SECONDS * US_PER_SECOND)
        if len(self._unknown) > MAX_UNKNOWN:
            del self._unknown[next(iter(self._unknown))]

    def _forget_seen(self, entry: CachedKey) -> None:
        for seen in entry.fingerprints:
            caller = self._callers.pop(seen, None)
            if caller is not None:
                caller.tenant.fingerprints.discard(seen)
        entry.fingerprints.clear()


def _look_at(task: asyncio.Task[Any]) -> None:
    """Whoever waited may have left: then nobody else asks how it ended."""
    if not task.cancelled():
        task.exception()
