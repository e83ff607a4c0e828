"""`/v1/admin/throttled`: the subjects that were denied most in the last minutes."""

from typing import Annotated

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field

from limitforge.catalog.database.pages import MAX_PAGE_SIZE
from limitforge.service.admin.dependencies import ServiceThrottledTracker
from limitforge.service.admin.fields import Filter
from limitforge.service.admin.responses import describe_page, json_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession

router = admin_router("/throttled", "throttled")


class ThrottledQuery(BaseModel):
    """The filters of the list of throttled subjects."""

    model_config = ConfigDict(extra="forbid")

    tenant_id: Filter | None = None
    subject: Annotated[Filter | None, Field(description="Only this subject. The server compares its hash.")] = None
    limit: Annotated[int, Field(description="The largest number of items to return.", ge=1, le=MAX_PAGE_SIZE)] = 100


@router.get("", responses=describe_page("ThrottledSubject"))
async def list_throttled(
    query: Annotated[ThrottledQuery, Query()],
    session: ReadSession,
    throttled_tracker: ServiceThrottledTracker,
) -> Response:
    """List the subjects with the most denials in the last one to two minutes, the highest count first. The counts of
    all workers of this node are added, with a delay of about a second. Each tenant has a fair share of the list. For a
    tenant with thousands of denied subjects, counts may be too low, but never too high.

    `subject_hash` is an HMAC of the tenant and the subject under the newest pepper. Equal subjects of two tenants have
    different hashes. Use the filter `subject` to find a subject that you know.
    """
    filters = session.restrict_filters({"tenant_id": query.tenant_id, "subject": query.subject})
    found = (
        [] if filters is None else await throttled_tracker.top(query.limit, session.catalog.clock.now_us(), **filters)
    )
    return json_response({"items": found, "cursor": None})
