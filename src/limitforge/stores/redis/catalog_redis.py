"""What the catalog keeps in Redis: copies of configuration, change messages, locks and the memory use of servers.

None of this is on the hot path, so connections are those of redis-py. Discovery is the same as for the store. Every
wait has a timeout, and every error is a `StoreUnavailable`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from limitforge.core.keys import encode_key
from limitforge.errors import PartialFailure, StoreUnavailable
from limitforge.stores.redis.address import Address
from limitforge.stores.redis.redis_py_pool import create_pool
from limitforge.stores.redis.topology.deployment import DeploymentKind, parse_store_url
from limitforge.stores.redis.topology.discovery import (
    DiscoveryQuery,
    HostPort,
    Owners,
    discover_owners,
    uncovered_slot_error,
)
from limitforge.stores.redis.topology.hash_slots import hash_slot

CALL_SECONDS = 1.0  # timeout of one call
MAX_BYTES = 32 * 1_048_576  # of one copy; 1,000 plans and 20,000 policies take 16 MiB
MAX_CONNECTIONS = 8  # to one server; further calls wait
SILENCE_SECONDS = 15.0  # a subscription that receives nothing for so long, not even a PONG, is closed
PING_SECONDS = 5.0

# KEYS: 1 the copy. ARGV: 1 the new copy, which starts with its version (8 bytes, big-endian); 2 its TTL in ms.
# Returns 1 if it was written, 0 if the stored copy is newer.
PUT_IF_NEWER = """
local function version(copy)
  local high, low = struct.unpack('>I4I4', copy)  -- comparing strings would depend on the locale of the server
  return high * 4294967296 + low
end
local stored = redis.call('GETRANGE', KEYS[1], 0, 7)
if #stored == 8 and version(stored) > version(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


# KEYS: 1 the lock. ARGV: 1 its owner; 2 its TTL in ms, after which others can acquire it.
# Returns 1 if the owner holds the lock now, 0 if another one does. Writes the owner under the key.
ACQUIRE_LOCK = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# KEYS: 1 the lock. ARGV: 1 its owner. Deletes the lock if this owner holds it, and returns how many keys were deleted.
RELEASE_LOCK = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class ServerMemory(msgspec.Struct, frozen=True):
    """The memory use of a Redis server. `limit_bytes` is 0 without a limit, `evicted` counts since its start."""

    limit_bytes: int
    policy: str
    evicted: int


class CatalogRedis:
    """One Redis server, Sentinel set or Cluster, given by the URL of a store. It connects on first use."""

    def __init__(self, url: str) -> None:
        self._deployment = parse_store_url(url)
        self._owners: Owners = []
        self._clients: dict[HostPort | None, Any] = {}

    async def get(self, key: str) -> bytes | None:
        """Return what is stored under a key, at most `MAX_BYTES` of it, or None."""
        stored: bytes = await self._call(key, "GETRANGE", encode_key(key), 0, MAX_BYTES - 1)
        return stored or None

    async def put(self, key: str, copy: bytes, ttl_seconds: float) -> None:
        """Store a copy, unless a newer one is stored. A copy starts with its version, 8 bytes big-endian."""
        await self._call(key, "EVAL", PUT_IF_NEWER, 1, encode_key(key), copy, int(ttl_seconds * 1_000))

    async def put_many(self, copies: Mapping[str, bytes], ttl_seconds: float) -> None:
        """Store several copies by their keys, in one call to each server.

        A server that fails does not affect the copies on others. Raises `PartialFailure` with the keys that were not
        written.
        """
        not_written: Mapping[str, bytes] = copies
        problem: Exception | None = None
        attempts = 1 if self._is_single else 2  # the second attempt follows slots that have moved
        for _ in range(attempts):
            not_written, problem = await self._put_many(not_written, int(ttl_seconds * 1_000))
            if problem is None:
                return
            self._owners = []
        message = f"{len(not_written)} of {len(copies)} copies were not written: {_describe(problem)}"
        raise PartialFailure(message, not_written)

    async def _put_many(self, copies: Mapping[str, bytes], ttl_ms: int) -> tuple[dict[str, bytes], Exception | None]:
        """Try each server once. Return the copies that were not written, and the first error."""
        copies_of: dict[Any, dict[str, bytes]] = {}
        not_written: dict[str, bytes] = {}
        problem: Exception | None = None
        for key, copy in copies.items():
            try:
                copies_of.setdefault(await self._client_for_key(key), {})[key] = copy
            except (RedisError, OSError, TimeoutError, StoreUnavailable) as error:
                if not self._owners:
                    return dict(copies), error
                not_written[key], problem = copy, problem or error
        results = await asyncio.gather(*(_put_all(client, some, ttl_ms) for client, some in copies_of.items()))
        for some, errors in zip(copies_of.values(), results, strict=True):
            for key, failure in zip(some, errors, strict=True):
                if failure is not None:
                    not_written[key], problem = some[key], problem or failure
        return not_written, problem

    async def acquire_lock(self, key: str, owner: bytes, ttl_seconds: float) -> bool:
        """Acquire a lock, or extend it. Return False if another owner holds it."""
        return bool(await self._call(key, "EVAL", ACQUIRE_LOCK, 1, encode_key(key), owner, int(ttl_seconds * 1_000)))

    async def release_lock(self, key: str, owner: bytes) -> None:
        """Release a lock, if this owner holds it."""
        await self._call(key, "EVAL", RELEASE_LOCK, 1, encode_key(key), owner)

    async def claim(self, key: str, ttl_seconds: float) -> bool:
        """Claim a task that only one process must do. Return False if it is claimed already."""
        return bool(await self._call(key, "SET", encode_key(key), b"1", "NX", "PX", int(ttl_seconds * 1_000)))

    async def memory(self) -> dict[str, ServerMemory]:
        """Return the memory use of each master, by its address."""
        memory_of = {}
        with _translated_errors():
            try:
                for address in await self._masters():
                    client = self._client_of(address)
                    stats, memory = await client.info("stats"), await client.info("memory")
                    memory_of[address.name] = ServerMemory(
                        int(memory.get("maxmemory", 0)),
                        str(memory.get("maxmemory_policy", "noeviction")),
                        int(stats.get("evicted_keys", 0)),
                    )
            except (RedisError, OSError, TimeoutError):
                self._owners = []  # one of them may have been replaced
                raise
        return memory_of

    async def publish(self, channel: str, message: bytes) -> None:
        """Publish a message to all listeners. On a Cluster, the server that receives it forwards it to all others."""

        async def call() -> None:
            problem: Exception | None = None
            for address in await self._masters():
                try:
                    await self._client_of(address).execute_command("PUBLISH", channel, message)
                except (RedisError, OSError, TimeoutError) as error:
                    problem = error
                else:
                    return
            raise problem or _no_master_error()

        await self._with_retry(call)

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Yield None once the subscription is active, then each message, until the connection is lost."""
        with _translated_errors():
            if not self._is_single:
                await self._discover()
            async with await self._first_client() as client, client.pubsub() as pubsub:
                await pubsub.subscribe(channel)
                received_at, pinged_at, is_subscribed = time.monotonic(), time.monotonic(), False
                while True:
                    message = await pubsub.get_message(timeout=CALL_SECONDS)
                    now = time.monotonic()
                    if message is not None:
                        received_at = now
                        if message["type"] == "subscribe":
                            is_subscribed = True
                            yield None
                        elif message["type"] == "message":
                            yield message["data"]
                    elif now - received_at > (SILENCE_SECONDS if is_subscribed else CALL_SECONDS):
                        raise TimeoutError("the server has stopped answering")
                    elif is_subscribed and now - pinged_at > PING_SECONDS:
                        pinged_at = now
                        await pubsub.ping()

    async def close(self) -> None:
        clients, self._clients, self._owners = list(self._clients.values()), {}, []
        for client in clients:
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    @property
    def _is_single(self) -> bool:
        return self._deployment.kind is DeploymentKind.SINGLE

    async def _call(self, key: str, *command: Any) -> Any:
        async def call() -> Any:
            return await (await self._client_for_key(key)).execute_command(*command)

        return await self._with_retry(call)

    async def _with_retry(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat a failed call after a new discovery, unless there is one server. All calls are idempotent."""
        with _translated_errors():
            try:
                return await call()
            except (RedisError, OSError, TimeoutError):
                self._owners = []
                if self._is_single:
                    raise
            return await call()

    async def _first_client(self) -> Any:
        """Return a new client of the first master that answers. Any server of a Cluster receives all messages."""
        problem: Exception | None = None
        for address in await self._masters():
            client = _create_client(address, 1)
            try:
                await client.ping()
            except BaseException as error:
                await client.aclose()
                if not isinstance(error, RedisError | OSError | TimeoutError):
                    raise
                problem = error
            else:
                return client
        raise problem or _no_master_error()

    # -- discovery

    async def _client_for_key(self, key: str) -> Any:
        return self._client_of(await self._address_for_key(key))

    def _client_of(self, address: Address) -> Any:
        host_port = None if self._is_single else (address.host, address.port)
        if host_port not in self._clients:
            self._clients[host_port] = _create_client(address, MAX_CONNECTIONS)
        return self._clients[host_port]

    async def _address_for_key(self, key: str) -> Address:
        if self._is_single:
            return self._deployment.server_template
        owners = self._owners or await self._discover()
        slot = hash_slot(key) if self._deployment.kind is DeploymentKind.CLUSTER else 0
        host_port = owners[slot]
        if host_port is None:
            raise uncovered_slot_error(slot)
        return self._deployment.server_template.at(*host_port)

    async def _masters(self) -> list[Address]:
        if self._is_single:
            return [self._deployment.server_template]
        owners = self._owners or await self._discover()
        return [
            self._deployment.server_template.at(*host_port)
            for host_port in dict.fromkeys(owners)
            if host_port is not None
        ]

    async def _discover(self) -> Owners:
        """Find the current masters, and close the clients of all others."""
        is_cluster = self._deployment.kind is DeploymentKind.CLUSTER
        masters = [
            self._deployment.server_template.at(*host_port) for host_port in self._clients if host_port and is_cluster
        ]
        flow = discover_owners(self._deployment, [*self._deployment.seeds, *masters])
        try:
            query = next(flow)
            while True:
                query = flow.send(await _send_query(query))
        except StopIteration as done:
            self._owners = done.value
        await self._close_clients_except(set(self._owners))
        return self._owners

    async def _close_clients_except(self, owners: set[HostPort | None]) -> None:
        for host_port in self._clients.keys() - owners:
            with contextlib.suppress(RedisError, OSError):
                await self._clients.pop(host_port).aclose()


async def _send_query(query: DiscoveryQuery) -> Any:
    """Send a discovery query on a connection of its own. Return the reply, or the error that prevented one."""
    try:
        async with _create_client(query.address, 1) as client:
            client.response_callbacks.clear()
            return await client.execute_command(*query.command)
    except (RedisError, OSError, TimeoutError) as error:
        return error


def _create_client(address: Address, max_connections: int) -> Any:
    pool = create_pool(
        redis.asyncio,
        address,
        blocking=True,
        max_connections=max_connections,
        timeout=CALL_SECONDS,
        decode_responses=False,
        socket_timeout=CALL_SECONDS,
        socket_connect_timeout=CALL_SECONDS,
        retry=Retry(NoBackoff(), 1),  # the server may have closed an idle connection
    )
    client: Any = redis.asyncio.Redis.from_pool(pool)
    return client


async def _put_all(client: Any, copies: Mapping[str, bytes], ttl_ms: int) -> list[Exception | None]:
    """Write copies on one server. Return the error of each, or None if it was written or a newer one is stored."""
    pipeline = client.pipeline(transaction=False)
    for key, copy in copies.items():
        pipeline.execute_command("EVAL", PUT_IF_NEWER, 1, encode_key(key), copy, ttl_ms)
    try:
        replies = await pipeline.execute(raise_on_error=False)
    except (RedisError, OSError, TimeoutError) as error:
        return [error] * len(copies)
    return [reply if isinstance(reply, Exception) else None for reply in replies]


def _no_master_error() -> StoreUnavailable:
    return StoreUnavailable("no server of the Cluster owns any slot")


def _describe(error: Exception | None) -> str:
    return str(error) or type(error).__name__


@contextlib.contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise StoreUnavailable(f"Redis is unreachable for the catalog: {_describe(error)}") from None
