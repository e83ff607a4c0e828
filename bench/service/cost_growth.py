"""Whether a check costs the same however many keys, tenants, policies or subjects there are: pairs, measured in turn.

Both of a pair have one worker, and about as many counters in Redis, except where subjects are what is compared. Each
connection presents all keys: that alone costs something, since a key that is not the last one's is hashed anew. So one
tenant with many keys is compared with one that has one key, and many tenants with that one.
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
    """`ratio` is many against few in the same round: 1 is flat."""

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
    """The largest share of answers that are not 2xx: there should be none."""
    errors: int
    kind: str = "flat"


class _Service(NamedTuple):
    pid: int
    url: str
    seeded: Seeded

    def side(self, ask: RequestTemplate, counters: int) -> "_Side":
        return _Side(self.pid, ask, max(1, counters // len(ask.lines)))

    def all_keys(self, counters: int) -> "_Side":
        return self.side(ours.request_factory(self.url, self.seeded)(AMPLE), counters)

    def all_policies(self, counters: int) -> "_Side":
        return self.side(ours.request_for_all_areas(self.url, self.seeded), counters)


class _Side(NamedTuple):
    pid: int
    ask: RequestTemplate
    subjects: int


class _Pair(NamedTuple):
    dimension: str
    few: int
    many: int
    sides: tuple[_Side, _Side]


def run(site: BenchEnvironment, meter: Meter, pace: RunSize) -> Iterator[CostComparison]:
    with ExitStack() as running:

        def started(name: str, **numbers: int) -> _Service:
            progress(f"service: starting limitforge with {name}")
            seeded = seed(site.folder / f"{name.replace(' ', '-')}.db", plans=(AMPLE,), **numbers)
            return _Service(*running.enter_context(ours.running_service(site, seeded)), seeded)

        small = started("one tenant", policies=FEW_POLICIES)
        keyed = started("many keys", keys=pace.keys, policies=FEW_POLICIES)
        wide = started("many policies", policies=pace.policies)
        crowded = started("many tenants", tenants=pace.tenants, policies=FEW_POLICIES)
        counters = pace.subjects
        for pair in (
            _Pair("keys", 1, pace.keys, (small.all_keys(counters), keyed.all_keys(counters))),
            _Pair("tenants", 1, pace.tenants, (keyed.all_keys(counters), crowded.all_keys(counters))),
            _Pair("policies", FEW_POLICIES, pace.policies, (small.all_policies(counters), wide.all_policies(counters))),
            _Pair(
                "subjects",
                FEW_SUBJECTS,
                pace.all_subjects,
                (small.all_keys(FEW_SUBJECTS), small.all_keys(pace.all_subjects)),
            ),
        ):
            yield _compare(pair, meter, pace)
            meter.flush()


def _compare(pair: _Pair, meter: Meter, pace: RunSize) -> CostComparison:
    progress(f"service: {pair.few:,} and {pair.many:,} {pair.dimension}")
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    for side in pair.sides:
        meter.send_each_once(side.ask, side.subjects, pace.visit_seconds)
        meter.warm(side.ask, side.subjects, pace.warm_seconds)
    for number in range(pace.comparison_rounds):
        for at in (0, 1) if number % 2 == 0 else (1, 0):
            side = pair.sides[at]
            samples[at].append(meter.sample(side.pid, side.ask, side.subjects, pace.comparison_seconds))
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
