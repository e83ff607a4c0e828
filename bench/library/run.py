"""The shapes, and the rounds in which contestants take turns."""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvloop

from bench.contest import OURS, Spread, progress
from bench.library import floor, limits_peer, ours, pyrate_peer, throttled_peer
from bench.library.contest import Contestant, Door, Shape, sizes_of
from bench.library.drive import Meter, Sample, drive
from bench.library.exact import Exactness, exactness

MANY, ALONE = 64, 1

ONE, TWO, THREE = "many keys, one limit", "many keys, two limits", "many keys, three limits"
HOT, DENIED, CACHED = "one hot key", "mostly denied", "denials from the cache"


@dataclass(frozen=True, slots=True)
class Result:
    shape: str
    limits: int
    callers: int
    contestant: str
    full: bool
    checks_per_second: Spread
    p50_us: Spread
    p99_us: Spread
    cpu_us: Spread
    redis_cpu_us: Spread
    script_us: Spread
    calls: float
    """Scripts that Redis ran for one check: below 1 when checks share a call."""
    admitted: float
    """The share of the measured checks."""
    slower: Spread
    """What a check takes against that of the first contestant in the same round."""
    exactness: Exactness


@dataclass(frozen=True, slots=True)
class Pace:
    subjects: int
    rounds: int
    seconds: float
    """How long a contestant is measured in a round."""
    exact_size: int


FULL = Pace(subjects=10_000, rounds=5, seconds=0.4, exact_size=1_000)
QUICK = Pace(subjects=200, rounds=2, seconds=0.02, exact_size=50)


def shapes(pace: Pace) -> list[Shape]:
    everyone = (
        ours.contestant(),
        limits_peer.contestant(limits_peer.COUNTER),
        limits_peer.contestant(limits_peer.FIXED),
        throttled_peer.contestant(),
        pyrate_peer.token_bucket(),
        pyrate_peer.log(),
        floor.contestant(),
    )
    cached = (ours.contestant(denial_cache_ms=1_000), ours.contestant(f"{OURS}, cache off"))
    return [
        Shape(ONE, everyone, 1, pace.subjects),
        Shape(TWO, everyone, 2, pace.subjects),
        Shape(THREE, everyone, 3, pace.subjects),
        Shape(HOT, everyone, 1, 1),
        Shape(DENIED, everyone, 1, 100, size=5),
        Shape(CACHED, cached, 1, 100, size=5),
    ]


def run(url: str, *, quick: bool) -> list[Result]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(url, QUICK if quick else FULL))


async def _run(url: str, pace: Pace) -> list[Result]:
    meter = Meter(url)
    exact: dict[tuple[Contestant, int], Exactness] = {}
    results = []
    for shape in shapes(pace):
        progress(f"library: {shape.name}, {len(shape.contestants)} contestants")
        for each in shape.contestants:
            if (each, shape.limits) not in exact:
                exact[each, shape.limits] = await exactness(each, url, shape.limits, pace.exact_size, MANY)
        meter.flush()
        results += await _measured(shape, url, meter, pace, exact)
        meter.flush()
    meter.close()
    return results


async def _measured(
    shape: Shape, url: str, meter: Meter, pace: Pace, exact: dict[tuple[Contestant, int], Exactness]
) -> list[Result]:
    subjects = [f"user:{number}" for number in range(shape.subjects)]
    shuffled = random.Random(1).sample(subjects, len(subjects))
    doors: dict[Contestant, Door] = {}
    for each in shape.contestants:
        doors[each] = await each.open(url, sizes_of(shape.limits, shape.size))
        await _warm(doors[each], subjects, shape.size)
    results = []
    for callers in (MANY, ALONE):
        streams = {each: itertools.cycle(shuffled) for each in shape.contestants}
        samples: dict[Contestant, list[Sample]] = {each: [] for each in shape.contestants}
        for each in _turns(shape.contestants, pace.rounds):
            samples[each].append(await meter.sample(doors[each].ask, streams[each], callers, pace.seconds))
        base = samples[shape.contestants[0]]
        results += [
            _result(shape, callers, each, samples[each], base, exact[each, shape.limits]) for each in shape.contestants
        ]
    for door in doors.values():
        await door.close()
    return results


async def _warm(door: Door, subjects: Sequence[str], size: int) -> None:
    """Before anything is measured every subject is known, every connection open, and what will be denied is spent."""
    asks = len(subjects) * (size if size < 10 else 1)
    await drive(door.ask, itertools.islice(itertools.cycle(subjects), max(asks, 4 * MANY)), MANY)


def _turns(contestants: Sequence[Contestant], rounds: int) -> Iterator[Contestant]:
    """Every contestant once a round, each round starting with another one."""
    for number in range(rounds):
        for at in range(len(contestants)):
            yield contestants[(at + number) % len(contestants)]


def _result(
    shape: Shape, callers: int, each: Contestant, samples: list[Sample], base: list[Sample], exact: Exactness
) -> Result:
    return Result(
        shape.name,
        shape.limits,
        callers,
        each.name,
        each.full,
        Spread.of([sample.checks_per_second for sample in samples]),
        Spread.of([sample.p50_us for sample in samples]),
        Spread.of([sample.p99_us for sample in samples]),
        Spread.of([sample.cpu_us for sample in samples]),
        Spread.of([sample.redis_cpu_us for sample in samples]),
        Spread.of([sample.script_us for sample in samples]),
        Spread.of([sample.calls for sample in samples]).median,
        Spread.of([sample.admitted for sample in samples]).median,
        Spread.of_ratios([s.checks_per_second for s in base], [s.checks_per_second for s in samples]),
        exact,
    )
