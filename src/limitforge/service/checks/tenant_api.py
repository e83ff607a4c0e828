"""The other calls that take an API key: leases, reservations, usage, and why a check was decided as it was."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from limitforge.catalog.live.cache.entries import Caller
from limitforge.catalog.model import KeyScope
from limitforge.catalog.snapshot import Selection
from limitforge.core.exact import validate_cost
from limitforge.core.join import LAYER_NAMES
from limitforge.core.overrides import ANY_RESOURCE
from limitforge.core.reservations import OnLapse
from limitforge.errors import Conflict, InvalidInput, LimitforgeError
from limitforge.limiter import Limiter
from limitforge.request import DEFAULT_HOLD_SECONDS
from limitforge.service.checks.handler import CheckHandler, default_priority
from limitforge.service.checks.invalid_bodies import SMALL_BODY
from limitforge.service.checks.request_bodies import CheckBody, decode_body
from limitforge.service.checks.responses import JSON_TYPE, Response, decision_body
from limitforge.service.checks.sealed_ids import IdSealer

_encode = msgspec.json.Encoder().encode


class ReserveBody(CheckBody, forbid_unknown_fields=True):
    """What `POST /v1/reserve` takes: a check, and what happens to what it holds if nobody settles."""

    ttl_seconds: float = DEFAULT_HOLD_SECONDS
    on_lapse: str = OnLapse.KEEP.value


class SettleBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /v1/settle` takes."""

    reservation_id: str
    cost: int
    costs: dict[str, int] | None = None


class LeaseBody(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /v1/release` and `/v1/renew` take."""

    lease_id: str


_decode_reserve = msgspec.json.Decoder(ReserveBody).decode
_decode_settle = msgspec.json.Decoder(SettleBody).decode
_decode_lease = msgspec.json.Decoder(LeaseBody).decode
_decode_check = msgspec.json.Decoder(CheckBody).decode

TenantCall = Callable[[Caller, bytes], Awaitable[Response]]


class TenantApi:
    """One method a call: whoever presented a key, and the body, become an answer."""

    def __init__(self, limiter: Limiter, checks: CheckHandler, tickets: IdSealer) -> None:
        self._limiter = limiter
        self._checks = checks
        self._id_sealer = tickets
        self.post_calls: dict[str, tuple[KeyScope, TenantCall]] = {
            "release": (KeyScope.CHECK, self._release),
            "renew": (KeyScope.CHECK, self._renew),
            "reserve": (KeyScope.CHECK, self._reserve),
            "settle": (KeyScope.CHECK, self._settle),
            "explain": (KeyScope.USAGE, self._explain),
        }

    async def respond(self, call: TenantCall, caller: Caller, body: bytes) -> Response:
        """Answer one of `posts`. A large body that is invalid is charged to the caller's key."""
        refusals = self._checks.invalid_bodies
        if len(body) > SMALL_BODY:
            refusals.require(caller.key.id)
        try:
            return await call(caller, body)
        except LimitforgeError as error:
            refusals.charge_error(error, caller.key.id, len(body))
            raise

    async def _reserve(self, caller: Caller, body: bytes) -> Response:
        asked = decode_body(_decode_reserve, body)
        selection = self._checks.select(caller, asked)
        decision = await self._limiter.reserve(
            selection.template or asked.resource,
            asked.subject,
            limits=selection.limits,
            cost=asked.cost,
            costs=asked.costs,
            ttl_seconds=asked.ttl_seconds,
            on_lapse=asked.on_lapse,
            tenant=caller.key.tenant_id,
            priority=asked.priority or default_priority(caller, selection, asked.resource),
            failure=selection.failure,
        )
        return self._checks.decision_response(caller, selection, asked.subject, decision)

    async def _settle(self, caller: Caller, body: bytes) -> Response:
        asked = decode_body(_decode_settle, body)
        ticket = self._id_sealer.open(caller.key.tenant_id, asked.reservation_id, "reservation_id")
        settlement = await self._limiter.settle(ticket, asked.cost, costs=asked.costs)
        return Response(200, JSON_TYPE, b"", _encode(settlement))

    async def _release(self, caller: Caller, body: bytes) -> Response:
        asked = decode_body(_decode_lease, body)
        await self._limiter.release(self._id_sealer.open(caller.key.tenant_id, asked.lease_id, "lease_id"))
        return Response(200, JSON_TYPE, b"", b'{"released":true}')

    async def _renew(self, caller: Caller, body: bytes) -> Response:
        asked = decode_body(_decode_lease, body)
        if not await self._limiter.renew(self._id_sealer.open(caller.key.tenant_id, asked.lease_id, "lease_id")):
            raise Conflict("lease_id: some of what it held has gone stale or was released; take a new one")
        return Response(200, JSON_TYPE, b"", b'{"renewed":true}')

    async def usage(self, caller: Caller, query: dict[str, str]) -> Response:
        """The state of the limits, without taking anything."""
        unknown = query.keys() - {"resource", "subject", "plan_id"}
        if unknown:
            raise InvalidInput(min(unknown)[:64], "is not a field here; there are resource, subject and plan_id")
        for field in ("resource", "subject"):
            if field not in query:
                raise InvalidInput(field, "is required")
        asked = CheckBody(query["resource"], query["subject"], cost=0, plan_id=query.get("plan_id"))
        selection, request = self._checks.build_request(caller, asked)
        decision = await self._limiter.check(
            request.resource,
            request.subject,
            limits=request.limits,
            cost=0,
            tenant=request.tenant,
            priority=request.priority,
            failure=request.failure,
        )
        return Response(
            200, JSON_TYPE, selection.headers.block(decision), _encode(decision_body(decision, selection, None, None))
        )

    async def _explain(self, caller: Caller, body: bytes) -> Response:
        asked = decode_body(_decode_check, body)
        selection, request = self._checks.build_request(caller, asked)
        validate_cost("cost", asked.cost)
        decision = await self._limiter.check(
            request.resource,
            request.subject,
            limits=request.limits,
            cost=0,
            costs=None
            if asked.costs is None
            else {name: 0 * validate_cost(name, it) for name, it in asked.costs.items()},
            tenant=request.tenant,
            priority=request.priority,
            failure=request.failure,
        )
        told = {
            "decision": decision_body(decision, selection, None, None),
            "tenant": {"id": caller.key.tenant_id, "mode": caller.snapshot.tenant.mode},
            "resource": request.resource,
            "priority": request.priority,
            "failure": request.failure,
            **_selected_plans(selection),
            "override": await self._find_override(caller, str(request.resource), asked.subject),
            "why": _reasons(selection, asked, caller),
        }
        return Response(200, JSON_TYPE, b"", _encode(told))

    async def _find_override(self, caller: Caller, resource: str, subject: str) -> dict[str, Any] | None:
        for wanted in (resource, ANY_RESOURCE):
            found = await self._limiter.get_override(wanted, subject, tenant=caller.key.tenant_id)
            if found is not None:
                return {"resource": found.resource, "limits": found.limits, "expires_at": found.expires_at}
        return None


def _selected_plans(selection: Selection) -> dict[str, Any]:
    policy = selection.policy
    return {
        "policy": None
        if policy is None
        else {"id": policy.id, "resource": policy.resource, "mode": policy.mode, "plan_id": policy.plan_id},
        "plans": [
            {"place": LAYER_NAMES[place], "id": plan.id, "name": plan.name, "version": plan.version}
            for place, plan in selection.plans
        ],
    }


def _reasons(selection: Selection, asked: CheckBody, caller: Caller) -> list[str]:
    """In sentences, in the order in which it was found."""
    policy = selection.policy
    said = []
    if asked.plan_id is not None:
        said.append("the check names a plan, which stands in for those of tenant and policy")
    elif caller.key.plan_id is not None:
        said.append("the key has a plan of its own, which stands in for the tenant's default")
    if policy is None:
        said.append("no policy matches this resource")
    else:
        said.append(f"the most specific policy for this resource is {policy.resource}")
    if selection.template is not None and selection.template != asked.resource:
        said.append(f"it has parameters, so all that it matches is counted as {selection.template}")
    if not selection.plans:
        said.append("no plan applies, so nothing is limited")
    if selection.mode.value != "on":
        said.append(f"a mode above the limits makes all of them {selection.mode.value}")
    return said
