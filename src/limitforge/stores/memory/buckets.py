"""The buckets of the memory store: a dict that is bounded, and knows which of them may go."""

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
    """States by key. `make_place` must come before a new key is written; known ones are written as in any dict."""

    def __init__(self, max_keys: int) -> None:
        super().__init__()
        self.max_keys = max_keys
        self.evictions = 0
        self._sampling_pool: list[str] = []  # every key, so that eviction can sample; some are gone
        self._expiries: list[tuple[int, str]] | None = None  # a heap of when buckets are over, once it was full
        self._random = random.Random()  # noqa: S311 - samples, no secrets

    def reset(self, key: str) -> None:
        """Count afresh. The bucket is as good as gone, and keeps its one place in the order."""
        state = self.get(key)
        if state is not None:
            self[key] = State(LONG_AGO_US, LONG_AGO_US, 0, state.algorithm, ())
            if self._expiries is not None:
                heappush(self._expiries, (LONG_AGO_US, key))

    def make_room(self, writes: Sequence[tuple[str, State]], now_us: int) -> None:
        """Give every new key a place, or refuse before anything is written."""
        added = [(key, state) for key, state in writes if key not in self]
        surplus = len(self) + len(added) - self.max_keys
        if surplus > 0:
            self._evict(surplus, {key for key, _ in writes}, now_us)
        self._sampling_pool += [key for key, _ in added]
        if self._expiries is not None:
            for key, state in added:
                heappush(self._expiries, (state.until, key))

    def _evict(self, surplus: int, written: set[str], now_us: int) -> None:
        """Drop that many buckets: what is over first, else the one of eight that would be over first."""
        if self._expiries is None or len(self._expiries) > 2 * self.max_keys:
            self._expiries = [(state.until, key) for key, state in self.items()]
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
        """A bucket that no longer matters. Ends in the heap are those of when a bucket was new: most have moved on."""
        ends, kept = cast("list[tuple[int, str]]", self._expiries), []
        found = None
        while found is None and ends and ends[0][0] <= now_us:
            _, key = heappop(ends)
            state = self.get(key)
            if state is None:
                continue
            if key not in written and is_expired(state, now_us):
                found = key
            elif state.until > now_us:
                heappush(ends, (state.until, key))
            else:  # being written, or ahead of the clock
                kept.append((state.until, key))
        for end in kept:
            heappush(ends, end)
        return found

    def _pick_victim(self, written: set[str], now_us: int) -> str:
        """Of eight, the one that would be over first; leases and open reservations stay."""
        sampled = (self._sample() for _ in range(EVICTION_SAMPLE)) if self else ()
        for keys in (sampled, self):  # all of them only if the whole sample must stay
            free = [key for key in keys if key not in written and not self._is_pinned(self[key], now_us)]
            if free:
                return min(free, key=lambda key: self[key].until)
        raise StoreUnavailable(
            f"the memory store is full: of {self.max_keys} buckets each holds a lease or an open reservation; "
            "raise max_keys"
        )

    def _sample(self) -> str:
        """A random key. One that is gone is met at most once: the last of the list takes its place."""
        while True:
            place = self._random.randrange(len(self._sampling_pool))
            key = self._sampling_pool[place]
            if key in self:
                return key
            self._sampling_pool[place] = self._sampling_pool[-1]
            self._sampling_pool.pop()

    @staticmethod
    def _is_pinned(state: State, now_us: int) -> bool:
        reserved = bool(state.pending) and state.pending[-1].lapses_us > now_us
        return reserved or (isinstance(state.algorithm, ConcurrencyAlgorithm) and not is_expired(state, now_us))
