"""The use case: what is asked becomes a check on a store, and its verdict a decision. For an event loop."""

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
    DEFAULT_HOLD_SECONDS,
    DEFAULT_PRIORITY,
    DEFAULT_TENANT,
    KeyPart,
    Request,
    RequestBatch,
    RequestBuilder,
    build_keys,
)
from limitforge.stores import connect
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import Release, Renew, Store, StoreStatus


class Limiter:
    """Decides on a store, for an event loop. One limiter serves any number of concurrent callers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = store.keys
        self._requests = RequestBuilder(store.keys)

    @property
    def store(self) -> Store:
        """The store that this limiter decides on."""
        return self._store

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
        """A limiter on `memory://`, `redis://…`, `redis+sentinel://…` or `redis+cluster://…`. Nothing is opened before
        the first check.

        `key_prefix` keeps apart what shares a Redis. `lanes` says which tenants are too big for one shard of a Cluster.
        `options` say how long a check may take and what happens when Redis can't decide. A `clock` replaces the store's
        own time: for tests and replays only.
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
        """Take `cost` from every limit, or nothing from any if one has no room. Cost 0 looks without taking.

        `costs` gives limits costs of their own by name. `shadow` is a candidate plan that is judged beside the live one
        and changes nothing of it. `failure` is what happens if the store can't decide this one. A denial is a value,
        not an exception.
        """
        check = build_check(self._keys, limits, resource, subject, cost, costs, tenant, priority, shadow)
        if failure is not None:
            check.failure = parse_failure(failure)
        return await self._store.check(check)

    def submit(
        self,
        answer: Callable[[Decision | LimitforgeError], None],
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
        """`check` for a protocol on the running event loop: without a task or a future.

        `answer` is called once, with the decision or with what was wrong, perhaps before this returns. What is wrong
        with the arguments is raised.
        """
        check = build_check(self._keys, limits, resource, subject, cost, costs, tenant, priority, shadow)
        if failure is not None:
            check.failure = parse_failure(failure)
        self._store.submit(check, cast("Callable[[CheckResult], None]", answer))  # it is not raw

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

        Prepare again once `PreparedCheck.is_current` is false: the tenant's keys have moved to other lanes.
        """
        keys = self._keys
        return prepare_check(keys, keys.generation, Limits.of(limits), resource, tenant, priority, shadow)

    def submit_prepared(self, check: Check, on_result: Callable[[CheckResult], None]) -> None:
        """Decide a check that `PreparedCheck.bind` returned: the fastest way, on the running event loop.

        `on_result` is called once, perhaps before this returns. It receives the numbers that the store sent (an
        `Outcome` or a `CompactOutcome`) unless there is more to say, else a `Decision` or an error. The service renders
        a response from these numbers without building a `Decision`.
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
        """The general form of `check`: each limit with its own resource, subject and cost, deciding together."""
        check = build_check_from_entries(self._keys, entries, tenant=tenant, priority=priority)
        check.failure = parse_failure(failure)
        return await self._store.check(check)

    async def check_many(self, requests: Iterable[Request]) -> list[Decision | LimitforgeError]:
        """Independent checks in one call, judged in order at one time. A check that fails has its error in its place
        and spoils no other.
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
        ttl_seconds: float = DEFAULT_HOLD_SECONDS,
        on_lapse: str = OnLapse.KEEP,
        tenant: KeyPart = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        failure: Failure | FailureName | None = None,
    ) -> Decision:
        """A check that holds an estimate until `settle` tells the real cost, or until it lapses and is kept or
        refunded.
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
        """Replace a reservation's estimate by its real cost, once however often it is called."""
        return await self._store.run(self._requests.settle(reservation_id, cost, costs))

    async def release(self, lease_id: str) -> None:
        """Give the slots of a concurrency limit back. Releasing twice, or too late, is fine."""
        await self._store.run(Release(self._requests.lease(lease_id)))

    async def renew(self, lease_id: str) -> bool:
        """Hold the slots for another TTL; False if any of them had gone stale or was released."""
        return await self._store.run(Renew(self._requests.lease(lease_id)))

    async def reset(
        self, resource: KeyPart, subject: KeyPart, *, limits: LimitsLike, tenant: KeyPart = DEFAULT_TENANT
    ) -> None:
        """Forget what these limits have counted, in the buckets that this check would use."""
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
        """Other numbers for one subject: `{"burst": {"limit": 500}}`, or `"unlimited"` or `"blocked"` for a limit's
        fields.

        In force from the next check on, on every node, until `ttl_seconds` have passed. `resource` may be `*`; an exact
        one wins. `limits` are those that it changes: their other numbers stay as they are now.
        """
        return await self._store.run(
            self._requests.set_override(resource, subject, changes, limits, ttl_seconds, tenant)
        )

    async def get_override(
        self, resource: KeyPart, subject: KeyPart, *, tenant: KeyPart = DEFAULT_TENANT
    ) -> Override | None:
        """The live override of exactly this resource (or `*`) and subject."""
        found = await self._store.run(self._requests.get_overrides(subject, tenant))
        return next((override for override in found if override.resource == parse_key_part("resource", resource)), None)

    async def list_overrides(
        self, *, tenant: KeyPart = DEFAULT_TENANT, cursor: str | None = None, page: int = 100
    ) -> OverridePage:
        """The live overrides of a tenant, `page` subjects at a time."""
        return await self._store.run(self._requests.list_overrides(tenant, cursor, page))

    async def missing_overrides(self, places: Iterable[tuple[KeyPart, KeyPart, KeyPart]]) -> list[int]:
        """Return the positions of those overrides, each (tenant, resource, subject), that are not in force."""
        return await self._store.run(self._requests.missing_overrides(places))

    async def delete_override(self, resource: KeyPart, subject: KeyPart, *, tenant: KeyPart = DEFAULT_TENANT) -> bool:
        """Back to the plan's numbers; tells whether there was an override."""
        return await self._store.run(self._requests.delete_override(resource, subject, tenant))

    async def clear_overrides(self, *, tenant: KeyPart = DEFAULT_TENANT) -> int:
        """Remove all overrides of a tenant; tells how many subjects had any."""
        return await self._store.run(self._requests.clear_overrides(tenant))

    async def drop_denials(self, *, tenant: KeyPart = DEFAULT_TENANT) -> None:
        """Forget the denials of a tenant that any node has cached. Resets, settlements, overrides and limits with other
        numbers need no such call.
        """
        await self._store.run(self._requests.drop_denials(tenant))

    def set_lanes(self, tenant: str, lanes: LanesLike) -> None:
        """How many lanes a tenant has from now on. Say it before its first check, and alike on every node."""
        self._keys.set_lanes(tenant, parse_lanes({tenant: lanes})[tenant])

    def set_server_memory(self, memory_bytes: int) -> None:
        """Tell the store how much memory its smallest server has, 0 if no server has a limit."""
        self._store.set_server_memory(memory_bytes)

    def status(self) -> StoreStatus:
        """How the store is doing, without asking it."""
        return self._store.status()

    async def close(self) -> None:
        """Let go of the store's connections."""
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
