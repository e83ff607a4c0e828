"""Keep the prepaid shares of one event loop in step with the store, and send the heartbeat of its process."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from limitforge.errors import LimitforgeError
from limitforge.stores.redis.core import COMMAND_TIMEOUT_SECONDS, RedisCore
from limitforge.stores.redis.prepaid.shares import PrepaidShares, TopUpRequest
from limitforge.stores.redis.prepaid.top_up import TopUp, top_up_batches
from limitforge.stores.redis.script_call import Flow

RunFlow = Callable[[Flow[Any], float], Coroutine[None, None, Any]]


class PrepaidSync:
    """A timer that runs while shares are held or the process count is needed.

    `run_flow` carries a flow to the store, `listen` starts to listen for invalidations.
    """

    def __init__(
        self,
        core: RedisCore,
        shares: PrepaidShares,
        interval_seconds: float,
        run_flow: RunFlow,
        listen: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._core = core
        self._heartbeat = core.heartbeat
        self._shares = shares
        self._interval_seconds = interval_seconds
        self._run_flow = run_flow
        self._listen = listen
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    def ensure_running(self) -> None:
        """Start the timer, unless it runs or was stopped for good."""
        if self._timer is None and not self._is_stopped:
            self._listen()
            self._timer = self._loop.call_later(self._interval_seconds, self._tick)
            if self._heartbeat.claim_if_due():
                self._start_task(self._send_heartbeat())

    def stop(self) -> None:
        """Stop the timer for good."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def shut_down(self) -> None:
        """Stop, return all prepaid balances, and remove this process from the count of live processes."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=COMMAND_TIMEOUT_SECONDS)
        batches = top_up_batches(self._shares.return_all(), self._core.topology.slot_of)
        await asyncio.gather(*map(self._top_up, batches))
        if self._heartbeat.is_needed:
            with suppress(LimitforgeError):
                await self._run_flow(self._core.heartbeat_flow(alive_us=0), COMMAND_TIMEOUT_SECONDS)

    def _tick(self) -> None:
        self._timer = None
        for batch in top_up_batches(self._shares.due_requests(), self._core.topology.slot_of):
            self._start_task(self._top_up(batch))
        if len(self._shares) or self._heartbeat.is_needed:
            self.ensure_running()

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _top_up(self, batch: list[TopUpRequest]) -> None:
        with TopUp(self._shares, batch) as top_up:
            flow = self._core.top_up_flow(batch, self._shares.lapse_us)
            top_up.replies = await self._run_flow(flow, COMMAND_TIMEOUT_SECONDS)

    async def _send_heartbeat(self) -> None:
        with suppress(LimitforgeError):
            count = await self._run_flow(self._core.heartbeat_flow(), COMMAND_TIMEOUT_SECONDS)
            self._heartbeat.set_process_count(count)
