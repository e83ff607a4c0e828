"""What a store is. The limiter speaks this and nothing else; a store may wrap another one (a cache, a breaker, a
placement).

A check is hot and has a method of its own, which is where a store may join waiting checks. Everything rarer is a
command: a value that says what is wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from limitforge.core.check import Check
from limitforge.core.decision import CheckResult, Decision
from limitforge.core.handles import Lease, Reservation
from limitforge.core.keys import Keys
from limitforge.core.overrides import CompiledOverride, Override, OverridePage
from limitforge.core.reservations import Settlement
from limitforge.errors import LimitforgeError
from limitforge.stores.redis.hot_keys import HotKey

ResultT = TypeVar("ResultT")


class StoreStatus(msgspec.Struct, frozen=True):
    """How a store is doing. `breaker` is closed, open or probing, `since` when that last changed (epoch seconds),
    `degraded` counts the checks that were decided without the store, `denials_cached` and `denial_hits` those that
    needed no asking, `waiting` how many checks wait for an answer now. Where there are several servers, `breaker` is
    that of the worst, and `nodes` has each by its address. `shares_out` is what this process has paid for of leased
    limits and not spent. `hot_keys` are the buckets that were asked for most in the last seconds.
    `new_buckets_per_minute` is how many buckets a tenant may begin (None: any number), `overflowed` how many checks an
    overflow bucket decided because their tenant had begun as many.
    """

    breaker: str = "closed"
    since: float | None = None
    degraded: dict[str, int] = msgspec.field(default_factory=dict)
    denials_cached: int = 0
    denial_hits: int = 0
    waiting: int = 0
    servers: dict[str, str] = msgspec.field(default_factory=dict)
    prepaid_out: int = 0
    hot_keys: list[HotKey] = msgspec.field(default_factory=list)
    new_buckets_per_minute: int | None = None
    overflowed: int = 0


class Command(Generic[ResultT]):
    """Something other than a check, and the type of its answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Release(Command[None]):
    """Free the slots of a lease; fine if it holds none."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Renew(Command[bool]):
    """Extend every slot of a lease that is still live; False if any was not."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Settle(Command[Settlement]):
    """Replace what a reservation holds by what it cost, `amounts` limit by limit."""

    reservation: Reservation
    cost: int
    amounts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reset(Command[None]):
    """Forget what was counted in these buckets."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetOverride(Command[Override]):
    """Replace the override of one (tenant, resource, subject); the subject's keys start with `own`."""

    lane_prefix: str
    tenant: str
    resource: str
    subject: str
    changes: dict[str, object]
    compiled: tuple[CompiledOverride, ...]
    ttl_us: int


@dataclass(frozen=True, slots=True)
class GetOverrides(Command[list[Override]]):
    """The live overrides of one subject."""

    lane_prefix: str
    tenant: str
    subject: str


@dataclass(frozen=True, slots=True)
class ListOverrides(Command[OverridePage]):
    """A tenant's live overrides, some subjects at a time, in the order of their names, from all its lanes."""

    key_prefixes: tuple[str, ...]
    tenant: str
    cursor: str | None
    subjects: int


@dataclass(frozen=True, slots=True)
class FindMissingOverrides(Command[list[int]]):
    """Return the positions of those overrides that are not in force. Each is given as (own, resource, subject)."""

    targets: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class DeleteOverride(Command[bool]):
    """Remove one override; tells whether there was any."""

    lane_prefix: str
    resource: str
    subject: str


@dataclass(frozen=True, slots=True)
class ClearOverrides(Command[int]):
    """Remove all overrides of a tenant; tells of how many subjects."""

    key_prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropCachedDenials(Command[None]):
    """Forget every denial of a tenant that a node may have cached: its plans have changed. Its keys start with one of
    `starts`.
    """

    key_prefixes: tuple[str, ...]


class Store(Protocol):
    """An asynchronous store."""

    keys: Keys

    async def check(self, check: Check) -> Decision:
        """Decide, or raise this check's own error."""

    def submit(self, check: Check, on_result: Callable[[CheckResult], None]) -> None:
        """The same for a protocol on the running loop: `answer` is called once, perhaps before this returns. It is told
        an outcome only if the check's `result_kind` is `OUTCOME`.
        """

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        """Decide each by itself, in order; an error stands in the place of its check and spoils no other."""

    async def run(self, command: Command[ResultT]) -> ResultT: ...

    def set_server_memory(self, memory_bytes: int) -> None:
        """Learn how much memory the smallest server of the store has; 0 if none of them has a limit."""

    def status(self) -> StoreStatus: ...

    async def close(self) -> None: ...


class SyncStore(Protocol):
    """The same for threads."""

    keys: Keys

    def check(self, check: Check) -> Decision: ...

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]: ...

    def run(self, command: Command[ResultT]) -> ResultT: ...

    def status(self) -> StoreStatus: ...

    def close(self) -> None: ...
