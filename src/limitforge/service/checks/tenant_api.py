"""The other calls that take an API key: leases, reservations, usage and explain."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.model import KeyScope
from limitforge.catalog.snapshot import Selection
from limitforge.core.decision import Decision
from limitforge.core.exact import validate_cost
from limitforge.core.join import LAYER_NAMES
from limitforge.core.overrides import ANY_RESOURCE
from limitforge.core.reservations import OnLapse
from limitforge.errors import Conflict, InvalidInput, LimitforgeError
from limitforge.limiter import Limiter
from limitforge.request import DEFAULT_RESERVATION_TTL_SECONDS, Request
from limitforge.service.checks.body_sizes import SMALL_BODY_BYTES
from limitforge.service.checks.handler import CheckHandler, resolve_priority
from limitforge.service.checks.request_bodies import CheckBody, decode_body
from limitforge.service.checks.responses import JSON_TYPE, Response, decision_body
from limitforge.service.checks.sealed_ids import IdSealer

_encode = msgspec.json.Encoder().encode


class ReserveBody(CheckBody, forbid_unknown_fields=True):
    """The body of `POST /v1/reserve`: a check, how long the reservation lasts, and what happens when it expires."""

    ttl_seconds: float = DEFAULT_RESERVATION_TTL_SECONDS
    on_lapse: str = OnLapse.KEEP.value


class SettleBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/settle`."""

    reservation_id: str
    cost: int
    costs: dict[str, int] | None = None


class LeaseBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/release` and `POST /v1/renew`."""

    lease_id: str


_decode_reserve = msgspec.json.Decoder(ReserveBody).decode
_decode_settle = msgspec.json.Decoder(SettleBody).decode
_decode_lease = msgspec.json.Decoder(LeaseBody).decode
_decode_check = msgspec.json.Decoder(CheckBody).decode

TenantCall = Callable[[Caller, bytes], Awaitable[Response]]


class TenantApi:
    """One method for each call. It receives the caller and the body, and returns the response."""

    def __init__(self, limiter: Limiter, check_handler: CheckHandler, id_sealer: IdSealer) -> None:
        self._limiter = limiter
        self._check_handler = check_handler
        self._id_sealer = id_sealer
        self.post_calls: dict[str, tuple[KeyScope, TenantCall]] = {
            "release": (KeyScope.CHECK, self._release),
            "renew": (KeyScope.CHECK, self._renew),
            "reserve": (KeyScope.CHECK, self._reserve),
            "settle": (KeyScope.CHECK, self._settle),
            "explain": (KeyScope.USAGE, self._explain),
        }
        """By the last part of the path: the scope that the key needs, and the call."""

    async def respond(self, call: TenantCall, caller: Caller, body: bytes) -> Response:
        """Answer one of `post_calls`. The caller's key is charged for a large body that is invalid."""
        invalid_bodies = self._check_handler.invalid_bodies
        if len(body) > SMALL_BODY_BYTES:
            invalid_bodies.require_budget(caller.key.id)
        try:
            return await call(caller, body)
        except LimitforgeError as error:
            invalid_bodies.charge_error(error, caller.key.id, len(body))
            raise

    async def _reserve(self, caller: Caller, body: bytes) -> Response:
        reserve = decode_body(_decode_reserve, body)
        selection = self._check_handler.select(caller, reserve)
        decision = await self._limiter.reserve(
            selection.counted_resource or reserve.resource,
            reserve.subject,
            limits=selection.limits,
            cost=reserve.cost,
            costs=reserve.costs,
            ttl_seconds=reserve.ttl_seconds,
            on_lapse=reserve.on_lapse,
            tenant=caller.key.tenant_id,
            # An empty priority is accepted here as none; `/v1/check` rejects it.
            priority=resolve_priority(caller, selection, reserve.resource, reserve.priority or None),
            failure=selection.failure,
        )
        return self._check_handler.decision_response(caller, selection, reserve.subject, decision)

    async def _settle(self, caller: Caller, body: bytes) -> Response:
        settle = decode_body(_decode_settle, body)
        reservation_id = self._id_sealer.open(caller.key.tenant_id, settle.reservation_id, "reservation_id")
        settlement = await self._limiter.settle(reservation_id, settle.cost, costs=settle.costs)
        return Response(200, JSON_TYPE, b"", _encode(settlement))

    async def _release(self, caller: Caller, body: bytes) -> Response:
        sealed_id = decode_body(_decode_lease, body).lease_id
        await self._limiter.release(self._id_sealer.open(caller.key.tenant_id, sealed_id, "lease_id"))
        return Response(200, JSON_TYPE, b"", b'{"released":true}')

    async def _renew(self, caller: Caller, body: bytes) -> Response:
        sealed_id = decode_body(_decode_lease, body).lease_id
        if not await self._limiter.renew(self._id_sealer.open(caller.key.tenant_id, sealed_id, "lease_id")):
            raise Conflict("lease_id: the lease has expired or was released; take a new one")
        return Response(200, JSON_TYPE, b"", b'{"renewed":true}')

    async def usage(self, caller: Caller, query: dict[str, str]) -> Response:
        """Return the state of the limits, without taking anything."""
        unknown = query.keys() - {"resource", "subject", "plan_id"}
        if unknown:
            raise InvalidInput(min(unknown)[:64], "unknown parameter; valid are resource, subject and plan_id")
        for field in ("resource", "subject"):
            if field not in query:
                raise InvalidInput(field, "is required")
        check = CheckBody(query["resource"], query["subject"], cost=0, plan_id=query.get("plan_id"))
        selection, request = self._check_handler.build_request(caller, check)
        decision = await self._peek(request)
        body = decision_body(decision, selection, None, None)
        return Response(200, JSON_TYPE, selection.headers.block(decision), _encode(body))

    async def _explain(self, caller: Caller, body: bytes) -> Response:
        check = decode_body(_decode_check, body)
        selection, request = self._check_handler.build_request(caller, check)
        validate_cost("cost", check.cost)
        for name, cost in (check.costs or {}).items():
            validate_cost(name, cost)
        decision = await self._peek(request, check.costs and dict.fromkeys(check.costs, 0))
        explanation = {
            "decision": decision_body(decision, selection, None, None),
            "tenant": {"id": caller.key.tenant_id, "mode": caller.snapshot.tenant.mode},
            "resource": request.resource,
            "priority": request.priority,
            "failure": request.failure,
            **_selected_plans(selection),
            "override": await self._find_override(caller, str(request.resource), check.subject),
            "why": _reasons(selection, check, caller),
        }
        return Response(200, JSON_TYPE, b"", _encode(explanation))

    async def _peek(self, request: Request, costs: dict[str, int] | None = None) -> Decision:
        """Return the decision for cost 0, which takes nothing. `costs` are all 0; the limiter checks their names."""
        return await self._limiter.check(
            request.resource,
            request.subject,
            limits=request.limits,
            cost=0,
            costs=costs,
            tenant=request.tenant,
            priority=request.priority,
            failure=request.failure,
        )

    async def _find_override(self, caller: Caller, resource: str, subject: str) -> dict[str, Any] | None:
        for candidate in (resource, ANY_RESOURCE):
            override = await self._limiter.get_override(candidate, subject, tenant=caller.key.tenant_id)
            if override is not None:
                return {"resource": override.resource, "limits": override.limits, "expires_at": override.expires_at}
        return None


def _selected_plans(selection: Selection) -> dict[str, Any]:
    policy = selection.policy
    return {
        "policy": None
        if policy is None
        else {"id": policy.id, "resource": policy.resource, "mode": policy.mode, "plan_id": policy.plan_id},
        "plans": [
            {"place": LAYER_NAMES[layer], "id": plan.id, "name": plan.name, "version": plan.version}
            for layer, plan in selection.plans
        ],
    }


def _reasons(selection: Selection, check: CheckBody, caller: Caller) -> list[str]:
    """Return one sentence for each step of the selection, in order."""
    policy = selection.policy
    reasons = []
    if check.plan_id is not None:
        reasons.append("the check names a plan, which replaces the plans of the tenant and the policy")
    elif caller.key.plan_id is not None:
        reasons.append("the key has its own plan, which replaces the tenant's default plan")
    if policy is None:
        reasons.append("no policy matches this resource")
    else:
        reasons.append(f"the most specific policy that matches this resource is {policy.resource}")
    if selection.counted_resource is not None and selection.counted_resource != check.resource:
        reasons.append(
            f"the policy has parameters: all resources that match it share the counters of {selection.counted_resource}"
        )
    if not selection.plans:
        reasons.append("no plan applies, so there are no limits")
    if selection.mode.value != "on":
        reasons.append(f"the mode of the policy, tenant or service makes all limits {selection.mode.value}")
    return reasons
