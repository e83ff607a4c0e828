"""Draw a burst: a chart of verdicts over time, a table of the limits, and a summary. It prints nothing itself.

Verdicts differ in shape as well as in colour. The colours are those of the terminal's palette, because only the
terminal knows its background.
"""

import math
from dataclasses import dataclass
from itertools import count

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from limitforge.cli.burst.formatting import (
    format_count,
    format_elapsed,
    format_short_count,
    format_wait,
    summary_sentence,
)
from limitforge.cli.burst.results import BurstResults, Verdict, merge_slices
from limitforge.core.plan import Limits

CHART_ROWS = 6
SCALE_WIDTH = 5  # left of the columns
MAX_WIDTH = 120
MIN_COLUMNS = 20
LABEL_SPACING = 12
MAX_CELLS_PER_COLUMN = 6
DAY_US = 86_400e6
TIME_WIDTH = len("59 m 59 s")
MIN_NAME_WIDTH = 12
MIN_GAUGE_WIDTH = 4
MAX_GAUGE_WIDTH = 20
MAX_SHOWN_LIMITS = 6

_STYLES = {Verdict.ALLOWED: "green", Verdict.DELAYED: "yellow", Verdict.DENIED: "red"}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters that the chart consists of."""

    verdicts: tuple[str, str, str]
    denied_cap: str
    scale: str
    corner: str
    line: str
    tick: str
    now: str
    full: str
    empty: str
    binding: str


UNICODE = Glyphs(("█", "▒", "░"), "▁", "│", "└", "─", "┬", "▲", "━", "─", "▸")
ASCII = Glyphs(("#", "~", "x"), "_", "|", "+", "-", "+", "^", "=", "-", ">")


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """A burst to draw, and the format of the chart. `expected_us` is the expected duration; 0 if it is unknown."""

    limits_text: str
    limits: Limits
    store_text: str
    rate_text: str
    requests: int
    expected_us: float
    width: int = 80
    glyphs: Glyphs = UNICODE


def render_chart(spec: ChartSpec, results: BurstResults, *, now_s: float | None) -> RenderableType:
    """Draw the burst as it is `now_s` seconds after its start. With None, draw the finished burst."""
    return Group(
        _header(spec),
        "",
        _chart(spec, results, now_s),
        "",
        _counts_line(spec, results),
        "",
        _limits_table(spec, results),
        "",
        _indented(
            Text(summary_sentence(results, spec.requests), style="bold")
            if now_s is None
            else _progress_line(spec, results, now_s)
        ),
    )


def _header(spec: ChartSpec) -> RenderableType:
    schedule = f"{spec.requests:,} requests at {spec.rate_text}"
    header = Table.grid(expand=True, padding=(0, 2, 0, 0))
    header.width = _total_width(spec) - SCALE_WIDTH
    header.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    header.add_column(justify="right", no_wrap=True, width=len(schedule))
    header.add_row(Text.assemble((spec.limits_text, "bold"), f"  {spec.store_text}"), schedule)
    return _indented(header)


# --- The chart of verdicts over time ---------------------------------------------------------------------------------


def _chart(spec: ChartSpec, results: BurstResults, now_s: float | None) -> Text:
    timeline, glyphs = results.timeline, spec.glyphs
    width = max(_total_width(spec) - SCALE_WIDTH, MIN_COLUMNS)
    slices = len(timeline.slices)
    if now_s is not None:  # leave space for the expected duration, and double it if the burst takes longer
        shown = max(timeline.slice_index(spec.expected_us - timeline.slice_us) + 1, 1) if spec.expected_us else width
        while shown < slices:
            shown *= 2
        slices = shown
    slices_per_column = max(-(-slices // width), 1)
    cells_per_column = max(min(width // max(slices, 1), MAX_CELLS_PER_COLUMN), 1)
    columns = merge_slices(timeline.slices, slices_per_column)
    cells = max(-(-slices // slices_per_column) * cells_per_column, MIN_COLUMNS)
    cell_us = slices_per_column * timeline.slice_us / cells_per_column
    peak = max((sum(column) for column in columns), default=0)
    stacks = [stack for column in columns for stack in [_stack(column, peak)] * cells_per_column]

    text = Text(no_wrap=True, overflow="crop")
    for row in range(CHART_ROWS, -1, -1):  # the highest row is for the caps of full columns
        scale = format_short_count(peak) if row == CHART_ROWS - 1 and peak else ""
        line = Text(f"{scale:>{SCALE_WIDTH - 1}}{glyphs.scale if row < CHART_ROWS else ' '}")
        for stack in stacks:
            _append_cell(line, glyphs, stack, row)
        line.rstrip()
        text.append_text(line).append("\n")
    offset_cells = timeline.offset_us / cell_us
    axis, labels = _axis(glyphs, cells, cell_us, offset_cells)
    if now_s is not None:
        now = min(int(now_s * 1_000_000 / cell_us + offset_cells), cells - 1)
        axis = axis[:now] + glyphs.now + axis[now + 1 :]
    text.append(f"{'0':>{SCALE_WIDTH - 1}}{glyphs.corner}{axis}\n{'':{SCALE_WIDTH}}{labels}\n")
    column_s = slices_per_column * timeline.slice_us / 1_000_000
    text.append(f"{'':{SCALE_WIDTH}}each column is {format_elapsed(column_s)}", style="dim")
    return text


def _stack(column: list[int], peak: int) -> list[Verdict]:
    """Return the cells of a column from the bottom up. Every verdict that occurred has at least one cell."""
    cells: list[Verdict] = []
    total = sum(column)
    if not total:
        return cells
    height = max(round(total * CHART_ROWS / peak), 1, sum(1 for n in column if n))
    exact = [n * height / total for n in column]
    sizes = [max(math.floor(share), 1) if n else 0 for share, n in zip(exact, column, strict=True)]
    while sum(sizes) != height:  # the largest remainder method
        step = 1 if sum(sizes) < height else -1
        adjustable = [v for v in Verdict if sizes[v] > (1 if step < 0 else 0)]
        sizes[max(adjustable, key=lambda v: step * (exact[v] - sizes[v]))] += step
    for verdict in Verdict:
        cells += [verdict] * sizes[verdict]
    return cells


def _append_cell(text: Text, glyphs: Glyphs, stack: list[Verdict], row: int) -> None:
    if row < len(stack):
        text.append(glyphs.verdicts[stack[row]], style=_STYLES[stack[row]])
    elif row == len(stack) and stack and stack[-1] is Verdict.DENIED:
        text.append(glyphs.denied_cap, style=_STYLES[Verdict.DENIED])
    else:
        text.append(" ")


def _axis(glyphs: Glyphs, cells: int, cell_us: float, offset_cells: float) -> tuple[str, str]:
    """Return the line under the columns with its ticks, and their labels."""
    line = [glyphs.line] * cells
    labels = ""
    step_us = _round_step(LABEL_SPACING * cell_us)
    for tick in count():
        cell = int(tick * step_us / cell_us + offset_cells)
        if cell >= cells:
            break
        line[cell] = glyphs.tick
        label = "0" if tick == 0 else _axis_label(tick * step_us)
        start = min(cell, cells - len(label))
        if start > len(labels) or not labels:
            labels = f"{labels:<{start}}{label}"
    return "".join(line), labels


def _axis_label(us: float) -> str:
    if us < 1_000_000:
        return f"{us / 1_000:g} ms"
    return f"{us / 1_000_000:g} s" if us < 120_000_000 else format_wait(round(us / 1_000))


def _round_step(min_us: float) -> float:
    """Return the smallest round time that is at least `min_us`."""
    for step in (60e6, 120e6, 300e6, 600e6, 1_800e6, 3_600e6, 7_200e6, 21_600e6, DAY_US):
        if 30e6 < min_us <= step:
            return step
    unit = DAY_US if min_us > DAY_US else 1.0
    power = unit * 10.0 ** math.floor(math.log10(min_us / unit))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= min_us * 0.999)


# --- Numbers ---------------------------------------------------------------------------------------------------------


def _counts_line(spec: ChartSpec, results: BurstResults) -> RenderableType:
    digits = len(f"{spec.requests:,}")
    allowed, delayed, denied = spec.glyphs.verdicts
    gap = "     " if _total_width(spec) >= 70 else "  "
    text = Text(no_wrap=True)
    for glyph, verdict, label, number in (
        (allowed, Verdict.ALLOWED, "allowed", results.allowed),
        (delayed, Verdict.DELAYED, "of them delayed", results.delayed),
        (denied, Verdict.DENIED, "denied", results.denied),
    ):
        text.append(f"{glyph} {label} ", style=_STYLES[verdict])
        text.append(f"{number:>{digits},}", style="bold")
        text.append("" if verdict is Verdict.DENIED else gap)
    return _indented(text)


def _limits_table(spec: ChartSpec, results: BurstResults) -> RenderableType:
    """Draw a row for each limit.

    The gauge uses the width that the text leaves. In a narrow terminal the algorithm is left out before names are cut.
    """
    binding = results.last_decision.binding if results.last_decision else None
    limits = list(spec.limits)
    if len(limits) > MAX_SHOWN_LIMITS:
        limits.sort(key=lambda limit: limit.name != binding)
        del limits[MAX_SHOWN_LIMITS:]
    digits = max(len(format_count(limit.size or 0)) for limit in limits)
    name_width = max(len("limit"), *(len(limit.name) for limit in limits))
    algorithm_width = max(len("algorithm"), *(len(limit.algorithm) for limit in limits)) + 2
    free_width = _total_width(spec) - SCALE_WIDTH - 2 * digits - len(" of ") - 2 * TIME_WIDTH - 3 * 2
    has_algorithm = free_width - algorithm_width >= name_width
    if has_algorithm:
        free_width -= algorithm_width
    name_width = min(name_width, max(free_width, MIN_NAME_WIDTH))
    gauge_width = min(free_width - name_width - 1, MAX_GAUGE_WIDTH)

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"{'':{SCALE_WIDTH}}limit", no_wrap=True, overflow="ellipsis", width=SCALE_WIDTH + name_width)
    if has_algorithm:
        table.add_column("algorithm", no_wrap=True)
    table.add_column("left", no_wrap=True)
    table.add_column("resets in", justify="right", no_wrap=True, min_width=TIME_WIDTH)
    table.add_column("retry in", justify="right", no_wrap=True, min_width=TIME_WIDTH)
    for limit in limits:
        state = results.last_decision.limits[limit.name] if results.last_decision else None
        size = limit.size or 0
        remaining = size if state is None else state.remaining or 0
        is_binding = len(spec.limits) > 1 and limit.name == binding
        gauge = _gauge(spec.glyphs, remaining, size, gauge_width)
        table.add_row(
            f"{spec.glyphs.binding if is_binding else '':>{SCALE_WIDTH - 1}} {limit.name}",
            *([limit.algorithm] if has_algorithm else []),
            f"{gauge}{format_count(remaining):>{digits}} of {format_count(size)}",
            format_wait(state.reset_after_ms) if state else "",
            format_wait(state.retry_after_ms) if state and not state.allowed else "",
            style="bold" if is_binding else "",
        )
    if len(spec.limits) == 1:
        return table
    hidden = len(spec.limits) - len(limits)
    more = f"; {hidden} more are not shown" if hidden else ""
    return Group(table, Text(f"{'':{SCALE_WIDTH}}{spec.glyphs.binding} is the binding limit{more}", style="dim"))


def _gauge(glyphs: Glyphs, remaining: int, size: int, width: int) -> str:
    """Draw how full a limit is, or nothing if the gauge would be too small to read."""
    if width < MIN_GAUGE_WIDTH:
        return ""
    full = -(-remaining * width // size) if size else 0
    return f"{glyphs.full * full}{glyphs.empty * (width - full)} "


def _progress_line(spec: ChartSpec, results: BurstResults, now_s: float) -> Text:
    width = max(_total_width(spec) - SCALE_WIDTH - 30, 10)
    full = results.sent * width // spec.requests
    text = Text(no_wrap=True)
    text.append(spec.glyphs.full * full)
    text.append(spec.glyphs.empty * (width - full), style="dim")
    text.append(f"{results.sent:>10,} of {spec.requests:,}  {format_elapsed(now_s):>7}")
    return text


def _indented(renderable: RenderableType) -> RenderableType:
    return Padding(renderable, (0, 0, 0, SCALE_WIDTH), expand=False)


def _total_width(spec: ChartSpec) -> int:
    return min(spec.width, MAX_WIDTH)
