"""Measure one hot key with four processes of 64 callers each: the load of Redis, and whether the limit is kept."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

from bench.harness import Spread, progress
from bench.library.exactness import Admitted
from bench.ours import RESOURCE
from bench.scale.load import Meter, redis_only_options, unique_prefix
from bench.scale.prepaid import AMPLE, FIXED, HOT, NEXT_TO_NOTHING, TOKEN, hot_limits
from bench.scale.run_size import PROCESSES, RunSize
from bench.scale.worker import Job, WorkerResult, run_worker
from limitforge import SyncLimiter
from limitforge.core.limits import ConsistencyName

EXACT, EXACT_SPENT = "exact", "exact, limit spent"
EXACT_CACHED = "exact, limit spent, denial cache"
PREPAID, PREPAID_TOKEN = "prepaid", "prepaid, token bucket"
PREPAID_SPENT, PREPAID_TOKEN_SPENT = "prepaid, limit spent", "prepaid, token bucket spent, refilling"

ANSWER_SECONDS = 60.0  # a process that sends nothing for this long is dead
START_SECONDS = 0.05  # from sending the start time until it is reached
CACHE_MS = 1_000  # the default
SPENDING = 2  # warm-up is longer if the limit has to be spent before the measurement
EXACT_PART = 10  # an exact limit is smaller, because it has no shares to grow
REFILL_PART = 0.1  # the refill of a bucket per second, as a fraction of its capacity
AMPLE_REFILL = 1_000.0


Message = TypeVar("Message")


class ProcessFailed(Exception):
    """A process of the benchmark failed."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A limit to measure. A `spent` one runs out during the warm-up, and must admit exactly its size."""

    name: str
    algorithm: str
    consistency: ConsistencyName
    denial_cache_ms: int = 0
    spent: bool = False

    @property
    def refills(self) -> bool:
        return self.spent and self.algorithm == TOKEN


CONTESTANTS = (
    Contestant(EXACT, FIXED, "exact"),
    Contestant(PREPAID, FIXED, "prepaid"),
    Contestant(PREPAID_TOKEN, TOKEN, "prepaid"),
    Contestant(EXACT_SPENT, FIXED, "exact", spent=True),
    Contestant(EXACT_CACHED, FIXED, "exact", CACHE_MS, spent=True),
    Contestant(PREPAID_SPENT, FIXED, "prepaid", CACHE_MS, spent=True),
    Contestant(PREPAID_TOKEN_SPENT, TOKEN, "prepaid", CACHE_MS, spent=True),
)


@dataclass(frozen=True, slots=True)
class Round:
    checks_per_second: float
    p50_us: float
    p99_us: float
    cpu_us: float
    redis_cpu_us: float
    redis_busy: float
    calls: float
    admitted: int
    expected: int
    """The largest permitted number: all checks, or the limit."""
    prepaid_out: int | None
    """What Redis has counted at the end, minus the admitted checks: the unspent prepaid shares."""
    lost: int | None
    """The same after every process has closed its limiter."""
    failed: int


@dataclass(frozen=True, slots=True)
class HotKeyResult:
    contestant: str
    processes: int
    checks_per_second: Spread
    p50_us: Spread
    p99_us: Spread
    cpu_us: Spread
    redis_cpu_us: Spread
    redis_busy: Spread
    """The fraction of a core that Redis used."""
    calls: float
    speedup: Spread
    """Checks per second relative to the exact limit with the same rest, same round."""
    admitted: tuple[Admitted, ...]
    """Round by round, from the first check to the last."""
    refills: bool
    prepaid_out: int | None
    """The largest value of all rounds."""
    lost: int | None
    failed: int
    kind: str = "crowd"

    @property
    def is_limit_kept(self) -> bool:
        """True if no round admitted more than permitted."""
        return all(each.count <= each.expected for each in self.admitted)

    @property
    def unspent(self) -> int:
        """The largest unused rest of all rounds."""
        return max(each.expected - each.count for each in self.admitted)


def run(url: str, run_size: RunSize) -> list[HotKeyResult]:
    progress(f"scale: hot key, {PROCESSES} processes, {len(CONTESTANTS)} contestants")
    rounds: dict[str, list[Round]] = {each.name: [] for each in CONTESTANTS}
    meter = Meter([url])
    with _processes() as pipes:
        for number in range(run_size.processes_rounds):
            for at in range(len(CONTESTANTS)):
                each = CONTESTANTS[(at + number) % len(CONTESTANTS)]
                rounds[each.name].append(_round(each, url, meter, pipes, run_size))
                meter.flush()
    meter.close()
    return [_result(each, rounds[each.name], rounds[EXACT_SPENT if each.spent else EXACT]) for each in CONTESTANTS]


@contextmanager
def _processes() -> Iterator[list[Connection]]:
    """Spawn new processes, which inherit nothing from this one, in particular not its event loop."""
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    try:
        for _ in range(PROCESSES):
            our_end, their_end = context.Pipe()
            process = context.Process(target=run_worker, args=(their_end,), daemon=True)
            process.start()
            their_end.close()
            pipes.append(our_end)
            started.append(process)
        yield pipes
        for pipe in pipes:
            pipe.send(None)
        for process in started:
            process.join(ANSWER_SECONDS)
    finally:
        for process in started:
            if process.is_alive():
                process.terminate()
            process.join()


def _round(contestant: Contestant, url: str, meter: Meter, pipes: list[Connection], run_size: RunSize) -> Round:
    size, warm_seconds = AMPLE, run_size.warm_seconds
    if contestant.spent:
        size = run_size.processes_size // (EXACT_PART if contestant.consistency == "exact" else 1)
        warm_seconds *= SPENDING
    refill = size * REFILL_PART if contestant.refills else NEXT_TO_NOTHING if contestant.spent else AMPLE_REFILL
    options = redis_only_options(denial_cache_ms=contestant.denial_cache_ms, sync_interval_ms=run_size.sync_interval_ms)
    shape = (contestant.algorithm, contestant.consistency, size, refill)
    job = Job(url, unique_prefix(), *shape, options, warm_seconds, run_size.processes_seconds)
    _send_to_all(pipes, job)
    _receive_from_all(pipes, str)
    start_at = time.monotonic() + START_SECONDS
    _send_to_all(pipes, start_at)
    time.sleep(START_SECONDS + warm_seconds)
    began, (before,) = time.monotonic(), meter.redis_counters()
    time.sleep(run_size.processes_seconds)
    elapsed, (after,) = time.monotonic() - began, meter.redis_counters()
    worker_results = _receive_from_all(pipes, WorkerResult)
    with SyncLimiter.connect(url, key_prefix=job.key_prefix, options=redis_only_options()) as reader:
        counted = _counted_in_redis(reader, job)
        _send_to_all(pipes, "close")
        _receive_from_all(pipes, str)
        left = _counted_in_redis(reader, job)
    admitted = sum(worker_result.admitted for worker_result in worker_results)
    expected = sum(worker_result.checks for worker_result in worker_results)
    if contestant.spent:
        seconds = max(worker_result.last_reply_at for worker_result in worker_results) - start_at
        expected = min(expected, size + int(refill * seconds))
    is_counted = contestant.algorithm == FIXED  # a bucket refills meanwhile
    latencies = sorted(latency for each in worker_results for latency in each.latencies_ns)
    checks = len(latencies)
    # This process read both values of Redis, and may have waited for a core: use its own elapsed time.
    per_second = sum(len(worker_result.latencies_ns) / worker_result.wall_seconds for worker_result in worker_results)
    return Round(
        per_second,
        latencies[checks // 2] / 1_000,
        latencies[checks * 99 // 100] / 1_000,
        sum(worker_result.cpu_us for worker_result in worker_results) / checks,
        (after.cpu_us - before.cpu_us) / (per_second * elapsed),
        (after.cpu_us - before.cpu_us) / (1e6 * elapsed),
        (after.calls - before.calls) / (per_second * elapsed),
        admitted,
        expected,
        counted - admitted if is_counted else None,
        left - admitted if is_counted else None,
        sum(worker_result.failed for worker_result in worker_results),
    )


def _counted_in_redis(reader: SyncLimiter, job: Job) -> int:
    limits = hot_limits(job.algorithm, job.consistency, job.size, job.refill)
    tenant, subject = HOT
    decision = reader.check(RESOURCE, subject, limits=limits, tenant=tenant, cost=0)
    return job.size - (decision.remaining or 0)


def _send_to_all(pipes: list[Connection], message: object) -> None:
    for pipe in pipes:
        pipe.send(message)


def _receive_from_all(pipes: list[Connection], kind: type[Message]) -> list[Message]:
    """Return the next message of every process. A failed process writes its error to stderr and closes its pipe."""
    messages = []
    for pipe in pipes:
        if not pipe.poll(ANSWER_SECONDS):
            raise ProcessFailed(f"a process of the benchmark sent nothing for {ANSWER_SECONDS:.0f} s")
        try:
            message = pipe.recv()
        except EOFError:
            raise ProcessFailed("a process of the benchmark ended before it was done") from None
        assert isinstance(message, kind)
        messages.append(message)
    return messages


def _result(contestant: Contestant, rounds: list[Round], base: list[Round]) -> HotKeyResult:
    rates = [each.checks_per_second for each in rounds]
    outs = [each.prepaid_out for each in rounds if each.prepaid_out is not None]
    lost = [each.lost for each in rounds if each.lost is not None]
    return HotKeyResult(
        contestant.name,
        PROCESSES,
        Spread.of(rates),
        Spread.of([each.p50_us for each in rounds]),
        Spread.of([each.p99_us for each in rounds]),
        Spread.of([each.cpu_us for each in rounds]),
        Spread.of([each.redis_cpu_us for each in rounds]),
        Spread.of([each.redis_busy for each in rounds]),
        Spread.of([each.calls for each in rounds]).median,
        Spread.of_ratios(rates, [each.checks_per_second for each in base]),
        tuple(Admitted(each.admitted, each.expected) for each in rounds),
        contestant.refills,
        max(outs, default=None),
        max(lost, default=None),
        sum(each.failed for each in rounds),
    )
