"""An event loop in another thread, for tests that block."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

PATIENCE_SECONDS = 45.0  # less than the timeout of a test, which would not say what is missing

T = TypeVar("T")


class BackgroundLoop:
    """Runs until it is stopped, and then ends as `asyncio.run` does."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = PATIENCE_SECONDS) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(PATIENCE_SECONDS)

    async def _main(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._stopped.wait()
