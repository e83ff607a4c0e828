"""Measure one hot key that is decided by Redis, from a prepaid share, or by this process alone."""

import itertools
from dataclasses import dataclass

from bench.harness import Spread, progress
from bench.library.exactness import Admitted
from bench.ours import TENANT
from bench.scale.load import Meter, Sample, TenantSubject, make_check, redis_only_options, run_callers, unique_prefix
from bench.scale.run_size import ALONE, MANY, RunSize
from bench.scale.shards import DAY_SECONDS
from limitforge import FixedWindow, Limiter, Limits, TokenBucket
from limitforge.core.limits import ConsistencyName

HOT: TenantSubject = (TENANT, "user:1")
AMPLE = 1_000_000_000
NEXT_TO_NOTHING = 0.001  # a refill that adds no token before the end

FIXED, TOKEN = "fixed window", "token bucket"
CONSISTENCIES: tuple[ConsistencyName, ...] = ("exact", "prepaid", "local")


def hot_limits(algorithm: str, consistency: ConsistencyName, size: int, per_second: float | None = None) -> Limits:
    """Return a limit per day, unless another refill rate is given."""
    if algorithm == FIXED:
        return Limits(FixedWindow(name="hot", limit=size, window_seconds=DAY_SECONDS, consistency=consistency))
    refill = size / DAY_SECONDS if per_second is None else per_second
    bucket = TokenBucket(name="hot", bucket_capacity=size, refill_rate_per_sec=refill, consistency=consistency)
    return Limits(bucket)


@dataclass(frozen=True, slots=True)
class PrepaidResult:
    algorithm: str
    consistency: str
    callers: int
    checks_per_second: Spread
    p50_us: Spread
    p99_us: Spread
    cpu_us: Spread
    redis_cpu_us: Spread
    calls: float
    """Scripts that Redis ran per check."""
    p50_speedup: Spread
    """The median time of a decision with the exact limit, divided by this one's, same round and number of callers."""
    p99_speedup: Spread
    measured: Admitted
    """All measured checks; their limit is never reached."""
    exhausted: Admitted
    """Admitted checks when 64 callers exceed the limit."""
    failed: int
    kind: str = "prepaid"


async def run(url: str, run_size: RunSize) -> list[PrepaidResult]:
    meter = Meter([url])
    results = []
    for algorithm in (FIXED, TOKEN):
        progress(f"scale: hot key, {algorithm}, {', '.join(CONSISTENCIES)}")
        exhausted = {each: await _measure_exhaustion(url, algorithm, each, run_size) for each in CONSISTENCIES}
        for callers in (MANY, ALONE):
            samples = await _measure(url, meter, algorithm, callers, run_size)
            meter.flush()
            results += [
                _result(algorithm, each, callers, samples[each], samples["exact"], exhausted[each])
                for each in CONSISTENCIES
            ]
    meter.close()
    return results


async def _measure_exhaustion(
    url: str, algorithm: str, consistency: ConsistencyName, run_size: RunSize
) -> tuple[Admitted, int]:
    """Spend a limit over several sync intervals, so that prepaid shares take part. Return the number of failed checks
    too.
    """
    size = run_size.prepaid_size
    limiter = _open(url, run_size)
    try:
        check_subject = make_check(limiter, hot_limits(algorithm, consistency, size, NEXT_TO_NOTHING))
        admitted, failed, _ = await run_callers(check_subject, itertools.repeat(HOT, size + size // 4), MANY)
        return Admitted(admitted, size), failed
    finally:
        await limiter.close()


async def _measure(
    url: str, meter: Meter, algorithm: str, callers: int, run_size: RunSize
) -> dict[ConsistencyName, list[Sample]]:
    limiters = {each: _open(url, run_size) for each in CONSISTENCIES}
    samples: dict[ConsistencyName, list[Sample]] = {each: [] for each in CONSISTENCIES}
    for number in range(run_size.rounds):
        for at in range(len(CONSISTENCIES)):
            each = CONSISTENCIES[(at + number) % len(CONSISTENCIES)]
            check_subject = make_check(limiters[each], hot_limits(algorithm, each, AMPLE))
            await run_callers(check_subject, itertools.repeat(HOT), MANY, run_size.warm_seconds)
            samples[each].append(
                await meter.sample(check_subject, itertools.repeat(HOT), callers, run_size.prepaid_seconds)
            )
    for limiter in limiters.values():
        await limiter.close()
    return samples


def _open(url: str, run_size: RunSize) -> Limiter:
    return Limiter.connect(
        url, key_prefix=unique_prefix(), options=redis_only_options(sync_interval_ms=run_size.sync_interval_ms)
    )


def _result(
    algorithm: str,
    consistency: str,
    callers: int,
    samples: list[Sample],
    base: list[Sample],
    spent: tuple[Admitted, int],
) -> PrepaidResult:
    exhausted, failed = spent
    checks = sum(sample.checks for sample in samples)
    return PrepaidResult(
        algorithm,
        consistency,
        callers,
        Spread.of([sample.checks_per_second for sample in samples]),
        Spread.of([sample.p50_us for sample in samples]),
        Spread.of([sample.p99_us for sample in samples]),
        Spread.of([sample.cpu_us for sample in samples]),
        Spread.of([sample.shards_cpu_us[0] for sample in samples]),
        sum(sample.shards_calls[0] for sample in samples) / checks,
        Spread.of_ratios([sample.p50_us for sample in base], [sample.p50_us for sample in samples]),
        Spread.of_ratios([sample.p99_us for sample in base], [sample.p99_us for sample in samples]),
        Admitted(sum(sample.admitted for sample in samples), checks),
        exhausted,
        failed + sum(sample.failed for sample in samples),
    )
