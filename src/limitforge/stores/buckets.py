"""The buckets of the memory store: a dict that is bounded, and knows which of them may go."""

import random
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import cast

from limitforge.core.algorithms.concurrency import ConcurrencySteps
from limitforge.core.algorithms.steps import State
from limitforge.core.clock import LONG_AGO_US
from limitforge.core.decide import is_gone
from limitforge.errors import StoreUnavailable

SAMPLED = 8


class Buckets(dict[str, State]):
    """States by key. `make_place` must come before a new key is written; known ones are written as in any dict."""

    def __init__(self, max_keys: int) -> None:
        super().__init__()
        self.max_keys = max_keys
        self.evictions = 0
        self._order: list[str] = []  # every key, so that eviction can sample; some are gone
        self._ends: list[tuple[int, str]] | None = None  # a heap of when buckets are over, once it was full
        self._random = random.Random()  # noqa: S311 - samples, no secrets

    def forget(self, key: str) -> None:
        """Count afresh. The bucket is as good as gone, and keeps its one place in the order."""
        state = self.get(key)
        if state is not None:
            self[key] = State(LONG_AGO_US, LONG_AGO_US, 0, state.numbers, ())
            if self._ends is not None:
                heappush(self._ends, (LONG_AGO_US, key))

    def make_place(self, writes: Sequence[tuple[str, State]], now_us: int) -> None:
        """Give every new key a place, or refuse before anything is written."""
        added = [(key, state) for key, state in writes if key not in self]
        surplus = len(self) + len(added) - self.max_keys
        if surplus > 0:
            self._make_room(surplus, {key for key, _ in writes}, now_us)
        self._order += [key for key, _ in added]
        if self._ends is not None:
            for key, state in added:
                heappush(self._ends, (state.until, key))

    def _make_room(self, surplus: int, written: set[str], now_us: int) -> None:
        """Drop that many buckets: what is over first, else the one of eight that would be over first."""
        if self._ends is None or len(self._ends) > 2 * self.max_keys:
            self._ends = [(state.until, key) for key, state in self.items()]
            heapify(self._ends)
        for _ in range(surplus):
            key = self._over(written, now_us)
            if key is None:
                key = self._victim(written, now_us)
                self.evictions += 1
            del self[key]
        if len(self._order) > 2 * self.max_keys:
            self._order = list(self)

    def _over(self, written: set[str], now_us: int) -> str | None:
        """A bucket that no longer matters. Ends in the heap are those of when a bucket was new: most have moved on."""
        ends, kept = cast("list[tuple[int, str]]", self._ends), []
        found = None
        while found is None and ends and ends[0][0] <= now_us:
            _, key = heappop(ends)
            state = self.get(key)
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
        sampled = (self._sample() for _ in range(SAMPLED)) if self else ()
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
            place = self._random.randrange(len(self._order))
            key = self._order[place]
            if key in self:
                return key
            self._order[place] = self._order[-1]
            self._order.pop()

    @staticmethod
    def _is_pinned(state: State, now_us: int) -> bool:
        reserved = bool(state.pending) and state.pending[-1].lapses_us > now_us
        return reserved or (isinstance(state.numbers, ConcurrencySteps) and not is_gone(state, now_us))
