"""The engine in this process: `core` over a bounded dict. No thread, no task; what is over goes when room is needed."""

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
from limitforge.core.reservations import RESULT_TTL_US, ReservationRecord, Settlement, finish_tentative, settle
from limitforge.errors import LimitforgeError, StoreCorrupt, StoreError, StoreUnavailable, UnknownReservation
from limitforge.stores.memory.buckets import BucketTable
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
from limitforge.stores.redis.new_buckets import InProcessBucketBudget

MAX_KEYS = 1_000_000
PRUNE_RECORDS_ABOVE = 1_000


class MemoryStore:
    """Decides in this process, for threads. Counts are this process's own: several processes need a shared store.

    At most `max_keys` buckets are kept. Beyond that, one that is over makes room for a new one, else the one of eight
    that would be over first, which is counted in `evictions`. Leases, reservations and overrides are never evicted: a
    store that is full of them refuses new ones. Limits of `consistency: local` are divided by `nodes`. A tenant may
    begin `new_buckets_per_minute`; beyond that its new subjects share overflow buckets, once there are `bounded_from`.
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
        self.now_us = self._now_us = (clock or SystemClock()).now_us
        self._processes = processes
        self._divided = lru_cache(maxsize=4_096)(Rule.divided)
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
            DropCachedDenials: lambda _command, _now_us: None,  # nothing is cached here
        }

    @property
    def evictions(self) -> int:
        """How many buckets had to go while they still mattered."""
        return self._states.evictions

    def __len__(self) -> int:
        return len(self._states)

    def check(self, check: Check) -> Decision:
        self._lock.acquire()  # `with` would cost twice as much
        try:
            return self._check(check, self._now_us())
        finally:
            self._lock.release()

    def check_result(self, check: Check) -> Decision | Outcome:
        """The same for whoever takes an outcome too."""
        if check.shadow is not None:
            return self.check(check)
        with self._lock:
            return build_result(check, self._evaluate(check, self._now_us()))

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        answers: list[Decision | LimitforgeError] = []
        with self._lock:
            now_us = self._now_us()
            for check in checks:
                try:
                    answers.append(self._check(check, now_us))
                except LimitforgeError as error:
                    answers.append(error)
        return answers

    def evaluate(self, check: Check) -> Outcome:
        """For part of a check: what is held for it must be finished."""
        with self._lock:
            return self._evaluate(check, self._now_us())

    def end_holds(self, keys: Sequence[str], token: bytes, *, confirm: bool) -> None:
        """What a part holds in these buckets stays taken, or goes back."""
        with self._lock:
            writes = finish_tentative(keys, token, self._now_us(), self._states, confirm=confirm)
            self._states.update(writes)

    def run(self, command: Command[ResultT]) -> ResultT:
        with self._lock:
            return cast("ResultT", self._handlers[type(command)](command, self._now_us()))

    def status(self) -> StoreStatus:
        """A store in this process never fails."""
        if self._budget is None:
            return StoreStatus()
        return StoreStatus(new_buckets_per_minute=self._budget.per_minute, overflowed=self._budget.overflowed)

    def close(self) -> None:
        """Nothing to close; what was counted stays for as long as this object."""

    # -- checks

    def _check(self, check: Check, now_us: int) -> Decision:
        outcome = self._evaluate(check, now_us)
        if check.shadow is None:
            return build_decision(check, outcome)
        try:
            return build_decision(check, outcome, self._evaluate(check.shadow, now_us))
        except StoreError:  # there is no room for a candidate plan: it must never harm the live one
            return build_decision(check, outcome)

    def _evaluate(self, check: Check, now_us: int) -> Evaluation:
        if check.is_dynamic:
            check.resolve_calendars(now_us)
        if check.hold is not None and check.hold.key:
            self._ensure_room_for_record(now_us)
        wholes = self._divide_local_limits(check) if check.is_partly_local else []
        steps_for = self._overrides.steps_resolver(now_us) if self._overrides.by_key else None
        redirected = [] if self._budget is None else self._budget.redirect(check, self._states, now_us)
        if redirected and steps_for is not None:
            shared = {(rule, overrides) for rule, *_, overrides in (check.debits[at] for at in redirected)}
            steps_for = self._overrides.steps_resolver(now_us, shared)
        verdict = evaluate(check, now_us, self._states, steps_for)
        if isinstance(verdict, CalendarMiss):
            verdict = self._retry_with_calendars(check, verdict, now_us, steps_for)
        self._write(verdict.writes, now_us)
        if verdict.reserved is not None and check.hold is not None and check.hold.key:
            self._add_record(check, verdict.reserved, verdict.lapses_us, now_us)
        for place, whole in wholes:
            verdict.rows[place] = (whole, *verdict.rows[place][1:])
        if redirected and self._budget is not None:
            self._budget.mark_overflowed(verdict.rows, redirected)
        return verdict

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
        """This process's part of each local limit. The whole of it, which is what is told, comes back by its place."""
        nodes, wholes = self._processes(), []
        for place, (rule, *others) in enumerate(check.debits):
            if rule.local and rule.algorithm.limit > 0:
                check.debits[place] = (self._divided(rule, nodes), *others)  # type: ignore[assignment]
                wholes.append((place, rule.algorithm.limit))
        return wholes

    def _retry_with_calendars(
        self, check: Check, again: CalendarMiss, now_us: int, steps_for: AlgorithmFor | None
    ) -> Evaluation:
        """A bucket is ahead of the clock by more than its quota's windows; each may be, so each gets its turn."""
        for _ in check.debits:
            check.resolve_calendar(again.index, again.now_us)
            verdict = evaluate(check, now_us, self._states, steps_for)
            if not isinstance(verdict, CalendarMiss):
                return verdict
            again = verdict
        raise StoreCorrupt("no calendar window holds the time of its bucket")

    # -- what is kept

    def _add_record(self, check: Check, held: list[ReservedAmount], lapses_us: int, now_us: int) -> None:
        """Past a thousand, each new record looks at the two oldest: what is over goes, so that they never pile up."""
        if len(self._records) >= PRUNE_RECORDS_ABOVE:
            for oldest in list(islice(self._records, 2)):
                looked_at = self._records.pop(oldest)
                if looked_at.expires_us > now_us:
                    self._records[oldest] = looked_at
        hold = cast("Hold", check.hold)
        self._records[hold.key] = ReservationRecord(hold.token, lapses_us, lapses_us + RESULT_TTL_US, held)

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
        record = self._records.get(decode_key(command.reservation.record))
        if record is None or record.expires_us <= now_us:
            raise UnknownReservation("no such reservation, or its result was forgotten a day after its end")
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
        raise StoreCorrupt("no calendar window holds the time of its bucket")

    def _reset(self, command: Reset, now_us: int) -> None:
        for key in command.keys:
            self._states.reset(key)


class AsyncMemoryStore:
    """The same for an event loop: nothing here ever waits."""

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
            judged: CheckResult = self._store.check_result(check)
        except LimitforgeError as error:
            judged = error
        on_result(judged)

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        return self._store.check_many(checks)

    async def run(self, command: Command[ResultT]) -> ResultT:
        return self._store.run(command)

    def set_server_memory(self, memory_bytes: int) -> None:
        """Buckets here are bounded by `max_keys`."""

    def status(self) -> StoreStatus:
        return self._store.status()

    async def close(self) -> None:
        self._store.close()
