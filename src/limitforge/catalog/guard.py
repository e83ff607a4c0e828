"""Keeps wrong keys away from the database: each source, and all of them together, may have only so many looked up."""

import asyncio
from collections import Counter, deque

from limitforge.core.clock import Clock, MonotonicClock
from limitforge.core.exact import MICROS
from limitforge.errors import TooManyUnknownKeys

MAX_SOURCES = 10_000


class Guard:
    """Counts look-ups that found nothing. Right keys are never short of it: what they took is given back, and whoever
    comes while others are being looked up waits for how those end.
    """

    def __init__(
        self, *, per_second: float = 2, burst: int = 5, all_per_second: float = 20, clock: Clock | None = None
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._per_us, self._burst = per_second / MICROS, float(burst)
        self._all_per_us, self._all_burst = all_per_second / MICROS, 2 * all_per_second
        self._sources: dict[str, tuple[float, int]] = {}  # what each has left, and when that was written
        self._all = (self._all_burst, self._clock.now_us())
        self._under_way: Counter[str] = Counter()
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, source: str) -> None:
        """Before a look-up that may find nothing; `give_back` must follow."""
        while True:
            now_us = self._clock.now_us()
            own = self._level(self._sources.get(source), self._burst, self._per_us, now_us)
            together = self._level(self._all, self._all_burst, self._all_per_us, now_us)
            if own >= 1 and together >= 1:
                self._write(source, own - 1, now_us)
                self._all = (together - 1, now_us)
                self._under_way[source] += 1
                return
            if not (self._under_way[source] if own < 1 else self._under_way):
                self._wake_next()  # what ended it for this one ends it for the next
                short, rate = (own, self._per_us) if own < 1 else (together, self._all_per_us)
                wait_ms = max(int((1 - short) / rate / 1_000), 1)
                raise TooManyUnknownKeys("too many unknown keys: wait before trying another one", wait_ms)
            await self._turn()

    def give_back(self, source: str, *, is_wrong: bool) -> None:
        """Its look-up has ended: with nothing, or as that of a right key or of a database that did not answer."""
        self._under_way[source] -= 1
        if not self._under_way[source]:
            del self._under_way[source]
        if not is_wrong:
            now_us = self._clock.now_us()
            level = self._level(self._sources.get(source), self._burst, self._per_us, now_us)
            self._write(source, min(level + 1, self._burst), now_us)
            together = self._level(self._all, self._all_burst, self._all_per_us, now_us)
            self._all = (min(together + 1, self._all_burst), now_us)
        self._wake_next()

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake_next()
            raise

    def _wake_next(self) -> None:
        """One: each that wakes either takes what was given back, or wakes the next."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _write(self, source: str, level: float, now_us: int) -> None:
        self._sources.pop(source, None)  # so that the first of them is the one that was quiet for longest
        self._sources[source] = (level, now_us)
        if len(self._sources) > MAX_SOURCES:
            del self._sources[next(iter(self._sources))]

    @staticmethod
    def _level(known: tuple[float, int] | None, burst: float, per_us: float, now_us: int) -> float:
        return burst if known is None else min(burst, known[0] + (now_us - known[1]) * per_us)
