"""Decisions on Redis, for an event loop: one call for all that is waiting, and an honest answer when Redis is gone."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.decision import Decision
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.denials import Drop
from limitforge.stores.listener import Listener
from limitforge.stores.options import StoreOptions
from limitforge.stores.pipeline import Pending, Pipeline
from limitforge.stores.protocol import Answer, Command, StoreStatus
from limitforge.stores.redis_parts import COMMAND_SECONDS, Parts, dropped_by
from limitforge.stores.resp import address_of

_log = logging.getLogger(__name__)


class RedisStore:
    """Decides in Redis, by Redis's time. A `clock` replaces that time: for tests and replays only.

    It may be used from several event loops, each with a connection of its own.
    """

    def __init__(
        self, url: str, *, keys: Keys | None = None, clock: Clock | None = None, options: StoreOptions | None = None
    ) -> None:
        self.keys = keys or Keys()
        self._url = url
        self._address = address_of(url)
        self._options = options or StoreOptions()
        self._parts = Parts(self.keys, clock, self._options)
        self._lock = threading.Lock()
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}
        self._latest: _Line | None = None

    async def check(self, check: Check) -> Decision:
        line = self._line()
        denied = line.denied(check)
        if denied is not None:
            return denied
        pipeline = line.pipeline
        future = pipeline.loop.create_future()
        pending = Pending(check, future.set_result, pipeline.loop.time() + pipeline.deadline)
        pipeline.submit(pending)
        try:
            answer: Decision | LimitforgeError = await future
        except asyncio.CancelledError:
            pending.tell = None  # if it has not left yet it never will
            raise
        if isinstance(answer, LimitforgeError):
            raise answer.with_traceback(None)
        return answer

    def submit(self, check: Check, answer: Callable[[Decision | LimitforgeError], None]) -> None:
        line = self._line()
        denied = line.denied(check)
        if denied is not None:
            answer(denied)
            return
        pipeline = line.pipeline
        pipeline.submit(Pending(check, answer, pipeline.loop.time() + pipeline.deadline))

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        line = self._line()
        answers = [line.denied(check) for check in checks]
        asked = [check for check, known in zip(checks, answers, strict=True) if known is None]
        judged: list[Decision | LimitforgeError]
        try:
            judged = await line.pipeline.carry(self._parts.judge(asked), line.pipeline.deadline) if asked else []
        except StoreUnavailable as error:
            judged = [self._parts.resilience.decide(check, error) for check in asked]
        remaining = iter(judged)
        return [next(remaining) if known is None else known for known in answers]

    async def run(self, command: Command[Answer]) -> Answer:
        if self._parts.is_local(command):
            return self._parts.resilience.local.run(command)
        line = self._line()
        try:
            return await line.pipeline.carry(self._parts.command(command), COMMAND_SECONDS)
        finally:  # also when it failed: it may have been carried out
            drop = dropped_by(command)
            if drop is not None and self._parts.denials is not None:
                self._parts.denials.drop(drop)
                await self._tell_others(line, drop)

    def status(self) -> StoreStatus:
        return self._parts.status(sum(line.pipeline.waiting for line in list(self._lines.values())))

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

    async def _tell_others(self, line: "_Line", drop: Drop) -> None:
        try:
            self._parts.resilience.refuse_if_open()
            async with asyncio.timeout(COMMAND_SECONDS):
                await line.pipeline.publish(self._parts.channel, drop.message())
        except (TimeoutError, LimitforgeError) as error:
            age_ms = self._options.denial_cache_ms
            _log.warning("other nodes were not told, and may deny for %g ms more: %s", age_ms, error)

    def _line(self) -> "_Line":
        """What belongs to the running loop."""
        loop = asyncio.get_running_loop()
        line = self._latest
        if line is None or line.pipeline.loop is not loop:
            line = self._latest = self._line_of(loop)
        return line

    def _line_of(self, loop: asyncio.AbstractEventLoop) -> "_Line":
        with self._lock:
            line = self._lines.get(loop)
            if line is None:
                for ended in [known for known in self._lines if known.is_closed()]:
                    del self._lines[ended]
                line = self._lines[loop] = _Line(self._url, self._parts, self._pipeline())
        return line

    def _pipeline(self) -> Pipeline:
        options = self._options
        return Pipeline(
            self._address,
            self._parts.resilience,
            self._parts.judge_batch,
            deadline_ms=options.deadline_ms,
            max_waiting=options.max_waiting,
        )


class _Line:
    """A store's side on one event loop: its pipeline, and who listens to the other nodes."""

    def __init__(self, url: str, parts: Parts, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._url = url
        self._parts = parts
        self._denials = parts.denials
        self._listener: Listener | None = None

    def denied(self, check: Check) -> Decision | None:
        """A denial that needs no asking."""
        denials = self._denials
        if denials is None or not denials.is_active:
            return None
        if self._listener is None:
            self._listener = Listener(self._url, self._parts.channel, denials)
            self._listener.start()
        return denials.look(check)

    async def close(self) -> None:
        self.pipeline.close()
        if self._listener is not None:
            await self._listener.stop()

    def close_soon(self) -> None:
        """For another thread's loop."""
        self._closing = self.pipeline.loop.create_task(self.close())
