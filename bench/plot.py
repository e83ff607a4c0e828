"""Draw the results of the library as an SVG: checks per second at 64 callers, with the admitted number of each.

The SVG has its own background, so it is readable on light and dark pages.
"""

from collections.abc import Mapping, Sequence
from html import escape

from bench.harness import OURS
from bench.library.run import MANY, ONE, THREE, Result

TITLE = "Checks per second on Redis, one process, 64 concurrent callers"
NOTE = "Behind each bar: checks/s, and how many were admitted when all callers exceeded the limit at once."
AFTER = "“then”: what its first limit still gave after another one had denied. A denial should take nothing."

_WIDTH, _MARGIN = 920, 24
_NAMES, _NOTES = 250, 290  # the left edge of the bars, and the width for the text behind the longest one
_BAR, _STEP = 16, 26

STYLE = """\
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.group { font-weight: 600 }
.note { fill: #57606a }
.small { font-size: 11px; fill: #57606a }
.wrong { fill: #b42318 }
.ours { fill: #0b6e4f }
.peer { fill: #8c959f }"""


def render_svg(results: Sequence[Result], versions: Mapping[str, str]) -> str:
    groups = {workload: _fastest_of_workload(results, workload) for workload in (ONE, THREE)}
    most = max(result.checks_per_second.median for group in groups.values() for result in group)
    parts = [
        text_element(_MARGIN, 36, TITLE, "title"),
        text_element(_MARGIN, 58, NOTE, "note"),
        text_element(_MARGIN, 76, AFTER, "note"),
    ]
    top = 96
    for workload, group in groups.items():
        parts.append(text_element(_MARGIN, top + 14, workload.capitalize(), "group"))
        top += 28
        for result in group:
            parts += _bar(result, top, most)
            top += _STEP
        top += 12
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    parts.append(text_element(_MARGIN, top + 10, used, "small"))
    height = top + 10 + _MARGIN
    return "\n".join((*_opening(height, _description(groups)), *parts, "</svg>\n"))


def _opening(height: int, description: str) -> tuple[str, ...]:
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(TITLE)}</title>',
        f'<desc id="desc">{escape(description)}</desc>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#f6f8fa"/>',
    )


def _bar(result: Result, top: int, most: float) -> tuple[str, ...]:
    rate = result.checks_per_second.median
    length = max(1.0, (_WIDTH - _NAMES - _NOTES) * rate / most)
    kind = "ours" if result.contestant == OURS else "peer"
    label = f"{rate:,.0f}, admitted {_admitted(result)}"
    line = top + _BAR - 4
    return (
        text_element(_NAMES - 8, line, result.contestant, anchor="end"),
        f'<rect class="{kind}" x="{_NAMES}" y="{top}" width="{length:.1f}" height="{_BAR}" rx="2"/>',
        text_element(_NAMES + length + 8, line, label, "" if result.exactness.is_exact else "wrong"),
    )


def text_element(x: float, y: float, label: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(label)}</text>'


def _admitted(result: Result) -> str:
    first, after = result.exactness.admitted, result.exactness.admitted_after_denial
    return f"{first.text()}, then {after.text()}" if after else first.text()


def _fastest_of_workload(results: Sequence[Result], workload: str) -> list[Result]:
    """Return the fastest result of each library, in descending order."""
    best: dict[str, Result] = {}
    for result in results:
        if result.workload == workload and result.callers == MANY:
            library = result.contestant.split(",")[0]
            found = best.get(library)
            if found is None or result.checks_per_second.median > found.checks_per_second.median:
                best[library] = result
    return sorted(best.values(), key=lambda result: -result.checks_per_second.median)


def _description(groups: Mapping[str, Sequence[Result]]) -> str:
    return " ".join(
        f"{workload.capitalize()}: {'; '.join(map(_summary, group))}." for workload, group in groups.items()
    )


def _summary(result: Result) -> str:
    return f"{result.contestant} {result.checks_per_second.median:,.0f} a second, admitted {_admitted(result)}"
