"""One Redis, one event loop: every check that waits goes out in one call, and none waits longer than its deadline.

An idle connection sends at the end of the loop's turn, so whatever was asked in that turn travels together and a lone
check waits for nobody. While two calls are in flight the next batch gathers. There is no timer but the one for
deadlines, which stays armed while anything is owed an answer.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from limitforge.core.check import Check
from limitforge.core.decision import Decision
from limitforge.errors import LimitforgeError, StoreCorrupt, StoreError, StoreUnavailable
from limitforge.stores.codec import BUSY_US, Call, Flow, Reply, T
from limitforge.stores.resilience import Resilience, left_alone
from limitforge.stores.resp import Address, unreachable
from limitforge.stores.wire import Wire

MAX_IN_FLIGHT = 2
WORTH_HALVING_US = 100
MAX_CARRIED = 16  # flows beside the batches: whole batches of callers, and commands
LAG_SECONDS = 0.005
GRACE_SECONDS = 0.001

_log = logging.getLogger(__name__)

Tell = Callable[[Decision | LimitforgeError], None]


class Pending(msgspec.Struct):
    """A check that is owed an answer by `due`. Whoever no longer wants it sets `tell` to None."""

    check: Check
    tell: Tell | None
    due: float


class Flight(msgspec.Struct, eq=False):
    """A call that is on its way. One that is `late` is still owed a reply, which then only frees its place."""

    batch: list[Pending]
    flow: Flow[list[Decision | LimitforgeError]]
    late: bool = False


class Pipeline:
    """Joins the checks of one event loop. `judge` makes the flow of calls for a batch."""

    def __init__(
        self,
        address: Address,
        resilience: Resilience,
        judge: Callable[[Sequence[Check]], Flow[list[Decision | LimitforgeError]]],
        *,
        deadline_ms: float,
        max_waiting: int,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = deadline_ms / 1_000
        self._address = address
        self._resilience = resilience
        self._judge = judge
        self._max_waiting = max_waiting
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[Pending] = []
        self._weight_us = 0
        self._flights: list[Flight] = []
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at = 0.0
        self._is_graced = False
        self._carried = asyncio.Semaphore(MAX_CARRIED)
        self._last_error: StoreUnavailable | None = None
        self._failed_at = -1e9

    @property
    def waiting(self) -> int:
        """How many checks are owed an answer."""
        return len(self._waiting) + sum(len(flight.batch) for flight in self._flights)

    # -- asking

    def submit(self, pending: Pending) -> None:
        """Ask, in order. The answer comes by `pending.tell`, perhaps before this returns."""
        if not self._resilience.is_quiet and not self._resilience.admits():
            self._decide(pending, left_alone())
            return
        if len(self._waiting) >= self._max_waiting:
            self._decide(pending, StoreUnavailable(f"{self._max_waiting} checks are waiting already"))
            return
        self._waiting.append(pending)
        self._weight_us += pending.check.weight_us
        if not self._is_scheduled and len(self._flights) < MAX_IN_FLIGHT:
            self._is_scheduled = True
            self.loop.call_soon(self._flush)
        if self._timer is None:
            self._arm(pending.due)

    async def carry(self, flow: Flow[T], seconds: float) -> T:
        """Run a flow of its own, beside the batches; raise StoreUnavailable when it takes longer than that."""
        asked = False
        answer: T
        try:
            async with asyncio.timeout(seconds), self._carried:
                call = next(flow)
                self._resilience.admit()
                while True:
                    wire = await self._open_wire()
                    asked = True
                    call = flow.send(await self._ask(wire, call))
        except StopIteration as done:
            answer = done.value
        except TimeoutError:
            error = StoreUnavailable(f"no answer within {seconds * 1_000:g} ms", maybe_counted=asked)
            self._count_failure(error)
            raise error from None
        except StoreUnavailable as error:
            self._count_failure(error)
            raise
        if asked:
            self._succeeded()
        return answer

    async def _ask(self, wire: Wire, call: Call) -> Reply:
        replied: asyncio.Future[Reply | StoreError] = self.loop.create_future()
        wire.call(call, partial(_resolve, replied))
        reply = await replied
        if isinstance(reply, StoreError):
            raise reply
        return reply

    async def publish(self, channel: bytes, message: bytes) -> None:
        """Tell the other nodes. Nobody waits for this to arrive, but the order is kept."""
        told: asyncio.Future[Reply | StoreError] = self.loop.create_future()
        (await self._open_wire()).publish(channel, message, partial(_resolve, told))
        reply = await told
        if isinstance(reply, StoreError):
            raise reply

    def close(self) -> None:
        """Answer what waits by its failure behaviour, and let go of the connection. It may be used again."""
        error = self._last_error = StoreUnavailable("the limiter was closed", maybe_counted=True)
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._wire is not None:
            self._wire.abort(error)
        self._refuse_waiting(error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- sending

    def _flush(self) -> None:
        self._is_scheduled = False
        if self._wire is None:
            if self._waiting and self._connecting is None:
                self._connecting = self.loop.create_task(self._connect())
            return
        while self._waiting and self._wire is not None and len(self._flights) < MAX_IN_FLIGHT:
            batch = self._gather()
            if batch:
                self._send(batch)

    def _gather(self) -> list[Pending]:
        """The next batch: all that waits, or as much as keeps Redis busy for a millisecond."""
        waiting = self._waiting
        most_us = BUSY_US
        if not self._flights and self._weight_us >= WORTH_HALVING_US:  # Redis works on one half while we read the other
            most_us = min(self._weight_us // 2, BUSY_US)
        if self._weight_us <= most_us:
            self._waiting, self._weight_us = [], 0
        else:
            busy_us = count = 0
            while count < len(waiting) and (not count or busy_us + waiting[count].check.weight_us <= most_us):
                busy_us += waiting[count].check.weight_us
                count += 1
            self._waiting, self._weight_us = waiting[count:], self._weight_us - busy_us
            waiting = waiting[:count]
        return [pending for pending in waiting if pending.tell is not None]

    def _send(self, batch: list[Pending]) -> None:
        flow = self._judge([pending.check for pending in batch])
        flight = Flight(batch, flow)
        self._flights.append(flight)
        self._advance(flight, partial(next, flow))

    def _advance(self, flight: Flight, step: Callable[[], Any]) -> None:
        """Take a flow one step on: to its next call, or to its answers."""
        try:
            call = step()
        except StopIteration as done:
            self._flights.remove(flight)
            for pending, answer in zip(flight.batch, done.value, strict=True):
                self._tell(pending, answer)
            if not flight.late:
                self._succeeded()
        except LimitforgeError as error:
            self._fail(flight, error)
        except Exception as error:  # noqa: BLE001 - a bug: the callers must hear of it
            _log.exception("a batch of %d checks failed", len(flight.batch))
            self._fail(flight, StoreCorrupt(f"a batch could not be read: {type(error).__name__}"))
        else:
            if self._wire is None:
                self._fail(flight, StoreUnavailable("the connection to Redis was lost", maybe_counted=True))
            else:
                self._wire.call(call, partial(self._replied, flight))

    def _replied(self, flight: Flight, reply: Reply | StoreError) -> None:
        if isinstance(reply, StoreError):
            self._fail(flight, reply)
        else:
            self._advance(flight, partial(flight.flow.send, reply))
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._flush)

    # -- failing

    def _fail(self, flight: Flight, error: LimitforgeError) -> None:
        self._flights.remove(flight)
        for pending in flight.batch:
            self._decide(pending, error)
        if isinstance(error, StoreUnavailable) and not flight.late:
            self._count_failure(error)

    def _decide(self, pending: Pending, error: LimitforgeError) -> None:
        """By its failure behaviour if the store is away; anything else is this check's own error."""
        if pending.tell is not None:
            unavailable = isinstance(error, StoreUnavailable)
            self._tell(pending, self._resilience.decide(pending.check, error) if unavailable else error)  # type: ignore[arg-type]

    def _refuse_waiting(self, error: StoreUnavailable) -> None:
        waiting, self._waiting, self._weight_us = self._waiting, [], 0
        never_sent = StoreUnavailable(str(error))
        for pending in waiting:
            self._decide(pending, never_sent)

    def _count_failure(self, error: StoreUnavailable) -> None:
        """Once for each error: a lost connection may fail two calls. A store that is given up is given up at once."""
        if error is self._last_error:
            return
        self._last_error = error
        self._failed_at = self.loop.time()
        if self._resilience.failed(error):
            self._last_error = StoreUnavailable(str(error), maybe_counted=True)
            if self._wire is not None:
                self._wire.abort(self._last_error)
            self._refuse_waiting(error)

    def _succeeded(self) -> None:
        if self._resilience.is_quiet:
            return
        for charge in self._resilience.succeeded():
            self.submit(Pending(charge, _charged, self.loop.time() + self.deadline))

    def _arm(self, due: float) -> None:
        if self._timer is None:
            self._expires_at = due
            self._timer = self.loop.call_at(due, self._expire)

    def _expire(self) -> None:
        """Answer whoever's deadline has come, and wait for the next one."""
        now = self.loop.time()
        if now - self._expires_at > LAG_SECONDS and not self._is_graced:
            self._is_graced = True  # this loop was busy: what has arrived meanwhile shall be read first
            self._timer = self.loop.call_later(GRACE_SECONDS, self._expire)
            return
        self._is_graced = False
        self._timer = None
        error = StoreUnavailable(f"no answer within {self.deadline * 1_000:g} ms", maybe_counted=True)
        for flight in tuple(self._flights):
            if flight.batch[0].due <= now:
                for pending in flight.batch:
                    if pending.due <= now:
                        self._decide(pending, error)
                if not flight.late:
                    flight.late = True
                    self._last_error = None
                    self._count_failure(error)
        overdue = 0
        while overdue < len(self._waiting) and self._waiting[overdue].due <= now:
            overdue += 1
        if overdue:
            self._expire_waiting(overdue, now)
        dues = [p.due for f in self._flights for p in f.batch if p.tell is not None] + [
            p.due for p in self._waiting[:1]
        ]
        if dues:
            self._arm(min(dues))

    def _expire_waiting(self, count: int, now: float) -> None:
        """They were never sent. That alone is a failure, unless one was counted within this deadline."""
        error = StoreUnavailable(f"no answer within {self.deadline * 1_000:g} ms")
        expired, self._waiting = self._waiting[:count], self._waiting[count:]
        self._weight_us -= sum(pending.check.weight_us for pending in expired)
        for pending in expired:
            self._decide(pending, error)
        if now - self._failed_at >= self.deadline:
            self._count_failure(error)

    def _tell(self, pending: Pending, answer: Decision | LimitforgeError) -> None:
        tell = pending.tell
        if tell is None:
            return
        pending.tell = None
        try:
            tell(answer)
        except asyncio.InvalidStateError:  # its caller was cancelled in this turn of the loop
            return
        except Exception as error:  # noqa: BLE001 - somebody's callback must not keep its batch from their answers
            context = {"message": "the callback of a check failed", "exception": error}
            self.loop.call_exception_handler(context)

    # -- connecting

    async def _connect(self) -> None:
        try:
            self._wire = await Wire.open(self._address, self._lost)
        except Exception as error:  # noqa: BLE001 - whatever it is: Redis can't be asked
            self._connecting = None
            unavailable = error if isinstance(error, StoreUnavailable) else unreachable(error)
            self._refuse_waiting(unavailable)
            self._count_failure(unavailable)
        else:
            self._connecting = None
            self._flush()

    async def _open_wire(self) -> Wire:
        if self._wire is None:
            if self._connecting is None:
                self._connecting = self.loop.create_task(self._connect())
            await asyncio.wait([self._connecting])
        if self._wire is None:
            raise self._last_error or StoreUnavailable("Redis did not answer")
        return self._wire

    def _lost(self, error: StoreUnavailable) -> None:
        """The calls that were in flight have failed by now; what still waits goes over the next connection."""
        if self._wire is not None:
            self._wire = None
            if self._waiting and not self._is_scheduled:
                self._is_scheduled = True
                self.loop.call_soon(self._flush)


def _resolve(future: "asyncio.Future[Any]", value: object) -> None:
    if not future.done():
        future.set_result(value)


def _charged(answer: Decision | LimitforgeError) -> None:
    if isinstance(answer, LimitforgeError):
        _log.error("what was admitted without the store could not be charged, or not surely: %s", answer)
