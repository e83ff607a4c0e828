"""Batch the pending checks of one event loop into calls to one Redis server.

An idle pipeline sends at the end of the current loop iteration, so a lone check is not delayed and concurrent checks
share a call. At most two writes are in flight; new checks queue up meanwhile and form the next batch. A write is one
call, or several calls where slots of a Cluster can't share one. A single timer enforces deadlines.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from limitforge.core.check import Check, ResultKind
from limitforge.core.decision import CheckResult
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.errors import NotReplicated, NotServerFault, Redirected, SlotMigrating, as_maybe_counted
from limitforge.stores.redis.aio.pending import (
    InFlightCall,
    PendingCheck,
    Write,
    count_that_fits,
    deadline_of,
    deliver,
    group_around,
    not_cancelled,
    report_callback_error,
    would_split_group,
)
from limitforge.stores.redis.aio.reconnecting import ReconnectingConnection
from limitforge.stores.redis.codec import MAX_CALL_US
from limitforge.stores.redis.core import RedisCore
from limitforge.stores.redis.multi_step.cross_slot import FinishHold
from limitforge.stores.redis.resp import should_split_by_slot
from limitforge.stores.redis.script_call import Reply, ScriptCall, as_internal_error
from limitforge.stores.redis.topology.topology import Server
from limitforge.stores.resilience.failure import breaker_open_error

MAX_WRITES_IN_FLIGHT = 2
SPLIT_ABOVE_US = 100  # a batch that keeps Redis busy for longer is sent in halves
CONNECT_TIMEOUT_FACTOR = 4  # connecting may outlast the checks that wait for it, because later checks need it, too
MIN_CONNECT_SECONDS = 0.25
SLOW_ITERATION_SECONDS = 0.005  # a loop iteration that takes longer postpones deadlines
READ_REPLIES_SECONDS = 0.001
SPLIT_SLOT_SECONDS = 1.0  # how long a slot gets calls of its own after a redirection


class Router(Protocol):
    """Finds the right pipeline for checks that this one can't send."""

    def redirect(self, batch: list[PendingCheck], redirection: Redirected | SlotMigrating, server: Server) -> None:
        """Send a batch that `server` did not execute to where it redirects."""

    def refresh_topology(self) -> None:
        """Find out whether a failed server has been replaced."""


class Pipeline:
    """The queue, the calls in flight and the deadlines of one event loop and one server."""

    def __init__(
        self,
        server: Server,
        core: RedisCore,
        router: Router,
        *,
        deadline_ms: float,
        max_waiting: int,
        is_sharded: bool,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline_seconds = deadline_ms / 1_000
        self.server = server
        connect_seconds = max(CONNECT_TIMEOUT_FACTOR * self.deadline_seconds, MIN_CONNECT_SECONDS)
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
        """Slots with a recent redirection, and the time until which each gets a call of its own."""
        self._flush_is_scheduled = False
        self._last_reply_us = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._in_grace_period = False

    @property
    def pending_count(self) -> int:
        """The number of checks that wait for a reply."""
        return len(self._queue) + sum(len(call.batch) for call in self._in_flight)

    # -- the queue

    def enqueue(self, pending: PendingCheck) -> None:
        """Queue a check. `pending.on_reply` is called once, perhaps before this method returns."""
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
        """Remove and return the queued checks, so that another pipeline can send them."""
        queue, self._queue, self._queued_us = self._queue, [], 0
        for pending in queue:
            pending.is_resubmitted = True
        return queue

    def close(self) -> None:
        """Close the connection for good. Checks that wait are decided by their failure behaviour."""
        self.connection.close(StoreUnavailable("the limiter was closed", maybe_counted=True))
        self._fail_queue(NotServerFault("the limiter was closed"))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- sending

    def on_connection_changed(self) -> None:
        """Send the queue. If the connection was lost, this opens a new one."""
        if self._queue and not self._flush_is_scheduled:
            self._flush_is_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush_iteration(self, first_deadline: float) -> None:
        """Flush at the end of a loop iteration.

        After a long iteration, the deadlines of the checks that were submitted in it start again from now: they must
        not expire because the loop had no time to send them.
        """
        now = self.loop.time()
        if now - (first_deadline - self.deadline_seconds) > SLOW_ITERATION_SECONDS:
            for pending in self._queue:
                if pending.deadline >= first_deadline and not pending.is_resubmitted:
                    pending.deadline = now + self.deadline_seconds
        self._flush()

    def _flush(self) -> None:
        self._flush_is_scheduled = False
        if self.connection.is_closed:
            self._fail_queue(NotServerFault("the limiter was closed"))
        while (
            self._queue and len(self._writes) < MAX_WRITES_IN_FLIGHT and not any(w.is_group_split for w in self._writes)
        ):
            if self.connection.current is None:
                self.connection.open()
                return
            batch, is_group_split = self._next_batch()
            wanted = not_cancelled(batch)
            if wanted:
                self._send_batch(wanted, is_group_split=is_group_split)

    def _next_batch(self) -> tuple[list[PendingCheck], bool]:
        """Take the next batch from the queue: all of it, or what keeps Redis busy for a millisecond.

        The second value is True if the rest of the last group stays in the queue.
        """
        queue = self._queue
        max_us = MAX_CALL_US
        if not self._in_flight and self._queued_us >= SPLIT_ABOVE_US:
            max_us = min(self._queued_us // 2, MAX_CALL_US)  # Redis works on one half while we read the other
        if self._queued_us <= max_us:
            self._queue, self._queued_us = [], 0
            return queue, False
        count = count_that_fits(queue, max_us)
        if would_split_group(queue, count):  # a group is sent whole, unless it is too long for one call
            first, end = group_around(queue, count)
            count = first or min(end, count_that_fits(queue, MAX_CALL_US))
        self._queue = queue[count:]
        self._queued_us -= sum([pending.check.weight_us for pending in queue[:count]])
        return queue[:count], would_split_group(queue, count)

    # -- calls

    def _send_batch(self, batch: list[PendingCheck], *, is_group_split: bool) -> None:
        """Send a batch in one write, of as few calls as possible."""
        batches = [batch] if not self._is_sharded else self._group_by_call(batch)
        write = Write(len(batches), is_group_split)
        self._writes.append(write)
        started = [self._start_call(part, write) for part in batches]
        if len(started) == 1:
            self._advance(started[0], partial(next, started[0].flow))
            return
        calls: list[tuple[ScriptCall, InFlightCall]] = []
        for in_flight in started:
            self._advance(in_flight, partial(next, in_flight.flow), calls)
        if self.connection.current is not None:
            self.connection.current.call_many(
                [(call, partial(self._on_call_reply, in_flight), in_flight.needs_asking) for call, in_flight in calls]
            )
        else:
            for _, in_flight in calls:
                self._fail_call(in_flight, StoreUnavailable("the connection to Redis was lost"))

    def _group_by_call(self, batch: list[PendingCheck]) -> list[list[PendingCheck]]:
        """Group what can share a call, ordered by slot. Holds are finished first, so that checks see the effect."""
        now = self.loop.time()
        for slot in [slot for slot, until in self._moving_slots.items() if until < now]:
            del self._moving_slots[slot]
        groups: dict[tuple[bool, int, bool, int], list[PendingCheck]] = {}
        for pending in sorted(batch, key=_kind_and_slot):
            own_slot = pending.needs_single_slot_call or pending.needs_asking or pending.slot in self._moving_slots
            slot, call = pending.slot if own_slot else -1, id(pending) if pending.needs_own_call else 0
            groups.setdefault((type(pending.check) is FinishHold, slot, pending.needs_asking, call), []).append(pending)
        return list(groups.values())

    def _start_call(self, batch: list[PendingCheck], write: Write) -> InFlightCall:
        steps: list[Any] = [pending.check for pending in batch]
        flow = self._core.finish_flow(steps) if type(steps[0]) is FinishHold else self._core.checks_flow(steps)
        call = InFlightCall(batch, flow, self._resilience.now_us(), write, needs_asking=batch[0].needs_asking)
        call.is_multi_slot = self._is_sharded and batch[0].slot != batch[-1].slot
        self._in_flight.append(call)
        return call

    def _remove_call(self, in_flight: InFlightCall) -> None:
        self._in_flight.remove(in_flight)
        in_flight.write.calls_in_flight -= 1
        if not in_flight.write.calls_in_flight:
            self._writes.remove(in_flight.write)

    def _advance(
        self,
        in_flight: InFlightCall,
        resume: Callable[[], ScriptCall],
        calls: list[tuple[ScriptCall, InFlightCall]] | None = None,
    ) -> None:
        """Resume a flow: send its next call (or add it to `calls`), or deliver its results."""
        try:
            call = resume()
        except StopIteration as done:
            self._remove_call(in_flight)
            self._reply_all(in_flight.batch, done.value)
            self._record_reply(in_flight, done.value)
        except StoreUnavailable as error:
            self._fail_call(in_flight, error)
            self.on_failure(error, in_flight.began_us)
            if not isinstance(error, NotReplicated):
                self.connection.abort(error)  # out of step: no reply on this connection can be trusted
        except Exception as error:  # noqa: BLE001 - an invalid reply, or a bug: the callers must get a result
            self._fail_call(in_flight, as_internal_error(error))
            self._record_reply(in_flight)
            self.connection.abort(StoreUnavailable("Redis sent an invalid reply", maybe_counted=True))
        else:
            in_flight.calls_sent += 1
            if in_flight.is_multi_slot:
                call = self._core.as_multi_slot(call)
            if calls is not None:
                calls.append((call, in_flight))
            elif self.connection.current is None:
                lost = StoreUnavailable("the connection to Redis was lost", maybe_counted=in_flight.calls_sent > 1)
                self._fail_call(in_flight, lost)
            else:
                on_reply = partial(self._on_call_reply, in_flight)
                self.connection.current.call(call, on_reply, asking=in_flight.needs_asking)

    def _on_call_reply(self, in_flight: InFlightCall, reply: Reply | StoreError) -> None:
        is_first = in_flight.calls_sent == 1
        if not isinstance(reply, StoreError):
            self._advance(in_flight, partial(in_flight.flow.send, reply))
        elif in_flight.is_multi_slot and is_first and should_split_by_slot(reply):
            self._remove_call(in_flight)
            self._last_reply_us = self._resilience.now_us()
            self._requeue_by_slot(in_flight.batch)
        elif isinstance(reply, Redirected | SlotMigrating) and is_first and self._is_sharded:
            self._moving_slots[in_flight.batch[0].slot] = self.loop.time() + SPLIT_SLOT_SECONDS
            self._remove_call(in_flight)
            self._record_reply(in_flight)
            self._redirect(in_flight, reply)
        else:
            if not is_first and isinstance(reply, StoreUnavailable):  # the first call has decided some of the batch
                reply = as_maybe_counted(reply)
            self._fail_call(in_flight, reply)
            if not isinstance(reply, StoreUnavailable):
                self._record_reply(in_flight)
            elif not in_flight.is_late:
                self.on_failure(reply, in_flight.began_us)
        self.on_connection_changed()

    def _requeue_by_slot(self, batch: list[PendingCheck]) -> None:
        """Queue a batch again, in front, with a call for each slot: then only slots that fail get an error."""
        wanted = not_cancelled(batch)
        for pending in wanted:
            pending.is_resubmitted = pending.needs_single_slot_call = True
        self._queue = [*wanted, *self._queue]
        self._queued_us += sum(pending.check.weight_us for pending in wanted)
        if wanted and self._timer is None:
            self._arm_timer(min(pending.deadline for pending in wanted))

    def _redirect(self, in_flight: InFlightCall, redirection: Redirected | SlotMigrating) -> None:
        wanted = not_cancelled(in_flight.batch)
        try:
            self._router.redirect(wanted, redirection, self.server)
        except Exception as error:  # noqa: BLE001 - a bug in limitforge: the callers must get a result
            for pending in wanted:
                self.resolve(pending, as_internal_error(error))

    def _record_reply(self, in_flight: InFlightCall, results: Sequence[object] = ()) -> None:
        """Record that the server answered in time, even if its answer is an error."""
        if not in_flight.is_late:
            self._last_reply_us = self._resilience.now_us()
            self.on_success(results)

    # -- results

    def resolve(self, pending: PendingCheck, result: CheckResult) -> None:
        """Deliver a result. If the store was unavailable, the failure behaviour of the check decides."""
        if pending.on_reply is None:
            return
        check = pending.check
        if (
            isinstance(result, StoreUnavailable)
            and isinstance(check, Check)
            and check.result_kind is not ResultKind.PART
        ):
            result = self._resilience.decide_without_store(check, result)
        deliver(self.loop, pending, result)

    def _reply_all(self, batch: Sequence[PendingCheck], results: Sequence[object]) -> None:
        for pending, result in zip(batch, results, strict=True):
            if isinstance(result, StoreUnavailable):
                self.resolve(pending, result)
                continue
            on_reply = pending.on_reply
            if on_reply is None:
                continue
            pending.on_reply = None
            try:  # as in `deliver`, without its call for each check
                on_reply(result)
            except Exception as error:  # noqa: BLE001
                report_callback_error(self.loop, error)

    def _fail_call(self, in_flight: InFlightCall, error: LimitforgeError) -> None:
        self._remove_call(in_flight)
        for pending in in_flight.batch:
            self.resolve(pending, error)

    def _fail_queue(self, error: StoreUnavailable) -> None:
        queue, self._queue, self._queued_us = self._queue, [], 0
        for pending in queue:
            self.resolve(pending, error)

    # -- health: called by the connection, too

    def on_failure(self, error: StoreUnavailable, began_us: int) -> None:
        """Record that a call got no answer. If that opens the breaker, all checks that wait fail at once."""
        if self._resilience.record_failure(error, began_us):
            self.connection.abort(StoreUnavailable(str(error), maybe_counted=True))
            self._fail_queue(StoreUnavailable(str(error)))
        self._router.refresh_topology()

    def on_connect_failed(self, error: StoreUnavailable, began_us: int) -> None:
        """Fail the queue, since there is no connection to send it on."""
        self._resilience.record_failure(error, began_us)
        self._fail_queue(StoreUnavailable(str(error)))
        self._router.refresh_topology()

    def on_success(self, results: Sequence[object] = ()) -> None:
        """Record that the server answered. After an outage, this sends the pending charges."""
        if not self._resilience.is_healthy:
            self._core.charge(self._resilience.record_success(results))

    # -- deadlines

    def _arm_timer(self, deadline: float) -> None:
        self._timer_at = deadline
        self._timer = self.loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        """Resolve the checks whose deadline has passed, and arm the timer for the next deadline."""
        now = self.loop.time()
        if now - self._timer_at > SLOW_ITERATION_SECONDS and not self._in_grace_period:
            self._in_grace_period = True  # the loop was busy: read the replies that have arrived meanwhile first
            self._timer = self.loop.call_later(READ_REPLIES_SECONDS, self._on_timer)
            return
        self._in_grace_period = False
        self._expire_calls(now)  # callbacks may submit new checks: `_timer` stays set until the end, so none arms it
        self._expire_queue(now)
        self._timer = None
        deadlines = [
            pending.deadline for call in self._in_flight for pending in call.batch if pending.on_reply is not None
        ]
        deadlines += [deadline_of(call) + self.deadline_seconds for call in self._in_flight if call.is_late]
        deadlines += [pending.deadline for pending in self._queue]
        if deadlines:
            self._arm_timer(min(deadlines))

    def _expire_calls(self, now: float) -> None:
        error = StoreUnavailable(f"no answer within {self.deadline_seconds * 1_000:g} ms", maybe_counted=True)
        for in_flight in [call for call in self._in_flight if deadline_of(call) <= now]:
            for pending in in_flight.batch:
                if pending.deadline <= now:
                    self.resolve(pending, error)
            if not in_flight.is_late:
                in_flight.is_late = True
                self.on_failure(error, in_flight.began_us)
        late = [call for call in self._in_flight if call.is_late]
        if len({id(call.write) for call in late}) >= MAX_WRITES_IN_FLIGHT or any(
            deadline_of(call) + self.deadline_seconds <= now for call in late
        ):
            self.connection.abort(error)  # the server may be alive, and only this connection dead

    def _expire_queue(self, now: float) -> None:
        """Resolve queued checks whose deadline has passed.

        That counts as a failure of the server only if it answered no other call meanwhile. Otherwise the queue was too
        long.
        """
        expired = [pending for pending in self._queue if pending.deadline <= now]
        if not expired:
            return
        self._queue = [pending for pending in self._queue if pending.deadline > now]
        self._queued_us -= sum(pending.check.weight_us for pending in expired)
        error = StoreUnavailable(f"not sent within {self.deadline_seconds * 1_000:g} ms")
        for pending in expired:
            self.resolve(pending, error)
        began_us = self._resilience.now_us() - int(1e6 * (now - expired[0].deadline + self.deadline_seconds))
        if self._last_reply_us < began_us:
            self.on_failure(error, began_us)


def _kind_and_slot(pending: PendingCheck) -> tuple[bool, int]:
    return type(pending.check) is not FinishHold, pending.slot
