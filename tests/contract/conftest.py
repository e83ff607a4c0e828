"""Fixtures: every store behind the sync interface, on one manual clock. The contract tests run on each of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest

from limitforge import Limiter, ManualClock, StoreOptions, SyncLimiter, TokenBucket
from tests.contract.options import PATIENT as PATIENT  # noqa: PLC0414 - tests take it from here

# "coalesced" shares every call with a crowd of other callers; "resilient" could decide by itself, and must not;
# "cached" may answer denials without asking, which must not be noticeable while no other process changes anything.
# "cluster" spreads its tenants over 64 lanes, so that limits of several scopes lie on several shards; "cluster-async"
# keeps each tenant in one place.
STORES = (
    "memory",
    "memory-async",
    "redis",
    "redis-async",
    "coalesced",
    "resilient",
    "cached",
    "cluster",
    "cluster-async",
    "sentinel",
    "sentinel-async",
)
QUICK = ("memory", "redis", "coalesced", "cached")  # the others rarely find more
SYNC = ("memory", "redis", "cluster", "sentinel")
# One of each way to decide: in Python, in the script, with the denial cache, and over several shards.
FEW = ("memory", "redis", "cached", "cluster")

# For tests of numbers with many cases. All other tests cover how a store is reached.
on_few_stores = pytest.mark.parametrize("limiter", FEW, indirect=True)

OPTIONS = {
    "resilient": StoreOptions(deadline_ms=30_000, failure="local", denial_cache_ms=0),
    "cached": StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=60_000),
}
CROWD = TokenBucket(name="crowd", bucket_capacity=3, refill_rate_per_sec=1)


class BlockingLimiter:
    """An async limiter with the sync interface: each call runs to its end on its own event loop."""

    crowd = 0

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._limiter, name)
        return lambda *args, **kwargs: self._loop.run_until_complete(
            self._with_concurrent_checks(method(*args, **kwargs))
        )

    async def _with_concurrent_checks(self, asked: Awaitable[Any]) -> Any:
        """Await a call between unrelated checks in the same loop iteration, so that all share a call to Redis."""
        before, after = ([self._unrelated_check(at) for at in range(self.crowd)] for _ in range(2))
        answers = await asyncio.gather(*before, asked, *after, return_exceptions=True)
        answer = answers[len(before)]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _unrelated_check(self, at: int) -> Awaitable[Any]:
        return self._limiter.check("crowd", f"stranger {at}", limits=CROWD, tenant="crowd")

    def close(self) -> None:
        self._loop.run_until_complete(self._limiter.close())
        self._loop.close()


class CrowdedLimiter(BlockingLimiter):
    crowd = 20


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def open_limiter(
    store: str, url: str, clock: ManualClock | None = None, key_prefix: str = "lf", **changed: Any
) -> SyncLimiter:
    """Open a limiter on a store. `changed` replaces some of the usual options."""
    options = replace(OPTIONS.get(store, PATIENT), **changed)
    lanes = {"default": 1} if store == "cluster-async" else None
    if store in SYNC:
        return SyncLimiter.connect(url, clock=clock, key_prefix=key_prefix, options=options, lanes=lanes)
    face = CrowdedLimiter if store == "coalesced" else BlockingLimiter
    limiter = Limiter.connect(url, clock=clock, key_prefix=key_prefix, options=options, lanes=lanes)
    return cast("SyncLimiter", face(limiter))


def empty_server(store: str, request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty server for a store."""
    if store.startswith("memory"):
        return "memory://"
    kind = store.removesuffix("-async")
    if kind not in ("cluster", "sentinel"):
        url: str = request.getfixturevalue("redis_url")
        return url
    servers = request.getfixturevalue(f"{kind}_servers")
    servers.flush()
    return cast("str", servers.url)


@pytest.fixture(params=[s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in STORES])
def limiter(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[SyncLimiter]:
    """Yield a limiter on each store in turn, with no state."""
    with closing(open_limiter(request.param, empty_server(request.param, request), clock)) as limiter:
        yield limiter
