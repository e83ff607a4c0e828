"""Render the tables of all results, and compare them with the targets."""

from collections.abc import Sequence

from bench.harness import Spread
from bench.service import binaries, ours
from bench.service.binaries import Absent
from bench.service.cost_growth import CostComparison
from bench.service.run import MANY, AnyResult, Exact, Result
from bench.service.run_size import CONNECTIONS
from bench.table import Target, at_least, at_most, table

FIRST_MARK = {binaries.RATELIMIT: 2.5, binaries.LIMITADOR: 1.6, binaries.GUBERNATOR: 3.5}
SECOND_MARK = {binaries.RATELIMIT: 3.0, binaries.LIMITADOR: 2.0, binaries.GUBERNATOR: 4.5}
CPU_US, REDIS_CPU_US, P99_MS = 20.0, 10.0, 3.0

_HEADER = (
    "one check over HTTP",
    "checks/s",
    "p50 ms",
    "p99 ms",
    "CPU us",
    "Redis CPU us",
    "not 2xx",
    "errors",
    "limitforge is",
)
_COMPARISON_HEADER = (
    "limitforge, one worker",
    "checks/s",
    "and",
    "CPU us",
    "and",
    "Redis CPU us",
    "and",
    "ratio",
    "not 2xx",
)


def render(results: Sequence[AnyResult]) -> str:
    return "\n".join((_workloads(results), _exactness(results), _comparisons(results)))


def targets(results: Sequence[AnyResult]) -> list[Target]:
    many = {each.contestant: each for each in results if isinstance(each, Result) and each.workload == MANY}
    own = many[ours.ONE]
    found = [
        at_least(f"service, against {name}{mark}", bound, many[name].speedup.median)
        for mark, bounds in (("", FIRST_MARK), (", second mark", SECOND_MARK))
        for name, bound in bounds.items()
        if name in many
    ]
    found += [
        at_most("service, CPU of the process", CPU_US, own.cpu_us.median, "us"),
        at_most("service, CPU of Redis", REDIS_CPU_US, own.redis_cpu_us.median, "us"),
        at_most(f"service, p99 of {CONNECTIONS} connections", P99_MS, own.p99_ms.median, "ms"),
    ]
    return found + [
        Target(f"{each.contestant}, admitted of one limit", f"{each.expected:,}", f"{each.admitted:,}", _is_exact(each))
        for each in results
        if isinstance(each, Exact) and each.contestant in (ours.ONE, ours.TWO)
    ]


def _workloads(results: Sequence[AnyResult]) -> str:
    rows: list[tuple[str, ...]] = []
    workload = ""
    for each in results:
        if isinstance(each, Result):
            if each.workload != workload:
                workload = each.workload
                rows += [
                    (),
                    (f"{workload}: {each.limits} limits, {each.subjects:,} subject{'s'[: each.subjects > 1]}",),
                ]
            rows.append(_row(each))
    missing = [f"{each.contestant} ({each.variable} names no program)" for each in results if isinstance(each, Absent)]
    title = (
        f"Service: {CONNECTIONS} connections, medians of the rounds (lowest-highest); 'limitforge is' compares with"
        "\none worker in the same round; CPU us is that of all workers; only bodies of gubernator show denials"
    )
    return table(title + (f"\nAbsent: {', '.join(missing)}" if missing else ""), _HEADER, rows[1:])


def _row(result: Result) -> tuple[str, ...]:
    return (
        f"  {result.contestant}",
        rate(result.checks_per_second),
        f"{result.p50_ms.median:.2f}",
        f"{result.p99_ms.median:.2f}",
        f"{result.cpu_us.median:.1f}",
        f"{result.redis_cpu_us.median:.1f}",
        "-" if result.denied is None else f"{result.denied:.1%}",
        f"{result.errors}",
        "" if result.contestant == ours.ONE else f"{result.speedup.text()}x",
    )


def _exactness(results: Sequence[AnyResult]) -> str:
    rows = [
        (
            each.contestant,
            f"{each.admitted:,}",
            f"{each.expected:,}",
            f"{each.checks:,}",
            "exact" if _is_exact(each) else "NOT",
        )
        for each in results
        if isinstance(each, Exact)
    ]
    return table(
        "Service: one limit of one subject, all connections at once", ("", "admitted", "of", "checks", ""), rows
    )


def _comparisons(results: Sequence[AnyResult]) -> str:
    rows = [
        (
            f"{each.few:,} and {each.many:,} {each.dimension}",
            rate(each.few_per_second),
            rate(each.many_per_second),
            f"{each.few_cpu_us.median:.1f}",
            f"{each.many_cpu_us.median:.1f}",
            f"{each.few_redis_cpu_us.median:.1f}",
            f"{each.many_redis_cpu_us.median:.1f}",
            each.ratio.text(),
            f"{each.denied:.1%}",
        )
        for each in results
        if isinstance(each, CostComparison)
    ]
    title = "Service: few and many; a ratio of 1 in the same round means that a check costs the same"
    return table(title, _COMPARISON_HEADER, rows)


def rate(spread: Spread) -> str:
    return f"{spread.median:,.0f} ({spread.low:,.0f}-{spread.high:,.0f})"


def _is_exact(result: Exact) -> bool:
    return result.admitted == result.expected
