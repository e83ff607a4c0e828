"""Measure a check in this process: many subjects, one thread, peers in the same rounds."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench import ours, peers
from bench.harness import OURS, Contestant, Exactness, Spread, Sweep, Workload, exactness, interleave, progress, settle
from bench.table import Target, at_most, faster_than, table

URL = "memory://"
ONE_US = 4.0
THREE_US = 9.0


@dataclass(frozen=True, slots=True)
class Result:
    workload: str
    contestant: str
    full_decision: bool
    cpu_us: Spread
    wall_us: Spread
    ratio: Spread
    """CPU time relative to limitforge, round by round."""
    admitted: int
    checks: int
    exactness: Exactness


def workloads() -> list[Workload]:
    cheapest_with_stats = peers.limits_contestant(peers.FIXED, URL)
    plain = [
        Workload(
            "token bucket",
            (
                *_ours("token bucket"),
                ours.text_contestant(URL),
                peers.throttled_contestant("token_bucket", URL),
                cheapest_with_stats,
                peers.limits_contestant(peers.FIXED, URL, stats=False),
            ),
        ),
        Workload("leaky bucket", (*_ours("leaky bucket"), peers.throttled_contestant("leaking_bucket", URL))),
        Workload(
            "fixed window",
            (*_ours("fixed window"), peers.throttled_contestant("fixed_window", URL), cheapest_with_stats),
        ),
        Workload(
            "sliding window counter",
            (
                *_ours("sliding window counter"),
                peers.throttled_contestant("sliding_window", URL),
                peers.limits_contestant(peers.COUNTER, URL),
                peers.limits_contestant(peers.COUNTER, URL, stats=False),
            ),
        ),
        Workload(
            "sliding window log",
            (
                *_ours("sliding window log"),
                peers.limits_contestant(peers.LOG, URL),
                peers.limits_contestant(peers.LOG, URL, stats=False),
            ),
        ),
        Workload("quota", _ours("quota")),
        Workload("concurrency", _ours("concurrency")),
        Workload("three limits", (*_ours("three limits"), peers.throttled_of_three(URL), peers.limits_of_three(URL))),
    ]
    denied = Workload(
        "token bucket, denied",
        (*_ours("token bucket"), peers.throttled_contestant("token_bucket", URL), cheapest_with_stats),
        size=1,
    )
    return [*plain, denied]


def run(*, quick: bool) -> tuple[list[Result], list[Target]]:
    subjects = [f"user:{number}" for number in range(1_000 if quick else 10_000)]
    rounds = 3 if quick else 7
    results = [result for workload in workloads() for result in _measure(workload, subjects, rounds)]
    return results, _targets(results)


def render(results: Sequence[Result]) -> str:
    rows: list[tuple[str, ...]] = []
    for at, result in enumerate(results):
        if at and result.workload != results[at - 1].workload:
            rows.append(())
        rows.append(
            (
                f"{result.workload}: {result.contestant}",
                result.cpu_us.text(),
                result.wall_us.text(),
                result.ratio.text(),
                f"{result.admitted}/{result.checks}",
                result.exactness.text(),
            )
        )
    header = ("one check in memory", "CPU us", "wall us", "x limitforge", "admitted", "5 of 8, 4 threads")
    return table(
        "Memory: median (lowest-highest) of the rounds; a ratio above 1 is slower than limitforge", header, rows
    )


def _ours(plan: str) -> tuple[Contestant, ...]:
    return ours.contestant(plan, URL), ours.async_contestant(plan, URL)


def _measure(workload: Workload, subjects: list[str], rounds: int) -> list[Result]:
    progress(
        f"memory: {workload.name}, {len(workload.contestants)} contestants, {rounds} rounds of {len(subjects)} checks"
    )
    shuffled = random.Random(1).sample(subjects, len(subjects))
    sweeps: dict[Contestant, Sweep] = {each: each.make(workload.size) for each in workload.contestants}
    for sweep in sweeps.values():
        sweep(subjects)  # every subject is known before the measurement
    cpu: dict[Contestant, list[float]] = {each: [] for each in workload.contestants}
    wall: dict[Contestant, list[float]] = {each: [] for each in workload.contestants}
    admitted = dict.fromkeys(workload.contestants, 0)
    for _, each in interleave(workload.contestants, rounds):
        settle()
        cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
        admitted[each] += sweeps[each](shuffled)
        wall[each].append((time.perf_counter_ns() - wall_ns) / 1_000 / len(subjects))
        cpu[each].append((time.process_time_ns() - cpu_ns) / 1_000 / len(subjects))
    base = cpu[workload.contestants[0]]
    return [
        Result(
            workload.name,
            each.name,
            each.full_decision,
            Spread.of(cpu[each]),
            Spread.of(wall[each]),
            Spread.of_ratios(cpu[each], base),
            admitted[each],
            rounds * len(subjects),
            exactness(each, subjects[:300]),
        )
        for each in workload.contestants
    ]


def _targets(results: Sequence[Result]) -> list[Target]:
    found = []
    for workload, bound in (("token bucket", ONE_US), ("three limits", THREE_US)):
        of_shape = [result for result in results if result.workload == workload]
        found.append(at_most(f"memory, {workload}, CPU", bound, of_shape[0].cpu_us.median, "us"))
        found += [
            faster_than(f"memory, {workload}, against {result.contestant}", result.ratio.median)
            for result in of_shape
            if result.full_decision and not result.contestant.startswith(OURS)
        ]
    return found
