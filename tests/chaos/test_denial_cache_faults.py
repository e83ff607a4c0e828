"""Cached denials are dropped in every process when they may be outdated, also after lost messages."""

import time

import pytest

from limitforge import FixedWindow, SyncLimiter
from tests.chaos.conftest import Connect
from tests.chaos.waiting import eventually, wait_until_store_decides
from tests.proxy import CloseConnections, Proxy
from tests.servers import RedisServer

pytestmark = pytest.mark.slow

ONE = FixedWindow(name="one", limit=1, window_seconds=86_400, align="first_hit")
LONG = {"failure": "raise", "deadline_ms": 10_000, "denial_cache_ms": 60_000}


def allowed(limiter: SyncLimiter) -> bool:
    return limiter.check("r", "s", limits=ONE).allowed


def exhaust(limiter: SyncLimiter) -> None:
    """Exhaust the limit, so that further denials come from the cache and not from Redis."""
    limiter.check("r", "s", limits=ONE)
    hits = limiter.status().denial_hits
    eventually(lambda: not allowed(limiter) and limiter.status().denial_hits > hits + 3)


def free(limiter: SyncLimiter, way: str) -> None:
    if way == "reset":
        limiter.reset("r", "s", limits=ONE)
    elif way == "override":
        limiter.set_override("r", "s", {"one": {"limit": 5}}, limits=ONE, ttl_seconds=60)
    else:
        limiter.set_override("*", "s", {"one": "unlimited"}, limits=ONE, ttl_seconds=60)


@pytest.mark.parametrize("way", ["reset", "override", "override-of-all"])
def test_the_process_that_makes_room_admits_at_once(opened: Connect, redis_url: str, way: str) -> None:
    limiter = opened(redis_url, **LONG)
    exhaust(limiter)
    free(limiter, way)
    assert allowed(limiter)


@pytest.mark.parametrize("way", ["reset", "override", "override-of-all"])
def test_other_processes_receive_the_invalidation(opened: Connect, redis_url: str, way: str) -> None:
    here, there = opened(redis_url, **LONG), opened(redis_url, **LONG)
    exhaust(here)
    exhaust(there)
    free(here, way)
    eventually(lambda: allowed(there))  # long before the cached denial expires


def test_other_processes_notice_it_after_a_lost_connection(opened: Connect, own_redis_server: RedisServer) -> None:
    here, there = opened(own_redis_server.url, **LONG), opened(own_redis_server.url, **LONG)
    for _ in range(3):
        here.reset("r", "s", limits=ONE)
        exhaust(there)
        own_redis_server.command("CLIENT KILL TYPE pubsub")
        here.reset("r", "s", limits=ONE)
        eventually(lambda: allowed(there))  # long before the cached denial expires


def test_a_process_that_may_not_subscribe_asks_again_long_before_the_window_ends(
    opened: Connect, own_redis_server: RedisServer
) -> None:
    own_redis_server.command_ok("ACL SETUSER default resetchannels")
    options = {"failure": "raise", "deadline_ms": 10_000, "denial_cache_ms": 500}
    here, there = opened(own_redis_server.url, **options), opened(own_redis_server.url, **options)
    exhaust(there)
    here.reset("r", "s", limits=ONE)
    eventually(lambda: allowed(there))  # long before the window ends
    assert there.status().breaker == "closed"


def test_a_restart_that_forgets_the_counts_is_noticed_long_before_the_window_ends(
    opened: Connect, own_redis_server: RedisServer
) -> None:
    limiter = opened(
        own_redis_server.url, failure="closed", deadline_ms=1_000, denial_cache_ms=500, breaker_seconds=0.1
    )
    exhaust(limiter)
    own_redis_server.restart()
    wait_until_store_decides(limiter)
    eventually(lambda: allowed(limiter))  # long before the window ends


def test_a_cached_denial_is_not_an_admission_when_the_store_is_gone(opened: Connect, proxy: Proxy) -> None:
    limiter = opened(proxy.url, failure="closed", denial_cache_ms=60_000)
    exhaust(limiter)
    with proxy.in_mode(CloseConnections()):
        assert not any(allowed(limiter) for _ in range(20))


def test_waiting_as_long_as_a_cached_denial_says_is_enough(opened: Connect, redis_url: str) -> None:
    limiter = opened(redis_url, **LONG)
    short = FixedWindow(name="short", limit=1, window_seconds=1.5, align="first_hit")
    limiter.check(
        "r", "other", limits=short
    )  # connect first, so that the next four checks take much less than a window
    decisions = [limiter.check("r", "s", limits=short) for _ in range(4)]
    assert [decision.allowed for decision in decisions] == [True, False, False, False]
    waits = [decision.retry_after_ms or 0 for decision in decisions[1:]]
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] > 0
    time.sleep(waits[-1] / 1_000)
    assert limiter.check("r", "s", limits=short).allowed
