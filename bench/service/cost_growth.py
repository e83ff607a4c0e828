"""Measure whether the cost of a check stays constant with more keys, tenants, policies or subjects.

Each comparison has two services with one worker and about the same number of counters in Redis, except for subjects.
Each connection sends all keys. This has a cost of its own, because a key that differs from the previous one is hashed
again. So one tenant with many keys is compared with a tenant with one key, and many tenants with the former.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from bench.harness import Spread, progress
from bench.service import ours
from bench.service.contestants import BenchEnvironment
from bench.service.measure import Meter, Sample
from bench.service.plans import AMPLE
from bench.service.run_size import RunSize
from bench.service.seed import Seeded, seed
from bench.service.wrk import RequestTemplate

FEW_SUBJECTS, FEW_POLICIES = 10, 10


@dataclass(frozen=True, slots=True)
class CostComparison:
    """`ratio` is many relative to few in the same round: 1 is constant cost."""

    dimension: str
    few: int
    many: int
    few_per_second: Spread
    many_per_second: Spread
    few_cpu_us: Spread
    many_cpu_us: Spread
    few_redis_cpu_us: Spread
    many_redis_cpu_us: Spread
    ratio: Spread
    denied: float
    """The largest fraction of responses other than 2xx; it should be 0."""
    errors: int
    kind: str = "flat"


class _Service(NamedTuple):
    pid: int
    url: str
    seeded: Seeded

    def side(self, request_template: RequestTemplate, counters: int) -> "_Side":
        return _Side(self.pid, request_template, max(1, counters // len(request_template.lines)))

    def all_keys(self, counters: int) -> "_Side":
        return self.side(ours.request_factory(self.url, self.seeded)(AMPLE), counters)

    def all_policies(self, counters: int) -> "_Side":
        return self.side(ours.request_for_all_areas(self.url, self.seeded), counters)


class _Side(NamedTuple):
    pid: int
    request_template: RequestTemplate
    subjects: int


class _Pair(NamedTuple):
    dimension: str
    few: int
    many: int
    sides: tuple[_Side, _Side]


def run(site: BenchEnvironment, meter: Meter, run_size: RunSize) -> Iterator[CostComparison]:
    with ExitStack() as running:

        def started(name: str, **numbers: int) -> _Service:
            progress(f"service: starting limitforge with {name}")
            seeded = seed(site.folder / f"{name.replace(' ', '-')}.db", plans=(AMPLE,), **numbers)
            return _Service(*running.enter_context(ours.running_service(site, seeded)), seeded)

        small = started("one tenant", policies=FEW_POLICIES)
        keyed = started("many keys", keys=run_size.keys, policies=FEW_POLICIES)
        wide = started("many policies", policies=run_size.policies)
        crowded = started("many tenants", tenants=run_size.tenants, policies=FEW_POLICIES)
        counters = run_size.subjects
        for pair in (
            _Pair("keys", 1, run_size.keys, (small.all_keys(counters), keyed.all_keys(counters))),
            _Pair("tenants", 1, run_size.tenants, (keyed.all_keys(counters), crowded.all_keys(counters))),
            _Pair(
                "policies", FEW_POLICIES, run_size.policies, (small.all_policies(counters), wide.all_policies(counters))
            ),
            _Pair(
                "subjects",
                FEW_SUBJECTS,
                run_size.all_subjects,
                (small.all_keys(FEW_SUBJECTS), small.all_keys(run_size.all_subjects)),
            ),
        ):
            yield _compare(pair, meter, run_size)
            meter.flush()


def _compare(pair: _Pair, meter: Meter, run_size: RunSize) -> CostComparison:
    progress(f"service: {pair.few:,} and {pair.many:,} {pair.dimension}")
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    for side in pair.sides:
        meter.send_each_once(side.request_template, side.subjects, run_size.visit_seconds)
        meter.warm(side.request_template, side.subjects, run_size.warm_seconds)
    for number in range(run_size.comparison_rounds):
        for at in (0, 1) if number % 2 == 0 else (1, 0):
            side = pair.sides[at]
            samples[at].append(
                meter.sample(side.pid, side.request_template, side.subjects, run_size.comparison_seconds)
            )
    few, many = samples
    rates = [[sample.checks_per_second for sample in each] for each in samples]
    return CostComparison(
        pair.dimension,
        pair.few,
        pair.many,
        Spread.of(rates[0]),
        Spread.of(rates[1]),
        Spread.of([sample.cpu_us for sample in few]),
        Spread.of([sample.cpu_us for sample in many]),
        Spread.of([sample.redis_cpu_us for sample in few]),
        Spread.of([sample.redis_cpu_us for sample in many]),
        Spread.of_ratios(rates[1], rates[0]),
        max(sample.denied or 0 for sample in (*few, *many)),
        sum(sample.errors for sample in (*few, *many)),
    )
