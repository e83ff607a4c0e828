"""Decisions on Redis, for an event loop: one call for all that is waiting, and an honest answer when Redis is gone."""

import asyncio
import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.decision import Decision, Judged
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError
from limitforge.stores.line import Line
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Answer, Command, StoreStatus
from limitforge.stores.redis_parts import Batch, Parts, is_local


class RedisStore:
    """Decides in Redis, by Redis's time. A `clock` replaces that time: for tests and replays only.

    It may be used from several event loops, each with connections of its own.
    """

    def __init__(
        self, url: str, *, keys: Keys | None = None, clock: Clock | None = None, options: StoreOptions | None = None
    ) -> None:
        self.keys = keys or Keys()
        self._options = options or StoreOptions()
        self._parts = Parts(url, self.keys, clock, self._options, self._charge)
        self._lock = threading.Lock()
        self._lines: dict[asyncio.AbstractEventLoop, Line] = {}
        self._latest: Line | None = None

    async def check(self, check: Check) -> Decision:
        line = self._line()
        decided = line.decided(check)
        if decided is not None:
            return cast("Decision", decided)
        future = line.loop.create_future()
        asked = line.submit(check, future.set_result)
        try:
            answer: Decision | LimitforgeError = await future
        except asyncio.CancelledError:
            asked.tell = None  # if it has not left yet it never will
            raise
        if isinstance(answer, LimitforgeError):
            raise copy.copy(answer)  # others of its batch may be told the same
        return answer

    def submit(self, check: Check, answer: Callable[[Judged], None]) -> None:
        line = self._latest
        if line is None or line.thread != threading.get_ident() or not line.loop.is_running():
            line = self._line()
        line.ask(check, answer)

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        line = self._line()
        batch = Batch(checks, line.decided)
        if batch.asked:
            answered = line.loop.create_future()
            owed = len(batch.asked)

            def tell(at: int, answer: Decision | LimitforgeError) -> None:
                nonlocal owed
                batch.answer(at, answer)
                owed -= 1
                if not owed and not answered.done():
                    answered.set_result(None)

            everything = [line.submit(check, partial(tell, at), batch) for at, check in enumerate(batch.asked)]
            try:
                await answered
            except asyncio.CancelledError:
                for asked in everything:
                    asked.tell = None
                raise
        return cast("list[Decision | LimitforgeError]", batch.answers)

    async def run(self, command: Command[Answer]) -> Answer:
        if is_local(command):
            return self._parts.fleet.local.run(command)
        line = self._line()
        try:
            answer = await line.run(command)
        except BaseException as error:
            self._parts.drop_after(command, error)
            raise
        drop = self._parts.drop(command)
        if drop is not None:
            await line.tell_others(drop)
        return answer

    def fit_memory(self, memory_bytes: int) -> None:
        self._parts.fit_memory(memory_bytes)

    def status(self) -> StoreStatus:
        return self._parts.status(sum(line.waiting for line in list(self._lines.values())))

    async def close(self) -> None:
        """Let go of every connection. Checks that wait are answered by their failure behaviour."""
        here = asyncio.get_running_loop()
        with self._lock:
            lines, self._lines, self._latest = self._lines, {}, None
        for loop, line in lines.items():
            if loop is here:
                await line.close()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(line.close_soon)
        self._parts.fleet.close()

    def _charge(self, charges: Sequence[Check]) -> None:
        """On the loop that heard that the store is back."""
        self._line().charge_soon(charges)

    def _line(self) -> Line:
        """What belongs to the running loop."""
        loop = asyncio.get_running_loop()
        line = self._latest
        if line is None or line.loop is not loop:
            line = self._line_of(loop)
        return line

    def _line_of(self, loop: asyncio.AbstractEventLoop) -> Line:
        with self._lock:
            line = self._lines.get(loop)
            if line is None:
                for ended in [known for known in self._lines if known.is_closed()]:
                    del self._lines[ended]
                line = self._lines[loop] = Line(self._parts, self._options)
            self._latest = line
        return line
