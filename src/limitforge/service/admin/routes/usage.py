"""`/v1/admin/usage`: allowed and denied checks of each key, hour by hour."""

from typing import Annotated

from fastapi import Query, Response

from limitforge.catalog.database import service_records
from limitforge.catalog.database.pages import Page
from limitforge.service.admin.dependencies import ServiceUsageRecorder
from limitforge.service.admin.fields import Filter, ListQuery, Timestamp
from limitforge.service.admin.responses import describe_page, page_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession

router = admin_router("/usage", "usage")


class UsageQuery(ListQuery):
    """The filters of the list of usage."""

    tenant_id: Filter | None = None
    key_id: Filter | None = None
    since: Timestamp | None = None
    until: Timestamp | None = None


@router.get("", responses=describe_page("UsageRow"))
async def list_usage(
    query: Annotated[UsageQuery, Query()],
    session: ReadSession,
    recorder: ServiceUsageRecorder,
) -> Response:
    """List the usage of keys in the last 30 days, the newest hour first: the number of allowed and of denied checks,
    of allowed checks that would have been denied in the mode `on`, and of checks decided without the store. The counts
    of other processes appear with a delay of up to ten seconds.
    """
    filters = session.restrict_filters({"tenant_id": query.tenant_id, "key_id": query.key_id})
    if filters is None:
        return page_response(Page([], None))
    await recorder.flush()
    async with session.catalog.database.reading() as connection:
        page = await service_records.usage_page(
            connection, query.cursor, query.limit, query.since, query.until, **filters
        )
    return page_response(page)
