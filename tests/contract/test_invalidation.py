"""A change in one process invalidates the cached denials that it affects in all others, and no more."""

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
    """An async or sync limiter, used from one event loop."""

    def __init__(self, api: str, url: str, options: StoreOptions = CACHED, key_prefix: str = "lf") -> None:
        kind = Limiter if api == "async" else SyncLimiter
        self.name = f"process-{uuid4().hex}"
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
        """Return True if this check is denied without a call to Redis."""
        before = self._limiter.status().denial_hits
        decision = await self.check(*args, **how)
        return not decision.allowed and self._limiter.status().denial_hits > before

    async def deny(self, *args: Any, **how: Any) -> None:
        """Repeat a check until it is denied from the cache."""
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
    """Opens processes, and closes them after the test."""
    processes: list[Process] = []

    def connect(api: str, **how: Any) -> Process:
        processes.append(Process(api, redis_url, **how))
        return processes[-1]

    yield connect
    for process in processes:
        await process.call("close")


@pytest.fixture(params=["async-async", "sync-sync", "async-sync", "sync-async"])
async def pair(request: pytest.FixtureRequest, opened: Opened, raw: Any) -> tuple[Process, Process]:
    """The process that makes a change, and the one that listens."""
    here, there = (opened(api) for api in request.param.split("-"))
    await listening(there, raw)
    return here, there


async def listening(process: Process, raw: Any) -> None:
    """Wait until a process has subscribed: it does so, and clears its cache, when it first looks up a denial."""
    await process.check(subject="another", cost=3)
    await process.check(subject="another", cost=3)

    async def is_listening() -> bool:
        """Look for its name: a count may include the listener of a process that was just closed."""
        return any(client["name"] == process.name and client["sub"] != "0" for client in raw.client_list())

    await eventually(is_listening)
    await process.deny(subject="another", cost=3)


def listeners(raw: Any) -> int:
    return int(raw.pubsub_numsub(CHANNEL)[0][1])


# -- changes that make room for a denied caller


async def reset(process: Process, subject: str) -> None:
    await process.call("reset", "r", subject, limits=TWO)


async def raise_the_limit(process: Process, subject: str) -> None:
    await process.call("set_override", "r", subject, {"two": {"limit": 50}}, limits=TWO, ttl_seconds=60)


async def lift_the_limit(process: Process, subject: str) -> None:
    await process.call("set_override", "*", subject, {"two": "unlimited"}, limits=TWO, ttl_seconds=60)


async def delete_the_block(process: Process, subject: str) -> None:
    assert await process.call("delete_override", "r", subject)


async def clear_the_blocks(process: Process, subject: str) -> None:
    assert await process.call("clear_overrides")


async def block(process: Process, subject: str) -> None:
    await process.call("set_override", "r", subject, {"two": "blocked"}, limits=TWO, ttl_seconds=60)


Change = Callable[[Process, str], Awaitable[None]]
OF_ONE: list[Change] = [reset, raise_the_limit, lift_the_limit, delete_the_block]
EVERY: list[Change] = [*OF_ONE, clear_the_blocks]


def name_of(change: Change) -> str:
    return str(getattr(change, "__name__", ""))


async def deny(process: Process, change: Change, subject: str) -> None:
    """Deny, so that the change makes room."""
    if change in (delete_the_block, clear_the_blocks):
        await block(process, subject)
    await process.deny(subject=subject)


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_the_process_that_makes_a_change_admits_at_once(api: str, opened: Opened) -> None:
    process = opened(api)
    for change in EVERY:
        subject = name_of(change)
        await deny(process, change, subject)
        await change(process, subject)
        assert await process.admits(subject=subject)


async def test_a_change_in_one_process_lets_the_others_admit_soon(pair: tuple[Process, Process]) -> None:
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


async def test_a_refund_of_a_reservation_is_available_to_all_at_once(pair: tuple[Process, Process]) -> None:
    """While the reservation is open, its bucket is never denied from a cache."""
    here, there = pair
    held = await here.call("reserve", "r", "s", limits=TWO, cost=2)
    for _ in range(3):
        assert not await there.admits()
        assert not await there.is_cached()
    await here.call("settle", held.reservation_id, 1)
    assert await there.admits()


async def test_a_released_slot_is_available_to_all_at_once(pair: tuple[Process, Process]) -> None:
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
    for process in pair:
        await process.deny()
        await process.deny(subject="another")
        await process.deny(tenant="globex")
    for key in raw.keys("lf:{default}:*"):
        raw.delete(key)  # without an invalidation
    assert await here.is_cached()
    await here.call("drop_denials")
    assert await here.admits()
    await eventually(there.admits)
    assert not await there.is_cached(subject="another")
    for process in pair:
        assert await process.is_cached(tenant="globex")


async def test_other_numbers_never_meet_an_old_denial(pair: tuple[Process, Process], raw: Any) -> None:
    await listening(pair[0], raw)
    for process in pair:
        await process.deny()
        assert await process.admits(replace(TWO, limit=1_000))
        assert await process.is_cached()
        assert await process.admits(replace(TWO, mode="monitor"))
        assert await process.is_cached()


async def test_a_store_with_another_prefix_has_denials_of_its_own(opened: Opened, raw: Any) -> None:
    process, other = opened("async"), opened("async", key_prefix="other")
    await listening(process, raw)
    await process.deny()
    await other.deny()
    await reset(other, "s")
    assert await other.admits()
    assert await process.is_cached()


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_a_process_without_a_cache_publishes_invalidations_too(api: str, opened: Opened, raw: Any) -> None:
    here, there = opened(api, options=UNCACHED), opened("async")
    await listening(there, raw)
    await there.deny()
    await reset(here, "s")
    await eventually(there.admits)


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_a_process_without_a_check_publishes_invalidations_too(api: str, opened: Opened, raw: Any) -> None:
    """For example, a program that only changes a plan."""
    there = opened("async")
    await listening(there, raw)
    await there.deny()
    for key in raw.keys("*:two:*"):
        raw.delete(key)  # without an invalidation
    await opened(api).call("drop_denials")
    await eventually(there.admits)


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_a_process_that_is_closed_after_a_change_has_published_it(api: str, opened: Opened, raw: Any) -> None:
    there = opened("async")
    await listening(there, raw)
    for number in range(5):
        await there.deny(subject=str(number))
        here = opened(api)
        await reset(here, str(number))
        await here.call("close")
        await eventually(lambda number=number: there.admits(subject=str(number)))  # type: ignore[misc]


# -- failures


async def test_a_disconnected_listener_subscribes_again(pair: tuple[Process, Process], raw: Any) -> None:
    here, there = pair
    for _ in range(2):
        await there.deny()
        raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await reset(here, "s")  # no process listens now
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


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_closing_leaves_no_listener_behind(api: str, opened: Opened, raw: Any) -> None:
    async def has_no_listener() -> bool:
        return listeners(raw) == 0

    for _ in range(2):
        process = opened(api)
        await listening(process, raw)
        await process.call("close")
        await eventually(has_no_listener)
        assert not await process.admits(cost=3)  # it can be used again
        await process.call("close")
        await eventually(has_no_listener)
