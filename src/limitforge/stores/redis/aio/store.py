"""Decide checks on Redis from asyncio: concurrent checks share calls."""

import asyncio
import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.decision import CheckResult, Decision
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Command, ResultT, StoreStatus
from limitforge.stores.redis.aio.event_loop import EventLoopClient
from limitforge.stores.redis.core import CheckBatch, RedisCore, is_for_local_handle


class RedisStore:
    """An asynchronous store on Redis. It uses the clock of Redis, unless tests or replays pass a `clock`.

    It may be used from several event loops, each with connections of its own.
    """

    def __init__(
        self, url: str, *, keys: Keys | None = None, clock: Clock | None = None, options: StoreOptions | None = None
    ) -> None:
        self.keys = keys or Keys()
        self._options = options or StoreOptions()
        self._core = RedisCore(url, self.keys, clock, self._options, self._charge)
        self._lock = threading.Lock()
        self._clients: dict[asyncio.AbstractEventLoop, EventLoopClient] = {}
        self._latest_client: EventLoopClient | None = None

    async def check(self, check: Check) -> Decision:
        client = self._current_client()
        result = client.decide_in_process(check)
        if result is not None:
            return cast("Decision", result)
        future = client.loop.create_future()
        pending = client.submit(check, future.set_result)
        try:
            reply: Decision | LimitforgeError = await future
        except asyncio.CancelledError:
            pending.on_reply = None  # if it was not sent yet, it never will be
            raise
        if isinstance(reply, LimitforgeError):
            raise copy.copy(reply)  # other checks of its batch may raise the same object
        return reply

    def submit(self, check: Check, on_result: Callable[[CheckResult], None]) -> None:
        client = self._latest_client
        if client is None or client.thread_id != threading.get_ident() or not client.loop.is_running():
            client = self._current_client()
        client.decide_or_submit(check, on_result)

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        client = self._current_client()
        batch = CheckBatch(checks, client.decide_in_process)
        if batch.to_send:
            all_replied = client.loop.create_future()
            pending_replies = len(batch.to_send)

            def on_reply(index: int, reply: Decision | LimitforgeError) -> None:
                nonlocal pending_replies
                batch.set_result(index, reply)
                pending_replies -= 1
                if not pending_replies and not all_replied.done():
                    all_replied.set_result(None)

            submitted = [
                client.submit(check, partial(on_reply, index), batch) for index, check in enumerate(batch.to_send)
            ]
            try:
                await all_replied
            except asyncio.CancelledError:
                for pending in submitted:
                    pending.on_reply = None
                raise
        return cast("list[Decision | LimitforgeError]", batch.results)

    async def run(self, command: Command[ResultT]) -> ResultT:
        if is_for_local_handle(command):
            return self._core.local_store.run(command)
        client = self._current_client()
        try:
            result = await client.run(command)
        except BaseException as error:
            self._core.invalidate_after_failure(command, error)
            raise
        invalidation = self._core.invalidate_for(command)
        if invalidation is not None:
            await client.publish_invalidation(invalidation)
        return result

    def set_server_memory(self, memory_bytes: int) -> None:
        self._core.set_server_memory(memory_bytes)

    def status(self) -> StoreStatus:
        return self._core.status(sum(client.pending_count for client in list(self._clients.values())))

    async def close(self) -> None:
        """Close every connection. Checks that wait are decided by their failure behaviour."""
        running = asyncio.get_running_loop()
        with self._lock:
            clients, self._clients, self._latest_client = self._clients, {}, None
        for loop, client in clients.items():
            if loop is running:
                await client.close()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(client.close_soon)
        self._core.topology.close()

    def _charge(self, charges: Sequence[Check]) -> None:
        """Send pending charges from the loop that got the first answer after the outage."""
        self._current_client().charge_soon(charges)

    def _current_client(self) -> EventLoopClient:
        """Return the client of the running loop."""
        loop = asyncio.get_running_loop()
        client = self._latest_client
        if client is None or client.loop is not loop:
            client = self._client_for(loop)
        return client

    def _client_for(self, loop: asyncio.AbstractEventLoop) -> EventLoopClient:
        with self._lock:
            client = self._clients.get(loop)
            if client is None:
                for ended in [known for known in self._clients if known.is_closed()]:
                    del self._clients[ended]
                client = self._clients[loop] = EventLoopClient(self._core, self._options)
            self._latest_client = client
        return client
