"""Write the usage counters, and when tokens were last used, to the database, and delete old rows."""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from limitforge.catalog.database import service_records, writes
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.service_records import UsageRow
from limitforge.catalog.model import to_datetime
from limitforge.core.clock import Clock, SystemClock
from limitforge.errors import CatalogError
from limitforge.observability.events import log_event
from limitforge.service.admin.idempotency import REPLAY_RETENTION
from limitforge.service.counters.process_counters import ProcessCounters

RETENTION = timedelta(days=30)
PRUNE_INTERVAL = timedelta(hours=1)
MAX_PENDING_ROWS = 200_000  # rows kept in memory while the database is unavailable

_log = logging.getLogger(__name__)

UsageKey = tuple[datetime, str, str]
"""The hour, the tenant's id and the key's id."""


class UsageRecorder:
    """Writes usage per hour and key, and the last use of tokens. A failed write is retried with the next flush."""

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
        """Write the pending counts, and once an hour delete old usage and stored responses.

        Call it every few seconds and at shutdown. Errors of the database are logged and not raised.
        """
        now = to_datetime(self._clock.now_us())
        self._collect(now)
        try:
            await self._write()
            if self._pruned_at is None or now - self._pruned_at >= PRUNE_INTERVAL:
                await self._prune(now)
        except CatalogError as error:
            log_event(
                _log,
                logging.WARNING,
                "usage.write_failed",
                "could not write usage to the database, the next flush retries",
                pending_rows=len(self._pending_rows),
                error=error,
            )

    def _collect(self, now: datetime) -> None:
        hour = now.replace(minute=0, second=0, microsecond=0)
        for used in self._counters.drain():
            counts = [used.allowed, used.denied, used.would_deny, used.degraded]
            self._add_pending((hour, used.tenant_id, used.key_id), counts)
        self._pending_last_used |= self._take_last_used()

    def _add_pending(self, key: UsageKey, counts: list[int]) -> None:
        pending = self._pending_rows.get(key)
        if pending is not None:
            pending[:] = map(sum, zip(pending, counts, strict=True))
        elif len(self._pending_rows) < MAX_PENDING_ROWS:
            self._pending_rows[key] = counts
        else:
            log_event(
                _log,
                logging.WARNING,
                "usage.dropped",
                "dropped the usage of a key, too many rows are waiting for the database",
                key_id=key[-1],
            )

    async def _write(self) -> None:
        rows, self._pending_rows = self._pending_rows, {}
        last_used, self._pending_last_used = self._pending_last_used, {}
        if not rows and not last_used:
            return
        try:
            async with self._database.writing() as connection:
                if rows:
                    await service_records.add_usage(
                        connection, (UsageRow(*key, *counts) for key, counts in rows.items())
                    )
                if last_used:
                    await writes.record_token_use(connection, last_used)
        except BaseException:
            for key, counts in rows.items():
                self._add_pending(key, counts)
            self._pending_last_used = last_used | self._pending_last_used
            raise

    async def _prune(self, now: datetime) -> None:
        async with self._database.writing() as connection:
            await service_records.remove_old_records(connection, now - RETENTION, now - REPLAY_RETENTION)
        self._pruned_at = now
