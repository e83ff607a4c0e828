"""Many processes and threads on one limit admit exactly what it allows, never one more."""

import asyncio
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from limitforge import Concurrency, FixedWindow, Limiter, Limits, SyncLimiter, limit_from_fields
from limitforge.core.limits import limit_to_fields
from limitforge.errors import StoreUnavailable
from tests.child_processes import child_process
from tests.contract.conftest import PATIENT
from tests.contract.hammer import admitted, send_admitted, survived
from tests.contract.strategies import ALGORITHMS
from tests.servers import RedisServer
from tests.topologies import RedisCluster

PROCESSES, THREADS_EACH, CALLS = 8, 8, 20  # 1,280 checks on a limit of 1,000
DAY = 86_400
PATIENCE_SECONDS = 150.0
PERSISTENT = dataclasses.replace(PATIENT, breaker_failures=10**9)  # keeps calling Redis after any number of failures

THOUSAND: list[dict[str, Any]] = [
    {"algorithm": "token_bucket", "bucket_capacity": 1_000, "refill_rate_per_sec": "0.0001"},
    {"algorithm": "leaky_bucket", "bucket_capacity": 1_000, "leak_rate_per_sec": "0.0001"},
    {"algorithm": "fixed_window", "limit": 1_000, "window_seconds": DAY, "align": "first_hit"},
    {"algorithm": "sliding_window", "limit": 1_000, "window_seconds": DAY},
    {"algorithm": "sliding_window_counter", "limit": 1_000, "window_seconds": 50 * DAY},
    {"algorithm": "quota", "limit": 1_000, "period": "year"},
    {"algorithm": "concurrency", "max_concurrent": 1_000, "lease_ttl_seconds": DAY},
]


def hammer(url: str, plans: list[list[dict[str, Any]]], resources: list[str]) -> list[int]:
    """Return what all processes admitted of each plan. There is one process per resource, and all run at once."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(child_process(send_admitted, url, plans, THREADS_EACH, CALLS, resource))
            for resource in resources
        ]
        return [sum(each) for each in zip(*(process.receive(PATIENCE_SECONDS) for process in running), strict=True)]


def hammer_each(url: str) -> dict[str, int]:
    """Return what was admitted of a limit of each algorithm, all in the same processes."""
    admitted = hammer(url, [[fields] for fields in THOUSAND], ["r"] * PROCESSES)
    return dict(zip([fields["algorithm"] for fields in THOUSAND], admitted, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_eight_processes_of_eight_threads_admit_exactly_a_thousand_of_every_algorithm(redis_url: str) -> None:
    assert hammer_each(redis_url) == dict.fromkeys(ALGORITHMS, 1_000)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_processes_on_a_cluster_admit_exactly_a_thousand_of_every_algorithm(cluster_servers: RedisCluster) -> None:
    cluster_servers.flush()
    assert hammer_each(cluster_servers.url) == dict.fromkeys(ALGORITHMS, 1_000)


@pytest.mark.slow
def test_processes_on_limits_of_several_shards_admit_no_more_than_each_and_leave_nothing_taken(
    cluster_servers: RedisCluster,
) -> None:
    """A check is denied while another one holds the last of a limit for a moment, so fewer may be admitted."""
    cluster_servers.flush()
    window = {"algorithm": "fixed_window", "window_seconds": DAY, "align": "first_hit"}
    plan = [
        {**window, "name": "world", "limit": 1_000, "scope": "global"},
        {**window, "name": "route", "limit": 150, "scope": "resource"},
    ]
    [passed] = hammer(cluster_servers.url, [plan], [f"r{number}" for number in range(PROCESSES)])
    assert 900 <= passed <= 1_000
    with SyncLimiter.connect(cluster_servers.url, options=PATIENT) as limiter:
        world, route = map(limit_from_fields, plan)
        assert limiter.check("r0", "s", limits=world, cost=0).remaining == 1_000 - passed
        left = [limiter.check(f"r{n}", "s", limits=route, cost=0).remaining or 0 for n in range(PROCESSES)]
        assert sum(150 - one for one in left) == passed


@pytest.mark.slow
def test_a_pair_of_limits_of_different_scope_admits_what_the_stricter_one_allows(redis_url: str) -> None:
    plan = [
        {
            "name": "tenant",
            "algorithm": "fixed_window",
            "limit": 1_000,
            "window_seconds": DAY,
            "scope": "tenant",
            "align": "first_hit",
        },
        {"name": "route", "algorithm": "sliding_window", "limit": 150, "window_seconds": DAY, "scope": "resource"},
    ]
    assert hammer(redis_url, [plan], [f"r{number}" for number in range(PROCESSES)]) == [1_000]
    with SyncLimiter.connect(redis_url, options=PATIENT) as limiter:
        look = limiter.check("r0", "s", limits=Limits(*map(limit_from_fields, plan)), cost=0)
        taken = [
            150 - (limiter.check(f"r{n}", "s", limits=limit_from_fields(plan[1]), cost=0).remaining or 0)
            for n in range(PROCESSES)
        ]
    assert look.limits["tenant"].remaining == 0
    assert sum(taken) == 1_000


@pytest.mark.parametrize("url", ["redis", "memory"])
def test_sixty_four_threads_admit_exactly_a_thousand(redis_url: str, url: str) -> None:
    limits = Limits(FixedWindow(name="w", limit=1_000, window_seconds=DAY, align="first_hit"))
    if url == "redis":
        assert admitted(redis_url, [limits], threads=64, calls=20) == [1_000]
    else:
        with SyncLimiter.connect("memory://") as limiter, ThreadPoolExecutor(64) as pool:
            allowed = pool.map(
                lambda _: sum(limiter.check("r", "s", limits=limits).allowed for _ in range(20)), range(64)
            )
            assert sum(allowed) == 1_000


async def test_concurrent_callers_of_one_loop_admit_exactly_a_hundred(redis_url: str) -> None:
    async with Limiter.connect(redis_url, options=PATIENT) as limiter:
        limits = Limits(FixedWindow(name="w", limit=100, window_seconds=DAY, align="first_hit"))
        decisions = await asyncio.gather(*(limiter.check("r", "s", limits=limits) for _ in range(128)))
    assert sum(decision.allowed for decision in decisions) == 100


def test_never_more_slots_are_held_than_there_are(redis_url: str) -> None:
    slots = Limits(Concurrency(name="c", max_concurrent=5, lease_ttl_seconds=60))
    held, most, waves = 0, 0, 40
    lock, together = threading.Lock(), threading.Barrier(16)

    def work(limiter: SyncLimiter) -> int:
        nonlocal held, most
        admitted = 0
        for _ in range(waves):
            decision = limiter.check("r", "s", limits=slots)
            if decision.allowed:
                with lock:
                    held += 1
                    most = max(most, held)
            together.wait()  # all have checked, and each admitted one still holds its slot
            if decision.allowed:
                admitted += 1
                with lock:
                    held -= 1
                limiter.release(decision.lease_id or "")
            together.wait()  # all have released
        return admitted

    with SyncLimiter.connect(redis_url, options=PATIENT) as limiter, ThreadPoolExecutor(16) as pool:
        admitted = list(pool.map(work, [limiter] * 16))
        assert limiter.check("r", "s", limits=slots, cost=0).remaining == 5
    assert most == 5
    assert sum(admitted) == 5 * waves


@pytest.mark.slow
def test_a_restart_in_mid_load_is_seen_as_lost_connections_and_nothing_else(own_redis_server: RedisServer) -> None:
    limits = Limits(FixedWindow(name="w", limit=10**9, window_seconds=DAY))
    with SyncLimiter.connect(own_redis_server.url, options=PERSISTENT) as limiter, ThreadPoolExecutor(16) as pool:
        limiter.check("r", "s", limits=limits)
        loads = [pool.submit(survived, limiter, limits, 500) for _ in range(16)]
        own_redis_server.restart()
        results = [load.result() for load in loads]
        assert [others for *_, others in results if others] == []
        assert sum(allowed for allowed, *_ in results) > 0
        assert limiter.check("r", "s", limits=limits).allowed


@pytest.mark.chaos
def test_many_restarts_in_mid_load_are_seen_as_lost_connections_and_nothing_else(own_redis_server: RedisServer) -> None:
    limits = Limits(FixedWindow(name="w", limit=10**9, window_seconds=DAY))
    with SyncLimiter.connect(own_redis_server.url, options=PERSISTENT) as limiter, ThreadPoolExecutor(32) as pool:
        loads = [pool.submit(survived, limiter, limits, 20_000) for _ in range(32)]
        for number in range(20):
            if number % 2:
                own_redis_server.kill()
            own_redis_server.restart()
            assert limiter.check("r", "again", limits=limits).allowed
        results = [load.result(timeout=600) for load in loads]
    assert [others for *_, others in results if others] == []
    assert sum(lost for _, lost, _ in results) > 0


@pytest.mark.slow
async def test_script_flushes_in_mid_load_are_not_seen_at_all(own_redis_server: RedisServer) -> None:
    limits = Limits(FixedWindow(name="w", limit=2_000, window_seconds=DAY, align="first_hit"))
    async with Limiter.connect(own_redis_server.url, options=PATIENT) as limiter:

        async def load() -> int:
            return sum([(await limiter.check("r", "s", limits=limits)).allowed for _ in range(100)])

        async def flush() -> None:
            for _ in range(20):
                await asyncio.to_thread(own_redis_server.command, "SCRIPT FLUSH")

        flushes = asyncio.create_task(flush())
        allowed = await asyncio.gather(*(load() for _ in range(32)))
        await flushes
    assert sum(allowed) == 2_000


async def test_a_dead_redis_is_unavailable_not_an_exception_of_the_driver(own_redis_server: RedisServer) -> None:
    async with Limiter.connect(own_redis_server.url, options=PATIENT) as limiter:
        assert (await limiter.check("r", "s", limits="5/minute")).allowed
        own_redis_server.kill()
        with pytest.raises(StoreUnavailable):
            await limiter.check("r", "s", limits="5/minute")


def test_fields_survive_the_trip_to_a_process() -> None:
    for fields in THOUSAND:
        assert limit_from_fields(limit_to_fields(limit_from_fields(fields))) == limit_from_fields(fields)
