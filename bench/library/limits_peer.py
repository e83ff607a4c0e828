"""limits with its asyncio API: `hit` returns only a verdict; more would need a second call.

It uses redis-py. In a short trial, its default client coredis reached 55 to 85 % of that with 64 callers.
"""

from typing import Any

from limits import RateLimitItem, RateLimitItemPerDay
from limits.aio.storage import RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter, RateLimiter, SlidingWindowCounterRateLimiter

from bench.library.contestants import (
    CheckFunction,
    Contestant,
    OpenLimiter,
    Sizes,
    check_each_until_denied,
    unique_prefix,
)
from bench.ours import RESOURCE, TENANT

FIXED, COUNTER = FixedWindowRateLimiter, SlidingWindowCounterRateLimiter

_NAMES: dict[type[RateLimiter], str] = {FIXED: "limits, fixed window", COUNTER: "limits, sliding window counter"}


def contestant(kind: type[RateLimiter]) -> Contestant:
    async def open_(url: str, sizes: Sizes) -> OpenLimiter:
        storage = RedisStorage(f"async+{url}", implementation="redispy", key_prefix=unique_prefix())
        strategy = kind(storage)
        each = tuple(_make_check(strategy, RateLimitItemPerDay(size)) for size in sizes)
        bridge: Any = storage.bridge  # the storage has no public method to close it
        return OpenLimiter(check_each_until_denied(each), each[0], bridge.get_connection().aclose)

    return Contestant(_NAMES[kind], open_)


def _make_check(strategy: RateLimiter, item: RateLimitItem) -> CheckFunction:
    hit = strategy.hit

    async def check_subject(subject: str) -> bool:
        return await hit(item, TENANT, RESOURCE, subject)

    return check_subject
