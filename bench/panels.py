"""Draw panels of bars as an SVG with its own background."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from bench.plot import STYLE, text_element

_WIDTH, _MARGIN = 920, 24
_NAMES, _NOTES = 270, 270  # the left edge of the bars, and the width for the text behind the longest one
_BAR, _STEP = 14, 22


class Bar(NamedTuple):
    name: str
    value: float
    label: str
    kind: str
    wrong: bool = False


class Panel(NamedTuple):
    """Bars on one scale that starts at 0."""

    title: str
    note: str
    bars: list[Bar]


def render_panels(title: str, panels: Sequence[Panel], versions: Mapping[str, str]) -> str:
    parts = [text_element(_MARGIN, 36, title, "title")]
    top = 50
    for panel in panels:
        parts += [
            text_element(_MARGIN, top + 16, panel.title, "group"),
            text_element(_MARGIN, top + 34, panel.note, "small"),
        ]
        top += 44
        most = max(bar.value for bar in panel.bars)
        for bar in panel.bars:
            parts += _bar(bar, top, most)
            top += _STEP
        top += 10
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    height = top + 10 + _MARGIN
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(" ".join(map(_description, panels)))}</desc>',
            f"<style>\n{STYLE}\n</style>",
            f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#f6f8fa"/>',
            *parts,
            text_element(_MARGIN, top + 10, used, "small"),
            "</svg>\n",
        )
    )


def _bar(bar: Bar, top: int, most: float) -> tuple[str, ...]:
    length = max(1.0, (_WIDTH - _NAMES - _NOTES) * bar.value / max(most, 1e-9))
    line = top + _BAR - 3
    return (
        text_element(_NAMES - 8, line, bar.name, anchor="end"),
        f'<rect class="{bar.kind}" x="{_NAMES}" y="{top}" width="{length:.1f}" height="{_BAR}" rx="2"/>',
        text_element(_NAMES + length + 8, line, bar.label, "wrong" if bar.wrong else ""),
    )


def _description(panel: Panel) -> str:
    return f"{panel.title}: {'; '.join(f'{bar.name} {bar.label}' for bar in panel.bars)}."
