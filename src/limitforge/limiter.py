"""The use case: what is asked becomes a check on a store, and its verdict a decision.

`Limiter` is for an event loop, `SyncLimiter` for threads. Both only translate: everything that they share is in
`_Requests`.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import msgspec

from limitforge.core.check import (
    TOKEN_BYTES,
    Check,
    Entry,
    Failure,
    FailureName,
    Hold,
    check_of,
    check_of_entries,
    failure_of,
)
from limitforge.core.clock import Clock
from limitforge.core.decision import Decision
from limitforge.core.exact import cost_of, duration_us, shown
from limitforge.core.keys import Keys, text
from limitforge.core.limits import Mode
from limitforge.core.overrides import Override, OverridePage, compile_override, plain_changes
from limitforge.core.plan import Limits, LimitsLike
from limitforge.core.reservations import OnLapse, Settlement
from limitforge.core.tickets import NOTHING, Lease, Reservation, read_ticket
from limitforge.errors import InvalidInput, LimitforgeError
from limitforge.stores import connect, connect_sync
from limitforge.stores.options import StoreOptions
from limitforge.stores.protocol import (
    ClearOverrides,
    DeleteOverride,
    DropDenials,
    GetOverrides,
    ListOverrides,
    Release,
    Renew,
    Reset,
    SetOverride,
    Settle,
    Store,
    StoreStatus,
    SyncStore,
)

DEFAULT_TENANT = "default"
DEFAULT_PRIORITY = "P0"
DEFAULT_HOLD_SECONDS = 60
MAX_PAGE = 1_000

Name = str | bytes


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a batch: the arguments of `check`."""

    resource: Name
    subject: Name
    limits: LimitsLike
    cost: int = 1
    costs: Mapping[str, int] | None = None
    tenant: Name = DEFAULT_TENANT
    priority: str = DEFAULT_PRIORITY
    shadow: LimitsLike | None = None
    failure: Failure | FailureName | None = None


class _Requests:
    """Turns what a caller says into what a store takes, and refuses what is wrong with it."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def check(self, request: Request) -> Check:
        check = check_of(
            self.keys,
            request.limits,
            request.resource,
            request.subject,
            request.cost,
            request.costs,
            request.tenant,
            request.priority,
            request.shadow,
        )
        check.failure = failure_of(request.failure)
        return check

    def reserve(self, request: Request, ttl_seconds: float, on_lapse: str) -> Check:
        check = self.check(request)
        if on_lapse not in tuple(OnLapse):
            raise InvalidInput("on_lapse", f"must be one of {', '.join(OnLapse)}, got {shown(on_lapse)}")
        token = os.urandom(TOKEN_BYTES)
        record = self.keys.reservation(self.keys.tenant(request.tenant), token)
        check.hold = Hold(record, token, duration_us("ttl_seconds", ttl_seconds), on_lapse == OnLapse.REFUND)
        return check

    def settle(self, reservation_id: str, cost: int, costs: Mapping[str, int] | None) -> Settle:
        reservation = read_ticket("reservation_id", Reservation, reservation_id, self.keys.prefix)
        cost = cost_of("cost", cost)
        names = [limit.name for limit in reservation.limits]
        for name in costs or {}:
            if name not in names and reservation.token != NOTHING:
                raise InvalidInput(
                    f"costs.{name!s:.64}", f"no limit of that name was reserved; there are {', '.join(names)}"
                )
        amounts = []
        for limit in reservation.limits:
            amount = cost_of(f"costs.{limit.name}", (costs or {}).get(limit.name, cost))
            amounts.append(1 if limit.requests and amount else amount)
        return Settle(reservation, cost, tuple(amounts))

    def lease(self, lease_id: str) -> Lease:
        return read_ticket("lease_id", Lease, lease_id, self.keys.prefix)

    def reset(self, resource: Name, subject: Name, limits: LimitsLike, tenant: Name) -> Reset:
        every = Limits(*(replace(limit, mode=Mode.ON) for limit in Limits.of(limits)))  # also those that are off
        check = self.check(Request(resource=resource, subject=subject, limits=every, tenant=tenant, cost=0))
        return Reset(tuple(key for _, key, *_ in check.takes))

    def set_override(
        self,
        resource: Name,
        subject: Name,
        changes: Mapping[str, Any],
        limits: LimitsLike,
        ttl_seconds: float,
        tenant: Name,
    ) -> SetOverride:
        compiled = tuple(compile_override(changes, Limits.of(limits)))
        return SetOverride(
            self.keys.tenant(tenant),
            text("tenant", tenant),
            text("resource", resource),
            text("subject", subject),
            plain_changes(changes),
            compiled,
            duration_us("ttl_seconds", ttl_seconds),
        )

    def get_overrides(self, subject: Name, tenant: Name) -> GetOverrides:
        return GetOverrides(self.keys.tenant(tenant), text("tenant", tenant), text("subject", subject))

    def list_overrides(self, tenant: Name, cursor: str | None, page: int) -> ListOverrides:
        if type(page) is not int or not 1 <= page <= MAX_PAGE:
            raise InvalidInput("page", f"must be from 1 to {MAX_PAGE}, got {shown(page)}")
        return ListOverrides(self.keys.tenant(tenant), text("tenant", tenant), cursor, page)

    def delete_override(self, resource: Name, subject: Name, tenant: Name) -> DeleteOverride:
        return DeleteOverride(self.keys.tenant(tenant), text("resource", resource), text("subject", subject))


class _Batch:
    """The checks of a batch that make sense, and the errors of those that don't, each in its place."""

    def __init__(self, build: _Requests, requests: Iterable[Request]) -> None:
        self.checks: list[Check] = []
        self._refused: list[LimitforgeError | None] = []
        for at, request in enumerate(requests):
            try:
                if not isinstance(request, Request):
                    raise InvalidInput(f"requests[{at}]", f"must be a Request, got {shown(request)}")
                self.checks.append(build.check(request))
                self._refused.append(None)
            except LimitforgeError as error:
                self._refused.append(error)

    def answers(self, judged: list[Decision | LimitforgeError]) -> list[Decision | LimitforgeError]:
        remaining = iter(judged)
        return [next(remaining) if refused is None else refused for refused in self._refused]


class Limiter:
    """Decides on a store, for an event loop. One limiter serves any number of concurrent callers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = store.keys
        self._requests = _Requests(store.keys)

    @classmethod
    def connect(
        cls, url: str, *, key_prefix: str = "lf", clock: Clock | None = None, options: StoreOptions | None = None
    ) -> Self:
        """A limiter on `memory://` or `redis://…`. Nothing is opened before the first check.

        `key_prefix` keeps apart what shares a Redis. `options` say how long a check may take and what happens when
        Redis can't decide. A `clock` replaces the store's own time: for tests and replays only.
        """
        return cls(connect(url, keys=Keys(key_prefix), clock=clock, options=options))

    async def check(
        self,
        resource: Name,
        subject: Name,
        *,
        limits: LimitsLike,
        cost: int = 1,
        costs: Mapping[str, int] | None = None,
        tenant: Name = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        shadow: LimitsLike | None = None,
        failure: Failure | FailureName | None = None,
    ) -> Decision:
        """Take `cost` from every limit, or nothing from any if one has no room. Cost 0 looks without taking.

        `costs` gives limits costs of their own by name. `shadow` is a candidate plan that is judged beside the live one
        and changes nothing of it. `failure` is what happens if the store can't decide this one. A denial is a value,
        not an exception.
        """
        check = check_of(self._keys, limits, resource, subject, cost, costs, tenant, priority, shadow)
        if failure is not None:
            check.failure = failure_of(failure)
        return await self._store.check(check)

    def submit(
        self,
        answer: Callable[[Decision | LimitforgeError], None],
        resource: Name,
        subject: Name,
        *,
        limits: LimitsLike,
        cost: int = 1,
        costs: Mapping[str, int] | None = None,
        tenant: Name = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        failure: Failure | FailureName | None = None,
    ) -> None:
        """`check` for a protocol on the running event loop: without a task or a future.

        `answer` is called once, with the decision or with what was wrong, perhaps before this returns. What is wrong
        with the arguments is raised.
        """
        check = check_of(self._keys, limits, resource, subject, cost, costs, tenant, priority)
        if failure is not None:
            check.failure = failure_of(failure)
        self._store.submit(check, answer)

    async def check_entries(
        self,
        entries: Iterable[Entry],
        *,
        tenant: Name = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        failure: Failure | FailureName | None = None,
    ) -> Decision:
        """The general form of `check`: each limit with its own resource, subject and cost, deciding together."""
        check = check_of_entries(self._keys, entries, tenant=tenant, priority=priority)
        check.failure = failure_of(failure)
        return await self._store.check(check)

    async def check_many(self, requests: Iterable[Request]) -> list[Decision | LimitforgeError]:
        """Independent checks in one call, judged in order at one time. A check that fails has its error in its place
        and spoils no other.
        """
        batch = _Batch(self._requests, requests)
        return batch.answers(await self._store.check_many(batch.checks))

    async def reserve(
        self,
        resource: Name,
        subject: Name,
        *,
        limits: LimitsLike,
        cost: int,
        costs: Mapping[str, int] | None = None,
        ttl_seconds: float = DEFAULT_HOLD_SECONDS,
        on_lapse: str = OnLapse.KEEP,
        tenant: Name = DEFAULT_TENANT,
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

    async def reset(self, resource: Name, subject: Name, *, limits: LimitsLike, tenant: Name = DEFAULT_TENANT) -> None:
        """Forget what these limits have counted, in the buckets that this check would use."""
        await self._store.run(self._requests.reset(resource, subject, limits, tenant))

    async def set_override(
        self,
        resource: Name,
        subject: Name,
        changes: Mapping[str, Any],
        *,
        limits: LimitsLike,
        ttl_seconds: float,
        tenant: Name = DEFAULT_TENANT,
    ) -> Override:
        """Other numbers for one subject: `{"burst": {"limit": 500}}`, or `"unlimited"` or `"blocked"` for a limit's
        fields.

        In force from the next check on, on every node, until `ttl_seconds` have passed. `resource` may be `*`; an exact
        one wins. `limits` are those that it changes: their other numbers stay as they are now.
        """
        return await self._store.run(
            self._requests.set_override(resource, subject, changes, limits, ttl_seconds, tenant)
        )

    async def get_override(self, resource: Name, subject: Name, *, tenant: Name = DEFAULT_TENANT) -> Override | None:
        """The live override of exactly this resource (or `*`) and subject."""
        found = await self._store.run(self._requests.get_overrides(subject, tenant))
        return next((override for override in found if override.resource == text("resource", resource)), None)

    async def list_overrides(
        self, *, tenant: Name = DEFAULT_TENANT, cursor: str | None = None, page: int = 100
    ) -> OverridePage:
        """The live overrides of a tenant, `page` subjects at a time."""
        return await self._store.run(self._requests.list_overrides(tenant, cursor, page))

    async def delete_override(self, resource: Name, subject: Name, *, tenant: Name = DEFAULT_TENANT) -> bool:
        """Back to the plan's numbers; tells whether there was an override."""
        return await self._store.run(self._requests.delete_override(resource, subject, tenant))

    async def clear_overrides(self, *, tenant: Name = DEFAULT_TENANT) -> int:
        """Remove all overrides of a tenant; tells how many subjects had any."""
        return await self._store.run(ClearOverrides(self._requests.keys.tenant(tenant)))

    async def drop_denials(self, *, tenant: Name = DEFAULT_TENANT) -> None:
        """Forget the denials of a tenant that any node has cached. Resets, settlements, overrides and limits with other
        numbers need no such call.
        """
        await self._store.run(DropDenials(self._requests.keys.tenant(tenant)))

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


class SyncLimiter:
    """Decides on a store, for threads: `Limiter` without `await`."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self._keys = store.keys
        self._requests = _Requests(store.keys)

    @classmethod
    def connect(
        cls, url: str, *, key_prefix: str = "lf", clock: Clock | None = None, options: StoreOptions | None = None
    ) -> Self:
        """A limiter on `memory://` or `redis://…`. Nothing is opened before the first check.

        `key_prefix` keeps apart what shares a Redis. `options` say how long a check may take and what happens when
        Redis can't decide. A `clock` replaces the store's own time: for tests and replays only.
        """
        return cls(connect_sync(url, keys=Keys(key_prefix), clock=clock, options=options))

    def check(
        self,
        resource: Name,
        subject: Name,
        *,
        limits: LimitsLike,
        cost: int = 1,
        costs: Mapping[str, int] | None = None,
        tenant: Name = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        shadow: LimitsLike | None = None,
        failure: Failure | FailureName | None = None,
    ) -> Decision:
        """Take `cost` from every limit, or nothing from any if one has no room. Cost 0 looks without taking.

        `costs` gives limits costs of their own by name. `shadow` is a candidate plan that is judged beside the live one
        and changes nothing of it. `failure` is what happens if the store can't decide this one. A denial is a value,
        not an exception.
        """
        check = check_of(self._keys, limits, resource, subject, cost, costs, tenant, priority, shadow)
        if failure is not None:
            check.failure = failure_of(failure)
        return self._store.check(check)

    def check_entries(
        self,
        entries: Iterable[Entry],
        *,
        tenant: Name = DEFAULT_TENANT,
        priority: str = DEFAULT_PRIORITY,
        failure: Failure | FailureName | None = None,
    ) -> Decision:
        """The general form of `check`: each limit with its own resource, subject and cost, deciding together."""
        check = check_of_entries(self._keys, entries, tenant=tenant, priority=priority)
        check.failure = failure_of(failure)
        return self._store.check(check)

    def check_many(self, requests: Iterable[Request]) -> list[Decision | LimitforgeError]:
        """Independent checks in one call, judged in order at one time. A check that fails has its error in its place
        and spoils no other.
        """
        batch = _Batch(self._requests, requests)
        return batch.answers(self._store.check_many(batch.checks))

    def reserve(
        self,
        resource: Name,
        subject: Name,
        *,
        limits: LimitsLike,
        cost: int,
        costs: Mapping[str, int] | None = None,
        ttl_seconds: float = DEFAULT_HOLD_SECONDS,
        on_lapse: str = OnLapse.KEEP,
        tenant: Name = DEFAULT_TENANT,
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
        return self._store.check(self._requests.reserve(request, ttl_seconds, on_lapse))

    def settle(self, reservation_id: str, cost: int, *, costs: Mapping[str, int] | None = None) -> Settlement:
        """Replace a reservation's estimate by its real cost, once however often it is called."""
        return self._store.run(self._requests.settle(reservation_id, cost, costs))

    def release(self, lease_id: str) -> None:
        """Give the slots of a concurrency limit back. Releasing twice, or too late, is fine."""
        self._store.run(Release(self._requests.lease(lease_id)))

    def renew(self, lease_id: str) -> bool:
        """Hold the slots for another TTL; False if any of them had gone stale or was released."""
        return self._store.run(Renew(self._requests.lease(lease_id)))

    def reset(self, resource: Name, subject: Name, *, limits: LimitsLike, tenant: Name = DEFAULT_TENANT) -> None:
        """Forget what these limits have counted, in the buckets that this check would use."""
        self._store.run(self._requests.reset(resource, subject, limits, tenant))

    def set_override(
        self,
        resource: Name,
        subject: Name,
        changes: Mapping[str, Any],
        *,
        limits: LimitsLike,
        ttl_seconds: float,
        tenant: Name = DEFAULT_TENANT,
    ) -> Override:
        """Other numbers for one subject: `{"burst": {"limit": 500}}`, or `"unlimited"` or `"blocked"` for a limit's
        fields.

        In force from the next check on, on every node, until `ttl_seconds` have passed. `resource` may be `*`; an exact
        one wins. `limits` are those that it changes: their other numbers stay as they are now.
        """
        return self._store.run(self._requests.set_override(resource, subject, changes, limits, ttl_seconds, tenant))

    def get_override(self, resource: Name, subject: Name, *, tenant: Name = DEFAULT_TENANT) -> Override | None:
        """The live override of exactly this resource (or `*`) and subject."""
        found = self._store.run(self._requests.get_overrides(subject, tenant))
        return next((override for override in found if override.resource == text("resource", resource)), None)

    def list_overrides(
        self, *, tenant: Name = DEFAULT_TENANT, cursor: str | None = None, page: int = 100
    ) -> OverridePage:
        """The live overrides of a tenant, `page` subjects at a time."""
        return self._store.run(self._requests.list_overrides(tenant, cursor, page))

    def delete_override(self, resource: Name, subject: Name, *, tenant: Name = DEFAULT_TENANT) -> bool:
        """Back to the plan's numbers; tells whether there was an override."""
        return self._store.run(self._requests.delete_override(resource, subject, tenant))

    def clear_overrides(self, *, tenant: Name = DEFAULT_TENANT) -> int:
        """Remove all overrides of a tenant; tells how many subjects had any."""
        return self._store.run(ClearOverrides(self._requests.keys.tenant(tenant)))

    def drop_denials(self, *, tenant: Name = DEFAULT_TENANT) -> None:
        """Forget the denials of a tenant that any node has cached. Resets, settlements, overrides and limits with other
        numbers need no such call.
        """
        self._store.run(DropDenials(self._requests.keys.tenant(tenant)))

    def status(self) -> StoreStatus:
        """How the store is doing, without asking it."""
        return self._store.status()

    def close(self) -> None:
        """Let go of the store's connections."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
