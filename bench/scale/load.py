"""Run concurrent callers, each with one check at a time, and measure elapsed time, CPU time and each Redis."""

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
"""Tenant and subject."""

CheckFunction = Callable[[TenantSubject], Awaitable[bool]]
"""Check once, read every field of the reply, and return whether it was admitted."""

_prefixes = itertools.count()


class LoadResult(NamedTuple):
    admitted: int
    failed: int
    latencies_ns: list[int]
    """The latency of each check."""


class Sample(NamedTuple):
    """One round of a contestant; times are in microseconds per check."""

    checks: int
    admitted: int
    failed: int
    checks_per_second: float
    p50_us: float
    p99_us: float
    cpu_us: float
    shards_cpu_us: tuple[float, ...]
    """CPU time per check in each Redis, whether that took part in it or not."""
    shards_calls: tuple[int, ...]


def redis_only_options(*, denial_cache_ms: int = 0, sync_interval_ms: float = 200) -> StoreOptions:
    """Use a long deadline and no fallback, so that a busy machine causes no decision without Redis and errors are
    counted.
    """
    return StoreOptions(
        failure="raise", deadline_ms=2_000, denial_cache_ms=denial_cache_ms, sync_interval_ms=sync_interval_ms
    )


def unique_prefix() -> str:
    """Return a new prefix, so that limiters on the same servers have separate state."""
    return f"s{next(_prefixes)}"


def make_check(limiter: Limiter, limits: Limits) -> CheckFunction:
    check = limiter.check

    async def check_subject(who: TenantSubject) -> bool:
        tenant, subject = who
        d = await check(RESOURCE, subject, limits=limits, tenant=tenant)
        _ = (d.limit, d.remaining, d.reset_after_ms, d.retry_after_ms, d.limits)
        return d.allowed

    return check_subject


async def run_callers(
    check_subject: CheckFunction, callers_of: Iterator[TenantSubject], callers: int, seconds: float = math.inf
) -> LoadResult:
    """Run callers that share an iterator of subjects, until it ends or the time has passed.

    A decision from a prepaid share never waits, so no other task of the loop would run. Therefore every caller yields
    after some decisions, with every kind of limit. This is included in checks per second and CPU, and not in the time
    of a decision.
    """
    clock, pause = time.perf_counter_ns, asyncio.sleep
    end = clock() + seconds * 1e9
    latencies_ns: list[int] = []
    record = latencies_ns.append

    failed = 0

    async def caller() -> int:
        nonlocal failed
        admitted = 0
        for number, who in enumerate(callers_of, 1):
            began = clock()
            try:
                if await check_subject(who):
                    admitted += 1
            except LimitforgeError as error:
                if not failed:
                    progress(f"a check failed: {error!r}")
                failed += 1
            done = clock()
            record(done - began)
            if done >= end:
                break
            if not number % CHECKS_PER_YIELD:
                await pause(0)
        return admitted

    admitted = sum(await asyncio.gather(*(caller() for _ in range(callers))))
    return LoadResult(admitted, failed, latencies_ns)


class RedisCounters(NamedTuple):
    """The CPU time of a Redis process in microseconds, and its number of script calls."""

    cpu_us: float
    calls: int


class Meter:
    """Measures a round. It reads the statistics of all servers on separate connections between rounds."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers: list[Any] = [Redis.from_url(url, decode_responses=True) for url in urls]

    def flush(self) -> None:
        for server in self._servers:
            server.flushall()

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def sample(
        self, check_subject: CheckFunction, callers_of: Iterator[TenantSubject], callers: int, seconds: float
    ) -> Sample:
        settle()
        before = self.redis_counters()
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        admitted, failed, latencies = await run_callers(check_subject, callers_of, callers, seconds)
        wall_ns, cpu_ns = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        after = self.redis_counters()
        checks = len(latencies)
        latencies.sort()
        spent = list(zip(before, after, strict=True))
        return Sample(
            checks,
            admitted,
            failed,
            1e9 * checks / wall_ns,
            latencies[checks // 2] / 1_000,
            latencies[checks * 99 // 100] / 1_000,
            cpu_ns / 1_000 / checks,
            tuple((now.cpu_us - then.cpu_us) / checks for then, now in spent),
            tuple(now.calls - then.calls for then, now in spent),
        )

    def redis_counters(self) -> list[RedisCounters]:
        return [_redis_counters(server.info("cpu", "commandstats")) for server in self._servers]


def _redis_counters(info: dict[str, Any]) -> RedisCounters:
    calls: int = info.get("cmdstat_evalsha", {"calls": 0})["calls"]
    return RedisCounters(1e6 * (info["used_cpu_user"] + info["used_cpu_sys"]), calls)
