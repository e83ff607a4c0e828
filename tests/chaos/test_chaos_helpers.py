"""The helpers of the chaos tests inject real faults, and detect broken guarantees."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from limitforge import Decision, Limiter, StoreOptions, SyncLimiter
from tests.chaos import guarantees
from tests.chaos.callers import TaskCallers, ThreadCallers, by_check, by_submit
from tests.chaos.faults import SERVER_FAULTS, Fault
from tests.chaos.load import APIS, Load, start_load
from tests.chaos.load_record import BUCKET, TIGHT, WIDE, CheckRecord, LoadRecord
from tests.proxy import Proxy
from tests.servers import RedisServer

pytestmark = pytest.mark.slow  # tests of test helpers are not needed while you work
only_in_soak = pytest.mark.soak  # the helpers rarely change; run this file with `-m ""` when they do

OPTIONS = StoreOptions(deadline_ms=100, processes=4)
WRITE = "EVAL \"return redis.call('SET', 'key', 'value')\" 0"
SAID = {
    "loading": b"-LOADING",
    "full": b"-OOM",
    "read-only": b"-READONLY",
    "master-down": b"-MASTERDOWN",
    "busy": b"-BUSY",
    "locked": b"-NOAUTH",
}


@only_in_soak
@pytest.mark.parametrize(
    "fault", [fault for fault in SERVER_FAULTS if fault.name in SAID], ids=lambda fault: fault.name
)
def test_a_fault_has_its_effect_and_is_repaired_at_its_end(own_redis_server: RedisServer, fault: Fault) -> None:
    def reply() -> bytes:
        stranger = RedisServer()
        stranger.port = own_redis_server.port
        return stranger.command(WRITE)

    said = b""
    with Proxy(own_redis_server.port) as proxy, fault.injected(own_redis_server, proxy):
        for _ in range(500):  # its effect may take a moment
            try:
                said = reply()
            except OSError:
                said = b""
            if said.startswith(SAID[fault.name]):
                break
            time.sleep(0.01)
        assert said.startswith(SAID[fault.name])
    assert reply().startswith(b"+OK")


@only_in_soak
def test_paused_clients_wait_and_killed_ones_are_gone(own_redis_server: RedisServer) -> None:
    named = {fault.name: fault for fault in SERVER_FAULTS}
    with Proxy(own_redis_server.port) as proxy, own_redis_server.connection() as client:
        client.settimeout(0.1)
        with named["clients-paused"].injected(own_redis_server, proxy):
            client.sendall(f"{WRITE}\r\n".encode())
            with pytest.raises(TimeoutError):
                client.recv(64)
        client.settimeout(10)
        assert client.recv(64) == b"+OK\r\n"
        with named["clients-killed"].injected(own_redis_server, proxy):
            assert client.recv(64) == b""


@only_in_soak
@pytest.mark.parametrize("api", APIS)
def test_a_load_on_a_healthy_store_keeps_every_guarantee(api: str) -> None:
    with start_load(api, "memory://", OPTIONS) as load:
        load.wait_for_answers(1_000, degraded=False)
        load.stop()
        guarantees.assert_counts_match_admissions(load)
    guarantees.assert_no_caller_hung(load.record, OPTIONS)
    guarantees.assert_answers_are_valid(load.record, OPTIONS)
    guarantees.assert_limits_held(load.record, OPTIONS)
    assert load.record.kinds == {None: len(load.record.checks)}


def bad(act: Callable[[], Decision]) -> Load:
    """A load on a limiter that does something else instead of each check."""

    class Bad(SyncLimiter):
        def check(self, *args: Any, **kwargs: Any) -> Decision:
            return act()

    return Load(ThreadCallers(Bad.connect("memory://"), callers=4))


def decision(**fields: Any) -> Decision:
    empty: dict[str, Any] = dict.fromkeys(Decision.__struct_fields__) | {"limits": {}, "would_deny": ()}
    return Decision(**{**empty, **fields})


def run(load: Load) -> LoadRecord:
    with load:
        time.sleep(0.1)
    return load.record


@only_in_soak
def test_a_hung_caller_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.callers.PATIENCE_SECONDS", 0.2)

    def hang() -> Decision:
        time.sleep(1)
        return decision(allowed=True)

    record = run(bad(hang))
    assert record.hung == 4
    with pytest.raises(AssertionError):
        guarantees.assert_no_caller_hung(record, OPTIONS)


def test_a_slow_answer_is_seen() -> None:
    record = LoadRecord([CheckRecord(WIDE, 0, 100.0)])
    with pytest.raises(AssertionError):
        guarantees.assert_no_caller_hung(record, OPTIONS)


@only_in_soak
def test_a_blocked_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarantees, "BLOCKED_SECONDS", 0.5)

    class Blocking(Limiter):
        async def check(self, *args: Any, **kwargs: Any) -> Decision:
            time.sleep(0.3)  # noqa: ASYNC251 - that is the mistake
            return await super().check(*args, **kwargs)

    record = run(Load(TaskCallers(Blocking.connect("memory://"), callers=4, by=by_check)))
    assert record.loop.worst > 0.5
    with pytest.raises(AssertionError):
        guarantees.assert_no_caller_hung(record, OPTIONS)


def test_an_exception_is_seen() -> None:
    def fail() -> Decision:
        raise OSError("of the driver")

    record = run(bad(fail))
    assert "OSError('of the driver')" in record.exceptions
    with pytest.raises(AssertionError):
        guarantees.assert_answers_are_valid(record, OPTIONS)


@only_in_soak
@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed": False, "degraded": "open"},
        {"allowed": False, "degraded": "closed", "retry_after_ms": 0},
        {"allowed": True, "degraded": "closed", "retry_after_ms": 5},
        {"allowed": True},
        {"allowed": True, "degraded": "local"},
        {"allowed": False, "degraded": "closed", "retry_after_ms": 5},  # valid, but the failure behaviour is `open`
    ],
    ids=str,
)
def test_an_invalid_decision_is_seen(wrong: dict[str, Any]) -> None:
    record = run(bad(lambda: decision(**wrong)))
    with pytest.raises(AssertionError):
        guarantees.assert_answers_are_valid(record, OPTIONS)


@pytest.mark.parametrize("kind", [None, "local"])
def test_one_admission_too_many_is_seen(kind: str | None) -> None:
    most = TIGHT.max_admitted if kind is None else TIGHT.max_admitted // OPTIONS.processes
    calls = [CheckRecord(TIGHT, 0, 0, allowed=True, degraded=kind)] * most
    guarantees.assert_limits_held(LoadRecord(list(calls)), OPTIONS)
    with pytest.raises(AssertionError):
        guarantees.assert_limits_held(LoadRecord([*calls, calls[0]]), OPTIONS)


def test_a_count_that_is_lost_or_doubled_is_seen() -> None:
    with start_load("sync", "memory://", OPTIONS) as load:
        load.wait_for_answers(100)
        load.stop()
        guarantees.assert_counts_match_admissions(load)
        load.check(WIDE)
        with pytest.raises(AssertionError):
            guarantees.assert_counts_match_admissions(load)
        load.record.checks.append(CheckRecord(WIDE, 0, 0, allowed=True))
        load.record.checks.append(CheckRecord(BUCKET, 0, 0, allowed=True))
        with pytest.raises(AssertionError, match="bucket"):
            guarantees.assert_counts_match_admissions(load)


def test_a_load_that_gets_no_answers_says_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.load.PATIENCE_SECONDS", 0.1)
    with (
        start_load("async", "memory://", OPTIONS) as load,
        pytest.raises(AssertionError, match=r"0 of 1 answers \(degraded: True\)"),
    ):
        load.wait_for_answers(1, degraded=True)


def test_callbacks_that_are_called_twice_are_seen() -> None:
    class Twice(Limiter):
        def submit(self, on_result: Any, *args: Any, **kwargs: Any) -> None:
            for _ in range(2):
                on_result(decision(allowed=True))

    with pytest.raises(AssertionError, match="answered twice"):
        asyncio.run(by_submit(Twice.connect("memory://"), WIDE))
