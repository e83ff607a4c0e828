"""`/v1/admin/usage`: what each key was told, hour by hour; and how that is written down."""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import Depends, Query, Request, Response

from limitforge.catalog import queries
from limitforge.catalog.database import Database
from limitforge.catalog.model import at_time
from limitforge.catalog.queries import Page, UsageRow
from limitforge.core.clock import Clock, SystemClock
from limitforge.errors import CatalogError
from limitforge.service.admin.creation import KEPT as CREATIONS_KEPT
from limitforge.service.admin.fields import Listing, Moment, Wanted
from limitforge.service.admin.replies import answers_list, listed
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import Reading
from limitforge.service.counters import Counters

KEPT = timedelta(days=30)
PRUNED_EVERY = timedelta(hours=1)
MAX_WAITING = 200_000  # rows that wait for a database which is away

_log = logging.getLogger(__name__)

router = admin_router("/usage", "usage")


Row = tuple[datetime, str, str]  # hour, tenant, key


class UsageLog:
    """Writes down what was counted, and when tokens were used. What can't be written waits for the next time."""

    def __init__(
        self,
        database: Database,
        counters: Counters,
        *,
        used_tokens: Callable[[], dict[str, datetime]] = dict,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._counters = counters
        self._used_tokens = used_tokens
        self._clock = clock or SystemClock()
        self._waiting: dict[Row, list[int]] = {}
        self._tokens: dict[str, datetime] = {}
        self._pruned: datetime | None = None

    async def flush(self) -> None:
        """Call it every few seconds, and once at the end. Whatever is wrong with the database is logged."""
        now = at_time(self._clock.now_us())
        self._gather(now)
        try:
            await self._write()
            if self._pruned is None or now - self._pruned >= PRUNED_EVERY:
                await self._prune(now)
        except CatalogError as error:
            _log.warning("usage could not be written, and will be: %s", error)

    def _gather(self, now: datetime) -> None:
        hour = now.replace(minute=0, second=0, microsecond=0)
        for used in self._counters.drain():
            counts = [used.allowed, used.denied, used.would_deny, used.degraded]
            self._wait((hour, used.tenant_id, used.key_id), counts)
        self._tokens |= self._used_tokens()

    def _wait(self, row: Row, counts: list[int]) -> None:
        known = self._waiting.get(row)
        if known is not None:
            known[:] = map(sum, zip(known, counts, strict=True))
        elif len(self._waiting) < MAX_WAITING:
            self._waiting[row] = counts
        else:
            _log.warning("usage of key %s is lost: too much waits for the database", row[-1])

    async def _write(self) -> None:
        rows, self._waiting = self._waiting, {}
        tokens, self._tokens = self._tokens, {}
        if not rows and not tokens:
            return
        try:
            async with self._database.writing() as connection:
                if rows:
                    await queries.add_usage(connection, (UsageRow(*row, *counts) for row, counts in rows.items()))
                if tokens:
                    await queries.touch_tokens(connection, tokens)
        except BaseException:
            for row, counts in rows.items():
                self._wait(row, counts)
            self._tokens = tokens | self._tokens
            raise

    async def _prune(self, now: datetime) -> None:
        async with self._database.writing() as connection:
            await queries.remove_old(connection, now - KEPT, now - CREATIONS_KEPT)
        self._pruned = now


class UsageListing(Listing):
    """Which hours and keys are wanted."""

    tenant_id: Wanted | None = None
    key_id: Wanted | None = None
    since: Moment | None = None
    until: Moment | None = None


def _log_of(request: Request) -> UsageLog:
    log: UsageLog = request.app.state.usage
    return log


@router.get("", responses=answers_list("UsageRow"))
async def list_usage(
    asked: Annotated[UsageListing, Query()], session: Reading, log: Annotated[UsageLog, Depends(_log_of)]
) -> Response:
    """List what keys were told, the newest hour first, for 30 days: how many checks were allowed and denied, and of
    these, how many would have been denied but for a mode, and how many were decided without the store. What other
    processes have counted is there after ten seconds.
    """
    mine = session.narrowed({"tenant_id": asked.tenant_id, "key_id": asked.key_id})
    if mine is None:
        return listed(Page([], None))
    await log.flush()
    async with session.catalog.database.reading() as connection:
        page = await queries.usage_page(connection, asked.cursor, asked.limit, asked.since, asked.until, **mine)
    return listed(page)
