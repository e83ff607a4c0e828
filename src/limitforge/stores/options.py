"""How a shared store is used: how long a check may take, and what happens when the store can't decide."""

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
    """Every number is validated here; `docs/operations.md` says when to change which. Memory stores need none of it.

    `failure` is for checks that say nothing of their own. `nodes` is how many processes share the limits: with `local`,
    each decides by its part. `denial_cache_ms` is how long a denial may be answered without asking (0: never).
    `sync_interval_ms` is how often at most a process pays for more of a leased limit. `wait_replicas` is how many
    replicas must have what was written before a decision is told: what so many have, a failover does not lose.
    `new_buckets_per_minute` is how many buckets a tenant may begin (in each lane); beyond that its new subjects share
    overflow buckets. None: any number. Memory stores use this one too. With `fits_memory`, a store that learns how
    much memory Redis has may lower it.
    """

    failure: Failure | FailureName = Failure.OPEN
    deadline_ms: float = 50
    processes: int = 1
    breaker_failures: int = 3
    breaker_seconds: float = 30
    denial_cache_ms: float = 1_000
    denial_cache_size: int = 10_000
    max_waiting: int = 4_000
    sync_interval_ms: float = 200
    wait_replicas: int = 0
    new_buckets_per_minute: int | None = None
    cap_budget_by_memory: bool = False

    def __post_init__(self) -> None:
        if self.failure is None:
            _refuse("failure", None, f"be one of {', '.join(Failure)}")
        object.__setattr__(self, "failure", parse_failure(self.failure))
        for name in ("processes", "breaker_failures", "denial_cache_size", "max_waiting"):
            object.__setattr__(self, name, parse_integer(name, getattr(self, name), minimum=1))
        _between("deadline_ms", self.deadline_ms, 1, MAX_DEADLINE_MS)
        _between("breaker_seconds", self.breaker_seconds, 0.001, MAX_BREAKER_SECONDS)
        _between("denial_cache_ms", self.denial_cache_ms, 0, MAX_DENIAL_CACHE_MS)
        object.__setattr__(
            self, "wait_replicas", parse_integer("wait_replicas", self.wait_replicas, maximum=MAX_REPLICAS)
        )
        if self.new_buckets_per_minute is not None:
            budget = parse_integer(
                "new_buckets_per_minute", self.new_buckets_per_minute, minimum=1, maximum=MAX_COUNTER_LIMIT
            )
            object.__setattr__(self, "new_buckets_per_minute", budget)
        _between("sync_interval_ms", self.sync_interval_ms, 10, MAX_SYNC_INTERVAL_MS)


def _between(name: str, value: object, lowest: float, highest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        _refuse(name, value, f"be a number from {lowest:g} to {highest:g}")


def _refuse(name: str, value: object, must: str) -> NoReturn:
    raise InvalidInput(name, f"must {must}, got {short_repr(value)}")
