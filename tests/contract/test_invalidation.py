"""What one node changes, the others hear of: their cached denials go, and nobody else's."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import redis as redis_py

from limitforge import Concurrency, Decision, FixedWindow, Limit, Limiter, StoreOptions, SyncLimiter

CHANNEL = "lf:denials"
PATIENCE_SECONDS = 45.0
CACHED = StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=60_000)
UNCACHED = StoreOptions(deadline_ms=30_000, failure="raise", denial_cache_ms=0)
TWO = FixedWindow(name="two", limit=2, window_seconds=86_400, align="first_hit")


class Process:
    """A limiter of either shell, asked from one event loop."""

    def __init__(self, shell: str, url: str, options: StoreOptions = CACHED, key_prefix: str = "lf") -> None:
        kind = Limiter if shell == "async" else SyncLimiter
        self.name = f"node-{uuid4().hex}"
        self._limiter = kind.connect(f"{url}?client_name={self.name}", options=options, key_prefix=key_prefix)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._limiter, name)
        if isinstance(self._limiter, SyncLimiter):
            return await asyncio.to_thread(method, *args, **kwargs)
        return await method(*args, **kwargs)

    async def check(self, limits: Limit = TWO, subject: str = "s", **how: Any) -> Decision:
        decision: Decision = await self.call("check", "r", subject, limits=limits, **how)
        return decision

    async def is_cached(self, *args: Any, **how: Any) -> bool:
        """Whether this check is denied without asking Redis."""
        before = self._limiter.status().denial_hits
        decision = await self.check(*args, **how)
        return not decision.allowed and self._limiter.status().denial_hits > before

    async def deny(self, *args: Any, **how: Any) -> None:
        """Ask until it is denied from the cache."""
        await eventually(lambda: self.is_cached(*args, **how))

    async def admits(self, *args: Any, **how: Any) -> bool:
        return (await self.check(*args, **how)).allowed


async def eventually(is_so: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis_py.Redis.from_url(redis_url) as client:
        yield client


Opened = Callable[..., Process]


@pytest.fixture
async def opened(redis_url: str) -> AsyncIterator[Opened]:
    """Opens nodes, and closes them after the test."""
    nodes: list[Process] = []

    def connect(shell: str, **how: Any) -> Process:
        nodes.append(Process(shell, redis_url, **how))
        return nodes[-1]

    yield connect
    for node in nodes:
        await node.call("close")


@pytest.fixture(params=["async-async", "sync-sync", "async-sync", "sync-async"])
async def pair(request: pytest.FixtureRequest, opened: Opened, raw: Any) -> tuple[Process, Process]:
    """Who changes something, and who listens."""
    here, there = (opened(shell) for shell in request.param.split("-"))
    await listening(there, raw)
    return here, there


async def listening(node: Process, raw: Any) -> None:
    """A node listens from its first look at a denial on, and drops everything when it begins to."""
    await node.check(subject="somebody", cost=3)
    await node.check(subject="somebody", cost=3)

    async def is_listening() -> bool:
        """By its name: a count would take the last listener of a node that was just closed for this one's."""
        return any(client["name"] == node.name and client["sub"] != "0" for client in raw.client_list())

    await eventually(is_listening)
    await node.deny(subject="somebody", cost=3)


def listeners(raw: Any) -> int:
    return int(raw.pubsub_numsub(CHANNEL)[0][1])


# -- changes that give the caller room who was denied before


async def reset(node: Process, subject: str) -> None:
    await node.call("reset", "r", subject, limits=TWO)


async def raise_the_limit(node: Process, subject: str) -> None:
    await node.call("set_override", "r", subject, {"two": {"limit": 50}}, limits=TWO, ttl_seconds=60)


async def lift_the_limit(node: Process, subject: str) -> None:
    await node.call("set_override", "*", subject, {"two": "unlimited"}, limits=TWO, ttl_seconds=60)


async def delete_the_block(node: Process, subject: str) -> None:
    assert await node.call("delete_override", "r", subject)


async def clear_the_blocks(node: Process, subject: str) -> None:
    assert await node.call("clear_overrides")


async def block(node: Process, subject: str) -> None:
    await node.call("set_override", "r", subject, {"two": "blocked"}, limits=TWO, ttl_seconds=60)


Change = Callable[[Process, str], Awaitable[None]]
OF_ONE: list[Change] = [reset, raise_the_limit, lift_the_limit, delete_the_block]
EVERY: list[Change] = [*OF_ONE, clear_the_blocks]


def name_of(change: Change) -> str:
    return str(getattr(change, "__name__", ""))


async def deny(node: Process, change: Change, subject: str) -> None:
    """So that the change gives room."""
    if change in (delete_the_block, clear_the_blocks):
        await block(node, subject)
    await node.deny(subject=subject)


@pytest.mark.parametrize("shell", ["async", "sync"])
async def test_the_node_that_makes_a_change_admits_at_once(shell: str, opened: Opened) -> None:
    node = opened(shell)
    for change in EVERY:
        subject = name_of(change)
        await deny(node, change, subject)
        await change(node, subject)
        assert await node.admits(subject=subject)


async def test_what_one_node_changes_lets_the_others_admit_soon(pair: tuple[Process, Process]) -> None:
    here, there = pair
    for change in EVERY:
        subject = name_of(change)
        await deny(there, change, subject)
        await change(here, subject)
        await eventually(lambda subject=subject: there.admits(subject=subject))  # type: ignore[misc]


async def test_denials_of_other_callers_and_tenants_stay_cached(pair: tuple[Process, Process]) -> None:
    here, there = pair
    for change in OF_ONE:
        await there.deny(subject="other")
        await there.deny(tenant="globex")
        subject = name_of(change)
        await deny(there, change, subject)
        await change(here, subject)
        await eventually(lambda subject=subject: there.admits(subject=subject))  # type: ignore[misc]
        assert await there.is_cached(subject="other")
        assert await there.is_cached(tenant="globex")


async def test_what_a_reservation_gives_back_is_there_for_all_at_once(pair: tuple[Process, Process]) -> None:
    """While it is open its bucket is never denied from a cache."""
    here, there = pair
    held = await here.call("reserve", "r", "s", limits=TWO, cost=2)
    for _ in range(3):
        assert not await there.admits()
        assert not await there.is_cached()
    await here.call("settle", held.reservation_id, 1)
    assert await there.admits()


async def test_a_slot_that_is_given_back_is_there_for_all_at_once(pair: tuple[Process, Process]) -> None:
    here, there = pair
    slots = Concurrency(name="slots", max_concurrent=1, lease_ttl_seconds=60)
    held = await here.check(slots)
    for _ in range(3):
        assert not await there.is_cached(slots)
    await here.call("release", held.lease_id)
    assert await there.admits(slots)


async def test_dropping_the_denials_of_a_tenant_drops_them_everywhere(pair: tuple[Process, Process], raw: Any) -> None:
    here, there = pair
    await listening(here, raw)
    for node in pair:
        await node.deny()
        await node.deny(subject="another")
        await node.deny(tenant="globex")
    for key in raw.keys("lf:{default}:*"):
        raw.delete(key)  # behind everybody's back
    assert await here.is_cached()
    await here.call("drop_denials")
    assert await here.admits()
    await eventually(there.admits)
    assert not await there.is_cached(subject="another")
    for node in pair:
        assert await node.is_cached(tenant="globex")


async def test_other_numbers_never_meet_an_old_denial(pair: tuple[Process, Process], raw: Any) -> None:
    await listening(pair[0], raw)
    for node in pair:
        await node.deny()
        assert await node.admits(replace(TWO, limit=1_000))
        assert await node.is_cached()
        assert await node.admits(replace(TWO, mode="monitor"))
        assert await node.is_cached()


async def test_a_store_with_another_prefix_has_denials_of_its_own(opened: Opened, raw: Any) -> None:
    node, other = opened("async"), opened("async", key_prefix="other")
    await listening(node, raw)
    await node.deny()
    await other.deny()
    await reset(other, "s")
    assert await other.admits()
    assert await node.is_cached()


@pytest.mark.parametrize("shell", ["async", "sync"])
async def test_a_node_without_a_cache_tells_the_others_too(shell: str, opened: Opened, raw: Any) -> None:
    here, there = opened(shell, options=UNCACHED), opened("async")
    await listening(there, raw)
    await there.deny()
    await reset(here, "s")
    await eventually(there.admits)


@pytest.mark.parametrize("shell", ["async", "sync"])
async def test_a_node_that_has_asked_nothing_yet_tells_the_others_too(shell: str, opened: Opened, raw: Any) -> None:
    """As of a program that changes a plan, and does nothing else."""
    there = opened("async")
    await listening(there, raw)
    await there.deny()
    for key in raw.keys("*:two:*"):
        raw.delete(key)  # behind everybody's back
    await opened(shell).call("drop_denials")
    await eventually(there.admits)


@pytest.mark.parametrize("shell", ["async", "sync"])
async def test_a_node_that_is_closed_after_its_change_has_told_the_others(shell: str, opened: Opened, raw: Any) -> None:
    there = opened("async")
    await listening(there, raw)
    for number in range(5):
        await there.deny(subject=str(number))
        here = opened(shell)
        await reset(here, str(number))
        await here.call("close")
        await eventually(lambda number=number: there.admits(subject=str(number)))  # type: ignore[misc]


# -- what may go wrong


async def test_a_listener_that_was_cut_off_comes_back_by_itself(pair: tuple[Process, Process], raw: Any) -> None:
    here, there = pair
    for _ in range(2):
        await there.deny()
        raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await reset(here, "s")  # nobody listens now
        await eventually(there.admits)
    await eventually_listening(raw)
    await there.deny()
    await reset(here, "s")
    await eventually(there.admits)


async def eventually_listening(raw: Any) -> None:
    async def is_listening() -> bool:
        return listeners(raw) > 0

    await eventually(is_listening)


GARBAGE: list[bytes] = [
    b"",
    b"hello",
    b"\xff" * 100,
    b"\x93\xc0\xc0\xc0",  # three nulls
    b"\x90",
    msgspec.msgpack.encode([["a"], ["b"], ["c"], ["d"]]),
    msgspec.msgpack.encode([[1], [2], [3]]),
    msgspec.msgpack.encode({"keys": ["x"]}),
]


async def test_an_invalid_message_harms_nothing(
    pair: tuple[Process, Process], raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = pair
    for garbage in GARBAGE:
        await there.deny()
        await there.deny(subject="other")
        raw.publish(CHANNEL, garbage)

        async def is_warned() -> bool:
            return any("store.invalidation_invalid" in record.getMessage() for record in caplog.records)

        await eventually(is_warned)
        caplog.clear()
        assert not await there.admits()
    await there.deny()
    await reset(here, "s")
    await eventually(there.admits)


@pytest.mark.parametrize("shell", ["async", "sync"])
async def test_closing_leaves_no_listener_behind(shell: str, opened: Opened, raw: Any) -> None:
    async def nobody_listens() -> bool:
        return listeners(raw) == 0

    for _ in range(2):
        node = opened(shell)
        await listening(node, raw)
        await node.call("close")
        await eventually(nobody_listens)
        assert not await node.admits(cost=3)  # it may be used again
        await node.call("close")
        await eventually(nobody_listens)
