"""Cache denials in this process: a denied check is denied again, without Redis, until capacity may be available.

A denial may be repeated while the longest wait of its limits lasts, counted from the moment when the check was sent.
Only a reset, a settlement, an override or a new plan can shorten that wait. Therefore:

- A denial is not cached if an exceeded limit has an open reservation or lease, which can free capacity early. It is not
  cached either if an overflow bucket decided that limit.
- It is not cached if a limit of the check counts denials (`count_denied`), because the store must count each one.
- A check with other numbers, costs, shares or modes does not match.
- `invalidate` removes what a reset, a settlement or an override affects. A reply that was in flight at that moment may
  be older than the change, so it is not cached either.

The cache never admits a check. It denies a check that Redis would admit only after a change in another process, until
the message about it arrives. Other changes in Redis (an override that expires, an evicted key, a flush) take effect
after `max_age_us` at the latest.
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

MAX_DENIALS_PER_KEY = 4  # different checks of one bucket, for example with other costs

Signature = tuple[tuple[object, str, bool, int, int, str], ...]
_Names = tuple[bytes, ...]


class Invalidation(msgspec.Struct, frozen=True):
    """What a change affects: bucket keys, subjects (their override keys), and tenants (prefixes of their keys)."""

    bucket_keys: tuple[str, ...] = ()
    override_keys: tuple[str, ...] = ()
    key_prefixes: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Encode the message to the other processes."""
        return msgspec.msgpack.encode([[encode_key(name) for name in names] for names in msgspec.structs.astuple(self)])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Decode a message. Raises ValueError if it is not an invalidation."""
        keys, subjects, tenants = msgspec.msgpack.decode(message, type=tuple[_Names, _Names, _Names])
        return cls(*(tuple(decode_key(name) for name in names) for names in (keys, subjects, tenants)))


class CachedDenial(msgspec.Struct, frozen=True, gc=False):
    debits: list[Debit]
    signature: Signature
    expires_us: int
    """Until when the check is certainly denied, counted from when it was sent."""
    received_us: int
    """When the reply arrived. The waits in the rows are measured from this time at the latest."""
    now_us: int
    rows: tuple[LimitRow, ...]
    invalidated_by: tuple[str, ...]
    """Bucket keys and override keys of the check."""


class CacheEntry(msgspec.Struct, frozen=True, gc=False):
    """The denials of different checks with the same `Check.denial_cache_key`."""

    invalidated_by: tuple[str, ...]
    denials: tuple[CachedDenial, ...]


class DenialCache:
    """A bounded cache of denials for one process. Thread-safe; `get` takes no lock for a hit."""

    def __init__(self, *, max_age_us: int, max_keys: int, clock: Clock) -> None:
        self._max_age_us = max_age_us
        self._max_entries = max_keys
        self._now_us: Callable[[], int] = clock.now_us
        self._lock = threading.Lock()
        self._entries: dict[str, CacheEntry] = {}  # by denial cache key, the oldest first
        self._keys_by_name: dict[str, set[str]] = {}  # denial cache keys by the names that invalidate them
        self._invalidated_us: dict[str, int] = {}  # last invalidation of each name, the oldest first
        self._all_invalidated_us = LONG_AGO_US
        self.hits = 0
        self.has_entries = False

    def count(self) -> int:
        """Return the number of entries that have not expired."""
        now_us = self._now_us()
        with self._lock:
            self._remove_oldest_expired(now_us)
            return len(self._entries)

    def now_us(self) -> int:
        """Return the time to pass to `add`. Call it before the check is sent."""
        return self._now_us()

    def get(self, check: Check) -> Decision | Outcome | None:
        """Return the cached denial of this check, with its remaining wait, or None."""
        key = check.denial_cache_key
        entry = self._entries.get(key)
        if entry is None or check.hold is not None or check.shadow is not None:
            return None  # the store must evaluate every reservation and shadow plan
        now_us = self._now_us()
        for denial in entry.denials:
            is_same = denial.debits == check.debits or denial.signature == _signature(check)
            if is_same and denial.received_us <= now_us < denial.expires_us:
                self.hits += 1
                return build_result(check, _outcome_after(denial, now_us - denial.received_us))
        self._remove_expired(key, now_us)
        return None

    def add(self, check: Check, outcome: Outcome, sent_us: int) -> None:
        """Cache a denial, if it is certain to last. `sent_us` is `now_us()` before the check was sent."""
        denied_us = 0 if check.shadow is not None else self._denied_for_us(check, outcome)
        if not denied_us:
            return
        key, names = check.denial_cache_key, _invalidating_names(check)
        received_us = self._now_us()
        if received_us >= sent_us + denied_us:
            return
        denial = CachedDenial(
            list(check.debits),
            _signature(check),
            sent_us + denied_us,
            received_us,
            outcome.now_us,
            tuple(outcome.rows),
            names,
        )
        with self._lock:
            invalidated_us = max(self._invalidated_us.get(name, LONG_AGO_US) for name in names)
            if sent_us <= max(invalidated_us, self._all_invalidated_us):
                return
            entry = self._entries.get(key)
            others = [] if entry is None else [d for d in entry.denials if d.signature != denial.signature]
            self._replace(key, (denial, *others[: MAX_DENIALS_PER_KEY - 1]))
            self._remove_oldest_expired(received_us)
            while len(self._entries) > self._max_entries:
                self._remove(next(iter(self._entries)))
            self.has_entries = True

    def invalidate(self, invalidation: Invalidation) -> None:
        """Remove the denials that a change affects."""
        with self._lock:
            now_us = self._now_us()
            for name in (*invalidation.bucket_keys, *invalidation.override_keys):
                self._invalidated_us.pop(name, None)
                self._invalidated_us[name] = now_us
                for key in tuple(self._keys_by_name.get(name, ())):
                    self._remove(key)
            while len(self._invalidated_us) > self._max_entries:
                oldest_us = self._invalidated_us.pop(next(iter(self._invalidated_us)))
                self._all_invalidated_us = max(self._all_invalidated_us, oldest_us)
            if invalidation.key_prefixes:
                self._all_invalidated_us = max(self._all_invalidated_us, now_us)
                for name in [name for name in self._keys_by_name if name.startswith(invalidation.key_prefixes)]:
                    for key in tuple(self._keys_by_name.get(name, ())):
                        self._remove(key)
            self.has_entries = bool(self._entries)

    def invalidate_all(self, *, messages_missed: bool = True) -> None:
        """Remove everything. Called with each new subscription, because messages may have been missed before it."""
        with self._lock:
            self._all_invalidated_us = max(self._all_invalidated_us, self._now_us())
            self._entries.clear()
            self._keys_by_name.clear()
            self.has_entries = False

    def _denied_for_us(self, check: Check, outcome: Outcome) -> int:
        """Return how long the check is denied unless something changes; 0 if that is unknown."""
        longest_us = 0
        for (rule, _, cost, *_), (_, _, _, wait_us, flags) in zip(check.debits, outcome.rows, strict=True):
            if cost and rule.enforced:
                if rule.count_denied or (wait_us and flags):
                    return 0
                longest_us = max(longest_us, self._max_age_us if wait_us == NEVER else wait_us)
        return min(longest_us, self._max_age_us)

    def _remove_expired(self, key: str, now_us: int) -> None:
        """Remove expired denials, so that later checks need no comparison with them."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._replace(key, tuple(denial for denial in entry.denials if now_us < denial.expires_us))
                self.has_entries = bool(self._entries)

    def _remove_oldest_expired(self, now_us: int) -> None:
        """Remove expired entries from the oldest on. Entries last about equally long, so the oldest expire first."""
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if any(now_us < denial.expires_us for denial in entry.denials):
                break
            self._remove(key)
        self.has_entries = bool(self._entries)

    def _remove(self, key: str) -> None:
        self._replace(key, ())

    def _replace(self, key: str, denials: tuple[CachedDenial, ...]) -> None:
        """Replace the denials of a denial cache key, and update the index by name."""
        entry = self._entries.pop(key, None)
        for name in () if entry is None else entry.invalidated_by:
            keys = self._keys_by_name[name]
            keys.discard(key)
            if not keys:
                del self._keys_by_name[name]
        if denials:
            names = tuple({name for denial in denials for name in denial.invalidated_by})
            self._entries[key] = CacheEntry(names, denials)
            for name in names:
                self._keys_by_name.setdefault(name, set()).add(key)


def _invalidating_names(check: Check) -> tuple[str, ...]:
    """Return the keys of the buckets, and of the overrides that may change their numbers."""
    keys = [key for _, key, *_ in check.debits]
    override_keys = {overrides for *_, overrides in check.debits if overrides is not None}
    return (*keys, *override_keys)


def _signature(check: Check) -> Signature:
    """Return what makes two checks equal. The resource matters only where an override may apply to one resource."""
    return tuple(
        (rule.limit, key, rule.enforced, cost, rule.percent, "" if overrides is None else resource)
        for rule, key, cost, resource, overrides in check.debits
    )


def _outcome_after(denial: CachedDenial, elapsed_us: int) -> Outcome:
    """Return the outcome `elapsed_us` later, with shorter resets and waits. A wait of 0 means capacity is available."""
    rows: list[LimitRow] = [
        (
            limit,
            remaining,
            reset_us - elapsed_us if reset_us > elapsed_us else 0,
            wait_us - elapsed_us if wait_us > elapsed_us else wait_us if wait_us < 0 else 0,
            flags,
        )
        for limit, remaining, reset_us, wait_us, flags in denial.rows
    ]
    return Outcome(denial.now_us + elapsed_us, allowed=False, delay_us=-1, rows=rows)
