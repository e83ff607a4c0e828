"""Settings of a store: deadlines, the circuit breaker, caches and bounds."""

from dataclasses import dataclass
from typing import NoReturn

from limitforge.core.check import Failure, FailureName, parse_failure
from limitforge.core.exact import MAX_COUNTER_LIMIT, parse_integer, short_repr
from limitforge.errors import InvalidInput

MAX_DEADLINE_MS = 60_000
MAX_BREAKER_SECONDS = 3_600
MAX_DENIAL_CACHE_MS = 60_000
MAX_SYNC_INTERVAL_MS = 10_000
MAX_REPLICAS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Settings of a store. Raises InvalidInput, naming the setting, if a value is out of bounds.

    A memory store uses only `processes` and `new_buckets_per_minute`. `docs/operations.md` says when to change what.
    """

    failure: Failure | FailureName = Failure.OPEN
    """How checks that name no failure behaviour are decided while the store can't decide: `open` allows them, `closed`
    denies them, `local` counts in this process, `raise` raises StoreUnavailable.
    """
    deadline_ms: float = 50
    """How long a check may take until its failure behaviour decides. 1 to 60,000."""
    processes: int = 1
    """How many processes share the limits. With `failure="local"`, each process uses 1/processes of a limit. With
    `consistency="local"`, it does so until Redis has reported how many processes are alive.
    """
    breaker_failures: int = 3
    """Consecutive failures that open the circuit breaker of a server."""
    breaker_seconds: float = 30
    """How long an open breaker rejects calls before it lets one probe through. 0.001 to 3,600."""
    denial_cache_ms: float = 1_000
    """How long a denial may be answered from the denial cache of this process; 0 disables the cache. Up to 60,000."""
    denial_cache_size: int = 10_000
    """Maximum number of buckets with cached denials."""
    max_waiting: int = 4_000
    """Maximum number of checks that wait for a reply on one event loop; beyond it their failure behaviour decides."""
    sync_interval_ms: float = 200
    """Minimum interval between two top-ups of a prepaid share. 10 to 10,000."""
    wait_replicas: int = 0
    """Replicas that must confirm a write before its decision is returned. A failover does not lose what they have."""
    new_buckets_per_minute: int | None = None
    """How many buckets a tenant may create in a minute, in each lane; above it new subjects share overflow buckets.
    None means no bound.
    """
    cap_budget_by_memory: bool = False
    """Lower `new_buckets_per_minute` if the memory limit of Redis is too small for it."""

    def __post_init__(self) -> None:
        if self.failure is None:
            _refuse("failure", None, f"be one of {', '.join(Failure)}")
        object.__setattr__(self, "failure", parse_failure(self.failure))
        for name in ("processes", "breaker_failures", "denial_cache_size", "max_waiting"):
            object.__setattr__(self, name, parse_integer(name, getattr(self, name), minimum=1))
        _require_between("deadline_ms", self.deadline_ms, 1, MAX_DEADLINE_MS)
        _require_between("breaker_seconds", self.breaker_seconds, 0.001, MAX_BREAKER_SECONDS)
        _require_between("denial_cache_ms", self.denial_cache_ms, 0, MAX_DENIAL_CACHE_MS)
        replicas = parse_integer("wait_replicas", self.wait_replicas, maximum=MAX_REPLICAS)
        object.__setattr__(self, "wait_replicas", replicas)
        if self.new_buckets_per_minute is not None:
            budget = parse_integer(
                "new_buckets_per_minute", self.new_buckets_per_minute, minimum=1, maximum=MAX_COUNTER_LIMIT
            )
            object.__setattr__(self, "new_buckets_per_minute", budget)
        _require_between("sync_interval_ms", self.sync_interval_ms, 10, MAX_SYNC_INTERVAL_MS)


def _require_between(name: str, value: object, lowest: float, highest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        _refuse(name, value, f"be a number from {lowest:g} to {highest:g}")


def _refuse(name: str, value: object, must: str) -> NoReturn:
    raise InvalidInput(name, f"must {must}, got {short_repr(value)}")
