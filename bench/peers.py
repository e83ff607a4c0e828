"""The peers as contestants, used as documented, with limits of the same sizes and keys with the same parts.

`limits` returns a verdict; remaining and reset need a second call, `get_window_stats`. `throttled-py` returns both.
Neither checks several limits at once: this takes one call per limit, until one denies.
"""

import itertools
from collections.abc import Callable, Sequence

from limits import RateLimitItemPerDay
from limits.storage import MemoryStorage, RedisStorage
from limits.strategies import (
    FixedWindowRateLimiter,
    MovingWindowRateLimiter,
    RateLimiter,
    SlidingWindowCounterRateLimiter,
)
from throttled import MemoryStore, RedisStore, Throttled, rate_limiter

from bench.harness import Contestant, Sweep
from bench.ours import RESOURCE, TENANT

FIXED, COUNTER, LOG = FixedWindowRateLimiter, SlidingWindowCounterRateLimiter, MovingWindowRateLimiter

_NAMES: dict[type[RateLimiter], str] = {FIXED: "fixed window", COUNTER: "sliding window counter", LOG: "moving window"}
_prefixes = itertools.count()


def limits_contestant(kind: type[RateLimiter], url: str, *, stats: bool = True) -> Contestant:
    def make(size: int) -> Sweep:
        strategy = kind(_limits_storage(url))
        hit, look = strategy.hit, strategy.get_window_stats
        item = RateLimitItemPerDay(size)

        def verdicts(subjects: Sequence[str]) -> int:
            admitted = 0
            for subject in subjects:
                if hit(item, TENANT, RESOURCE, subject):
                    admitted += 1
            return admitted

        def sweep(subjects: Sequence[str]) -> int:
            admitted = 0
            for subject in subjects:
                if hit(item, TENANT, RESOURCE, subject):
                    admitted += 1
                window = look(item, TENANT, RESOURCE, subject)
                _ = (item.amount, window.remaining, window.reset_time)
            return admitted

        return sweep if stats else verdicts

    return Contestant(
        f"limits, {_NAMES[kind]}, {'with stats' if stats else 'verdict alone'}", make, full_decision=stats
    )


def limits_of_three(url: str) -> Contestant:
    """Combine two fixed windows, its cheapest limit, with a counter."""

    def make(size: int) -> Sweep:
        storage = _limits_storage(url)
        fixed, blended = FIXED(storage), COUNTER(storage)
        each = tuple(
            (strategy.hit, strategy.get_window_stats, RateLimitItemPerDay(amount))
            for strategy, amount in ((fixed, 4 * size), (fixed, 2 * size), (blended, size))
        )

        def sweep(subjects: Sequence[str]) -> int:
            admitted = 0
            for subject in subjects:
                for hit, _, item in each:
                    if not hit(item, TENANT, RESOURCE, subject):
                        break
                else:
                    admitted += 1
                for _, look, item in each:
                    window = look(item, TENANT, RESOURCE, subject)
                    _ = (item.amount, window.remaining, window.reset_time)
            return admitted

        return sweep

    return Contestant("limits, 2 fixed windows and a counter, with stats", make)


def throttled_contestant(kind: str, url: str) -> Contestant:
    def make(size: int) -> Sweep:
        limit = _throttled(kind, size, _throttled_store(url), f"p{next(_prefixes)}").limit

        def sweep(subjects: Sequence[str]) -> int:
            admitted = 0
            for subject in subjects:
                result = limit(f"{TENANT}:{RESOURCE}:{subject}")
                state = result.state
                _ = (state.limit, state.remaining, state.reset_after, state.retry_after)
                if not result.limited:
                    admitted += 1
            return admitted

        return sweep

    return Contestant(f"throttled-py, {kind.replace('_', ' ')}", make)


def throttled_of_three(url: str) -> Contestant:
    """Combine the same three limits as limitforge: token bucket, fixed window, counter."""

    def make(size: int) -> Sweep:
        store = _throttled_store(url)
        sizes = (("token_bucket", 4 * size), ("fixed_window", 2 * size), ("sliding_window", size))
        each: tuple[Callable[[str], rate_limiter.RateLimitResult], ...] = tuple(
            _throttled(kind, amount, store, f"p{next(_prefixes)}").limit for kind, amount in sizes
        )

        def sweep(subjects: Sequence[str]) -> int:
            admitted = 0
            for subject in subjects:
                key = f"{TENANT}:{RESOURCE}:{subject}"
                for limit in each:
                    result = limit(key)
                    state = result.state
                    _ = (state.limit, state.remaining, state.reset_after, state.retry_after)
                    if result.limited:
                        break
                else:
                    admitted += 1
            return admitted

        return sweep

    return Contestant("throttled-py, token bucket, fixed and sliding window", make)


def _limits_storage(url: str) -> MemoryStorage | RedisStorage:
    return MemoryStorage() if url == "memory://" else RedisStorage(url, key_prefix=f"p{next(_prefixes)}")


def _throttled_store(url: str) -> MemoryStore | RedisStore:
    return MemoryStore(options={"MAX_SIZE": 1_000_000}) if url == "memory://" else RedisStore(server=url)


def _throttled(kind: str, size: int, store: MemoryStore | RedisStore, prefix: str) -> Throttled:
    return Throttled(using=kind, quota=rate_limiter.per_day(size, burst=size), store=store, key_prefix=prefix)
