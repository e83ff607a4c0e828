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

from limitforge.core.check import Check
from limitforge.core.decision import Judged
from limitforge.core.plan import BUCKET_US
from limitforge.errors import LimitforgeError, StoreError, StoreUnavailable
from limitforge.stores.codec import BUSY_US, Call, Flow, NotReplicated, Reply, as_corrupt
from limitforge.stores.fleet import Node
from limitforge.stores.link import Link
from limitforge.stores.resilience import NotAsked, as_counted, left_alone
from limitforge.stores.resp import Elsewhere, Moving, is_worth_asking_apart
from limitforge.stores.spread import Finish, Step

MAX_IN_FLIGHT = 2
WORTH_HALVING_US = 100
CONNECT_DEADLINES = 4  # how long a connection may take to open: those who wait for it have long been answered
LEAST_CONNECT_SECONDS = 0.25
LAG_SECONDS = 0.005
GRACE_SECONDS = 0.001
UNSETTLED_SECONDS = 1.0

Tell = Callable[[Any], None]
"""Told a decision or an error; for a part of a check whatever the store told of it."""


class Answers(Protocol):
    """Makes the flows of calls for what waits, and is handed what the store is owed after an outage."""

    def judge(self, checks: Sequence[Check]) -> Flow[list[Judged]]: ...

    def finish(self, finishes: Sequence[Finish]) -> Flow[list[Any]]: ...

    def across(self, call: Call) -> Call:
        """The same call over several slots of one server."""

    def charge(self, charges: Sequence[Check]) -> None: ...


class Router(Protocol):
    """Knows which pipeline a check belongs to."""

    def redirect(self, batch: "list[Asked]", answer: Elsewhere | Moving, node: Node) -> None:
        """None of these was executed: ask again, where or when the answer says, or give up in time."""

    def doubt(self) -> None:
        """This server did not answer as it should: it may have been replaced."""


class Asked(msgspec.Struct, eq=False, gc=False):
    """A check, or a step of one, that is owed an answer by `due`. Whoever no longer wants it sets `tell` to None.

    Checks of one `group` are a caller's own batch, and judged in their order where they share a `slot`.
    """

    check: Step
    tell: Tell | None
    due: float
    group: object = None
    slot: int = 0
    is_aged: bool = False
    """Whether it was on its way before: what it waited for then was not this loop."""
    asking: bool = False
    """Whether it goes to a server that is only about to get its slot."""
    apart: bool = False
    """Whether it must not share a call with other slots."""
    alone: bool = False
    """Whether it must not share a call at all: its slot is moving, and others may lack a key."""
    hops: int = 0


class Volley(msgspec.Struct, eq=False):
    """One write, of one call or several."""

    flights: int
    holds: bool
    """The rest of its last group must not overtake it: a quota may have to be asked for once more."""


class Flight(msgspec.Struct, eq=False):
    """A call that is on its way. One that is `late` is still owed a reply, which then only frees its place."""

    batch: list[Asked]
    flow: Flow[list[Any]]
    began_us: int
    volley: Volley
    late: bool = False
    calls: int = 0
    asking: bool = False
    across: bool = False
    """Whether it asks several slots in one call."""


class Pipeline:
    """Joins the checks of one event loop for one server."""

    def __init__(
        self, node: Node, answers: Answers, router: Router, *, deadline_ms: float, max_waiting: int, is_sharded: bool
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = deadline_ms / 1_000
        self.node = node
        connect_seconds = max(CONNECT_DEADLINES * self.deadline, LEAST_CONNECT_SECONDS)
        self.link = Link(node.address, node.resilience, self, connect_seconds)
        self._resilience = node.resilience
        self._answers = answers
        self._router = router
        self._is_sharded = is_sharded
        self._max_waiting = max_waiting
        self._waiting: list[Asked] = []
        self._weight_us = 0
        self._flights: list[Flight] = []
        self._volleys: list[Volley] = []
        self._unsettled: dict[int, float] = {}
        """Slots that are moving or have moved, and until when they go by themselves."""
        self._is_scheduled = False
        self._answered_us = 0
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at = 0.0
        self._is_graced = False

    @property
    def waiting(self) -> int:
        """How many checks are owed an answer."""
        return len(self._waiting) + sum(len(flight.batch) for flight in self._flights)

    # -- asking

    def submit(self, asked: Asked) -> None:
        """Ask, in order. The answer comes by `asked.tell`, perhaps before this returns."""
        if not self._resilience.is_quiet and not self._resilience.admits():
            self.decide(asked, left_alone())
            return
        if len(self._waiting) >= self._max_waiting:
            self.decide(asked, NotAsked(f"{self._max_waiting} checks are waiting already"))
            return
        self._waiting.append(asked)
        self._weight_us += asked.check.weight_us
        if not self._is_scheduled and len(self._volleys) < MAX_IN_FLIGHT:
            self._is_scheduled = True
            if asked.is_aged:
                self.loop.call_soon(self._flush)
            else:
                self.loop.call_soon(self._flush_after, asked.due)
        if self._timer is None:
            self._arm(asked.due)
        elif asked.due < self._expires_at:
            self._timer.cancel()
            self._arm(asked.due)

    def hand_over(self) -> list[Asked]:
        """What waits here, for another pipeline."""
        waiting, self._waiting, self._weight_us = self._waiting, [], 0
        for asked in waiting:
            asked.is_aged = True
        return waiting

    def close(self) -> None:
        """Answer what waits by its failure behaviour, and let go of the connection for good."""
        self.link.close(StoreUnavailable("the limiter was closed", maybe_counted=True))
        self._refuse_waiting(NotAsked("the limiter was closed"))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- sending

    def opened(self) -> None:
        """Send what waits, over a new connection if there is none."""
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush_after(self, first_due: float) -> None:
        """Flush at the end of a turn. If that was a long one, the deadlines of all who asked in it begin now: nobody's
        time runs out while this loop had no time to send.
        """
        now = self.loop.time()
        if now - (first_due - self.deadline) > LAG_SECONDS:
            for asked in self._waiting:
                if asked.due >= first_due and not asked.is_aged:
                    asked.due = now + self.deadline
        self._flush()

    def _flush(self) -> None:
        self._is_scheduled = False
        if self.link.is_closed:
            self._refuse_waiting(NotAsked("the limiter was closed"))
        while self._waiting and len(self._volleys) < MAX_IN_FLIGHT and not any(v.holds for v in self._volleys):
            if self.link.wire is None:
                self.link.open()
                return
            batch, holds = self._gather()
            wanted = [asked for asked in batch if asked.tell is not None]
            if wanted:
                self._send(wanted, holds=holds)

    def _gather(self) -> tuple[list[Asked], bool]:
        """The next batch: all that waits, or as much as keeps Redis busy for a millisecond; and whether its last group
        goes on.
        """
        waiting = self._waiting
        most_us = BUSY_US
        if not self._flights and self._weight_us >= WORTH_HALVING_US:  # Redis works on one half while we read the other
            most_us = min(self._weight_us // 2, BUSY_US)
        if self._weight_us <= most_us:
            self._waiting, self._weight_us = [], 0
            return waiting, False
        count = _fitting(waiting, most_us)
        if _is_inside(waiting, count):  # a group travels whole, unless it is too long for one call
            first, last = _group_around(waiting, count)
            count = first or min(last, _fitting(waiting, BUSY_US))
        self._waiting = waiting[count:]
        self._weight_us -= sum([asked.check.weight_us for asked in waiting[:count]])
        return waiting[:count], _is_inside(waiting, count)

    def _send(self, batch: list[Asked], *, holds: bool) -> None:
        """One call, and one for what ends; one more for each slot that can't share them. All in one write."""
        batches = [batch] if not self._is_sharded else self._sharded(batch)
        volley = Volley(len(batches), holds)
        self._volleys.append(volley)
        flights = [self._flight(one, volley) for one in batches]
        if len(flights) == 1:
            self._advance(flights[0], partial(next, flights[0].flow))
        else:
            calls: list[tuple[Call, Flight]] = []
            for flight in flights:
                self._advance(flight, partial(next, flight.flow), calls)
            if self.link.wire is not None:
                self.link.wire.call_all(
                    [(call, partial(self._replied, flight), flight.asking) for call, flight in calls]
                )
            else:
                for _, flight in calls:
                    self._fail(flight, StoreUnavailable("the connection to Redis was lost"))

    def _sharded(self, batch: list[Asked]) -> list[list[Asked]]:
        """What may share a call, slot by slot in it; what ends something goes before what looks at it."""
        now = self.loop.time()
        for slot in [slot for slot, until in self._unsettled.items() if until < now]:
            del self._unsettled[slot]
        found: dict[tuple[bool, int, bool, int], list[Asked]] = {}
        for asked in sorted(batch, key=_kind_and_slot):
            apart = asked.apart or asked.asking or asked.slot in self._unsettled
            slot, alone = asked.slot if apart else -1, id(asked) if asked.alone else 0
            found.setdefault((type(asked.check) is Finish, slot, asked.asking, alone), []).append(asked)
        return list(found.values())

    def _flight(self, batch: list[Asked], volley: Volley) -> Flight:
        steps: list[Any] = [asked.check for asked in batch]
        flow = self._answers.finish(steps) if type(steps[0]) is Finish else self._answers.judge(steps)
        flight = Flight(batch, flow, self._resilience.now_us(), volley, asking=batch[0].asking)
        flight.across = self._is_sharded and batch[0].slot != batch[-1].slot
        self._flights.append(flight)
        return flight

    def _land(self, flight: Flight) -> None:
        self._flights.remove(flight)
        flight.volley.flights -= 1
        if not flight.volley.flights:
            self._volleys.remove(flight.volley)

    def _advance(self, flight: Flight, step: Callable[[], Any], calls: list[tuple[Call, Flight]] | None = None) -> None:
        """Take a flow one step on: to its next call, which is sent (or added to `calls`), or to its answers."""
        try:
            call = step()
        except StopIteration as done:
            self._land(flight)
            self._tell_all(flight.batch, done.value)
            self._answered(flight, done.value)
        except StoreUnavailable as error:  # the answer to another call: nothing that comes here can be trusted
            self._fail(flight, error)
            self.failed(error, flight.began_us)
            if not isinstance(error, NotReplicated):
                self.link.abort(error)
        except Exception as error:  # noqa: BLE001 - an answer that makes no sense, or a bug: the callers must hear of it
            self._fail(flight, as_corrupt(error))
            self._answered(flight)
            self.link.abort(StoreUnavailable("an answer made no sense", maybe_counted=True))
        else:
            flight.calls += 1
            if flight.across:
                call = self._answers.across(call)
            if calls is not None:
                calls.append((call, flight))
            elif self.link.wire is None:
                self._fail(flight, StoreUnavailable("the connection to Redis was lost", maybe_counted=flight.calls > 1))
            else:
                self.link.wire.call(call, partial(self._replied, flight), asking=flight.asking)

    def _replied(self, flight: Flight, reply: Reply | StoreError) -> None:
        if not isinstance(reply, StoreError):
            self._advance(flight, partial(flight.flow.send, reply))
        elif flight.across and flight.calls == 1 and is_worth_asking_apart(reply):
            self._land(flight)
            self._answered_us = self._resilience.now_us()
            self._ask_apart(flight.batch)
        elif isinstance(reply, Elsewhere | Moving) and flight.calls == 1 and self._is_sharded:
            self._unsettled[flight.batch[0].slot] = self.loop.time() + UNSETTLED_SECONDS
            self._land(flight)
            self._answered(flight)
            self._redirect(flight, reply)
        else:
            if flight.calls > 1 and isinstance(reply, StoreUnavailable):  # some of the batch was judged before
                reply = as_counted(reply)
            self._fail(flight, reply)
            if not isinstance(reply, StoreUnavailable):
                self._answered(flight)
            elif not flight.late:
                self.failed(reply, flight.began_us)
        self.opened()

    def _ask_apart(self, batch: list[Asked]) -> None:
        """Each slot by itself, before whatever else waits: it will say what is wrong."""
        wanted = [asked for asked in batch if asked.tell is not None]
        for asked in wanted:
            asked.is_aged = asked.apart = True
        self._waiting = [*wanted, *self._waiting]
        self._weight_us += sum(asked.check.weight_us for asked in wanted)
        if wanted and self._timer is None:
            self._arm(min(asked.due for asked in wanted))

    def _redirect(self, flight: Flight, answer: Elsewhere | Moving) -> None:
        wanted = [asked for asked in flight.batch if asked.tell is not None]
        try:
            self._router.redirect(wanted, answer, self.node)
        except Exception as error:  # noqa: BLE001 - a bug of ours: nobody shall wait for it
            for asked in wanted:
                self.decide(asked, as_corrupt(error))

    def _answered(self, flight: Flight, answers: Sequence[object] = ()) -> None:
        """Whatever it said: it answered. Too late is as good as never."""
        if not flight.late:
            self._answered_us = self._resilience.now_us()
            self.succeeded(answers)

    # -- failing

    def _fail(self, flight: Flight, error: LimitforgeError) -> None:
        self._land(flight)
        for asked in flight.batch:
            self.decide(asked, error)

    def decide(self, asked: Asked, answer: Judged) -> None:
        """Tell the answer; if the store was away, what the failure behaviour of the check says."""
        if asked.tell is None:
            return
        if isinstance(answer, StoreUnavailable) and isinstance(asked.check, Check) and not asked.check.is_part:
            answer = self._resilience.decide(asked.check, answer)
        self.tell(asked, answer)

    def tell(self, asked: Asked, answer: object) -> None:
        """Answer, once. Whatever the callback does is its own affair."""
        if asked.tell is None:
            return
        tell, asked.tell = asked.tell, None
        try:
            tell(answer)
        except Exception as error:  # noqa: BLE001 - somebody's callback must not keep its batch from their answers
            self._unheard(error)

    def _tell_all(self, batch: Sequence[Asked], answers: Sequence[object]) -> None:
        """The same for all that were asked together."""
        for asked, answer in zip(batch, answers, strict=True):
            tell = asked.tell
            if tell is None:
                continue
            if isinstance(answer, StoreUnavailable):
                self.decide(asked, answer)
                continue
            asked.tell = None
            try:
                tell(answer)
            except Exception as error:  # noqa: BLE001 - as above
                self._unheard(error)

    def _unheard(self, error: Exception) -> None:
        if not isinstance(error, asyncio.InvalidStateError):  # then its caller was cancelled in this turn of the loop
            self.loop.call_exception_handler({"message": "the callback of a check failed", "exception": error})

    def _refuse_waiting(self, error: StoreUnavailable) -> None:
        waiting, self._waiting, self._weight_us = self._waiting, [], 0
        for asked in waiting:
            self.decide(asked, error)

    def failed(self, error: StoreUnavailable, began_us: int) -> None:
        """What began then was not answered. A store that is given up is given up at once."""
        if self._resilience.failed(error, began_us):
            self.link.abort(StoreUnavailable(str(error), maybe_counted=True))
            self._refuse_waiting(StoreUnavailable(str(error)))
        self._router.doubt()

    def unopened(self, error: StoreUnavailable, began_us: int) -> None:
        """There is no connection for those who wait."""
        self._resilience.failed(error, began_us)
        self._refuse_waiting(StoreUnavailable(str(error)))
        self._router.doubt()

    def succeeded(self, answers: Sequence[object] = ()) -> None:
        """The store answered; what it is owed after an outage is charged now, if it can write."""
        if not self._resilience.is_quiet:
            self._answers.charge(self._resilience.succeeded(answers))

    # -- deadlines

    def _arm(self, due: float) -> None:
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
        self._expire_flights(now)  # whoever is told may ask again: until the end, the timer counts as armed
        self._expire_waiting(now)
        self._timer = None
        dues = [asked.due for flight in self._flights for asked in flight.batch if asked.tell is not None]
        dues += [self._due(flight) + self.deadline for flight in self._flights if flight.late]
        dues += [asked.due for asked in self._waiting]
        if dues:
            self._arm(min(dues))

    def _expire_flights(self, now: float) -> None:
        error = StoreUnavailable(f"no answer within {self.deadline * 1_000:g} ms", maybe_counted=True)
        for flight in [flight for flight in self._flights if self._due(flight) <= now]:
            for asked in flight.batch:
                if asked.due <= now:
                    self.decide(asked, error)
            if not flight.late:
                flight.late = True
                self.failed(error, flight.began_us)
        late = [flight for flight in self._flights if flight.late]
        if len({id(flight.volley) for flight in late}) >= MAX_IN_FLIGHT or any(
            self._due(flight) + self.deadline <= now for flight in late
        ):
            self.link.abort(error)  # it may be this connection alone that is dead

    @staticmethod
    def _due(flight: Flight) -> float:
        return min([asked.due for asked in flight.batch])

    def _expire_waiting(self, now: float) -> None:
        """They were never sent: a failure too, unless Redis answered others meanwhile: then the queue was too long."""
        expired = [asked for asked in self._waiting if asked.due <= now]
        if expired:
            self._waiting = [asked for asked in self._waiting if asked.due > now]
            self._weight_us -= sum(asked.check.weight_us for asked in expired)
            error = StoreUnavailable(f"no answer within {self.deadline * 1_000:g} ms")
            for asked in expired:
                self.decide(asked, error)
            began_us = self._resilience.now_us() - int(1e6 * (now - expired[0].due + self.deadline))
            if self._answered_us < began_us:
                self.failed(error, began_us)


def _kind_and_slot(asked: Asked) -> tuple[bool, int]:
    return type(asked.check) is not Finish, asked.slot


def _fitting(waiting: Sequence[Asked], most_us: int) -> int:
    """How many of them, and at least one, keep Redis busy for no longer than that."""
    most = most_us // BUCKET_US + 1  # none with a limit is lighter
    return bisect_right(list(accumulate([asked.check.weight_us for asked in waiting[:most]])), most_us) or 1


def _is_inside(waiting: Sequence[Asked], count: int) -> bool:
    """Whether a cut after that many goes through a group."""
    return (
        count < len(waiting) and waiting[count].group is not None and waiting[count].group is waiting[count - 1].group
    )


def _group_around(waiting: Sequence[Asked], place: int) -> tuple[int, int]:
    """Where the group at that place begins, and where it is over."""
    group = waiting[place].group
    first = last = place
    while first and waiting[first - 1].group is group:
        first -= 1
    while last < len(waiting) and waiting[last].group is group:
        last += 1
    return first, last
