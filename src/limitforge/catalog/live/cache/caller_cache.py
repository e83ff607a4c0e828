"""Authenticate callers by their API keys, from memory where possible."""

import asyncio
from collections.abc import Mapping

from limitforge.catalog.credentials import Credential, Peppers, fingerprint
from limitforge.catalog.live.cache.entries import CachedKey, CachedTenant, Caller, CallerIndex
from limitforge.catalog.live.cache.key_cache import KeyCache
from limitforge.catalog.live.cache.tenant_cache import TenantCache
from limitforge.catalog.model import to_datetime
from limitforge.core.clock import Clock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import CatalogUnavailable, UnknownKey

LOOKUP_TIMEOUT_FACTOR = 1.5  # a lookup may join a read without a deadline, so it ends after this many lookup deadlines


class CallerCache:
    """Finds the caller that an API key belongs to, and notes when keys were used."""

    def __init__(
        self,
        peppers: Peppers,
        keys: KeyCache,
        tenants: TenantCache,
        caller_index: CallerIndex,
        clock: Clock,
        lookup_seconds: float,
    ) -> None:
        self._peppers = peppers
        self._keys = keys
        self._tenants = tenants
        self._caller_index = caller_index
        self._callers = caller_index.by_fingerprint
        self._clock = clock
        self._now_us = clock.now_us
        self._timeout_seconds = LOOKUP_TIMEOUT_FACTOR * lookup_seconds
        self._last_used: dict[str, int] = {}

    def get(self, text: str) -> Caller | None:
        """Return the caller with this key if it is in memory, without I/O. If this returns None, use `find`."""
        return self.get_by_fingerprint(fingerprint(text))

    def get_by_fingerprint(self, key_fingerprint: bytes) -> Caller | None:
        """Return the caller with the key of this fingerprint if it is in memory, without I/O; otherwise None."""
        caller = self._callers.get(key_fingerprint)
        if caller is None:
            return None
        now_us = self._now_us()
        tenant = caller.tenant
        key = caller.cached_key
        if now_us >= caller.expires_at_us or now_us >= tenant.usable_until_us or now_us >= key.usable_until_us:
            return None
        if now_us >= tenant.fresh_until_us:
            self._tenants.renew_or_reread(caller.key.tenant_id, tenant)
        if now_us >= key.fresh_until_us:
            self._keys.renew_or_reread(key)
        self._last_used[caller.key.id] = now_us
        return caller

    def is_invalid_key(self, text: str) -> bool:
        """Return True if this can't be a key that was issued, without I/O."""
        try:
            Credential.parse(text, self._peppers)
        except UnknownKey:
            return True
        return False

    async def find(self, text: str, client: str = "") -> Caller:
        """Return the caller with this key; look it up if it is not in memory.

        `client` is the address that sent the key: one that sends many unknown keys has to wait. Raises `UnknownKey`,
        `TooManyUnknownKeys`, or `CatalogUnavailable`.
        """
        caller = self.get(text)
        if caller is not None:
            return caller
        credential = Credential.parse(text, self._peppers)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._look_up(text, credential, client)
        except TimeoutError:
            raise CatalogUnavailable("the configuration could not be read in time") from None

    def take_last_used(self) -> dict[str, int]:
        """Return when each key was last used (microseconds), of those used since the previous call."""
        last_used, self._last_used = self._last_used, {}
        return last_used

    def restore_last_used(self, last_used: Mapping[str, int]) -> None:
        """Put back what `take_last_used` returned, because it could not be written."""
        self._last_used = {**last_used, **self._last_used}

    async def _look_up(self, text: str, credential: Credential, client: str) -> Caller:
        key = await self._keys.find(credential, client)
        now_us = self._clock.now_us()
        self._peppers.authenticate(credential, key.key, to_datetime(now_us))
        tenant = await self._tenants.find(key.key.tenant_id)
        self._last_used[key.key.id] = now_us
        return self._remember(text, credential, key, tenant)

    def _remember(self, text: str, credential: Credential, key: CachedKey, tenant: CachedTenant) -> Caller:
        ends = [key.key.expires_at]
        ends += [secret.expires_at for secret in key.key.secrets if self._peppers.matches(credential, secret)]
        ends_us = [int(end.timestamp() * US_PER_SECOND) for end in ends if end is not None]
        caller = Caller(key.key, tenant, key, min(ends_us, default=2**62))
        # Either may have changed while the other was read. Then the caller is good for this request only.
        if self._keys.keys.get(key.key.id) is key and not tenant.is_deleted:
            self._caller_index.add(fingerprint(text), caller)
        return caller
