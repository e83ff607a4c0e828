"""`/v1/admin/throttled`: who is throttled now; and the sketch that remembers it."""

from datetime import datetime
from hashlib import sha256
from typing import Annotated

import msgspec
from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from limitforge.catalog.model import at_time
from limitforge.catalog.queries import MAX_PAGE
from limitforge.core.exact import MICROS
from limitforge.service.admin.fields import Wanted
from limitforge.service.admin.replies import answers_list, reply
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading

WINDOW_US = 60 * MICROS
KEPT = 1_000  # subjects that a window remembers; twice as many until it is tidied

router = admin_router("/throttled", "throttled")

Who = tuple[str, str]


class Hitter(msgspec.Struct, frozen=True):
    """A subject that was denied lately, at least so often."""

    tenant_id: str
    subject_hash: str
    denied: int
    last_denied_at: datetime


class _Seen:
    __slots__ = ("count", "last_us")

    def __init__(self) -> None:
        self.count = 0
        self.last_us = 0


class Throttled:
    """Heavy hitters among denials of the last one to two minutes, in bounded memory.

    Of many subjects only those that are denied most are kept (Misra and Gries: when it is full, what the thousandth
    has is taken from all, and who has nothing left is forgotten). Counts may be too low by that, never too high.
    """

    def __init__(self) -> None:
        self._now: dict[Who, _Seen] = {}
        self._before: dict[Who, _Seen] = {}
        self._since_us = 0

    def denied(self, tenant_id: str, subject: str, now_us: int) -> None:
        """Call it for each denial; it costs a look-up."""
        if now_us - self._since_us >= WINDOW_US:
            self._turn(now_us)
        who = (tenant_id, subject)
        seen = self._now.get(who)
        if seen is None:
            if len(self._now) >= 2 * KEPT:
                self._tidy()
            seen = self._now[who] = _Seen()
        seen.count += 1
        seen.last_us = now_us

    def top(self, count: int, now_us: int, tenant_id: str | None = None, subject: str | None = None) -> list[Hitter]:
        """Who was denied most, the first of them first; of one tenant or subject, if these are named."""
        self._turn(now_us)
        found: dict[Who, tuple[int, int]] = {}
        for window in (self._before, self._now):
            for who, seen in window.items():
                if (tenant_id is None or who[0] == tenant_id) and (subject is None or who[1] == subject):
                    found[who] = (found.get(who, (0, 0))[0] + seen.count, seen.last_us)
        most = sorted(found.items(), key=lambda each: (-each[1][0], each[0]))[:count]
        return [
            Hitter(tenant, subject_hash(name), denied, at_time(last_us)) for (tenant, name), (denied, last_us) in most
        ]

    def _turn(self, now_us: int) -> None:
        """The window that has ended becomes the one before; after a long silence there is none."""
        windows = (now_us - self._since_us) // WINDOW_US
        if windows < 1:
            return
        self._before = self._now if windows == 1 else {}
        self._now = {}
        self._since_us += windows * WINDOW_US

    def _tidy(self) -> None:
        counts = sorted((seen.count for seen in self._now.values()), reverse=True)
        floor = counts[KEPT]
        kept = {who: seen for who, seen in self._now.items() if seen.count > floor}
        for seen in kept.values():
            seen.count -= floor
        self._now = kept


def subject_hash(subject: str) -> str:
    """What a subject is called where its name should not be shown: whoever knows it can find it."""
    return sha256(subject.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class ThrottledListing(BaseModel):
    """Who is wanted."""

    model_config = ConfigDict(extra="forbid")

    tenant_id: Wanted | None = None
    subject: Annotated[Wanted | None, Field(description="Whether this one is among them.")] = None
    limit: Annotated[int, Field(description="How many at most.", ge=1, le=MAX_PAGE)] = 100


def _sketch(request: Request) -> Throttled:
    sketch: Throttled = request.app.state.throttled
    return sketch


@router.get("", responses=answers_list("Hitter"))
async def list_throttled(
    asked: Annotated[ThrottledListing, Query()], session: Reading, sketch: Annotated[Throttled, Depends(_sketch)]
) -> Response:
    """List who was denied most in the last one to two minutes, by a hash of the subject: the first 16 hexadecimal
    digits of its SHA-256. Each process tells of its own denials.
    """
    mine = session.narrowed({"tenant_id": asked.tenant_id, "subject": asked.subject})
    found = [] if mine is None else sketch.top(asked.limit, session.catalog.clock.now_us(), **mine)
    return reply({"items": found, "cursor": None})
