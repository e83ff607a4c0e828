"""Run concurrent callers, each with one check at a time, and measure elapsed time, CPU time and Redis time."""

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis import Redis

from bench.harness import settle
from bench.library.contestants import CheckFunction


class LoadResult(NamedTuple):
    admitted: int
    latencies_ns: list[int]
    """The latency of each check."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of a contestant. All fields except the first are per check; times are in microseconds."""

    checks_per_second: float
    p50_us: float
    p99_us: float
    cpu_us: float
    redis_cpu_us: float
    script_us: float
    calls: float
    admitted: float


async def run_callers(
    check_subject: CheckFunction, subjects: Iterator[str], callers: int, seconds: float = math.inf
) -> LoadResult:
    """Run callers that share the subjects, until there are no more or the time has passed."""
    clock = time.perf_counter_ns
    end = clock() + seconds * 1e9
    latencies_ns: list[int] = []
    record = latencies_ns.append

    async def caller() -> int:
        admitted = 0
        began = clock()
        for subject in subjects:
            if await check_subject(subject):
                admitted += 1
            done = clock()
            record(done - began)
            began = done
            if done >= end:
                break
        return admitted

    return LoadResult(sum(await asyncio.gather(*(caller() for _ in range(callers)))), latencies_ns)


class Meter:
    """Measures a round. It reads the statistics of Redis on a separate connection between rounds."""

    def __init__(self, url: str) -> None:
        self._redis: Any = Redis.from_url(url, decode_responses=True)

    def flush(self) -> None:
        self._redis.flushall()

    def close(self) -> None:
        self._redis.close()

    async def sample(
        self, check_subject: CheckFunction, subjects: Iterator[str], callers: int, seconds: float
    ) -> Sample:
        settle()
        redis_cpu, script, calls = self._redis_counters()
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        admitted, latencies = await run_callers(check_subject, subjects, callers, seconds)
        wall_ns, cpu_ns = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        after = self._redis_counters()
        checks = len(latencies)
        latencies.sort()
        return Sample(
            1e9 * checks / wall_ns,
            latencies[checks // 2] / 1_000,
            latencies[checks * 99 // 100] / 1_000,
            cpu_ns / 1_000 / checks,
            (after[0] - redis_cpu) / checks,
            (after[1] - script) / checks,
            (after[2] - calls) / checks,
            admitted / checks,
        )

    def _redis_counters(self) -> tuple[float, int, int]:
        """Return the CPU time of the process in microseconds, the time in scripts in microseconds, and the number of
        calls.
        """
        info = self._redis.info("cpu", "commandstats")
        script = info.get("cmdstat_evalsha", {"usec": 0, "calls": 0})
        return 1e6 * (info["used_cpu_user"] + info["used_cpu_sys"]), script["usec"], script["calls"]
