"""Keep one connection of an event loop to one Redis server: open it on first use, and again after it was lost."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.errors import NotServerFault, Redirected, SlotMigrating
from limitforge.stores.redis.address import Address
from limitforge.stores.redis.aio.connection import Connection, OnCallReply
from limitforge.stores.redis.resp import connection_error
from limitforge.stores.redis.script_call import Flow, Reply, ScriptCall, T
from limitforge.stores.resilience.failure import Resilience

MAX_COMMANDS = 1_000  # that may run at once


class ConnectionObserver(Protocol):
    """Receives what happens on a connection."""

    def on_connection_changed(self) -> None:
        """A connection was opened, or the current one was lost."""

    def on_connect_failed(self, error: StoreUnavailable, began_us: int) -> None:
        """A connection could not be opened."""

    def on_failure(self, error: StoreUnavailable, began_us: int) -> None:
        """A call that began at `began_us` got no answer."""

    def on_success(self, results: Sequence[object] = ()) -> None:
        """The server answered. `results` are those of the checks in the call."""


class ReconnectingConnection:
    """At most one open connection, and the commands that run on it beside the batches of checks."""

    def __init__(
        self, address: Address, resilience: Resilience, observer: ConnectionObserver, connect_seconds: float
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.current: Connection | None = None
        self.is_closed = False
        self._address = address
        self._resilience = resilience
        self._observer = observer
        self._connect_seconds = connect_seconds
        self._connecting: asyncio.Task[StoreUnavailable | None] | None = None
        self._running_commands = 0

    def open(self) -> "asyncio.Task[StoreUnavailable | None]":
        """Start to connect, unless an attempt is running."""
        if self._connecting is None or self._connecting.done():  # done: the task may have been cancelled from outside
            self._connecting = self.loop.create_task(self._connect())
        return self._connecting

    def abort(self, error: StoreUnavailable) -> None:
        """Drop the current connection. Calls in flight get this error."""
        if self.current is not None:
            self.current.abort(error)

    def close(self, error: StoreUnavailable) -> None:
        """Close for good. Calls in flight get this error, and later calls are refused."""
        self.is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        self.abort(error)

    async def run_flow(self, flow: Flow[T], seconds: float, *, asking: bool = False) -> T:
        """Run a flow outside the batches of checks. Raises StoreUnavailable if it takes longer than `seconds`."""
        was_sent = False
        result: T
        began_us = self._resilience.now_us()
        try:
            call = next(flow)
        except StopIteration as done:
            result = done.value
            return result
        self._resilience.ensure_allowed()
        if self._running_commands >= MAX_COMMANDS:
            raise NotServerFault(f"{MAX_COMMANDS} commands are running already")
        self._running_commands += 1
        try:
            async with asyncio.timeout(seconds):
                while True:
                    connection = await self._open_connection()
                    was_sent = True
                    call = flow.send(await self._call(connection, call, asking=asking))
        except StopIteration as done:
            result = done.value
        except TimeoutError:
            error = StoreUnavailable(f"no answer within {seconds * 1_000:g} ms", maybe_counted=was_sent)
            self._observer.on_failure(error, began_us)
            raise error from None
        except (Redirected, SlotMigrating):
            self._observer.on_success()  # a redirection is an answer
            raise
        except StoreUnavailable as error:
            self._observer.on_failure(error, began_us)
            if error.maybe_counted and not isinstance(error, NotServerFault):
                self.abort(error)  # lost, or out of step: no reply on this connection can be trusted
            raise
        except LimitforgeError:
            self._observer.on_success()  # an error reply is an answer
            raise
        finally:
            self._running_commands -= 1
        self._observer.on_success(result if isinstance(result, list) else ())
        return result

    async def publish(self, channel: bytes, message: bytes, on_reply: OnCallReply) -> None:
        """Publish after all calls that were sent before. Waits for the connection, not for the reply."""
        async with asyncio.timeout(2 * self._connect_seconds):
            (await self._open_connection()).publish(channel, message, on_reply)

    async def _call(self, connection: Connection, call: ScriptCall, *, asking: bool) -> Reply:
        replied: asyncio.Future[Reply | StoreError] = self.loop.create_future()
        connection.call(call, partial(_resolve, replied), asking=asking)
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
            connection = await Connection.open(self._address, self._on_lost, self._connect_seconds)
        except Exception as error:  # noqa: BLE001 - any failure means that this server is unreachable
            self._connecting = None
            unavailable = error if isinstance(error, StoreUnavailable) else connection_error(error)
            self._observer.on_connect_failed(unavailable, began_us)
            return unavailable
        self._connecting = None
        self.current = connection
        self._observer.on_connection_changed()
        return None

    def _on_lost(self, connection: Connection, error: StoreUnavailable) -> None:
        """Forget a lost connection. Its calls in flight have failed already."""
        if connection is self.current:
            self.current = None
            if not self.is_closed:
                self._observer.on_connection_changed()


def _resolve(future: "asyncio.Future[Any]", value: object) -> None:
    if not future.done():
        future.set_result(value)
