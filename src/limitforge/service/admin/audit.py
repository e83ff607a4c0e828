"""`/v1/admin/audit`: who changed what, and when."""

from typing import Annotated

from fastapi import Query, Response

from limitforge.catalog.queries import Page
from limitforge.service.admin.fields import Listing, Wanted
from limitforge.service.admin.replies import answers_list, listed
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading

router = admin_router("/audit", "audit")


class AuditListing(Listing):
    """Which entries are wanted."""

    tenant_id: Wanted | None = None
    entity_id: Wanted | None = None


@router.get("", responses=answers_list("AuditEntry"))
async def list_audit(asked: Annotated[AuditListing, Query()], session: Reading) -> Response:
    """List changes, the newest first, each with what was and what is. Secrets are never in it."""
    mine = session.narrowed({"tenant_id": asked.tenant_id, "entity_id": asked.entity_id})
    if mine is None:
        return listed(Page([], None))
    return listed(await session.catalog.audit(cursor=asked.cursor, size=asked.limit, **mine))
