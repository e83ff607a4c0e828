"""The shapes, and the rounds in which contestants take turns; then exactness, and whether the cost stays flat."""

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
    """The share of answers that are not 2xx; None where only bodies would tell."""
    errors: int
    speedup: Spread
    """Checks a second of limitforge with one worker against this one, same round."""
    kind: str = "load"


@dataclass(frozen=True, slots=True)
class Exact:
    """One subject asks for more than its one limit holds, on all connections."""

    contestant: str
    admitted: int
    expected: int
    checks: int
    kind: str = "exact"


AnyResult = Result | Exact | CostComparison | Absent


def workloads(pace: RunSize) -> tuple[Workload, ...]:
    others = (pace.other_rounds, pace.other_seconds)
    return (
        Workload(MANY, TWO, pace.subjects, pace.rounds, pace.seconds),
        Workload(HOT, AMPLE, 1, *others),
        Workload(DENIED, SPENT, pace.few_subjects, *others),
        Workload(MORE, THREE, pace.subjects, *others),
    )


def run(redis_url: str, *, quick: bool) -> list[AnyResult]:
    wrk.program()
    pace = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="limitforge-bench-", ignore_cleanup_errors=True) as folder:
        site = BenchEnvironment(redis_url, Path(folder))
        meter = Meter(redis_url, site.folder)
        results: list[AnyResult] = [*_run_contestants(site, meter, pace), *binaries.absent()]
        meter.flush()
        results += cost_growth.run(site, meter, pace)
        meter.close()
    return results


def _run_contestants(site: BenchEnvironment, meter: Meter, pace: RunSize) -> Iterator[AnyResult]:
    contestants = (*ours.contestants(), *python_peers.contestants(), *binaries.contestants())
    with ExitStack() as running:
        doors: dict[str, RunningContestant] = {}
        for each in contestants:
            progress(f"service: starting {each.name}")
            doors[each.name] = running.enter_context(each.open(site))
        for shape in workloads(pace):
            progress(f"service: {shape.name}, {len(contestants)} contestants, {shape.rounds} rounds")
            meter.flush()
            yield from _measure(shape, contestants, doors, meter, pace)
        progress("service: how many are admitted")
        for name, door in doors.items():
            admitted, asked = meter.count_admitted(door.request_for(ONCE), pace.exact_seconds)
            yield Exact(name, admitted, PLANS[ONCE][0].amount, asked)


def _measure(
    shape: Workload,
    contestants: Sequence[Contestant],
    doors: Mapping[str, RunningContestant],
    meter: Meter,
    pace: RunSize,
) -> Iterator[Result]:
    samples: dict[str, list[Sample]] = {each.name: [] for each in contestants}
    for each in contestants:
        meter.warm(doors[each.name].request_for(shape.plan), shape.subjects, pace.warm_seconds)
    for number in range(shape.rounds):
        for at in range(len(contestants)):
            name = contestants[(at + number) % len(contestants)].name  # each round starts with another one
            door = doors[name]
            samples[name].append(meter.sample(door.pid, door.request_for(shape.plan), shape.subjects, shape.seconds))
    for name, found in samples.items():
        yield _result(shape, name, found, samples[ours.ONE])


def _result(shape: Workload, name: str, samples: list[Sample], base: list[Sample]) -> Result:
    denied = [sample.denied for sample in samples if sample.denied is not None]
    return Result(
        shape.name,
        name,
        len(PLANS[shape.plan]),
        shape.subjects,
        Spread.of([sample.checks_per_second for sample in samples]),
        Spread.of([sample.p50_ms for sample in samples]),
        Spread.of([sample.p99_ms for sample in samples]),
        Spread.of([sample.cpu_us for sample in samples]),
        Spread.of([sample.redis_cpu_us for sample in samples]),
        Spread.of(denied).median if denied else None,
        sum(sample.errors for sample in samples),
        Spread.of_ratios([s.checks_per_second for s in base], [s.checks_per_second for s in samples]),
    )
