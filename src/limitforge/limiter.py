"""The asyncio limiter: it turns arguments into checks, and its store decides them.

`limiter_sync.py` is generated from this file: run `make generate` after a change.
"""

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, cast

from limitforge.core.check import (
    Check,
    Entry,
    Failure,
    FailureName,
    PreparedCheck,
    ResultKind,
    build_check,
    build_check_from_entries,
    parse_failure,
    prepare_check,
)
from limitforge.core.clock import Clock
from limitforge.core.decision import CheckResult, Decision
from limitforge.core.keys import parse_key_part
from limitforge.core.lanes import LanesLike, parse_lanes
from limitforge.core.overrides import Override, OverridePage
from limitforge.core.plan import Limits, LimitsLike
from limitforge.core.reservations import OnLapse, Settlement
from limitforge.errors import LimitforgeError
from limitforge.request import (
    DEFAULT_PRIORITY,
    DEFAULT_RESERVATION_TTL_SECONDS,
    DEFAULT_TENANT,
    KeyPart,
    Request,
    RequestBatch,
    RequestBuilder,
    build_keys,
    log_lane_change,
)
from limitforge.stores.connect import connect
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Release, Renew, Store, StoreStatus


class Limiter:
    """Decides whether callers may go ahead. For an event loop: one limiter serves any number of concurrent callers.

    Every method raises `InvalidInput` if an argument is invalid. While the store can't be reached, a check is decided
    by its failure behaviour; every other method raises `StoreUnavailable`. `StoreCorrupt` means that a Redis key holds
    a value that is not from limitforge.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = store.keys
        self._requests = RequestBuilder(store.keys)
        self._keys.on_lane_change = log_lane_change

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        key_prefix: str = "lf",
        lanes: Mapping[str, LanesLike] | None = None,
        clock: Clock | None = None,
        options: StoreOptions | None = None,
    ) -> Self:
        """Return a limiter on `memory://`, `redis://…`, `redis+sentinel://…` or `redis+cluster://…`.

        It connects with the first check. `key_prefix` separates programs that share a Redis. `lanes` gives more than
        one lane to tenants that are too big for one shard of a Cluster. `clock` replaces the store's own time, for
        tests and replays only. `options` are the settings of the store: deadline, failure behaviour, caches. Raises
        `InvalidInput` if the URL or a setting is invalid, or if a Redis URL is given without redis-py installed.
        """
        return cls(connect(url, keys=build_keys(url, key_prefix, lanes), clock=clock, options=options))

    async def check(
        self,
        resource: KeyPart,
        subject: KeyPart,
        *,
        limits: LimitsLike,
        cost: int = 1,
        costs: Mapping[str, int] | None = None,
        tenant: KeyPart = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        shadow: LimitsLike | None = None,
        failure: Failure | FailureName | None = None,
    ) -> Decision:
        """Take `cost` from all limits, or from none if it exceeds any of them. A cost of 0 takes nothing (a peek).

        Limits with `count_denied` count denied checks as well. A monitored limit without room takes nothing, and does
        not deny.

        `resource`, `subject` and `tenant` name the buckets, each at most 512 bytes. `limits` are limits or their text,
        such as "100/minute; 10/second". `costs` gives limits costs of their own by name. `priority` is P0 to P3 and
        matters to limits with `shares`. `shadow` is a candidate plan: it is decided in the same call, and does not
        affect the live decision. `failure` is the failure behaviour of this check; None is that of the store.

        A denial is a value, not an exception. Raises `InvalidInput`; `StoreUnavailable` only if the failure behaviour
        is `raise`; `StoreCorrupt`.
        """
        check = build_check(self._keys, limits, resource, subject, cost, costs, tenant, priority, shadow)
        if failure is not None:
            check.failure = parse_failure(failure)
        return await self._store.check(check)

    def submit(
        self,
        on_result: Callable[[Decision | LimitforgeError], None],
        resource: KeyPart,
        subject: KeyPart,
        limits: LimitsLike,
        cost: int = 1,
        costs: Mapping[str, int] | None = None,
        tenant: KeyPart = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        shadow: LimitsLike | None = None,
        failure: Failure | FailureName | None = None,
    ) -> None:
        """Do the same as `check` without a task or a future, for an asyncio protocol on the running event loop.

        `on_result` is called exactly once, with the decision or the error, perhaps before this returns. Raises
        `InvalidInput` if an argument is invalid.
        """
        check = build_check(self._keys, limits, resource, subject, cost, costs, tenant, priority, shadow)
        if failure is not None:
            check.failure = parse_failure(failure)
        self._store.submit(check, cast("Callable[[CheckResult], None]", on_result))  # its result kind is DECISION

    def prepare(
        self,
        resource: KeyPart,
        *,
        limits: LimitsLike,
        tenant: KeyPart = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        shadow: LimitsLike | None = None,
    ) -> PreparedCheck:
        """Prepare what all checks of one resource by the same limits share, for `submit_prepared`.

        The arguments are those of `check`. Prepare again once `PreparedCheck.is_current` is false: then lanes have
        changed. Raises `InvalidInput` if an argument is invalid.
        """
        keys = self._keys
        return prepare_check(keys, keys.generation, Limits.of(limits), resource, tenant, priority, shadow)

    def submit_prepared(self, check: Check, on_result: Callable[[CheckResult], None]) -> None:
        """Decide a check that `PreparedCheck.bind` returned, on the running event loop. This is the fastest way.

        `on_result` is called exactly once, perhaps before this returns. It receives an `Outcome` or a `CompactOutcome`,
        from which the service formats a response without building a `Decision`. It receives a `Decision` if the check
        has a shadow plan or was decided without the store, or an error.
        """
        check.result_kind = ResultKind.OUTCOME
        self._store.submit(check, on_result)

    async def check_entries(
        self,
        entries: Iterable[Entry],
        *,
        tenant: KeyPart = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        failure: Failure | FailureName | None = None,
    ) -> Decision:
        """Check limits that each have a resource, a subject and a cost of their own. They are decided together.

        Entries with the same limit and key are merged, and their costs added. Raises the same errors as `check`.
        """
        check = build_check_from_entries(self._keys, entries, tenant=tenant, priority=priority)
        check.failure = parse_failure(failure)
        return await self._store.check(check)

    async def check_many(self, requests: Iterable[Request]) -> list[Decision | LimitforgeError]:
        """Decide independent checks in one call, in order and at one time. Return the decisions in the same order.

        A check that fails has its error at its position in the list, and affects no other check.
        """
        batch = RequestBatch(self._requests, requests)
        return batch.results(await self._store.check_many(batch.checks))

    async def reserve(
        self,
        resource: KeyPart,
        subject: KeyPart,
        *,
        limits: LimitsLike,
        cost: int,
        costs: Mapping[str, int] | None = None,
        ttl_seconds: float = DEFAULT_RESERVATION_TTL_SECONDS,
        on_lapse: str = OnLapse.KEEP,
        tenant: KeyPart = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        failure: Failure | FailureName | None = None,
    ) -> Decision:
        """Check and hold an estimated cost until `settle` reports the actual cost.

        If the decision is allowed, its `reservation_id` is the argument for `settle`. A reservation that is not settled
        within `ttl_seconds` lapses: with `on_lapse="keep"` its cost stays taken, with "refund" it is given back. Raises
        the same errors as `check`, and `TooManyReservations` if a bucket has 1,000 open reservations.
        """
        request = Request(
            resource=resource,
            subject=subject,
            limits=limits,
            cost=cost,
            costs=costs,
            tenant=tenant,
            priority=priority,
            failure=failure,
        )
        return await self._store.check(self._requests.reserve(request, ttl_seconds, on_lapse))

    async def settle(self, reservation_id: str, cost: int, *, costs: Mapping[str, int] | None = None) -> Settlement:
        """Replace the estimate of a reservation by its actual cost. Idempotent: a second call returns the same result.

        `costs` gives limits costs of their own by name. Raises `UnknownReservation` if the store has no reservation of
        this id, or if it ended more than 24 hours ago; `InvalidInput` and `StoreUnavailable`.
        """
        return await self._store.run(self._requests.settle(reservation_id, cost, costs))

    async def release(self, lease_id: str) -> None:
        """Free the slots of a concurrency limit. Idempotent, also after the lease has expired.

        Raises `InvalidInput` if `lease_id` is not a valid lease id, and `StoreUnavailable`.
        """
        await self._store.run(Release(self._requests.lease(lease_id)))

    async def renew(self, lease_id: str) -> bool:
        """Hold the slots of a lease for another TTL. Return False if any slot had expired or was released.

        Raises `InvalidInput` if `lease_id` is not a valid lease id, and `StoreUnavailable`.
        """
        return await self._store.run(Renew(self._requests.lease(lease_id)))

    async def reset(
        self, resource: KeyPart, subject: KeyPart, *, limits: LimitsLike, tenant: KeyPart = DEFAULT_TENANT
    ) -> None:
        """Delete what these limits have counted, in the buckets that a check with the same arguments uses.

        Raises `InvalidInput` and `StoreUnavailable`.
        """
        await self._store.run(self._requests.reset(resource, subject, limits, tenant))

    async def set_override(
        self,
        resource: KeyPart,
        subject: KeyPart,
        changes: Mapping[str, Any],
        *,
        limits: LimitsLike,
        ttl_seconds: float,
        tenant: KeyPart = DEFAULT_TENANT,
    ) -> Override:
        """Change limits for one subject, in all processes from the next check on, for `ttl_seconds`.

        `changes` maps the name of a limit to its changed fields, `{"burst": {"limit": 500}}`, or to "unlimited" or
        "blocked". `limits` are the limits that it changes; their other fields stay as they are. `resource` may be `*`;
        an override of the exact resource takes precedence. Raises `InvalidInput` if a change is invalid or the subject
        has 64 overrides, and `StoreUnavailable`.
        """
        command = self._requests.set_override(resource, subject, changes, limits, ttl_seconds, tenant)
        return await self._store.run(command)

    async def get_override(
        self, resource: KeyPart, subject: KeyPart, *, tenant: KeyPart = DEFAULT_TENANT
    ) -> Override | None:
        """Return the live override of exactly this resource (or `*`) and subject; None if there is none.

        Raises `InvalidInput` and `StoreUnavailable`.
        """
        overrides = await self._store.run(self._requests.get_overrides(subject, tenant))
        name = parse_key_part("resource", resource)
        return next((override for override in overrides if override.resource == name), None)

    async def list_overrides(
        self, *, tenant: KeyPart = DEFAULT_TENANT, cursor: str | None = None, page: int = 100
    ) -> OverridePage:
        """Return a tenant's live overrides, those of `page` subjects (at most 1,000) at a time.

        Pass the `cursor` of a page to get the next one. Raises `InvalidInput` and `StoreUnavailable`.
        """
        return await self._store.run(self._requests.list_overrides(tenant, cursor, page))

    async def missing_overrides(self, targets: Iterable[tuple[KeyPart, KeyPart, KeyPart]]) -> list[int]:
        """Return the positions of the targets, each (tenant, resource, subject), that have no live override.

        Raises `InvalidInput` and `StoreUnavailable`.
        """
        return await self._store.run(self._requests.missing_overrides(targets))

    async def delete_override(self, resource: KeyPart, subject: KeyPart, *, tenant: KeyPart = DEFAULT_TENANT) -> bool:
        """Delete an override, so that the plan applies again without it. Return whether it existed.

        Raises `InvalidInput` and `StoreUnavailable`.
        """
        return await self._store.run(self._requests.delete_override(resource, subject, tenant))

    async def clear_overrides(self, *, tenant: KeyPart = DEFAULT_TENANT) -> int:
        """Delete all overrides of a tenant. Return how many subjects had one.

        Raises `InvalidInput` and `StoreUnavailable`.
        """
        return await self._store.run(self._requests.clear_overrides(tenant))

    async def drop_denials(self, *, tenant: KeyPart = DEFAULT_TENANT) -> None:
        """Drop a tenant's denials from the denial caches of all processes.

        Resets, settlements, overrides and changed limits do so by themselves. Raises `InvalidInput` and
        `StoreUnavailable`.
        """
        await self._store.run(self._requests.drop_denials(tenant))

    def set_lanes(self, tenant: str, lanes: LanesLike) -> None:
        """Set the number of lanes of a tenant, before its first check and in all processes alike.

        Raises `InvalidInput` if the number is not from 1 to 1,024.
        """
        self._keys.set_lanes(tenant, parse_lanes({tenant: lanes})[tenant])

    def set_server_memory(self, memory_bytes: int) -> None:
        """Set the memory limit of the smallest Redis server, 0 for none. It may lower `new_buckets_per_minute`."""
        self._store.set_server_memory(memory_bytes)

    def status(self) -> StoreStatus:
        """Return the state of the store as this process knows it, without a call to the store."""
        return self._store.status()

    async def close(self) -> None:
        """Close the connections of the store. Don't use the limiter afterwards."""
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
