"""The Redis features that processes use to share configuration, as protocols. A store's Redis provides them."""

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol


class MemoryUsage(Protocol):
    """The memory usage of one Redis server. `limit_bytes` is 0 if it has no limit, `evicted` counts evicted keys."""

    @property
    def limit_bytes(self) -> int: ...

    @property
    def policy(self) -> str: ...

    @property
    def evicted(self) -> int: ...


class SharedRedis(Protocol):
    """Copies, locks and messages in Redis that all processes share. Methods raise `StoreError`."""

    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, copy: bytes, ttl_seconds: float) -> None:
        """Store a copy unless a newer one is stored: the first 8 bytes of copies are compared."""

    async def put_many(self, copies: Mapping[str, bytes], ttl_seconds: float) -> None:
        """Store several copies. Raises `PartialFailure` with the keys that were not written."""

    async def claim(self, key: str, ttl_seconds: float) -> bool:
        """Create a key. Return False if it exists."""

    async def acquire_lock(self, key: str, owner: bytes, ttl_seconds: float) -> bool:
        """Take or extend a lock. Return False if another owner has it."""

    async def release_lock(self, key: str, owner: bytes) -> None: ...

    async def memory(self) -> Mapping[str, MemoryUsage]:
        """Return the memory usage of each server, by its name."""

    async def publish(self, channel: str, message: bytes) -> None: ...

    def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Yield the messages on a channel, and None once the subscription is active."""

    async def close(self) -> None: ...
