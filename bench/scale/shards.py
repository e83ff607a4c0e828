"""Compare the same load on one Redis and on three shards of a Cluster.

On a machine where all of them share the cores, three shards cannot be faster than one. The CPU time per check of the
busiest shard shows whether sharding helps: `saturation_rate` is how many checks per second would use one whole core.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.harness import Spread, progress
from bench.library.exactness import Admitted, Exactness
from bench.ours import PLANS, TENANT
from bench.scale.load import (
    CheckFunction,
    Meter,
    Sample,
    TenantSubject,
    make_check,
    redis_only_options,
    run_callers,
    unique_prefix,
)
from bench.scale.run_size import CROWDED, FEW_LANES, LANES, MANY, SHARDS, TENANTS, RunSize
from limitforge import FixedWindow, Limiter, Limits

AMPLE = 10_000_000
DAY_SECONDS = 86_400

ONE, ONE_CROWDED = "one limit", f"one limit, {CROWDED} callers"
THREE, GLOBAL = "three limits of a subject", "a subject's limit and a global one"


@dataclass(frozen=True, slots=True)
class Plan:
    """Limits by the size of the limit that denies.

    `first_limit` is another of its limits alone, by the same size and the number of subjects. `expected_left` is what
    this limit still admits in all after the plan has denied.
    """

    name: str
    limits: Callable[[int, int], Limits]
    first_limit: Callable[[int, int], Limits] | None = None
    expected_left: Callable[[int, int], int] = lambda _size, _subjects: 0
    callers: int = MANY


def _everyone(size: int, subjects: int) -> FixedWindow:
    return FixedWindow(name="everyone", scope="global", limit=2 * size * subjects, window_seconds=DAY_SECONDS)


PLANS_OVER_SHARDS = (
    Plan(ONE, lambda size, _: PLANS["token bucket"](size)),
    Plan(ONE_CROWDED, lambda size, _: PLANS["token bucket"](size), callers=CROWDED),
    Plan(
        THREE,
        lambda size, _: PLANS["three limits"](size),
        lambda size, _: PLANS["token bucket"](4 * size),
        lambda size, subjects: 3 * size * subjects,
    ),
    Plan(
        GLOBAL,
        lambda size, subjects: Limits(_everyone(size, subjects), *PLANS["token bucket"](size)),
        lambda size, subjects: Limits(_everyone(size, subjects)),
        lambda size, subjects: size * subjects,
    ),
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the keys are. `base` is the placement to compare with: the same callers on one Redis."""

    name: str
    base: str
    is_sharded: bool
    tenants: int
    lanes: int = 1

    def tenant_subjects(self, subjects: int) -> list[TenantSubject]:
        if self.tenants == 1:
            return [(TENANT, f"user:{number}") for number in range(subjects)]
        return [(f"tenant-{number % self.tenants}", f"user:{number}") for number in range(subjects)]


BASE_TENANTS, BASE_TENANT = f"one Redis, {TENANTS} tenants", "one Redis, one tenant"
SPREAD_TENANTS, SPREAD_LANES = f"{SHARDS} shards, {TENANTS} tenants", f"{SHARDS} shards, one tenant, {LANES} lanes"
SPREAD_FEW, ONE_LANE = f"{SHARDS} shards, one tenant, {FEW_LANES} lanes", f"{SHARDS} shards, one tenant, one lane"

PLACEMENTS = (
    Placement(BASE_TENANTS, BASE_TENANTS, is_sharded=False, tenants=TENANTS),
    Placement(SPREAD_TENANTS, BASE_TENANTS, is_sharded=True, tenants=TENANTS),
    Placement(BASE_TENANT, BASE_TENANT, is_sharded=False, tenants=1),
    Placement(SPREAD_LANES, BASE_TENANT, is_sharded=True, tenants=1, lanes=LANES),
    Placement(SPREAD_FEW, BASE_TENANT, is_sharded=True, tenants=1, lanes=FEW_LANES),
    Placement(ONE_LANE, BASE_TENANT, is_sharded=True, tenants=1),
)


@dataclass(frozen=True, slots=True)
class ShardsResult:
    plan: str
    callers: int
    placement: str
    base: str
    checks_per_second: Spread
    p50_us: Spread
    p99_us: Spread
    cpu_us: Spread
    shards_cpu_us: tuple[float, ...]
    """CPU time per check in each Redis: the median of the rounds."""
    shards_calls: tuple[float, ...]
    """The fraction of the calls that each of them received."""
    checks_per_call: float
    saturation_rate: Spread
    """Checks per second that would use the whole core of the busiest Redis."""
    speedup: Spread
    """Checks per second relative to the base, round by round."""
    saturation_ratio: Spread
    """`saturation_rate` relative to the base, round by round."""
    measured: Admitted
    """All measured checks; their limits are never reached."""
    exactness: Exactness
    failed: int
    """Of all checks, including those before the measurement."""
    kind: str = "shards"


class BenchServers:
    """The servers: one Redis, and a Cluster, with a meter for each."""

    def __init__(self, url: str, cluster_url: str, shard_urls: Sequence[str]) -> None:
        self._urls = {False: url, True: cluster_url}
        self._meters = {False: Meter([url]), True: Meter(shard_urls)}

    def open(self, placement: Placement) -> Limiter:
        lanes = {TENANT: placement.lanes} if placement.lanes > 1 else None
        return Limiter.connect(
            self._urls[placement.is_sharded], key_prefix=unique_prefix(), lanes=lanes, options=redis_only_options()
        )

    def meter(self, placement: Placement) -> Meter:
        return self._meters[placement.is_sharded]

    def flush(self) -> None:
        for meter in self._meters.values():
            meter.flush()

    def close(self) -> None:
        for meter in self._meters.values():
            meter.close()


async def run(site: BenchServers, run_size: RunSize) -> list[ShardsResult]:
    results = []
    for plan in PLANS_OVER_SHARDS:
        progress(f"scale: {plan.name}, {len(PLACEMENTS)} placements")
        exact = {each.name: await _exactness(site, plan, each, run_size) for each in PLACEMENTS}
        site.flush()
        samples, failed = await _measure(site, plan, run_size)
        site.flush()
        results += [
            _result(plan, each, samples[each.name], samples[each.base], exact[each.name], failed[each.name])
            for each in PLACEMENTS
        ]
    return results


async def _exactness(site: BenchServers, plan: Plan, placement: Placement, run_size: RunSize) -> tuple[Exactness, int]:
    """Exceed the limit with subjects on all shards, then use up the rest of another limit. Return the number of failed
    checks too.
    """
    size, subjects = run_size.exact_size, run_size.exact_subjects
    who = placement.tenant_subjects(subjects)
    limiter = site.open(placement)
    more = size // 2
    try:
        whole = make_check(limiter, plan.limits(size, subjects))
        admitted, failed, _ = await run_callers(
            whole, itertools.chain.from_iterable([who] * (size + more)), plan.callers
        )
        after = None
        if plan.first_limit is not None:
            left = plan.expected_left(size, subjects)
            alone = make_check(limiter, plan.first_limit(size, subjects))
            turns = left // subjects + more
            still, failed_after, _ = await run_callers(
                alone, itertools.chain.from_iterable([who] * turns), plan.callers
            )
            after, failed = Admitted(still, left), failed + failed_after
        return Exactness(Admitted(admitted, size * subjects), after), failed
    finally:
        await limiter.close()


async def _measure(site: BenchServers, plan: Plan, run_size: RunSize) -> tuple[dict[str, list[Sample]], dict[str, int]]:
    """Return the rounds of each placement, and the number of its checks that failed before them."""
    limiters = {each.name: site.open(each) for each in PLACEMENTS}
    check_functions: dict[str, CheckFunction] = {}
    streams, failed = {}, {}
    for each in PLACEMENTS:
        who = each.tenant_subjects(run_size.subjects)
        check_functions[each.name] = make_check(limiters[each.name], plan.limits(AMPLE, 100))
        warm = await run_callers(
            check_functions[each.name], iter(who), plan.callers
        )  # every subject is known, and every connection open
        failed[each.name] = warm.failed
        streams[each.name] = itertools.cycle(random.Random(1).sample(who, len(who)))
    samples: dict[str, list[Sample]] = {each.name: [] for each in PLACEMENTS}
    for number in range(run_size.rounds):
        for at in range(len(PLACEMENTS)):
            each = PLACEMENTS[(at + number) % len(PLACEMENTS)]
            sample = await site.meter(each).sample(
                check_functions[each.name], streams[each.name], plan.callers, run_size.seconds
            )
            samples[each.name].append(sample)
    for limiter in limiters.values():
        await limiter.close()
    return samples, failed


def _result(
    plan: Plan,
    placement: Placement,
    samples: list[Sample],
    base: list[Sample],
    exact: tuple[Exactness, int],
    failed: int,
) -> ShardsResult:
    exactness, failed_exact = exact
    calls = [sum(each) for each in zip(*(sample.shards_calls for sample in samples), strict=True)]
    rates, full = [sample.checks_per_second for sample in samples], [_saturation_rate(sample) for sample in samples]
    checks = sum(sample.checks for sample in samples)
    return ShardsResult(
        plan.name,
        plan.callers,
        placement.name,
        placement.base,
        Spread.of(rates),
        Spread.of([sample.p50_us for sample in samples]),
        Spread.of([sample.p99_us for sample in samples]),
        Spread.of([sample.cpu_us for sample in samples]),
        tuple(Spread.of(each).median for each in zip(*(sample.shards_cpu_us for sample in samples), strict=True)),
        tuple(each / sum(calls) for each in calls),
        checks / sum(calls),
        Spread.of(full),
        Spread.of_ratios(rates, [sample.checks_per_second for sample in base]),
        Spread.of_ratios(full, [_saturation_rate(sample) for sample in base]),
        Admitted(sum(sample.admitted for sample in samples), checks),
        exactness,
        failed + failed_exact + sum(sample.failed for sample in samples),
    )


def _saturation_rate(sample: Sample) -> float:
    return 1e6 / max(*sample.shards_cpu_us, 0.001)
