"""`/v1/admin/usage`: what each key was told, hour by hour; and how that is written down."""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import Depends, Query, Request, Response

from limitforge.catalog.database import queries
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.queries import Page, UsageRow
from limitforge.catalog.model import to_datetime
from limitforge.core.clock import Clock, SystemClock
from limitforge.errors import CatalogError
from limitforge.service.admin.fields import Filter, ListQuery, Timestamp
from limitforge.service.admin.idempotency import REPLAY_RETENTION as CREATIONS_KEPT
from limitforge.service.admin.responses import describe_page, page_response
from limitforge.service.admin.routing import admin_router
from limitforge.service.admin.session import ReadSession
from limitforge.service.counters.process_counters import ProcessCounters

RETENTION = timedelta(days=30)
PRUNE_INTERVAL = timedelta(hours=1)
MAX_PENDING_ROWS = 200_000  # rows that wait for a database which is away

_log = logging.getLogger(__name__)

router = admin_router("/usage", "usage")


UsageKey = tuple[datetime, str, str]  # hour, tenant, key


class UsageRecorder:
    """Writes down what was counted, and when tokens were used. What can't be written waits for the next time."""

    def __init__(
        self,
        database: Database,
        counters: ProcessCounters,
        *,
        take_last_used: Callable[[], dict[str, datetime]] = dict,
        clock: Clock | None = None,
    ) -> None:
        self._database = database
        self._counters = counters
        self._take_last_used = take_last_used
        self._clock = clock or SystemClock()
        self._pending_rows: dict[UsageKey, list[int]] = {}
        self._pending_last_used: dict[str, datetime] = {}
        self._pruned_at: datetime | None = None

    async def flush(self) -> None:
        """Call it every few seconds, and once at the end. Whatever is wrong with the database is logged."""
        now = to_datetime(self._clock.now_us())
        self._collect(now)
        try:
            await self._write()
            if self._pruned_at is None or now - self._pruned_at >= PRUNE_INTERVAL:
                await self._prune(now)
        except CatalogError as error:
            _log.warning("usage could not be written, and will be: %s", error)

    def _collect(self, now: datetime) -> None:
        hour = now.replace(minute=0, second=0, microsecond=0)
        for used in self._counters.drain():
            counts = [used.allowed, used.denied, used.would_deny, used.degraded]
            self._add_pending((hour, used.tenant_id, used.key_id), counts)
        self._pending_last_used |= self._take_last_used()

    def _add_pending(self, row: UsageKey, counts: list[int]) -> None:
        known = self._pending_rows.get(row)
        if known is not None:
            known[:] = map(sum, zip(known, counts, strict=True))
        elif len(self._pending_rows) < MAX_PENDING_ROWS:
            self._pending_rows[row] = counts
        else:
            _log.warning("usage of key %s is lost: too much waits for the database", row[-1])

    async def _write(self) -> None:
        rows, self._pending_rows = self._pending_rows, {}
        tokens, self._pending_last_used = self._pending_last_used, {}
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
                self._add_pending(row, counts)
            self._pending_last_used = tokens | self._pending_last_used
            raise

    async def _prune(self, now: datetime) -> None:
        async with self._database.writing() as connection:
            await queries.remove_old_records(connection, now - RETENTION, now - CREATIONS_KEPT)
        self._pruned_at = now


class UsageQuery(ListQuery):
    """Which hours and keys are wanted."""

    tenant_id: Filter | None = None
    key_id: Filter | None = None
    since: Timestamp | None = None
    until: Timestamp | None = None


def _usage_recorder(request: Request) -> UsageRecorder:
    log: UsageRecorder = request.app.state.usage
    return log


@router.get("", responses=describe_page("UsageRow"))
async def list_usage(
    asked: Annotated[UsageQuery, Query()], session: ReadSession, log: Annotated[UsageRecorder, Depends(_usage_recorder)]
) -> Response:
    """List what keys were told, the newest hour first, for 30 days: how many checks were allowed and denied, and of
    these, how many would have been denied but for a mode, and how many were decided without the store. What other
    processes have counted is there after ten seconds.
    """
    mine = session.restrict_filters({"tenant_id": asked.tenant_id, "key_id": asked.key_id})
    if mine is None:
        return page_response(Page([], None))
    await log.flush()
    async with session.catalog.database.reading() as connection:
        page = await queries.usage_page(connection, asked.cursor, asked.limit, asked.since, asked.until, **mine)
    return page_response(page)
