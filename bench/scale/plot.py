"""Draw the results of shards and prepaid limits as an SVG."""

from collections.abc import Mapping, Sequence

from bench.panels import Bar, Panel, render_panels
from bench.scale import hot_key_processes
from bench.scale.prepaid import FIXED
from bench.scale.report import split_by_kind
from bench.scale.run import Result
from bench.scale.run_size import ALONE, MANY, PROCESSES, SHARDS
from bench.scale.shards import GLOBAL, ONE, ONE_CROWDED, THREE, ShardsResult

TITLE = f"{SHARDS} shards beside one Redis, prepaid limits beside exact ones"


def render_svg(results: Sequence[Result], versions: Mapping[str, str]) -> str:
    return render_panels(TITLE, _panels(results), versions)


def _panels(results: Sequence[Result]) -> list[Panel]:
    over_shards, prepaid, hot_key = split_by_kind(results)
    panels = [
        Panel(
            f"Saturation of the busiest Redis: {plan}",
            "Checks per second that would use its whole core, from its CPU time per check; behind it, checks per call.",
            [
                Bar(
                    each.placement,
                    each.saturation_rate.median,
                    f"{each.saturation_rate.median:,.0f}, {each.checks_per_call:.1f} a call, {_exactness_note(each)}",
                    "ours" if each.placement != each.base else "peer",
                    wrong=not each.exactness.is_exact or each.failed > 0,
                )
                for each in over_shards
                if each.plan == plan
            ],
        )
        for plan in (ONE, ONE_CROWDED, THREE, GLOBAL)
    ]
    panels += [
        Panel(
            f"A decision about one hot key, {'one caller' if callers == ALONE else f'{callers} callers'}",
            "Median time of a decision in microseconds; a fixed window, one process.",
            [
                Bar(
                    each.consistency,
                    each.p50_us.median,
                    f"{each.p50_us.median:,.1f}, p99 {each.p99_us.median:,.1f}, {each.checks_per_second.median:,.0f}/s",
                    "peer" if each.consistency == "exact" else "ours",
                )
                for each in prepaid
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
            f"{'limit kept' if each.is_limit_kept else 'MORE than the limit'}",
            "peer" if each.contestant.startswith(hot_key_processes.EXACT) else "ours",
            wrong=not each.is_limit_kept,
        )
        for each in hot_key
    ]
    title = f"How busy one hot key keeps Redis, {PROCESSES} processes with {MANY} callers each"
    return [
        *panels,
        Panel(title, "CPU time of Redis divided by the elapsed time, and checks per second of all processes.", busy),
    ]


def _exactness_note(result: ShardsResult) -> str:
    if result.failed:
        return f"{result.failed} failed"
    return "exact" if result.exactness.is_exact else "NOT exact"
