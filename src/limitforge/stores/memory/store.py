"""A store in this process: the algorithms of `core` over a bounded dict.

It runs no thread and no task. Expired buckets are removed when a new bucket needs the room.
"""

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from limitforge.core.algorithms import concurrency
from limitforge.core.algorithms.base import State
from limitforge.core.algorithms.concurrency import ConcurrencyAlgorithm
from limitforge.core.calendar import Calendar, Period
from limitforge.core.check import Check, Hold
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.decision import CheckResult, Decision, Outcome, build_decision, build_result
from limitforge.core.evaluate import (
    AlgorithmFor,
    CalendarMiss,
    Evaluation,
    ReservedAmount,
    evaluate,
    is_expired,
    open_state,
)
from limitforge.core.keys import Keys, decode_key
from limitforge.core.plan import Rule
from limitforge.core.reservations import RESULT_TTL_US, ReservationRecord, Settlement, finish_holds, settle
from limitforge.errors import LimitforgeError, StoreCorrupt, StoreError, StoreUnavailable, UnknownReservation
from limitforge.stores.memory.buckets import BucketTable
from limitforge.stores.memory.new_buckets import InProcessBucketBudget
from limitforge.stores.memory.overrides import MemoryOverrides
from limitforge.stores.protocol import (
    ClearOverrides,
    Command,
    DeleteOverride,
    DropCachedDenials,
    FindMissingOverrides,
    GetOverrides,
    ListOverrides,
    Release,
    Renew,
    Reset,
    ResultT,
    SetOverride,
    Settle,
    StoreStatus,
)

MAX_KEYS = 1_000_000
PRUNE_RECORDS_ABOVE = 1_000


class MemoryStore:
    """Decides checks in this process. Thread-safe. Several processes that share limits need a Redis store instead.

    The store keeps at most `max_keys` buckets. A new bucket beyond that replaces an expired one, else the bucket that
    expires first among eight random ones, which `evictions` counts. Leases, reservations and overrides are never
    evicted: a store that is full of them raises StoreUnavailable for new ones.

    Limits with `consistency="local"` are divided by `processes()`. A tenant may create `new_buckets_per_minute`; above
    that its new subjects share overflow buckets. This applies once the store has `budget_from` buckets.
    """

    def __init__(
        self,
        *,
        keys: Keys | None = None,
        clock: Clock | None = None,
        max_keys: int = MAX_KEYS,
        processes: Callable[[], int] = lambda: 1,
        new_buckets_per_minute: int | None = None,
        budget_from: int = 0,
    ) -> None:
        self.keys = keys or Keys()
        self.now_us = (clock or SystemClock()).now_us
        self._processes = processes
        self._divided_rule = lru_cache(maxsize=4_096)(Rule.divided_by)
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._states = BucketTable(max_keys)
        self._records: dict[str, ReservationRecord] = {}
        self._overrides = MemoryOverrides(max_keys)
        self._budget = (
            None if new_buckets_per_minute is None else InProcessBucketBudget(new_buckets_per_minute, budget_from)
        )
        self._handlers: dict[type, Callable[[Any, int], Any]] = {
            Release: self._release,
            Renew: self._renew,
            Settle: self._settle,
            Reset: self._reset,
            SetOverride: self._overrides.set,
            GetOverrides: self._overrides.get,
            ListOverrides: self._overrides.list_page,
            FindMissingOverrides: self._overrides.find_missing,
            DeleteOverride: self._overrides.delete,
            ClearOverrides: self._overrides.clear,
            DropCachedDenials: lambda _command, _now_us: None,  # this store has no cache
        }

    @property
    def evictions(self) -> int:
        """How many buckets were evicted before they expired."""
        return self._states.evictions

    def __len__(self) -> int:
        return len(self._states)

    def check(self, check: Check) -> Decision:
        self._lock.acquire()  # `with` would cost twice as much
        try:
            return self._check(check, self.now_us())
        finally:
            self._lock.release()

    def check_result(self, check: Check) -> Decision | Outcome:
        """Decide a check, and return what its `result_kind` asks for."""
        if check.shadow is not None:
            return self.check(check)
        with self._lock:
            return build_result(check, self._evaluate(check, self.now_us()))

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        results: list[Decision | LimitforgeError] = []
        with self._lock:
            now_us = self.now_us()
            for check in checks:
                try:
                    results.append(self._check(check, now_us))
                except LimitforgeError as error:
                    results.append(error)
        return results

    def evaluate_part(self, check: Check) -> Outcome:
        """Evaluate a part of a check. The caller must finish what the part holds with `finish_holds`."""
        with self._lock:
            return self._evaluate(check, self.now_us())

    def finish_holds(self, keys: Sequence[str], token: bytes, *, confirm: bool) -> None:
        """Confirm what a part holds in these buckets, or refund it."""
        with self._lock:
            writes = finish_holds(keys, token, self.now_us(), self._states, confirm=confirm)
            self._states.update(writes)

    def run(self, command: Command[ResultT]) -> ResultT:
        with self._lock:
            return cast("ResultT", self._handlers[type(command)](command, self.now_us()))

    def status(self) -> StoreStatus:
        if self._budget is None:
            return StoreStatus()
        return StoreStatus(new_buckets_per_minute=self._budget.per_minute, overflowed=self._budget.overflowed)

    def close(self) -> None:
        """Do nothing. The store keeps its state and can be used again."""

    # -- checks

    def _check(self, check: Check, now_us: int) -> Decision:
        outcome = self._evaluate(check, now_us)
        if check.shadow is None:
            return build_decision(check, outcome)
        try:
            return build_decision(check, outcome, self._evaluate(check.shadow, now_us))
        except StoreError:  # no room for the shadow plan, which must never affect the live one
            return build_decision(check, outcome)

    def _evaluate(self, check: Check, now_us: int) -> Evaluation:
        if check.is_dynamic:
            check.resolve_calendars(now_us)
        if check.hold is not None and check.hold.key:
            self._ensure_room_for_record(now_us)
        undivided = self._divide_local_limits(check) if check.is_hybrid else []
        algorithm_for = self._overrides.algorithm_resolver(now_us) if self._overrides.by_key else None
        overflowed = [] if self._budget is None else self._budget.use_overflow_buckets(check, self._states, now_us)
        if overflowed and algorithm_for is not None:
            shared = {(rule, overrides) for rule, *_, overrides in (check.debits[index] for index in overflowed)}
            algorithm_for = self._overrides.algorithm_resolver(now_us, shared)
        evaluation = evaluate(check, now_us, self._states, algorithm_for)
        if isinstance(evaluation, CalendarMiss):
            evaluation = self._retry_with_calendars(check, evaluation, now_us, algorithm_for)
        self._write(evaluation.writes, now_us)
        if evaluation.reserved is not None and check.hold is not None and check.hold.key:
            self._add_record(check, evaluation.reserved, evaluation.lapses_us, now_us)
        for index, limit in undivided:
            evaluation.rows[index] = (limit, *evaluation.rows[index][1:])
        if overflowed and self._budget is not None:
            self._budget.mark_overflowed(evaluation.rows, overflowed)
        return evaluation

    def _write(self, writes: Sequence[tuple[str, State]], now_us: int) -> None:
        states, budget = self._states, self._budget
        for key, _ in writes:
            if key not in states:
                states.make_room(writes, now_us)
                if budget is not None:
                    budget.count_new([key for key, _ in writes if key not in states], now_us)
                break
        for key, state in writes:
            states[key] = state

    def _divide_local_limits(self, check: Check) -> list[tuple[int, int]]:
        """Replace each local limit by the part of this process; return position and whole limit of each, to report."""
        processes, undivided = self._processes(), []
        for index, (rule, *others) in enumerate(check.debits):
            if rule.local and rule.algorithm.limit > 0:
                check.debits[index] = (self._divided_rule(rule, processes), *others)  # type: ignore[assignment]
                undivided.append((index, rule.algorithm.limit))
        return undivided

    def _retry_with_calendars(
        self, check: Check, miss: CalendarMiss, now_us: int, algorithm_for: AlgorithmFor | None
    ) -> Evaluation:
        """Evaluate again with windows around the time of a bucket that is ahead of the clock; each bucket may be."""
        for _ in check.debits:
            check.resolve_calendar(miss.index, miss.now_us)
            evaluation = evaluate(check, now_us, self._states, algorithm_for)
            if not isinstance(evaluation, CalendarMiss):
                return evaluation
            miss = evaluation
        raise StoreCorrupt("no calendar window contains the time of its bucket")

    # -- reservation records

    def _add_record(self, check: Check, reserved: list[ReservedAmount], lapses_us: int, now_us: int) -> None:
        """Add a record. Beyond 1,000 records, remove the two oldest if they have expired, so that few pile up."""
        if len(self._records) >= PRUNE_RECORDS_ABOVE:
            for key in list(islice(self._records, 2)):
                oldest = self._records.pop(key)
                if oldest.expires_us > now_us:
                    self._records[key] = oldest
        hold = cast("Hold", check.hold)
        self._records[hold.key] = ReservationRecord(hold.token, lapses_us, lapses_us + RESULT_TTL_US, reserved)

    def _ensure_room_for_record(self, now_us: int) -> None:
        if len(self._records) >= self._max_keys:
            self._records = {key: record for key, record in self._records.items() if record.expires_us > now_us}
            if len(self._records) >= self._max_keys:
                raise StoreUnavailable(
                    f"the memory store is full: it holds {self._max_keys} reservations; raise max_keys"
                )

    # -- leases and reservations

    def _release(self, command: Release, now_us: int) -> None:
        for key in command.lease.keys:
            self._update_lease(decode_key(key), now_us, lambda work: concurrency.release(work, command.lease.token))

    def _renew(self, command: Renew, now_us: int) -> bool:
        renewed = [
            self._update_lease(decode_key(key), now_us, lambda work: concurrency.renew(work, command.lease.token))
            for key in command.lease.keys
        ]
        return all(renewed)

    def _update_lease(self, key: str, now_us: int, change: Callable[[Any], bool]) -> bool:
        state = self._states.get(key)
        if state is None or is_expired(state, now_us) or not isinstance(state.algorithm, ConcurrencyAlgorithm):
            return False
        work = open_state(state, state.algorithm, now_us)
        if not change(work):
            return False
        state.algorithm.seal(work)
        self._states[key] = work
        return True

    def _settle(self, command: Settle, now_us: int) -> Settlement:
        record = self._records.get(decode_key(command.reservation.record_key))
        if record is None or record.expires_us <= now_us:
            raise UnknownReservation("unknown reservation id; results are deleted a day after the reservation ended")
        calendars = [
            Calendar(Period(c[0]), c[1], c[2]).windows_around(now_us) if (c := limit.calendar) else ()
            for limit in command.reservation.limits
        ]
        for _ in range(len(calendars) + 1):
            settled = settle(record, command.cost, command.amounts, calendars, now_us, self._states)
            if not isinstance(settled, CalendarMiss):
                settlement, writes = settled
                self._states.make_room(writes, now_us)
                self._states.update(writes)
                if settlement.outcome == "settled" and record.settled is None:
                    record.settled, record.expires_us = settlement.cost, now_us + RESULT_TTL_US
                return settlement
            period, time_zone, anchor_day = cast(
                "tuple[str, str, int]", command.reservation.limits[settled.index].calendar
            )
            calendars[settled.index] = Calendar(Period(period), time_zone, anchor_day).windows_around(settled.now_us)
        raise StoreCorrupt("no calendar window contains the time of its bucket")

    def _reset(self, command: Reset, now_us: int) -> None:
        for key in command.keys:
            self._states.reset(key)


class AsyncMemoryStore:
    """A memory store with the asynchronous interface. Its methods never wait."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._store = MemoryStore() if store is None else store  # an empty store is falsy
        self.keys = self._store.keys

    @property
    def evictions(self) -> int:
        return self._store.evictions

    async def check(self, check: Check) -> Decision:
        return self._store.check(check)

    def submit(self, check: Check, on_result: Callable[[CheckResult], None]) -> None:
        try:
            result: CheckResult = self._store.check_result(check)
        except LimitforgeError as error:
            result = error
        on_result(result)

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        return self._store.check_many(checks)

    async def run(self, command: Command[ResultT]) -> ResultT:
        return self._store.run(command)

    def set_server_memory(self, memory_bytes: int) -> None:
        """Do nothing: `max_keys` bounds this store."""

    def status(self) -> StoreStatus:
        return self._store.status()

    async def close(self) -> None:
        self._store.close()
