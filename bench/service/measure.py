"""Measure one load: latency of the client, and CPU time in the process and in Redis."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from bench.service.process import cpu_us
from bench.service.wrk import RequestTemplate, run_load, send_each_once


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of a contestant; CPU time is in microseconds per check."""

    checks_per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    redis_cpu_us: float
    denied: float | None
    """The denied fraction of the checks; None if only bodies show a denial."""
    errors: int


class Meter:
    """Reads the CPU time of a process and of Redis before and after a load."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._redis: Any = Redis.from_url(redis_url, decode_responses=True)
        self._folder = folder

    def flush(self) -> None:
        self._redis.flushall()

    def close(self) -> None:
        self._redis.close()

    def warm(self, request_template: RequestTemplate, subjects: int, seconds: int) -> None:
        run_load(request_template, subjects, seconds, self._folder)

    def send_each_once(self, request_template: RequestTemplate, subjects: int, seconds: int) -> None:
        """Send one check per subject, or as many as fit into the time."""
        send_each_once(request_template, subjects, seconds, self._folder)

    def count_admitted(self, request_template: RequestTemplate, seconds: int) -> tuple[int, int]:
        """Return the number of admitted checks of one subject, and the number of its checks."""
        loaded = run_load(request_template, 1, seconds, self._folder, look=True)
        return loaded.requests - (loaded.denied or 0), loaded.requests

    def sample(self, pid: int, request_template: RequestTemplate, subjects: int, seconds: int) -> Sample:
        cpu, redis_cpu = cpu_us(pid), self._redis_cpu_us()
        loaded = run_load(request_template, subjects, seconds, self._folder)
        cpu, redis_cpu = cpu_us(pid) - cpu, self._redis_cpu_us() - redis_cpu
        checks = max(loaded.requests, 1)
        return Sample(
            loaded.per_second,
            loaded.p50_ms,
            loaded.p99_ms,
            cpu / checks,
            redis_cpu / checks,
            None if loaded.denied is None else loaded.denied / checks,
            loaded.errors,
        )

    def _redis_cpu_us(self) -> float:
        info = self._redis.info("cpu")
        return 1e6 * float(info["used_cpu_user"] + info["used_cpu_sys"])
