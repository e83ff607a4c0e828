"""The service beside its peers, as an SVG."""

from collections.abc import Mapping, Sequence

from bench.contest import OURS
from bench.panels import Bar, Panel, drawn
from bench.service.flat import Flat
from bench.service.pace import CONNECTIONS
from bench.service.run import AnyResult, Exact, Result

TITLE = f"Checks per second over HTTP, {CONNECTIONS} connections, on one machine"
NOTE = "Behind each bar: checks/s, the 99th percentile in ms, CPU of the process for a check in us."
FLAT_NOTE = "Checks/s of one worker, and many against few in the same round, with the lowest and highest."
VERSIONS = ("python", "limitforge", "limits", "slowapi", "fastapi", "uvicorn", "uvloop", "redis-server", "wrk")


def draw(results: Sequence[AnyResult], versions: Mapping[str, str]) -> str:
    names = dict.fromkeys(each.shape for each in results if isinstance(each, Result))
    exact = {each.contestant: each for each in results if isinstance(each, Exact)}
    panels = [
        _shape(name, [each for each in results if isinstance(each, Result) and each.shape == name]) for name in names
    ]
    panels.append(
        Panel(
            "How many are admitted",
            f"One subject, one limit, {CONNECTIONS} connections that ask for more than it holds.",
            [
                Bar(name, each.admitted, f"{each.admitted:,} of {each.of:,}", _kind(name), each.admitted != each.of)
                for name, each in exact.items()
            ],
        )
    )
    panels.append(
        Panel("Few and many", FLAT_NOTE, [bar for each in results if isinstance(each, Flat) for bar in _two(each)])
    )
    return drawn(TITLE, panels, {name: versions[name] for name in VERSIONS if name in versions})


def _shape(name: str, results: Sequence[Result]) -> Panel:
    subjects = results[0].subjects
    title = f"{name.capitalize()}: {results[0].limits} limits, {subjects:,} subject{'s'[: subjects > 1]}"
    return Panel(title, NOTE, [_bar(each) for each in sorted(results, key=lambda each: -each.checks_per_second.median)])


def _bar(result: Result) -> Bar:
    per_second = result.checks_per_second.median
    said = f"{per_second:,.0f}, {result.p99_ms.median:.1f} ms, {result.cpu_us.median:.0f} us"
    return Bar(result.contestant, per_second, said, _kind(result.contestant))


def _two(flat: Flat) -> tuple[Bar, Bar]:
    few, many = flat.few_per_second.median, flat.many_per_second.median
    what = flat.what if flat.few > 1 else flat.what.removesuffix("s")
    return (
        Bar(f"{flat.few:,} {what}", few, f"{few:,.0f}", "peer"),
        Bar(f"{flat.many:,} {flat.what}", many, f"{many:,.0f}, {flat.ratio.text()}x", "ours"),
    )


def _kind(contestant: str) -> str:
    return "ours" if contestant.startswith(OURS) else "peer"
