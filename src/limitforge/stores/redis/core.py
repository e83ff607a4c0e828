"""What the asyncio store and the threaded store share: topology, call flows, caches and status, without I/O."""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from limitforge.core.check import Check
from limitforge.core.clock import Clock, MonotonicClock, SystemClock
from limitforge.core.decision import OVERFLOWED, CheckResult, Decision, Outcome, build_decision, encode_reservation_id
from limitforge.core.handles import empty_reservation, encode_handle
from limitforge.core.keys import Keys, decode_key, encode_key
from limitforge.errors import LimitforgeError, StoreUnavailable, TooManyReservations
from limitforge.observability.events import log_event
from limitforge.stores.memory.store import MemoryStore
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
from limitforge.stores.redis.codec import OnDenial, as_multi_slot, check_flow, finish_flow, heartbeat_flow, top_up_flow
from limitforge.stores.redis.command_codec import command_flow
from limitforge.stores.redis.denial_cache import DenialCache, Invalidation
from limitforge.stores.redis.hot_keys import HotKeys
from limitforge.stores.redis.invalidation import InvalidatedCaches
from limitforge.stores.redis.key_hints import KeyHints
from limitforge.stores.redis.multi_step.cross_slot import FinishHold, MultiStepFlow, cross_slot_steps, routing_key
from limitforge.stores.redis.multi_step.hybrid import HybridDecider
from limitforge.stores.redis.new_buckets import NewBucketBudget
from limitforge.stores.redis.prepaid.heartbeat import HEARTBEAT_TTL_US, Heartbeat
from limitforge.stores.redis.prepaid.shares import PrepaidShares, TopUpReply, TopUpRequest
from limitforge.stores.redis.script_call import SERVER_TIME, Flow, ScriptCall, T
from limitforge.stores.redis.topology.topology import Topology
from limitforge.stores.resilience.failure import LOCAL_MAX_KEYS, LOCAL_NEW_BUCKETS, LOG_EVERY_US

COMMAND_TIMEOUT_SECONDS = 1.0  # for everything but a check; the deadline of checks applies if it is longer


_log = logging.getLogger(__name__)


class RedisCore:
    """The parts of one store that do no I/O. `charge` sends pending charges to the store after an outage."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        clock: Clock | None,
        options: StoreOptions,
        charge: Callable[[Sequence[Check]], None],
    ) -> None:
        self.keys = keys
        self.charge = charge
        self.channel = f"{keys.prefix}:denials".encode()
        self.heartbeat = Heartbeat(keys, options.processes, MonotonicClock())
        budget = options.new_buckets_per_minute
        self.local_store = MemoryStore(
            keys=keys,
            clock=clock,
            max_keys=LOCAL_MAX_KEYS,
            processes=self.heartbeat.process_count,
            new_buckets_per_minute=_local_budget(options),
            budget_from=LOCAL_MAX_KEYS // 2,  # when an outage begins, every subject is new here
        )
        self.topology = Topology(url, options, self.local_store)
        self._has_test_clock = clock is not None
        self._clock = clock or SystemClock()
        self._cache_clock = clock or MonotonicClock()
        self._now_us = MonotonicClock().now_us
        self._warned_us = self._now_us() - LOG_EVERY_US
        self._sync_interval_us = int(1_000 * options.sync_interval_ms)
        self._cap_budget_by_memory = options.cap_budget_by_memory
        self.hot_keys = HotKeys(MonotonicClock())
        self.override_hints = KeyHints(MonotonicClock())
        self.new_buckets = None if budget is None else NewBucketBudget(budget, MonotonicClock())
        self._prepaid: weakref.WeakSet[PrepaidShares] = weakref.WeakSet()
        self.caches = InvalidatedCaches()
        self.denial_cache: DenialCache | None = None
        if options.denial_cache_ms:
            self.denial_cache = DenialCache(
                max_age_us=int(1_000 * options.denial_cache_ms),
                max_keys=options.denial_cache_size,
                clock=self._cache_clock,
            )
            self.caches.add(self.denial_cache)

    def create_hybrid(self) -> HybridDecider:
        """Create the part of a store that decides prepaid and local limits in this process."""
        shares = PrepaidShares(interval_us=self._sync_interval_us, clock=self._cache_clock)
        self.caches.add(shares)
        self._prepaid.add(shares)
        return HybridDecider(shares, self.local_store)

    # -- flows of calls

    def checks_flow(self, checks: Sequence[Check]) -> Flow[list[CheckResult]]:
        """Decide checks that fit into one call. The age of a cached denial counts from the creation of the flow."""
        now_us = self._clock.now_us()
        return check_flow(
            checks, now_us, self._script_time(now_us), self._denial_recorder(), self.override_hints, self.new_buckets
        )

    def finish_flow(self, finishes: Sequence[FinishHold]) -> Flow[list[Any]]:
        """Confirm or refund holds of cross-slot checks."""
        return finish_flow(finishes, self._script_time(self._clock.now_us()))

    def top_up_flow(self, requests: Sequence[TopUpRequest], lapse_us: int) -> Flow[list[TopUpReply | None]]:
        """Top up prepaid shares, and return unused balances."""
        now_us = self._clock.now_us()
        return top_up_flow(requests, now_us, self._script_time(now_us), lapse_us, self.new_buckets)

    def heartbeat_flow(self, alive_us: int = HEARTBEAT_TTL_US) -> Flow[int]:
        """Report this process as alive for `alive_us` (0: as stopped), and return the number of live processes."""
        return heartbeat_flow(self.heartbeat.key, self.heartbeat.name, alive_us, SERVER_TIME)

    def command_flow(self, command: Command[T]) -> Flow[T]:
        now_us = self._clock.now_us()
        return command_flow(command, self.keys, self.topology.slot_of, now_us, self._script_time(now_us))

    def as_multi_slot(self, call: ScriptCall) -> ScriptCall:
        """Return the same call for keys of several slots of one server."""
        return as_multi_slot(call, self.topology.slot_of)

    def _script_time(self, now_us: int) -> int:
        return now_us if self._has_test_clock else SERVER_TIME

    # -- checks of several steps

    def cross_slot_check(
        self, check: Check, undo: Callable[[Sequence[FinishHold]], None]
    ) -> MultiStepFlow[Decision | LimitforgeError]:
        """Decide a check whose limits lie in several slots. `undo` sends refunds that the caller does not wait for."""
        record_denial = self._denial_recorder()
        outcome, refunds = yield from cross_slot_steps(check, self.topology.slot_of)
        undo(refunds)
        if isinstance(outcome, StoreUnavailable):
            return self.decide_without_store(check, outcome)
        if isinstance(outcome, LimitforgeError):
            return outcome
        if record_denial is not None and not outcome.allowed:
            record_denial(check, outcome)
        self._count_overflow(outcome)
        return build_decision(check, outcome, (yield from self._shadow_outcome(check, undo)))

    def hybrid_check(
        self, check: Check, decider: HybridDecider, undo: Callable[[Sequence[FinishHold]], None]
    ) -> MultiStepFlow[Decision | LimitforgeError]:
        """Decide a check of which this process decides a part, and the store the rest."""
        record_denial = self._denial_recorder()
        try:
            hybrid = decider.begin(check)
        except (StoreUnavailable, TooManyReservations) as error:  # the local store is full
            return self.decide_without_store(check, StoreUnavailable(str(error)))
        except LimitforgeError as error:
            return error
        store_part, store_outcome = hybrid.store_part, None
        if store_part is not None:
            store_outcome, refunds = yield from cross_slot_steps(store_part, self.topology.slot_of)
            undo(refunds)
        outcome = decider.complete(hybrid, store_outcome)
        if isinstance(outcome, StoreUnavailable):
            return self.decide_without_store(check, outcome)
        if isinstance(outcome, LimitforgeError):
            return outcome
        if record_denial is not None and not outcome.allowed and not any(debit[0].local for debit in check.debits):
            record_denial(check, outcome)
        self._count_overflow(outcome)
        decision = build_decision(check, outcome, (yield from self._shadow_outcome(check, undo)))
        if decision.reservation_id is None or check.hold is None:
            return decision
        reservation_id = encode_handle(empty_reservation(encode_key(check.hold.key)))
        if store_part is not None and isinstance(store_outcome, Outcome):
            reservation_id = encode_reservation_id(store_part, store_outcome)
        return msgspec.structs.replace(decision, reservation_id=reservation_id)

    def _shadow_outcome(
        self, check: Check, undo: Callable[[Sequence[FinishHold]], None]
    ) -> MultiStepFlow[Outcome | None]:
        """Check the shadow plan, if there is one. An error only leaves it out: it must not affect the live plan."""
        if check.shadow is None:
            return None
        outcome, refunds = yield from cross_slot_steps(check.shadow, self.topology.slot_of)
        undo(refunds)
        return outcome if isinstance(outcome, Outcome) else None

    def decide_without_store(self, check: Check, error: StoreUnavailable) -> Decision | LimitforgeError:
        """Apply the failure behaviour of a multi-step check, and record it for the server of its first limit."""
        server = self.topology.server_of_slot(self.topology.slot_of(routing_key(check)))
        return server.resilience.decide_without_store(check, error)

    # -- invalidation

    def invalidate_for(self, command: Command[Any]) -> Invalidation | None:
        """Drop what a command makes outdated in this process. Return what other processes must drop as well."""
        if isinstance(command, Reset):
            self.local_store.run(command)
        invalidation = invalidation_of(command)
        if invalidation == Invalidation():
            return None
        if invalidation is not None:
            self.caches.invalidate(invalidation)
        return invalidation

    def invalidate_after_failure(self, command: Command[Any], error: BaseException) -> None:
        """Drop what a failed command may have made outdated: it may have been executed."""
        if self.invalidate_for(command) is not None and isinstance(error, StoreUnavailable) and error.maybe_counted:
            self.warn_not_published(error)

    def warn_not_published(self, error: object) -> None:
        """Log that other processes did not receive an invalidation, at most once in `LOG_EVERY_US`."""
        if self._now_us() - self._warned_us >= LOG_EVERY_US:
            self._warned_us = self._now_us()
            log_event(
                _log,
                logging.WARNING,
                "store.invalidation_not_published",
                "other processes may repeat a cached denial until it expires",
                error=error,
            )

    # -- charges, memory and status

    def record_charges(self, charges: Sequence[Check], results: Sequence[object]) -> None:
        """Requeue charges that certainly failed, and log those that may have failed. No charge is made twice."""
        not_made, unsure = [], []
        for charge, result in zip(charges, results, strict=True):
            if isinstance(result, StoreUnavailable) and not result.maybe_counted:
                not_made.append(charge)
            elif isinstance(result, LimitforgeError):
                unsure.append(result)
        self.topology.requeue_charges(not_made)
        if unsure:
            log_event(
                _log,
                logging.ERROR,
                "store.charges_lost",
                "charges after an outage failed or may have failed, and are not repeated",
                lost=len(unsure),
                total=len(charges),
                error=unsure[0],
            )

    def _count_overflow(self, outcome: Outcome) -> None:
        """Count a check of several steps. The codec counts all others."""
        if self.new_buckets is not None and any(row[4] & OVERFLOWED for row in outcome.rows):
            self.new_buckets.count_overflow()

    def set_server_memory(self, memory_bytes: int) -> None:
        """Adapt the budget of new buckets to the memory of the smallest server. 0 means no limit."""
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
            {} if self.topology.is_single else {s.name: s.resilience.state for s in self.topology.servers},
            sum(shares.total_balance for shares in list(self._prepaid)),
            self.hot_keys.top(),
            None if self.new_buckets is None else self.new_buckets.per_minute,
            0 if self.new_buckets is None else self.new_buckets.overflowed,
        )

    def _denial_recorder(self) -> OnDenial | None:
        """Return a callback that caches a denial, with the age of one that is sent now."""
        cache = self.denial_cache
        if cache is None:
            return None
        sent_us = cache.now_us()

        def record_denial(check: Check, outcome: Outcome) -> None:
            cache.add(check, outcome, sent_us)

        return record_denial


def _local_budget(options: StoreOptions) -> int | None:
    budget = options.new_buckets_per_minute
    if budget is not None and options.cap_budget_by_memory:
        return min(budget, LOCAL_NEW_BUCKETS)
    return budget


def is_for_local_handle(command: Command[Any]) -> bool:
    """Return True if a command is about a lease or reservation that this process granted without the store."""
    match command:
        case Release(handle) | Renew(handle) | Settle(handle):
            return handle.local
    return False


def invalidation_of(command: Command[Any]) -> Invalidation | None:
    """Return what a command makes outdated in caches of denials and prepaid shares."""
    match command:
        case Reset(keys):
            return Invalidation(bucket_keys=keys)
        case Settle(reservation):
            return Invalidation(bucket_keys=tuple(decode_key(limit.key) for limit in reservation.limits))
        case SetOverride(lane_prefix=prefix, subject=subject) | DeleteOverride(lane_prefix=prefix, subject=subject):
            return Invalidation(override_keys=(Keys.overrides_key(prefix, subject),))
        case ClearOverrides(prefixes) | DropCachedDenials(prefixes):
            return Invalidation(key_prefixes=prefixes)
    return None


class CheckBatch:
    """A batch of checks: those that this process decides at once, and those to send to the store."""

    def __init__(self, checks: Iterable[Check], decide: Callable[[Check], Decision | Outcome | None]) -> None:
        self.to_send: list[Check] = []
        self._positions: list[int] = []
        self.results: list[CheckResult | None] = []
        for position, check in enumerate(checks):
            result = decide(check)
            self.results.append(result)
            if result is None:
                self.to_send.append(check)
                self._positions.append(position)

    def set_result(self, index: int, result: Decision | LimitforgeError) -> None:
        """Set the result of `to_send[index]`."""
        self.results[self._positions[index]] = result
