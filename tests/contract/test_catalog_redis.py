"""Copies, locks and messages of the catalog in Redis: one server (password, TLS, socket), Sentinel, Cluster."""

import asyncio
import gc
import shutil
import struct
import subprocess
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

import pytest

from limitforge.errors import InvalidInput, PartialFailure, StoreUnavailable
from limitforge.stores.redis import catalog_redis as shared_redis
from limitforge.stores.redis.catalog_redis import CatalogRedis
from limitforge.stores.redis.topology.hash_slots import hash_slot
from tests.proxy import CloseConnections, DropReplies, Garbage, Proxy, unreachable_url
from tests.servers import AclRedisServer, RedisServer, TlsRedisServer, UnixRedisServer
from tests.topologies import RedisCluster, SentinelGroup

PATIENCE_SECONDS = 45.0
CALL_SECONDS = 15.0  # generous: one call times out after a second


class HasUrl(Protocol):
    @property
    def url(self) -> str: ...


SINGLE = {"plain": RedisServer, "password": AclRedisServer, "tls": TlsRedisServer, "unix": UnixRedisServer}


@pytest.fixture(scope="module", params=[*SINGLE, "sentinel", "cluster", "cluster with password"])
def servers(request: pytest.FixtureRequest) -> Iterator[HasUrl]:
    if request.param == "sentinel":
        yield request.getfixturevalue("sentinel_servers")
    elif request.param == "cluster":
        yield request.getfixturevalue("cluster_servers")
    elif request.param == "cluster with password":
        with RedisCluster(masters=3, replicas=0, password="p/a@s:s") as cluster:  # noqa: S106
            yield cluster
    else:
        with SINGLE[request.param]() as server:
            yield server


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine twenty calls at once may take longer than the second that one call has."""
    monkeypatch.setattr(shared_redis, "CALL_SECONDS", 20.0)


@pytest.fixture
async def shared(servers: HasUrl, patient: None) -> AsyncIterator[CatalogRedis]:
    shared = CatalogRedis(servers.url)
    yield shared
    await shared.close()


@pytest.fixture
async def other(servers: HasUrl, patient: None) -> AsyncIterator[CatalogRedis]:
    """The object of another process."""
    other = CatalogRedis(servers.url)
    yield other
    await other.close()


def numbered_copy(number: int, rest: bytes = b"") -> bytes:
    return struct.pack(">Q", number) + rest


async def eventually(is_so: Callable[[], Any]) -> float:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < PATIENCE_SECONDS
        await asyncio.sleep(0.005)
    return time.monotonic() - began


class RecordingListener:
    """Listens until the context ends, and subscribes again after each disconnection."""

    def __init__(self, shared: CatalogRedis, channel: str) -> None:
        self.messages: list[bytes] = []
        self.subscriptions = 0
        self.disconnections = 0
        self._task = asyncio.create_task(self._run(shared, channel))

    async def __aenter__(self) -> Self:
        await eventually(lambda: self.subscriptions)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self, shared: CatalogRedis, channel: str) -> None:
        while True:
            with suppress(StoreUnavailable):
                async for message in shared.listen(channel):
                    if message is None:
                        self.subscriptions += 1
                    else:
                        self.messages.append(message)
            self.disconnections += 1
            await asyncio.sleep(0.05)


# --- Everywhere ------------------------------------------------------------------------------------------------------


async def test_a_copy_can_be_read_until_its_ttl_ends(shared: CatalogRedis) -> None:
    copy = numbered_copy(1, bytes(range(256)))
    assert await shared.get("lf:{got}:%c") is None
    await shared.put("lf:{got}:%c", copy, 60)
    assert await shared.get("lf:{got}:%c") == copy
    await shared.put("lf:{got}:%c", copy, 0.05)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while await shared.get("lf:{got}:%c") is not None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_at_most_the_maximum_size_of_a_copy_is_read(
    shared: CatalogRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may have stored 512 MiB there."""
    monkeypatch.setattr(shared_redis, "MAX_BYTES", 1_000)
    copy = numbered_copy(1, bytes(range(256)) * 8)
    await shared.put("lf:{large}:%c", copy, 60)
    assert await shared.get("lf:{large}:%c") == copy[:1_000]


async def test_an_older_copy_never_replaces_a_newer_one(shared: CatalogRedis) -> None:
    name = "lf:{older}:%c"
    await shared.put(name, numbered_copy(1_000, b"new"), 60)
    await shared.put(name, numbered_copy(999, b"old"), 60)
    assert await shared.get(name) == numbered_copy(1_000, b"new")
    await shared.put(name, numbered_copy(1_000, b"same"), 60)
    assert await shared.get(name) == numbered_copy(1_000, b"same")
    await shared.put(name, numbered_copy(1_001, b"newer"), 60)
    assert await shared.get(name) == numbered_copy(1_001, b"newer")


async def test_the_newest_copy_stays_after_any_order_of_writers(shared: CatalogRedis) -> None:
    name = "lf:{race}:%c"
    numbers = [(7 * at) % 100 for at in range(100)]
    await asyncio.gather(*(shared.put(name, numbered_copy(number, b"%d" % number), 60) for number in numbers))
    assert await shared.get(name) == numbered_copy(99, b"99")


async def test_many_copies_are_put_at_once_and_none_over_a_newer_one(shared: CatalogRedis) -> None:
    names = [f"lf:{{many-{at}}}:%c" for at in range(300)]
    await shared.put(names[7], numbered_copy(9, b"newer"), 60)
    await shared.put_many({name: numbered_copy(5, name.encode()) for name in names}, 60)
    assert await shared.get(names[7]) == numbered_copy(9, b"newer")
    for name in (names[0], names[150], names[299]):
        assert await shared.get(name) == numbered_copy(5, name.encode())


async def test_a_lock_has_one_owner_that_can_extend_and_release_it(shared: CatalogRedis, other: CatalogRedis) -> None:
    key = "lf:{lease}:1"
    assert await shared.acquire_lock(key, b"one", 60)
    assert await shared.acquire_lock(key, b"one", 60)
    assert not await other.acquire_lock(key, b"two", 60)
    await other.release_lock(key, b"two")
    assert not await other.acquire_lock(key, b"two", 60)
    await shared.release_lock(key, b"one")
    assert await other.acquire_lock(key, b"two", 0.05)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await shared.acquire_lock(key, b"one", 60):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_only_one_process_can_claim_until_the_claim_ends(shared: CatalogRedis, other: CatalogRedis) -> None:
    async with asyncio.TaskGroup() as group:  # it cancels the other calls when one fails
        claims = [group.create_task(who.claim("lf:{claim}:1", 60)) for who in (shared, other) for _ in range(10)]
    assert sum(claim.result() for claim in claims) == 1
    assert await shared.claim("lf:{claim}:2", 0.05)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await other.claim("lf:{claim}:2", 60):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_each_master_reports_its_memory_use(servers: HasUrl, shared: CatalogRedis) -> None:
    memory = await shared.memory()
    assert len(memory) == (3 if isinstance(servers, RedisCluster) else 1)
    assert {(each.policy, each.limit_bytes, each.evicted) for each in memory.values()} == {("noeviction", 0, 0)}


async def test_every_listener_receives_every_message_in_order(shared: CatalogRedis, other: CatalogRedis) -> None:
    async with (
        RecordingListener(shared, "lf:%t") as one,
        RecordingListener(other, "lf:%t") as two,
        RecordingListener(other, "lf:%else") as else_where,
    ):
        sent = [b"%d" % number for number in range(50)]
        for message in sent:
            await shared.publish("lf:%t", message)
        await eventually(lambda: len(one.messages) == len(two.messages) == 50)
        assert one.messages == two.messages == sent
        assert not else_where.messages


async def test_it_can_be_closed_twice_and_used_again(servers: HasUrl) -> None:
    shared = CatalogRedis(servers.url)
    await shared.close()
    await shared.put("lf:{again}:%c", numbered_copy(1), 60)
    await shared.close()
    await shared.close()
    assert await shared.get("lf:{again}:%c") == numbered_copy(1)
    await shared.close()


async def test_after_it_was_used_and_closed_no_connection_is_left_behind(servers: HasUrl) -> None:
    """None is open, and the garbage collector finds none."""
    before = sockets()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shared = CatalogRedis(servers.url)
        await shared.put("lf:{left}:%c", numbered_copy(1), 60)
        async with RecordingListener(shared, "lf:%t"):
            await shared.publish("lf:%t", b"")
        await shared.close()
        await asyncio.sleep(0.05)
        left = sockets() - before
        del shared
        gc.collect()
        await asyncio.sleep(0)
    assert not [str(each.message) for each in said if issubclass(each.category, ResourceWarning)]
    assert not left, f"{len(left)} connections are still open"


def sockets() -> set[str]:
    """Return the open sockets of this process."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(file.readlink())
            if target.startswith("socket:"):
                found.add(target)
    return found


# --- Failures -- ------------------------------------------------------------------------------------------------------


async def all_calls(shared: CatalogRedis) -> list[tuple[str, str, float]]:
    """Make each call once, all at the same time. Return the result and the duration of each."""
    calls: dict[str, Any] = {
        "get": lambda: shared.get("lf:{a}:%c"),
        "put": lambda: shared.put("lf:{a}:%c", numbered_copy(1), 60),
        "put_many": lambda: shared.put_many({"lf:{a}:%c": numbered_copy(1), "lf:{b}:%c": numbered_copy(1)}, 60),
        "hold": lambda: shared.acquire_lock("lf:{a}:lease", b"one", 60),
        "release": lambda: shared.release_lock("lf:{a}:lease", b"one"),
        "claim": lambda: shared.claim("lf:{a}:claim", 60),
        "publish": lambda: shared.publish("lf:%t", b""),
    }

    async def outcome_of(name: str) -> tuple[str, str, float]:
        began = time.monotonic()
        try:
            await asyncio.wait_for(calls[name](), CALL_SECONDS)
            said = "ok"
        except StoreUnavailable:
            said = "unavailable"
        except TimeoutError:
            said = "hung"
        return name, said, round(time.monotonic() - began, 2)

    together = await asyncio.gather(*map(outcome_of, calls))
    return [*together, await outcome_of(next(iter(calls)))]  # and one after the others have failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", SINGLE)
async def test_a_frozen_redis_makes_no_call_hang(kind: str, record_property: Callable[[str, object], None]) -> None:
    with SINGLE[kind]() as server:
        shared = CatalogRedis(server.url)
        await shared.put("lf:{a}:%c", numbered_copy(1), 60)
        server.pause()
        outcomes = await all_calls(shared)
        record_property("frozen", outcomes)
        assert {result for _, result, _ in outcomes} == {"unavailable"}, outcomes
        server.resume()
        assert await shared.get("lf:{a}:%c") == numbered_copy(1)
        await shared.close()


async def test_calls_work_again_after_an_outage(own_redis_server: RedisServer) -> None:
    shared = CatalogRedis(own_redis_server.url)
    await shared.put("lf:{a}:%c", numbered_copy(1), 60)
    async with RecordingListener(shared, "lf:%t") as ear:
        own_redis_server.kill()
        assert {said for _, said, _ in await all_calls(shared)} == {"unavailable"}
        own_redis_server.restart()
        await eventually(lambda: ear.subscriptions == 2)
        await shared.publish("lf:%t", b"back")
        await eventually(lambda: ear.messages == [b"back"])
    assert await shared.get("lf:{a}:%c") is None
    await shared.close()


@pytest.mark.parametrize("mode", [DropReplies(), CloseConnections(), Garbage()], ids=lambda mode: type(mode).__name__)
async def test_every_network_error_is_store_unavailable(mode: Any, redis_url: str, redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy:
        shared = CatalogRedis(proxy.url)
        await shared.put("lf:{a}:%c", numbered_copy(1), 60)
        with proxy.in_mode(mode):
            outcomes = await all_calls(shared)
        assert {result for _, result, _ in outcomes} == {"unavailable"}, outcomes
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with suppress(StoreUnavailable):
                assert await shared.get("lf:{a}:%c") == numbered_copy(1)
                break
            assert time.monotonic() < deadline
        await shared.close()


async def test_a_listener_whose_connection_was_cut_raises_or_subscribes_again(
    redis_url: str, redis_server: RedisServer
) -> None:
    shared = CatalogRedis(redis_url)
    async with RecordingListener(shared, "lf:%t") as ear:
        for number in range(1, 4):
            redis_server.command("CLIENT KILL TYPE pubsub")
            await eventually(lambda number=number: ear.subscriptions > number)  # type: ignore[misc]
            await shared.publish("lf:%t", b"%d" % number)
            await eventually(lambda number=number: len(ear.messages) == number)  # type: ignore[misc]
    await shared.close()


@pytest.mark.slow
async def test_a_server_that_never_answers_blocks_no_call_and_no_listener() -> None:
    with unreachable_url() as url:
        shared = CatalogRedis(url)
        assert {said for _, said, _ in await all_calls(shared)} == {"unavailable"}
        listening = shared.listen("lf:%t")
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(anext(listening), CALL_SECONDS)
        await shared.close()


@pytest.mark.slow
async def test_a_subscription_to_a_frozen_redis_times_out(own_redis_server: RedisServer) -> None:
    shared = CatalogRedis(own_redis_server.url)
    own_redis_server.pause()
    listening = shared.listen("lf:%t")
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(anext(listening), CALL_SECONDS)
    own_redis_server.resume()
    await shared.close()


async def test_a_wrong_password_is_unavailable_and_does_not_leak() -> None:
    with AclRedisServer() as server:
        shared = CatalogRedis(server.url_with("wrong-one"))
        for call in (shared.get("a"), shared.claim("a", 1), anext(shared.listen("a"))):
            with pytest.raises(StoreUnavailable) as error:
                await call
            assert "wrong-one" not in str(error.value)
        await shared.close()


async def test_after_many_wrong_passwords_no_connection_is_left_and_the_right_one_works() -> None:
    with AclRedisServer() as server:
        shared = CatalogRedis(server.url_with("not-yet"))
        for _ in range(shared_redis.MAX_CONNECTIONS + 2):
            for call in (shared.get("a"), anext(shared.listen("a"))):
                with pytest.raises(StoreUnavailable, match="password"):
                    await call
        deadline = time.monotonic() + PATIENCE_SECONDS / 2
        while server.command("CLIENT LIST").count(b"id=") > 1:  # the connection that asks
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        server.command_ok(f"ACL SETUSER {server.USER} >not-yet")
        assert await shared.claim("a", 60)
        await shared.close()


async def test_a_replica_that_may_not_write_is_unavailable(own_redis_server: RedisServer) -> None:
    own_redis_server.command_ok("REPLICAOF 127.0.0.1 1")
    shared = CatalogRedis(own_redis_server.url)
    with pytest.raises(StoreUnavailable):
        await shared.put("a", numbered_copy(1), 1)
    await shared.close()


def test_a_url_that_can_not_be_used_is_refused_by_name_before_anything_is_opened() -> None:
    for url in ("http://localhost", "redis://localhost/name", "redis+sentinel://localhost", "redis+cluster://"):
        with pytest.raises(InvalidInput, match="url"):
            CatalogRedis(url)


async def test_versions_are_compared_as_numbers_in_any_locale_of_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis compares strings in Lua by the LC_COLLATE of its environment, which distributions set."""
    program = shutil.which("localedef")
    if program is None:
        pytest.skip("no localedef on this machine")
    made = tmp_path / "en_US.UTF-8"
    command = [program, "-i", "en_US", "-f", "UTF-8", str(made)]
    await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    if not (made / "LC_COLLATE").exists():
        pytest.skip("no sources of locales on this machine")
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    with RedisServer() as server:
        shared = CatalogRedis(server.url)
        wrong = []
        for number in range(1, 600):
            name = f"lf:{{{number}}}:%c"
            await shared.put(name, numbered_copy(number), 60)
            await shared.put(name, numbered_copy(number + 1), 60)
            await shared.put(name, numbered_copy(number), 60)
            if await shared.get(name) != numbered_copy(number + 1):
                wrong.append(number)
        await shared.close()
    assert not wrong, f"{len(wrong)} of 599 newer copies were refused or replaced, such as after {wrong[:5]}"


# --- Failovers ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_after_a_failover_the_new_master_of_a_sentinel_set_is_found() -> None:
    with SentinelGroup() as servers:
        shared = CatalogRedis(servers.url)
        await shared.put("lf:{a}:%c", numbered_copy(1), 600)
        async with RecordingListener(shared, "lf:%t") as ear:
            servers.failover()
            await until_it_works(shared)
            assert await shared.get("lf:{a}:%c") == numbered_copy(1)
            await wait_until_received(shared, ear)
        await shared.close()


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_calls_and_listeners_follow_a_new_master_of_a_sentinel_set(how: str) -> None:
    with SentinelGroup() as servers:
        shared = CatalogRedis(servers.url)
        await shared.put("lf:{a}:%c", numbered_copy(1), 600)
        async with RecordingListener(shared, "lf:%t") as ear:
            old = servers.master()
            if how == "killed":
                old.kill()
            else:
                old.pause()
            await asyncio.to_thread(servers.wait_for_new_master, old)
            await until_it_works(shared)
            await wait_until_received(shared, ear)
        await shared.close()


@pytest.mark.slow
async def test_copies_and_messages_avoid_a_dead_master_of_a_cluster() -> None:
    copies = {f"lf:{{many-{at}}}:%c": numbered_copy(1) for at in range(60)}
    with RedisCluster(masters=3, replicas=0) as servers:
        for dead in servers.servers:
            homes = {name: servers.master_of(hash_slot(name)) for name in copies}
            shared = CatalogRedis(servers.url)
            dead.kill()
            with pytest.raises(PartialFailure) as failure:
                await shared.put_many(copies, 60)
            assert failure.value.failed == {name for name, home in homes.items() if home is dead}
            for name in copies.keys() - failure.value.failed:
                assert await shared.get(name) == copies[name]
            async with RecordingListener(shared, "lf:%t") as ear:
                await shared.publish("lf:%t", b"all the same")
                await eventually(lambda ear=ear: ear.messages == [b"all the same"])  # type: ignore[misc]
            dead.restart()
            servers.wait_until_ok()
            await shared.put_many(copies, 60)
            await shared.close()


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["failover", "killed", "frozen"])
async def test_calls_and_listeners_follow_a_new_master_of_a_cluster(
    how: str, record_property: Callable[[str, object], None]
) -> None:
    with RedisCluster() as servers:
        shared = CatalogRedis(servers.url)
        name = "lf:{a}:%c"
        await shared.put(name, numbered_copy(1), 600)
        async with RecordingListener(shared, "lf:%t") as ear:
            slot = 15_495  # the slot of {a}
            old = servers.master_of(slot)
            if how == "failover":
                await asyncio.to_thread(servers.failover, old)
            else:
                old.kill() if how == "killed" else old.pause()
                record_property("without a master", await all_calls(shared))
                await asyncio.to_thread(servers.wait_for_new_master, slot, old)
            await until_it_works(shared)
            await wait_until_received(shared, ear)
        await shared.close()


async def until_it_works(shared: CatalogRedis) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(StoreUnavailable):
            await asyncio.wait_for(shared.put("lf:{a}:%c", numbered_copy(1), 600), CALL_SECONDS)
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def wait_until_received(shared: CatalogRedis, ear: RecordingListener) -> None:
    """Wait until listener and publisher use the same servers."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while b"after" not in ear.messages:
        with suppress(StoreUnavailable):
            await asyncio.wait_for(shared.publish("lf:%t", b"after"), CALL_SECONDS)
        assert time.monotonic() < deadline, "the listener was left behind"
        await asyncio.sleep(0.1)
