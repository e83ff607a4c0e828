"""One pipeline without a server: what its answers and deadlines mean for those who wait."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from limitforge import Decision, FixedWindow, Limits, StoreCorrupt, StoreOptions, StoreUnavailable
from limitforge.core.check import Check, check_of
from limitforge.core.keys import Keys
from limitforge.core.plan import BUCKET_US
from limitforge.stores.codec import Call
from limitforge.stores.pipeline import Asked, Flight, Pipeline, Volley
from limitforge.stores.redis_parts import Parts
from limitforge.stores.resilience import StoreFull

DEADLINE_MS = 30_000.0
OWING = FixedWindow(name="owing", limit=100, window_seconds=86_400, charge_after_outage=True)


class Router:
    """Has no other server."""

    def redirect(self, *_: Any) -> None: ...

    def doubt(self) -> None: ...


class Bench:
    """A pipeline of a server without a connection, and its answers."""

    def __init__(self, **options: Any) -> None:
        self.parts = Parts("redis://127.0.0.1:1", Keys(), None, StoreOptions(**options), lambda _: None)
        node = self.parts.fleet.nobody
        self.resilience = node.resilience
        self.pipeline = Pipeline(node, self.parts, Router(), deadline_ms=DEADLINE_MS, max_waiting=9, is_sharded=False)
        self.answers: list[Any] = []

    def asked(self, due: float, subject: str = "s") -> Asked:
        check = check_of(Keys(), Limits(OWING), "r", subject, 1, None, "t", "P0")
        return Asked(check, self.answers.append, due)

    def flight(self, *batch: Asked, calls: int = 1) -> Flight:
        """These are on their way."""
        checks: Sequence[Check] = [asked.check for asked in batch if isinstance(asked.check, Check)]
        volley = Volley(1, holds=False)
        flight = Flight(list(batch), self.parts.judge(checks), self.resilience.now_us(), volley, calls=calls)
        self.pipeline._flights.append(flight)
        self.pipeline._volleys.append(volley)
        return flight

    def owed(self) -> int:
        return sum(take[2] for charge in self.resilience.retire() for take in charge.takes)


@pytest.mark.parametrize(("calls", "owed"), [(1, 1), (2, 0)])
async def test_after_a_second_call_any_check_of_a_batch_may_have_been_counted(calls: int, owed: int) -> None:
    """A batch is asked once more for a quota in it; the others were judged by the first call."""
    bench = Bench(failure="local")
    flight = bench.flight(bench.asked(asyncio.get_running_loop().time() + 60), calls=calls)
    bench.pipeline._replied(flight, StoreFull("no memory"))
    assert [decision.degraded for decision in bench.answers] == ["local"]
    assert bench.owed() == owed


async def test_each_check_of_a_call_is_answered_by_its_own_deadline() -> None:
    bench = Bench(failure="open")
    now = asyncio.get_running_loop().time()
    bench.flight(bench.asked(now + 60), bench.asked(now))
    bench.pipeline._expire_flights(now)
    assert [type(answer) for answer in bench.answers] == [Decision]
    assert bench.resilience.degraded["open"] == 1
    assert bench.owed() == 0  # it was sent, and may have been counted


@pytest.mark.parametrize(("calls", "owed"), [(0, 1), (1, 0)])
async def test_a_batch_that_finds_no_connection_may_have_been_counted_if_it_was_sent_before(
    calls: int, owed: int
) -> None:
    bench = Bench(failure="open")
    flight = bench.flight(bench.asked(asyncio.get_running_loop().time() + 60), calls=calls)
    bench.pipeline._advance(flight, lambda: Call(["k"], [], 1))
    assert [decision.degraded for decision in bench.answers] == ["open"]
    assert bench.owed() == owed


@pytest.mark.parametrize(("answered", "state"), [(False, "open"), (True, "closed")])
async def test_a_queue_that_was_too_long_is_no_failure_of_a_server_that_answered(*, answered: bool, state: str) -> None:
    bench = Bench(failure="raise", breaker_failures=1)
    now = asyncio.get_running_loop().time()
    if answered:
        bench.pipeline._replied(bench.flight(bench.asked(now)), StoreCorrupt("not ours"))
    bench.pipeline.submit(bench.asked(now))
    bench.pipeline._expire_waiting(now)
    assert [type(answer) for answer in bench.answers] == [StoreCorrupt] * answered + [StoreUnavailable]
    assert bench.resilience.state == state


@pytest.mark.parametrize(
    ("leave", "owed"),
    [
        (Pipeline.hand_over, 0),
        (Pipeline.close, 3),
        (lambda pipeline: pipeline._expire_waiting(pipeline.loop.time()), 3),
    ],
    ids=["handed over", "closed", "expired"],
)
async def test_checks_that_leave_the_queue_take_their_weight_with_them(
    leave: Callable[[Pipeline], object], owed: int
) -> None:
    """The weight decides how much travels together. Those that are decided here were never sent."""
    bench = Bench(failure="open")
    for subject in "abc":
        bench.pipeline.submit(bench.asked(asyncio.get_running_loop().time(), subject))
    assert bench.pipeline._weight_us == 3 * BUCKET_US
    leave(bench.pipeline)
    assert (bench.pipeline.waiting, bench.pipeline._weight_us) == (0, 0)
    assert bench.owed() == owed
