"""What both Redis shells are made of, beside their way of talking: flows, the cache of denials, and the account."""

import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import msgspec

from limitforge.core.check import Check
from limitforge.core.clock import Clock, MonotonicClock, SystemClock
from limitforge.core.decision import OVERFLOWED, Decision, Judged, Outcome, decision_of, reservation_id
from limitforge.core.keys import Keys, decoded, encoded
from limitforge.core.tickets import nothing_held, ticket_id
from limitforge.errors import LimitforgeError, StoreUnavailable, TooManyReservations
from limitforge.stores.blend import Blender
from limitforge.stores.codec import (
    OWN_TIME,
    Call,
    Flow,
    Note,
    T,
    across,
    batch_flow,
    finish_flow,
    members_flow,
    shares_flow,
)
from limitforge.stores.command_codec import command_flow
from limitforge.stores.denials import Denials, Drop
from limitforge.stores.fleet import Fleet
from limitforge.stores.heat import Heat
from limitforge.stores.hints import Hints
from limitforge.stores.listener import Caches
from limitforge.stores.membership import ALIVE_US
from limitforge.stores.new_buckets import NewBuckets
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import (
    ClearOverrides,
    Command,
    DeleteOverride,
    DropDenials,
    Release,
    Renew,
    Reset,
    SetOverride,
    Settle,
    StoreStatus,
)
from limitforge.stores.resilience import LOG_EVERY_US
from limitforge.stores.shares import Grant, Shares, Wish
from limitforge.stores.spread import Finish, Step, a_key_of, judge_spread

COMMAND_SECONDS = 1.0  # what everything other than a check may take, or the deadline where that is longer

Steps = Generator[list[Step], Sequence[Any], T]
"""Yields what to ask side by side, is sent the answers, and returns what they come to."""

_log = logging.getLogger(__name__)


class Parts:
    """The servers, flows, cache and account of one store. `charge` is handed what the store is owed after an outage."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        clock: Clock | None,
        options: StoreOptions,
        charge: Callable[[Sequence[Check]], None],
    ) -> None:
        self.keys = keys
        self.channel = f"{keys.prefix}:denials".encode()
        self.fleet = Fleet(url, keys, options, clock)
        self.charge = charge
        self._injected = clock is not None
        self._clock = clock or SystemClock()
        self._now_us = MonotonicClock().now_us
        self._warned_us = self._now_us() - LOG_EVERY_US
        self.heat = Heat(MonotonicClock())
        self.overridden = Hints(MonotonicClock())
        budget = options.new_buckets_per_minute
        self.new_buckets = None if budget is None else NewBuckets(budget, MonotonicClock())
        self._fits_memory = options.fits_memory
        self._shares: weakref.WeakSet[Shares] = weakref.WeakSet()
        self.caches = Caches()
        self._share_clock = clock or MonotonicClock()
        self._sync_interval_us = int(1_000 * options.sync_interval_ms)
        self.denials: Denials | None = None
        if options.denial_cache_ms:
            self.denials = Denials(
                max_age_us=int(1_000 * options.denial_cache_ms),
                max_keys=options.denial_cache_size,
                clock=clock or MonotonicClock(),
            )
            self.caches.add(self.denials)

    def blender(self) -> Blender:
        """What decides in this process; it hears of changes for as long as anybody has it."""
        shares = Shares(interval_us=self._sync_interval_us, clock=self._share_clock)
        self.caches.add(shares)
        self._shares.add(shares)
        return Blender(shares, self.fleet.local)

    def judge(self, checks: Sequence[Check]) -> Flow[list[Judged]]:
        """As many as one call can take. To be started when it is sent: a denial is remembered from then on."""
        now_us = self._clock.now_us()
        time_us = now_us if self._injected else OWN_TIME
        return batch_flow(checks, now_us, time_us, self._note(), self.overridden, self.new_buckets)

    def finish(self, finishes: Sequence[Finish]) -> Flow[list[Any]]:
        """The same for what ends what parts of checks hold."""
        return finish_flow(finishes, self._clock.now_us() if self._injected else OWN_TIME)

    def across(self, call: Call) -> Call:
        return across(call, self.fleet.slot_of)

    def spread(self, check: Check, undo: Callable[[Sequence[Finish]], None]) -> Steps[Decision | LimitforgeError]:
        """A check over several slots, and after it the plan that is tried beside it."""
        note = self._note()
        outcome, undone = yield from judge_spread(check, self.fleet.slot_of)
        undo(undone)
        if isinstance(outcome, StoreUnavailable):
            return self.decide(check, outcome)
        if isinstance(outcome, LimitforgeError):
            return outcome
        if note is not None and not outcome.allowed:
            note(check, outcome)
        self._count_overflow(outcome)
        if check.shadow is None:
            return decision_of(check, outcome)
        shadow, undone = yield from judge_spread(check.shadow, self.fleet.slot_of)
        undo(undone)  # whatever is wrong with a candidate plan only leaves it out
        return decision_of(check, outcome, shadow if isinstance(shadow, Outcome) else None)

    def blend(
        self, check: Check, blender: Blender, undo: Callable[[Sequence[Finish]], None]
    ) -> Steps[Decision | LimitforgeError]:
        """A check of which this process decides a part."""
        note = self._note()
        try:
            blend = blender.begin(check)
        except (StoreUnavailable, TooManyReservations) as error:  # not even this process has room for it
            return self.decide(check, StoreUnavailable(str(error)))
        except LimitforgeError as error:
            return error
        outcome: Outcome | LimitforgeError | None = None
        if blend.rest is not None:
            outcome, undone = yield from judge_spread(blend.rest, self.fleet.slot_of)
            undo(undone)
        whole = blender.end(blend, outcome)
        if isinstance(whole, StoreUnavailable):
            return self.decide(check, whole)
        if isinstance(whole, LimitforgeError):
            return whole
        if note is not None and not whole.allowed and not any(take[0].local for take in check.takes):
            note(check, whole)
        self._count_overflow(whole)
        shadow: Outcome | LimitforgeError | None = None
        if check.shadow is not None:
            shadow, undone = yield from judge_spread(check.shadow, self.fleet.slot_of)
            undo(undone)
        decision = decision_of(check, whole, shadow if isinstance(shadow, Outcome) else None)
        if decision.reservation_id is not None and check.hold is not None:
            held = blend.rest and isinstance(outcome, Outcome) and reservation_id(blend.rest, outcome)
            nothing = ticket_id(nothing_held(encoded(check.hold.key)))
            decision = msgspec.structs.replace(decision, reservation_id=held or nothing)
        return decision

    def shares(self, wishes: Sequence[Wish], lapse_us: int) -> Flow[list[Grant | None]]:
        now_us = self._clock.now_us()
        return shares_flow(wishes, now_us, now_us if self._injected else OWN_TIME, lapse_us, self.new_buckets)

    def beat(self, alive_us: int = ALIVE_US) -> Flow[int]:
        """Say that this process is alive."""
        members = self.fleet.members
        return members_flow(members.key, members.name, alive_us, OWN_TIME)

    def decide(self, check: Check, error: StoreUnavailable) -> Decision | LimitforgeError:
        """Decide a check over several slots without the store. Its first limit's server has it on its account."""
        return self.fleet.node_of(self.fleet.slot_of(a_key_of(check))).resilience.decide(check, error)

    def command(self, command: Command[T]) -> Flow[T]:
        now_us = self._clock.now_us()
        time_us = now_us if self._injected else OWN_TIME
        return command_flow(command, self.keys, self.fleet.slot_of, now_us, time_us)

    def drop(self, command: Command[Any]) -> Drop | None:
        """Forget the denials that a command makes doubtful; what the other nodes must forget too."""
        if isinstance(command, Reset):
            self.fleet.local.run(command)  # what this process decides is forgotten, too
        drop = dropped_by(command)
        if drop == Drop():
            return None
        if drop is not None:
            self.caches.drop(drop)
        return drop

    def drop_after(self, command: Command[Any], error: BaseException) -> None:
        """The same for a command that failed: it may have been carried out."""
        if self.drop(command) is not None and isinstance(error, StoreUnavailable) and error.maybe_counted:
            self.warn_untold(error)

    def charged(self, charges: Sequence[Check], answers: Sequence[object]) -> None:
        """Nothing is charged twice: what surely failed is owed again, what may have failed is lost, and said once."""
        owed, lost = [], []
        for charge, answer in zip(charges, answers, strict=True):
            if isinstance(answer, StoreUnavailable) and not answer.maybe_counted:
                owed.append(charge)
            elif isinstance(answer, LimitforgeError):
                lost.append(answer)
        self.fleet.owe(owed)
        if lost:
            total = len(charges)
            _log.error("%d of %d charges after an outage were not made, or not surely: %s", len(lost), total, lost[0])

    def warn_untold(self, error: object) -> None:
        """Other nodes did not hear of a change. One line now and then will do."""
        if self._now_us() - self._warned_us >= LOG_EVERY_US:
            self._warned_us = self._now_us()
            _log.warning("other nodes were not told of a change, and may repeat a denial for a moment: %s", error)

    def _count_overflow(self, outcome: Outcome) -> None:
        """Count a check that was decided in parts; others are counted where their answer is read."""
        if self.new_buckets is not None and any(row[4] >= OVERFLOWED for row in outcome.rows):
            self.new_buckets.count_overflow()

    def fit_memory(self, memory_bytes: int) -> None:
        """Learn how much memory the smallest server has; 0 if none of them has a limit."""
        if self.new_buckets is not None and self._fits_memory:
            self.new_buckets.fit(memory_bytes)

    def status(self, waiting: int = 0) -> StoreStatus:
        worst = self.fleet.worst
        return StoreStatus(
            worst.state,
            worst.since,
            self.fleet.degraded,
            0 if self.denials is None else self.denials.count(),
            0 if self.denials is None else self.denials.hits,
            waiting,
            {} if self.fleet.is_single else {node.name: node.resilience.state for node in self.fleet.nodes},
            sum(shares.out for shares in list(self._shares)),
            self.heat.hottest(),
            None if self.new_buckets is None else self.new_buckets.per_minute,
            0 if self.new_buckets is None else self.new_buckets.overflowed,
        )

    def _note(self) -> Note | None:
        denials = self.denials
        if denials is None:
            return None
        sent_us = denials.now_us()

        def note(check: Check, outcome: Outcome) -> None:
            denials.note(check, outcome, sent_us)

        return note


def is_local(command: Command[Any]) -> bool:
    """Whether it is about something that was handed out in a process while its store was away."""
    match command:
        case Release(ticket) | Renew(ticket) | Settle(ticket):
            return ticket.local
    return False


def dropped_by(command: Command[Any]) -> Drop | None:
    """Which cached denials a command makes doubtful."""
    match command:
        case Reset(keys):
            return Drop(keys=keys)
        case Settle(reservation):
            return Drop(keys=tuple(decoded(limit.key) for limit in reservation.limits))
        case SetOverride(own=own, subject=subject) | DeleteOverride(own=own, subject=subject):
            return Drop(subjects=(Keys.overrides(own, subject),))
        case ClearOverrides(starts) | DropDenials(starts):
            return Drop(tenants=starts)
    return None


class Batch:
    """The checks of a caller's own batch: those whose denial is known, and those that must be asked for."""

    def __init__(self, checks: Iterable[Check], decided: Callable[[Check], Decision | Outcome | None]) -> None:
        self.asked: list[Check] = []
        self._places: list[int] = []
        self.answers: list[Judged | None] = []
        for place, check in enumerate(checks):
            known = decided(check)
            self.answers.append(known)
            if known is None:
                self.asked.append(check)
                self._places.append(place)

    def answer(self, at: int, answer: Decision | LimitforgeError) -> None:
        """Of the one that was asked for at that place."""
        self.answers[self._places[at]] = answer
