"""What shards and leases bring, as an SVG, by hand. It brings a background of its own, as the library's does."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from bench.plot import STYLE, text
from bench.scale import crowd
from bench.scale.leases import FIXED
from bench.scale.pace import ALONE, MANY, PROCESSES, SHARDS
from bench.scale.report import split
from bench.scale.run import Result
from bench.scale.shards import GLOBAL, ONE, ONE_CROWDED, THREE, ShardsResult

TITLE = f"{SHARDS} shards beside one Redis, leased limits beside exact ones"

_WIDTH, _MARGIN = 920, 24
_NAMES, _NOTES = 270, 270  # where bars start; room for the text behind the longest one
_BAR, _STEP = 14, 22


class Bar(NamedTuple):
    name: str
    value: float
    said: str
    kind: str
    wrong: bool = False


class Panel(NamedTuple):
    """Bars on one scale, from 0."""

    title: str
    note: str
    bars: list[Bar]


def draw(results: Sequence[Result], versions: Mapping[str, str]) -> str:
    panels = _panels(results)
    parts = [text(_MARGIN, 36, TITLE, "title")]
    top = 50
    for panel in panels:
        parts += [text(_MARGIN, top + 16, panel.title, "group"), text(_MARGIN, top + 34, panel.note, "small")]
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
            f'<title id="title">{escape(TITLE)}</title>',
            f'<desc id="desc">{escape(" ".join(map(_description, panels)))}</desc>',
            f"<style>\n{STYLE}\n</style>",
            f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#f6f8fa"/>',
            *parts,
            text(_MARGIN, top + 10, used, "small"),
            "</svg>\n",
        )
    )


def _panels(results: Sequence[Result]) -> list[Panel]:
    over_shards, leased, crowded = split(results)
    panels = [
        Panel(
            f"Where the busiest Redis is full: {plan}",
            "Checks a second that fill its core, from its CPU per check under this load; behind it, checks in a call.",
            [
                Bar(
                    each.placement,
                    each.full_at.median,
                    f"{each.full_at.median:,.0f}, {each.checks_per_call:.1f} a call, {_kept(each)}",
                    "ours" if each.placement != each.base else "peer",
                    wrong=not each.exactness.exact or each.failed > 0,
                )
                for each in over_shards
                if each.plan == plan
            ],
        )
        for plan in (ONE, ONE_CROWDED, THREE, GLOBAL)
    ]
    panels += [
        Panel(
            f"A decision about one hot key, {'a lone caller' if callers == ALONE else f'{callers} callers'}",
            "Microseconds from asking to knowing, the median; a fixed window, one process.",
            [
                Bar(
                    each.consistency,
                    each.p50_us.median,
                    f"{each.p50_us.median:,.1f}, p99 {each.p99_us.median:,.1f}, {each.checks_per_second.median:,.0f}/s",
                    "peer" if each.consistency == "exact" else "ours",
                )
                for each in leased
                if each.callers == callers and each.algorithm == FIXED
            ],
        )
        for callers in (ALONE, MANY)
    ]
    busy = [
        Bar(
            each.contestant,
            100 * each.redis_busy.median,
            f"{100 * each.redis_busy.median:.1f} % at {each.checks_per_second.median:,.0f}/s, "
            f"{'limit kept' if each.kept else 'MORE than the limit'}",
            "peer" if each.contestant.startswith(crowd.EXACT) else "ours",
            wrong=not each.kept,
        )
        for each in crowded
    ]
    title = f"How busy one hot key keeps Redis, {PROCESSES} processes with {MANY} callers each"
    return [*panels, Panel(title, "CPU of Redis against the wall, and checks a second of all processes.", busy)]


def _kept(result: ShardsResult) -> str:
    if result.failed:
        return f"{result.failed} failed"
    return "exact" if result.exactness.exact else "NOT exact"


def _bar(bar: Bar, top: int, most: float) -> tuple[str, ...]:
    length = max(1.0, (_WIDTH - _NAMES - _NOTES) * bar.value / max(most, 1e-9))
    line = top + _BAR - 3
    return (
        text(_NAMES - 8, line, bar.name, anchor="end"),
        f'<rect class="{bar.kind}" x="{_NAMES}" y="{top}" width="{length:.1f}" height="{_BAR}" rx="2"/>',
        text(_NAMES + length + 8, line, bar.said, "wrong" if bar.wrong else ""),
    )


def _description(panel: Panel) -> str:
    return f"{panel.title}: {'; '.join(f'{bar.name} {bar.said}' for bar in panel.bars)}."
