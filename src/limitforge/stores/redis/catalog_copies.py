"""What else a Redis is good for beside deciding: copies that every node can read, and messages to all of them.

Connections are redis-py's, since none of it is hot; which server is asked is found out as the store does it. Every wait
has an end, and every error is `StoreUnavailable`.
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
from limitforge.stores.redis.client import create_pool
from limitforge.stores.redis.resp import Address
from limitforge.stores.redis.topology.hash_slots import hash_slot
from limitforge.stores.redis.topology.topology import DeploymentKind, HostPort, parse_owners, parse_store_url

CALL_SECONDS = 1.0  # what one call may take
MAX_BYTES = 32 * 1_048_576  # of what is read; 1,000 plans and 20,000 policies have 16 MiB
MAX_CONNECTIONS = 8  # to one server; whoever finds them all busy waits
SILENCE_SECONDS = 15.0  # a listener that hears nothing for so long, not even an answer to a ping, is cut off
PING_SECONDS = 5.0

# KEYS: 1 the copy. ARGV: 1 the copy anew, which starts with its number (8 bytes, big-endian); 2 its TTL in ms.
# Returns 1 if it was written, 0 if the one that is there is newer. The TTL is the caller's.
PUT_IF_NEWER = """
local function number(copy)
  local high, low = struct.unpack('>I4I4', copy)  -- strings would be compared by the server's language
  return high * 4294967296 + low
end
local known = redis.call('GETRANGE', KEYS[1], 0, 7)
if #known == 8 and number(known) > number(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


# KEYS: 1 the lease. ARGV: 1 its owner; 2 its TTL in ms, after which anyone may take it.
# Returns 1 if the owner has it now, 0 if another has. Writes the owner under the key.
ACQUIRE_LOCK = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# KEYS: 1 the lease. ARGV: 1 its owner. Deletes the lease if it is the owner's, and returns how many that were.
RELEASE_LOCK = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class ServerMemory(msgspec.Struct, frozen=True):
    """How a Redis server uses its memory: `limit_bytes` is 0 if it has no limit, `evicted` counts since its start."""

    limit_bytes: int
    policy: str
    evicted: int


class CatalogRedis:
    """One Redis, Sentinel set or Cluster, as it is behind a store's URL. Nothing is opened before the first use."""

    def __init__(self, url: str) -> None:
        self._deployment = parse_store_url(url)
        self._owners: list[HostPort | None] = []
        self._clients: dict[HostPort | None, Any] = {}

    async def get(self, key: str) -> bytes | None:
        """Return what is stored, cut off after `MAX_BYTES`; None if nothing is."""
        found: bytes = await self._call(key, "GETRANGE", encode_key(key), 0, MAX_BYTES - 1)
        return found or None

    async def put(self, key: str, copy: bytes, ttl_seconds: float) -> None:
        """Unless a newer one is there: copies start with their number, in 8 bytes."""
        await self._call(key, "EVAL", PUT_IF_NEWER, 1, encode_key(key), copy, int(ttl_seconds * 1_000))

    async def put_many(self, copies: Mapping[str, bytes], ttl_seconds: float) -> None:
        """The same for many copies, by their keys, in one call to each server.

        A server that fails does not affect the copies on others. Raises `PartialFailure` with the keys that were not
        written.
        """
        left: Mapping[str, bytes] = copies
        problem: Exception | None = None
        for _ in range(
            1 if self._deployment.kind is DeploymentKind.SINGLE else 2
        ):  # the second time elsewhere, if a slot has moved
            left, problem = await self._put_many(left, int(ttl_seconds * 1_000))
            if problem is None:
                return
            self._owners = []
        raise PartialFailure(f"{len(left)} of {len(copies)} copies were not written: {_describe(problem)}", left)

    async def _put_many(self, copies: Mapping[str, bytes], ttl_ms: int) -> tuple[dict[str, bytes], Exception | None]:
        """Try each server once. Return the copies that were not written, and the first error."""
        by_client: dict[Any, dict[str, bytes]] = {}
        left: dict[str, bytes] = {}
        problem: Exception | None = None
        for key, copy in copies.items():
            try:
                by_client.setdefault(await self._client_for_key(key), {})[key] = copy
            except (RedisError, OSError, TimeoutError, StoreUnavailable) as error:
                if not self._owners:
                    return dict(copies), error
                left[key], problem = copy, problem or error
        answers = await asyncio.gather(*(_put_all(client, some, ttl_ms) for client, some in by_client.items()))
        for some, errors in zip(by_client.values(), answers, strict=True):
            for key, why in zip(some, errors, strict=True):
                if why is not None:
                    left[key], problem = some[key], problem or why
        return left, problem

    async def acquire_lock(self, key: str, owner: bytes, ttl_seconds: float) -> bool:
        """Take or extend a lease. False if another owner has it."""
        return bool(await self._call(key, "EVAL", ACQUIRE_LOCK, 1, encode_key(key), owner, int(ttl_seconds * 1_000)))

    async def release_lock(self, key: str, owner: bytes) -> None:
        """Give a lease back, if this owner has it."""
        await self._call(key, "EVAL", RELEASE_LOCK, 1, encode_key(key), owner)

    async def claim(self, key: str, ttl_seconds: float) -> bool:
        """Claim work that one of many does; True if no one had claimed it."""
        return bool(await self._call(key, "SET", encode_key(key), b"1", "NX", "PX", int(ttl_seconds * 1_000)))

    async def memory(self) -> dict[str, ServerMemory]:
        """Ask each server that decides how it uses its memory, by its address."""
        found = {}
        with _translated():
            try:
                for address in await self._servers():
                    client = self._client_of(address)
                    stats, memory = await client.info("stats"), await client.info("memory")
                    found[address.path or f"{address.host}:{address.port}"] = ServerMemory(
                        int(memory.get("maxmemory", 0)),
                        str(memory.get("maxmemory_policy", "noeviction")),
                        int(stats.get("evicted_keys", 0)),
                    )
            except (RedisError, OSError, TimeoutError):
                self._owners = []  # one of them may have been replaced
                raise
        return found

    async def publish(self, channel: str, message: bytes) -> None:
        """Send a message to all that listen. Each server of a Cluster passes it on to the others."""

        async def call() -> None:
            problem: Exception | None = None
            for address in await self._servers():
                try:
                    await self._client_of(address).execute_command("PUBLISH", channel, message)
                except (RedisError, OSError, TimeoutError) as error:
                    problem = error
                else:
                    return
            raise problem or StoreUnavailable("no server of the Cluster has any slot")

        await self._with_retry(call)

    async def listen(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """Messages as they come, for as long as the connection lasts; None once somebody listens."""
        with _translated():
            if self._deployment.kind is not DeploymentKind.SINGLE:
                await self._discover()
            async with await self._first_client() as client, client.pubsub() as pubsub:
                await pubsub.subscribe(channel)
                heard, asked, is_in = time.monotonic(), time.monotonic(), False
                while True:
                    message = await pubsub.get_message(timeout=CALL_SECONDS)
                    now = time.monotonic()
                    if message is not None:
                        heard = now
                        if message["type"] == "subscribe":
                            is_in = True
                            yield None
                        elif message["type"] == "message":
                            yield message["data"]
                    elif now - heard > (SILENCE_SECONDS if is_in else CALL_SECONDS):
                        raise TimeoutError("the server has fallen silent")
                    elif is_in and now - asked > PING_SECONDS:
                        asked = now
                        await pubsub.ping()

    async def close(self) -> None:
        clients, self._clients, self._owners = list(self._clients.values()), {}, []
        for client in clients:
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    async def _call(self, key: str, *command: Any) -> Any:
        async def call() -> Any:
            return await (await self._client_for_key(key)).execute_command(*command)

        return await self._with_retry(call)

    async def _with_retry(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Once more where it may have been the wrong server, or a connection that was closed meanwhile: all of these
        may be done twice.
        """
        with _translated():
            try:
                return await call()
            except (RedisError, OSError, TimeoutError):
                self._owners = []
                if self._deployment.kind is DeploymentKind.SINGLE:
                    raise
            return await call()

    async def _first_client(self) -> Any:
        """A new client of the first server that answers: any of a Cluster receives all messages."""
        problem: Exception | None = None
        for address in await self._servers():
            client = _client(address, 1)
            try:
                await client.ping()
            except BaseException as error:
                await client.aclose()
                if not isinstance(error, RedisError | OSError | TimeoutError):
                    raise
                problem = error
            else:
                return client
        raise problem or StoreUnavailable("no server of the Cluster has any slot")

    async def _client_for_key(self, key: str) -> Any:
        """A client of the server that decides about a key."""
        return self._client_of(await self._address_for_key(key))

    def _client_of(self, address: Address) -> Any:
        place = None if self._deployment.kind is DeploymentKind.SINGLE else (address.host, address.port)
        if place not in self._clients:
            self._clients[place] = _client(address, MAX_CONNECTIONS)
        return self._clients[place]

    async def _address_for_key(self, key: str) -> Address:
        if self._deployment.kind is DeploymentKind.SINGLE:
            return self._deployment.server_template
        owners = self._owners or await self._discover()
        slot = hash_slot(key) if self._deployment.kind is DeploymentKind.CLUSTER else 0
        place = owners[slot]
        if place is None:
            raise StoreUnavailable(f"no server of the Cluster has slot {slot}")
        return self._deployment.server_template.at(*place)

    async def _servers(self) -> list[Address]:
        """All that decide about anything."""
        if self._deployment.kind is DeploymentKind.SINGLE:
            return [self._deployment.server_template]
        owners = self._owners or await self._discover()
        return [self._deployment.server_template.at(*place) for place in dict.fromkeys(owners) if place is not None]

    async def _discover(self) -> list[HostPort | None]:
        """Ask who decides; those that are no longer anybody are let go of."""
        is_sentinel = self._deployment.kind is DeploymentKind.SENTINEL
        question = (
            ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._deployment.master_name)
            if is_sentinel
            else ("CLUSTER", "SLOTS")
        )
        known = (
            []
            if is_sentinel
            else [self._deployment.server_template.at(*place) for place in self._clients if place is not None]
        )
        problem: Exception | None = None
        for address in (*self._deployment.seeds, *known):
            try:
                async with _client(address, 1) as client:
                    client.response_callbacks.clear()
                    owners = parse_owners(self._deployment.kind, address, await client.execute_command(*question))
            except (RedisError, OSError, TimeoutError) as error:
                problem = error
                continue
            if owners:
                self._owners = owners
                await self._close_clients_except(set(owners))
                return owners
        raise StoreUnavailable(f"none of the servers of the URL knows who decides: {problem}")

    async def _close_clients_except(self, owners: set[HostPort | None]) -> None:
        for place in self._clients.keys() - owners:
            with contextlib.suppress(RedisError, OSError):
                await self._clients.pop(place).aclose()


def _client(address: Address, connections: int) -> Any:
    pool = create_pool(
        redis.asyncio,
        address,
        blocking=True,
        max_connections=connections,
        timeout=CALL_SECONDS,
        decode_responses=False,
        socket_timeout=CALL_SECONDS,
        socket_connect_timeout=CALL_SECONDS,
        retry=Retry(NoBackoff(), 1),  # an idle connection may have been closed by the other side
    )
    client: Any = redis.asyncio.Redis.from_pool(pool)
    return client


async def _put_all(client: Any, copies: Mapping[str, bytes], ttl_ms: int) -> list[Exception | None]:
    """Write copies on one server. Return the error of each, None where it was written or a newer one was there."""
    pipeline = client.pipeline(transaction=False)
    for key, copy in copies.items():
        pipeline.execute_command("EVAL", PUT_IF_NEWER, 1, encode_key(key), copy, ttl_ms)
    try:
        answers = await pipeline.execute(raise_on_error=False)
    except (RedisError, OSError, TimeoutError) as error:
        return [error] * len(copies)
    return [answer if isinstance(answer, Exception) else None for answer in answers]


def _describe(error: Exception | None) -> str:
    return str(error) or type(error).__name__


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise StoreUnavailable(f"Redis can't be reached for what nodes share: {_describe(error)}") from None
