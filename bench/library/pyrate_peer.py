"""pyrate-limiter: one `Limiter` whose factory makes a bucket per key, as in its README.

It returns only a verdict. Several rates of one key are one call, all or nothing. Each limiter runs one check at a time,
because an asyncio.Lock surrounds every `try_acquire_async`. The factory does not schedule the leaking of a log, so that
its sweeps over all keys do not fall into the rounds of other contestants.
"""

from collections.abc import Callable

from pyrate_limiter import (
    AbstractBucket,
    BucketFactory,
    Duration,
    Limiter,
    Rate,
    RateItem,
    RedisBucket,
    RedisStateStore,
    StateBucket,
    TokenBucket,
    WallClock,
)
from redis.asyncio import Redis

from bench.library.contestants import Contestant, OpenLimiter, Sizes, unique_prefix
from bench.ours import RESOURCE, TENANT

MakeBucket = Callable[[str], AbstractBucket]


class BucketForEachKey(BucketFactory):
    def __init__(self, make: MakeBucket) -> None:
        self._make = make
        self._clock = WallClock()
        self._buckets: dict[str, AbstractBucket] = {}

    def wrap_item(self, name: str, weight: int = 1) -> RateItem:
        return RateItem(name, self._clock.now(), weight=weight)

    def get(self, item: RateItem) -> AbstractBucket:
        bucket = self._buckets.get(item.name)
        if bucket is None:
            bucket = self._buckets[item.name] = self._make(item.name)
        return bucket


def log() -> Contestant:
    """Its `RedisBucket`: a sorted set with a member per hit."""

    async def open_(url: str, sizes: Sizes) -> OpenLimiter:
        redis, rates, mine = Redis.from_url(url), _rates(sizes), unique_prefix()
        any_bucket: RedisBucket = await RedisBucket.init(rates, redis, mine)  # loads the script for all of them
        return _open_limiter(redis, lambda name: RedisBucket(rates, redis, f"{mine}:{name}", any_bucket.script_hash))

    return Contestant("pyrate-limiter, sliding log", open_)


def token_bucket() -> Contestant:
    """Its `StateBucket` on a `RedisStateStore`, the counterpart of a token bucket."""

    async def open_(url: str, sizes: Sizes) -> OpenLimiter:
        redis, rates, mine = Redis.from_url(url), _rates(sizes), unique_prefix()

        def make(name: str) -> AbstractBucket:
            return StateBucket(rates, algorithm=TokenBucket(), store=RedisStateStore(redis, f"{mine}:{name}"))

        return _open_limiter(redis, make)

    return Contestant("pyrate-limiter, token bucket", open_)


def _open_limiter(redis: Redis, make: MakeBucket) -> OpenLimiter:
    limiter = Limiter(BucketForEachKey(make))
    acquire = limiter.try_acquire_async

    async def check_subject(subject: str) -> bool:
        return await acquire(f"{TENANT}:{RESOURCE}:{subject}", blocking=False)

    async def close() -> None:
        limiter.close()
        await redis.aclose()

    return OpenLimiter(check_subject, None, close)


def _rates(sizes: Sizes) -> list[Rate]:
    """Return the rates in ascending order. Two rates of one bucket must not have the same interval."""
    return [Rate(size, Duration.DAY * (size // sizes[-1])) for size in reversed(sizes)]
