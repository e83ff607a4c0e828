"""`/v1/admin/reset`: clear the counters of one subject."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Response
from pydantic import ConfigDict, Field, StrictBool

from limitforge.catalog.database import writes
from limitforge.catalog.live.cache.catalog_cache import CatalogCache
from limitforge.catalog.model import OPERATOR, to_datetime
from limitforge.catalog.snapshot import Snapshot
from limitforge.core.exact import short_repr
from limitforge.core.join import PlanPart, join_limits
from limitforge.core.keys import MAX_KEY_PART_BYTES, Layer
from limitforge.core.limits import Limit, Scope
from limitforge.core.plan import MAX_LIMITS, Limits
from limitforge.errors import InvalidInput, NotFound, UnknownKey
from limitforge.service.admin.dependencies import ServiceCatalogCache, ServiceLimiter
from limitforge.service.admin.fields import Id, RequestBody
from limitforge.service.admin.responses import describe_response, json_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import AdminSession, WriteSession

router = admin_router("/reset", "reset")

SUBJECT_SCOPES = (Scope.SUBJECT, Scope.CALLER)
"""The scopes whose buckets belong to a single subject."""
EXAMPLE: Any = {"tenant_id": "ten_1a2b3c4d5e6f7g8h", "resource": "GET:/orders", "subject": "user:42"}


KeyPart = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": MAX_KEY_PART_BYTES})]


class Reset(RequestBody):
    """The subject and the resource whose counters are cleared."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    tenant_id: Annotated[Id, Field(description="The tenant of the subject.")]
    resource: Annotated[KeyPart, Field(description="The resource, such as GET:/orders.")]
    subject: Annotated[KeyPart, Field(description="The subject, such as user:42.")]
    shared: Annotated[StrictBool, Field(description="Also clear counters that other subjects of the tenant share.")] = (
        False
    )


@router.post("", responses=describe_response("ResetResult", example={**EXAMPLE, "forgotten": ["burst", "hourly"]}))
async def reset(
    body: Reset,
    session: WriteSession,
    limiter: ServiceLimiter,
    catalog_cache: ServiceCatalogCache,
) -> Response:
    """Clear the counters of a subject for every limit that can apply to a check of the resource: the limits of all
    plans of the tenant, and of the operator's plan. A token of one tenant does not clear those of the operator's plan.
    """
    session.require_tenant(body.tenant_id)
    for field in ("resource", "subject"):
        if not getattr(body, field):
            raise InvalidInput(field, "must not be empty")
    snapshot = await _tenant_snapshot(catalog_cache, body.tenant_id)
    resource = snapshot.select(body.resource).counted_resource or body.resource
    names: dict[str, None] = {}
    for part in _reachable_limits(snapshot, with_operator=session.tenant_id is None, with_shared=body.shared):
        await limiter.reset(resource, body.subject, limits=join_limits(part), tenant=body.tenant_id)
        names.update(dict.fromkeys(limit.name for limit in Limits.of(part.limits)))
    result = {"tenant_id": body.tenant_id, "resource": resource, "subject": body.subject, "forgotten": list(names)}
    await _add_audit_entry(session, result)
    return json_response(result)


async def _tenant_snapshot(catalog_cache: CatalogCache, tenant_id: str) -> Snapshot:
    try:
        if tenant_id != OPERATOR:
            return (await catalog_cache.find_tenant(tenant_id)).snapshot
    except UnknownKey:
        pass
    raise NotFound(f"tenant_id: unknown tenant {short_repr(tenant_id)}")


def _reachable_limits(snapshot: Snapshot, *, with_operator: bool, with_shared: bool) -> Iterator[PlanPart]:
    """Yield the limits of every plan of the tenant.

    Any of these plans may be the tenant's default, belong to a key or a policy, or be named by a check.
    """
    tenant_plans = snapshot.config.plans
    operator = snapshot.operator
    layers = [(Layer.TENANT, tenant_plans), (Layer.POLICY, tenant_plans)]
    if with_operator:
        layers.append((Layer.OPERATOR, tuple(p for p in operator.plans if p.id == operator.tenant.default_plan_id)))
    for layer, plans in layers:
        limits = (limit for plan in plans for limit in plan.compile(snapshot.tenant.time_zone))
        selected = [
            limit
            for limit in limits
            if limit.scope in SUBJECT_SCOPES or (with_shared and limit.scope is not Scope.GLOBAL)
        ]
        for group in _groups_with_unique_names(selected):
            yield PlanPart(group, layer)


def _groups_with_unique_names(limits: list[Limit]) -> Iterator[Limits]:
    """Yield each bucket once, in groups that one call accepts: unique names, and at most `MAX_LIMITS` limits."""
    distinct = {(limit.name, limit.algorithm, limit.shape, limit.scope): limit for limit in limits}
    remaining = list(distinct.values())
    while remaining:
        group: dict[str, Limit] = {}
        rest: list[Limit] = []
        for limit in remaining:
            if limit.name in group or len(group) == MAX_LIMITS:
                rest.append(limit)
            else:
                group[limit.name] = limit
        yield Limits(*group.values())
        remaining = rest


async def _add_audit_entry(session: AdminSession, result: dict[str, Any]) -> None:
    row = {
        "at": to_datetime(session.catalog.clock.now_us()),
        "actor": session.actor,
        "action": "subject.reset",
        "tenant_id": result["tenant_id"],
        "entity_id": result["tenant_id"],
        "before": None,
        "after": result,
    }
    async with session.catalog.database.writing() as connection:
        await writes.add_audit_entries(connection, [row])
