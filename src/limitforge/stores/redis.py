"""Decisions on Redis, for an event loop: one call for all that is waiting, and an honest answer when Redis is gone."""

import asyncio
import copy
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from limitforge.core.check import Check
from limitforge.core.clock import Clock
from limitforge.core.decision import Decision
from limitforge.core.keys import Keys
from limitforge.errors import LimitforgeError, StoreUnavailable
from limitforge.stores.codec import Reply, parts
from limitforge.stores.denials import Drop
from limitforge.stores.listener import Listener
from limitforge.stores.options import StoreOptions
from limitforge.stores.pipeline import Asked, Pipeline
from limitforge.stores.protocol import Answer, Command, StoreStatus
from limitforge.stores.redis_parts import COMMAND_SECONDS, Batch, Parts, is_local
from limitforge.stores.resp import Address, address_of


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
        loop = pipeline.loop
        future = loop.create_future()
        asked = Asked(check, future.set_result, loop.time() + pipeline.deadline)
        pipeline.submit(asked)
        try:
            answer: Decision | LimitforgeError = await future
        except asyncio.CancelledError:
            asked.tell = None  # if it has not left yet it never will
            raise
        if isinstance(answer, LimitforgeError):
            raise copy.copy(answer)  # others of its batch may be told the same
        return answer

    def submit(self, check: Check, answer: Callable[[Decision | LimitforgeError], None]) -> None:
        line = self._line()
        denied = line.denied(check)
        pipeline = line.pipeline
        asked = Asked(check, answer, pipeline.loop.time() + pipeline.deadline)
        if denied is None:
            pipeline.submit(asked)
        else:
            pipeline.tell(asked, denied)

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        line = self._line()
        pipeline = line.pipeline
        batch = Batch(checks, line.denied)
        if batch.asked:
            answered = pipeline.loop.create_future()
            due = pipeline.loop.time() + pipeline.deadline
            owed = len(batch.asked)

            def tell(at: int, answer: Decision | LimitforgeError) -> None:
                nonlocal owed
                batch.answer(at, answer)
                owed -= 1
                if not owed and not answered.done():
                    answered.set_result(None)

            everything = [Asked(check, partial(tell, at), due, batch) for at, check in enumerate(batch.asked)]
            for asked in everything:
                pipeline.submit(asked)
            try:
                await answered
            except asyncio.CancelledError:
                for asked in everything:
                    asked.tell = None
                raise
        return cast("list[Decision | LimitforgeError]", batch.answers)

    async def run(self, command: Command[Answer]) -> Answer:
        if is_local(command):
            return self._parts.resilience.local.run(command)
        line = self._line()
        try:
            answer = await line.pipeline.link.carry(self._parts.command(command), COMMAND_SECONDS)
        except BaseException as error:
            self._parts.drop_after(command, error)
            raise
        drop = self._parts.drop(command)
        if drop is not None:
            await line.tell_others(drop)
        return answer

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
        self._parts.resilience.close()

    def _line(self) -> "_Line":
        """What belongs to the running loop."""
        loop = asyncio.get_running_loop()
        line = self._latest
        if line is None or line.pipeline.loop is not loop:
            line = self._line_of(loop)
        return line

    def _line_of(self, loop: asyncio.AbstractEventLoop) -> "_Line":
        with self._lock:
            line = self._lines.get(loop)
            if line is None:
                for ended in [known for known in self._lines if known.is_closed()]:
                    del self._lines[ended]
                line = self._lines[loop] = _Line(self._url, self._address, self._parts, self._options)
            self._latest = line
        return line


class _Line:
    """A store's side on one event loop: its pipeline, and who listens to the other nodes."""

    def __init__(self, url: str, address: Address, parts: Parts, options: StoreOptions) -> None:
        self._url = url
        self._parts = parts
        self._denials = parts.denials
        self._listener: Listener | None = None
        self._telling: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.pipeline = Pipeline(
            address,
            parts.resilience,
            parts.judge,
            self._charge_soon,
            deadline_ms=options.deadline_ms,
            max_waiting=options.max_waiting,
        )
        self._guard = self._until_the_loop_ends()
        with suppress(StopIteration):
            self._guard.asend(None).send(None)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        """Loops end their generators before they are closed: so connections never outlive `asyncio.run`."""
        try:
            yield
        finally:
            self.pipeline.close()

    def denied(self, check: Check) -> Decision | None:
        """A denial that needs no asking."""
        denials = self._denials
        if denials is None or not denials.is_active:
            return None
        if self._listener is None or not self._listener.is_running:
            self._listener = Listener(self._url, self._parts.channel, denials)
            self._listener.start()
        return denials.look(check)

    async def tell_others(self, drop: Drop) -> None:
        """Nobody waits for the answer, unless the limiter is closed before it comes."""
        told = self.pipeline.loop.create_future()
        self._telling.add(told)
        try:
            await self.pipeline.link.publish(self._parts.channel, drop.message(), partial(self._told, told))
        except (TimeoutError, LimitforgeError) as error:
            self._told(told, StoreUnavailable(str(error) or "Redis did not answer"))

    def _told(self, told: "asyncio.Future[None]", reply: Reply | LimitforgeError) -> None:
        self._telling.discard(told)
        if not told.done():
            told.set_result(None)
        if isinstance(reply, LimitforgeError):
            self._parts.warn_untold(reply)

    def close_soon(self) -> None:
        """For another thread's loop."""
        self._start(self.close())

    async def close(self) -> None:
        if self._telling:
            await asyncio.wait(self._telling, timeout=self.pipeline.deadline)
        await self._guard.aclose()
        if self._listener is not None:
            await self._listener.stop()

    def _charge_soon(self, charges: Sequence[Check]) -> None:
        if charges:
            self._start(self._charge(charges))

    async def _charge(self, charges: Sequence[Check]) -> None:
        """What was admitted without the store, beside the callers and in no hurry."""
        answers: list[Decision | LimitforgeError] = []
        for part in parts(charges):
            try:
                answers += await self.pipeline.link.carry(self._parts.judge(part), COMMAND_SECONDS)
            except LimitforgeError as error:
                answers += [error] * len(part)
            except asyncio.CancelledError:
                lost = StoreUnavailable("the event loop ended", maybe_counted=True)
                self._parts.charged(charges, [*answers, *[lost] * (len(charges) - len(answers))])
                raise
        self._parts.charged(charges, answers)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self.pipeline.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
