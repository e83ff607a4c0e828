"""Measure a check in Redis: its statistics of each command (INFO commandstats), and the CPU time of its process.

The time of a script includes the commands it calls, which Redis also lists separately. So the meter observes one check
(MONITOR names the caller) and adds up only the client's own commands.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis import Redis

from bench import ours, peers
from bench.harness import OURS, Contestant, Exactness, Spread, Sweep, Workload, exactness, interleave, progress, settle
from bench.table import Target, at_most, table

ONE_US = 30.0
THREE_US = 40.0


@dataclass(frozen=True, slots=True)
class Result:
    workload: str
    contestant: str
    commands: dict[str, int]
    """The commands that the client sends for one check. Their sum is the number of round trips."""
    in_redis_us: Spread
    inside_us: Spread
    """The part of it in commands that a script called."""
    first_us: float
    """The same for the first check of a subject."""
    redis_cpu_us: Spread
    wall_us: Spread
    ratio: Spread
    admitted: int
    checks: int
    exactness: Exactness


class Traffic(NamedTuple):
    """The commands that a client sends for one check, and those that its scripts call."""

    sent: Counter[str]
    called: set[str]


class Sample(NamedTuple):
    in_redis_us: float
    inside_us: float
    redis_cpu_us: float
    wall_us: float
    admitted: int


class Meter:
    """Reads the statistics of Redis on a separate connection."""

    def __init__(self, url: str) -> None:
        self._redis: Any = Redis.from_url(url, decode_responses=True)
        self._monitor: Any = Redis.from_url(url, decode_responses=True)

    def flush(self) -> None:
        self._redis.flushall()

    def observe_commands(self, sweep: Sweep) -> Traffic:
        """Observe the first two checks of one subject: the first loads scripts and may call more commands."""
        _, called_first = self._watch_once(sweep)
        sent, called = self._watch_once(sweep)
        return Traffic(sent, called_first | called)

    def _watch_once(self, sweep: Sweep) -> tuple[Counter[str], set[str]]:
        sent: Counter[str] = Counter()
        called: set[str] = set()
        with self._monitor.monitor() as monitor:
            sweep(["watched"])
            self._redis.echo("done")
            while True:
                seen = monitor.next_command()
                name = seen["command"].split()[0].lower()
                if name == "echo":
                    return sent, called
                if seen["client_type"] == "lua":
                    called.add(name)
                else:
                    sent[name] += 1

    def sample(self, sweep: Sweep, subjects: Sequence[str], traffic: Traffic) -> Sample:
        checks = len(subjects)
        settle()
        self._redis.config_resetstat()
        cpu, wall = self._cpu_us(), time.perf_counter_ns()
        admitted = sweep(subjects)
        wall_us = (time.perf_counter_ns() - wall) / 1_000
        cpu_us = self._cpu_us() - cpu
        outside = inside = 0.0
        for command, (calls, micros) in self._commands().items():
            own = 1.0
            if command in traffic.called:
                own = min(traffic.sent[command] * checks / calls, 1.0)
            outside += own * micros
            inside += (1 - own) * micros
        return Sample(outside / checks, inside / checks, cpu_us / checks, wall_us / checks, admitted)

    def _commands(self) -> dict[str, tuple[int, int]]:
        stats = self._redis.info("commandstats")
        commands = {name.removeprefix("cmdstat_"): (found["calls"], found["usec"]) for name, found in stats.items()}
        return {name: found for name, found in commands.items() if name not in ("info", "config|resetstat")}

    def _cpu_us(self) -> float:
        cpu = self._redis.info("cpu")
        return float(1e6 * (cpu["used_cpu_user"] + cpu["used_cpu_sys"]))


def workloads(url: str) -> list[Workload]:
    rivals: dict[str, tuple[Contestant, ...]] = {
        "token bucket": (peers.throttled_contestant("token_bucket", url), peers.limits_contestant(peers.FIXED, url)),
        "leaky bucket": (peers.throttled_contestant("leaking_bucket", url),),
        "fixed window": (
            peers.throttled_contestant("fixed_window", url),
            peers.limits_contestant(peers.FIXED, url),
            peers.limits_contestant(peers.FIXED, url, stats=False),
        ),
        "sliding window counter": (
            peers.throttled_contestant("sliding_window", url),
            peers.limits_contestant(peers.COUNTER, url),
        ),
        "sliding window log": (peers.limits_contestant(peers.LOG, url),),
        "three limits": (peers.throttled_of_three(url), peers.limits_of_three(url)),
    }
    return [
        Workload(plan, (ours.contestant(plan, url), ours.batch_contestant(plan, url), *rivals.get(plan, ())))
        for plan in ours.PLANS
    ]


def run(url: str, *, quick: bool) -> tuple[list[Result], list[Target]]:
    subjects = [f"user:{number}" for number in range(320 if quick else 10_000)]
    rounds = 2 if quick else 4
    meter = Meter(url)
    results = []
    for workload in workloads(url):
        progress(f"redis: {workload.name}, {len(workload.contestants)} contestants")
        results += _measure(workload, meter, subjects, rounds)
        meter.flush()
    return results, _targets(results)


def render(results: Sequence[Result]) -> str:
    rows: list[tuple[str, ...]] = []
    for at, result in enumerate(results):
        if at and result.workload != results[at - 1].workload:
            rows.append(())
        rows.append(
            (
                f"{result.workload}: {result.contestant}",
                result.in_redis_us.text(1),
                f"{result.inside_us.median:.1f}",
                f"{result.first_us:.1f}",
                result.redis_cpu_us.text(0),
                result.wall_us.text(0),
                result.ratio.text(),
                _format_commands(result.commands),
                result.exactness.text(),
            )
        )
    header = ("one check on Redis", "in Redis us", "inside", "first", "CPU us", "wall us", "x limitforge", "sends")
    return table(
        "Redis: its account of one check's commands, and what of it was inside of a script; the CPU of its process",
        (*header, "5 of 8"),
        rows,
    )


def _measure(workload: Workload, meter: Meter, subjects: list[str], rounds: int) -> list[Result]:
    exact = {each: exactness(each, subjects[:50]) for each in workload.contestants}
    meter.flush()
    sweeps = {each: each.make(workload.size) for each in workload.contestants}
    samples: dict[Contestant, list[Sample]] = {each: [] for each in workload.contestants}
    traffic = {each: meter.observe_commands(sweep) for each, sweep in sweeps.items()}
    firsts = {
        each: meter.sample(sweep, _subjects_for(each, subjects), traffic[each]).in_redis_us
        for each, sweep in sweeps.items()
    }
    for number, each in interleave(workload.contestants, rounds):
        mine = _subjects_for(each, subjects)
        part = len(mine) // 2  # each subject is checked every other round
        start = number % 2 * part
        samples[each].append(meter.sample(sweeps[each], mine[start : start + part], traffic[each]))
    base = [sample.in_redis_us for sample in samples[workload.contestants[0]]]
    return [
        _result(workload, each, dict(traffic[each].sent), firsts[each], samples[each], base, exact[each], subjects)
        for each in workload.contestants
    ]


def _subjects_for(contestant: Contestant, subjects: list[str]) -> list[str]:
    """Return a quarter of the subjects for a peer, whose round trips would otherwise dominate the run."""
    return subjects if contestant.is_limitforge else subjects[: len(subjects) // 4]


def _result(
    workload: Workload,
    contestant: Contestant,
    commands: dict[str, int],
    first_us: float,
    samples: Sequence[Sample],
    base: Sequence[float],
    exact: Exactness,
    subjects: list[str],
) -> Result:
    return Result(
        workload.name,
        contestant.name,
        commands,
        Spread.of([sample.in_redis_us for sample in samples]),
        Spread.of([sample.inside_us for sample in samples]),
        first_us,
        Spread.of([sample.redis_cpu_us for sample in samples]),
        Spread.of([sample.wall_us for sample in samples]),
        Spread.of_ratios([sample.in_redis_us for sample in samples], base),
        sum(sample.admitted for sample in samples),
        len(samples) * (len(_subjects_for(contestant, subjects)) // 2),
        exact,
    )


def _targets(results: Sequence[Result]) -> list[Target]:
    found = []
    for result in results:
        if result.contestant == OURS:
            if result.workload != "two limits":
                bound = THREE_US if result.workload == "three limits" else ONE_US
                found.append(at_most(f"redis, {result.workload}", bound, result.in_redis_us.median, "us"))
            sent = _format_commands(result.commands)
            found.append(Target(f"redis, {result.workload}, calls", "1 evalsha", sent, sent == "1 evalsha"))
    return found


def _format_commands(commands: dict[str, int]) -> str:
    return " + ".join(f"{count} {name}" for name, count in commands.items())
