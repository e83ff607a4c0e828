"""Turn a caller's arguments into the checks and commands of a store, for both limiters."""

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from limitforge.core.check import TOKEN_BYTES, Check, Failure, FailureName, Hold, build_check, parse_failure
from limitforge.core.decision import Decision
from limitforge.core.exact import parse_duration_us, short_repr, validate_cost
from limitforge.core.handles import EMPTY_TOKEN, Lease, Reservation, decode_handle
from limitforge.core.join import aliases
from limitforge.core.keys import Keys, decode_key, layer_of, parse_key_part
from limitforge.core.lanes import LanesLike, TenantKeys
from limitforge.core.overrides import compile_override, copy_changes
from limitforge.core.plan import Limits, LimitsLike
from limitforge.core.reservations import OnLapse
from limitforge.errors import InvalidInput, LimitforgeError
from limitforge.observability.events import log_event
from limitforge.stores.protocol import (
    ClearOverrides,
    DeleteOverride,
    DropCachedDenials,
    FindMissingOverrides,
    GetOverrides,
    ListOverrides,
    Reset,
    SetOverride,
    Settle,
)

DEFAULT_TENANT = "default"
DEFAULT_PRIORITY = "P0"
DEFAULT_RESERVATION_TTL_SECONDS = 60
MAX_PAGE_SIZE = 1_000

DEFAULT_CLUSTER_LANES = 64
"""The lanes of the default tenant on a Cluster, so that checks without a tenant are spread over its shards."""

KeyPart = str | bytes
"""A tenant, resource or subject: text or any bytes, at most 512 bytes."""

_log = logging.getLogger(__name__)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a batch: the arguments of `Limiter.check`."""

    resource: KeyPart
    subject: KeyPart
    limits: LimitsLike
    cost: int = 1
    costs: Mapping[str, int] | None = None
    tenant: KeyPart = DEFAULT_TENANT
    priority: str = DEFAULT_PRIORITY
    shadow: LimitsLike | None = None
    failure: Failure | FailureName | None = None


def build_keys(url: str, prefix: str, lanes: Mapping[str, LanesLike] | None) -> Keys:
    """Return the keys of a store. On a Cluster the default tenant has 64 lanes unless `lanes` says otherwise."""
    is_cluster = isinstance(url, str) and url.partition(":")[0].endswith("+cluster")
    if lanes is None or (isinstance(lanes, Mapping) and DEFAULT_TENANT not in lanes):
        lanes = ({DEFAULT_TENANT: DEFAULT_CLUSTER_LANES} if is_cluster else {}) | dict(lanes or {})
    return Keys(prefix, lanes)


def log_lane_change(before: TenantKeys, after: TenantKeys) -> None:
    """Log that a scheduled change of lanes is in effect."""
    log_event(
        _log,
        logging.WARNING,
        "store.lanes_changed",
        "a tenant has another number of lanes now, its counters and overrides start afresh",
        key_prefix=before.tenant_prefix,
        lanes=len(after.lane_prefixes),
        lanes_before=len(before.lane_prefixes),
    )


class RequestBuilder:
    """Builds the checks and commands of one store. Every method raises `InvalidInput` if an argument is invalid."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def check(self, request: Request) -> Check:
        check = build_check(
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
        check.failure = parse_failure(request.failure)
        return check

    def reserve(self, request: Request, ttl_seconds: float, on_lapse: str) -> Check:
        check = self.check(request)
        if on_lapse not in tuple(OnLapse):
            raise InvalidInput("on_lapse", f"must be one of {', '.join(OnLapse)}, got {short_repr(on_lapse)}")
        token = check.lease or os.urandom(TOKEN_BYTES)
        record = self.keys.reservation_key(self._lane_prefix(request.tenant, request.subject), token)
        check.hold = Hold(record, token, parse_duration_us("ttl_seconds", ttl_seconds), on_lapse == OnLapse.REFUND)
        return check

    def settle(self, reservation_id: str, cost: int, costs: Mapping[str, int] | None) -> Settle:
        reservation = decode_handle("reservation_id", Reservation, reservation_id, self.keys.prefix)
        cost = validate_cost("cost", cost)
        costs = costs or {}
        names_of_limits = [aliases(limit.name, layer_of(decode_key(limit.key))) for limit in reservation.limits]
        for name in costs:
            if reservation.token != EMPTY_TOKEN and not any(name in names for names in names_of_limits):
                known = ", ".join(limit.name for limit in reservation.limits)
                raise InvalidInput(f"costs.{name!s:.64}", f"no limit of that name was reserved; there are {known}")
        amounts = []
        for limit, names in zip(reservation.limits, names_of_limits, strict=True):
            given = next((name for name in names if name in costs), None)
            amount = cost if given is None else validate_cost(f"costs.{given}", costs[given])
            amounts.append(1 if limit.counts_requests and amount else amount)
        return Settle(reservation, cost, tuple(amounts))

    def lease(self, lease_id: str) -> Lease:
        return decode_handle("lease_id", Lease, lease_id, self.keys.prefix)

    def reset(self, resource: KeyPart, subject: KeyPart, limits: LimitsLike, tenant: KeyPart) -> Reset:
        enabled = Limits.of(limits).all_on()
        check = self.check(Request(resource=resource, subject=subject, limits=enabled, tenant=tenant, cost=0))
        return Reset(tuple(key for _, key, *_ in check.debits))

    def set_override(
        self,
        resource: KeyPart,
        subject: KeyPart,
        changes: Mapping[str, Any],
        limits: LimitsLike,
        ttl_seconds: float,
        tenant: KeyPart,
    ) -> SetOverride:
        resource = parse_key_part("resource", resource)
        compiled = tuple(compile_override(changes, Limits.of(limits).overridable(changes), resource))
        return SetOverride(
            self._lane_prefix(tenant, subject),
            parse_key_part("tenant", tenant),
            resource,
            parse_key_part("subject", subject),
            copy_changes(changes),
            compiled,
            parse_duration_us("ttl_seconds", ttl_seconds),
        )

    def get_overrides(self, subject: KeyPart, tenant: KeyPart) -> GetOverrides:
        return GetOverrides(
            self._lane_prefix(tenant, subject), parse_key_part("tenant", tenant), parse_key_part("subject", subject)
        )

    def list_overrides(self, tenant: KeyPart, cursor: str | None, page: int) -> ListOverrides:
        if type(page) is not int or not 1 <= page <= MAX_PAGE_SIZE:
            raise InvalidInput("page", f"must be from 1 to {MAX_PAGE_SIZE}, got {short_repr(page)}")
        return ListOverrides(
            self.keys.tenant_keys(tenant).lane_prefixes, parse_key_part("tenant", tenant), cursor, page
        )

    def missing_overrides(self, targets: Iterable[tuple[KeyPart, KeyPart, KeyPart]]) -> FindMissingOverrides:
        return FindMissingOverrides(
            tuple(
                (
                    self._lane_prefix(tenant, subject),
                    parse_key_part("resource", resource),
                    parse_key_part("subject", subject),
                )
                for tenant, resource, subject in targets
            )
        )

    def delete_override(self, resource: KeyPart, subject: KeyPart, tenant: KeyPart) -> DeleteOverride:
        return DeleteOverride(
            self._lane_prefix(tenant, subject), parse_key_part("resource", resource), parse_key_part("subject", subject)
        )

    def clear_overrides(self, tenant: KeyPart) -> ClearOverrides:
        return ClearOverrides(self.keys.tenant_keys(tenant).lane_prefixes)

    def drop_denials(self, tenant: KeyPart) -> DropCachedDenials:
        return DropCachedDenials(self.keys.tenant_keys(tenant).all_prefixes)

    def _lane_prefix(self, tenant: KeyPart, subject: KeyPart) -> str:
        return self.keys.tenant_keys(tenant).subject_prefix(parse_key_part("subject", subject))


class RequestBatch:
    """The valid checks of a batch. `results` puts the errors of the others back into their positions."""

    def __init__(self, builder: RequestBuilder, requests: Iterable[Request]) -> None:
        self.checks: list[Check] = []
        self._errors: list[LimitforgeError | None] = []
        for index, request in enumerate(requests):
            try:
                if not isinstance(request, Request):
                    raise InvalidInput(f"requests[{index}]", f"must be a Request, got {short_repr(request)}")
                self.checks.append(builder.check(request))
                self._errors.append(None)
            except LimitforgeError as error:
                self._errors.append(error)

    def results(self, decisions: list[Decision | LimitforgeError]) -> list[Decision | LimitforgeError]:
        """Return one result for each request, given those of `checks`."""
        remaining = iter(decisions)
        return [next(remaining) if error is None else error for error in self._errors]
