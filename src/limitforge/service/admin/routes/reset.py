"""`/v1/admin/reset`: forget what was counted for one subject."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from pydantic import ConfigDict, Field

from limitforge.catalog.database import queries
from limitforge.catalog.live.cache import CatalogCache
from limitforge.catalog.model import OPERATOR, to_datetime
from limitforge.catalog.snapshot import Snapshot
from limitforge.core.exact import short_repr as quoted
from limitforge.core.join import PlanPart as JoinedPart
from limitforge.core.join import join_limits
from limitforge.core.keys import Layer
from limitforge.core.limits import Limit, Scope
from limitforge.core.plan import MAX_LIMITS, Limits
from limitforge.errors import InvalidInput, NotFound, UnknownKey
from limitforge.limiter import Limiter
from limitforge.service.admin.fields import Id, KeyPart, RequestBody, StrictBool
from limitforge.service.admin.responses import describe_response, json_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import AdminSession, WriteSession

router = admin_router("/reset", "reset")

SUBJECT_SCOPES = (Scope.SUBJECT, Scope.CALLER)
"""The scopes whose buckets are a subject's alone."""
EXAMPLE: Any = {"tenant_id": "ten_1a2b3c4d5e6f7g8h", "resource": "GET:/orders", "subject": "user:42"}


class Reset(RequestBody):
    """Whose counts are forgotten, and for which resource."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    tenant_id: Id
    resource: KeyPart
    subject: KeyPart
    shared: Annotated[StrictBool, Field(description="Also what this subject shares with others of its tenant.")] = False


def _limiter(request: Request) -> Limiter:
    limiter: Limiter = request.app.state.limiter
    return limiter


def _snapshots(request: Request) -> CatalogCache:
    snapshots: CatalogCache = request.app.state.snapshots
    return snapshots


@router.post("", responses=describe_response("ResetAnswer", example={**EXAMPLE, "forgotten": ["burst", "hourly"]}))
async def reset(
    body: Reset,
    session: WriteSession,
    limiter: Annotated[Limiter, Depends(_limiter)],
    snapshots: Annotated[CatalogCache, Depends(_snapshots)],
) -> Response:
    """Forget what was counted for a subject, by every limit that a check of this resource could meet: those of the
    policy, of the tenant's plans, whichever key has them, and of the operator. A token of one tenant leaves the
    operator's alone.
    """
    session.require_tenant(body.tenant_id)
    for field in ("resource", "subject"):
        if not getattr(body, field):
            raise InvalidInput(field, "must not be empty")
    snapshot = await _tenant_snapshot(snapshots, body.tenant_id)
    resource = snapshot.select(body.resource).template or body.resource
    names: dict[str, None] = {}
    for part in _reachable_limits(snapshot, is_fleet=session.tenant_id is None, shared=body.shared):
        await limiter.reset(resource, body.subject, limits=join_limits(part), tenant=body.tenant_id)
        names.update(dict.fromkeys(limit.name for limit in Limits.of(part.limits)))
    told = {"tenant_id": body.tenant_id, "resource": resource, "subject": body.subject, "forgotten": list(names)}
    await _add_audit_entry(session, told)
    return json_response(told)


async def _tenant_snapshot(snapshots: CatalogCache, tenant_id: str) -> Snapshot:
    try:
        if tenant_id != OPERATOR:
            return (await snapshots.find_tenant(tenant_id)).snapshot
    except UnknownKey:
        pass
    raise NotFound(f"tenant_id: there is no tenant {quoted(tenant_id)}")


def _reachable_limits(snapshot: Snapshot, *, is_fleet: bool, shared: bool) -> Iterator[JoinedPart]:
    """Any plan of a tenant may be its default, a key's, a policy's, or named by a check."""
    plans = snapshot.config.plans
    of_operator = [plan for plan in snapshot.operator.plans if plan.id == snapshot.operator.tenant.default_plan_id]
    placed = [(Layer.TENANT, plans), (Layer.POLICY, plans)]
    if is_fleet:
        placed.append((Layer.OPERATOR, tuple(of_operator)))
    for place, of_place in placed:
        limits = (limit for plan in of_place for limit in plan.compile(snapshot.tenant.time_zone))
        reached = [
            limit for limit in limits if limit.scope in SUBJECT_SCOPES or (shared and limit.scope is not Scope.GLOBAL)
        ]
        for group in _groups_with_unique_names(reached):
            yield JoinedPart(group, place)


def _groups_with_unique_names(limits: list[Limit]) -> Iterator[Limits]:
    """Each bucket once; those of one name, and more than a check may have, apart."""
    distinct = {(limit.name, limit.algorithm, limit.scope): limit for limit in limits}
    waiting = list(distinct.values())
    while waiting:
        group: dict[str, Limit] = {}
        later: list[Limit] = []
        for limit in waiting:
            if limit.name in group or len(group) == MAX_LIMITS:
                later.append(limit)
            else:
                group[limit.name] = limit
        yield Limits(*group.values())
        waiting = later


async def _add_audit_entry(session: AdminSession, told: dict[str, Any]) -> None:
    row = {
        "at": to_datetime(session.catalog.clock.now_us()),
        "actor": session.actor,
        "action": "subject.reset",
        "tenant_id": told["tenant_id"],
        "entity_id": told["tenant_id"],
        "before": None,
        "after": told,
    }
    async with session.catalog.database.writing() as connection:
        await queries.add_audit(connection, [row])
