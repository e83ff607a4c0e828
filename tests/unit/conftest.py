"""A limiter in memory, on a clock that only the test moves."""

import pytest

from limitforge import ManualClock, SyncLimiter
from limitforge.stores.memory.store import MemoryStore


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def limiter(store: MemoryStore) -> SyncLimiter:
    return SyncLimiter(store)
