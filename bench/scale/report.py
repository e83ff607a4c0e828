"""Render the tables of all results, and compare them with the targets."""

from collections.abc import Sequence

from bench.harness import Spread
from bench.scale import hot_key_processes, shards
from bench.scale.hot_key_processes import HotKeyResult
from bench.scale.load import CHECKS_PER_YIELD
from bench.scale.prepaid import FIXED, TOKEN, PrepaidResult
from bench.scale.run import Result
from bench.scale.run_size import ALONE, MANY, PROCESSES, SHARDS
from bench.scale.shards import ShardsResult
from bench.table import Target, at_least, faster_than, table

PREPAID_SPEEDUP = 10
BUSY_PERCENT = 20

_SHARDS_TITLE = f"""\
One Redis compared with {SHARDS} shards, many keys, {MANY} callers unless noted: medians of the rounds.
checks/call: checks per EVALSHA. Redis CPU us: CPU time per check in each shard.
saturation: checks/s that would use the whole core of the busiest shard, computed from its CPU time with the batch size
of this load (more callers, larger batches). Here the callers share the cores with all shards, so checks/s can't rise.
x one Redis (lowest-highest): relative to the same callers on one Redis, same round; above 1 is more.
admitted: when all callers exceed the limit. after denials: what another limit of the plan still admits."""
_SHARDS_HEADER = (
    "one check, async",
    "checks/s",
    "x one Redis",
    "p50 us",
    "p99 us",
    "CPU us",
    "checks/call",
    "Redis CPU us, by shard",
    "calls %",
    "saturation",
    "x one Redis",
    "admitted",
    "after denials",
    "failed",
)
_PREPAID_TITLE = f"""\
One hot key, one process: medians of the rounds. p50 and p99: the time of a decision, once the share has its full size
for this load. Every caller yields to the event loop after {CHECKS_PER_YIELD} decisions: this is included in checks/s
and CPU, and not in the time of a decision.
x faster (lowest-highest): the time of the exact limit divided by this one's, same round and number of callers.
admitted: when {MANY} callers exceed the limit."""
_PREPAID_HEADER = (
    "one decision, async",
    "checks/s",
    "p50 us",
    "x faster",
    "p99 us",
    "x faster",
    "CPU us",
    "Redis CPU us",
    "scripts",
    "admitted",
    "failed",
)
_HOT_KEY_TITLE = f"""\
One hot key, {PROCESSES} processes with {MANY} callers each, started together: medians, counts of the worst round.
Redis busy: its CPU time divided by the elapsed time. x exact: checks/s relative to the exact limit with the same rest,
same round. admitted: from the first check to the last, of the permitted number. unspent: the unused rest of it.
prepaid: unspent prepaid shares at the end. lost: the same with all limiters closed."""
_HOT_KEY_HEADER = (
    "one decision, async",
    "checks/s",
    "x exact",
    "p50 us",
    "p99 us",
    "CPU us",
    "Redis CPU us",
    "Redis busy %",
    "scripts",
    "admitted",
    "unspent",
    "prepaid",
    "lost",
    "failed",
)


def render(results: Sequence[Result]) -> str:
    over_shards, prepaid, hot_key = split_by_kind(results)
    return "\n".join(
        (
            table(_SHARDS_TITLE, _SHARDS_HEADER, _grouped([(each.plan, _shards_row(each)) for each in over_shards])),
            table(_PREPAID_TITLE, _PREPAID_HEADER, _grouped([(_group(each), _prepaid_row(each)) for each in prepaid])),
            table(_HOT_KEY_TITLE, _HOT_KEY_HEADER, [_hot_key_row(each) for each in hot_key]),
        )
    )


def split_by_kind(results: Sequence[Result]) -> tuple[list[ShardsResult], list[PrepaidResult], list[HotKeyResult]]:
    return (
        [each for each in results if isinstance(each, ShardsResult)],
        [each for each in results if isinstance(each, PrepaidResult)],
        [each for each in results if isinstance(each, HotKeyResult)],
    )


def targets(results: Sequence[Result]) -> list[Target]:
    over_shards, prepaid, hot_key = split_by_kind(results)
    found = []
    for algorithm in (FIXED, TOKEN):
        for callers in (ALONE, MANY):
            one = next(
                each
                for each in prepaid
                if (each.algorithm, each.consistency, each.callers) == (algorithm, "prepaid", callers)
            )
            what = f"scale, prepaid {algorithm}, {_callers(callers)}, p50 of a decision against exact"
            found.append(at_least(what, PREPAID_SPEEDUP, one.p50_speedup.median))
    for each in hot_key:
        if each.contestant in (hot_key_processes.PREPAID, hot_key_processes.PREPAID_TOKEN):
            busy = 100 * each.redis_busy.median
            what = f"scale, hot key, {PROCESSES} processes, {each.contestant}, Redis busy"
            found.append(Target(what, f"under {BUSY_PERCENT} %", f"{busy:.1f} %", busy < BUSY_PERCENT))
    for each_shards in over_shards:
        if each_shards.placement in (shards.SPREAD_TENANTS, shards.SPREAD_LANES):
            what = f"scale, {each_shards.plan}, {each_shards.placement}, where the busiest is full"
            found.append(faster_than(what, each_shards.saturation_ratio.median))
    kept = [
        *(each.exactness.is_exact and each.measured.count == each.measured.expected for each in over_shards),
        *(
            each.exhausted.count <= each.exhausted.expected and each.measured.count == each.measured.expected
            for each in prepaid
        ),
        *(each.is_limit_kept for each in hot_key),
    ]
    failed = sum(each.failed for each in results)
    return [
        *found,
        Target("scale, rows that admit what they should, or never more", f"{len(kept)}", f"{sum(kept)}", all(kept)),
        Target("scale, checks that failed", "0", f"{failed}", not failed),
    ]


def _grouped(rows: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for at, (group, row) in enumerate(rows):
        if not at or group != rows[at - 1][0]:
            lines += [(), (group,)]
        lines.append(row)
    return lines[1:]


def _group(result: PrepaidResult) -> str:
    return f"{result.algorithm}, {_callers(result.callers)}"


def _callers(callers: int) -> str:
    return f"{callers} {'caller' if callers == 1 else 'callers'}"


def _shards_row(result: ShardsResult) -> tuple[str, ...]:
    exact = result.exactness
    return (
        f"  {result.placement}",
        f"{result.checks_per_second.median:,.0f}",
        result.speedup.text(),
        _us(result.p50_us),
        _us(result.p99_us),
        f"{result.cpu_us.median:.1f}",
        f"{result.checks_per_call:.1f}",
        " + ".join(f"{each:.1f}" for each in result.shards_cpu_us),
        "/".join(f"{100 * each:.0f}" for each in result.shards_calls),
        f"{result.saturation_rate.median:,.0f}",
        result.saturation_ratio.text(),
        exact.admitted.text(),
        exact.admitted_after_denial.text() if exact.admitted_after_denial else "",
        f"{result.failed}",
    )


def _prepaid_row(result: PrepaidResult) -> tuple[str, ...]:
    return (
        f"  {result.consistency}",
        f"{result.checks_per_second.median:,.0f}",
        _us(result.p50_us),
        result.p50_speedup.text(1),
        _us(result.p99_us),
        result.p99_speedup.text(1),
        f"{result.cpu_us.median:.1f}",
        f"{result.redis_cpu_us.median:.2f}",
        f"{result.calls:.4f}",
        result.exhausted.text(),
        f"{result.failed}",
    )


def _hot_key_row(result: HotKeyResult) -> tuple[str, ...]:
    worst = max(result.admitted, key=lambda each: abs(each.expected - each.count))
    return (
        result.contestant,
        f"{result.checks_per_second.median:,.0f}",
        result.speedup.text(),
        _us(result.p50_us),
        _us(result.p99_us),
        f"{result.cpu_us.median:.1f}",
        f"{result.redis_cpu_us.median:.2f}",
        f"{100 * result.redis_busy.median:.1f}",
        f"{result.calls:.4f}",
        f"{worst.count} of {'at most ' if result.refills else ''}{worst.expected}",
        f"{result.unspent}",
        "" if result.prepaid_out is None else f"{result.prepaid_out}",
        "" if result.lost is None else f"{result.lost}",
        f"{result.failed}",
    )


def _us(spread: Spread) -> str:
    return f"{spread.median:,.0f}" if spread.median >= 10 else f"{spread.median:.1f}"
