"""Read one tenant or one key: from a copy in Redis if that is recent enough, else from the database."""

from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import msgspec

from limitforge.catalog.history import Stamp
from limitforge.catalog.live.cache.bounded_reads import BoundedReads
from limitforge.catalog.live.cache.copy_validator import CopyValidator
from limitforge.catalog.live.cache.entries import CachedKey, CachedTenant
from limitforge.catalog.live.cache.freshness import DatabaseHealth, Freshness
from limitforge.catalog.live.shared_copies import SharedCopies, SharedCopy
from limitforge.catalog.live.sources import ConfigSource
from limitforge.catalog.model import Key, TenantConfig
from limitforge.errors import CatalogUnavailable

Content = TypeVar("Content", TenantConfig, Key)


class ReadResult(msgspec.Struct, Generic[Content], frozen=True):
    """What a read found. `value` is None if the entity does not exist."""

    value: Content | None
    stamp: Stamp
    is_from_database: bool


class ConfigReader:
    """Reads tenants and keys.

    A copy that may be out of date is used only if the database is unavailable and no newer state is cached.
    """

    def __init__(
        self,
        source: ConfigSource,
        copies: SharedCopies | None,
        validator: CopyValidator,
        health: DatabaseHealth,
        freshness: Freshness,
        lookup_seconds: float,
    ) -> None:
        self._source = source
        self._copies = copies
        self._validator = validator
        self._health = health
        self._freshness = freshness
        self._reads = BoundedReads(lookup_seconds)

    @property
    def has_copies(self) -> bool:
        return self._copies is not None

    async def copy_of_tenant(self, tenant_id: str) -> SharedCopy[TenantConfig] | None:
        return None if self._copies is None else await self._copies.get_config(tenant_id)

    async def copy_of_key(self, key_id: str) -> SharedCopy[Key] | None:
        return None if self._copies is None else await self._copies.get_key(key_id)

    async def read_tenant(
        self, tenant_id: str, known: CachedTenant | None, *, must_be_newer: bool
    ) -> ReadResult[TenantConfig]:
        """Read a tenant. `known` is its cached entry; `must_be_newer` says that it has changed since."""
        copy = await self.copy_of_tenant(tenant_id)
        if copy is not None and self._validator.may_replace_database_read(
            copy, tenant_id, known, must_be_newer=must_be_newer
        ):
            return ReadResult(copy.value, copy.stamp, is_from_database=False)
        result = await self._read(tenant_id, copy, known, lambda: self._source.config(tenant_id))
        if self._copies is not None and result.is_from_database and result.value is not None:
            await self._copies.try_put_config(tenant_id, result.value, result.stamp)
        return result

    async def read_key(self, key_id: str, known: CachedKey | None, *, must_be_newer: bool) -> ReadResult[Key]:
        """Read a key from its copy if that is recent enough, else from the database."""
        name, copy = ("key", key_id), await self.copy_of_key(key_id)
        if copy is not None and self._validator.may_replace_database_read(
            copy, name, known, must_be_newer=must_be_newer
        ):
            return ReadResult(copy.value, copy.stamp, is_from_database=False)
        result = await self._read(name, copy, known, lambda: self._source.key(key_id))
        if self._copies is not None and result.is_from_database and result.value is not None:
            await self._copies.try_put_key(result.value, result.stamp)
        return result

    async def close(self) -> None:
        await self._reads.close()

    async def _read(
        self,
        name: Hashable,
        copy: SharedCopy[Content] | None,
        known: CachedTenant | CachedKey | None,
        read: Callable[[], Awaitable[Content | None]],
    ) -> ReadResult[Content]:
        """Read from the database; fall back to the copy if the database is unavailable."""
        validator = self._validator
        stamp = validator.stamp_for_read(name)
        has_fallback = copy is not None and validator.is_current(copy, validator.required_stamp(name), known)
        try:
            value = await self._reads.read(read, has_deadline=has_fallback or not self._freshness.is_usable(known))
        except CatalogUnavailable as error:
            # A change may have been announced meanwhile.
            if copy is None or not validator.is_current(copy, validator.required_stamp(name), known):
                raise
            self._health.read_failed(error)
            return ReadResult(copy.value, copy.stamp, is_from_database=False)
        self._health.read_succeeded()
        if value is None and copy is not None and copy.value is not None:
            validator.require(name, stamp)  # someone may put a copy from before the deletion back
        return ReadResult(value, stamp, is_from_database=True)
