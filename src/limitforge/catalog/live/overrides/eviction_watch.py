"""Watch the memory of the Redis servers, since a server that evicts keys loses counters and overrides."""

import logging
import time
from collections.abc import Callable, Mapping

from limitforge.catalog.live.shared_redis import MemoryUsage, SharedRedis
from limitforge.errors import StoreError
from limitforge.observability.events import log_event

CHECK_SECONDS = 60.0  # how often a process that is not the leader reads the memory usage
SAFE_POLICY = "noeviction"

_log = logging.getLogger(__name__)


class EvictionWatch:
    """Reads how many keys each server has evicted. Without the right to call INFO, it sees nothing."""

    def __init__(self, catalog_redis: SharedRedis | None, on_redis_memory_limit: Callable[[int], None] | None) -> None:
        """`on_redis_memory_limit` is called with the limit of the smallest server in bytes, 0 if none has a limit."""
        self._catalog_redis = catalog_redis
        self._on_redis_memory_limit = on_redis_memory_limit
        self._usage: Mapping[str, MemoryUsage] = {}
        self._checked_at: float | None = None

    async def poll(self, *, is_leader: bool) -> bool:
        """Return True if a server has evicted keys since the last call."""
        now = time.monotonic()
        if self._catalog_redis is None:
            return False
        if not is_leader and self._checked_at is not None and now - self._checked_at < CHECK_SECONDS:
            return False
        self._checked_at = now
        try:
            usage = await self._catalog_redis.memory()
        except StoreError:
            return False
        previous, self._usage = self._usage, usage
        if self._on_redis_memory_limit is not None:
            self._on_redis_memory_limit(
                min((each.limit_bytes for each in usage.values() if each.limit_bytes), default=0)
            )
        has_evicted = False
        for server, current in usage.items():
            known = previous.get(server)
            if known is not None and known.evicted != current.evicted:
                has_evicted = True
            if _may_evict(current) and (known is None or known.policy != current.policy or not _may_evict(known)):
                log_event(
                    _log,
                    logging.WARNING,
                    "store.evicts_keys",
                    "this server drops counters and overrides when its memory is full, set maxmemory-policy noeviction",
                    server=server,
                    policy=current.policy,
                )
        return has_evicted

    def evicting_servers(self) -> dict[str, str]:
        """Return the servers that may evict keys, each with its `maxmemory-policy`."""
        return {server: usage.policy for server, usage in self._usage.items() if _may_evict(usage)}


def _may_evict(usage: MemoryUsage) -> bool:
    return usage.limit_bytes > 0 and usage.policy != SAFE_POLICY
