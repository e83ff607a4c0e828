"""The engine in this process: `core` over a bounded dict. No thread, no task; what is over goes when room is needed."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, cast

from limitforge.core.algorithms import concurrency
from limitforge.core.algorithms.concurrency import ConcurrencySteps
from limitforge.core.algorithms.steps import State, Steps
from limitforge.core.calendar import Calendar, Period
from limitforge.core.check import Check, Hold
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.decide import Again, Held, StepsFor, Verdict, decide, is_gone, opened
from limitforge.core.decision import Decision, decision_of
from limitforge.core.keys import Keys, decoded, encoded
from limitforge.core.overrides import (
    ANY_RESOURCE,
    Compiled,
    Override,
    OverridePage,
    cursor_after,
    expires_at,
    subject_after,
    too_many,
)
from limitforge.core.plan import Rule
from limitforge.core.reservations import KEPT_US, Record, Settlement, settle
from limitforge.errors import LimitforgeError, StoreCorrupt, StoreError, StoreUnavailable, UnknownReservation
from limitforge.stores.protocol import (
    Answer,
    ClearOverrides,
    Command,
    DeleteOverride,
    GetOverrides,
    ListOverrides,
    Release,
    Renew,
    Reset,
    SetOverride,
    Settle,
)

MAX_KEYS = 1_000_000
SAMPLED = 8
MANY_RECORDS = 1_000
LONG_AGO_US = -(2**62)


@dataclass(frozen=True, slots=True)
class _Override:
    changes: dict[str, object]
    compiled: tuple[Compiled, ...]
    expires_us: int


class MemoryStore:
    """Decides in this process, for threads. Counts are this process's own: several processes need a shared store.

    At most `max_keys` buckets are kept. Beyond that, one that is over makes room for a new one, else the one of eight
    that would be over first, which is counted in `evictions`. Leases, reservations and overrides are never evicted: a
    store that is full of them refuses new ones.
    """

    def __init__(self, *, keys: Keys | None = None, clock: Clock | None = None, max_keys: int = MAX_KEYS) -> None:
        self.keys = keys or Keys()
        self.evictions = 0
        self._now_us = (clock or SystemClock()).now_us
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._states: dict[str, State] = {}
        self._order: list[str] = []  # every key of _states, so that eviction can sample; some are gone
        self._ends: list[tuple[int, str]] | None = None  # a heap of when buckets are over, once the store was full
        self._records: dict[str, Record] = {}
        self._overrides: dict[str, dict[str, _Override]] = {}  # by override key, then resource
        self._subjects: dict[str, set[str]] = {}  # by tenant key
        self._random = random.Random()  # noqa: S311 - samples, no secrets
        self._handlers: dict[type, Callable[[Any, int], Any]] = {
            Release: self._release,
            Renew: self._renew,
            Settle: self._settle,
            Reset: self._reset,
            SetOverride: self._set_override,
            GetOverrides: self._get_overrides,
            ListOverrides: self._list_overrides,
            DeleteOverride: self._delete_override,
            ClearOverrides: self._clear_overrides,
        }

    def __len__(self) -> int:
        return len(self._states)

    def check(self, check: Check) -> Decision:
        self._lock.acquire()  # `with` would cost twice as much
        try:
            return self._check(check, self._now_us())
        finally:
            self._lock.release()

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

    def run(self, command: Command[Answer]) -> Answer:
        with self._lock:
            return cast("Answer", self._handlers[type(command)](command, self._now_us()))

    def close(self) -> None:
        """Nothing to close; what was counted stays for as long as this object."""

    # -- checks

    def _check(self, check: Check, now_us: int) -> Decision:
        outcome = self._judge(check, now_us)
        if check.shadow is None:
            return decision_of(check, now_us, outcome)
        try:
            return decision_of(check, now_us, outcome, self._judge(check.shadow, now_us))
        except StoreError:  # there is no room for a candidate plan: it must never harm the live one
            return decision_of(check, now_us, outcome)

    def _judge(self, check: Check, now_us: int) -> Verdict:
        if check.varies:
            check.around(now_us)
        if check.hold is not None:
            self._make_room_for_a_record(now_us)
        steps_for = self._steps_at(now_us, check.tenant) if self._overrides else None
        states = self._states
        verdict = decide(check, now_us, states, steps_for)
        if isinstance(verdict, Again):
            verdict = self._ask_again(check, verdict, now_us, steps_for)
        for key, _ in verdict.writes:
            if key not in states:
                self._add(verdict.writes, now_us)
                break
        for key, state in verdict.writes:
            states[key] = state
        if verdict.held is not None:
            self._remember(check, verdict.held, verdict.lapses_us, now_us)
        return verdict

    def _ask_again(self, check: Check, again: Again, now_us: int, steps_for: StepsFor | None) -> Verdict:
        """A bucket is ahead of the clock by more than its quota's windows; each may be, so each gets its turn."""
        for _ in check.takes:
            check.around_one(again.at, again.now_us)
            verdict = decide(check, now_us, self._states, steps_for)
            if not isinstance(verdict, Again):
                return verdict
            again = verdict
        raise StoreCorrupt("no calendar window holds the time of its bucket")

    def _steps_at(self, now_us: int, tenant_key: str) -> StepsFor:
        """The rule's own numbers, or those of the most specific live override that names its limit."""

        def steps_for(rule: Rule, resource: str, subject: str) -> Steps:
            found = self._overrides.get(self.keys.overrides(tenant_key, subject), {})
            for where in (resource, ANY_RESOURCE):
                override = found.get(where)
                if override is not None and now_us < override.expires_us:
                    for compiled in override.compiled:
                        if compiled.name == rule.limit.name and compiled.code == rule.steps.code:
                            return rule.steps.overridden(compiled.numbers)
            return rule.steps

        return steps_for

    # -- what is kept

    def _add(self, writes: Sequence[tuple[str, State]], now_us: int) -> None:
        """Give every new key a place, or refuse before anything is written."""
        added = [(key, state) for key, state in writes if key not in self._states]
        surplus = len(self._states) + len(added) - self._max_keys
        if surplus > 0:
            self._make_room(surplus, {key for key, _ in writes}, now_us)
        self._order += [key for key, _ in added]
        if self._ends is not None:
            for key, state in added:
                heappush(self._ends, (state.until, key))

    def _make_room(self, surplus: int, written: set[str], now_us: int) -> None:
        """Drop that many buckets: what is over first, else the one of eight that would be over first."""
        if self._ends is None or len(self._ends) > 2 * self._max_keys:
            self._ends = [(state.until, key) for key, state in self._states.items()]
            heapify(self._ends)
        for _ in range(surplus):
            key = self._over(written, now_us)
            if key is None:
                key = self._victim(written, now_us)
                self.evictions += 1
            del self._states[key]
        if len(self._order) > 2 * self._max_keys:
            self._order = list(self._states)

    def _over(self, written: set[str], now_us: int) -> str | None:
        """A bucket that no longer matters. Ends in the heap are those of when a bucket was new: most have moved on."""
        ends, kept = cast("list[tuple[int, str]]", self._ends), []
        found = None
        while found is None and ends and ends[0][0] <= now_us:
            _, key = heappop(ends)
            state = self._states.get(key)
            if state is None:
                continue
            if key not in written and is_gone(state, now_us):
                found = key
            elif state.until > now_us:
                heappush(ends, (state.until, key))
            else:  # being written, or ahead of the clock
                kept.append((state.until, key))
        for end in kept:
            heappush(ends, end)
        return found

    def _victim(self, written: set[str], now_us: int) -> str:
        """Of eight, the one that would be over first; leases and open reservations stay."""
        sampled = (self._sample() for _ in range(SAMPLED)) if self._states else ()
        for keys in (sampled, self._states):  # all of them only if the whole sample must stay
            free = [key for key in keys if key not in written and not self._is_pinned(self._states[key], now_us)]
            if free:
                return min(free, key=lambda key: self._states[key].until)
        raise StoreUnavailable(
            f"the memory store is full: of {self._max_keys} buckets each holds a lease or an open reservation; "
            "raise max_keys"
        )

    def _sample(self) -> str:
        """A random key. One that is gone is met at most once: the last of the list takes its place."""
        while True:
            place = self._random.randrange(len(self._order))
            key = self._order[place]
            if key in self._states:
                return key
            self._order[place] = self._order[-1]
            self._order.pop()

    @staticmethod
    def _is_pinned(state: State, now_us: int) -> bool:
        reserved = bool(state.pending) and state.pending[-1].lapses_us > now_us
        return reserved or (isinstance(state.numbers, ConcurrencySteps) and not is_gone(state, now_us))

    def _remember(self, check: Check, held: list[Held], lapses_us: int, now_us: int) -> None:
        """Past a thousand, each new record looks at the two oldest: what is over goes, so that they never pile up."""
        if len(self._records) >= MANY_RECORDS:
            for oldest in list(islice(self._records, 2)):
                looked_at = self._records.pop(oldest)
                if looked_at.expires_us > now_us:
                    self._records[oldest] = looked_at
        hold = cast("Hold", check.hold)
        self._records[hold.key] = Record(hold.token, lapses_us, lapses_us + KEPT_US, held)

    def _make_room_for_a_record(self, now_us: int) -> None:
        if len(self._records) >= self._max_keys:
            self._records = {key: record for key, record in self._records.items() if record.expires_us > now_us}
            if len(self._records) >= self._max_keys:
                raise StoreUnavailable(
                    f"the memory store is full: it holds {self._max_keys} reservations; raise max_keys"
                )

    def _make_room_for_overrides(self, now_us: int) -> None:
        if len(self._overrides) >= self._max_keys:
            for tenant_key, subjects in list(self._subjects.items()):
                for subject in list(subjects):
                    self._live(tenant_key, "", subject, now_us)
            if len(self._overrides) >= self._max_keys:
                raise StoreUnavailable(
                    f"the memory store is full: it holds overrides of {self._max_keys} subjects; raise max_keys"
                )

    # -- leases and reservations

    def _release(self, command: Release, now_us: int) -> None:
        for key in command.lease.keys:
            self._with_lease(decoded(key), now_us, lambda work: concurrency.release(work, command.lease.token))

    def _renew(self, command: Renew, now_us: int) -> bool:
        renewed = [
            self._with_lease(decoded(key), now_us, lambda work: concurrency.renew(work, command.lease.token))
            for key in command.lease.keys
        ]
        return all(renewed)

    def _with_lease(self, key: str, now_us: int, change: Callable[[Any], bool]) -> bool:
        state = self._states.get(key)
        if state is None or is_gone(state, now_us) or not isinstance(state.numbers, ConcurrencySteps):
            return False
        work = opened(state, state.numbers, now_us)
        if not change(work):
            return False
        state.numbers.seal(work)
        self._states[key] = work
        return True

    def _settle(self, command: Settle, now_us: int) -> Settlement:
        record = self._records.get(decoded(command.reservation.record))
        if record is None or record.expires_us <= now_us:
            raise UnknownReservation("no such reservation, or its result was forgotten a day after its end")
        calendars = [
            Calendar(Period(c[0]), c[1], c[2]).around(now_us) if (c := limit.calendar) else ()
            for limit in command.reservation.limits
        ]
        for _ in range(len(calendars) + 1):
            settled = settle(record, command.cost, command.amounts, calendars, now_us, self._states)
            if not isinstance(settled, Again):
                settlement, writes = settled
                self._add(writes, now_us)
                self._states.update(writes)
                if settlement.outcome == "settled" and record.settled is None:
                    record.settled, record.expires_us = settlement.cost, now_us + KEPT_US
                return settlement
            period, time_zone, anchor_day = cast(
                "tuple[str, str, int]", command.reservation.limits[settled.at].calendar
            )
            calendars[settled.at] = Calendar(Period(period), time_zone, anchor_day).around(settled.now_us)
        raise StoreCorrupt("no calendar window holds the time of its bucket")

    def _reset(self, command: Reset, now_us: int) -> None:
        for key in command.keys:
            state = self._states.get(key)
            if state is not None:  # as good as gone; the key keeps its one place in the order
                self._states[key] = State(LONG_AGO_US, LONG_AGO_US, 0, state.numbers, ())
                if self._ends is not None:
                    heappush(self._ends, (LONG_AGO_US, key))

    # -- overrides

    def _set_override(self, command: SetOverride, now_us: int) -> Override:
        key = self.keys.overrides(command.tenant_key, command.subject)
        found = {r: o for r, o in self._overrides.get(key, {}).items() if o.expires_us > now_us}
        too_many(len(found.keys() | {command.resource}))
        if key not in self._overrides:
            self._make_room_for_overrides(now_us)
        expires_us = now_us + command.ttl_us
        found[command.resource] = _Override(command.changes, command.compiled, expires_us)
        self._overrides[key] = found
        self._subjects.setdefault(command.tenant_key, set()).add(command.subject)
        return Override(command.tenant, command.resource, command.subject, command.changes, expires_at(expires_us))

    def _get_overrides(self, command: GetOverrides, now_us: int) -> list[Override]:
        return self._live(command.tenant_key, command.tenant, command.subject, now_us)

    def _list_overrides(self, command: ListOverrides, now_us: int) -> OverridePage:
        after = subject_after(command.cursor)
        subjects = sorted(
            s for s in map(encoded, self._subjects.get(command.tenant_key, ())) if after is None or s > after
        )
        page = subjects[: command.subjects]
        overrides = [o for s in page for o in self._live(command.tenant_key, command.tenant, decoded(s), now_us)]
        return OverridePage(overrides, cursor_after(page[-1]) if len(subjects) > len(page) else None)

    def _delete_override(self, command: DeleteOverride, now_us: int) -> bool:
        live = {o.resource for o in self._live(command.tenant_key, "", command.subject, now_us)}
        doomed = live & {command.resource}
        key = self.keys.overrides(command.tenant_key, command.subject)
        for resource in doomed:
            del self._overrides[key][resource]
        self._live(command.tenant_key, "", command.subject, now_us)
        return bool(doomed)

    def _clear_overrides(self, command: ClearOverrides, now_us: int) -> int:
        subjects = self._subjects.pop(command.tenant_key, set())
        live = [s for s in subjects if self._live(command.tenant_key, "", s, now_us)]
        for subject in subjects:
            self._overrides.pop(self.keys.overrides(command.tenant_key, subject), None)
        return len(live)

    def _live(self, tenant_key: str, tenant: str, subject: str, now_us: int) -> list[Override]:
        """A subject's overrides, by resource; those that have expired are dropped on the way."""
        key = self.keys.overrides(tenant_key, subject)
        found = {r: o for r, o in self._overrides.get(key, {}).items() if o.expires_us > now_us}
        if found:
            self._overrides[key] = found
        else:
            self._overrides.pop(key, None)
            subjects = self._subjects.get(tenant_key, set())
            subjects.discard(subject)
            if not subjects:
                self._subjects.pop(tenant_key, None)
        return [
            Override(tenant, resource, subject, override.changes, expires_at(override.expires_us))
            for resource, override in sorted(found.items(), key=lambda item: encoded(item[0]))
        ]


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

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        return self._store.check_many(checks)

    async def run(self, command: Command[Answer]) -> Answer:
        return self._store.run(command)

    async def close(self) -> None:
        self._store.close()
