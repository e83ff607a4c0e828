"""Batches of one tenant do not delay another tenant, and the queue is bounded."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from limitforge.service.checks import batch_queue
from limitforge.service.checks.batch_queue import (
    CHECKS_PER_ITERATION,
    MAX_ACTIVE_BYTES_OF_TENANT,
    MAX_ACTIVE_TENANTS,
    MAX_WAITING_BYTES,
    MAX_WAITING_BYTES_OF_TENANT,
    MIN_BATCH_WEIGHT,
    BatchQueue,
)
from limitforge.service.problems import HttpError

MIB = 1_048_576


class RecordedBatches:
    """Submits batches that run until they are ended, and records what happens to them."""

    def __init__(self) -> None:
        self.queue = BatchQueue()
        self.started: list[str] = []
        self.refused: list[str] = []
        self.errors: list[HttpError] = []
        self._running: list[asyncio.Event] = []

    def submit(self, name: str, size: int = MIB) -> None:
        """Submit a batch. The first letter of its name is its tenant."""

        def refuse(error: HttpError) -> None:
            self.refused.append(name)
            self.errors.append(error)

        self.queue.enqueue(name[0], size, lambda: self._run(name), refuse)

    async def _run(self, name: str) -> None:
        self.started.append(name)
        ended = asyncio.Event()
        self._running.append(ended)
        await ended.wait()

    async def end_first(self) -> None:
        self._running.pop(0).set()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(test: Callable[[RecordedBatches], Awaitable[None]]) -> RecordedBatches:
    async def whole() -> RecordedBatches:
        batches = RecordedBatches()
        await test(batches)
        return batches

    return asyncio.run(whole())


def test_one_tenant_leaves_room_for_another() -> None:
    async def test(batches: RecordedBatches) -> None:
        for index in range(8):
            batches.submit(f"a{index}")
        batches.submit("b0")
        await settle()
        assert batches.started == ["a0", "b0"]

    run(test)


def test_many_small_batches_of_one_tenant_are_worked_on_at_once() -> None:
    async def test(batches: RecordedBatches) -> None:
        for index in range(1_000):
            batches.submit(f"a{index}", size=10)
        batches.submit("b0")
        await settle()
        assert batches.refused == []
        assert len(batches.started) == MAX_ACTIVE_BYTES_OF_TENANT // MIN_BATCH_WEIGHT + 1
        assert "b0" in batches.started

    run(test)


def test_only_so_many_batches_are_active_and_tenants_take_turns() -> None:
    async def test(batches: RecordedBatches) -> None:
        for tenant in "abcdef":
            for index in range(3):
                batches.submit(f"{tenant}{index}", size=MAX_ACTIVE_BYTES_OF_TENANT)
        await settle()
        assert batches.started == ["a0", "b0", "c0", "d0"]
        assert len(batches.started) == MAX_ACTIVE_TENANTS
        for _ in range(8):
            await batches.end_first()
        assert batches.started[4:] == ["a1", "b1", "c1", "d1", "e0", "f0", "a2", "b2"]

    run(test)


def test_a_tenant_with_too_many_waiting_batches_gets_429_for_the_last_ones() -> None:
    async def test(batches: RecordedBatches) -> None:
        for index in range(12):
            batches.submit(f"a{index:02}")
        batches.submit("b0")
        await settle()

    batches = run(test)
    waiting = MAX_WAITING_BYTES_OF_TENANT // MIB
    assert batches.refused == [f"a{index:02}" for index in range(1 + waiting, 12)]
    assert "b0" in batches.started
    assert (batches.errors[0].status, batches.errors[0].code) == (429, "too_many_batches")
    assert batches.errors[0].headers == {"retry-after": "1"}


def test_when_all_tenants_together_wait_with_too_much_the_largest_is_refused() -> None:
    async def test(batches: RecordedBatches) -> None:
        for tenant in "abcd":
            batches.submit(f"{tenant}0")
        for tenant in "abc":
            for index in range(MAX_WAITING_BYTES_OF_TENANT // MIB):
                batches.submit(f"{tenant}{index + 1}")
        assert batches.refused == []
        batches.submit("d1")
        await settle()

    batches = run(test)
    assert MAX_WAITING_BYTES == 3 * MAX_WAITING_BYTES_OF_TENANT
    assert batches.refused == [f"a{MAX_WAITING_BYTES_OF_TENANT // MIB}"]


def test_small_batches_count_too() -> None:
    async def test(batches: RecordedBatches) -> None:
        for index in range(5_000):
            batches.submit(f"a{index}", size=10)
        await settle()

    assert len(run(test).refused) > 1_000


def test_a_batch_that_has_waited_too_long_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(batches: RecordedBatches) -> None:
        batches.submit("a0")
        assert batch_queue.MAX_WAIT_SECONDS <= 30
        monkeypatch.setattr(batch_queue, "MAX_WAIT_SECONDS", -1.0)
        batches.submit("a2")
        await settle()
        assert batches.refused == []
        await batches.end_first()
        assert batches.started == ["a0"]
        assert batches.refused == ["a2"]

    run(test)


def test_active_batches_take_turns_one_in_each_iteration_of_the_loop() -> None:
    steps: list[str] = []

    async def batch(queue: BatchQueue, name: str) -> None:
        for _ in range(3):
            await queue.wait_for_turn(50)
            steps.append(name)

    async def watch() -> None:
        while len(steps) - steps.count("|") < 9:
            steps.append("|")
            await asyncio.sleep(0)

    async def whole() -> None:
        queue = BatchQueue()
        await asyncio.gather(*(batch(queue, name) for name in "abc"), watch())

    asyncio.run(whole())
    slices = "".join(steps).strip("|").split("|")
    assert max(len(each) for each in slices) == 1
    assert "".join(slices)[1:].startswith("abc"), "the first one had a turn before the others came"


def test_a_batch_that_is_cancelled_while_it_waits_delays_no_other() -> None:
    errors: list[object] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        queue = BatchQueue()
        active, cancelled, last = (
            asyncio.create_task(queue.wait_for_turn(each)) for each in (CHECKS_PER_ITERATION, 1, 1)
        )
        await asyncio.sleep(0)
        assert (len(queue._turns), active.done()) == (2, True)
        cancelled.cancel()
        await asyncio.wait_for(last, 10)
        assert cancelled.cancelled()

    asyncio.run(whole())
    assert errors == []


def test_a_tenant_without_batches_is_forgotten() -> None:
    async def test(batches: RecordedBatches) -> None:
        for index in range(3):
            batches.submit(f"a{index}")
        for _ in range(3):
            await settle()
            await batches.end_first()
        assert batches.started == ["a0", "a1", "a2"]
        kept = (batches.queue._waiting, batches.queue._weights, batches.queue._active)
        assert [len(tenants) for tenants in kept] == [0, 0, 0]

    run(test)
