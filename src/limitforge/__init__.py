"""Rate limiting as a contract: what a caller may do now, what is left, and when to come back.

limiter = Limiter.connect("redis://localhost:6379/0")
decision = await limiter.check("GET:/orders", "user:42", limits="100/minute; 10/second")
"""

from limitforge.core.check import Entry, Failure
from limitforge.core.clock import Clock, ManualClock
from limitforge.core.decision import Decision, LimitState
from limitforge.core.keys import Layer
from limitforge.core.lanes import Lanes
from limitforge.core.limits import (
    Concurrency,
    FixedWindow,
    LeakyBucket,
    Limit,
    Quota,
    SlidingWindow,
    SlidingWindowCounter,
    TokenBucket,
    limit_from_fields,
)
from limitforge.core.overrides import Override, OverridePage
from limitforge.core.plan import Limits
from limitforge.core.reservations import Settlement
from limitforge.errors import (
    InvalidInput,
    InvalidLimit,
    LimitforgeError,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
    TooManyReservations,
    UnknownReservation,
)
from limitforge.limiter import Limiter
from limitforge.limiter_sync import SyncLimiter
from limitforge.request import Request
from limitforge.stores.memory.store import MemoryStore
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import HotKey, StoreStatus

__all__ = [
    "Clock",
    "Concurrency",
    "Decision",
    "Entry",
    "Failure",
    "FixedWindow",
    "HotKey",
    "InvalidInput",
    "InvalidLimit",
    "Lanes",
    "Layer",
    "LeakyBucket",
    "Limit",
    "LimitState",
    "Limiter",
    "LimitforgeError",
    "Limits",
    "ManualClock",
    "MemoryStore",
    "Override",
    "OverridePage",
    "Quota",
    "Request",
    "Settlement",
    "SlidingWindow",
    "SlidingWindowCounter",
    "StoreCorrupt",
    "StoreError",
    "StoreOptions",
    "StoreStatus",
    "StoreUnavailable",
    "SyncLimiter",
    "TokenBucket",
    "TooManyReservations",
    "UnknownReservation",
    "limit_from_fields",
]
