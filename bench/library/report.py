"""Render the table of all results, and compare them with the targets."""

from collections.abc import Sequence

from bench.harness import OURS
from bench.library.run import ALONE, CACHED, MANY, ONE, THREE, TWO, Result
from bench.table import Target, at_least, at_most, table

_HEADER = (
    "one check, async, on Redis",
    "checks/s",
    "p50 us",
    "p99 us",
    "CPU us",
    "Redis CPU us",
    "script us",
    "scripts",
    "x limitforge",
    "answer",
    "admitted",
    "after denials",
)


def render(results: Sequence[Result]) -> str:
    rows: list[tuple[str, ...]] = []
    for at, result in enumerate(results):
        if not at or (result.workload, result.callers) != (results[at - 1].workload, results[at - 1].callers):
            rows += [(), (f"{result.workload}, {result.callers} {'caller' if result.callers == 1 else 'callers'}",)]
        rows.append(_row(result))
    title = (
        "Library: medians of the rounds; a ratio (lowest-highest) above 1 is slower than limitforge in the same round;"
        "\nadmitted: when 64 callers exceed the limit; after denials: what the first limit still admits;"
        "\nscript us: elapsed time as reported by Redis, which can exceed its CPU time on a busy machine"
    )
    return table(title, _HEADER, rows[1:])


def targets(results: Sequence[Result]) -> list[Target]:
    found = {(result.workload, result.callers, result.contestant): result for result in results}
    one, two = found[ONE, MANY, OURS], found[TWO, MANY, OURS]
    redis_alone = found[CACHED, ALONE, f"{OURS}, cache off"]
    cache_alone = found[CACHED, ALONE, OURS]
    passes = [result.exactness.is_exact for result in results if result.contestant.startswith(OURS)]
    return [
        at_least("library, one limit, 64 callers, against limits", 5, _speedup_over_limits(results, ONE, MANY)),
        at_least("library, three limits, 64 callers, against limits", 12, _speedup_over_limits(results, THREE, MANY)),
        at_least("library, one limit, one caller, against limits", 1, _speedup_over_limits(results, ONE, ALONE)),
        at_most("library, one limit, 64 callers, CPU", 7, one.cpu_us.median, "us"),
        at_most("library, one limit, 64 callers, scripts in Redis", 7, one.script_us.median, "us"),
        at_most("library, two limits, 64 callers, scripts in Redis", 10, two.script_us.median, "us"),
        at_least(
            "library, one caller's denial from the cache", 10, redis_alone.p50_us.median / cache_alone.p50_us.median
        ),
        Target("library, passes that admit what they should", f"{len(passes)}", f"{sum(passes)}", all(passes)),
    ]


def _speedup_over_limits(results: Sequence[Result], workload: str, callers: int) -> float:
    """Return the speed relative to the fastest way to use limits."""
    return min(
        result.relative_time.median
        for result in results
        if result.workload == workload and result.callers == callers and result.contestant.startswith("limits,")
    )


def _row(result: Result) -> tuple[str, ...]:
    exact = result.exactness
    return (
        f"  {result.contestant}",
        f"{result.checks_per_second.median:,.0f}",
        f"{result.p50_us.median:,.0f}" if result.p50_us.median >= 10 else f"{result.p50_us.median:.1f}",
        f"{result.p99_us.median:,.0f}",
        f"{result.cpu_us.median:.1f}",
        f"{result.redis_cpu_us.median:.1f}",
        f"{result.script_us.median:.1f}",
        f"{result.calls:.2f}",
        result.relative_time.text(),
        "full" if result.full_decision else "verdict",
        exact.admitted.text(),
        exact.admitted_after_denial.text() if exact.admitted_after_denial else "",
    )
