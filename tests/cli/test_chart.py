"""The chart of a burst: where it draws what, and its summary."""

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
    """Run a burst at these times, on a manual clock."""
    clock = ManualClock()
    start_us = clock.now_us()
    results = BurstResults(Timeline(slice_us))
    with SyncLimiter.connect("memory://", clock=clock) as limiter:
        for at_s in times_s:
            clock.set_us(start_us + round(at_s * 1_000_000))
            results.add(at_s, limiter.check("r", "s", limits=text))
    return results


def demo_spec(requests: int = 150, sent: int | None = None) -> tuple[ChartSpec, BurstResults]:
    """Return the burst of `make demo`, or its first `sent` requests."""
    spec = ChartSpec("100/minute", Limits.parse("100/minute"), "in memory", "50/second", requests, requests * 20_000.0)
    times = [request * 0.02 for request in range(requests if sent is None else sent)]
    return spec, burst_results("100/minute", times, slice_us=20_000.0)


def rendered_lines(spec: ChartSpec, results: BurstResults, *, now_s: float | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=spec.width, highlight=False)
    console.print(render_chart(spec, results, now_s=now_s))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


# --- The chart -------------------------------------------------------------------------------------------------------


def test_the_demo_is_a_block_of_allowed_and_a_block_of_denied() -> None:
    spec, results = demo_spec()
    lines = rendered_lines(spec, results)
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
        "     100 of 150 allowed; the first denial came after 2.0 s; retry in 58 s.",
    ]


def test_a_running_burst_leaves_space_for_the_rest() -> None:
    spec, results = demo_spec(sent=75)
    lines = rendered_lines(spec, results, now_s=1.48)
    assert lines[3] == f"   2│{'█' * 37}"
    assert lines[8] == f"    │{'█' * 38}"
    assert lines[9].index("▲") == 5 + 37
    assert lines[-1].split() == ["━" * 22 + "─" * 23, "75", "of", "150", "1.5", "s"]


def test_the_final_chart_equals_the_last_frame() -> None:
    spec, results = demo_spec()
    running, done = rendered_lines(spec, results, now_s=2.98), rendered_lines(spec, results)
    assert len(running) == len(done)
    assert [line.replace("▲", "─") for line in running[:-1]] == done[:-1]


def test_a_delayed_request_is_drawn_at_the_end_of_its_delay() -> None:
    limits = "leaky:10/second"
    results = burst_results(limits, [0.0] * 5, slice_us=100_000.0)
    lines = rendered_lines(ChartSpec(limits, Limits.parse(limits), "in memory", "full speed", 5, 0.0), results)
    assert lines[8] == f"    │{'█' * 6}{'▒' * 24}"
    assert "All 5 allowed, 4 of them delayed by up to 400 ms; 5 of 10 left." in lines[-1]


@pytest.mark.parametrize(("glyphs", "allowed", "denied"), [(UNICODE, "█", "░"), (ASCII, "#", "x")])
def test_every_verdict_in_a_column_has_a_cell(glyphs: Glyphs, allowed: str, denied: str) -> None:
    results = burst_results("1/minute", [0.0] * 1_000, slice_us=20_000.0)
    lines = rendered_lines(
        ChartSpec("1/minute", Limits.parse("1/minute"), "", "max", 1_000, 0.0, glyphs=glyphs), results
    )
    column = "".join(line[5:6] for line in lines[2:9])
    assert column == glyphs.denied_cap + denied * 5 + allowed


def test_without_unicode_the_chart_is_ascii() -> None:
    spec, results = demo_spec(sent=120)
    for now_s in (None, 2.4):
        lines = rendered_lines(ChartSpec(*_fields(spec), glyphs=ASCII), results, now_s=now_s)
        assert "\n".join(lines).isascii()


def _fields(spec: ChartSpec) -> tuple[str, Limits, str, str, int, float]:
    return spec.limits_text, spec.limits, spec.store_text, spec.rate_text, spec.requests, spec.expected_us


@pytest.mark.parametrize("width", [40, 60, 80, 100, 300])
def test_it_keeps_to_the_width_of_the_terminal(width: int) -> None:
    text = "a-name-that-is-longer-than-most=100/minute; 9/second"
    spec = ChartSpec(text, Limits.parse(text), "in memory", "50/second", 90, 90 * 20_000.0, width=width)
    results = burst_results(text, [request * 0.02 for request in range(90)], slice_us=20_000.0)
    for now_s in (None, 1.8):
        assert max(len(line) for line in rendered_lines(spec, results, now_s=now_s)) <= min(width, 120)


def test_on_a_narrow_terminal_no_number_is_lost() -> None:
    _, results = demo_spec()
    lines = rendered_lines(
        ChartSpec("100/minute", Limits.parse("100/minute"), "", "50/second", 150, 3e6, width=60), results
    )
    assert any(line.startswith("     minute  ") and line.endswith("58 s") for line in lines)
    assert any(line.endswith("░ denied  50") for line in lines)


def test_the_binding_limit_of_several_is_marked() -> None:
    text = "100/minute; 5/second"
    results = burst_results(text, [0.0] * 6, slice_us=1_000.0)
    lines = rendered_lines(ChartSpec(text, Limits.parse(text), "in memory", "full speed", 6, 0.0), results)
    assert [line[:13].rstrip() for line in lines if "▸" in line] == ["   ▸ second", "     ▸ is the"]


def test_the_binding_limit_of_many_is_shown() -> None:
    text = "; ".join(f"limit{n}={40 - n}/minute" for n in range(20))
    results = burst_results(text, [0.0], slice_us=1_000.0)
    lines = rendered_lines(ChartSpec(text, Limits.parse(text), "in memory", "full speed", 1, 0.0), results)
    assert any("▸ limit19 " in line for line in lines)
    assert any("14 more are not shown" in line for line in lines)


def test_before_the_first_decision_every_limit_is_full() -> None:
    spec, results = demo_spec(sent=0)
    lines = rendered_lines(spec, results, now_s=0.0)
    assert any("100 of 100" in line for line in lines)
    assert "Stopped before the first request." in rendered_lines(spec, results)[-1]


# --- The timeline ----------------------------------------------------------------------------------------------------


def test_a_timeline_is_bounded_and_loses_nothing() -> None:
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


def test_jitter_moves_nothing_to_another_slice() -> None:
    timeline = Timeline(20_000.0)
    for request in range(50):
        timeline.add(request * 20_000.0 + (9_000 if request % 3 else 0), Verdict.ALLOWED)
    assert timeline.slices == [[1, 0, 0]] * 50


# --- Formatting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "text"),
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
def test_a_wait_is_rounded_up(ms: int | None, text: str) -> None:
    assert format_wait(ms) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.0421, "42 ms"), (0.9999, "1.0 s"), (2.04, "2.0 s"), (99.9, "99.9 s"), (125.2, "2 m 05 s")],
)
def test_a_time_that_has_passed_is_rounded_to_the_nearest(seconds: float, text: str) -> None:
    assert format_elapsed(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1_000, "1.0k"), (9_999, "9.9k"), (10_000, "10k"), (2_500_000, "2.5M"), (2**52, "4.5P")],
)
def test_large_counts_are_short(count: int, text: str) -> None:
    assert format_short_count(count) == text
    assert format_count(count) == (f"{count:,}" if count < 10_000_000 else text)


@pytest.mark.parametrize(
    ("limits", "times_s", "requests", "sentence"),
    [
        ("5/second", [0.0] * 3, 3, "All 3 allowed; 2 of 5 left."),
        ("5/second", [0.0] * 8, 8, "5 of 8 allowed; the first denial came after 0 ms; retry in 1.0 s."),
        ("5/second", [*[0.5] * 6, 1.5], 7, "6 of 7 allowed; the first denial came after 500 ms."),
        ("0/second", [0.0] * 8, 8, "None of 8 allowed; waiting does not help."),
        ("5/second", [0.0] * 3, 10, "Stopped after 3 of 10 requests: all 3 allowed; 2 of 5 left."),
        ("leaky:5/second", [0.0] * 6, 6, "5 of 6 allowed, 4 of them delayed by up to 800 ms; the first denial came"),
    ],
)
def test_the_summary_is_a_sentence(limits: str, times_s: list[float], requests: int, sentence: str) -> None:
    assert summary_sentence(burst_results(limits, times_s, slice_us=1_000.0), requests).startswith(sentence)


def test_a_limit_that_nothing_binds_has_nothing_left_to_tell() -> None:
    results = BurstResults(Timeline(1_000.0))
    unlimited = Decision(True, None, None, None, None, 0, None, {}, None)
    results.add(0.0, unlimited)
    assert summary_sentence(results, 1) == "All 1 allowed."
