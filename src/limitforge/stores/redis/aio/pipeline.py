"""One Redis, one event loop: every check that waits goes out in one write, and none waits longer than its deadline.

An idle connection sends at the end of the loop's turn, so whatever was asked in that turn travels together and a lone
check waits for nobody. While two writes are in flight the next batch gathers. One write is one call, or one for each
slot of a Cluster where they can't share it. There is no timer but the one for deadlines, which stays armed while
anything is owed an answer.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import msgspec

from limitforge.core.check import Check, ResultKind
from limitforge.core.decision import CheckResult
from limitforge.core.plan import BUCKET_US
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.redis.aio.reconnecting import ReconnectingConnection
from limitforge.stores.redis.codec import MAX_CALL_US, Flow, NotReplicated, Reply, ScriptCall, as_corrupt_reply
from limitforge.stores.redis.resp import Redirected, SlotMigrating, should_split_by_slot
from limitforge.stores.redis.topology.cross_slot import FinishHold, Step
from limitforge.stores.redis.topology.topology import Server
from limitforge.stores.resilience.failure import NotServerFault, as_maybe_counted, breaker_open_error

MAX_WRITES_IN_FLIGHT = 2
SPLIT_ABOVE_US = 100
CONNECT_DEADLINES = 4  # how long a connection may take to open: those who wait for it have long been answered
MIN_CONNECT_SECONDS = 0.25
LAG_SECONDS = 0.005
GRACE_SECONDS = 0.001
SPLIT_SLOT_SECONDS = 1.0

OnReply = Callable[[Any], None]
"""Told a decision or an error; for a part of a check whatever the store told of it."""


class BatchFlows(Protocol):
    """Makes the flows of calls for what waits, and is handed what the store is owed after an outage."""

    def checks_flow(self, checks: Sequence[Check]) -> Flow[list[CheckResult]]: ...

    def finish_flow(self, finishes: Sequence[FinishHold]) -> Flow[list[Any]]: ...

    def across_slots(self, call: ScriptCall) -> ScriptCall:
        """The same call over several slots of one server."""

    def charge(self, charges: Sequence[Check]) -> None: ...


class Router(Protocol):
    """Knows which pipeline a check belongs to."""

    def redirect(self, batch: "list[PendingCheck]", answer: Redirected | SlotMigrating, node: Server) -> None:
        """None of these was executed: ask again, where or when the answer says, or give up in time."""

    def refresh_topology(self) -> None:
        """This server did not answer as it should: it may have been replaced."""


class PendingCheck(msgspec.Struct, eq=False, gc=False):
    """A check, or a step of one, that is owed an answer by `due`. Whoever no longer wants it sets `tell` to None.

    Checks of one `group` are a caller's own batch, and judged in their order where they share a `slot`.
    """

    check: Step
    on_reply: OnReply | None
    deadline: float
    group: object = None
    slot: int = 0
    is_resubmitted: bool = False
    """Whether it was on its way before: what it waited for then was not this loop."""
    needs_asking: bool = False
    """Whether it goes to a server that is only about to get its slot."""
    own_slot_only: bool = False
    """Whether it must not share a call with other slots."""
    own_call_only: bool = False
    """Whether it must not share a call at all: its slot is moving, and others may lack a key."""
    redirects: int = 0


class Write(msgspec.Struct, eq=False):
    """One write, of one call or several."""

    calls_in_flight: int
    splits_group: bool
    """The rest of its last group must not overtake it: a quota may have to be asked for once more."""


class InFlightCall(msgspec.Struct, eq=False):
    """A call that is on its way. One that is `late` is still owed a reply, which then only frees its place."""

    batch: list[PendingCheck]
    flow: Flow[list[Any]]
    began_us: int
    write: Write
    is_late: bool = False
    calls_sent: int = 0
    needs_asking: bool = False
    is_cross_slot: bool = False
    """Whether it asks several slots in one call."""


class Pipeline:
    """Joins the checks of one event loop for one server."""

    def __init__(
        self,
        server: Server,
        core: BatchFlows,
        router: Router,
        *,
        deadline_ms: float,
        max_waiting: int,
        is_sharded: bool,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline_seconds = deadline_ms / 1_000
        self.server = server
        connect_seconds = max(CONNECT_DEADLINES * self.deadline_seconds, MIN_CONNECT_SECONDS)
        self.connection = ReconnectingConnection(server.address, server.resilience, self, connect_seconds)
        self._resilience = server.resilience
        self._core = core
        self._router = router
        self._is_sharded = is_sharded
        self._max_waiting = max_waiting
        self._queue: list[PendingCheck] = []
        self._queued_us = 0
        self._in_flight: list[InFlightCall] = []
        self._writes: list[Write] = []
        self._moving_slots: dict[int, float] = {}
        """Slots that are moving or have moved, and until when they go by themselves."""
        self._flush_is_scheduled = False
        self._last_reply_us = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._in_grace_period = False

    @property
    def pending_count(self) -> int:
        """How many checks are owed an answer."""
        return len(self._queue) + sum(len(flight.batch) for flight in self._in_flight)

    # -- asking

    def submit(self, pending: PendingCheck) -> None:
        """Ask, in order. The answer comes by `asked.tell`, perhaps before this returns."""
        if not self._resilience.is_healthy and not self._resilience.allows_call():
            self.resolve(pending, breaker_open_error())
            return
        if len(self._queue) >= self._max_waiting:
            self.resolve(pending, NotServerFault(f"{self._max_waiting} checks are waiting already"))
            return
        self._queue.append(pending)
        self._queued_us += pending.check.weight_us
        if not self._flush_is_scheduled and len(self._writes) < MAX_WRITES_IN_FLIGHT:
            self._flush_is_scheduled = True
            if pending.is_resubmitted:
                self.loop.call_soon(self._flush)
            else:
                self.loop.call_soon(self._flush_iteration, pending.deadline)
        if self._timer is None:
            self._arm_timer(pending.deadline)
        elif pending.deadline < self._timer_at:
            self._timer.cancel()
            self._arm_timer(pending.deadline)

    def take_queue(self) -> list[PendingCheck]:
        """What waits here, for another pipeline."""
        waiting, self._queue, self._queued_us = self._queue, [], 0
        for asked in waiting:
            asked.is_resubmitted = True
        return waiting

    def close(self) -> None:
        """Answer what waits by its failure behaviour, and let go of the connection for good."""
        self.connection.close(StoreUnavailable("the limiter was closed", maybe_counted=True))
        self._fail_queue(NotServerFault("the limiter was closed"))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- sending

    def on_connection_changed(self) -> None:
        """Send what waits, over a new connection if there is none."""
        if self._queue and not self._flush_is_scheduled:
            self._flush_is_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush_iteration(self, first_due: float) -> None:
        """Flush at the end of a turn. If that was a long one, the deadlines of all who asked in it begin now: nobody's
        time runs out while this loop had no time to send.
        """
        now = self.loop.time()
        if now - (first_due - self.deadline_seconds) > LAG_SECONDS:
            for asked in self._queue:
                if asked.deadline >= first_due and not asked.is_resubmitted:
                    asked.deadline = now + self.deadline_seconds
        self._flush()

    def _flush(self) -> None:
        self._flush_is_scheduled = False
        if self.connection.is_closed:
            self._fail_queue(NotServerFault("the limiter was closed"))
        while (
            self._queue and len(self._writes) < MAX_WRITES_IN_FLIGHT and not any(v.splits_group for v in self._writes)
        ):
            if self.connection.current is None:
                self.connection.open()
                return
            batch, holds = self._next_batch()
            wanted = [asked for asked in batch if asked.on_reply is not None]
            if wanted:
                self._send_batch(wanted, holds=holds)

    def _next_batch(self) -> tuple[list[PendingCheck], bool]:
        """The next batch: all that waits, or as much as keeps Redis busy for a millisecond; and whether its last group
        goes on.
        """
        waiting = self._queue
        most_us = MAX_CALL_US
        if not self._in_flight and self._queued_us >= SPLIT_ABOVE_US:  # Redis works on one half while we read the other
            most_us = min(self._queued_us // 2, MAX_CALL_US)
        if self._queued_us <= most_us:
            self._queue, self._queued_us = [], 0
            return waiting, False
        count = _count_that_fits(waiting, most_us)
        if _splits_group(waiting, count):  # a group travels whole, unless it is too long for one call
            first, last = _group_around(waiting, count)
            count = first or min(last, _count_that_fits(waiting, MAX_CALL_US))
        self._queue = waiting[count:]
        self._queued_us -= sum([asked.check.weight_us for asked in waiting[:count]])
        return waiting[:count], _splits_group(waiting, count)

    def _send_batch(self, batch: list[PendingCheck], *, holds: bool) -> None:
        """One call, and one for what ends; one more for each slot that can't share them. All in one write."""
        batches = [batch] if not self._is_sharded else self._group_by_call(batch)
        volley = Write(len(batches), holds)
        self._writes.append(volley)
        flights = [self._start_call(one, volley) for one in batches]
        if len(flights) == 1:
            self._advance(flights[0], partial(next, flights[0].flow))
        else:
            calls: list[tuple[ScriptCall, InFlightCall]] = []
            for flight in flights:
                self._advance(flight, partial(next, flight.flow), calls)
            if self.connection.current is not None:
                self.connection.current.call_many(
                    [(call, partial(self._on_call_reply, flight), flight.needs_asking) for call, flight in calls]
                )
            else:
                for _, flight in calls:
                    self._fail_call(flight, StoreUnavailable("the connection to Redis was lost"))

    def _group_by_call(self, batch: list[PendingCheck]) -> list[list[PendingCheck]]:
        """What may share a call, slot by slot in it; what ends something goes before what looks at it."""
        now = self.loop.time()
        for slot in [slot for slot, until in self._moving_slots.items() if until < now]:
            del self._moving_slots[slot]
        found: dict[tuple[bool, int, bool, int], list[PendingCheck]] = {}
        for asked in sorted(batch, key=_kind_and_slot):
            apart = asked.own_slot_only or asked.needs_asking or asked.slot in self._moving_slots
            slot, alone = asked.slot if apart else -1, id(asked) if asked.own_call_only else 0
            found.setdefault((type(asked.check) is FinishHold, slot, asked.needs_asking, alone), []).append(asked)
        return list(found.values())

    def _start_call(self, batch: list[PendingCheck], volley: Write) -> InFlightCall:
        steps: list[Any] = [asked.check for asked in batch]
        flow = self._core.finish_flow(steps) if type(steps[0]) is FinishHold else self._core.checks_flow(steps)
        flight = InFlightCall(batch, flow, self._resilience.now_us(), volley, needs_asking=batch[0].needs_asking)
        flight.is_cross_slot = self._is_sharded and batch[0].slot != batch[-1].slot
        self._in_flight.append(flight)
        return flight

    def _remove_call(self, flight: InFlightCall) -> None:
        self._in_flight.remove(flight)
        flight.write.calls_in_flight -= 1
        if not flight.write.calls_in_flight:
            self._writes.remove(flight.write)

    def _advance(
        self, flight: InFlightCall, step: Callable[[], Any], calls: list[tuple[ScriptCall, InFlightCall]] | None = None
    ) -> None:
        """Take a flow one step on: to its next call, which is sent (or added to `calls`), or to its answers."""
        try:
            call = step()
        except StopIteration as done:
            self._remove_call(flight)
            self._reply_all(flight.batch, done.value)
            self._record_reply(flight, done.value)
        except StoreUnavailable as error:  # the answer to another call: nothing that comes here can be trusted
            self._fail_call(flight, error)
            self.on_failure(error, flight.began_us)
            if not isinstance(error, NotReplicated):
                self.connection.abort(error)
        except Exception as error:  # noqa: BLE001 - an answer that makes no sense, or a bug: the callers must hear of it
            self._fail_call(flight, as_corrupt_reply(error))
            self._record_reply(flight)
            self.connection.abort(StoreUnavailable("an answer made no sense", maybe_counted=True))
        else:
            flight.calls_sent += 1
            if flight.is_cross_slot:
                call = self._core.across_slots(call)
            if calls is not None:
                calls.append((call, flight))
            elif self.connection.current is None:
                self._fail_call(
                    flight, StoreUnavailable("the connection to Redis was lost", maybe_counted=flight.calls_sent > 1)
                )
            else:
                self.connection.current.call(call, partial(self._on_call_reply, flight), asking=flight.needs_asking)

    def _on_call_reply(self, flight: InFlightCall, reply: Reply | StoreError) -> None:
        if not isinstance(reply, StoreError):
            self._advance(flight, partial(flight.flow.send, reply))
        elif flight.is_cross_slot and flight.calls_sent == 1 and should_split_by_slot(reply):
            self._remove_call(flight)
            self._last_reply_us = self._resilience.now_us()
            self._requeue_by_slot(flight.batch)
        elif isinstance(reply, Redirected | SlotMigrating) and flight.calls_sent == 1 and self._is_sharded:
            self._moving_slots[flight.batch[0].slot] = self.loop.time() + SPLIT_SLOT_SECONDS
            self._remove_call(flight)
            self._record_reply(flight)
            self._redirect(flight, reply)
        else:
            if flight.calls_sent > 1 and isinstance(reply, StoreUnavailable):  # some of the batch was judged before
                reply = as_maybe_counted(reply)
            self._fail_call(flight, reply)
            if not isinstance(reply, StoreUnavailable):
                self._record_reply(flight)
            elif not flight.is_late:
                self.on_failure(reply, flight.began_us)
        self.on_connection_changed()

    def _requeue_by_slot(self, batch: list[PendingCheck]) -> None:
        """Each slot by itself, before whatever else waits: it will say what is wrong."""
        wanted = [asked for asked in batch if asked.on_reply is not None]
        for asked in wanted:
            asked.is_resubmitted = asked.own_slot_only = True
        self._queue = [*wanted, *self._queue]
        self._queued_us += sum(asked.check.weight_us for asked in wanted)
        if wanted and self._timer is None:
            self._arm_timer(min(asked.deadline for asked in wanted))

    def _redirect(self, flight: InFlightCall, answer: Redirected | SlotMigrating) -> None:
        wanted = [asked for asked in flight.batch if asked.on_reply is not None]
        try:
            self._router.redirect(wanted, answer, self.server)
        except Exception as error:  # noqa: BLE001 - a bug of ours: nobody shall wait for it
            for asked in wanted:
                self.resolve(asked, as_corrupt_reply(error))

    def _record_reply(self, flight: InFlightCall, answers: Sequence[object] = ()) -> None:
        """Whatever it said: it answered. Too late is as good as never."""
        if not flight.is_late:
            self._last_reply_us = self._resilience.now_us()
            self.on_success(answers)

    # -- failing

    def _fail_call(self, flight: InFlightCall, error: LimitforgeError) -> None:
        self._remove_call(flight)
        for asked in flight.batch:
            self.resolve(asked, error)

    def resolve(self, pending: PendingCheck, result: CheckResult) -> None:
        """Tell the answer; if the store was away, what the failure behaviour of the check says."""
        if pending.on_reply is None:
            return
        check = pending.check
        if (
            isinstance(result, StoreUnavailable)
            and isinstance(check, Check)
            and check.result_kind is not ResultKind.PART
        ):
            result = self._resilience.decide_without_store(check, result)
        self.reply(pending, result)

    def reply(self, pending: PendingCheck, result: object) -> None:
        """Answer, once. Whatever the callback does is its own affair."""
        if pending.on_reply is None:
            return
        tell, pending.on_reply = pending.on_reply, None
        try:
            tell(result)
        except Exception as error:  # noqa: BLE001 - somebody's callback must not keep its batch from their answers
            self._report_callback_error(error)

    def _reply_all(self, batch: Sequence[PendingCheck], answers: Sequence[object]) -> None:
        """The same for all that were asked together."""
        for asked, answer in zip(batch, answers, strict=True):
            tell = asked.on_reply
            if tell is None:
                continue
            if isinstance(answer, StoreUnavailable):
                self.resolve(asked, answer)
                continue
            asked.on_reply = None
            try:
                tell(answer)
            except Exception as error:  # noqa: BLE001 - as above
                self._report_callback_error(error)

    def _report_callback_error(self, error: Exception) -> None:
        if not isinstance(error, asyncio.InvalidStateError):  # then its caller was cancelled in this turn of the loop
            self.loop.call_exception_handler({"message": "the callback of a check failed", "exception": error})

    def _fail_queue(self, error: StoreUnavailable) -> None:
        waiting, self._queue, self._queued_us = self._queue, [], 0
        for asked in waiting:
            self.resolve(asked, error)

    def on_failure(self, error: StoreUnavailable, began_us: int) -> None:
        """What began then was not answered. A store that is given up is given up at once."""
        if self._resilience.record_failure(error, began_us):
            self.connection.abort(StoreUnavailable(str(error), maybe_counted=True))
            self._fail_queue(StoreUnavailable(str(error)))
        self._router.refresh_topology()

    def on_connect_failed(self, error: StoreUnavailable, began_us: int) -> None:
        """There is no connection for those who wait."""
        self._resilience.record_failure(error, began_us)
        self._fail_queue(StoreUnavailable(str(error)))
        self._router.refresh_topology()

    def on_success(self, answers: Sequence[object] = ()) -> None:
        """The store answered; what it is owed after an outage is charged now, if it can write."""
        if not self._resilience.is_healthy:
            self._core.charge(self._resilience.record_success(answers))

    # -- deadlines

    def _arm_timer(self, due: float) -> None:
        self._timer_at = due
        self._timer = self.loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        """Answer whoever's deadline has come, and wait for the next one."""
        now = self.loop.time()
        if now - self._timer_at > LAG_SECONDS and not self._in_grace_period:
            self._in_grace_period = True  # this loop was busy: what has arrived meanwhile shall be read first
            self._timer = self.loop.call_later(GRACE_SECONDS, self._on_timer)
            return
        self._in_grace_period = False
        self._expire_calls(now)  # whoever is told may ask again: until the end, the timer counts as armed
        self._expire_queue(now)
        self._timer = None
        dues = [asked.deadline for flight in self._in_flight for asked in flight.batch if asked.on_reply is not None]
        dues += [self._deadline_of(flight) + self.deadline_seconds for flight in self._in_flight if flight.is_late]
        dues += [asked.deadline for asked in self._queue]
        if dues:
            self._arm_timer(min(dues))

    def _expire_calls(self, now: float) -> None:
        error = StoreUnavailable(f"no answer within {self.deadline_seconds * 1_000:g} ms", maybe_counted=True)
        for flight in [flight for flight in self._in_flight if self._deadline_of(flight) <= now]:
            for asked in flight.batch:
                if asked.deadline <= now:
                    self.resolve(asked, error)
            if not flight.is_late:
                flight.is_late = True
                self.on_failure(error, flight.began_us)
        late = [flight for flight in self._in_flight if flight.is_late]
        if len({id(flight.write) for flight in late}) >= MAX_WRITES_IN_FLIGHT or any(
            self._deadline_of(flight) + self.deadline_seconds <= now for flight in late
        ):
            self.connection.abort(error)  # it may be this connection alone that is dead

    @staticmethod
    def _deadline_of(flight: InFlightCall) -> float:
        return min([asked.deadline for asked in flight.batch])

    def _expire_queue(self, now: float) -> None:
        """They were never sent: a failure too, unless Redis answered others meanwhile: then the queue was too long."""
        expired = [asked for asked in self._queue if asked.deadline <= now]
        if expired:
            self._queue = [asked for asked in self._queue if asked.deadline > now]
            self._queued_us -= sum(asked.check.weight_us for asked in expired)
            error = StoreUnavailable(f"no answer within {self.deadline_seconds * 1_000:g} ms")
            for asked in expired:
                self.resolve(asked, error)
            began_us = self._resilience.now_us() - int(1e6 * (now - expired[0].deadline + self.deadline_seconds))
            if self._last_reply_us < began_us:
                self.on_failure(error, began_us)


def _kind_and_slot(asked: PendingCheck) -> tuple[bool, int]:
    return type(asked.check) is not FinishHold, asked.slot


def _count_that_fits(waiting: Sequence[PendingCheck], most_us: int) -> int:
    """How many of them, and at least one, keep Redis busy for no longer than that."""
    most = most_us // BUCKET_US + 1  # none with a limit is lighter
    return bisect_right(list(accumulate([asked.check.weight_us for asked in waiting[:most]])), most_us) or 1


def _splits_group(waiting: Sequence[PendingCheck], count: int) -> bool:
    """Whether a cut after that many goes through a group."""
    return (
        count < len(waiting) and waiting[count].group is not None and waiting[count].group is waiting[count - 1].group
    )


def _group_around(waiting: Sequence[PendingCheck], place: int) -> tuple[int, int]:
    """Where the group at that place begins, and where it is over."""
    group = waiting[place].group
    first = last = place
    while first and waiting[first - 1].group is group:
        first -= 1
    while last < len(waiting) and waiting[last].group is group:
        last += 1
    return first, last
