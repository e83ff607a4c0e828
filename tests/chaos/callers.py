"""Callers that send checks in a loop: tasks on an event loop, or threads. Any thread can control them."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from limitforge import Decision, Limiter, LimitforgeError, SyncLimiter
from tests.chaos.background_loop import BackgroundLoop
from tests.chaos.load_record import WORKLOADS, LoadRecord, Workload, record_check

PATIENCE_SECONDS = 45.0  # less than the timeout of a test, which would not say what is missing


class Callers(Protocol):
    """Callers of one kind, with their limiter."""

    @property
    def limiter(self) -> Limiter | SyncLimiter: ...

    def start(self, record: LoadRecord) -> None: ...

    def end(self) -> int:
        """Stop all callers. Return how many got no result of their last check."""

    def check(self, workload: Workload, cost: int = 1) -> Decision:
        """Send one more check, from the test itself."""

    def close(self) -> None: ...


class TaskCallers:
    """Callers on one event loop, by `await check()` or by `submit`."""

    def __init__(
        self,
        limiter: Limiter,
        *,
        callers: int = 64,
        pause: float = 0.01,
        by: Callable[[Limiter, Workload], Coroutine[Any, Any, Decision]],
    ) -> None:
        self.limiter = limiter
        self._callers, self._pause, self._by = callers, pause, by
        self._loop = BackgroundLoop()
        self._going = True
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, record: LoadRecord) -> None:
        async def begin() -> None:
            self._ticker = asyncio.create_task(record.loop.measure_loop())
            self._tasks = [
                asyncio.create_task(self._call(WORKLOADS[n % len(WORKLOADS)], record)) for n in range(self._callers)
            ]

        self._loop.run(begin())

    def end(self) -> int:
        async def finish() -> int:
            self._going = False
            _, waiting = await asyncio.wait(self._tasks, timeout=PATIENCE_SECONDS)
            for task in (*waiting, self._ticker):
                task.cancel()
            await asyncio.wait((*waiting, self._ticker), timeout=1)
            return len(waiting)

        return self._loop.run(finish(), 2 * PATIENCE_SECONDS)

    def check(self, workload: Workload, cost: int = 1) -> Decision:
        return self._loop.run(
            self.limiter.check(workload.resource, workload.subject, limits=workload.limits, cost=cost)
        )

    def close(self) -> None:
        try:
            self._loop.run(self.limiter.close())
        finally:
            self._loop.stop()

    async def _call(self, workload: Workload, record: LoadRecord) -> None:
        while self._going:
            began = time.monotonic()
            try:
                answer: Decision | BaseException = await self._by(self.limiter, workload)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                answer = error
            record.checks.append(record_check(workload, began, answer))
            await asyncio.sleep(self._pause)


async def by_check(limiter: Limiter, workload: Workload) -> Decision:
    return await limiter.check(workload.resource, workload.subject, limits=workload.limits)


async def by_submit(limiter: Limiter, workload: Workload) -> Decision:
    answers: asyncio.Queue[Decision | LimitforgeError] = asyncio.Queue()
    limiter.submit(answers.put_nowait, workload.resource, workload.subject, limits=workload.limits)
    answer = await answers.get()
    if not answers.empty():
        raise AssertionError(f"answered twice: {answer}, {answers.get_nowait()}")
    if isinstance(answer, Decision):
        return answer
    raise answer


class ThreadCallers:
    """Callers in threads, on one `SyncLimiter`."""

    def __init__(self, limiter: SyncLimiter, *, callers: int = 16, pause: float = 0.005) -> None:
        self.limiter = limiter
        self._callers, self._pause = callers, pause
        self._going = True
        self._threads: list[threading.Thread] = []

    def start(self, record: LoadRecord) -> None:
        self._threads = [
            threading.Thread(target=self._call, args=(WORKLOADS[n % len(WORKLOADS)], record), daemon=True)
            for n in range(self._callers)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> int:
        self._going = False
        deadline = time.monotonic() + PATIENCE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def check(self, workload: Workload, cost: int = 1) -> Decision:
        return self.limiter.check(workload.resource, workload.subject, limits=workload.limits, cost=cost)

    def close(self) -> None:
        self.limiter.close()

    def _call(self, workload: Workload, record: LoadRecord) -> None:
        while self._going:
            began = time.monotonic()
            try:
                answer: Decision | BaseException = self.check(workload)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                answer = error
            record.checks.append(record_check(workload, began, answer))
            time.sleep(self._pause)
