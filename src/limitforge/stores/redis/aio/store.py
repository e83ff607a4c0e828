"""Decisions on Redis, for an event loop: one call for all that is waiting, and an honest answer when Redis is gone."""

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
from limitforge.stores.redis.core import CallerBatch, RedisCore, is_for_local_handle


class RedisStore:
    """Decides in Redis, by Redis's time. A `clock` replaces that time: for tests and replays only.

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
        line = self._client()
        decided = line.decide_in_process(check)
        if decided is not None:
            return cast("Decision", decided)
        future = line.loop.create_future()
        asked = line.submit(check, future.set_result)
        try:
            answer: Decision | LimitforgeError = await future
        except asyncio.CancelledError:
            asked.on_reply = None  # if it has not left yet it never will
            raise
        if isinstance(answer, LimitforgeError):
            raise copy.copy(answer)  # others of its batch may be told the same
        return answer

    def submit(self, check: Check, on_result: Callable[[CheckResult], None]) -> None:
        line = self._latest_client
        if line is None or line.thread_id != threading.get_ident() or not line.loop.is_running():
            line = self._client()
        line.start_check(check, on_result)

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        line = self._client()
        batch = CallerBatch(checks, line.decide_in_process)
        if batch.to_send:
            answered = line.loop.create_future()
            owed = len(batch.to_send)

            def tell(at: int, answer: Decision | LimitforgeError) -> None:
                nonlocal owed
                batch.set_result(at, answer)
                owed -= 1
                if not owed and not answered.done():
                    answered.set_result(None)

            everything = [line.submit(check, partial(tell, at), batch) for at, check in enumerate(batch.to_send)]
            try:
                await answered
            except asyncio.CancelledError:
                for asked in everything:
                    asked.on_reply = None
                raise
        return cast("list[Decision | LimitforgeError]", batch.results)

    async def run(self, command: Command[ResultT]) -> ResultT:
        if is_for_local_handle(command):
            return self._core.topology.local_store.run(command)
        line = self._client()
        try:
            answer = await line.run(command)
        except BaseException as error:
            self._core.invalidate_after_failure(command, error)
            raise
        drop = self._core.invalidate_for(command)
        if drop is not None:
            await line.publish_invalidation(drop)
        return answer

    def set_server_memory(self, memory_bytes: int) -> None:
        self._core.set_server_memory(memory_bytes)

    def status(self) -> StoreStatus:
        return self._core.status(sum(line.pending_count for line in list(self._clients.values())))

    async def close(self) -> None:
        """Let go of every connection. Checks that wait are answered by their failure behaviour."""
        here = asyncio.get_running_loop()
        with self._lock:
            lines, self._clients, self._latest_client = self._clients, {}, None
        for loop, line in lines.items():
            if loop is here:
                await line.close()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(line.close_soon)
        self._core.topology.close()

    def _charge(self, charges: Sequence[Check]) -> None:
        """On the loop that heard that the store is back."""
        self._client().charge_soon(charges)

    def _client(self) -> EventLoopClient:
        """What belongs to the running loop."""
        loop = asyncio.get_running_loop()
        line = self._latest_client
        if line is None or line.loop is not loop:
            line = self._client_of(loop)
        return line

    def _client_of(self, loop: asyncio.AbstractEventLoop) -> EventLoopClient:
        with self._lock:
            line = self._clients.get(loop)
            if line is None:
                for ended in [known for known in self._clients if known.is_closed()]:
                    del self._clients[ended]
                line = self._clients[loop] = EventLoopClient(self._core, self._options)
            self._latest_client = line
        return line
