"""Every store behind one face, on one manual clock: what the contract says is asked of each."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from limitforge import Limiter, ManualClock, SyncLimiter

STORES = ("memory", "memory-async", "redis", "redis-async")


class Blocking:
    """An async limiter with the face of a sync one: each call runs to its end on a loop of its own."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._limiter, name)
        return lambda *args, **kwargs: self._loop.run_until_complete(method(*args, **kwargs))

    def close(self) -> None:
        self._loop.run_until_complete(self._limiter.close())
        self._loop.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def open_limiter(store: str, url: str, clock: ManualClock | None = None, key_prefix: str = "lf") -> SyncLimiter:
    name, _, kind = store.partition("-")
    url = "memory://" if name == "memory" else url
    if kind == "async":
        return cast("SyncLimiter", Blocking(Limiter.connect(url, clock=clock, key_prefix=key_prefix)))
    return SyncLimiter.connect(url, clock=clock, key_prefix=key_prefix)


@pytest.fixture(params=STORES)
def limiter(request: pytest.FixtureRequest, redis_url: str, clock: ManualClock) -> Iterator[SyncLimiter]:
    """A limiter on each store in turn, empty."""
    limiter = open_limiter(request.param, redis_url, clock)
    yield limiter
    limiter.close()
