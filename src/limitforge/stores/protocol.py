"""The interface between the limiter and a store.

The limiter uses only this interface. Circuit breaker, denial cache and topology live inside the store,
because they need to know whether and when a check was sent (docs/adr/0006). Checks are on
the hot path and have methods of their own, which may batch them. Every other operation is a command object.
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

ResultT = TypeVar("ResultT")


class HotKey(msgspec.Struct, frozen=True):
    """A frequently checked bucket: its key, the checks per second, and its share of all checks (0 to 1)."""

    key: str
    per_second: float
    share: float


class StoreStatus(msgspec.Struct, frozen=True):
    """The state of a store at one moment, for health checks and metrics.

    With several Redis servers, `breaker` and `since` are those of the server in the worst state.
    """

    breaker: str = "closed"
    """State of the circuit breaker: closed, open or half-open."""
    since: float | None = None
    """When `breaker` last changed, in epoch seconds; None if it never did."""
    degraded: dict[str, int] = msgspec.field(default_factory=dict)
    """Checks that were decided without the store, by failure behaviour."""
    denials_cached: int = 0
    """Denials in the denial cache."""
    denial_hits: int = 0
    """Checks that were answered from the denial cache."""
    waiting: int = 0
    """Checks that wait for a reply now."""
    servers: dict[str, str] = msgspec.field(default_factory=dict)
    """Breaker state of each server by its address; empty if the URL names a single server."""
    prepaid_out: int = 0
    """Prepaid cost that this process holds and has not spent yet."""
    hot_keys: list[HotKey] = msgspec.field(default_factory=list)
    """The most frequently checked buckets of the last seconds, the most frequent first."""
    new_buckets_per_minute: int | None = None
    """How many buckets a tenant may create in a minute; None means no bound."""
    overflowed: int = 0
    """Checks that an overflow bucket decided, because the tenant had used up `new_buckets_per_minute`."""


class Command(Generic[ResultT]):
    """A store operation other than a check. The type argument is the type of its result."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Release(Command[None]):
    """Free the slots of a lease. Idempotent."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Renew(Command[bool]):
    """Extend every slot of a lease that is still live; return False if any slot had expired or was released."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Settle(Command[Settlement]):
    """Replace the cost that a reservation holds by the actual cost, `amounts` limit by limit."""

    reservation: Reservation
    cost: int
    amounts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reset(Command[None]):
    """Delete the state of these buckets."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetOverride(Command[Override]):
    """Replace the override of one tenant, resource and subject. `lane_prefix` starts the subject's keys."""

    lane_prefix: str
    tenant: str
    resource: str
    subject: str
    changes: dict[str, object]
    compiled: tuple[CompiledOverride, ...]
    ttl_us: int


@dataclass(frozen=True, slots=True)
class GetOverrides(Command[list[Override]]):
    """Return the live overrides of one subject."""

    lane_prefix: str
    tenant: str
    subject: str


@dataclass(frozen=True, slots=True)
class ListOverrides(Command[OverridePage]):
    """Return a page of a tenant's live overrides: at most `subjects` subjects, by name, from all lanes."""

    lane_prefixes: tuple[str, ...]
    tenant: str
    cursor: str | None
    page_size: int


@dataclass(frozen=True, slots=True)
class FindMissingOverrides(Command[list[int]]):
    """Return the positions of the targets without a live override. A target is (lane prefix, resource, subject)."""

    targets: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class DeleteOverride(Command[bool]):
    """Remove one override; return whether it existed."""

    lane_prefix: str
    resource: str
    subject: str


@dataclass(frozen=True, slots=True)
class ClearOverrides(Command[int]):
    """Remove all overrides of a tenant; return how many subjects had one."""

    lane_prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropCachedDenials(Command[None]):
    """Drop the denials of a tenant from the denial cache of every process, because its plans have changed."""

    tenant_prefixes: tuple[str, ...]


class Store(Protocol):
    """An asynchronous store."""

    keys: Keys

    async def check(self, check: Check) -> Decision:
        """Decide one check, or raise its error."""

    def submit(self, check: Check, on_result: Callable[[CheckResult], None]) -> None:
        """Decide one check and pass the result to `on_result`, exactly once and perhaps before this returns.

        For protocols on the running event loop, which then need no task for each check. The result is a decision or an
        error, or an outcome if the check's `result_kind` is OUTCOME.
        """

    async def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]:
        """Decide each check by itself, in order. An error takes the place of its decision and affects no other."""

    async def run(self, command: Command[ResultT]) -> ResultT: ...

    def set_server_memory(self, memory_bytes: int) -> None:
        """Set the memory limit of the smallest server of the store; 0 if no server has a limit."""

    def status(self) -> StoreStatus: ...

    async def close(self) -> None: ...


class SyncStore(Protocol):
    """A store for threads. See `Store` for its methods."""

    keys: Keys

    def check(self, check: Check) -> Decision: ...

    def check_many(self, checks: Sequence[Check]) -> list[Decision | LimitforgeError]: ...

    def run(self, command: Command[ResultT]) -> ResultT: ...

    def status(self) -> StoreStatus: ...

    def close(self) -> None: ...
