"""Callers that ask one after the other, and what it took: on the wall, in this process and in each Redis."""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from redis import Redis

from bench.harness import progress, settle
from bench.ours import RESOURCE
from limitforge import Limiter, LimitforgeError, Limits, StoreOptions

CHECKS_PER_YIELD = 8

TenantSubject = tuple[str, str]
"""A tenant and a subject."""

CheckFunction = Callable[[TenantSubject], Awaitable[bool]]
"""Checks once, reads all that the answer tells, and says whether it was admitted."""

_prefixes = itertools.count()


class LoadResult(NamedTuple):
    admitted: int
    failed: int
    latencies_ns: list[int]
    """Of each check, from asking to knowing."""


class Sample(NamedTuple):
    """A round of one contestant; times are in microseconds, for one check."""

    checks: int
    admitted: int
    failed: int
    checks_per_second: float
    p50_us: float
    p99_us: float
    cpu_us: float
    shards_cpu_us: tuple[float, ...]
    """What a check took in each Redis, whether that had a part in it or not."""
    shards_calls: tuple[int, ...]


def redis_only_options(*, denial_cache_ms: int = 0, sync_interval_ms: float = 200) -> StoreOptions:
    """Nothing is decided without Redis because the machine is busy, and what goes wrong is counted."""
    return StoreOptions(
        failure="raise", deadline_ms=2_000, denial_cache_ms=denial_cache_ms, sync_interval_ms=sync_interval_ms
    )


def unique_prefix() -> str:
    """State of its own for each limiter: they share servers."""
    return f"s{next(_prefixes)}"


def make_check(limiter: Limiter, limits: Limits) -> CheckFunction:
    check = limiter.check

    async def ask(who: TenantSubject) -> bool:
        tenant, subject = who
        d = await check(RESOURCE, subject, limits=limits, tenant=tenant)
        _ = (d.limit, d.remaining, d.reset_after_ms, d.retry_after_ms, d.limits)
        return d.allowed

    return ask


async def run_callers(
    ask: CheckFunction, callers_of: Iterator[TenantSubject], callers: int, seconds: float = math.inf
) -> LoadResult:
    """Callers share what there is to ask, and end with it or when the time is over.

    A decision that a share pays for never waits, so nothing else on the loop would ever run: every caller steps back
    after some decisions, whoever decides them. That counts in the checks per second and in the CPU of all alike, and
    not in the time that a decision took.
    """
    clock, pause = time.perf_counter_ns, asyncio.sleep
    end = clock() + seconds * 1e9
    took_ns: list[int] = []
    took = took_ns.append

    failed = 0

    async def caller() -> int:
        nonlocal failed
        admitted = 0
        for number, who in enumerate(callers_of, 1):
            began = clock()
            try:
                if await ask(who):
                    admitted += 1
            except LimitforgeError as error:
                if not failed:
                    progress(f"a check failed: {error!r}")
                failed += 1
            done = clock()
            took(done - began)
            if done >= end:
                break
            if not number % CHECKS_PER_YIELD:
                await pause(0)
        return admitted

    admitted = sum(await asyncio.gather(*(caller() for _ in range(callers))))
    return LoadResult(admitted, failed, took_ns)


class RedisCounters(NamedTuple):
    """Of one Redis: microseconds of CPU of its process, and how many scripts it was asked to run."""

    cpu_us: float
    calls: int


class Meter:
    """Measures a round. It reads the accounts of all servers on connections of its own, while nobody asks."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers: list[Any] = [Redis.from_url(url, decode_responses=True) for url in urls]

    def flush(self) -> None:
        for server in self._servers:
            server.flushall()

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def sample(
        self, ask: CheckFunction, callers_of: Iterator[TenantSubject], callers: int, seconds: float
    ) -> Sample:
        settle()
        before = self.redis_counters()
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        admitted, failed, took = await run_callers(ask, callers_of, callers, seconds)
        wall_ns, cpu_ns = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        after = self.redis_counters()
        checks = len(took)
        took.sort()
        spent = list(zip(before, after, strict=True))
        return Sample(
            checks,
            admitted,
            failed,
            1e9 * checks / wall_ns,
            took[checks // 2] / 1_000,
            took[checks * 99 // 100] / 1_000,
            cpu_ns / 1_000 / checks,
            tuple((now.cpu_us - then.cpu_us) / checks for then, now in spent),
            tuple(now.calls - then.calls for then, now in spent),
        )

    def redis_counters(self) -> list[RedisCounters]:
        return [_redis_counters(server.info("cpu", "commandstats")) for server in self._servers]


def _redis_counters(info: dict[str, Any]) -> RedisCounters:
    calls: int = info.get("cmdstat_evalsha", {"calls": 0})["calls"]
    return RedisCounters(1e6 * (info["used_cpu_user"] + info["used_cpu_sys"]), calls)
