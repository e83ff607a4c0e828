"""The picture of a burst: what is drawn where, and what is said about it."""

import io
from collections.abc import Iterable

import pytest
from rich.console import Console

from limitforge.cli.burst.chart import ASCII, UNICODE, ChartSpec, Glyphs, render_chart
from limitforge.cli.burst.formatting import (
    format_count,
    format_elapsed,
    format_short_count,
    format_wait,
    summary_sentence,
)
from limitforge.cli.burst.results import MAX_SLICES, BurstResults, Timeline, Verdict
from limitforge.core.clock import ManualClock
from limitforge.core.decision import Decision
from limitforge.core.plan import Limits
from limitforge.limiter_sync import SyncLimiter


def burst_results(text: str, times_s: Iterable[float], *, slice_us: float) -> BurstResults:
    """A burst at these times, on a clock of its own."""
    clock = ManualClock()
    start_us = clock.now_us()
    tally = BurstResults(Timeline(slice_us))
    with SyncLimiter.connect("memory://", clock=clock) as limiter:
        for at_s in times_s:
            clock.set_us(start_us + round(at_s * 1_000_000))
            tally.add(at_s, limiter.check("r", "s", limits=text))
    return tally


def demo_spec(requests: int = 150, sent: int | None = None) -> tuple[ChartSpec, BurstResults]:
    """`make demo`, or its first `sent` requests."""
    frame = ChartSpec("100/minute", Limits.parse("100/minute"), "in memory", "50/second", requests, requests * 20_000.0)
    times = [request * 0.02 for request in range(requests if sent is None else sent)]
    return frame, burst_results("100/minute", times, slice_us=20_000.0)


def rendered_lines(frame: ChartSpec, tally: BurstResults, *, now_s: float | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=frame.width, highlight=False)
    console.print(render_chart(frame, tally, now_s=now_s))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


# -- the picture


def test_the_demo_is_a_block_of_allowed_and_a_block_of_denied() -> None:
    frame, tally = demo_spec()
    lines = rendered_lines(frame, tally)
    assert [line.rstrip() for line in lines] == [
        "     100/minute  in memory                             150 requests at 50/second",
        "",
        f"{'':55}{'▁' * 25}",
        f"   2│{'█' * 50}{'░' * 25}",
        *[f"    │{'█' * 50}{'░' * 25}"] * 5,
        "   0└┬───────────┬────────────┬───────────┬────────────┬───────────┬────────────",
        "     0           500 ms       1 s         1.5 s        2 s         2.5 s",
        "     each column is 40 ms",
        "",
        "     █ allowed 100     ▒ of them delayed   0     ░ denied  50",
        "",
        "     limit   algorithm               left                   resets in   retry in",
        "     minute  sliding_window_counter  ──────────   0 of 100   1 m 57 s       58 s",
        "",
        "     100 of 150 allowed; the first denial came after 2.0 s; come back in 58 s.",
    ]


def test_while_it_runs_there_is_room_for_what_is_to_come() -> None:
    frame, tally = demo_spec(sent=75)
    lines = rendered_lines(frame, tally, now_s=1.48)
    assert lines[3] == f"   2│{'█' * 37}"
    assert lines[8] == f"    │{'█' * 38}"
    assert lines[9].index("▲") == 5 + 37
    assert lines[-1].split() == ["━" * 22 + "─" * 23, "75", "of", "150", "1.5", "s"]


def test_nothing_moves_when_the_last_frame_becomes_the_final_picture() -> None:
    frame, tally = demo_spec()
    running, done = rendered_lines(frame, tally, now_s=2.98), rendered_lines(frame, tally)
    assert len(running) == len(done)
    assert [line.replace("▲", "─") for line in running[:-1]] == done[:-1]


def test_what_is_delayed_is_drawn_where_it_goes_on() -> None:
    limits = "leaky:10/second"
    tally = burst_results(limits, [0.0] * 5, slice_us=100_000.0)
    lines = rendered_lines(ChartSpec(limits, Limits.parse(limits), "in memory", "full speed", 5, 0.0), tally)
    assert lines[8] == f"    │{'█' * 6}{'▒' * 24}"
    assert "All 5 allowed, 4 of them delayed by up to 400 ms; 5 of 10 left." in lines[-1]


@pytest.mark.parametrize(("glyphs", "allowed", "denied"), [(UNICODE, "█", "░"), (ASCII, "#", "x")])
def test_whatever_happened_in_a_column_has_a_cell(glyphs: Glyphs, allowed: str, denied: str) -> None:
    tally = burst_results("1/minute", [0.0] * 1_000, slice_us=20_000.0)
    lines = rendered_lines(ChartSpec("1/minute", Limits.parse("1/minute"), "", "max", 1_000, 0.0, glyphs=glyphs), tally)
    column = "".join(line[5:6] for line in lines[2:9])
    assert column == glyphs.denied_cap + denied * 5 + allowed


def test_without_unicode_the_picture_is_ascii() -> None:
    frame, tally = demo_spec(sent=120)
    for now_s in (None, 2.4):
        lines = rendered_lines(ChartSpec(*_fields(frame), glyphs=ASCII), tally, now_s=now_s)
        assert "\n".join(lines).isascii()


def _fields(frame: ChartSpec) -> tuple[str, Limits, str, str, int, float]:
    return frame.limits_text, frame.limits, frame.store_text, frame.rate_text, frame.requests, frame.planned_us


@pytest.mark.parametrize("width", [40, 60, 80, 100, 300])
def test_it_keeps_to_the_width_of_the_terminal(width: int) -> None:
    text = "a-name-that-is-longer-than-most=100/minute; 9/second"
    frame = ChartSpec(text, Limits.parse(text), "in memory", "50/second", 90, 90 * 20_000.0, width=width)
    tally = burst_results(text, [request * 0.02 for request in range(90)], slice_us=20_000.0)
    for now_s in (None, 1.8):
        assert max(len(line) for line in rendered_lines(frame, tally, now_s=now_s)) <= min(width, 120)


def test_on_a_narrow_terminal_no_number_is_lost() -> None:
    _, tally = demo_spec()
    lines = rendered_lines(
        ChartSpec("100/minute", Limits.parse("100/minute"), "", "50/second", 150, 3e6, width=60), tally
    )
    assert any(line.startswith("     minute  ") and line.endswith("58 s") for line in lines)
    assert any(line.endswith("░ denied  50") for line in lines)


def test_the_limit_that_binds_is_marked_when_there_are_several() -> None:
    text = "100/minute; 5/second"
    tally = burst_results(text, [0.0] * 6, slice_us=1_000.0)
    lines = rendered_lines(ChartSpec(text, Limits.parse(text), "in memory", "full speed", 6, 0.0), tally)
    assert [line[:13].rstrip() for line in lines if "▸" in line] == ["   ▸ second", "     ▸ is the"]


def test_of_many_limits_the_one_that_binds_is_shown() -> None:
    text = "; ".join(f"limit{n}={40 - n}/minute" for n in range(20))
    tally = burst_results(text, [0.0], slice_us=1_000.0)
    lines = rendered_lines(ChartSpec(text, Limits.parse(text), "in memory", "full speed", 1, 0.0), tally)
    assert any("▸ limit19 " in line for line in lines)
    assert any("14 more are not shown" in line for line in lines)


def test_before_the_first_answer_every_limit_is_full() -> None:
    frame, tally = demo_spec(sent=0)
    lines = rendered_lines(frame, tally, now_s=0.0)
    assert any("100 of 100" in line for line in lines)
    assert "Stopped before the first request." in rendered_lines(frame, tally)[-1]


# -- time that outgrows its slices


def test_a_timeline_stays_bounded_and_loses_nothing() -> None:
    timeline = Timeline(100.0)
    for request in range(10 * MAX_SLICES):
        timeline.add(request * 1_000.0, Verdict.ALLOWED)
    assert len(timeline.slices) <= MAX_SLICES
    assert sum(map(sum, timeline.slices)) == 10 * MAX_SLICES


def test_a_timeline_reaches_as_far_as_the_longest_delay() -> None:
    timeline = Timeline(100.0)
    timeline.add(0.0, Verdict.ALLOWED)
    timeline.add(10 * 365 * 86_400e6, Verdict.DELAYED)
    assert timeline.slices[0] == [1, 0, 0]
    assert timeline.slices[-1] == [0, 1, 0]
    assert len(timeline.slices) <= MAX_SLICES


def test_a_little_jitter_moves_nothing_into_another_slice() -> None:
    timeline = Timeline(20_000.0)
    for request in range(50):
        timeline.add(request * 20_000.0 + (9_000 if request % 3 else 0), Verdict.ALLOWED)
    assert timeline.slices == [[1, 0, 0]] * 50


# -- words


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (None, "never"),
        (0, "0 ms"),
        (999, "999 ms"),
        (1_001, "1.1 s"),
        (9_999, "10.0 s"),
        (10_001, "11 s"),
        (99_000, "99 s"),
        (99_001, "1 m 40 s"),
        (3_599_001, "1 h 00 m"),
        (3_600_001, "1 h 01 m"),
        (86_400_000, "1 d 00 h"),
        (86_400_001, "1 d 01 h"),
    ],
)
def test_a_wait_is_rounded_up(ms: int | None, words: str) -> None:
    assert format_wait(ms) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0 ms"), (0.0421, "42 ms"), (0.9999, "1.0 s"), (2.04, "2.0 s"), (99.9, "99.9 s"), (125.2, "2 m 05 s")],
)
def test_a_time_that_has_passed_is_rounded_to_the_nearest(seconds: float, words: str) -> None:
    assert format_elapsed(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0"), (999, "999"), (1_000, "1.0k"), (9_999, "9.9k"), (10_000, "10k"), (2_500_000, "2.5M"), (2**52, "4.5P")],
)
def test_a_scale_is_short(count: int, words: str) -> None:
    assert format_short_count(count) == words
    assert format_count(count) == (f"{count:,}" if count < 10_000_000 else words)


@pytest.mark.parametrize(
    ("limits", "times_s", "requests", "sentence"),
    [
        ("5/second", [0.0] * 3, 3, "All 3 allowed; 2 of 5 left."),
        ("5/second", [0.0] * 8, 8, "5 of 8 allowed; the first denial came after 0 ms; come back in 1.0 s."),
        ("5/second", [*[0.5] * 6, 1.5], 7, "6 of 7 allowed; the first denial came after 500 ms."),
        ("0/second", [0.0] * 8, 8, "None of 8 allowed; waiting does not help."),
        ("5/second", [0.0] * 3, 10, "Stopped after 3 of 10 requests: all 3 allowed; 2 of 5 left."),
        ("leaky:5/second", [0.0] * 6, 6, "5 of 6 allowed, 4 of them delayed by up to 800 ms; the first denial came"),
    ],
)
def test_the_outcome_is_a_sentence(limits: str, times_s: list[float], requests: int, sentence: str) -> None:
    assert summary_sentence(burst_results(limits, times_s, slice_us=1_000.0), requests).startswith(sentence)


def test_a_limit_that_nothing_binds_has_nothing_left_to_tell() -> None:
    tally = BurstResults(Timeline(1_000.0))
    unlimited = Decision(True, None, None, None, None, 0, None, {}, None)
    tally.add(0.0, unlimited)
    assert summary_sentence(tally, 1) == "All 1 allowed."
