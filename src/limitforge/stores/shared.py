"""What else a Redis is good for beside deciding: copies that every node can read, and messages to all of them.

By redis-py, since none of it is hot. Every wait has an end, and every error is `StoreUnavailable`.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import RedisClusterException, RedisError

from limitforge.errors import StoreUnavailable
from limitforge.stores.fleet import Kind, Target, target_of
from limitforge.stores.listener import pool_of

SECONDS = 1.0  # what one call may take
PLAIN: dict[str, Any] = {
    "decode_responses": False,
    "socket_timeout": SECONDS,
    "socket_connect_timeout": SECONDS,
    "retry_on_timeout": False,
}

# KEYS: 1 the copy. ARGV: 1 the copy anew, which starts with its number (8 bytes, big-endian); 2 its TTL in ms.
# Returns 1 if it was written, 0 if the one that is there is newer. The TTL is the caller's.
PUT_IF_NEWER = """
local known = redis.call('GETRANGE', KEYS[1], 0, 7)
if #known == 8 and known > string.sub(ARGV[1], 1, 8) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class SharedRedis:
    """One Redis, Sentinel set or Cluster, as it is behind a store's URL. Nothing is opened before the first use."""

    def __init__(self, url: str) -> None:
        self._target = target_of(url)
        self._client: Any = None

    async def get(self, key: str) -> bytes | None:
        with _translated():
            found: bytes | None = await self._opened().get(key)
            return found

    async def put(self, key: str, copy: bytes, ttl_seconds: float) -> None:
        """Unless a newer one is there: copies start with their number, in 8 bytes."""
        with _translated():
            await self._opened().eval(PUT_IF_NEWER, 1, key, copy, int(ttl_seconds * 1_000))

    async def claim(self, key: str, ttl_seconds: float) -> bool:
        """Whether nobody else had it: for work that one of many shall do."""
        with _translated():
            return bool(await self._opened().set(key, b"1", nx=True, px=int(ttl_seconds * 1_000)))

    async def publish(self, channel: str, message: bytes) -> None:
        with _translated():
            if self._target.kind is Kind.CLUSTER:
                await self._opened().execute_command("PUBLISH", channel, message)
            else:
                await self._opened().publish(channel, message)

    async def listen(self, channel: str) -> AsyncIterator[bytes | None]:
        """Messages as they come, for as long as the connection lasts; None once somebody listens."""
        with _translated():
            async with await self._listening() as client, client.pubsub() as pubsub:
                await pubsub.subscribe(channel)
                async for message in pubsub.listen():
                    if message["type"] == "subscribe":
                        yield None
                    elif message["type"] == "message":
                        yield message["data"]

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    def _opened(self) -> Any:
        if self._client is None:
            self._client = _client(self._target)
        return self._client

    async def _listening(self) -> Any:
        """A client for one connection that may be silent for long; on a Cluster, of any of its servers."""
        target = self._target
        if target.kind is Kind.SENTINEL:
            return _sentinel(target).master_for(target.service, **_options(target, socket_timeout=None))
        if target.kind is Kind.CLUSTER:
            cluster: Any = self._opened()
            await cluster.initialize()
            node = cluster.get_random_node()
            return redis.asyncio.Redis.from_pool(pool_of(redis.asyncio, target.server.at(node.host, node.port)))
        return redis.asyncio.Redis.from_pool(pool_of(redis.asyncio, target.server))


def _client(target: Target) -> Any:
    if target.kind is Kind.SENTINEL:
        return _sentinel(target).master_for(target.service, **_options(target))
    if target.kind is Kind.CLUSTER:
        seeds = [ClusterNode(seed.host, seed.port) for seed in target.seeds]
        options = {name: value for name, value in _options(target).items() if name not in ("db", "retry_on_timeout")}
        return RedisCluster(startup_nodes=seeds, **options)
    return redis.asyncio.Redis.from_pool(pool_of(redis.asyncio, target.server, **PLAIN))


def _sentinel(target: Target) -> Any:
    own = {k: v for k, v in target.seeds[0].options.items() if k not in ("host", "port", "db", "path")}
    seeds = [(seed.host, seed.port) for seed in target.seeds]
    make: Any = Sentinel
    return make(seeds, sentinel_kwargs={**own, **PLAIN, **_tls(target)})


def _options(target: Target, **others: Any) -> dict[str, Any]:
    own = {k: v for k, v in target.server.options.items() if k not in ("host", "port", "path")}
    return {**own, **PLAIN, **_tls(target), **others}


def _tls(target: Target) -> dict[str, Any]:
    return {"ssl": True} if target.server.tls is not None else {}


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        raise StoreUnavailable(
            f"Redis can't be reached for what nodes share: {str(error) or type(error).__name__}"
        ) from None
