"""`/v1/admin/audit`: who changed what, and when."""

from typing import Annotated

from fastapi import Query, Response

from limitforge.catalog.database.pages import Page
from limitforge.service.admin.fields import Filter, ListQuery
from limitforge.service.admin.responses import describe_page, page_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession

router = admin_router("/audit", "audit")


class AuditQuery(ListQuery):
    """The filters of the audit log."""

    tenant_id: Filter | None = None
    entity_id: Filter | None = None


@router.get("", responses=describe_page("AuditEntry"))
async def list_audit(query: Annotated[AuditQuery, Query()], session: ReadSession) -> Response:
    """List changes, the newest first, each with the state before and after. Secrets are never logged."""
    filters = session.restrict_filters({"tenant_id": query.tenant_id, "entity_id": query.entity_id})
    if filters is None:
        return page_response(Page([], None))
    return page_response(await session.catalog.audit_page(cursor=query.cursor, size=query.limit, **filters))
