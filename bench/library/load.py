"""Callers that ask one after the other, and what it took: on the wall, in this process and in Redis."""

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
    """Of each check, from asking to knowing."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A round of one contestant; everything but the first is for one check, in microseconds."""

    checks_per_second: float
    p50_us: float
    p99_us: float
    cpu_us: float
    redis_cpu_us: float
    script_us: float
    calls: float
    admitted: float


async def run_callers(
    ask: CheckFunction, subjects: Iterator[str], callers: int, seconds: float = math.inf
) -> LoadResult:
    """Callers share the subjects, and end with them or when the time is over."""
    clock = time.perf_counter_ns
    end = clock() + seconds * 1e9
    took_ns: list[int] = []
    took = took_ns.append

    async def caller() -> int:
        admitted = 0
        began = clock()
        for subject in subjects:
            if await ask(subject):
                admitted += 1
            done = clock()
            took(done - began)
            began = done
            if done >= end:
                break
        return admitted

    return LoadResult(sum(await asyncio.gather(*(caller() for _ in range(callers)))), took_ns)


class Meter:
    """Measures a round. It reads Redis's accounts on a connection of its own, while nobody asks."""

    def __init__(self, url: str) -> None:
        self._redis: Any = Redis.from_url(url, decode_responses=True)

    def flush(self) -> None:
        self._redis.flushall()

    def close(self) -> None:
        self._redis.close()

    async def sample(self, ask: CheckFunction, subjects: Iterator[str], callers: int, seconds: float) -> Sample:
        settle()
        redis_cpu, script, calls = self._redis_counters()
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        admitted, took = await run_callers(ask, subjects, callers, seconds)
        wall_ns, cpu_ns = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        after = self._redis_counters()
        checks = len(took)
        took.sort()
        return Sample(
            1e9 * checks / wall_ns,
            took[checks // 2] / 1_000,
            took[checks * 99 // 100] / 1_000,
            cpu_ns / 1_000 / checks,
            (after[0] - redis_cpu) / checks,
            (after[1] - script) / checks,
            (after[2] - calls) / checks,
            admitted / checks,
        )

    def _redis_counters(self) -> tuple[float, int, int]:
        """Microseconds of CPU of its process, microseconds in scripts, and how many calls those were."""
        info = self._redis.info("cpu", "commandstats")
        script = info.get("cmdstat_evalsha", {"usec": 0, "calls": 0})
        return 1e6 * (info["used_cpu_user"] + info["used_cpu_sys"]), script["usec"], script["calls"]
