"""Draw the comparison of the service with its peers as an SVG."""

from collections.abc import Mapping, Sequence

from bench.harness import OURS
from bench.panels import Bar, Panel, render_panels
from bench.service.cost_growth import CostComparison
from bench.service.run import AnyResult, Exact, Result
from bench.service.run_size import CONNECTIONS

TITLE = f"Checks per second over HTTP, {CONNECTIONS} connections, on one machine"
NOTE = "Behind each bar: checks/s, the 99th percentile in ms, CPU time of the process per check in us."
FLAT_NOTE = "Checks/s of one worker, and many relative to few in the same round, with the lowest and highest."
VERSIONS = ("python", "limitforge", "limits", "slowapi", "fastapi", "uvicorn", "uvloop", "redis-server", "wrk")


def render_svg(results: Sequence[AnyResult], versions: Mapping[str, str]) -> str:
    names = dict.fromkeys(each.workload for each in results if isinstance(each, Result))
    exact = {each.contestant: each for each in results if isinstance(each, Exact)}
    panels = [
        _workload_panel(name, [each for each in results if isinstance(each, Result) and each.workload == name])
        for name in names
    ]
    panels.append(
        Panel(
            "How many are admitted",
            f"One subject, one limit, {CONNECTIONS} connections that exceed it.",
            [
                Bar(
                    name,
                    each.admitted,
                    f"{each.admitted:,} of {each.expected:,}",
                    _kind(name),
                    each.admitted != each.expected,
                )
                for name, each in exact.items()
            ],
        )
    )
    panels.append(
        Panel(
            "Few and many",
            FLAT_NOTE,
            [bar for each in results if isinstance(each, CostComparison) for bar in _bars_of_comparison(each)],
        )
    )
    return render_panels(TITLE, panels, {name: versions[name] for name in VERSIONS if name in versions})


def _workload_panel(name: str, results: Sequence[Result]) -> Panel:
    subjects = results[0].subjects
    title = f"{name.capitalize()}: {results[0].limits} limits, {subjects:,} subject{'s'[: subjects > 1]}"
    return Panel(title, NOTE, [_bar(each) for each in sorted(results, key=lambda each: -each.checks_per_second.median)])


def _bar(result: Result) -> Bar:
    per_second = result.checks_per_second.median
    output = f"{per_second:,.0f}, {result.p99_ms.median:.1f} ms, {result.cpu_us.median:.0f} us"
    return Bar(result.contestant, per_second, output, _kind(result.contestant))


def _bars_of_comparison(flat: CostComparison) -> tuple[Bar, Bar]:
    few, many = flat.few_per_second.median, flat.many_per_second.median
    what = flat.dimension if flat.few > 1 else flat.dimension.removesuffix("s")
    return (
        Bar(f"{flat.few:,} {what}", few, f"{few:,.0f}", "peer"),
        Bar(f"{flat.many:,} {flat.dimension}", many, f"{many:,.0f}, {flat.ratio.text()}x", "ours"),
    )


def _kind(contestant: str) -> str:
    return "ours" if contestant.startswith(OURS) else "peer"
