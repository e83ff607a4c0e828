"""The buckets of the memory store: a bounded dict with eviction."""

import random
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import cast

from limitforge.core.algorithms.base import State
from limitforge.core.algorithms.concurrency import ConcurrencyAlgorithm
from limitforge.core.clock import LONG_AGO_US
from limitforge.core.evaluate import is_expired
from limitforge.errors import StoreUnavailable

EVICTION_SAMPLE = 8


class BucketTable(dict[str, State]):
    """States by key. Call `make_room` before you write a new key. Write an existing key as in any dict."""

    def __init__(self, max_keys: int) -> None:
        super().__init__()
        self.max_keys = max_keys
        self.evictions = 0
        self._sampling_pool: list[str] = []  # every key, and some that were removed
        self._expiries: list[tuple[int, str]] | None = None  # a heap, built when the table is first full
        self._random = random.Random()  # noqa: S311 - samples, no secrets

    def reset(self, key: str) -> None:
        """Replace the state by an expired one. The key stays, because it is in the sampling pool once."""
        state = self.get(key)
        if state is not None:
            self[key] = State(LONG_AGO_US, LONG_AGO_US, 0, state.algorithm, ())
            if self._expiries is not None:
                heappush(self._expiries, (LONG_AGO_US, key))

    def make_room(self, writes: Sequence[tuple[str, State]], now_us: int) -> None:
        """Make room for every new key, or raise StoreUnavailable before anything is written."""
        added = [(key, state) for key, state in writes if key not in self]
        surplus = len(self) + len(added) - self.max_keys
        if surplus > 0:
            self._evict(surplus, {key for key, _ in writes}, now_us)
        self._sampling_pool += [key for key, _ in added]
        if self._expiries is not None:
            for key, state in added:
                heappush(self._expiries, (state.until_us, key))

    def _evict(self, surplus: int, written: set[str], now_us: int) -> None:
        """Remove `surplus` buckets: expired ones first, else the one of eight that expires first."""
        if self._expiries is None or len(self._expiries) > 2 * self.max_keys:
            self._expiries = [(state.until_us, key) for key, state in self.items()]
            heapify(self._expiries)
        for _ in range(surplus):
            key = self._pop_expired(written, now_us)
            if key is None:
                key = self._pick_victim(written, now_us)
                self.evictions += 1
            del self[key]
        if len(self._sampling_pool) > 2 * self.max_keys:
            self._sampling_pool = list(self)

    def _pop_expired(self, written: set[str], now_us: int) -> str | None:
        """Return the key of an expired bucket. Heap entries may be outdated: they hold the expiry at creation."""
        expiries, kept = cast("list[tuple[int, str]]", self._expiries), []
        expired = None
        while expired is None and expiries and expiries[0][0] <= now_us:
            _, key = heappop(expiries)
            state = self.get(key)
            if state is None:
                continue
            if key not in written and is_expired(state, now_us):
                expired = key
            elif state.until_us > now_us:
                heappush(expiries, (state.until_us, key))
            else:  # being written, or ahead of the clock
                kept.append((state.until_us, key))
        for expiry in kept:
            heappush(expiries, expiry)
        return expired

    def _pick_victim(self, written: set[str], now_us: int) -> str:
        """Return the bucket that expires first among eight. Buckets with leases or open reservations are kept."""
        sampled = (self._sample() for _ in range(EVICTION_SAMPLE)) if self else ()
        for keys in (sampled, self):  # all buckets only if every sampled one must be kept
            evictable = [key for key in keys if key not in written and not self._is_pinned(self[key], now_us)]
            if evictable:
                return min(evictable, key=lambda key: self[key].until_us)
        raise StoreUnavailable(
            f"the memory store is full: each of its {self.max_keys} buckets holds a lease or an open reservation; "
            "raise max_keys"
        )

    def _sample(self) -> str:
        """Return a random key. A removed key that is drawn is replaced by the last key of the pool."""
        while True:
            index = self._random.randrange(len(self._sampling_pool))
            key = self._sampling_pool[index]
            if key in self:
                return key
            self._sampling_pool[index] = self._sampling_pool[-1]
            self._sampling_pool.pop()

    @staticmethod
    def _is_pinned(state: State, now_us: int) -> bool:
        is_reserved = bool(state.pending) and state.pending[-1].lapses_us > now_us
        return is_reserved or (isinstance(state.algorithm, ConcurrencyAlgorithm) and not is_expired(state, now_us))
