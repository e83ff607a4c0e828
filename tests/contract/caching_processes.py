"""Several limiters with denial caches on one Redis and one manual clock, as if each were a process of its own."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import redis as redis_py

from limitforge import Limiter, ManualClock, StoreOptions, SyncLimiter
from limitforge.core.clock import LONG_AGO_US
from limitforge.stores.redis.denial_cache import DenialCache, Invalidation
from tests.contract.conftest import BlockingLimiter

BASE_US = 1_700_006_400_000_000
CHANNEL = "lf:denials"
PATIENCE_SECONDS = 60.0


class DeafListener:
    """A listener that loses every message."""

    def stop(self) -> None: ...


class CachingProcesses:
    """Two sync limiters and one async limiter."""

    def __init__(self, url: str, *, denial_cache_ms: float, deaf: bool = False) -> None:
        self.clock = ManualClock(BASE_US)
        self._raw: Any = redis_py.Redis.from_url(url)
        self._number = 0
        options = StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=denial_cache_ms)
        sync_limiters = [SyncLimiter.connect(url, clock=self.clock, options=options) for _ in range(2)]
        async_limiter = BlockingLimiter(Limiter.connect(url, clock=self.clock, options=options))
        self._loop = async_limiter._loop
        self.limiters = [*sync_limiters, cast("SyncLimiter", async_limiter)]
        stores: list[Any] = [*(limiter._store for limiter in sync_limiters), async_limiter._limiter._store]
        self.denial_caches: list[DenialCache] = [store._core.denial_cache for store in stores]
        for limiter, store in zip(self.limiters, stores, strict=True):
            if not deaf:
                self._wait_until_listening(limiter)
            elif limiter in sync_limiters:
                store._listener = DeafListener()
            else:
                self._loop.run_until_complete(_make_deaf(store))

    def hits(self) -> int:
        return sum(cache.hits for cache in self.denial_caches)

    def reset(self) -> None:
        """Delete all state. The connections stay."""
        self._raw.flushall()
        self.clock.set_us(BASE_US)
        for cache in self.denial_caches:
            cache.invalidate_all()
            cache._invalidated_us.clear()
            cache._all_invalidated_us = LONG_AGO_US

    def wait_for_invalidations(self) -> None:
        """Wait until every limiter has received all invalidations so far."""
        self._number += 1
        name = f"number {self._number}"
        self._raw.publish(CHANNEL, Invalidation(bucket_keys=(name,)).encode())
        self._wait_until(lambda: all(name in cache._invalidated_us for cache in self.denial_caches))

    def close(self) -> None:
        for limiter in self.limiters:
            limiter.close()
        self._raw.close()

    def _wait_until_listening(self, limiter: SyncLimiter) -> None:
        """Let a limiter subscribe, which it does when it first looks up a cached denial."""
        before = self._listeners()
        for _ in range(2):
            limiter.check("anything", "unused", limits="1/day", cost=2)
        self._wait_until(lambda: self._listeners() > before)

    def _listeners(self) -> int:
        return int(self._raw.pubsub_numsub(CHANNEL)[0][1])

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline
            self._loop.run_until_complete(asyncio.sleep(0.0005))


async def _make_deaf(store: Any) -> None:
    store._current_client()._listener = _DeafAsyncListener()


class _DeafAsyncListener:
    is_running = True

    async def stop(self) -> None: ...
