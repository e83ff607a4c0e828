"""A check is sent at most once, and what was admitted without the store is charged at most once."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from limitforge import FixedWindow, Limiter, StoreOptions, SyncLimiter
from tests.chaos.conftest import Connect
from tests.chaos.waiting import eventually, wait_until_store_decides
from tests.proxy import (
    CloseConnections,
    Delay,
    DropReplies,
    DropRequests,
    Garbage,
    Mode,
    OneByteAtATime,
    Proxy,
    Truncate,
)
from tests.servers import RedisServer

DAY = 86_400
CALLS = 2
DEADLINE_MS = 400  # each lost answer takes so long; a shorter deadline would degrade other checks on a busy machine
TOO_LATE = Delay(1.0)
HUNDRED = FixedWindow(name="hundred", limit=100, window_seconds=DAY, align="first_hit")
OWING = FixedWindow(name="owing", limit=100, window_seconds=DAY, align="first_hit", charge_after_outage=True)


def counted(limiter: SyncLimiter, limit: FixedWindow = HUNDRED) -> int:
    look = limiter.check("r", "s", limits=limit, cost=0)
    assert look.degraded is None
    return 100 - (look.remaining or 0)


def has_counted(limiter: SyncLimiter, owed: int) -> bool:
    return counted(limiter, OWING) >= owed


@pytest.mark.parametrize(
    "mode",
    [DropReplies(), TOO_LATE, Truncate(0), Truncate(7), OneByteAtATime(0.1), Garbage()],
    ids=repr,
)
def test_a_check_that_reached_redis_is_counted_once_if_its_answer_is_lost(
    opened: Connect, proxy: Proxy, mode: Mode
) -> None:
    limiter = opened(proxy.url, failure="open", deadline_ms=DEADLINE_MS, breaker_failures=1_000)
    for _ in range(CALLS):
        assert limiter.check("r", "s", limits=HUNDRED).degraded is None
        with proxy.in_mode(mode):
            limiter.check("r", "s", limits=HUNDRED)
        wait_until_store_decides(limiter)
    assert counted(limiter) == 2 * CALLS


@pytest.mark.parametrize("mode", [DropRequests(), CloseConnections()], ids=repr)
def test_what_never_reached_redis_is_not_counted_later(opened: Connect, proxy: Proxy, mode: Mode) -> None:
    limiter = opened(proxy.url, failure="open", deadline_ms=DEADLINE_MS, breaker_failures=1_000)
    for _ in range(CALLS):
        assert limiter.check("r", "s", limits=HUNDRED).degraded is None
        with proxy.in_mode(mode):
            assert limiter.check("r", "s", limits=HUNDRED).degraded == "open"
        wait_until_store_decides(limiter)
    assert counted(limiter) == CALLS


def test_a_frozen_redis_counts_each_check_once_when_it_thaws(opened: Connect, own_redis_server: RedisServer) -> None:
    limiter = opened(own_redis_server.url, failure="open", deadline_ms=DEADLINE_MS, breaker_failures=1_000)
    assert limiter.check("r", "s", limits=HUNDRED).degraded is None
    own_redis_server.pause()
    for _ in range(CALLS):
        assert limiter.check("r", "s", limits=HUNDRED).degraded == "open"
    own_redis_server.resume()
    wait_until_store_decides(limiter)
    assert 1 <= counted(limiter) <= 1 + CALLS


def test_what_was_admitted_without_the_store_is_charged_once(opened: Connect, proxy: Proxy) -> None:
    """For `open` and `local`: both at once, each in a database of its own."""
    url = proxy.url.removesuffix("/0")
    limiters = {
        failure: opened(f"{url}/{number}", failure=failure, breaker_seconds=0.05)
        for number, failure in enumerate(("open", "local"))
    }
    for limiter in limiters.values():
        limiter.check("r", "s", limits=[OWING, HUNDRED], cost=5)
    for outage in (1, 2):
        with proxy.in_mode(CloseConnections()):
            for failure, limiter in limiters.items():
                for _ in range(CALLS):
                    assert limiter.check("r", "s", limits=[OWING, HUNDRED], cost=3).allowed, failure
        owed = 5 + outage * 3 * CALLS
        for limiter in limiters.values():
            wait_until_store_decides(limiter)
            eventually(partial(has_counted, limiter, owed))
        time.sleep(0.15)  # and no charge is repeated some probes later
        assert {failure: counted(limiter, OWING) for failure, limiter in limiters.items()} == dict.fromkeys(
            limiters, owed
        )
    assert {failure: counted(limiter, HUNDRED) for failure, limiter in limiters.items()} == dict.fromkeys(limiters, 5)


def test_what_was_denied_without_the_store_is_not_charged(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url, failure="closed", breaker_seconds=0.05)
    limiter.check("r", "s", limits=OWING)
    with proxy.in_mode(CloseConnections()):
        for _ in range(CALLS):
            assert not limiter.check("r", "s", limits=OWING).allowed
    wait_until_store_decides(limiter)
    time.sleep(0.15)
    assert counted(limiter, OWING) == 1


def test_what_may_have_been_counted_is_not_charged_as_well(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url, failure="open", deadline_ms=DEADLINE_MS, breaker_seconds=0.05)
    limiter.check("r", "s", limits=OWING)
    with proxy.in_mode(DropReplies()):
        assert limiter.check("r", "s", limits=OWING).degraded == "open"  # sent, and counted
    wait_until_store_decides(limiter)
    time.sleep(0.15)
    assert counted(limiter, OWING) == 2


def test_a_charge_may_fill_a_limit_so_that_the_next_check_is_denied(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url, failure="open", breaker_seconds=0.05)
    limiter.check("r", "s", limits=OWING)
    with proxy.in_mode(CloseConnections()):
        assert limiter.check("r", "s", limits=OWING, cost=100).allowed
    wait_until_store_decides(limiter)
    eventually(lambda: limiter.check("r", "s", limits=OWING, cost=0).remaining == 0)
    assert not limiter.check("r", "s", limits=OWING).allowed


@pytest.mark.parametrize("mode", [TOO_LATE, DropReplies(), DropRequests()], ids=repr)
def test_no_check_gets_the_answer_to_another(opened: Connect, proxy: Proxy, mode: Mode) -> None:
    """Some answers are late or lost on a connection that stays open. Each limit has a number of its own."""
    limiter = opened(proxy.url, failure="open", deadline_ms=100, breaker_failures=1_000, denial_cache_ms=0)

    def send_checks(number: int) -> list[str]:
        limit = FixedWindow(name="n", limit=1_000 + number, window_seconds=DAY)
        decisions = [limiter.check("r", f"s{number}", limits=limit) for _ in range(30)]
        return [str(decision) for decision in decisions if decision.limit not in {None, limit.limit}]

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(send_checks, number) for number in range(8)]
        for _ in range(10):
            with proxy.in_mode(mode):
                time.sleep(0.002)
            time.sleep(0.02)
        assert [wrong for asked in asking for wrong in asked.result()] == []


async def test_a_denied_caller_is_not_admitted_by_the_answer_to_another_check(proxy: Proxy) -> None:
    """A proxy drops one reply. The replies after it still belong to their own calls."""
    full = FixedWindow(name="full", limit=1, window_seconds=DAY)
    options = StoreOptions(failure="open", deadline_ms=300, denial_cache_ms=0)
    async with Limiter.connect(proxy.url, options=options) as limiter:
        assert (await limiter.check("r", "s", limits=full)).allowed
        with proxy.in_mode(DropReplies()):
            assert (await limiter.check("r", "lost", limits=HUNDRED)).degraded == "open"
        denied = asyncio.create_task(limiter.check("r", "s", limits=full))
        await asyncio.sleep(0.001)
        other = asyncio.create_task(limiter.check("r", "s", limits=HUNDRED))
        for decision, limit in ((await denied, full), (await other, HUNDRED)):
            assert decision.degraded == "open" or decision.limit == limit.limit
        assert (await denied).degraded == "open" or not (await denied).allowed
