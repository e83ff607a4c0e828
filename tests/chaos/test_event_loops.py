"""One limiter on several event loops, callers that cancel checks, and a limiter that is closed during checks."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from limitforge import Decision, FixedWindow, Limiter, LimitforgeError, Limits, Request, StoreOptions, SyncLimiter
from tests.chaos.waiting import PATIENCE_SECONDS, eventually
from tests.proxy import CloseConnections, DropReplies, Proxy, unreachable_url
from tests.servers import RedisServer

DAY = 86_400
PATIENT = StoreOptions(failure="open", deadline_ms=10_000)
HUNDRED = Limits(FixedWindow(name="hundred", limit=100, window_seconds=DAY, align="first_hit"))
WIDE = Limits(FixedWindow(name="wide", limit=10**9, window_seconds=DAY))


@pytest.fixture(autouse=True)
def _leaks_are_of_the_test_that_made_them() -> Iterator[None]:
    yield
    gc.collect()


async def until_it_works(limiter: Limiter) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await limiter.check("r", "s", limits=WIDE)).degraded is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def admitted(limiter: Limiter, callers: int, calls: int = 1) -> int:
    async def call() -> int:
        decisions = [await limiter.check("r", "s", limits=HUNDRED) for _ in range(calls)]
        assert {decision.degraded for decision in decisions} == {None}
        return sum(decision.allowed for decision in decisions)

    async with asyncio.timeout(PATIENCE_SECONDS):
        return sum(await asyncio.gather(*(call() for _ in range(callers))))


def test_a_limiter_serves_one_loop_after_the_other(redis_url: str) -> None:
    limiter = Limiter.connect(redis_url, options=PATIENT)
    counts = [asyncio.run(admitted(limiter, 30)) for _ in range(5)]
    asyncio.run(limiter.close())
    assert counts == [30, 30, 30, 10, 0]


def test_a_limiter_serves_two_loops_at_the_same_time(redis_url: str) -> None:
    limiter = Limiter.connect(redis_url, options=PATIENT)
    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(lambda _: asyncio.run(admitted(limiter, 16, 20)), range(2)))
    asyncio.run(limiter.close())
    assert sum(counts) == 100


def test_loops_come_and_go_and_nothing_is_left_in_redis_or_here(own_redis_server: RedisServer) -> None:
    limiter = Limiter.connect(own_redis_server.url, options=PATIENT)
    threads = threading.active_count()
    for _ in range(20):
        asyncio.run(admitted(limiter, 8))
    asyncio.run(limiter.close())
    eventually(
        lambda: own_redis_server.command("INFO clients").count(b"connected_clients:1\r\n")
    )  # the connection that asks
    assert threading.active_count() <= threads


def test_a_loop_that_ended_in_an_outage_leaves_nothing_behind_for_the_next(proxy: Proxy) -> None:
    limiter = Limiter.connect(proxy.url, options=StoreOptions(deadline_ms=50, breaker_seconds=0.05))

    async def check() -> str | None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return (await limiter.check("r", "s", limits=WIDE)).degraded

    with proxy.in_mode(DropReplies()):
        assert asyncio.run(check()) == "open"
    while asyncio.run(check()) is not None:
        time.sleep(0.01)
    asyncio.run(limiter.close())


@pytest.mark.parametrize("way", ["check", "reserve", "check_many"])
async def test_cancelled_checks_leave_nothing_behind(own_redis_server: RedisServer, way: str) -> None:
    draw = random.Random(4)
    async with Limiter.connect(own_redis_server.url, options=PATIENT) as limiter:
        await limiter.check("r", "s", limits=WIDE)
        own = asyncio.all_tasks()

        async def call() -> bool:
            await asyncio.sleep(draw.random() / 20)
            if way == "check":
                return (await limiter.check("r", "s", limits=WIDE)).degraded is None
            if way == "reserve":
                return (await limiter.reserve("r", "s", limits=WIDE, cost=1, ttl_seconds=0.01)).degraded is None
            (answer,) = await limiter.check_many([Request(resource="r", subject="s", limits=WIDE)])
            return isinstance(answer, Decision) and answer.degraded is None

        callers = [asyncio.create_task(call()) for _ in range(1_000)]
        given_up = draw.sample(callers, 500)
        for caller in given_up:
            if draw.random() < 0.1:
                await asyncio.sleep(0.001)
            caller.cancel()
        results = await asyncio.gather(*callers, return_exceptions=True)
        stayed = [result for caller, result in zip(callers, results, strict=True) if caller not in given_up]
        assert stayed == [True] * 500
        assert all(result is True or isinstance(result, asyncio.CancelledError) for result in results)
        assert asyncio.all_tasks() <= own
        assert limiter.status().waiting == 0
        remaining = (await limiter.check("r", "s", limits=WIDE, cost=0)).remaining
        assert 501 <= 10**9 - (remaining or 0) <= 1_001


async def test_cancelled_checks_on_a_frozen_redis_leave_nothing_behind(own_redis_server: RedisServer) -> None:
    options = StoreOptions(deadline_ms=100, breaker_seconds=0.1)
    async with Limiter.connect(own_redis_server.url, options=options) as limiter:
        await limiter.check("r", "s", limits=WIDE)
        own = asyncio.all_tasks()
        own_redis_server.pause()
        for _ in range(5):
            callers = [asyncio.create_task(limiter.check("r", "s", limits=WIDE)) for _ in range(200)]
            await asyncio.sleep(0.005)
            for caller in callers[::2]:
                caller.cancel()
            results = await asyncio.gather(*callers, return_exceptions=True)
            assert all(isinstance(result, Decision) for result in results[1::2])
            await asyncio.sleep(0.05)
        own_redis_server.resume()
        await until_it_works(limiter)
        assert asyncio.all_tasks() <= own
        assert limiter.status().waiting == 0


async def test_a_cancelled_probe_does_not_prevent_the_recovery_of_the_store(proxy: Proxy) -> None:
    options = StoreOptions(deadline_ms=100, breaker_failures=1, breaker_seconds=0.1)
    async with Limiter.connect(proxy.url, options=options) as limiter:
        with proxy.in_mode(CloseConnections()):
            assert (await limiter.check("r", "s", limits=WIDE)).degraded == "open"
            await asyncio.sleep(0.15)
        probe = asyncio.create_task(limiter.check("r", "s", limits=WIDE))
        await asyncio.sleep(0)
        probe.cancel()
        await until_it_works(limiter)


async def test_closing_answers_every_caller_that_waits(own_redis_server: RedisServer) -> None:
    limiter = Limiter.connect(own_redis_server.url, options=StoreOptions(failure="closed", deadline_ms=30_000))
    await limiter.check("r", "s", limits=WIDE)
    own_redis_server.pause()
    callers = [asyncio.create_task(limiter.check("r", "s", limits=WIDE)) for _ in range(100)]
    callers += [asyncio.create_task(limiter.check("r", "s", limits=WIDE, failure="raise")) for _ in range(100)]
    await asyncio.sleep(0.02)
    await limiter.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        results = await asyncio.gather(*callers, return_exceptions=True)
    assert [result.degraded for result in results[:100] if isinstance(result, Decision)] == ["closed"] * 100
    assert all(isinstance(result, LimitforgeError) for result in results[100:])


@pytest.mark.parametrize("way", ["check", "check_many", "reset"])
async def test_closing_answers_callers_that_wait_for_a_connection(way: str) -> None:
    """With a decision, or with an error of limitforge, but not with a cancellation that no caller requested."""
    with unreachable_url() as url:
        limiter = Limiter.connect(url, options=StoreOptions(failure="closed", deadline_ms=30_000))
        if way == "check":
            caller: asyncio.Task[object] = asyncio.create_task(limiter.check("r", "s", limits=WIDE))
        elif way == "check_many":
            requests = [Request(resource="r", subject="s", limits=WIDE)]
            caller = asyncio.create_task(limiter.check_many(requests))
        else:
            caller = asyncio.create_task(limiter.reset("r", "s", limits=WIDE))
        await asyncio.sleep(0.02)
        await limiter.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            (result,) = await asyncio.gather(caller, return_exceptions=True)
    assert isinstance(result, Decision | list | LimitforgeError)


async def test_callbacks_are_answered_when_the_limiter_is_closed(own_redis_server: RedisServer) -> None:
    answers: list[Decision | LimitforgeError] = []
    limiter = Limiter.connect(own_redis_server.url, options=StoreOptions(failure="open", deadline_ms=30_000))
    await limiter.check("r", "s", limits=WIDE)
    own_redis_server.pause()
    for _ in range(50):
        limiter.submit(answers.append, "r", "s", limits=WIDE)
    await asyncio.sleep(0.02)
    await limiter.close()
    await asyncio.sleep(0)
    assert [answer.degraded for answer in answers if isinstance(answer, Decision)] == ["open"] * 50


def test_closing_answers_threads_that_wait(own_redis_server: RedisServer) -> None:
    limiter = SyncLimiter.connect(own_redis_server.url, options=StoreOptions(failure="closed", deadline_ms=1_000))
    limiter.check("r", "s", limits=WIDE)
    own_redis_server.pause()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(limiter.check, "r", "s", limits=WIDE) for _ in range(8)]
        time.sleep(0.05)
        limiter.close()
        assert [decision.result(timeout=PATIENCE_SECONDS).degraded for decision in waiting] == ["closed"] * 8
    limiter.close()


async def test_a_full_queue_is_answered_at_once(own_redis_server: RedisServer) -> None:
    options = StoreOptions(failure="closed", deadline_ms=50_000, max_waiting=10)
    async with Limiter.connect(own_redis_server.url, options=options) as limiter:
        await limiter.check("r", "s", limits=WIDE)
        own_redis_server.pause()
        callers = [asyncio.create_task(limiter.check("r", "s", limits=WIDE)) for _ in range(500)]
        async with asyncio.timeout(PATIENCE_SECONDS):  # less than the deadline
            for answered in asyncio.as_completed(callers[10:]):
                assert (await answered).degraded == "closed"
        own_redis_server.resume()
        await asyncio.gather(*callers)


async def test_a_callback_that_fails_affects_no_other_check(redis_url: str) -> None:
    heard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(str(context["exception"])))
    answers: list[object] = []

    def fail(_: object) -> None:
        raise RuntimeError("of a callback")

    async with Limiter.connect(redis_url, options=PATIENT) as limiter:
        for number in range(20):
            limiter.submit(fail if number == 7 else answers.append, "r", "s", limits=WIDE)
        assert (await limiter.check("r", "s", limits=WIDE)).degraded is None
    assert len(answers) == 19
    assert heard == ["of a callback"]
