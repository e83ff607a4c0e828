"""The store for threads, without a server: what a failure says about what was asked before it."""

import time
from concurrent.futures import Future
from typing import Any, cast

import pytest

from limitforge import StoreUnavailable, SyncLimiter
from limitforge.stores.codec import Call, Flow
from limitforge.stores.denials import Drop
from limitforge.stores.redis_sync import SyncRedisStore, _walk
from limitforge.stores.resilience import NotAsked, StoreFull
from limitforge.stores.servers_sync import _in_time
from limitforge.stores.wire_sync import SyncWire
from tests.unit.test_shares import leased

SECONDS = 30.0
CALL = Call(["k"], [], 1)


class Fills:
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
    flow, fills = two_calls(), Fills(answers)
    due = time.monotonic() + SECONDS
    store._servers = cast("Any", fills)

    def run() -> None:
        if shell == "one server":
            _walk(flow, next(flow), cast("SyncWire", fills), due)
        else:
            store._go_on(flow, next(flow), due)

    with pytest.raises(StoreFull) as error:
        run()
    assert error.value.maybe_counted is maybe_counted


@pytest.mark.parametrize(("maybe_counted", "returned"), [(False, 200), (True, 0)])
def test_what_goes_back_is_sent_again_only_if_the_store_surely_did_not_hear_of_it(
    store: SyncRedisStore, monkeypatch: pytest.MonkeyPatch, *, maybe_counted: bool, returned: int
) -> None:
    desk = leased()
    desk.shares.drop(Drop(subjects=(desk.take()[4] or "",)))  # another override: what was paid for goes back
    desk.wait()

    def carry(*_: Any) -> Any:
        raise StoreUnavailable("gone", maybe_counted=maybe_counted)

    monkeypatch.setattr(store, "_carry", carry)
    monkeypatch.setattr(store._blender, "shares", desk.shares)
    store._sync(desk.shares.wishes(), time.monotonic() + SECONDS)
    assert desk.share().returning == returned


def test_a_thread_that_is_still_asking_may_be_counted_and_one_that_has_not_begun_is_not() -> None:
    asking: Future[Any] = Future()
    asking.set_running_or_notify_cancel()
    error = _in_time(asking, time.monotonic())
    assert isinstance(error, StoreUnavailable)
    assert error.maybe_counted
    assert isinstance(_in_time(Future(), time.monotonic()), NotAsked)
