"""A transient failure stays one: it opens no breaker, keeps no dead connection, and loses no decisions."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import pytest
import redis as redis_py

from limitforge import (
    Decision,
    FixedWindow,
    Limiter,
    Limits,
    Request,
    StoreCorrupt,
    StoreOptions,
    StoreUnavailable,
    SyncLimiter,
    TooManyReservations,
)
from tests.chaos.waiting import PATIENCE_SECONDS, eventually
from tests.proxy import CloseConnections, DropReplies, Garbage, Proxy
from tests.servers import RedisServer

DAY = 86_400
MANY = Limits(FixedWindow(name="many", limit=10**9, window_seconds=DAY))
TEN = Limits(FixedWindow(name="ten", limit=10, window_seconds=DAY, align="first_hit"))


async def until(is_so: Callable[[], Awaitable[object]]) -> None:
    """Poll until a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.01)


async def test_a_slow_moment_is_one_failure_for_all_callers(proxy: Proxy) -> None:
    options = StoreOptions(deadline_ms=500, breaker_seconds=60)
    request = Request(resource="r", subject="s", limits=MANY)
    async with Limiter.connect(proxy.url, options=options) as limiter:
        await limiter.check("r", "s", limits=MANY)
        proxy.mode = DropReplies()
        asked = [limiter.check_many([request] * 3) for _ in range(8)]
        answers = await asyncio.gather(*asked, *(limiter.check("r", f"s{n}", limits=MANY) for n in range(50)))
        assert answers
        assert limiter.status().breaker == "closed"


def test_a_slow_moment_is_one_failure_for_all_threads(proxy: Proxy) -> None:
    options = StoreOptions(deadline_ms=1_000, breaker_seconds=60)
    with SyncLimiter.connect(proxy.url, options=options) as limiter, ThreadPoolExecutor(8) as pool:
        together = threading.Barrier(8)

        def send_checks(_: int) -> str | None:
            together.wait()
            return limiter.check("r", "s", limits=MANY).degraded

        assert list(pool.map(send_checks, range(8))) == [None] * 8
        with proxy.in_mode(DropReplies()):
            assert list(pool.map(send_checks, range(8))) == ["open"] * 8
        assert limiter.status().breaker == "closed"


async def test_a_dead_connection_is_replaced_though_other_loops_keep_the_breaker_closed(
    proxy: Proxy, redis_url: str
) -> None:
    options = StoreOptions(deadline_ms=50, breaker_failures=10**6, denial_cache_ms=0)
    async with Limiter.connect(proxy.url, options=options) as limiter:

        async def decided() -> bool:
            return (await limiter.check("r", "s", limits=MANY)).degraded is None

        await until(decided)
        with proxy.in_mode(DropReplies()):
            for _ in range(3):
                assert (await limiter.check("r", "s", limits=MANY)).degraded == "open"
        await until(decided)


async def test_a_command_does_not_spoil_the_probe_of_a_check(proxy: Proxy) -> None:
    options = StoreOptions(deadline_ms=500, breaker_seconds=0.2)
    async with Limiter.connect(proxy.url, options=options) as limiter:
        with proxy.in_mode(CloseConnections()):
            for _ in range(3):
                await limiter.check("r", "s", limits=MANY)
        assert limiter.status().breaker == "open"
        stop = asyncio.Event()

        async def command() -> None:
            while not stop.is_set():
                with suppress(StoreUnavailable):
                    await limiter.reset("r", "s", limits=MANY)
                await asyncio.sleep(0)

        commands = [asyncio.create_task(command()) for _ in range(4)]

        async def decided() -> bool:
            return (await limiter.check("r", "s", limits=MANY)).degraded is None

        await until(decided)
        stop.set()
        await asyncio.gather(*commands)
        assert limiter.status().breaker == "closed"


async def test_no_caller_hangs_when_the_local_store_has_too_many_reservations(proxy: Proxy) -> None:
    options = StoreOptions(deadline_ms=100, failure="local")
    proxy.mode = DropReplies()
    async with Limiter.connect(proxy.url, options=options) as limiter:
        asked = (limiter.reserve("r", "s", limits=MANY, cost=1) for _ in range(1_100))
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_SECONDS)
    assert sum(isinstance(answer, Decision) for answer in answers) == 1_000
    assert sum(isinstance(answer, TooManyReservations) for answer in answers) == 100


@pytest.mark.parametrize("api", ["async", "sync"])
def test_a_long_batch_keeps_the_decisions_of_redis(redis_url: str, api: str) -> None:
    requests = [Request(resource="r", subject="s", limits=TEN)] * 2_000
    options = StoreOptions(deadline_ms=20_000)
    if api == "sync":
        with SyncLimiter.connect(redis_url, options=options) as sync:
            answers = sync.check_many(requests)
    else:

        async def send_checks() -> list[Any]:
            async with Limiter.connect(redis_url, options=options) as limiter:
                return await limiter.check_many(requests)

        answers = asyncio.run(send_checks())
    decisions = [answer for answer in answers if isinstance(answer, Decision)]
    assert [decision.allowed for decision in decisions] == [True] * 10 + [False] * 1_990
    assert not any(decision.degraded for decision in decisions)


async def test_a_cancelled_batch_leaves_nothing_behind(proxy: Proxy) -> None:
    async with Limiter.connect(proxy.url, options=StoreOptions(deadline_ms=20_000)) as limiter:
        await limiter.check("r", "s", limits=MANY)
        with proxy.in_mode(DropReplies()), pytest.raises(TimeoutError):
            await asyncio.wait_for(limiter.check_many([Request(resource="r", subject="s", limits=TEN)] * 5), 0.1)
        assert limiter.status().waiting == 5  # sent, and no caller gets the results


@pytest.mark.slow
@pytest.mark.parametrize("api", ["async", "sync"])
def test_thousands_of_buckets_are_charged_after_an_outage(own_redis_server: RedisServer, api: str) -> None:
    charged = Limits(FixedWindow(name="w", limit=100, window_seconds=DAY, charge_after_outage=True))
    options = StoreOptions(deadline_ms=200, breaker_seconds=0.3)
    own_redis_server.kill()

    def counted() -> bool:
        with redis_py.Redis.from_url(own_redis_server.url) as raw:
            return int(cast("int", raw.dbsize())) >= 3_001

    if api == "sync":
        with SyncLimiter.connect(own_redis_server.url, options=options) as sync:
            for number in range(3_000):
                assert sync.check("r", f"s{number}", limits=charged).degraded == "open"
            own_redis_server.restart()
            eventually(lambda: sync.check("r", "after", limits=charged).degraded is None)
            eventually(counted)
        return

    async def through_an_outage() -> None:
        async with Limiter.connect(own_redis_server.url, options=options) as limiter:
            for number in range(3_000):
                assert (await limiter.check("r", f"s{number}", limits=charged)).degraded == "open"
            own_redis_server.restart()

            async def decided() -> bool:
                return (await limiter.check("r", "after", limits=charged)).degraded is None

            await until(decided)
            await until(lambda: asyncio.to_thread(counted))

    asyncio.run(through_an_outage())


async def test_a_command_on_a_frozen_redis_times_out_and_can_be_cancelled(
    own_redis_server: RedisServer,
) -> None:
    async with Limiter.connect(own_redis_server.url) as limiter:
        await limiter.check("r", "s", limits=MANY)
        own_redis_server.pause()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(limiter.reset("r", "s", limits=MANY), 0.1)
        with pytest.raises(StoreUnavailable):
            await limiter.reset("r", "s", limits=MANY)
        own_redis_server.resume()


async def test_closing_during_a_command_leaves_no_connection(own_redis_server: RedisServer) -> None:
    limiter = Limiter.connect(own_redis_server.url)
    await asyncio.gather(limiter.reset("r", "s", limits=MANY), limiter.close(), return_exceptions=True)
    with redis_py.Redis.from_url(own_redis_server.url) as raw:
        await asyncio.to_thread(eventually, lambda: len(cast("list[Any]", raw.client_list())) == 1)


@pytest.mark.parametrize("reply", [b"$3\r\nfoo\r\n", b"*1\r\n:1\r\n", b"$-1\r\n"], ids=repr)
def test_an_invalid_reply_is_corrupt_and_admits_nothing(proxy: Proxy, reply: bytes) -> None:
    with SyncLimiter.connect(proxy.url, options=StoreOptions(deadline_ms=5_000)) as sync:
        sync.check("r", "s", limits=MANY)
        with proxy.in_mode(Garbage(reply)), pytest.raises(StoreCorrupt):
            sync.check("r", "s", limits=MANY)

    async def send_checks() -> None:
        async with Limiter.connect(proxy.url, options=StoreOptions(deadline_ms=5_000)) as limiter:
            await limiter.check("r", "s", limits=MANY)
            with proxy.in_mode(Garbage(reply)), pytest.raises(StoreCorrupt):
                await limiter.check("r", "s", limits=MANY)

    asyncio.run(send_checks())


async def test_listening_works_with_any_option_in_the_url(redis_url: str) -> None:
    options = StoreOptions(deadline_ms=20_000, denial_cache_ms=60_000)
    url = f"{redis_url}?decode_responses=true&socket_timeout=1"
    async with Limiter.connect(url, options=options) as listens, Limiter.connect(redis_url) as changes:

        async def hit() -> bool:
            await listens.check("r", "s", limits=TEN, cost=10)
            return listens.status().denial_hits > 1

        async def admitted() -> bool:
            await changes.reset("r", "s", limits=TEN)
            return (await listens.check("r", "s", limits=TEN, cost=10)).allowed

        await until(hit)
        await until(admitted)


async def test_a_cancelled_connection_attempt_is_repeated(redis_url: str) -> None:
    async with Limiter.connect(redis_url, options=StoreOptions(deadline_ms=5_000)) as limiter:
        asked = asyncio.create_task(limiter.check("r", "s", limits=MANY))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert (await limiter.check("r", "s", limits=MANY)).degraded is None
        await limiter.reset("r", "s", limits=MANY)


@pytest.mark.slow
async def test_a_callback_that_submits_a_check_delays_no_other_answer(proxy: Proxy) -> None:
    """The deadline of b is 0.05 s after that of a's first check, and 0.35 s before that of its second one."""
    proxy.mode = DropReplies()
    options = StoreOptions(deadline_ms=400, breaker_failures=10**6)

    async def gap(limiter: Limiter) -> float:
        """Return the time from the answer to b until the answer to the second check of a."""
        answered: dict[str, float] = {}
        done = asyncio.Event()

        def end(_: object) -> None:
            answered["a"] = time.monotonic()
            done.set()

        def again(_: object) -> None:
            limiter.submit(end, "r", "a", limits=MANY)

        limiter.submit(again, "r", "a", limits=MANY)
        await asyncio.sleep(0.05)
        limiter.submit(lambda _: answered.update(b=time.monotonic()), "r", "b", limits=MANY)
        await asyncio.wait_for(done.wait(), PATIENCE_SECONDS)
        return answered["a"] - answered["b"]

    async with Limiter.connect(proxy.url, options=options) as limiter:
        for _ in range(20):  # a machine that stalls hides the gap once, a delayed answer hides it each time
            if await gap(limiter) > 0.2:
                return
    raise AssertionError("b was answered only when the second check of a was")


@pytest.mark.parametrize("api", ["async", "sync"])
def test_errors_of_a_batch_are_in_their_positions(proxy: Proxy, api: str) -> None:
    requests = [Request(resource="r", subject=f"s{n}", limits=MANY) for n in range(3)]
    options = StoreOptions(deadline_ms=5_000)
    if api == "sync":
        with SyncLimiter.connect(proxy.url, options=options) as sync:
            sync.check_many(requests)
            with proxy.in_mode(Garbage(b"+OK\r\n")):
                answers = sync.check_many(requests)
            assert all(isinstance(answer, Decision) for answer in sync.check_many(requests))
    else:

        async def send_checks() -> list[Any]:
            async with Limiter.connect(proxy.url, options=options) as limiter:
                await limiter.check_many(requests)
                with proxy.in_mode(Garbage(b"+OK\r\n")):
                    answers = await limiter.check_many(requests)
                assert all(isinstance(answer, Decision) for answer in await limiter.check_many(requests))
            return answers

        answers = asyncio.run(send_checks())
    assert [type(answer) for answer in answers] == [StoreCorrupt] * 3
