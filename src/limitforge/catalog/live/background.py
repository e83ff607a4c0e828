"""The background tasks of a live catalog or a live file."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from limitforge.errors import CatalogError, StoreError
from limitforge.observability.events import log_event

CANCEL_SECONDS = 1.0

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Runs tasks until `close`. Closing cancels them, but lets work of `run_to_completion` finish."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self._work: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that runs until `close`."""
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def start_periodic(
        self, name: str, pause_seconds: Callable[[], float], work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Start a task that repeats `work`. Errors are logged with `name`, and do not end the task."""
        self.start(self._repeat(name, pause_seconds, work))

    def start_work(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start work that `close` lets finish: a driver that is cancelled during a statement may leave a thread."""
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._finished)
        return task

    async def run_to_completion(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work that continues if this call is cancelled."""
        await asyncio.shield(self.start_work(work))

    async def close(self) -> None:
        tasks, self.tasks = self.tasks, []
        while tasks:
            for task in tasks:
                task.cancel()  # repeatedly: a library may swallow a cancellation
            tasks = list((await asyncio.wait(tasks, timeout=CANCEL_SECONDS))[1])
        if self._work:
            await asyncio.wait(self._work, timeout=CANCEL_SECONDS)
        while self._work:
            for task in list(self._work):
                task.cancel()
            await asyncio.wait(self._work, timeout=CANCEL_SECONDS)

    async def _repeat(
        self, name: str, pause_seconds: Callable[[], float], work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        while True:
            await asyncio.sleep(pause_seconds())
            try:
                await self.run_to_completion(work())
            except (CatalogError, StoreError) as error:
                log_event(
                    _log,
                    logging.WARNING,
                    "catalog.task_failed",
                    "a periodic task failed, will retry",
                    task=name,
                    error=error,
                )
            except Exception:  # noqa: BLE001 - an unexpected error must not end the task for good
                log_event(
                    _log,
                    logging.ERROR,
                    "catalog.task_failed",
                    "a periodic task failed, will retry",
                    exc_info=True,
                    task=name,
                )

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # mark the error as retrieved: the task that waited may have been cancelled
