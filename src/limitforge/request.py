"""What a caller asks for, checked and turned into what a store takes: shared by both limiters."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from limitforge.core.check import TOKEN_BYTES, Check, Failure, FailureName, Hold, check_of, failure_of
from limitforge.core.decision import Decision
from limitforge.core.exact import cost_of, duration_us, shown
from limitforge.core.join import aliases
from limitforge.core.keys import Keys, decoded, place_of, text
from limitforge.core.lanes import LanesLike
from limitforge.core.overrides import compile_override, plain_changes
from limitforge.core.plan import Limits, LimitsLike
from limitforge.core.reservations import OnLapse
from limitforge.core.tickets import NOTHING, Lease, Reservation, read_ticket
from limitforge.errors import InvalidInput, LimitforgeError
from limitforge.stores.protocol import (
    ClearOverrides,
    DeleteOverride,
    DropDenials,
    GetOverrides,
    ListOverrides,
    MissingOverrides,
    Reset,
    SetOverride,
    Settle,
)

DEFAULT_TENANT = "default"
DEFAULT_PRIORITY = "P0"
DEFAULT_HOLD_SECONDS = 60
MAX_PAGE = 1_000

CLUSTER_LANES = 64  # of who names no tenant, on a Cluster

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


def keys_for(url: str, prefix: str, lanes: Mapping[str, LanesLike] | None) -> Keys:
    """The keys of a store. On a Cluster, whoever names no tenant is spread over its shards all the same."""
    is_cluster = isinstance(url, str) and url.partition(":")[0].endswith("+cluster")
    if lanes is None or (isinstance(lanes, Mapping) and DEFAULT_TENANT not in lanes):
        lanes = ({DEFAULT_TENANT: CLUSTER_LANES} if is_cluster else {}) | dict(lanes or {})
    return Keys(prefix, lanes)


class Requests:
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
        token = check.lease or os.urandom(TOKEN_BYTES)
        record = self.keys.reservation(self._own(request.tenant, request.subject), token)
        check.hold = Hold(record, token, duration_us("ttl_seconds", ttl_seconds), on_lapse == OnLapse.REFUND)
        return check

    def settle(self, reservation_id: str, cost: int, costs: Mapping[str, int] | None) -> Settle:
        reservation = read_ticket("reservation_id", Reservation, reservation_id, self.keys.prefix)
        cost = cost_of("cost", cost)
        costs = costs or {}
        names = [aliases(limit.name, place_of(decoded(limit.key))) for limit in reservation.limits]
        for name in costs:
            if not any(name in own for own in names) and reservation.token != NOTHING:
                known = ", ".join(limit.name for limit in reservation.limits)
                raise InvalidInput(f"costs.{name!s:.64}", f"no limit of that name was reserved; there are {known}")
        amounts = []
        for limit, own in zip(reservation.limits, names, strict=True):
            given = next((name for name in own if name in costs), None)
            amount = cost if given is None else cost_of(f"costs.{given}", costs[given])
            amounts.append(1 if limit.requests and amount else amount)
        return Settle(reservation, cost, tuple(amounts))

    def lease(self, lease_id: str) -> Lease:
        return read_ticket("lease_id", Lease, lease_id, self.keys.prefix)

    def reset(self, resource: Name, subject: Name, limits: LimitsLike, tenant: Name) -> Reset:
        every = Limits.of(limits).all_on()
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
        resource = text("resource", resource)
        compiled = tuple(compile_override(changes, Limits.of(limits).overridable(changes), resource))
        return SetOverride(
            self._own(tenant, subject),
            text("tenant", tenant),
            resource,
            text("subject", subject),
            plain_changes(changes),
            compiled,
            duration_us("ttl_seconds", ttl_seconds),
        )

    def get_overrides(self, subject: Name, tenant: Name) -> GetOverrides:
        return GetOverrides(self._own(tenant, subject), text("tenant", tenant), text("subject", subject))

    def list_overrides(self, tenant: Name, cursor: str | None, page: int) -> ListOverrides:
        if type(page) is not int or not 1 <= page <= MAX_PAGE:
            raise InvalidInput("page", f"must be from 1 to {MAX_PAGE}, got {shown(page)}")
        return ListOverrides(self.keys.home(tenant).lanes, text("tenant", tenant), cursor, page)

    def missing_overrides(self, places: Iterable[tuple[Name, Name, Name]]) -> MissingOverrides:
        return MissingOverrides(
            tuple(
                (self._own(tenant, subject), text("resource", resource), text("subject", subject))
                for tenant, resource, subject in places
            )
        )

    def delete_override(self, resource: Name, subject: Name, tenant: Name) -> DeleteOverride:
        return DeleteOverride(self._own(tenant, subject), text("resource", resource), text("subject", subject))

    def clear_overrides(self, tenant: Name) -> ClearOverrides:
        return ClearOverrides(self.keys.home(tenant).lanes)

    def drop_denials(self, tenant: Name) -> DropDenials:
        return DropDenials(self.keys.home(tenant).starts)

    def _own(self, tenant: Name, subject: Name) -> str:
        return self.keys.home(tenant).of_subject(text("subject", subject))


class RequestBatch:
    """The checks of a batch that make sense, and the errors of those that don't, each in its place."""

    def __init__(self, build: Requests, requests: Iterable[Request]) -> None:
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
