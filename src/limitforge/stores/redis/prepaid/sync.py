"""Keep the prepaid shares of one event loop in sync with the store, and send the heartbeats of the process."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from limitforge.core.plan import BUCKET_US
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.redis.codec import Flow, split_by_weight
from limitforge.stores.redis.core import COMMAND_TIMEOUT_SECONDS, RedisCore
from limitforge.stores.redis.prepaid.shares import PrepaidShares, TopUpReply, TopUpRequest
from limitforge.stores.redis.topology.hash_slots import group_by_slot

RunFlow = Callable[[Flow[Any], float], Coroutine[None, None, Any]]


class PrepaidSync:
    """Syncs on a timer, which stops when there is no share left and no check needs heartbeats.

    `run_flow` runs a flow against the store. `listen` starts listening to invalidations of other processes.
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
        self._shares = shares
        self._interval_seconds = interval_seconds
        self._run_flow = run_flow
        self._listen = listen
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    def ensure_running(self) -> None:
        """Start the timer unless it runs. Call it for each check that this process may decide in part."""
        if self._timer is None and not self._is_stopped:
            self._listen()
            self._timer = self._loop.call_later(self._interval_seconds, self._tick)
            if self._core.topology.heartbeat.claim_if_due():
                self._start_task(self._send_heartbeat())

    def stop(self) -> None:
        """Send no more requests."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def shut_down(self) -> None:
        """Stop, return all shares to the store, and remove this process from the live ones."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=COMMAND_TIMEOUT_SECONDS)
        await asyncio.gather(*map(self._sync_batch, self._batches(self._shares.return_all())))
        if self._core.topology.heartbeat.is_needed:
            with suppress(LimitforgeError):
                await self._run_flow(self._core.heartbeat_flow(0), COMMAND_TIMEOUT_SECONDS)

    def _tick(self) -> None:
        self._timer = None
        for requests in self._batches(self._shares.due_requests()):
            self._start_task(self._sync_batch(requests))
        if len(self._shares) or self._core.topology.heartbeat.is_needed:
            self.ensure_running()

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sync_batch(self, requests: list[TopUpRequest]) -> None:
        sent_us = self._shares.now_us()
        replies: Sequence[TopUpReply | None] | None = None
        try:
            replies = await self._run_flow(
                self._core.top_up_flow(requests, self._shares.lapse_us), COMMAND_TIMEOUT_SECONDS
            )
        except StoreUnavailable as error:
            replies = None if error.maybe_counted else [None] * len(requests)
        except LimitforgeError:
            replies = None
        finally:
            self._shares.apply_replies(requests, replies, sent_us)

    async def _send_heartbeat(self) -> None:
        with suppress(LimitforgeError):
            self._core.topology.heartbeat.set_process_count(
                await self._run_flow(self._core.heartbeat_flow(), COMMAND_TIMEOUT_SECONDS)
            )

    def _batches(self, requests: Sequence[TopUpRequest]) -> list[list[TopUpRequest]]:
        """Split the requests into batches for one call each: one slot, and at most MAX_CALL_US of work."""
        return [
            same_slot[part.start : part.stop]
            for same_slot in group_by_slot(requests, lambda request: self._core.topology.slot_of(request.share.key))
            for part in split_by_weight([BUCKET_US] * len(same_slot))
        ]
