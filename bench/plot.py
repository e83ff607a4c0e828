"""The library's results as an SVG, by hand: bars of checks per second at 64 callers, with what each one admitted.

It brings a background of its own, so it reads the same on a light and on a dark page.
"""

from collections.abc import Mapping, Sequence
from html import escape

from bench.harness import OURS
from bench.library.run import MANY, ONE, THREE, Result

TITLE = "Checks per second on Redis, one process, 64 concurrent callers"
NOTE = "Behind each bar: checks/s, and how many were admitted when all callers asked at once for more than the limit."
AFTER = "“then”: what its first limit still gave after another one had denied. A denial should take nothing."

_WIDTH, _MARGIN = 920, 24
_NAMES, _NOTES = 250, 290  # where bars start; room for the text behind the longest one
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
    groups = {shape: _fastest_of_workload(results, shape) for shape in (ONE, THREE)}
    most = max(result.checks_per_second.median for group in groups.values() for result in group)
    parts = [
        text_element(_MARGIN, 36, TITLE, "title"),
        text_element(_MARGIN, 58, NOTE, "note"),
        text_element(_MARGIN, 76, AFTER, "note"),
    ]
    top = 96
    for shape, group in groups.items():
        parts.append(text_element(_MARGIN, top + 14, shape.capitalize(), "group"))
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
    said = f"{rate:,.0f}, admitted {_admitted(result)}"
    line = top + _BAR - 4
    return (
        text_element(_NAMES - 8, line, result.contestant, anchor="end"),
        f'<rect class="{kind}" x="{_NAMES}" y="{top}" width="{length:.1f}" height="{_BAR}" rx="2"/>',
        text_element(_NAMES + length + 8, line, said, "" if result.exactness.is_exact else "wrong"),
    )


def text_element(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(said)}</text>'


def _admitted(result: Result) -> str:
    first, after = result.exactness.admitted, result.exactness.admitted_after_denial
    return f"{first.text()}, then {after.text()}" if after else first.text()


def _fastest_of_workload(results: Sequence[Result], shape: str) -> list[Result]:
    """The fastest way to use each library, the fastest first."""
    best: dict[str, Result] = {}
    for result in results:
        if result.workload == shape and result.callers == MANY:
            library = result.contestant.split(",")[0]
            found = best.get(library)
            if found is None or result.checks_per_second.median > found.checks_per_second.median:
                best[library] = result
    return sorted(best.values(), key=lambda result: -result.checks_per_second.median)


def _description(groups: Mapping[str, Sequence[Result]]) -> str:
    return " ".join(f"{shape.capitalize()}: {'; '.join(map(_summary, group))}." for shape, group in groups.items())


def _summary(result: Result) -> str:
    return f"{result.contestant} {result.checks_per_second.median:,.0f} a second, admitted {_admitted(result)}"
