"""A Redis that accepts no connection: callers wait for a connection no longer than for an answer."""

import socket
import threading
import time
from typing import Any

import pytest

from limitforge import FixedWindow, SyncLimiter
from tests.chaos.conftest import Connect
from tests.chaos.waiting import wait_until_store_decides
from tests.proxy import DropReplies, OneByteAtATime, Proxy, unreachable_url
from tests.servers import RedisServer, TlsRedisServer

MANY = FixedWindow(name="many", limit=10**9, window_seconds=86_400)
HANGS_SECONDS = 20.0  # hundreds of deadlines: only a caller that hangs for ever takes longer


def waits(limiter: SyncLimiter, calls: int = 3) -> float:
    """Return the longest time of several checks, all decided without the store."""
    longest = 0.0
    for _ in range(calls):
        began = time.monotonic()
        assert limiter.check("r", "s", limits=MANY).degraded == "open"
        longest = max(longest, time.monotonic() - began)
    return longest


def test_a_connection_that_is_never_accepted_blocks_no_caller(opened: Connect) -> None:
    with unreachable_url() as url:
        assert waits(opened(url, deadline_ms=50)) < HANGS_SECONDS


def test_a_handshake_that_is_never_answered_blocks_no_caller(opened: Connect, proxy: Proxy) -> None:
    proxy.mode = DropReplies()
    assert waits(opened(proxy.url, deadline_ms=50)) < HANGS_SECONDS


def test_a_handshake_that_is_answered_byte_by_byte_blocks_no_caller(opened: Connect, proxy: Proxy) -> None:
    proxy.mode = OneByteAtATime(0.4)
    assert waits(opened(proxy.url, deadline_ms=50)) < HANGS_SECONDS


def test_a_tls_handshake_that_is_never_answered_blocks_no_caller(opened: Connect) -> None:
    with TlsRedisServer() as server, Proxy(server.port) as proxy:
        url = server.url.replace(str(server.port), str(proxy.port))
        limiter = opened(url, deadline_ms=50, breaker_seconds=0.1)
        with proxy.in_mode(DropReplies()):
            assert waits(limiter) < HANGS_SECONDS
        wait_until_store_decides(limiter)


def test_a_name_that_takes_long_to_resolve_blocks_no_caller(
    opened: Connect, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a name server that is down: the resolver of the C library gives up after seconds."""
    resolve, over = socket.getaddrinfo, threading.Event()

    def slowly(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "redis.internal":
            over.wait(2 * HANGS_SECONDS)
            host = "127.0.0.1"
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    limiter = opened(f"redis://redis.internal:{redis_server.port}/0", deadline_ms=50)
    try:
        assert waits(limiter) < HANGS_SECONDS
    finally:
        over.set()


def test_closing_does_not_wait_for_a_redis_that_is_frozen(opened: Connect, own_redis_server: RedisServer) -> None:
    limiter = opened(own_redis_server.url, deadline_ms=50)
    one = FixedWindow(name="one", limit=1, window_seconds=86_400)
    for _ in range(5):  # denials are cached, so the limiter subscribes to invalidations
        limiter.check("r", "s", limits=one)
    own_redis_server.pause()
    waits(limiter)
    began = time.monotonic()
    limiter.close()
    assert time.monotonic() - began < HANGS_SECONDS
    own_redis_server.resume()
