"""Keeps what one event loop has of leased limits in step with the store, and says that its process is alive."""

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
    """Runs while anybody needs it. `carry` brings a flow to the store, `listen` hears of changes from other nodes."""

    def __init__(
        self,
        parts: RedisCore,
        shares: PrepaidShares,
        interval_seconds: float,
        run_flow: RunFlow,
        listen: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts = parts
        self._shares = shares
        self._interval_seconds = interval_seconds
        self._run_flow = run_flow
        self._listen = listen
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    def ensure_running(self) -> None:
        """Somebody asked for a limit that this process may decide."""
        if self._timer is None and not self._is_stopped:
            self._listen()
            self._timer = self._loop.call_later(self._interval_seconds, self._tick)
            if self._parts.topology.heartbeat.claim_if_due():
                self._start_task(self._send_heartbeat())

    def stop(self) -> None:
        """Nothing is paid for any more."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def shut_down(self) -> None:
        """Give back what was paid for and not spent, and do not count as alive any more."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=COMMAND_TIMEOUT_SECONDS)
        await asyncio.gather(*map(self._sync_batch, self._batches(self._shares.return_all())))
        if self._parts.topology.heartbeat.is_needed:
            with suppress(LimitforgeError):
                await self._run_flow(self._parts.heartbeat_flow(0), COMMAND_TIMEOUT_SECONDS)

    def _tick(self) -> None:
        self._timer = None
        for wishes in self._batches(self._shares.due_requests()):
            self._start_task(self._sync_batch(wishes))
        if len(self._shares) or self._parts.topology.heartbeat.is_needed:
            self.ensure_running()

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sync_batch(self, wishes: list[TopUpRequest]) -> None:
        sent_us = self._shares.now_us()
        grants: Sequence[TopUpReply | None] | None = None
        try:
            grants = await self._run_flow(
                self._parts.top_up_flow(wishes, self._shares.lapse_us), COMMAND_TIMEOUT_SECONDS
            )
        except StoreUnavailable as error:
            grants = None if error.maybe_counted else [None] * len(wishes)
        except LimitforgeError:
            grants = None
        finally:
            self._shares.apply_replies(wishes, grants, sent_us)

    async def _send_heartbeat(self) -> None:
        with suppress(LimitforgeError):
            self._parts.topology.heartbeat.set_process_count(
                await self._run_flow(self._parts.heartbeat_flow(), COMMAND_TIMEOUT_SECONDS)
            )

    def _batches(self, wishes: Sequence[TopUpRequest]) -> list[list[TopUpRequest]]:
        """As many as one call can take, of one slot each."""
        return [
            together[part.start : part.stop]
            for together in group_by_slot(wishes, lambda wish: self._parts.topology.slot_of(wish.share.key))
            for part in split_by_weight([BUCKET_US] * len(together))
        ]
