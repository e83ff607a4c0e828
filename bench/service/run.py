"""Run the workloads in interleaved rounds, then measure exactness and whether the cost stays constant."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Spread, progress
from bench.service import binaries, cost_growth, ours, python_peers, wrk
from bench.service.binaries import Absent
from bench.service.contestants import BenchEnvironment, Contestant, RunningContestant, Workload
from bench.service.cost_growth import CostComparison
from bench.service.measure import Meter, Sample
from bench.service.plans import AMPLE, ONCE, PLANS, SPENT, THREE, TWO
from bench.service.run_size import FULL, QUICK, RunSize

MANY, HOT, DENIED, MORE = "many keys", "one hot key", "mostly denied", "three limits"


@dataclass(frozen=True, slots=True)
class Result:
    workload: str
    contestant: str
    limits: int
    subjects: int
    checks_per_second: Spread
    p50_ms: Spread
    p99_ms: Spread
    cpu_us: Spread
    redis_cpu_us: Spread
    denied: float | None
    """The fraction of responses other than 2xx; None if only bodies show a denial."""
    errors: int
    speedup: Spread
    """Checks per second of limitforge with one worker relative to this one, same round."""
    kind: str = "load"


@dataclass(frozen=True, slots=True)
class Exact:
    """One subject exceeds its only limit, on all connections."""

    contestant: str
    admitted: int
    expected: int
    checks: int
    kind: str = "exact"


AnyResult = Result | Exact | CostComparison | Absent


def workloads(run_size: RunSize) -> tuple[Workload, ...]:
    others = (run_size.other_rounds, run_size.other_seconds)
    return (
        Workload(MANY, TWO, run_size.subjects, run_size.rounds, run_size.seconds),
        Workload(HOT, AMPLE, 1, *others),
        Workload(DENIED, SPENT, run_size.few_subjects, *others),
        Workload(MORE, THREE, run_size.subjects, *others),
    )


def run(redis_url: str, *, quick: bool) -> list[AnyResult]:
    wrk.program()
    run_size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="limitforge-bench-", ignore_cleanup_errors=True) as folder:
        site = BenchEnvironment(redis_url, Path(folder))
        meter = Meter(redis_url, site.folder)
        results: list[AnyResult] = [*_run_contestants(site, meter, run_size), *binaries.absent()]
        meter.flush()
        results += cost_growth.run(site, meter, run_size)
        meter.close()
    return results


def _run_contestants(site: BenchEnvironment, meter: Meter, run_size: RunSize) -> Iterator[AnyResult]:
    contestants = (*ours.contestants(), *python_peers.contestants(), *binaries.contestants())
    with ExitStack() as running:
        running_contestants: dict[str, RunningContestant] = {}
        for each in contestants:
            progress(f"service: starting {each.name}")
            running_contestants[each.name] = running.enter_context(each.open(site))
        for workload in workloads(run_size):
            progress(f"service: {workload.name}, {len(contestants)} contestants, {workload.rounds} rounds")
            meter.flush()
            yield from _measure(workload, contestants, running_contestants, meter, run_size)
        progress("service: how many are admitted")
        for name, running_contestant in running_contestants.items():
            admitted, checks = meter.count_admitted(running_contestant.request_for(ONCE), run_size.exact_seconds)
            yield Exact(name, admitted, PLANS[ONCE][0].amount, checks)


def _measure(
    workload: Workload,
    contestants: Sequence[Contestant],
    running_contestants: Mapping[str, RunningContestant],
    meter: Meter,
    run_size: RunSize,
) -> Iterator[Result]:
    samples: dict[str, list[Sample]] = {each.name: [] for each in contestants}
    for each in contestants:
        meter.warm(running_contestants[each.name].request_for(workload.plan), workload.subjects, run_size.warm_seconds)
    for number in range(workload.rounds):
        for at in range(len(contestants)):
            name = contestants[(at + number) % len(contestants)].name  # each round starts with another one
            running_contestant = running_contestants[name]
            samples[name].append(
                meter.sample(
                    running_contestant.pid,
                    running_contestant.request_for(workload.plan),
                    workload.subjects,
                    workload.seconds,
                )
            )
    for name, found in samples.items():
        yield _result(workload, name, found, samples[ours.ONE])


def _result(workload: Workload, name: str, samples: list[Sample], base: list[Sample]) -> Result:
    denied = [sample.denied for sample in samples if sample.denied is not None]
    return Result(
        workload.name,
        name,
        len(PLANS[workload.plan]),
        workload.subjects,
        Spread.of([sample.checks_per_second for sample in samples]),
        Spread.of([sample.p50_ms for sample in samples]),
        Spread.of([sample.p99_ms for sample in samples]),
        Spread.of([sample.cpu_us for sample in samples]),
        Spread.of([sample.redis_cpu_us for sample in samples]),
        Spread.of(denied).median if denied else None,
        sum(sample.errors for sample in samples),
        Spread.of_ratios([s.checks_per_second for s in base], [s.checks_per_second for s in samples]),
    )
