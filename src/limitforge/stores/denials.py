"""Denials that need not be asked for again: what had no room, and for how long it surely has none.

A denial may be answered from here while the longest wait of its limits still runs, counted from the moment at which the
check was sent. Nothing can shorten that wait but a reset, a settlement, an override or another plan:

- it is not cached if a limit without room has an open reservation or lease, since those can give back early;
- nor if a limit of the check counts denials (`count_denied`), since the store must hear of each;
- a check under other numbers, costs, shares or modes is another check, and finds nothing here;
- `drop` forgets what a reset, a settlement or an override touched. An answer that was on its way meanwhile may be older
  than that, so it is not cached either.

So this never admits anything, and denies what Redis would admit only between a change on another node and its message.
Whatever else gives room in Redis (an override that expires, a key that is evicted, a flush) is seen after `max_age_us`
at the latest.
"""

import threading
from collections.abc import Callable
from typing import Self

import msgspec

from limitforge.core.algorithms.steps import NEVER
from limitforge.core.check import Check, Take
from limitforge.core.clock import LONG_AGO_US, Clock
from limitforge.core.decision import Decision, Outcome, Row, answer_of
from limitforge.core.keys import decoded, encoded

MAX_PER_PLACE = 4  # different checks of one place, such as other costs

Signature = tuple[tuple[object, str, bool, int, int, str], ...]
_Names = tuple[bytes, ...]


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


class Denial(msgspec.Struct, frozen=True, gc=False):
    takes: list[Take]
    signature: Signature
    ends_us: int
    """Until when it is surely denied, by the moment of sending."""
    told_us: int
    """When the waits in the rows were true at the latest."""
    now_us: int
    rows: tuple[Row, ...]
    names: tuple[str, ...]
    """By which it is dropped."""


class Shelf(msgspec.Struct, frozen=True, gc=False):
    """What is known of one place, and by which names any of it is dropped."""

    names: tuple[str, ...]
    denials: tuple[Denial, ...]


class Denials:
    """A bounded cache of denials, for one process. Thread-safe: looking takes no lock."""

    def __init__(self, *, max_age_us: int, max_keys: int, clock: Clock) -> None:
        self._max_age_us = max_age_us
        self._max_places = max_keys
        self._now_us: Callable[[], int] = clock.now_us
        self._lock = threading.Lock()
        self._shelves: dict[str, Shelf] = {}  # by the place of a check, the oldest first
        self._places: dict[str, set[str]] = {}  # where a bucket or the overrides of a subject matter
        self._dropped: dict[str, int] = {}  # when each of these was last dropped, the oldest first
        self._dropped_before_us = LONG_AGO_US
        self.hits = 0
        self.is_active = False
        """Whether there is anything to look for."""

    def count(self) -> int:
        """How many checks have a denial here that is not over."""
        now_us = self._now_us()
        with self._lock:
            self._sweep_oldest(now_us)
            return len(self._shelves)

    def now_us(self) -> int:
        """For `note`: the moment before a check is sent."""
        return self._now_us()

    def look(self, check: Check) -> Decision | Outcome | None:
        """The denial of this check, if it is sure; its wait is what is left of it."""
        place = check.place
        shelf = self._shelves.get(place)
        if shelf is None or check.hold is not None or check.shadow is not None:
            return None  # a reservation and a candidate plan are always judged by the store
        now_us = self._now_us()
        for denial in shelf.denials:
            is_same = denial.takes == check.takes or denial.signature == _signature(check)
            if is_same and denial.told_us <= now_us < denial.ends_us:
                self.hits += 1
                return answer_of(check, _aged(denial, now_us - denial.told_us))
        self._sweep(place, now_us)
        return None

    def note(self, check: Check, outcome: Outcome, sent_us: int) -> None:
        """Remember a denial that came back, if it is sure for any time."""
        sure_us = 0 if check.shadow is not None else self._sure_us(check, outcome)
        if not sure_us:
            return
        place, names = check.place, _names(check)
        told_us = self._now_us()
        if told_us >= sent_us + sure_us:
            return
        denial = Denial(
            list(check.takes), _signature(check), sent_us + sure_us, told_us, outcome.now_us, tuple(outcome.rows), names
        )
        with self._lock:
            dropped = max(self._dropped.get(name, LONG_AGO_US) for name in names)
            if sent_us <= max(dropped, self._dropped_before_us):
                return
            known = self._shelves.get(place)
            others = [] if known is None else [d for d in known.denials if d.signature != denial.signature]
            self._keep(place, (denial, *others[: MAX_PER_PLACE - 1]))
            self._sweep_oldest(told_us)
            while len(self._shelves) > self._max_places:
                self._forget(next(iter(self._shelves)))
            self.is_active = True

    def drop(self, drop: Drop) -> None:
        """Forget what may have room by now."""
        with self._lock:
            now_us = self._now_us()
            for name in (*drop.keys, *drop.subjects):
                self._dropped.pop(name, None)
                self._dropped[name] = now_us
                for place in tuple(self._places.get(name, ())):
                    self._forget(place)
            while len(self._dropped) > self._max_places:
                oldest_us = self._dropped.pop(next(iter(self._dropped)))
                self._dropped_before_us = max(self._dropped_before_us, oldest_us)
            if drop.tenants:
                self._dropped_before_us = max(self._dropped_before_us, now_us)
                for name in [name for name in self._places if name.startswith(drop.tenants)]:
                    for place in tuple(self._places.get(name, ())):
                        self._forget(place)
            self.is_active = bool(self._shelves)

    def drop_all(self, *, missed: bool = True) -> None:
        """Forget everything: messages may have been missed."""
        with self._lock:
            self._dropped_before_us = max(self._dropped_before_us, self._now_us())
            self._shelves.clear()
            self._places.clear()
            self.is_active = False

    def _sure_us(self, check: Check, outcome: Outcome) -> int:
        """For how long nothing but a change can let this check pass; 0 if that is not known."""
        longest_us = 0
        for (rule, _, cost, *_), (_, _, _, wait_us, is_open) in zip(check.takes, outcome.rows, strict=True):
            if cost and rule.enforced:
                if rule.count_denied or (wait_us and is_open):
                    return 0
                longest_us = max(longest_us, self._max_age_us if wait_us == NEVER else wait_us)
        return min(longest_us, self._max_age_us)

    def _sweep(self, place: str, now_us: int) -> None:
        """Forget what is over, so that a caller who has room again finds nothing to compare with."""
        with self._lock:
            shelf = self._shelves.get(place)
            if shelf is not None:
                self._keep(place, tuple(denial for denial in shelf.denials if now_us < denial.ends_us))
                self.is_active = bool(self._shelves)

    def _sweep_oldest(self, now_us: int) -> None:
        """The oldest are over first, more or less: all were noted for about as long."""
        while self._shelves:
            place, shelf = next(iter(self._shelves.items()))
            if any(now_us < denial.ends_us for denial in shelf.denials):
                break
            self._forget(place)
        self.is_active = bool(self._shelves)

    def _forget(self, place: str) -> None:
        self._keep(place, ())

    def _keep(self, place: str, denials: tuple[Denial, ...]) -> None:
        """These of a place, and no others."""
        known = self._shelves.pop(place, None)
        for name in () if known is None else known.names:
            places = self._places[name]
            places.discard(place)
            if not places:
                del self._places[name]
        if denials:
            names = tuple({name for denial in denials for name in denial.names})
            self._shelves[place] = Shelf(names, denials)
            for name in names:
                self._places.setdefault(name, set()).add(place)


def _names(check: Check) -> tuple[str, ...]:
    """The buckets of a check, and the overrides that may change their numbers."""
    keys = [key for _, key, *_ in check.takes]
    owners = {overrides for *_, overrides in check.takes if overrides is not None}
    return (*keys, *owners)


def _signature(check: Check) -> Signature:
    """What makes two checks of the same buckets the same; the resource matters where an override may be of one."""
    return tuple(
        (rule.limit, key, rule.enforced, cost, rule.percent, "" if overrides is None else resource)
        for rule, key, cost, resource, overrides in check.takes
    )


def _aged(denial: Denial, elapsed_us: int) -> Outcome:
    """What the rows say now; a limit whose own wait is over by now had room."""
    rows: list[Row] = [
        (
            limit,
            remaining,
            reset_us - elapsed_us if reset_us > elapsed_us else 0,
            wait_us - elapsed_us if wait_us > elapsed_us else wait_us if wait_us < 0 else 0,
            is_open,
        )
        for limit, remaining, reset_us, wait_us, is_open in denial.rows
    ]
    return Outcome(denial.now_us + elapsed_us, allowed=False, delay_us=-1, rows=rows)
