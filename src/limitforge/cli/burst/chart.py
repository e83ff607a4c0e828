"""A burst as a picture: verdicts over time, the numbers of each limit, and a sentence. It prints nothing itself.

Verdicts are told by shape as well as by colour. The colours are the terminal's own, since only it knows its ground.
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
SCALE_WIDTH = 5  # the scale to the left of the columns
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
    """What the picture is drawn with."""

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
    """What is asked for and how it is shown. `planned_us` is how long the burst should take; 0 if nobody knows."""

    limits_text: str
    limits: Limits
    store_text: str
    rate_text: str
    requests: int
    planned_us: float
    width: int = 80
    glyphs: Glyphs = UNICODE


def render_chart(spec: ChartSpec, tally: BurstResults, *, now_s: float | None) -> RenderableType:
    """The picture at `now_s` after the start, or of the whole burst once it is over."""
    return Group(
        _header(spec),
        "",
        _chart(spec, tally, now_s),
        "",
        _counts_line(spec, tally),
        "",
        _limits_table(spec, tally),
        "",
        _indented(
            Text(summary_sentence(tally, spec.requests), style="bold")
            if now_s is None
            else _progress_line(spec, tally, now_s)
        ),
    )


def _header(frame: ChartSpec) -> RenderableType:
    asked = f"{frame.requests:,} requests at {frame.rate_text}"
    header = Table.grid(expand=True, padding=(0, 2, 0, 0))
    header.width = _total_width(frame) - SCALE_WIDTH
    header.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    header.add_column(justify="right", no_wrap=True, width=len(asked))
    header.add_row(Text.assemble((frame.limits_text, "bold"), f"  {frame.store_text}"), asked)
    return _indented(header)


# -- verdicts over time


def _chart(frame: ChartSpec, tally: BurstResults, now_s: float | None) -> Text:
    timeline, glyphs = tally.timeline, frame.glyphs
    room = max(_total_width(frame) - SCALE_WIDTH, MIN_COLUMNS)
    slices = len(timeline.slices)
    if now_s is not None:  # room for what is still to come; if it takes longer than planned, twice as much
        shown = max(timeline.slice_index(frame.planned_us - timeline.slice_us) + 1, 1) if frame.planned_us else room
        while shown < slices:
            shown *= 2
        slices = shown
    by = max(-(-slices // room), 1)
    widened = max(min(room // max(slices, 1), MAX_CELLS_PER_COLUMN), 1)
    columns = merge_slices(timeline.slices, by)
    cells = max(-(-slices // by) * widened, MIN_COLUMNS)
    cell_us = by * timeline.slice_us / widened
    peak = max((sum(column) for column in columns), default=0)
    stacks = [stack for column in columns for stack in [_stack(column, peak)] * widened]

    text = Text(no_wrap=True, overflow="crop")
    for row in range(CHART_ROWS, -1, -1):  # the row above the highest is for the cap line
        scale = format_short_count(peak) if row == CHART_ROWS - 1 and peak else ""
        line = Text(f"{scale:>{SCALE_WIDTH - 1}}{glyphs.scale if row < CHART_ROWS else ' '}")
        for stack in stacks:
            _append_cell(line, glyphs, stack, row)
        line.rstrip()
        text.append_text(line).append("\n")
    lead_cells = timeline.offset_us / cell_us
    axis, labels = _axis(glyphs, cells, cell_us, lead_cells)
    if now_s is not None:
        at = min(int(now_s * 1_000_000 / cell_us + lead_cells), cells - 1)
        axis = axis[:at] + glyphs.now + axis[at + 1 :]
    text.append(f"{'0':>{SCALE_WIDTH - 1}}{glyphs.corner}{axis}\n{'':{SCALE_WIDTH}}{labels}\n")
    text.append(f"{'':{SCALE_WIDTH}}each column is {format_elapsed(by * timeline.slice_us / 1_000_000)}", style="dim")
    return text


def _stack(column: list[int], peak: int) -> list[Verdict]:
    """The cells of a column from the bottom up. Whatever happened is seen: it has one cell at least."""
    cells: list[Verdict] = []
    total = sum(column)
    if not total:
        return cells
    height = max(round(total * CHART_ROWS / peak), 1, sum(1 for n in column if n))
    exact = [n * height / total for n in column]
    sizes = [max(math.floor(share), 1) if n else 0 for share, n in zip(exact, column, strict=True)]
    while sum(sizes) != height:  # by the largest remainder
        step = 1 if sum(sizes) < height else -1
        open_verdicts = [v for v in Verdict if sizes[v] > (1 if step < 0 else 0)]
        sizes[max(open_verdicts, key=lambda v: step * (exact[v] - sizes[v]))] += step
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


def _axis(glyphs: Glyphs, columns: int, column_us: float, lead_columns: float) -> tuple[str, str]:
    """The line under the columns with its ticks, and their labels."""
    line = [glyphs.line] * columns
    labels = ""
    step_us = _round_step(LABEL_SPACING * column_us)
    for tick in count():
        at = int(tick * step_us / column_us + lead_columns)
        if at >= columns:
            break
        line[at] = glyphs.tick
        label = "0" if tick == 0 else _axis_label(tick * step_us)
        start = min(at, columns - len(label))
        if start > len(labels) or not labels:
            labels = f"{labels:<{start}}{label}"
    return "".join(line), labels


def _axis_label(us: float) -> str:
    if us < 1_000_000:
        return f"{us / 1_000:g} ms"
    return f"{us / 1_000_000:g} s" if us < 120_000_000 else format_wait(round(us / 1_000))


def _round_step(least_us: float) -> float:
    """The smallest round time that is not below `least_us`."""
    for step in (60e6, 120e6, 300e6, 600e6, 1_800e6, 3_600e6, 7_200e6, 21_600e6, DAY_US):
        if 30e6 < least_us <= step:
            return step
    unit = DAY_US if least_us > DAY_US else 1.0
    power = unit * 10.0 ** math.floor(math.log10(least_us / unit))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least_us * 0.999)


# -- numbers


def _counts_line(frame: ChartSpec, tally: BurstResults) -> RenderableType:
    digits = len(f"{frame.requests:,}")
    allowed, delayed, denied = frame.glyphs.verdicts
    gap = "     " if _total_width(frame) >= 70 else "  "
    text = Text(no_wrap=True)
    for glyph, verdict, word, times in (
        (allowed, Verdict.ALLOWED, "allowed", tally.allowed),
        (delayed, Verdict.DELAYED, "of them delayed", tally.delayed),
        (denied, Verdict.DENIED, "denied", tally.denied),
    ):
        text.append(f"{glyph} {word} ", style=_STYLES[verdict])
        text.append(f"{times:>{digits},}", style="bold")
        text.append("" if verdict is Verdict.DENIED else gap)
    return _indented(text)


def _limits_table(frame: ChartSpec, tally: BurstResults) -> RenderableType:
    """A row for each limit. Its level has what room the words leave; its algorithm goes before a name is cut."""
    binding = tally.last_decision.binding if tally.last_decision else None
    limits = list(frame.limits)
    if len(limits) > MAX_SHOWN_LIMITS:
        limits.sort(key=lambda limit: limit.name != binding)
        del limits[MAX_SHOWN_LIMITS:]
    digits = max(len(format_count(limit.size or 0)) for limit in limits)
    name_width = max(len("limit"), *(len(limit.name) for limit in limits))
    algorithm_width = max(len("algorithm"), *(len(limit.algorithm) for limit in limits)) + 2
    room = _total_width(frame) - SCALE_WIDTH - 2 * digits - len(" of ") - 2 * TIME_WIDTH - 3 * 2
    has_algorithm = room - algorithm_width >= name_width
    if has_algorithm:
        room -= algorithm_width
    name_width = min(name_width, max(room, MIN_NAME_WIDTH))
    cells = min(room - name_width - 1, MAX_GAUGE_WIDTH)

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"{'':{SCALE_WIDTH}}limit", no_wrap=True, overflow="ellipsis", width=SCALE_WIDTH + name_width)
    if has_algorithm:
        table.add_column("algorithm", no_wrap=True)
    table.add_column("left", no_wrap=True)
    table.add_column("resets in", justify="right", no_wrap=True, min_width=TIME_WIDTH)
    table.add_column("retry in", justify="right", no_wrap=True, min_width=TIME_WIDTH)
    for limit in limits:
        state = tally.last_decision.limits[limit.name] if tally.last_decision else None
        size = limit.size or 0
        remaining = size if state is None else state.remaining or 0
        binds = len(frame.limits) > 1 and limit.name == binding
        table.add_row(
            f"{frame.glyphs.binding if binds else '':>{SCALE_WIDTH - 1}} {limit.name}",
            *([limit.algorithm] if has_algorithm else []),
            f"{_gauge(frame.glyphs, remaining, size, cells)}{format_count(remaining):>{digits}} of {format_count(size)}",
            format_wait(state.reset_after_ms) if state else "",
            format_wait(state.retry_after_ms) if state and not state.allowed else "",
            style="bold" if binds else "",
        )
    if len(frame.limits) == 1:
        return table
    hidden = len(frame.limits) - len(limits)
    more = f"; {hidden} more are not shown" if hidden else ""
    return Group(table, Text(f"{'':{SCALE_WIDTH}}{frame.glyphs.binding} is the limit that binds{more}", style="dim"))


def _gauge(glyphs: Glyphs, remaining: int, size: int, cells: int) -> str:
    """How full a limit is; nothing where that would not be legible."""
    if cells < MIN_GAUGE_WIDTH:
        return ""
    full = -(-remaining * cells // size) if size else 0
    return f"{glyphs.full * full}{glyphs.empty * (cells - full)} "


def _progress_line(frame: ChartSpec, tally: BurstResults, now_s: float) -> Text:
    room = max(_total_width(frame) - SCALE_WIDTH - 30, 10)
    full = tally.sent * room // frame.requests
    text = Text(no_wrap=True)
    text.append(frame.glyphs.full * full)
    text.append(frame.glyphs.empty * (room - full), style="dim")
    text.append(f"{tally.sent:>10,} of {frame.requests:,}  {format_elapsed(now_s):>7}")
    return text


def _indented(renderable: RenderableType) -> RenderableType:
    return Padding(renderable, (0, 0, 0, SCALE_WIDTH), expand=False)


def _total_width(frame: ChartSpec) -> int:
    return min(frame.width, MAX_WIDTH)
