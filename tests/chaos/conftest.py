"""Async and sync limiters behind one interface, and a Redis behind a proxy."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from limitforge import Limiter, StoreOptions, SyncLimiter
from tests.chaos.background_loop import BackgroundLoop
from tests.proxy import Proxy
from tests.servers import RedisServer


class BlockingLimiter:
    """An async limiter with the interface of a sync one, on a loop in another thread."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._loop = BackgroundLoop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._limiter, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self._loop.run(result) if inspect.iscoroutine(result) else result

        return call

    def close(self) -> None:
        if self._loop.is_running:
            self._loop.run(self._limiter.close())
            self._loop.stop()


Connect = Callable[..., SyncLimiter]
LONG_DEADLINE_MS = 20_000.0


@pytest.fixture(params=["async", "sync"])
def opened(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Opens limiters by URL and options, and closes them after the test.

    They have a long deadline by default: a busy machine must not degrade checks that Redis is expected to decide.
    """
    limiters: list[SyncLimiter] = []

    def connect(url: str, **options: Any) -> SyncLimiter:
        chosen = StoreOptions(**{"deadline_ms": LONG_DEADLINE_MS, **options})
        if request.param == "sync":
            limiters.append(SyncLimiter.connect(url, options=chosen))
        else:
            limiters.append(cast("SyncLimiter", BlockingLimiter(Limiter.connect(url, options=chosen))))
        return limiters[-1]

    yield connect
    for limiter in limiters:
        limiter.close()


@pytest.fixture
def proxy(redis_url: str, redis_server: RedisServer) -> Iterator[Proxy]:
    """A proxy in front of this worker's Redis, which is empty."""
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def own_proxy(own_redis_server: RedisServer) -> Iterator[Proxy]:
    """A proxy in front of a Redis that the test may break as well."""
    with Proxy(own_redis_server.port) as proxy:
        yield proxy
