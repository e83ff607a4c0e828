"""One pipeline without a server: what replies and deadlines mean for pending checks."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from limitforge import Decision, FixedWindow, Limits, StoreCorrupt, StoreOptions, StoreUnavailable
from limitforge.core.check import Check, build_check
from limitforge.core.keys import Keys
from limitforge.core.plan import BUCKET_US
from limitforge.stores.errors import StoreFull
from limitforge.stores.redis.aio.pending import InFlightCall, PendingCheck, Write
from limitforge.stores.redis.aio.pipeline import Pipeline
from limitforge.stores.redis.core import RedisCore
from limitforge.stores.redis.script_call import ScriptCall

DEADLINE_MS = 30_000.0
OWING = FixedWindow(name="owing", limit=100, window_seconds=86_400, charge_after_outage=True)


class Router:
    """A router without other servers."""

    def redirect(self, *_: Any) -> None: ...

    def refresh_topology(self) -> None: ...


class PipelineHarness:
    """A pipeline without a connection, and the results of its checks."""

    def __init__(self, **options: Any) -> None:
        self.core = RedisCore("redis://127.0.0.1:1", Keys(), None, StoreOptions(**options), lambda _: None)
        server = self.core.topology.only_server
        assert server is not None
        self.resilience = server.resilience
        self.pipeline = Pipeline(server, self.core, Router(), deadline_ms=DEADLINE_MS, max_waiting=9, is_sharded=False)
        self.answers: list[Any] = []

    def pending(self, due: float, subject: str = "s") -> PendingCheck:
        check = build_check(Keys(), Limits(OWING), "r", subject, 1, None, "t", "P0")
        return PendingCheck(check, self.answers.append, due)

    def in_flight(self, *batch: PendingCheck, calls: int = 1) -> InFlightCall:
        """Put checks in flight."""
        checks: Sequence[Check] = [pending.check for pending in batch if isinstance(pending.check, Check)]
        volley = Write(1, is_group_split=False)
        flight = InFlightCall(
            list(batch), self.core.checks_flow(checks), self.resilience.now_us(), volley, calls_sent=calls
        )
        self.pipeline._in_flight.append(flight)
        self.pipeline._writes.append(volley)
        return flight

    def pending_charges(self) -> int:
        return sum(take[2] for charge in self.resilience.take_charges() for take in charge.debits)


@pytest.mark.parametrize(("calls", "owed"), [(1, 1), (2, 0)])
async def test_after_a_second_call_any_check_of_a_batch_may_have_been_counted(calls: int, owed: int) -> None:
    """A quota needs a second call for the batch. The first call has decided the other checks."""
    harness = PipelineHarness(failure="local")
    flight = harness.in_flight(harness.pending(asyncio.get_running_loop().time() + 60), calls=calls)
    harness.pipeline._on_call_reply(flight, StoreFull("no memory"))
    assert [decision.degraded for decision in harness.answers] == ["local"]
    assert harness.pending_charges() == owed


async def test_each_check_of_a_call_is_answered_by_its_own_deadline() -> None:
    harness = PipelineHarness(failure="open")
    now = asyncio.get_running_loop().time()
    harness.in_flight(harness.pending(now + 60), harness.pending(now))
    harness.pipeline._expire_calls(now)
    assert [type(answer) for answer in harness.answers] == [Decision]
    assert harness.resilience.degraded["open"] == 1
    assert harness.pending_charges() == 0  # the check was sent, and may have been counted


@pytest.mark.parametrize(("calls", "owed"), [(0, 1), (1, 0)])
async def test_a_batch_that_finds_no_connection_may_have_been_counted_if_it_was_sent_before(
    calls: int, owed: int
) -> None:
    harness = PipelineHarness(failure="open")
    flight = harness.in_flight(harness.pending(asyncio.get_running_loop().time() + 60), calls=calls)
    harness.pipeline._advance(flight, lambda: ScriptCall(["k"], [], 1))
    assert [decision.degraded for decision in harness.answers] == ["open"]
    assert harness.pending_charges() == owed


@pytest.mark.parametrize(("answered", "state"), [(False, "open"), (True, "closed")])
async def test_a_queue_that_was_too_long_is_no_failure_of_a_server_that_answered(*, answered: bool, state: str) -> None:
    harness = PipelineHarness(failure="raise", breaker_failures=1)
    now = asyncio.get_running_loop().time()
    if answered:
        harness.pipeline._on_call_reply(harness.in_flight(harness.pending(now)), StoreCorrupt("not ours"))
    harness.pipeline.enqueue(harness.pending(now))
    harness.pipeline._expire_queue(now)
    assert [type(answer) for answer in harness.answers] == [StoreCorrupt] * answered + [StoreUnavailable]
    assert harness.resilience.state == state


@pytest.mark.parametrize(
    ("leave", "owed"),
    [
        (Pipeline.take_queue, 0),
        (Pipeline.close, 3),
        (lambda pipeline: pipeline._expire_queue(pipeline.loop.time()), 3),
    ],
    ids=["handed over", "closed", "expired"],
)
async def test_checks_that_leave_the_queue_take_their_weight_with_them(
    leave: Callable[[Pipeline], object], owed: int
) -> None:
    """The weight decides how many checks share a call. The checks of this test were never sent."""
    harness = PipelineHarness(failure="open")
    for subject in "abc":
        harness.pipeline.enqueue(harness.pending(asyncio.get_running_loop().time(), subject))
    assert harness.pipeline._queued_us == 3 * BUCKET_US
    leave(harness.pipeline)
    assert (harness.pipeline.pending_count, harness.pipeline._queued_us) == (0, 0)
    assert harness.pending_charges() == owed
