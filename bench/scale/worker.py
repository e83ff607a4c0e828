"""One of several processes that share a hot key. It runs the jobs from its pipe, and sends the results back."""

import asyncio
import itertools
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from bench.harness import settle
from bench.ours import RESOURCE
from bench.scale.load import make_check, run_callers
from bench.scale.prepaid import HOT, hot_limits
from bench.scale.run_size import MANY
from limitforge import Limiter, StoreOptions
from limitforge.core.limits import ConsistencyName


@dataclass(frozen=True, slots=True)
class Job:
    """Send checks for `warm_seconds`, and then for `seconds` with measurement."""

    url: str
    key_prefix: str
    algorithm: str
    consistency: ConsistencyName
    size: int
    refill: float
    options: StoreOptions
    warm_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The result of a job. `checks`, `admitted` and `failed` include the warm-up; the other fields do not."""

    checks: int
    admitted: int
    failed: int
    latencies_ns: list[int]
    wall_seconds: float
    cpu_us: float
    last_reply_at: float
    """When the last reply arrived, by the clock that all processes share."""


def run_worker(pipe: Connection) -> None:
    """Run jobs until None arrives. The messages of a job: ready, start time, result, permission to close, closed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while (job := pipe.recv()) is not None:
            runner.run(_run_job(job, pipe))


async def _run_job(job: Job, pipe: Connection) -> None:
    limits = hot_limits(job.algorithm, job.consistency, job.size, job.refill)
    limiter = Limiter.connect(job.url, key_prefix=job.key_prefix, options=job.options)
    tenant, subject = HOT
    try:
        await limiter.check(RESOURCE, subject, limits=limits, tenant=tenant, cost=0)  # opens the connection
        settle()
        pipe.send("ready")
        start_at: float = pipe.recv()
        time.sleep(max(start_at - time.monotonic(), 0))  # noqa: ASYNC251 - no other task is running yet
        check_subject = make_check(limiter, limits)
        warm_left = start_at + job.warm_seconds - time.monotonic()
        warm = await run_callers(check_subject, itertools.repeat(HOT), MANY, warm_left)
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        seconds = start_at + job.warm_seconds + job.seconds - time.monotonic()
        admitted, failed, latencies = await run_callers(check_subject, itertools.repeat(HOT), MANY, seconds)
        wall_ns, cpu_ns = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        last_at = time.monotonic()
        pipe.send(
            WorkerResult(
                len(warm.latencies_ns) + len(latencies),
                warm.admitted + admitted,
                warm.failed + failed,
                latencies,
                wall_ns / 1e9,
                cpu_ns / 1_000,
                last_at,
            )
        )
        pipe.recv()
    finally:
        await limiter.close()
    pipe.send("closed")
