"""The store for threads, without a server: what a failure says about what was asked before it."""

import time
from concurrent.futures import Future
from typing import Any, cast

import pytest

from limitforge import StoreUnavailable, SyncLimiter
from limitforge.stores.redis.codec import Flow, ScriptCall
from limitforge.stores.redis.denial_cache import Invalidation
from limitforge.stores.redis.sync.connection import SyncConnection
from limitforge.stores.redis.sync.servers import _result_before
from limitforge.stores.redis.sync.store import SyncRedisStore, _run_on_connection
from limitforge.stores.resilience.failure import NotServerFault, StoreFull
from tests.unit.test_prepaid_shares import prepaid_harness

SECONDS = 30.0
CALL = ScriptCall(["k"], [], 1)


class FillsUp:
    """Answers so many calls, and is full then."""

    def __init__(self, answers: int) -> None:
        self.answers = answers

    def call(self, *_: Any, **__: Any) -> bytes:
        self.answers -= 1
        if self.answers < 0:
            raise StoreFull("no memory")
        return b"answer"

    def close(self) -> None: ...


def two_calls() -> Flow[None]:
    yield CALL
    yield CALL


@pytest.fixture
def store() -> SyncRedisStore:
    return cast("SyncRedisStore", SyncLimiter.connect("redis://127.0.0.1:1")._store)


@pytest.mark.parametrize(("answers", "maybe_counted"), [(0, False), (1, True)])
@pytest.mark.parametrize("shell", ["one server", "several"])
def test_after_a_second_call_what_the_first_asked_may_have_been_counted(
    store: SyncRedisStore, shell: str, answers: int, *, maybe_counted: bool
) -> None:
    flow, fills = two_calls(), FillsUp(answers)
    due = time.monotonic() + SECONDS
    store._pools = cast("Any", fills)

    def run() -> None:
        if shell == "one server":
            _run_on_connection(flow, next(flow), cast("SyncConnection", fills), due)
        else:
            store._resume_flow(flow, next(flow), due)

    with pytest.raises(StoreFull) as error:
        run()
    assert error.value.maybe_counted is maybe_counted


@pytest.mark.parametrize(("maybe_counted", "returned"), [(False, 200), (True, 0)])
def test_what_goes_back_is_sent_again_only_if_the_store_surely_did_not_hear_of_it(
    store: SyncRedisStore, monkeypatch: pytest.MonkeyPatch, *, maybe_counted: bool, returned: int
) -> None:
    desk = prepaid_harness()
    desk.shares.invalidate(
        Invalidation(subjects=(desk.take()[4] or "",))
    )  # another override: what was paid for goes back
    desk.wait()

    def carry(*_: Any) -> Any:
        raise StoreUnavailable("gone", maybe_counted=maybe_counted)

    monkeypatch.setattr(store, "_run_flow", carry)
    monkeypatch.setattr(store._hybrid, "top_up_flow", desk.shares)
    store._top_up(desk.shares.due_requests(), time.monotonic() + SECONDS)
    assert desk.share().to_return == returned


def test_a_thread_that_is_still_asking_may_be_counted_and_one_that_has_not_begun_is_not() -> None:
    asking: Future[Any] = Future()
    asking.set_running_or_notify_cancel()
    error = _result_before(asking, time.monotonic())
    assert isinstance(error, StoreUnavailable)
    assert error.maybe_counted
    assert isinstance(_result_before(Future(), time.monotonic()), NotServerFault)
