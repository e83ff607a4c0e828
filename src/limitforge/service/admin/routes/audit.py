"""`/v1/admin/audit`: who changed what, and when."""

from typing import Annotated

from fastapi import Query, Response

from limitforge.catalog.database.queries import Page
from limitforge.service.admin.fields import Filter, ListQuery
from limitforge.service.admin.responses import describe_page, page_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession

router = admin_router("/audit", "audit")


class AuditQuery(ListQuery):
    """Which entries are wanted."""

    tenant_id: Filter | None = None
    entity_id: Filter | None = None


@router.get("", responses=describe_page("AuditEntry"))
async def list_audit(asked: Annotated[AuditQuery, Query()], session: ReadSession) -> Response:
    """List changes, the newest first, each with what was and what is. Secrets are never in it."""
    mine = session.restrict_filters({"tenant_id": asked.tenant_id, "entity_id": asked.entity_id})
    if mine is None:
        return page_response(Page([], None))
    return page_response(await session.catalog.audit_page(cursor=asked.cursor, size=asked.limit, **mine))
