"""Every store behind one face, on one manual clock: what the contract says is asked of each."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from limitforge import Limiter, ManualClock, StoreOptions, SyncLimiter, TokenBucket

# "coalesced" shares every call with a crowd of other callers; "resilient" could decide by itself, and must not;
# "cached" may answer denials without asking, which must not show while nobody else changes anything.
STORES = ("memory", "memory-async", "redis", "redis-async", "coalesced", "resilient", "cached")
ALIKE = ("memory-async", "redis-async", "resilient")  # the others show nearly as much while you work

# A busy machine is no reason for another decision: nothing is decided without Redis here, whatever it takes.
PATIENT = StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=0)
OPTIONS = {
    "resilient": StoreOptions(deadline_ms=30_000, failure="local", denial_cache_ms=0),
    "cached": StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=60_000),
}
CROWD = TokenBucket(name="crowd", bucket_capacity=3, refill_rate_per_sec=1)


class Blocking:
    """An async limiter with the face of a sync one: each call runs to its end on a loop of its own."""

    crowd = 0

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._limiter, name)
        return lambda *args, **kwargs: self._loop.run_until_complete(self._among_others(method(*args, **kwargs)))

    async def _among_others(self, asked: Awaitable[Any]) -> Any:
        """Others ask before and after it in the same turn of the loop, so that all travel together."""
        before, after = ([self._stranger(at) for at in range(self.crowd)] for _ in range(2))
        answers = await asyncio.gather(*before, asked, *after, return_exceptions=True)
        answer = answers[len(before)]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _stranger(self, at: int) -> Awaitable[Any]:
        return self._limiter.check("crowd", f"stranger {at}", limits=CROWD, tenant="crowd")

    def close(self) -> None:
        self._loop.run_until_complete(self._limiter.close())
        self._loop.close()


class Crowded(Blocking):
    crowd = 20


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def open_limiter(store: str, url: str, clock: ManualClock | None = None, key_prefix: str = "lf") -> SyncLimiter:
    url = "memory://" if store.startswith("memory") else url
    options = OPTIONS.get(store, PATIENT)
    if store in ("memory", "redis"):
        return SyncLimiter.connect(url, clock=clock, key_prefix=key_prefix, options=options)
    face = Crowded if store == "coalesced" else Blocking
    return cast("SyncLimiter", face(Limiter.connect(url, clock=clock, key_prefix=key_prefix, options=options)))


@pytest.fixture(params=[pytest.param(s, marks=pytest.mark.slow) if s in ALIKE else s for s in STORES])
def limiter(request: pytest.FixtureRequest, redis_url: str, clock: ManualClock) -> Iterator[SyncLimiter]:
    """A limiter on each store in turn, empty."""
    limiter = open_limiter(request.param, redis_url, clock)
    yield limiter
    limiter.close()
