"""limitforge as a contestant: the measured plans, and the loops that check them."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from bench.harness import OURS, Contestant, Sweep
from limitforge import Concurrency, Decision, Limiter, Limits, Request, StoreOptions, SyncLimiter, limit_from_fields

TENANT = "acme"
RESOURCE = "GET:/orders"
BATCH = 64
REDIS_ONLY = StoreOptions(failure="raise", deadline_ms=2_000, denial_cache_ms=0)
"""Redis makes every decision, even on a busy machine."""

_prefixes = itertools.count()


PLANS: dict[str, Callable[[int], Limits]] = {
    "token bucket": lambda size: Limits.parse(f"burst=token:{size}/day"),
    "leaky bucket": lambda size: Limits.parse(f"burst=leaky:{size}/day"),
    "fixed window": lambda size: Limits.parse(f"daily=fixed:{size}/day"),
    "sliding window counter": lambda size: Limits.parse(f"recent=counter:{size}/day"),
    "sliding window log": lambda size: Limits.parse(f"recent=sliding:{size}/day"),
    "quota": lambda size: Limits(limit_from_fields({"algorithm": "quota", "limit": size, "period": "day"})),
    "concurrency": lambda size: Limits(Concurrency(name="slots", max_concurrent=size, lease_ttl_seconds=86_400)),
    "two limits": lambda size: Limits.parse(f"burst=token:{2 * size}/day; daily=fixed:{size}/day"),
    "three limits": lambda size: Limits.parse(
        f"burst=token:{4 * size}/day; daily=fixed:{2 * size}/day; recent=counter:{size}/day"
    ),
}
"""Plans by the size of their limits. All windows are a day, so that none ends during a run."""


def contestant(plan: str, url: str, *, key_prefix: str | None = None) -> Contestant:
    return Contestant(OURS, lambda size: _sweep(url, PLANS[plan](size), key_prefix))


def text_contestant(url: str) -> Contestant:
    """A token bucket whose text is parsed with every check."""
    return Contestant(f"{OURS}, limits as text", lambda size: _sweep(url, f"burst=token:{size}/day"))


def _sweep(url: str, limits: Limits | str, key_prefix: str | None = None) -> Sweep:
    check = SyncLimiter.connect(url, key_prefix=key_prefix or _unique_prefix(), options=REDIS_ONLY).check

    def sweep(subjects: Sequence[str]) -> int:
        admitted = 0
        for subject in subjects:
            d = check(RESOURCE, subject, limits=limits, tenant=TENANT)
            _ = (d.limit, d.remaining, d.reset_after_ms, d.retry_after_ms, d.limits)
            if d.allowed:
                admitted += 1
        return admitted

    return sweep


def async_contestant(plan: str, url: str) -> Contestant:
    """Run all checks one after the other in one coroutine."""

    def make(size: int) -> Sweep:
        check = Limiter.connect(url, key_prefix=_unique_prefix(), options=REDIS_ONLY).check
        limits = PLANS[plan](size)
        runner = asyncio.Runner()

        async def sweep(subjects: Sequence[str]) -> int:
            admitted = 0
            for subject in subjects:
                d = await check(RESOURCE, subject, limits=limits, tenant=TENANT)
                _ = (d.limit, d.remaining, d.reset_after_ms, d.retry_after_ms, d.limits)
                if d.allowed:
                    admitted += 1
            return admitted

        return lambda subjects: runner.run(sweep(subjects))

    return Contestant(f"{OURS}, await", make, thread_safe=False)


def batch_contestant(plan: str, url: str, *, key_prefix: str | None = None) -> Contestant:
    """Use `check_many`, like a gateway that sends all pending checks."""

    def make(size: int) -> Sweep:
        limiter = SyncLimiter.connect(url, key_prefix=key_prefix or _unique_prefix(), options=REDIS_ONLY)
        limits = PLANS[plan](size)

        def sweep(subjects: Sequence[str]) -> int:
            admitted = 0
            for start in range(0, len(subjects), BATCH):
                batch = subjects[start : start + BATCH]
                requests = [Request(resource=RESOURCE, subject=s, limits=limits, tenant=TENANT) for s in batch]
                for decision in limiter.check_many(requests):
                    if not isinstance(decision, Decision):
                        raise decision
                    admitted += decision.allowed
            return admitted

        return sweep

    return Contestant(f"{OURS}, batches of {BATCH}", make)


def _unique_prefix() -> str:
    """Return a new prefix, so that limiters on one Redis have separate state."""
    return f"b{next(_prefixes)}"
