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

from limitforge.core.algorithms.base import NEVER
from limitforge.core.check import Check, Debit
from limitforge.core.clock import LONG_AGO_US, Clock
from limitforge.core.decision import Decision, LimitRow, Outcome, build_result
from limitforge.core.keys import decode_key, encode_key

MAX_DENIALS_PER_KEY = 4  # different checks of one place, such as other costs

Signature = tuple[tuple[object, str, bool, int, int, str], ...]
_Names = tuple[bytes, ...]


class Invalidation(msgspec.Struct, frozen=True):
    """What to forget: buckets, subjects (by the key of their overrides), tenants (by what their keys start with)."""

    keys: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """As it travels to the other nodes."""
        return msgspec.msgpack.encode([[encode_key(name) for name in names] for names in msgspec.structs.astuple(self)])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Raises ValueError for what is no such message."""
        keys, subjects, tenants = msgspec.msgpack.decode(message, type=tuple[_Names, _Names, _Names])
        return cls(*(tuple(decode_key(name) for name in names) for names in (keys, subjects, tenants)))


class CachedDenial(msgspec.Struct, frozen=True, gc=False):
    debits: list[Debit]
    signature: Signature
    expires_us: int
    """Until when it is surely denied, by the moment of sending."""
    received_us: int
    """When the waits in the rows were true at the latest."""
    now_us: int
    rows: tuple[LimitRow, ...]
    invalidated_by: tuple[str, ...]
    """By which it is dropped."""


class CacheEntry(msgspec.Struct, frozen=True, gc=False):
    """What is known of one place, and by which names any of it is dropped."""

    invalidated_by: tuple[str, ...]
    denials: tuple[CachedDenial, ...]


class DenialCache:
    """A bounded cache of denials, for one process. Thread-safe: looking takes no lock."""

    def __init__(self, *, max_age_us: int, max_keys: int, clock: Clock) -> None:
        self._max_age_us = max_age_us
        self._max_entries = max_keys
        self._now_us: Callable[[], int] = clock.now_us
        self._lock = threading.Lock()
        self._entries: dict[str, CacheEntry] = {}  # by the place of a check, the oldest first
        self._keys_by_name: dict[str, set[str]] = {}  # where a bucket or the overrides of a subject matter
        self._invalidated_us: dict[str, int] = {}  # when each of these was last dropped, the oldest first
        self._all_invalidated_us = LONG_AGO_US
        self.hits = 0
        self.has_entries = False
        """Whether there is anything to look for."""

    def count(self) -> int:
        """How many checks have a denial here that is not over."""
        now_us = self._now_us()
        with self._lock:
            self._remove_oldest_expired(now_us)
            return len(self._entries)

    def now_us(self) -> int:
        """For `note`: the moment before a check is sent."""
        return self._now_us()

    def get(self, check: Check) -> Decision | Outcome | None:
        """The denial of this check, if it is sure; its wait is what is left of it."""
        place = check.routing_key
        shelf = self._entries.get(place)
        if shelf is None or check.hold is not None or check.shadow is not None:
            return None  # a reservation and a candidate plan are always judged by the store
        now_us = self._now_us()
        for denial in shelf.denials:
            is_same = denial.debits == check.debits or denial.signature == _signature(check)
            if is_same and denial.received_us <= now_us < denial.expires_us:
                self.hits += 1
                return build_result(check, _outcome_after(denial, now_us - denial.received_us))
        self._remove_expired(place, now_us)
        return None

    def add(self, check: Check, outcome: Outcome, sent_us: int) -> None:
        """Remember a denial that came back, if it is sure for any time."""
        sure_us = 0 if check.shadow is not None else self._denied_for_us(check, outcome)
        if not sure_us:
            return
        place, names = check.routing_key, _invalidating_names(check)
        told_us = self._now_us()
        if told_us >= sent_us + sure_us:
            return
        denial = CachedDenial(
            list(check.debits),
            _signature(check),
            sent_us + sure_us,
            told_us,
            outcome.now_us,
            tuple(outcome.rows),
            names,
        )
        with self._lock:
            dropped = max(self._invalidated_us.get(name, LONG_AGO_US) for name in names)
            if sent_us <= max(dropped, self._all_invalidated_us):
                return
            known = self._entries.get(place)
            others = [] if known is None else [d for d in known.denials if d.signature != denial.signature]
            self._replace(place, (denial, *others[: MAX_DENIALS_PER_KEY - 1]))
            self._remove_oldest_expired(told_us)
            while len(self._entries) > self._max_entries:
                self._remove(next(iter(self._entries)))
            self.has_entries = True

    def invalidate(self, invalidation: Invalidation) -> None:
        """Forget what may have room by now."""
        with self._lock:
            now_us = self._now_us()
            for name in (*invalidation.keys, *invalidation.subjects):
                self._invalidated_us.pop(name, None)
                self._invalidated_us[name] = now_us
                for place in tuple(self._keys_by_name.get(name, ())):
                    self._remove(place)
            while len(self._invalidated_us) > self._max_entries:
                oldest_us = self._invalidated_us.pop(next(iter(self._invalidated_us)))
                self._all_invalidated_us = max(self._all_invalidated_us, oldest_us)
            if invalidation.tenants:
                self._all_invalidated_us = max(self._all_invalidated_us, now_us)
                for name in [name for name in self._keys_by_name if name.startswith(invalidation.tenants)]:
                    for place in tuple(self._keys_by_name.get(name, ())):
                        self._remove(place)
            self.has_entries = bool(self._entries)

    def invalidate_all(self, *, messages_missed: bool = True) -> None:
        """Forget everything: messages may have been missed."""
        with self._lock:
            self._all_invalidated_us = max(self._all_invalidated_us, self._now_us())
            self._entries.clear()
            self._keys_by_name.clear()
            self.has_entries = False

    def _denied_for_us(self, check: Check, outcome: Outcome) -> int:
        """For how long nothing but a change can let this check pass; 0 if that is not known."""
        longest_us = 0
        for (rule, _, cost, *_), (_, _, _, wait_us, is_open) in zip(check.debits, outcome.rows, strict=True):
            if cost and rule.enforced:
                if rule.count_denied or (wait_us and is_open):
                    return 0
                longest_us = max(longest_us, self._max_age_us if wait_us == NEVER else wait_us)
        return min(longest_us, self._max_age_us)

    def _remove_expired(self, place: str, now_us: int) -> None:
        """Forget what is over, so that a caller who has room again finds nothing to compare with."""
        with self._lock:
            shelf = self._entries.get(place)
            if shelf is not None:
                self._replace(place, tuple(denial for denial in shelf.denials if now_us < denial.expires_us))
                self.has_entries = bool(self._entries)

    def _remove_oldest_expired(self, now_us: int) -> None:
        """The oldest are over first, more or less: all were noted for about as long."""
        while self._entries:
            place, shelf = next(iter(self._entries.items()))
            if any(now_us < denial.expires_us for denial in shelf.denials):
                break
            self._remove(place)
        self.has_entries = bool(self._entries)

    def _remove(self, place: str) -> None:
        self._replace(place, ())

    def _replace(self, place: str, denials: tuple[CachedDenial, ...]) -> None:
        """These of a place, and no others."""
        known = self._entries.pop(place, None)
        for name in () if known is None else known.invalidated_by:
            places = self._keys_by_name[name]
            places.discard(place)
            if not places:
                del self._keys_by_name[name]
        if denials:
            names = tuple({name for denial in denials for name in denial.invalidated_by})
            self._entries[place] = CacheEntry(names, denials)
            for name in names:
                self._keys_by_name.setdefault(name, set()).add(place)


def _invalidating_names(check: Check) -> tuple[str, ...]:
    """The buckets of a check, and the overrides that may change their numbers."""
    keys = [key for _, key, *_ in check.debits]
    owners = {overrides for *_, overrides in check.debits if overrides is not None}
    return (*keys, *owners)


def _signature(check: Check) -> Signature:
    """What makes two checks of the same buckets the same; the resource matters where an override may be of one."""
    return tuple(
        (rule.limit, key, rule.enforced, cost, rule.percent, "" if overrides is None else resource)
        for rule, key, cost, resource, overrides in check.debits
    )


def _outcome_after(denial: CachedDenial, elapsed_us: int) -> Outcome:
    """What the rows say now; a limit whose own wait is over by now had room."""
    rows: list[LimitRow] = [
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
