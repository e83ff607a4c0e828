"""Run the workloads in interleaved rounds."""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvloop

from bench.harness import OURS, Spread, progress
from bench.library import limits_peer, minimal_script, ours, pyrate_peer, throttled_peer
from bench.library.contestants import Contestant, OpenLimiter, Workload, limit_sizes
from bench.library.exactness import Exactness, exactness
from bench.library.load import Meter, Sample, run_callers

MANY, ALONE = 64, 1

ONE, TWO, THREE = "many keys, one limit", "many keys, two limits", "many keys, three limits"
HOT, DENIED, CACHED = "one hot key", "mostly denied", "denials from the cache"


@dataclass(frozen=True, slots=True)
class Result:
    workload: str
    limits: int
    callers: int
    contestant: str
    full_decision: bool
    checks_per_second: Spread
    p50_us: Spread
    p99_us: Spread
    cpu_us: Spread
    redis_cpu_us: Spread
    script_us: Spread
    calls: float
    """Scripts per check: below 1 when checks share a call."""
    admitted: float
    """The admitted fraction of the measured checks."""
    relative_time: Spread
    """Time per check relative to the first contestant in the same round."""
    exactness: Exactness


@dataclass(frozen=True, slots=True)
class RunSize:
    subjects: int
    rounds: int
    seconds: float
    """How long each contestant is measured in a round."""
    exact_size: int


FULL = RunSize(subjects=10_000, rounds=5, seconds=0.4, exact_size=1_000)
QUICK = RunSize(subjects=200, rounds=2, seconds=0.02, exact_size=50)


def workloads(run_size: RunSize) -> list[Workload]:
    everyone = (
        ours.contestant(),
        limits_peer.contestant(limits_peer.COUNTER),
        limits_peer.contestant(limits_peer.FIXED),
        throttled_peer.contestant(),
        pyrate_peer.token_bucket(),
        pyrate_peer.log(),
        minimal_script.contestant(),
    )
    cached = (ours.contestant(denial_cache_ms=1_000), ours.contestant(f"{OURS}, cache off"))
    return [
        Workload(ONE, everyone, 1, run_size.subjects),
        Workload(TWO, everyone, 2, run_size.subjects),
        Workload(THREE, everyone, 3, run_size.subjects),
        Workload(HOT, everyone, 1, 1),
        Workload(DENIED, everyone, 1, 100, size=5),
        Workload(CACHED, cached, 1, 100, size=5),
    ]


def run(url: str, *, quick: bool) -> list[Result]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(url, QUICK if quick else FULL))


async def _run(url: str, run_size: RunSize) -> list[Result]:
    meter = Meter(url)
    exact: dict[tuple[Contestant, int], Exactness] = {}
    results = []
    for workload in workloads(run_size):
        progress(f"library: {workload.name}, {len(workload.contestants)} contestants")
        for each in workload.contestants:
            if (each, workload.limits) not in exact:
                exact[each, workload.limits] = await exactness(each, url, workload.limits, run_size.exact_size, MANY)
        meter.flush()
        results += await _measure(workload, url, meter, run_size, exact)
        meter.flush()
    meter.close()
    return results


async def _measure(
    workload: Workload, url: str, meter: Meter, run_size: RunSize, exact: dict[tuple[Contestant, int], Exactness]
) -> list[Result]:
    subjects = [f"user:{number}" for number in range(workload.subjects)]
    shuffled = random.Random(1).sample(subjects, len(subjects))
    open_limiters: dict[Contestant, OpenLimiter] = {}
    for each in workload.contestants:
        open_limiters[each] = await each.open(url, limit_sizes(workload.limits, workload.size))
        await _warm(open_limiters[each], subjects, workload.size)
    results = []
    for callers in (MANY, ALONE):
        streams = {each: itertools.cycle(shuffled) for each in workload.contestants}
        samples: dict[Contestant, list[Sample]] = {each: [] for each in workload.contestants}
        for each in _interleave(workload.contestants, run_size.rounds):
            samples[each].append(
                await meter.sample(open_limiters[each].check, streams[each], callers, run_size.seconds)
            )
        base = samples[workload.contestants[0]]
        results += [
            _result(workload, callers, each, samples[each], base, exact[each, workload.limits])
            for each in workload.contestants
        ]
    for open_limiter in open_limiters.values():
        await open_limiter.close()
    return results


async def _warm(open_limiter: OpenLimiter, subjects: Sequence[str], size: int) -> None:
    """Make every subject known, open every connection, and spend the limits of denied workloads."""
    checks = len(subjects) * (size if size < 10 else 1)
    await run_callers(open_limiter.check, itertools.islice(itertools.cycle(subjects), max(checks, 4 * MANY)), MANY)


def _interleave(contestants: Sequence[Contestant], rounds: int) -> Iterator[Contestant]:
    """Yield every contestant once per round; each round starts with another one."""
    for number in range(rounds):
        for at in range(len(contestants)):
            yield contestants[(at + number) % len(contestants)]


def _result(
    workload: Workload, callers: int, each: Contestant, samples: list[Sample], base: list[Sample], exact: Exactness
) -> Result:
    return Result(
        workload.name,
        workload.limits,
        callers,
        each.name,
        each.full_decision,
        Spread.of([sample.checks_per_second for sample in samples]),
        Spread.of([sample.p50_us for sample in samples]),
        Spread.of([sample.p99_us for sample in samples]),
        Spread.of([sample.cpu_us for sample in samples]),
        Spread.of([sample.redis_cpu_us for sample in samples]),
        Spread.of([sample.script_us for sample in samples]),
        Spread.of([sample.calls for sample in samples]).median,
        Spread.of([sample.admitted for sample in samples]).median,
        Spread.of_ratios([s.checks_per_second for s in base], [s.checks_per_second for s in samples]),
        exact,
    )
