"""`consistency: local`: each process decides by its part of a limit, which is divided by the live processes."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest

from limitforge import (
    FixedWindow,
    InvalidLimit,
    Limits,
    ManualClock,
    StoreOptions,
    SyncLimiter,
    TokenBucket,
    limit_from_fields,
)
from tests.contract.conftest import PATIENT
from tests.servers import RedisServer

LOCAL = FixedWindow(name="local", limit=60, window_seconds=3_600, consistency="local")
EXACT = FixedWindow(name="exact", limit=10, window_seconds=3_600)
PREPAID = FixedWindow(name="prepaid", limit=10_000, window_seconds=3_600, consistency="prepaid")
PATIENCE_SECONDS = 40.0


def send_heartbeat(limiter: SyncLimiter) -> int:
    """Send a heartbeat; return the number of live processes."""
    store = cast("Any", limiter._store)
    count: int = store._run_flow(store._core.heartbeat_flow(), time.monotonic() + 10)
    store._core.heartbeat.set_process_count(count)
    return count


@contextmanager
def processes(url: str, number: int) -> Iterator[list[SyncLimiter]]:
    with ExitStack() as opened:
        yield [opened.enter_context(SyncLimiter.connect(url, options=PATIENT)) for _ in range(number)]


def admitted(limiter: SyncLimiter, limits: Any, times: int = 100) -> int:
    return sum(limiter.check("r", "s", limits=limits).allowed for _ in range(times))


@pytest.mark.slow
def test_a_limit_is_divided_by_the_processes_that_are_alive(redis_url: str) -> None:
    with processes(redis_url, 3) as limiters:
        assert [send_heartbeat(limiter) for limiter in limiters] == [1, 2, 3]
        for limiter in limiters:
            send_heartbeat(limiter)
        assert [admitted(limiter, LOCAL) for limiter in limiters] == [20, 20, 20]


@pytest.mark.slow
def test_a_closed_process_stops_counting_at_once_and_a_dead_one_after_three_seconds(redis_url: str) -> None:
    with processes(redis_url, 3) as (first, second, third):
        for limiter in (first, second, third):
            limiter.check("r", "s", limits=LOCAL)
            send_heartbeat(limiter)
        third.close()
        assert send_heartbeat(first) == 2
        store = cast("Any", second._store)
        store._stopped.set()  # as if the process had died
        ends = time.monotonic() + PATIENCE_SECONDS
        while send_heartbeat(first) != 1 and time.monotonic() < ends:
            time.sleep(0.1)
        assert send_heartbeat(first) == 1


@pytest.mark.slow
def test_heartbeats_are_sent_in_the_background(redis_url: str) -> None:
    with processes(redis_url, 2) as limiters:
        ends = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < ends:
            for limiter in limiters:
                limiter.check("r", "other", limits=LOCAL)
            if all(cast("Any", limiter._store)._core.heartbeat.process_count() == 2 for limiter in limiters):
                break
            time.sleep(0.05)
        assert [admitted(limiter, LOCAL) for limiter in limiters] == [30, 30]


def test_without_redis_the_configured_number_of_processes_counts() -> None:
    with SyncLimiter.connect("memory://", options=StoreOptions(processes=4)) as limiter:
        decision = limiter.check("r", "s", limits=LOCAL)
        assert (decision.limit, decision.remaining) == (60, 14)
        assert admitted(limiter, LOCAL) == 14
        assert admitted(limiter, EXACT) == 10


def test_a_local_limit_needs_no_redis_to_decide(own_redis_server: RedisServer) -> None:
    options = StoreOptions(failure="raise", processes=2, breaker_seconds=60)
    with SyncLimiter.connect(own_redis_server.url, options=options) as limiter:
        own_redis_server.kill()
        assert admitted(limiter, LOCAL) == 30


def test_beside_an_exact_limit_it_is_all_or_nothing(redis_url: str) -> None:
    with SyncLimiter.connect(redis_url, options=PATIENT) as limiter:
        both = Limits(EXACT, LOCAL)
        assert admitted(limiter, both) == 10
        denied = limiter.check("r", "s", limits=both)
        assert (denied.binding, denied.limits["local"].remaining) == ("exact", 50)
        assert admitted(limiter, LOCAL) == 50
        denied = limiter.check("r", "other", limits=Limits(EXACT, LOCAL), cost=11)
        assert denied.binding == "exact"
        limiter.reset("r", "s", limits=EXACT)
        denied = limiter.check("r", "s", limits=both)
        assert (denied.binding, denied.limits["exact"].remaining) == ("local", 10)


def test_beside_a_prepaid_limit_it_is_all_or_nothing(redis_url: str) -> None:
    clock = ManualClock()
    with SyncLimiter.connect(redis_url, clock=clock, options=PATIENT) as limiter:
        store = cast("Any", limiter._store)
        store._prepaid_thread = store  # only this test syncs the shares
        all_kinds = Limits(PREPAID, EXACT, LOCAL)
        admitted(limiter, PREPAID, 50)
        clock.advance_us(200_000)
        store.sync_prepaid()
        share = store._hybrid.shares.total_balance
        assert share > 20
        assert admitted(limiter, all_kinds, 30) == 10
        assert store._hybrid.shares.total_balance == share - 10
        store._prepaid_thread = None


def test_a_reservation_of_a_prepaid_limit_is_held_in_the_store(redis_url: str) -> None:
    with SyncLimiter.connect(redis_url, options=PATIENT) as limiter:
        plan = Limits(PREPAID, LOCAL)
        held = limiter.reserve("r", "s", limits=plan, cost=7)
        assert limiter.settle(held.reservation_id or "", 2).outcome == "settled"
        assert limiter.check("r", "s", limits=PREPAID, cost=0).remaining == 9_998
        only_local = limiter.reserve("r", "s", limits=LOCAL, cost=7)
        assert limiter.settle(only_local.reservation_id or "", 2).outcome == "settled"


def test_slots_can_not_be_divided_without_asking() -> None:
    fields = {"algorithm": "concurrency", "max_concurrent": 5, "lease_ttl_seconds": 5, "consistency": "local"}
    with pytest.raises(InvalidLimit, match="must be exact"):
        limit_from_fields(fields)
    assert TokenBucket(bucket_capacity=5, refill_rate_per_sec=1, consistency="local").consistency == "local"
