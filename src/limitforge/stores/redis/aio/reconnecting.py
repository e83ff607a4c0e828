"""The connection of one event loop to one Redis: opened when somebody needs it, one at a time, and again when lost."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.redis.aio.connection import Connection, OnCallReply
from limitforge.stores.redis.codec import Flow, Reply, ScriptCall, T
from limitforge.stores.redis.resp import Address, Redirected, SlotMigrating, connection_error
from limitforge.stores.resilience.failure import NotServerFault, Resilience

MAX_COMMANDS = 1_000  # commands that may be under way at once


class ConnectionObserver(Protocol):
    """Who is told how the connection is doing."""

    def on_connection_changed(self) -> None:
        """There is a connection, or it was lost and somebody may want a new one."""

    def on_connect_failed(self, error: StoreUnavailable, began_us: int) -> None:
        """There can't be a connection now."""

    def on_failure(self, error: StoreUnavailable, began_us: int) -> None:
        """Something that began then was not answered."""

    def on_success(self, answers: Sequence[object] = ()) -> None:
        """Something was answered, each with its own answer if it was checks."""


class ReconnectingConnection:
    """At most one connection, and what travels beside the batches."""

    def __init__(
        self, address: Address, resilience: Resilience, observer: ConnectionObserver, connect_seconds: float
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.current: Connection | None = None
        self._address = address
        self._resilience = resilience
        self._observer = observer
        self._connect_seconds = connect_seconds
        self._connecting: asyncio.Task[StoreUnavailable | None] | None = None
        self.is_closed = False
        self._running_commands = 0

    def open(self) -> "asyncio.Task[StoreUnavailable | None]":
        """Start to connect, unless that is under way."""
        if self._connecting is None or self._connecting.done():  # somebody may have cancelled all tasks
            self._connecting = self.loop.create_task(self._connect())
        return self._connecting

    def abort(self, error: StoreUnavailable) -> None:
        """Give the connection up: what is on its way is answered with this error."""
        if self.current is not None:
            self.current.abort(error)

    def close(self, error: StoreUnavailable) -> None:
        """For good: what still comes is refused."""
        self.is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        self.abort(error)

    async def run_flow(self, flow: Flow[T], seconds: float, *, asking: bool = False) -> T:
        """Run a flow of its own, beside the batches; raise StoreUnavailable when it takes longer than that."""
        asked = False
        answer: T
        began_us = self._resilience.now_us()
        try:
            call = next(flow)
        except StopIteration as done:
            answer = done.value
            return answer
        self._resilience.ensure_allowed()
        if self._running_commands >= MAX_COMMANDS:
            raise NotServerFault(f"{MAX_COMMANDS} commands are under way already")
        self._running_commands += 1
        try:
            async with asyncio.timeout(seconds):
                while True:
                    wire = await self._open_connection()
                    asked = True
                    call = flow.send(await self._call(wire, call, asking=asking))
        except StopIteration as done:
            answer = done.value
        except TimeoutError:
            error = StoreUnavailable(f"no answer within {seconds * 1_000:g} ms", maybe_counted=asked)
            self._observer.on_failure(error, began_us)
            raise error from None
        except (Redirected, SlotMigrating):
            self._observer.on_success()  # it answered that it was not the right one to ask
            raise
        except StoreUnavailable as error:
            self._observer.on_failure(error, began_us)
            if error.maybe_counted and not isinstance(error, NotServerFault):
                self.abort(error)  # lost, or the answer to another call: nothing that comes here can be trusted
            raise
        except LimitforgeError:
            self._observer.on_success()  # whatever it said: it answered
            raise
        finally:
            self._running_commands -= 1
        self._observer.on_success(answer if isinstance(answer, list) else ())
        return answer

    async def publish(self, channel: bytes, message: bytes, on_reply: OnCallReply) -> None:
        """Behind whatever was sent before. Waits for the connection, not for the answer."""
        async with asyncio.timeout(2 * self._connect_seconds):
            (await self._open_connection()).publish(channel, message, on_reply)

    async def _call(self, wire: Connection, call: ScriptCall, *, asking: bool) -> Reply:
        replied: asyncio.Future[Reply | StoreError] = self.loop.create_future()
        wire.call(call, partial(_resolve, replied), asking=asking)
        reply = await replied
        if isinstance(reply, StoreError):
            raise reply
        return reply

    async def _open_connection(self) -> Connection:
        while self.current is None:
            if self.is_closed:
                raise NotServerFault("the limiter was closed")
            connecting = self.open()
            await asyncio.wait([connecting])
            error = None if connecting.cancelled() else connecting.result()
            if error is not None:
                raise error
        return self.current

    async def _connect(self) -> StoreUnavailable | None:
        began_us = self._resilience.now_us()
        try:
            wire = await Connection.open(self._address, self._on_lost, self._connect_seconds)
        except Exception as error:  # noqa: BLE001 - whatever it is: Redis can't be asked
            self._connecting = None
            unavailable = error if isinstance(error, StoreUnavailable) else connection_error(error)
            self._observer.on_connect_failed(unavailable, began_us)
            return unavailable
        self._connecting = None
        self.current = wire
        self._observer.on_connection_changed()
        return None

    def _on_lost(self, wire: Connection, error: StoreUnavailable) -> None:
        """The calls that were in flight have failed by now."""
        if wire is self.current:
            self.current = None
            if not self.is_closed:
                self._observer.on_connection_changed()  # whoever waits asks for a new one


def _resolve(future: "asyncio.Future[Any]", value: object) -> None:
    if not future.done():
        future.set_result(value)
