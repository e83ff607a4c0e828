"""One hot key, four processes with 64 callers each: how busy is Redis, and is the limit kept?"""

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

ANSWER_SECONDS = 60.0  # a process that says nothing for so long is dead
START_SECONDS = 0.05  # from telling all of them when to start until they do
CACHE_MS = 1_000  # as shipped
SPENDING = 2  # a limit that is to be spent before anything is measured has so much more time for it
EXACT_PART = 10  # and is smaller by that if no shares need time to grow
REFILL_PART = 0.1  # of its capacity, that a bucket regains in a second
AMPLE_REFILL = 1_000.0


Message = TypeVar("Message")


class ProcessFailed(Exception):
    """One of the processes broke."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One whose limit can be `spent` runs out of it on the way, and should admit that and no more."""

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
    """What there was to give: all that were asked for, or the limit."""
    prepaid_out: int | None
    """What Redis had counted at the end, and nobody had been admitted for: shares that are out."""
    lost: int | None
    """The same once every process had closed its limiter."""
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
    """Which part of a core Redis used."""
    calls: float
    speedup: Spread
    """Checks a second against the exact limit that has as much left, same round."""
    admitted: tuple[Admitted, ...]
    """Round by round, from the first check to the last."""
    refills: bool
    prepaid_out: int | None
    """At most, of the rounds."""
    lost: int | None
    failed: int
    kind: str = "crowd"

    @property
    def is_limit_kept(self) -> bool:
        """Whether it never admitted more than there was."""
        return all(each.count <= each.expected for each in self.admitted)

    @property
    def unspent(self) -> int:
        """The most that it left in any round."""
        return max(each.expected - each.count for each in self.admitted)


def run(url: str, pace: RunSize) -> list[HotKeyResult]:
    progress(f"scale: hot key, {PROCESSES} processes, {len(CONTESTANTS)} contestants")
    rounds: dict[str, list[Round]] = {each.name: [] for each in CONTESTANTS}
    meter = Meter([url])
    with _processes() as pipes:
        for number in range(pace.processes_rounds):
            for at in range(len(CONTESTANTS)):
                each = CONTESTANTS[(at + number) % len(CONTESTANTS)]
                rounds[each.name].append(_round(each, url, meter, pipes, pace))
                meter.flush()
    meter.close()
    return [_result(each, rounds[each.name], rounds[EXACT_SPENT if each.spent else EXACT]) for each in CONTESTANTS]


@contextmanager
def _processes() -> Iterator[list[Connection]]:
    """Started afresh: nothing of this process, its loop least of all, goes along."""
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    try:
        for _ in range(PROCESSES):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_worker, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
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


def _round(contestant: Contestant, url: str, meter: Meter, pipes: list[Connection], pace: RunSize) -> Round:
    size, warm_seconds = AMPLE, pace.warm_seconds
    if contestant.spent:
        size = pace.processes_size // (EXACT_PART if contestant.consistency == "exact" else 1)
        warm_seconds *= SPENDING
    refill = size * REFILL_PART if contestant.refills else NEXT_TO_NOTHING if contestant.spent else AMPLE_REFILL
    options = redis_only_options(denial_cache_ms=contestant.denial_cache_ms, sync_interval_ms=pace.sync_interval_ms)
    shape = (contestant.algorithm, contestant.consistency, size, refill)
    job = Job(url, unique_prefix(), *shape, options, warm_seconds, pace.processes_seconds)
    _send_to_all(pipes, job)
    _receive_from_all(pipes, str)
    start_at = time.monotonic() + START_SECONDS
    _send_to_all(pipes, start_at)
    time.sleep(START_SECONDS + warm_seconds)
    began, (before,) = time.monotonic(), meter.redis_counters()
    time.sleep(pace.processes_seconds)
    wall, (after,) = time.monotonic() - began, meter.redis_counters()
    tallies = _receive_from_all(pipes, WorkerResult)
    with SyncLimiter.connect(url, key_prefix=job.key_prefix, options=redis_only_options()) as looker:
        counted = _counted_in_redis(looker, job)
        _send_to_all(pipes, "close")
        _receive_from_all(pipes, str)
        left = _counted_in_redis(looker, job)
    admitted = sum(tally.admitted for tally in tallies)
    should = sum(tally.checks for tally in tallies)
    if contestant.spent:
        seconds = max(tally.last_reply_at for tally in tallies) - start_at
        should = min(should, size + int(refill * seconds))
    is_counted = contestant.algorithm == FIXED  # a bucket refills meanwhile
    took = sorted(took for tally in tallies for took in tally.latencies_ns)
    checks = len(took)
    # Both ends of what Redis did were read by this process, which may have waited for a core: its own wall counts.
    per_second = sum(len(tally.latencies_ns) / tally.wall_seconds for tally in tallies)
    return Round(
        per_second,
        took[checks // 2] / 1_000,
        took[checks * 99 // 100] / 1_000,
        sum(tally.cpu_us for tally in tallies) / checks,
        (after.cpu_us - before.cpu_us) / (per_second * wall),
        (after.cpu_us - before.cpu_us) / (1e6 * wall),
        (after.calls - before.calls) / (per_second * wall),
        admitted,
        should,
        counted - admitted if is_counted else None,
        left - admitted if is_counted else None,
        sum(tally.failed for tally in tallies),
    )


def _counted_in_redis(looker: SyncLimiter, job: Job) -> int:
    limits = hot_limits(job.algorithm, job.consistency, job.size, job.refill)
    tenant, subject = HOT
    decision = looker.check(RESOURCE, subject, limits=limits, tenant=tenant, cost=0)
    return job.size - (decision.remaining or 0)


def _send_to_all(pipes: list[Connection], what: object) -> None:
    for pipe in pipes:
        pipe.send(what)


def _receive_from_all(pipes: list[Connection], kind: type[Message]) -> list[Message]:
    """What all of them say. One that broke has said why on stderr, and closed its pipe."""
    heard = []
    for pipe in pipes:
        if not pipe.poll(ANSWER_SECONDS):
            raise ProcessFailed(f"a process of the benchmark said nothing for {ANSWER_SECONDS:.0f} s")
        try:
            said = pipe.recv()
        except EOFError:
            raise ProcessFailed("a process of the benchmark ended before it was done") from None
        assert isinstance(said, kind)
        heard.append(said)
    return heard


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
