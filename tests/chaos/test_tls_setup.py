"""Setting up connections, above all by TLS: one context for all of them, and no socket left open by what is cancelled
midway.
"""

import asyncio
import gc
import os
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from limitforge import FixedWindow, Limiter, StoreUnavailable
from limitforge.stores.redis.address import parse_address
from limitforge.stores.redis.aio.connection import Connection
from limitforge.stores.redis.catalog_redis import CatalogRedis
from tests.chaos.waiting import eventually
from tests.proxy import DropReplies, Proxy
from tests.servers import RedisServer, TlsRedisServer

FIVE = FixedWindow(name="five", limit=5, window_seconds=86_400, align="first_hit")
STALL_SECONDS = 0.003

Call = Callable[[], Awaitable[Any]]
Opened = Callable[[RedisServer], AbstractAsyncContextManager[Call]]


@pytest.fixture(autouse=True)
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the trusted authorities of the system takes most of the time of these tests, which do not use them."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    monkeypatch.setenv("SSL_CERT_DIR", os.devnull)


@pytest.fixture(scope="module")
def tls() -> Iterator[TlsRedisServer]:
    with TlsRedisServer() as server:
        yield server


async def test_connections_of_the_catalog_share_one_tls_context(
    tls: TlsRedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = CatalogRedis(tls.url)
    monkeypatch.delattr(ssl, "create_default_context")  # creating another context fails
    await asyncio.gather(*(redis.get(f"key-{number}") for number in range(20)))
    await redis.close()


async def test_after_a_handshake_that_was_cancelled_the_pool_connects_again(tls: TlsRedisServer) -> None:
    with Proxy(tls.port) as proxy:
        redis = CatalogRedis(tls.url.replace(str(tls.port), str(proxy.port)))
        with proxy.in_mode(DropReplies()):
            asked = asyncio.ensure_future(redis.get("key"))
            await asyncio.to_thread(eventually, lambda: proxy.accepted > 0)
            await asyncio.sleep(0.05)  # it waits for the reply to its ClientHello
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            with pytest.raises(StoreUnavailable, match="Timeout connecting"):
                await redis.get("key")
        for _ in range(3):
            assert await redis.get("key") is None
        await redis.close()


@asynccontextmanager
async def connection(server: RedisServer) -> AsyncIterator[Call]:
    async def open_and_close() -> None:
        (await Connection.open(parse_address(server.url), lambda *_: None, 30)).abort()

    yield open_and_close


@asynccontextmanager
async def shared(server: RedisServer) -> AsyncIterator[Call]:
    redis = CatalogRedis(server.url)
    yield lambda: redis.get("key")
    await redis.close()


@asynccontextmanager
async def listener(server: RedisServer) -> AsyncIterator[Call]:
    async def listen() -> None:
        async for _ in CatalogRedis(server.url).listen("channel"):
            return

    yield listen


@asynccontextmanager
async def limiter(server: RedisServer) -> AsyncIterator[Call]:
    async with Limiter.connect(server.url) as opened:
        yield lambda: opened.check("r", "s", limits=FIVE)


@pytest.mark.parametrize("opened", [connection, shared, listener, limiter])
@pytest.mark.parametrize("encrypted", [True, False])
def test_what_is_cancelled_while_it_connects_leaves_no_socket_open(
    tls: TlsRedisServer, redis_server: RedisServer, opened: Opened, *, encrypted: bool
) -> None:
    """Cancel after each number of loop iterations. The loop stalls in between, so that the server is ready."""
    server = tls if encrypted else redis_server

    async def is_done_after(turns: int) -> bool:
        async with opened(server) as call:
            task = asyncio.ensure_future(call())
            for _ in range(turns):
                await asyncio.sleep(0)
                time.sleep(STALL_SECONDS)  # noqa: ASYNC251
            is_done = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return is_done

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for turns in range(40):
            if asyncio.run(is_done_after(turns)):
                break
        gc.collect()
    assert [str(each.message) for each in said if issubclass(each.category, ResourceWarning)] == []
