"""Where a node reads configuration from: the copies that all nodes share, and behind them the database or a file."""

import logging
import struct
from collections.abc import AsyncGenerator, Iterable, Mapping
from datetime import datetime
from typing import Protocol, TypeVar

import msgspec

from limitforge.catalog import override_queries, queries
from limitforge.catalog.database import Database
from limitforge.catalog.model import Key, Override, TenantConfig
from limitforge.catalog.override_queries import DeletedOverride, OverrideRow
from limitforge.core.clock import Clock, MonotonicClock
from limitforge.errors import StoreError

FORMAT = b"1"  # of a copy; one that starts differently is another release's, and is not read
WARM_SECONDS = 600.0
GONE_FROM = 2**52  # that a key is gone is newer than any version of it
SHUN_US = 1_000_000  # how long copies are not asked for after they could not be had

Kept = TypeVar("Kept", TenantConfig, Key)

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
GONE = _encode(None)


class Source(Protocol):
    """Where the truth is."""

    async def config(self, tenant_id: str) -> TenantConfig | None: ...

    async def key(self, key_id: str) -> Key | None: ...

    async def overrides(self, tenant_id: str) -> list[Override]: ...

    async def override(self, tenant_id: str, resource: str, subject: str) -> Override | None: ...

    async def tenants_with_overrides(self) -> list[str]: ...


class OverrideSource(Source, Protocol):
    """A source whose overrides are compared with those of a store."""

    async def configs(self, tenant_ids: Iterable[str]) -> dict[str, TenantConfig]:
        """Return those tenants that there are, by id."""

    async def revisions(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        """Return the revision of each tenant that there is: it changes with anything that decides for the tenant."""

    async def overrides_by_id(self, ids: Iterable[str]) -> list[Override]: ...

    async def override_rows(self, after: OverrideRow | None, expires_after: datetime, limit: int) -> list[OverrideRow]:
        """Return a page of all overrides that expire later, behind the last row of the page before."""

    async def deleted_overrides(self, tenant_id: str, after: int, since: datetime, limit: int) -> list[DeletedOverride]:
        """Return the newest deletions with a higher number, the oldest of them first."""

    async def pending_tenants(self, tenant_ids: Iterable[str], since: datetime) -> set[str]:
        """Return those tenants with a change that is newer and about to be written to the store."""


class Memory(Protocol):
    """How a Redis server uses its memory. `limit_bytes` is 0 if it has none."""

    @property
    def limit_bytes(self) -> int: ...

    @property
    def policy(self) -> str: ...

    @property
    def evicted(self) -> int: ...


class Shared(Protocol):
    """What nodes share: a Redis. Errors are `StoreError`."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, copy: bytes, ttl_seconds: float) -> None: ...

    async def claim(self, key: str, ttl_seconds: float) -> bool: ...

    async def memory(self) -> Mapping[str, Memory]: ...

    async def put_many(self, copies: Mapping[str, bytes], ttl_seconds: float) -> None: ...

    async def hold(self, key: str, owner: bytes, ttl_seconds: float) -> bool: ...

    async def release(self, key: str, owner: bytes) -> None: ...

    async def publish(self, channel: str, message: bytes) -> None: ...

    def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]: ...

    async def close(self) -> None: ...


class DatabaseSource:
    """The database itself: a tenant costs three queries, a key two."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def config(self, tenant_id: str) -> TenantConfig | None:
        async with self._database.reading() as connection:
            return await queries.tenant_config(connection, tenant_id)

    async def key(self, key_id: str) -> Key | None:
        async with self._database.reading() as connection:
            return await queries.find(connection, Key, key_id)

    async def overrides(self, tenant_id: str) -> list[Override]:
        async with self._database.reading() as connection:
            return await queries.every(connection, Override, tenant_id)

    async def override(self, tenant_id: str, resource: str, subject: str) -> Override | None:
        same = {"tenant_id": tenant_id, "resource": resource, "subject": subject}
        async with self._database.reading() as connection:
            found = await queries.find_by(connection, Override, **same)
            return found[0] if found else None

    async def tenants_with_overrides(self) -> list[str]:
        async with self._database.reading() as connection:
            return await queries.tenants_with_overrides(connection)

    async def configs(self, tenant_ids: Iterable[str]) -> dict[str, TenantConfig]:
        async with self._database.reading() as connection:
            return await override_queries.tenant_configs(connection, list(tenant_ids))

    async def revisions(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        async with self._database.reading() as connection:
            return await override_queries.tenant_revisions(connection, list(tenant_ids))

    async def overrides_by_id(self, ids: Iterable[str]) -> list[Override]:
        async with self._database.reading() as connection:
            return await queries.some(connection, Override, "id", ids)

    async def override_rows(self, after: OverrideRow | None, expires_after: datetime, limit: int) -> list[OverrideRow]:
        async with self._database.reading() as connection:
            return await override_queries.override_rows(connection, after, expires_after, limit)

    async def deleted_overrides(self, tenant_id: str, after: int, since: datetime, limit: int) -> list[DeletedOverride]:
        async with self._database.reading() as connection:
            return await override_queries.deleted_overrides(connection, tenant_id, after, since, limit)

    async def pending_tenants(self, tenant_ids: Iterable[str], since: datetime) -> set[str]:
        async with self._database.reading() as connection:
            return await override_queries.unpublished_tenants(connection, tenant_ids, since)


class WarmCopies:
    """Copies of what the database says, in Redis, each behind its revision: an older one never replaces a newer."""

    def __init__(self, shared: Shared, prefix: str, clock: Clock | None = None) -> None:
        self._shared = shared
        self._prefix = prefix
        self._clock = clock or MonotonicClock()
        self._shunned_until_us = 0

    async def config(self, tenant_id: str, at_least: int = 0) -> TenantConfig | None:
        return await self._get(self._name("c", tenant_id), TenantConfig, at_least)

    async def key(self, key_id: str, at_least: int = 0) -> Key | None:
        return await self._get(self._name("k", key_id), Key, at_least)

    async def put_config(self, tenant_id: str, config: TenantConfig | None, revision: int) -> None:
        """None for a tenant that is gone."""
        await self._put(self._name("c", tenant_id), config, _config_number(config, revision))

    async def put_key(self, key_id: str, key: Key | None, revision: int) -> None:
        await self._put(self._name("k", key_id), key, _key_number(key, revision))

    def _name(self, kind: str, identity: str) -> str:
        return f"{self._prefix}:{{{identity}}}:%{kind}"

    async def _get(self, name: str, kind: type[Kept], at_least: int) -> Kept | None:
        if self._clock.now_us() < self._shunned_until_us:
            return None
        try:
            copy = await self._shared.get(name)
        except StoreError as error:
            self._shun(error)
            return None
        if copy is None or copy[8:9] != FORMAT or struct.unpack(">Q", copy[:8])[0] < at_least or copy[9:] == GONE:
            return None
        try:
            return msgspec.msgpack.decode(copy[9:], type=kind)
        except (msgspec.MsgspecError, ValueError):
            _log.warning("the copy %s can't be read: the database is asked instead", name)
            return None

    async def put_all(
        self,
        configs: Iterable[tuple[str, TenantConfig | None, int]],
        keys: Iterable[tuple[str, Key | None, int]],
    ) -> None:
        """Many of both at once, each by its id, with the revision that announced it."""
        copies = {self._name("c", each): _copy(kept, _config_number(kept, at)) for each, kept, at in configs}
        copies |= {self._name("k", each): _copy(kept, _key_number(kept, at)) for each, kept, at in keys}
        if copies:
            await self._shared.put_many(copies, WARM_SECONDS)

    async def _put(self, name: str, kept: TenantConfig | Key | None, revision: int) -> None:
        """Raises where it can't be written: whoever publishes must know."""
        await self._shared.put(name, _copy(kept, revision), WARM_SECONDS)

    async def refresh(self, tenant_id: str, config: TenantConfig) -> None:
        """For the next one who asks; it does not matter if it can't be."""
        if self._clock.now_us() >= self._shunned_until_us:
            try:
                await self.put_config(tenant_id, config, config.tenant.revision)
            except StoreError as error:
                self._shun(error)

    async def refresh_key(self, key: Key) -> None:
        if self._clock.now_us() >= self._shunned_until_us:
            try:
                await self.put_key(key.id, key, key.version)
            except StoreError as error:
                self._shun(error)

    def _shun(self, error: StoreError) -> None:
        if self._clock.now_us() - self._shunned_until_us > 10 * SHUN_US:
            _log.warning("%s; the database is asked instead", error)
        self._shunned_until_us = self._clock.now_us() + SHUN_US


def _config_number(config: TenantConfig | None, revision: int) -> int:
    return revision if config is None else config.tenant.revision


def _key_number(key: Key | None, revision: int) -> int:
    return GONE_FROM + revision if key is None else key.version


def _copy(kept: TenantConfig | Key | None, number: int) -> bytes:
    return struct.pack(">Q", number) + FORMAT + _encode(kept)
