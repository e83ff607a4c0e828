"""`/v1/admin/throttled`: the subjects that were denied most in the last minutes."""

from typing import Annotated

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from limitforge.catalog.database.queries import MAX_PAGE_SIZE
from limitforge.service.admin.fields import Filter
from limitforge.service.admin.responses import describe_page, json_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession
from limitforge.service.counters.throttled import ThrottledTracker

router = admin_router("/throttled", "throttled")


class ThrottledQuery(BaseModel):
    """Which subjects to list."""

    model_config = ConfigDict(extra="forbid")

    tenant_id: Filter | None = None
    subject: Annotated[Filter | None, Field(description="Only this subject: the server hashes it and looks it up.")] = (
        None
    )
    limit: Annotated[int, Field(description="How many at most.", ge=1, le=MAX_PAGE_SIZE)] = 100


def _throttled(request: Request) -> ThrottledTracker:
    throttled: ThrottledTracker = request.app.state.throttled
    return throttled


@router.get("", responses=describe_page("Hitter"))
async def list_throttled(
    asked: Annotated[ThrottledQuery, Query()],
    session: ReadSession,
    throttled: Annotated[ThrottledTracker, Depends(_throttled)],
) -> Response:
    """List the subjects that were denied most in the last one to two minutes, the most denied first. Denials of all
    workers of this node are added; those of other workers are at most about a second old. Each tenant has a fair share
    of the list. Counts may be too low for a tenant with thousands of denied subjects, never too high.

    `subject_hash` is an HMAC of the tenant and the subject under the newest pepper. Equal subjects of two tenants have
    different hashes. Give `subject` to find one that you know.
    """
    mine = session.restrict_filters({"tenant_id": asked.tenant_id, "subject": asked.subject})
    found = [] if mine is None else await throttled.top(asked.limit, session.catalog.clock.now_us(), **mine)
    return json_response({"items": found, "cursor": None})
