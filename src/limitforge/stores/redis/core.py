"""What both Redis shells are made of, beside their way of talking: flows, the cache of denials, and the account."""

import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import msgspec

from limitforge.core.check import Check
from limitforge.core.clock import Clock, MonotonicClock, SystemClock
from limitforge.core.decision import OVERFLOWED, CheckResult, Decision, Outcome, build_decision, encode_reservation_id
from limitforge.core.handles import empty_reservation, encode_handle
from limitforge.core.keys import Keys, decode_key, encode_key
from limitforge.errors import LimitforgeError, StoreUnavailable, TooManyReservations
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import (
    ClearOverrides,
    Command,
    DeleteOverride,
    DropCachedDenials,
    Release,
    Renew,
    Reset,
    SetOverride,
    Settle,
    StoreStatus,
)
from limitforge.stores.redis.codec import (
    SERVER_TIME,
    Flow,
    OnDenial,
    ScriptCall,
    T,
    as_cross_slot,
    check_flow,
    finish_flow,
    heartbeat_flow,
    top_up_flow,
)
from limitforge.stores.redis.command_codec import command_flow
from limitforge.stores.redis.denial_cache import DenialCache, Invalidation
from limitforge.stores.redis.hot_keys import HotKeys
from limitforge.stores.redis.invalidation import InvalidatedCaches
from limitforge.stores.redis.key_hints import KeyHints
from limitforge.stores.redis.new_buckets import NewBucketBudget
from limitforge.stores.redis.prepaid.heartbeat import HEARTBEAT_TTL_US
from limitforge.stores.redis.prepaid.hybrid import HybridDecider
from limitforge.stores.redis.prepaid.shares import PrepaidShares, TopUpReply, TopUpRequest
from limitforge.stores.redis.topology.cross_slot import FinishHold, Step, cross_slot_steps, routing_key
from limitforge.stores.redis.topology.topology import Topology
from limitforge.stores.resilience.failure import LOG_EVERY_US

COMMAND_TIMEOUT_SECONDS = 1.0  # what everything other than a check may take, or the deadline where that is longer

MultiStepFlow = Generator[list[Step], Sequence[Any], T]
"""Yields what to ask side by side, is sent the answers, and returns what they come to."""

_log = logging.getLogger(__name__)


class RedisCore:
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
        self.topology = Topology(url, keys, options, clock)
        self.charge = charge
        self._has_test_clock = clock is not None
        self._clock = clock or SystemClock()
        self._now_us = MonotonicClock().now_us
        self._warned_us = self._now_us() - LOG_EVERY_US
        self.hot_keys = HotKeys(MonotonicClock())
        self.override_hints = KeyHints(MonotonicClock())
        budget = options.new_buckets_per_minute
        self.new_buckets = None if budget is None else NewBucketBudget(budget, MonotonicClock())
        self._cap_budget_by_memory = options.cap_budget_by_memory
        self._prepaid: weakref.WeakSet[PrepaidShares] = weakref.WeakSet()
        self.caches = InvalidatedCaches()
        self._cache_clock = clock or MonotonicClock()
        self._sync_interval_us = int(1_000 * options.sync_interval_ms)
        self.denial_cache: DenialCache | None = None
        if options.denial_cache_ms:
            self.denial_cache = DenialCache(
                max_age_us=int(1_000 * options.denial_cache_ms),
                max_keys=options.denial_cache_size,
                clock=clock or MonotonicClock(),
            )
            self.caches.add(self.denial_cache)

    def create_hybrid(self) -> HybridDecider:
        """What decides in this process; it hears of changes for as long as anybody has it."""
        shares = PrepaidShares(interval_us=self._sync_interval_us, clock=self._cache_clock)
        self.caches.add(shares)
        self._prepaid.add(shares)
        return HybridDecider(shares, self.topology.local_store)

    def checks_flow(self, checks: Sequence[Check]) -> Flow[list[CheckResult]]:
        """As many as one call can take. To be started when it is sent: a denial is remembered from then on."""
        now_us = self._clock.now_us()
        time_us = now_us if self._has_test_clock else SERVER_TIME
        return check_flow(checks, now_us, time_us, self._denial_recorder(), self.override_hints, self.new_buckets)

    def finish_flow(self, finishes: Sequence[FinishHold]) -> Flow[list[Any]]:
        """The same for what ends what parts of checks hold."""
        return finish_flow(finishes, self._clock.now_us() if self._has_test_clock else SERVER_TIME)

    def across_slots(self, call: ScriptCall) -> ScriptCall:
        return as_cross_slot(call, self.topology.slot_of)

    def cross_slot_check(
        self, check: Check, undo: Callable[[Sequence[FinishHold]], None]
    ) -> MultiStepFlow[Decision | LimitforgeError]:
        """A check over several slots, and after it the plan that is tried beside it."""
        note = self._denial_recorder()
        outcome, undone = yield from cross_slot_steps(check, self.topology.slot_of)
        undo(undone)
        if isinstance(outcome, StoreUnavailable):
            return self.decide_without_store(check, outcome)
        if isinstance(outcome, LimitforgeError):
            return outcome
        if note is not None and not outcome.allowed:
            note(check, outcome)
        self._count_overflow(outcome)
        if check.shadow is None:
            return build_decision(check, outcome)
        shadow, undone = yield from cross_slot_steps(check.shadow, self.topology.slot_of)
        undo(undone)  # whatever is wrong with a candidate plan only leaves it out
        return build_decision(check, outcome, shadow if isinstance(shadow, Outcome) else None)

    def hybrid_check(
        self, check: Check, blender: HybridDecider, undo: Callable[[Sequence[FinishHold]], None]
    ) -> MultiStepFlow[Decision | LimitforgeError]:
        """A check of which this process decides a part."""
        note = self._denial_recorder()
        try:
            blend = blender.begin(check)
        except (StoreUnavailable, TooManyReservations) as error:  # not even this process has room for it
            return self.decide_without_store(check, StoreUnavailable(str(error)))
        except LimitforgeError as error:
            return error
        outcome: Outcome | LimitforgeError | None = None
        if blend.store_part is not None:
            outcome, undone = yield from cross_slot_steps(blend.store_part, self.topology.slot_of)
            undo(undone)
        whole = blender.complete(blend, outcome)
        if isinstance(whole, StoreUnavailable):
            return self.decide_without_store(check, whole)
        if isinstance(whole, LimitforgeError):
            return whole
        if note is not None and not whole.allowed and not any(take[0].local for take in check.debits):
            note(check, whole)
        self._count_overflow(whole)
        shadow: Outcome | LimitforgeError | None = None
        if check.shadow is not None:
            shadow, undone = yield from cross_slot_steps(check.shadow, self.topology.slot_of)
            undo(undone)
        decision = build_decision(check, whole, shadow if isinstance(shadow, Outcome) else None)
        if decision.reservation_id is not None and check.hold is not None:
            held = (
                blend.store_part and isinstance(outcome, Outcome) and encode_reservation_id(blend.store_part, outcome)
            )
            nothing = encode_handle(empty_reservation(encode_key(check.hold.key)))
            decision = msgspec.structs.replace(decision, reservation_id=held or nothing)
        return decision

    def top_up_flow(self, wishes: Sequence[TopUpRequest], lapse_us: int) -> Flow[list[TopUpReply | None]]:
        now_us = self._clock.now_us()
        return top_up_flow(wishes, now_us, now_us if self._has_test_clock else SERVER_TIME, lapse_us, self.new_buckets)

    def heartbeat_flow(self, alive_us: int = HEARTBEAT_TTL_US) -> Flow[int]:
        """Say that this process is alive."""
        members = self.topology.heartbeat
        return heartbeat_flow(members.key, members.name, alive_us, SERVER_TIME)

    def decide_without_store(self, check: Check, error: StoreUnavailable) -> Decision | LimitforgeError:
        """Decide a check over several slots without the store. Its first limit's server has it on its account."""
        return self.topology.server_of_slot(self.topology.slot_of(routing_key(check))).resilience.decide_without_store(
            check, error
        )

    def command(self, command: Command[T]) -> Flow[T]:
        now_us = self._clock.now_us()
        time_us = now_us if self._has_test_clock else SERVER_TIME
        return command_flow(command, self.keys, self.topology.slot_of, now_us, time_us)

    def invalidate_for(self, command: Command[Any]) -> Invalidation | None:
        """Forget the denials that a command makes doubtful; what the other nodes must forget too."""
        if isinstance(command, Reset):
            self.topology.local_store.run(command)  # what this process decides is forgotten, too
        drop = invalidation_of(command)
        if drop == Invalidation():
            return None
        if drop is not None:
            self.caches.invalidate(drop)
        return drop

    def invalidate_after_failure(self, command: Command[Any], error: BaseException) -> None:
        """The same for a command that failed: it may have been carried out."""
        if self.invalidate_for(command) is not None and isinstance(error, StoreUnavailable) and error.maybe_counted:
            self.warn_not_published(error)

    def record_charges(self, charges: Sequence[Check], answers: Sequence[object]) -> None:
        """Nothing is charged twice: what surely failed is owed again, what may have failed is lost, and said once."""
        owed, lost = [], []
        for charge, answer in zip(charges, answers, strict=True):
            if isinstance(answer, StoreUnavailable) and not answer.maybe_counted:
                owed.append(charge)
            elif isinstance(answer, LimitforgeError):
                lost.append(answer)
        self.topology.requeue_charges(owed)
        if lost:
            total = len(charges)
            _log.error("%d of %d charges after an outage were not made, or not surely: %s", len(lost), total, lost[0])

    def warn_not_published(self, error: object) -> None:
        """Other nodes did not hear of a change. One line now and then will do."""
        if self._now_us() - self._warned_us >= LOG_EVERY_US:
            self._warned_us = self._now_us()
            _log.warning("other nodes were not told of a change, and may repeat a denial for a moment: %s", error)

    def _count_overflow(self, outcome: Outcome) -> None:
        """Count a check that was decided in parts; others are counted where their answer is read."""
        if self.new_buckets is not None and any(row[4] >= OVERFLOWED for row in outcome.rows):
            self.new_buckets.count_overflow()

    def set_server_memory(self, memory_bytes: int) -> None:
        """Learn how much memory the smallest server has; 0 if none of them has a limit."""
        if self.new_buckets is not None and self._cap_budget_by_memory:
            self.new_buckets.cap_by_memory(memory_bytes)

    def status(self, waiting: int = 0) -> StoreStatus:
        worst = self.topology.worst_resilience
        return StoreStatus(
            worst.state,
            worst.since,
            self.topology.degraded,
            0 if self.denial_cache is None else self.denial_cache.count(),
            0 if self.denial_cache is None else self.denial_cache.hits,
            waiting,
            {} if self.topology.is_single else {node.name: node.resilience.state for node in self.topology.servers},
            sum(shares.total_balance for shares in list(self._prepaid)),
            self.hot_keys.top(),
            None if self.new_buckets is None else self.new_buckets.per_minute,
            0 if self.new_buckets is None else self.new_buckets.overflowed,
        )

    def _denial_recorder(self) -> OnDenial | None:
        denials = self.denial_cache
        if denials is None:
            return None
        sent_us = denials.now_us()

        def note(check: Check, outcome: Outcome) -> None:
            denials.add(check, outcome, sent_us)

        return note


def is_for_local_handle(command: Command[Any]) -> bool:
    """Whether it is about something that was handed out in a process while its store was away."""
    match command:
        case Release(ticket) | Renew(ticket) | Settle(ticket):
            return ticket.local
    return False


def invalidation_of(command: Command[Any]) -> Invalidation | None:
    """Which cached denials a command makes doubtful."""
    match command:
        case Reset(keys):
            return Invalidation(keys=keys)
        case Settle(reservation):
            return Invalidation(keys=tuple(decode_key(limit.key) for limit in reservation.limits))
        case SetOverride(lane_prefix=own, subject=subject) | DeleteOverride(lane_prefix=own, subject=subject):
            return Invalidation(subjects=(Keys.overrides(own, subject),))
        case ClearOverrides(starts) | DropCachedDenials(starts):
            return Invalidation(tenants=starts)
    return None


class CallerBatch:
    """The checks of a caller's own batch: those whose denial is known, and those that must be asked for."""

    def __init__(self, checks: Iterable[Check], decided: Callable[[Check], Decision | Outcome | None]) -> None:
        self.to_send: list[Check] = []
        self._positions: list[int] = []
        self.results: list[CheckResult | None] = []
        for place, check in enumerate(checks):
            known = decided(check)
            self.results.append(known)
            if known is None:
                self.to_send.append(check)
                self._positions.append(place)

    def set_result(self, at: int, answer: Decision | LimitforgeError) -> None:
        """Of the one that was asked for at that place."""
        self.results[self._positions[at]] = answer
