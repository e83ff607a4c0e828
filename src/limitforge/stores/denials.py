"""Denials that need not be asked for again: what had no room, and for how long it surely has none.

A denial may be answered from here while the wait of one of its limits still runs, counted from the moment at which the
check was sent. Nothing can shorten that wait but a reset, a settlement, an override or another plan:

- a bucket with an open reservation or lease is never cached, since those can give back early;
- denials that count (`count_denied`) are noted here and counted there a moment later, all together; a limit whose wait
  grows with each of them (all but windows and quotas) is asked every time;
- a check under other numbers, costs or shares is another check, and finds nothing here;
- `drop` forgets what a reset, a settlement or an override touched. An answer that was on its way meanwhile may be older
  than that, so it is not cached either.

So this never admits anything, and denies what Redis would admit only between a change on another node and its message.
Whatever else gives room in Redis (an override that expires, a key that is evicted, a flush) is seen after `max_age_us`
at the latest.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Self

import msgspec

from limitforge.core.algorithms.fixed_window import WindowSteps
from limitforge.core.algorithms.steps import NEVER
from limitforge.core.check import Check, Take, charge_of
from limitforge.core.clock import Clock
from limitforge.core.decision import Decision, Outcome, Row, decision_of
from limitforge.core.keys import Keys, decoded, encoded

MAX_PER_KEY = 4  # different checks that one bucket denies, such as other costs
MAX_CHARGED = 1_000  # buckets whose counted denials wait to be sent
LONG_AGO_US = -(2**62)

Signature = tuple[tuple[object, str, int, int, str], ...]


class Drop(msgspec.Struct, frozen=True):
    """What to forget: buckets, subjects (by the key of their overrides), tenants (by what their keys start with)."""

    keys: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()

    def message(self) -> bytes:
        """As it travels to the other nodes."""
        return msgspec.msgpack.encode([[encoded(name) for name in names] for names in msgspec.structs.astuple(self)])

    @classmethod
    def read(cls, message: bytes) -> Self:
        """Raises ValueError for what is no such message."""
        keys, subjects, tenants = msgspec.msgpack.decode(message, type=tuple[_Names, _Names, _Names])
        return cls(*(tuple(decoded(name) for name in names) for names in (keys, subjects, tenants)))


_Names = tuple[bytes, ...]


class Denial(msgspec.Struct, frozen=True, gc=False):
    signature: Signature
    ends_us: int
    """Until when it is surely denied, by the moment of sending."""
    told_us: int
    """When the waits in the rows were true at the latest."""
    now_us: int
    rows: tuple[Row, ...]
    counts: bool
    """Whether a limit without room counts its denials."""


class Denials:
    """A bounded cache of denials, for one process. Thread-safe: looking takes no lock."""

    def __init__(self, *, max_age_us: int, max_keys: int, clock: Clock) -> None:
        self._max_age_us = max_age_us
        self._max_keys = max_keys
        self._now_us: Callable[[], int] = clock.now_us
        self._lock = threading.Lock()
        self._by_key: dict[str, tuple[Denial, ...]] = {}
        self._by_subject: dict[str, set[str]] = {}
        self._subject_of: dict[str, str] = {}
        self._dropped: dict[str, int] = {}
        self._dropped_before_us = LONG_AGO_US
        self._charges: dict[str, tuple[str, Take]] = {}
        self.hits = 0
        self.is_active = False
        """Whether there is anything to look for, or to send: nearly always not."""

    def __len__(self) -> int:
        return len(self._by_key)

    def now_us(self) -> int:
        """For `note`: the moment before a check is sent."""
        return self._now_us()

    def look(self, check: Check) -> Decision | None:
        """The denial of this check, if it is sure; its wait is what is left of it."""
        by_key = self._by_key
        for _, key, *_ in check.takes:
            if key in by_key:
                return self._look(check)
        return None

    def _look(self, check: Check) -> Decision | None:
        if check.hold is not None or check.shadow is not None:
            return None  # a reservation and a candidate plan are always judged by the store
        now_us = self._now_us()
        signature = _signature(check)
        for _, key, *_ in check.takes:
            for denial in self._by_key.get(key, ()):
                if denial.signature == signature and denial.told_us <= now_us < denial.ends_us:
                    if denial.counts and not self._count(check, denial):
                        return None
                    self.hits += 1
                    return _aged(check, denial, now_us - denial.told_us)
        self._sweep([key for _, key, *_ in check.takes], now_us)
        return None

    def _sweep(self, keys: Iterable[str], now_us: int) -> None:
        """Forget what is over, so that a caller who has room again finds nothing to compare with."""
        with self._lock:
            for key in keys:
                denials = self._by_key.get(key, ())
                live = tuple(denial for denial in denials if now_us < denial.ends_us)
                if live:
                    self._by_key[key] = live
                elif denials:
                    self._forget(key)
            self._mark()

    def note(self, check: Check, outcome: Outcome, now_us: int, sent_us: int) -> None:
        """Remember a denial that came back: under the limit that denies it for the longest time."""
        if check.shadow is not None:
            return
        longest_us, place, most_us, counts = 0, -1, self._max_age_us, False
        for at, ((rule, _, cost, *_), (_, _, _, wait_us, is_open)) in enumerate(
            zip(check.takes, outcome.rows, strict=True)
        ):
            if wait_us and cost and rule.enforced:
                sure_us = self._max_age_us if wait_us == NEVER else wait_us
                if rule.count_denied:
                    if not isinstance(rule.steps, WindowSteps):
                        return  # each denial that counts makes the wait longer: only the store knows it
                    most_us, counts = min(most_us, sure_us), True  # once it has room it no longer counts
                if sure_us > longest_us and not is_open:
                    longest_us, place = sure_us, at
        if place < 0:
            return
        _, key, _, _, subject = check.takes[place]
        owner = "" if subject is None else Keys.overrides(check.tenant, subject)
        denial = Denial(
            _signature(check),
            sent_us + min(longest_us, most_us),
            self._now_us(),
            now_us,
            tuple(outcome.rows),
            counts,
        )
        with self._lock:
            if sent_us <= max(
                self._dropped_before_us, *(self._dropped.get(name, LONG_AGO_US) for name in (key, owner or ""))
            ):
                return
            others = [d for d in self._by_key.pop(key, ()) if d.signature != denial.signature]
            self._by_key[key] = (denial, *others[: MAX_PER_KEY - 1])  # the key is now the youngest
            if owner:
                self._by_subject.setdefault(owner, set()).add(key)
                self._subject_of[key] = owner
            while len(self._by_key) > self._max_keys:
                self._forget(next(iter(self._by_key)))
            self.is_active = True

    def drop(self, drop: Drop) -> None:
        """Forget what may have room by now."""
        with self._lock:
            now_us = self._now_us()
            for name in (*drop.keys, *drop.subjects):
                self._dropped.pop(name, None)
                self._dropped[name] = now_us
            while len(self._dropped) > self._max_keys:
                oldest = next(iter(self._dropped))
                self._dropped_before_us = self._dropped.pop(oldest)
            for key in drop.keys:
                self._forget(key)
                self._charges.pop(key, None)
            for subject in drop.subjects:
                for key in tuple(self._by_subject.get(subject, ())):
                    self._forget(key)
            if drop.tenants:
                self._dropped_before_us = now_us
                for key in [key for key in self._by_key if key.startswith(drop.tenants)]:
                    self._forget(key)
            self._mark()

    def drop_all(self) -> None:
        """Forget everything: messages may have been missed."""
        with self._lock:
            self._dropped_before_us = self._now_us()
            self._by_key.clear()
            self._by_subject.clear()
            self._subject_of.clear()
            self._mark()

    def charges(self, keys: Iterable[str] | None = None) -> list[Check]:
        """What `count_denied` limits counted here and the store has not heard of yet: of these buckets, or of all."""
        if not self._charges:
            return []
        with self._lock:
            names = list(self._charges) if keys is None else [key for key in keys if key in self._charges]
            found = [self._charges.pop(name) for name in names]
            self._mark()
        return [charge_of(tenant, [take]) for tenant, take in found]

    @property
    def is_owing(self) -> bool:
        return bool(self._charges)

    def _count(self, check: Check, denial: Denial) -> bool:
        """Note what this denial counts; False if there is no room to note it, so that the store must be asked."""
        with self._lock:
            for (rule, key, cost, resource, subject), row in zip(check.takes, denial.rows, strict=True):
                if rule.count_denied and row[3] and cost:
                    if key not in self._charges and len(self._charges) >= MAX_CHARGED:
                        return False
                    owed = self._charges[key][1][2] if key in self._charges else 0
                    amount = min(owed + min(cost, row[0]), 2 * row[0])  # no more than that ever counts
                    self._charges[key] = (check.tenant, (rule, key, amount, resource, subject))
        return True

    def _mark(self) -> None:
        self.is_active = bool(self._by_key or self._charges)

    def _forget(self, key: str) -> None:
        self._by_key.pop(key, None)
        owner = self._subject_of.pop(key, None)
        if owner is not None:
            keys = self._by_subject[owner]
            keys.discard(key)
            if not keys:
                del self._by_subject[owner]


def _signature(check: Check) -> Signature:
    """What makes two checks the same; the resource matters where an override may be of one resource."""
    return tuple(
        (rule.limit, key, cost, rule.percent, "" if subject is None else resource)
        for rule, key, cost, resource, subject in check.takes
    )


def _aged(check: Check, denial: Denial, elapsed_us: int) -> Decision:
    """What the rows say now; a limit whose own wait is over by now had room."""
    rows: list[Row] = [
        (
            limit,
            remaining,
            max(reset_us - elapsed_us, 0),
            wait_us if wait_us <= 0 else max(wait_us - elapsed_us, 0),
            is_open,
        )
        for limit, remaining, reset_us, wait_us, is_open in denial.rows
    ]
    return decision_of(check, denial.now_us + elapsed_us, Outcome(allowed=False, delay_us=-1, rows=rows))
