"""Copies of the configuration in Redis, so that most processes need not ask the database.

Each copy starts with a number that orders it by its stamp, so an older copy never replaces a newer one.
Copies are signed and carry their expiry: a copy that was changed, moved to another key, or kept and put back later is
not accepted.
"""

import logging
import struct
from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from limitforge.catalog.history import Stamp, timeline_number
from limitforge.catalog.live.shared_redis import SharedRedis
from limitforge.catalog.live.signing import Signer
from limitforge.catalog.model import Key, TenantConfig
from limitforge.core.clock import Clock, MonotonicClock, SystemClock
from limitforge.core.exact import US_PER_SECOND
from limitforge.errors import PartialFailure, StoreError
from limitforge.observability.events import log_event

COPY_FORMAT = b"3"  # byte 9 of a copy; copies with another format are from another release, and are ignored
HEADER_BYTES = 41  # bytes: the order (8), the format (1), the stamp (24), and when it expires (8, epoch seconds)
COPY_SECONDS = 600.0
CLOCK_SKEW_SECONDS = 60.0  # by how much the clocks of two machines may differ
HEAD_SECONDS = 3_600.0  # longer than any copy lasts
BACKOFF_US = 1_000_000  # how long Redis is not asked for copies after an error

Content = TypeVar("Content", TenantConfig, Key)

_REVISION_BITS = 40
_MAX_TIMELINES = 2**13 - 1  # Lua compares exactly up to 2**53

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
EMPTY_CONTENT = _encode(None)


class SharedCopy(msgspec.Struct, Generic[Content], frozen=True):
    """A copy that was read from Redis. `value` is None if the entity was deleted."""

    stamp: Stamp
    """The copy includes all changes up to this one, and perhaps later ones."""
    value: Content | None


class SharedCopies:
    """Reads and writes copies of tenants and keys, and of the newest known revision (the head)."""

    def __init__(
        self,
        catalog_redis: SharedRedis,
        prefix: str,
        signer: Signer,
        clock: Clock | None = None,
        wall_clock: Clock | None = None,
    ) -> None:
        """`clock` measures the pause after an error of Redis, `wall_clock` says when copies expire."""
        self._catalog_redis = catalog_redis
        self._prefix = prefix
        self._signer = signer
        self._clock = clock or MonotonicClock()
        self._wall_clock = wall_clock or SystemClock()
        self._paused_until_us = 0

    async def get_config(self, tenant_id: str) -> SharedCopy[TenantConfig] | None:
        """Return the copy of a tenant, or None if there is no valid one or Redis is unreachable."""
        return await self._get(self._name("c", tenant_id), TenantConfig)

    async def get_key(self, key_id: str) -> SharedCopy[Key] | None:
        return await self._get(self._name("k", key_id), Key)

    async def put_all(
        self, configs: Mapping[str, TenantConfig | None], keys: Mapping[str, Key | None], stamp: Stamp
    ) -> None:
        """Write copies of tenants and keys by their ids; None stands for a deleted one.

        Raises `PartialFailure` with the ids that were not written.
        """
        contents = {self._name("c", each): _encode(config) for each, config in configs.items()}
        contents |= {self._name("k", each): _encode(key) for each, key in keys.items()}
        copies = {name: self._pack(name, content, stamp, COPY_SECONDS) for name, content in contents.items()}
        if not copies:
            return
        try:
            await self._catalog_redis.put_many(copies, COPY_SECONDS)
        except StoreError as error:
            failed = error.failed if isinstance(error, PartialFailure) else copies.keys()
            ids = [each for name, each in zip(copies, (*configs, *keys), strict=True) if name in failed]
            raise PartialFailure(str(error), ids) from None

    async def try_put_config(self, tenant_id: str, config: TenantConfig, stamp: Stamp) -> None:
        """Write a copy of a tenant that was read from the database. Errors are ignored."""
        await self._try_put(self._name("c", tenant_id), _encode(config), stamp, COPY_SECONDS)

    async def try_put_key(self, key: Key, stamp: Stamp) -> None:
        """Write a copy of a key that was read from the database. Errors are ignored."""
        await self._try_put(self._name("k", key.id), _encode(key), stamp, COPY_SECONDS)

    async def head(self) -> Stamp | None:
        """Return the newest revision that any process has written here."""
        found = self._unpack(self._head_name, await self._catalog_redis.get(self._head_name))
        return None if found is None else found[0]

    async def put_head(self, stamp: Stamp) -> None:
        """Write the newest revision, before any copy of that state: the head outlives all copies."""
        await self._put(self._head_name, EMPTY_CONTENT, stamp, HEAD_SECONDS)

    async def try_put_head(self, stamp: Stamp) -> None:
        """Write the newest revision. Errors are ignored."""
        await self._try_put(self._head_name, EMPTY_CONTENT, stamp, HEAD_SECONDS)

    @property
    def _head_name(self) -> str:
        return f"{self._prefix}:{{%head}}:"

    def _name(self, kind: str, identity: str) -> str:
        return f"{self._prefix}:{{{identity}}}:%{kind}"

    async def _get(self, name: str, kind: type[Content]) -> SharedCopy[Content] | None:
        if self._clock.now_us() < self._paused_until_us:
            return None
        try:
            found = self._unpack(name, await self._catalog_redis.get(name))
        except StoreError as error:
            self._pause(error)
            return None
        if found is None:
            return None
        stamp, content = found
        if content == EMPTY_CONTENT:
            return SharedCopy(stamp, None)
        try:
            return SharedCopy(stamp, msgspec.msgpack.decode(content, type=kind))
        except (msgspec.MsgspecError, ValueError):
            log_event(
                _log,
                logging.WARNING,
                "catalog.copy_unreadable",
                "could not decode a copy, asking the database instead",
                name=name,
            )
            return None

    async def _put(self, name: str, content: bytes, stamp: Stamp, ttl_seconds: float) -> None:
        await self._catalog_redis.put(name, self._pack(name, content, stamp, ttl_seconds), ttl_seconds)

    async def _try_put(self, name: str, content: bytes, stamp: Stamp, ttl_seconds: float) -> None:
        if self._clock.now_us() >= self._paused_until_us:
            try:
                await self._put(name, content, stamp, ttl_seconds)
            except StoreError as error:
                self._pause(error)

    def _pause(self, error: StoreError) -> None:
        if self._clock.now_us() - self._paused_until_us > 10 * BACKOFF_US:  # log again only after ten quiet seconds
            log_event(
                _log,
                logging.WARNING,
                "catalog.copies_unreachable",
                "could not reach the copies in Redis, asking the database instead",
                error=error,
            )
        self._paused_until_us = self._clock.now_us() + BACKOFF_US

    def _pack(self, name: str, content: bytes, stamp: Stamp, ttl_seconds: float) -> bytes:
        """Return a copy as it is stored. Redis compares its first 8 bytes: the timeline's number, then the revision."""
        order = min(timeline_number(stamp.timeline), _MAX_TIMELINES) << _REVISION_BITS | stamp.revision
        expires = self._wall_clock.now_us() // US_PER_SECOND + int(ttl_seconds + CLOCK_SKEW_SECONDS)
        header = struct.pack(">Q", order) + COPY_FORMAT
        header += struct.pack(">QQQQ", stamp.timeline, stamp.revision, stamp.change_id, expires)
        return self._signer.sign(name, header + content)

    def _unpack(self, name: str, copy: bytes | None) -> tuple[Stamp, bytes] | None:
        """Return the stamp and the content of a stored copy.

        Return None if it is missing, expired, of another release, or not signed under this name.
        """
        if copy is None or copy[8:9] != COPY_FORMAT:
            return None
        verified = self._signer.verify(name, copy)
        if verified is None or len(verified) <= HEADER_BYTES:
            return None
        *stamp, expires = struct.unpack(">QQQQ", verified[9:HEADER_BYTES])
        if expires * US_PER_SECOND <= self._wall_clock.now_us():
            return None
        return Stamp(*stamp), verified[HEADER_BYTES:]
