"""One hot key, decided by Redis each time, by a share that was paid for, or by this process alone."""

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
    """Per day, unless another refill is given."""
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
    """Scripts that Redis ran for one check."""
    p50_speedup: Spread
    """The time from asking to knowing of the median decision: that of the exact limit against this one's, same round
    and as many callers.
    """
    p99_speedup: Spread
    measured: Admitted
    """All that were measured: their limit is ample."""
    exhausted: Admitted
    """When 64 callers ask for more than there is."""
    failed: int
    kind: str = "prepaid"


async def run(url: str, pace: RunSize) -> list[PrepaidResult]:
    meter = Meter([url])
    results = []
    for algorithm in (FIXED, TOKEN):
        progress(f"scale: hot key, {algorithm}, {', '.join(CONSISTENCIES)}")
        exhausted = {each: await _measure_exhaustion(url, algorithm, each, pace) for each in CONSISTENCIES}
        for callers in (MANY, ALONE):
            samples = await _measure(url, meter, algorithm, callers, pace)
            meter.flush()
            results += [
                _result(algorithm, each, callers, samples[each], samples["exact"], exhausted[each])
                for each in CONSISTENCIES
            ]
    meter.close()
    return results


async def _measure_exhaustion(
    url: str, algorithm: str, consistency: ConsistencyName, pace: RunSize
) -> tuple[Admitted, int]:
    """It takes several intervals to spend all of it, so shares have their part in that. And how many checks failed."""
    size = pace.prepaid_size
    limiter = _open(url, pace)
    try:
        ask = make_check(limiter, hot_limits(algorithm, consistency, size, NEXT_TO_NOTHING))
        admitted, failed, _ = await run_callers(ask, itertools.repeat(HOT, size + size // 4), MANY)
        return Admitted(admitted, size), failed
    finally:
        await limiter.close()


async def _measure(
    url: str, meter: Meter, algorithm: str, callers: int, pace: RunSize
) -> dict[ConsistencyName, list[Sample]]:
    limiters = {each: _open(url, pace) for each in CONSISTENCIES}
    samples: dict[ConsistencyName, list[Sample]] = {each: [] for each in CONSISTENCIES}
    for number in range(pace.rounds):
        for at in range(len(CONSISTENCIES)):
            each = CONSISTENCIES[(at + number) % len(CONSISTENCIES)]
            ask = make_check(limiters[each], hot_limits(algorithm, each, AMPLE))
            await run_callers(ask, itertools.repeat(HOT), MANY, pace.warm_seconds)
            samples[each].append(await meter.sample(ask, itertools.repeat(HOT), callers, pace.prepaid_seconds))
    for limiter in limiters.values():
        await limiter.close()
    return samples


def _open(url: str, pace: RunSize) -> Limiter:
    return Limiter.connect(
        url, key_prefix=unique_prefix(), options=redis_only_options(sync_interval_ms=pace.sync_interval_ms)
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
