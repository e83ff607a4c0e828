"""Where a node reads configuration from: the copies that all nodes share, and behind them the database or a file."""

import logging
import struct
from collections.abc import AsyncGenerator, Iterable, Mapping
from datetime import datetime
from typing import Generic, Protocol, TypeVar

import msgspec

from limitforge.catalog.database import override_queries, queries
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.override_queries import DeletedOverride, OverrideRow
from limitforge.catalog.history import Stamp, timeline_number
from limitforge.catalog.live.signing import Signer
from limitforge.catalog.model import Key, Override, TenantConfig
from limitforge.core.clock import Clock, MonotonicClock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import PartialFailure, StoreError

FORMAT = b"3"  # of a copy; one that starts differently is another release's, and is not read
HEADER = 41  # bytes: the order (8), the format (1), the stamp (24), and when it expires (8, epoch seconds)
COPY_SECONDS = 600.0
CLOCK_SKEW_SECONDS = 60.0  # by how much the clocks of two nodes may differ
HEAD_SECONDS = 3_600.0  # longer than any copy lasts
SHUN_US = 1_000_000  # how long copies are not asked for after they could not be had

Kept = TypeVar("Kept", TenantConfig, Key)

_REVISION_BITS = 40
_MAX_TIMELINES = 2**13 - 1  # Lua compares exactly up to 2**53

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
GONE = _encode(None)


class ConfigSource(Protocol):
    """Where the truth is."""

    async def config(self, tenant_id: str) -> TenantConfig | None: ...

    async def key(self, key_id: str) -> Key | None: ...

    async def overrides(self, tenant_id: str) -> list[Override]: ...

    async def override(self, tenant_id: str, resource: str, subject: str) -> Override | None: ...

    async def tenants_with_overrides(self) -> list[str]: ...


class OverrideSource(ConfigSource, Protocol):
    """A source whose overrides are compared with those of a store."""

    async def configs(self, tenant_ids: Iterable[str]) -> dict[str, TenantConfig]:
        """Return those tenants that there are, and are valid, by id."""

    async def revisions(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        """Return the revision of each tenant that there is: it changes with anything that decides for the tenant."""

    async def overrides_by_id(self, ids: Iterable[str]) -> list[Override]: ...

    async def override_rows(self, after: OverrideRow | None, expires_after: datetime, limit: int) -> list[OverrideRow]:
        """Return a page of all overrides that expire later, behind the last row of the page before."""

    async def deleted_overrides(self, tenant_id: str, after: int, since: datetime, limit: int) -> list[DeletedOverride]:
        """Return the newest deletions with a higher number, the oldest of them first."""

    async def pending_tenants(self, tenant_ids: Iterable[str], since: datetime) -> set[str]:
        """Return those tenants with a change that is newer and about to be written to the store."""


class MemoryUsage(Protocol):
    """How a Redis server uses its memory. `limit_bytes` is 0 if it has none."""

    @property
    def limit_bytes(self) -> int: ...

    @property
    def policy(self) -> str: ...

    @property
    def evicted(self) -> int: ...


class SharedBackend(Protocol):
    """What nodes share: a Redis. Errors are `StoreError`."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, copy: bytes, ttl_seconds: float) -> None: ...

    async def claim(self, key: str, ttl_seconds: float) -> bool: ...

    async def memory(self) -> Mapping[str, MemoryUsage]: ...

    async def put_many(self, copies: Mapping[str, bytes], ttl_seconds: float) -> None: ...

    async def acquire_lock(self, key: str, owner: bytes, ttl_seconds: float) -> bool: ...

    async def release_lock(self, key: str, owner: bytes) -> None: ...

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
            return await queries.list_for_tenant(connection, Override, tenant_id)

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
            invalid: dict[str, str] = {}
            found = await queries.tenant_configs(connection, list(tenant_ids), invalid)
        for tenant_id in set(invalid.values()):
            _log.warning("catalog.invalid_tenant tenant=%s: its overrides are not restored", tenant_id)
        return found

    async def revisions(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        async with self._database.reading() as connection:
            return await override_queries.tenant_revisions(connection, list(tenant_ids))

    async def overrides_by_id(self, ids: Iterable[str]) -> list[Override]:
        async with self._database.reading() as connection:
            return await queries.find_where_in(connection, Override, "id", ids)

    async def override_rows(self, after: OverrideRow | None, expires_after: datetime, limit: int) -> list[OverrideRow]:
        async with self._database.reading() as connection:
            return await override_queries.override_rows(connection, after, expires_after, limit)

    async def deleted_overrides(self, tenant_id: str, after: int, since: datetime, limit: int) -> list[DeletedOverride]:
        async with self._database.reading() as connection:
            return await override_queries.deleted_overrides(connection, tenant_id, after, since, limit)

    async def pending_tenants(self, tenant_ids: Iterable[str], since: datetime) -> set[str]:
        async with self._database.reading() as connection:
            return await override_queries.unpublished_tenants(connection, tenant_ids, since)


class SharedCopy(msgspec.Struct, Generic[Kept], frozen=True):
    """What a copy says, and how new it is at least. `value` is None for what is deleted."""

    stamp: Stamp
    value: Kept | None


class SharedCopies:
    """Copies of what the database says, in Redis, each behind its stamp: an older one never replaces a newer. They are
    sealed, and say when they expire: one that was changed, moved, or kept by someone and put back later is not read.
    """

    def __init__(
        self,
        shared: SharedBackend,
        prefix: str,
        signer: Signer,
        clock: Clock | None = None,
        wall_clock: Clock | None = None,
    ) -> None:
        """`clock` measures how long Redis is left alone after an error, `wall_clock` says when copies expire."""
        self._shared = shared
        self._prefix = prefix
        self._sealer = signer
        self._clock = clock or MonotonicClock()
        self._wall_clock = wall_clock or SystemClock()
        self._shunned_until_us = 0

    async def get_config(self, tenant_id: str) -> SharedCopy[TenantConfig] | None:
        return await self._get(self._name("c", tenant_id), TenantConfig)

    async def get_key(self, key_id: str) -> SharedCopy[Key] | None:
        return await self._get(self._name("k", key_id), Key)

    async def config(self, tenant_id: str) -> TenantConfig | None:
        found = await self.get_config(tenant_id)
        return None if found is None else found.value

    async def key(self, key_id: str) -> Key | None:
        found = await self.get_key(key_id)
        return None if found is None else found.value

    async def put_config(self, tenant_id: str, config: TenantConfig | None, stamp: Stamp) -> None:
        """None for a tenant that is deleted. Raises where it can't be written: the publisher must know."""
        await self._put(self._name("c", tenant_id), _encode(config), stamp)

    async def put_key(self, key_id: str, key: Key | None, stamp: Stamp) -> None:
        await self._put(self._name("k", key_id), _encode(key), stamp)

    async def head(self) -> Stamp | None:
        """The newest point in history that any node has put here."""
        found = self._opened(self._head_name, await self._shared.get(self._head_name))
        return None if found is None else found[0]

    async def put_head(self, stamp: Stamp) -> None:
        """Write down how far history is, before any copy of that state: it outlives all copies."""
        copy = self._sealed(self._head_name, GONE, stamp, HEAD_SECONDS)
        await self._shared.put(self._head_name, copy, HEAD_SECONDS)

    async def refresh_head(self, stamp: Stamp) -> None:
        """The same, where it does not matter if it can't be."""
        if self._clock.now_us() >= self._shunned_until_us:
            try:
                await self.put_head(stamp)
            except StoreError as error:
                self._shun(error)

    @property
    def _head_name(self) -> str:
        return f"{self._prefix}:{{%head}}:"

    def _name(self, kind: str, identity: str) -> str:
        return f"{self._prefix}:{{{identity}}}:%{kind}"

    async def _get(self, name: str, kind: type[Kept]) -> SharedCopy[Kept] | None:
        if self._clock.now_us() < self._shunned_until_us:
            return None
        try:
            found = self._opened(name, await self._shared.get(name))
        except StoreError as error:
            self._shun(error)
            return None
        if found is None:
            return None
        stamp, content = found
        if content == GONE:
            return SharedCopy(stamp, None)
        try:
            return SharedCopy(stamp, msgspec.msgpack.decode(content, type=kind))
        except (msgspec.MsgspecError, ValueError):
            _log.warning("the copy %s can't be read: the database is asked instead", name)
            return None

    async def put_all(
        self, configs: Mapping[str, TenantConfig | None], keys: Mapping[str, Key | None], stamp: Stamp
    ) -> None:
        """Many of both at once, by their ids. Raises `PartialFailure` with the ids that were not written."""
        contents = {self._name("c", each): _encode(kept) for each, kept in configs.items()}
        contents |= {self._name("k", each): _encode(kept) for each, kept in keys.items()}
        copies = {name: self._sealed(name, content, stamp, COPY_SECONDS) for name, content in contents.items()}
        if not copies:
            return
        try:
            await self._shared.put_many(copies, COPY_SECONDS)
        except StoreError as error:
            failed = error.failed if isinstance(error, PartialFailure) else copies.keys()
            ids = [each for name, each in zip(copies, (*configs, *keys), strict=True) if name in failed]
            raise PartialFailure(str(error), ids) from None

    async def _put(self, name: str, content: bytes, stamp: Stamp) -> None:
        await self._shared.put(name, self._sealed(name, content, stamp, COPY_SECONDS), COPY_SECONDS)

    async def refresh_config(self, tenant_id: str, config: TenantConfig, stamp: Stamp) -> None:
        """For the next one who asks; it does not matter if it can't be."""
        await self._refresh(self._name("c", tenant_id), config, stamp)

    async def refresh_key(self, key: Key, stamp: Stamp) -> None:
        await self._refresh(self._name("k", key.id), key, stamp)

    async def _refresh(self, name: str, kept: TenantConfig | Key, stamp: Stamp) -> None:
        if self._clock.now_us() >= self._shunned_until_us:
            try:
                await self._put(name, _encode(kept), stamp)
            except StoreError as error:
                self._shun(error)

    def _shun(self, error: StoreError) -> None:
        if self._clock.now_us() - self._shunned_until_us > 10 * SHUN_US:
            _log.warning("%s; the database is asked instead", error)
        self._shunned_until_us = self._clock.now_us() + SHUN_US

    def _sealed(self, name: str, content: bytes, stamp: Stamp, ttl_seconds: float) -> bytes:
        """Return a copy as it is stored. Redis compares its first 8 bytes: the timeline's number, then the revision."""
        order = min(timeline_number(stamp.timeline), _MAX_TIMELINES) << _REVISION_BITS | stamp.revision
        expires = self._wall_clock.now_us() // US_PER_SECOND + int(ttl_seconds + CLOCK_SKEW_SECONDS)
        header = struct.pack(">Q", order) + FORMAT
        header += struct.pack(">QQQQ", stamp.timeline, stamp.revision, stamp.change_id, expires)
        return self._sealer.sign(name, header + content)

    def _opened(self, name: str, copy: bytes | None) -> tuple[Stamp, bytes] | None:
        """Return the stamp and the content of a copy; None if it is missing, of another release, not sealed under this
        name, or expired.
        """
        if copy is None or copy[8:9] != FORMAT:
            return None
        opened = self._sealer.verify(name, copy)
        if opened is None or len(opened) <= HEADER:
            return None
        *stamp, expires = struct.unpack(">QQQQ", opened[9:HEADER])
        if expires * US_PER_SECOND <= self._wall_clock.now_us():
            return None
        return Stamp(*stamp), opened[HEADER:]
