"""The store for threads, without a server: what a failure means for the calls before it."""

import time
from concurrent.futures import Future
from typing import Any, cast

import pytest

from limitforge import StoreUnavailable, SyncLimiter
from limitforge.stores.errors import NotServerFault, StoreFull
from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.script_call import Flow, ScriptCall
from limitforge.stores.redis.sync.connection import SyncConnection
from limitforge.stores.redis.sync.flows import FlowRunner, run_on_connection
from limitforge.stores.redis.sync.servers import _result_before
from limitforge.stores.redis.sync.store import SyncRedisStore
from tests.unit.test_prepaid_shares import prepaid_harness

SECONDS = 30.0
CALL = ScriptCall(["k"], [], 1)


class FillsUp:
    """Answers a number of calls, and then fails because it is full."""

    def __init__(self, answers: int) -> None:
        self.answers = answers

    def call(self, *_: Any, **__: Any) -> bytes:
        self.answers -= 1
        if self.answers < 0:
            raise StoreFull("no memory")
        return b"answer"

    call_routed = call

    def close(self) -> None: ...


def two_calls() -> Flow[None]:
    yield CALL
    yield CALL


@pytest.fixture
def store() -> SyncRedisStore:
    return cast("SyncRedisStore", SyncLimiter.connect("redis://127.0.0.1:1")._store)


@pytest.mark.parametrize(("answers", "maybe_counted"), [(0, False), (1, True)])
@pytest.mark.parametrize("servers", ["one server", "several"])
def test_a_failed_second_call_means_that_the_first_may_have_been_counted(
    store: SyncRedisStore, servers: str, answers: int, *, maybe_counted: bool
) -> None:
    flow, fills = two_calls(), FillsUp(answers)
    deadline = time.monotonic() + SECONDS
    flows = FlowRunner(store._core, cast("Any", fills))

    def run() -> None:
        if servers == "one server":
            run_on_connection(flow, next(flow), cast("SyncConnection", fills), deadline)
        else:
            flows._resume(flow, next(flow), deadline)

    with pytest.raises(StoreFull) as error:
        run()
    assert error.value.maybe_counted is maybe_counted


@pytest.mark.parametrize(("maybe_counted", "returned"), [(False, 200), (True, 0)])
def test_a_return_is_sent_again_only_if_it_certainly_did_not_arrive(
    store: SyncRedisStore, monkeypatch: pytest.MonkeyPatch, *, maybe_counted: bool, returned: int
) -> None:
    harness = prepaid_harness()
    # An override has changed, so the balance goes back.
    harness.shares.invalidate(Invalidation(override_keys=(harness.take()[4] or "",)))
    harness.wait()

    def fail(*_: Any) -> Any:
        raise StoreUnavailable("gone", maybe_counted=maybe_counted)

    monkeypatch.setattr(store, "_run_flow", fail)
    monkeypatch.setattr(store._hybrid, "shares", harness.shares)
    store._top_up(harness.shares.due_requests(), time.monotonic() + SECONDS)
    assert harness.share().to_return == returned


def test_a_running_thread_may_be_counted_and_one_that_has_not_begun_is_not() -> None:
    running: Future[Any] = Future()
    running.set_running_or_notify_cancel()
    error = _result_before(running, time.monotonic())
    assert isinstance(error, StoreUnavailable)
    assert error.maybe_counted
    assert isinstance(_result_before(Future(), time.monotonic()), NotServerFault)
