"""Publishes changes to all nodes: copies in Redis, then a message, then the overrides of the store.

A node publishes its own changes at once. The relay publishes those of writers that were killed or that know no Redis,
such as the command line: one node of all at a time, in batches, revocations first. Nodes don't wait for it to hear of a
change, since they read the outbox themselves.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import msgspec

from limitforge.catalog import queries
from limitforge.catalog.catalog import NOBODY
from limitforge.catalog.database import Database
from limitforge.catalog.history import History, Stamp
from limitforge.catalog.mirror import Mirror
from limitforge.catalog.model import Key, at_time
from limitforge.catalog.queries import Announcement, Owed
from limitforge.catalog.sources import Shared, WarmCopies
from limitforge.core.clock import Clock
from limitforge.errors import CatalogError, StoreError

RELAY_AFTER_SECONDS = 0.2  # the writer publishes by itself; if it has not by then, it may be gone
RETRY_SECONDS = 0.5
LEASE_SECONDS = 10.0  # until another node takes over from a relay that was killed
BATCH = 200  # rows: about 0.1 s, for which a revocation may have to wait

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class Relay:
    """Publishes outbox rows. `failed` is called with the error while Redis is away, and with None once it is back."""

    def __init__(
        self,
        database: Database,
        shared: Shared,
        warm: WarmCopies,
        mirror: Mirror | None,
        *,
        key_prefix: str,
        clock: Clock,
        history: History,
        catch_up: Callable[[], Awaitable[None]],
        failed: Callable[[StoreError | None], None],
    ) -> None:
        """`catch_up` brings `history` to where the database is, and notices a restored one before anything of it is
        published.
        """
        self.channel = f"{key_prefix}:%catalog"
        self.is_behind = False
        """True while there may be rows that were not published."""
        self._database = database
        self._shared = shared
        self._warm = warm
        self._mirror = mirror
        self._lease = f"{key_prefix}:{{%relay}}:"
        self._owner = uuid4().bytes
        self._clock = clock
        self._history = history
        self._catch_up = catch_up
        self._failed = failed
        self._wake = asyncio.Event()
        self._in_hand: set[tuple[int, str]] = set()
        self._looked = 0.0

    def wake(self) -> None:
        """Look for rows that were not published."""
        self.is_behind = True
        self._wake.set()

    async def run(self, unbroken: Callable[[Coroutine[Any, Any, None]], Awaitable[None]]) -> None:
        """Publish what is owed until cancelled. `unbroken` keeps a transaction from being cut off by that."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(RELAY_AFTER_SECONDS)
            self._wake.clear()
            try:
                await unbroken(self.publish_owed())
                self._failed(None)
            except StoreError as error:
                self._failed(error)
            except CatalogError as error:
                _log.warning("could not publish changes, will retry: %s", error)
            except Exception:  # noqa: BLE001 - later changes must be published all the same
                _log.exception("could not publish changes, will retry")
            if self.is_behind:
                await asyncio.sleep(RETRY_SECONDS)
                self._wake.set()

    async def publish_owed(self) -> None:
        """Publish all rows whose writers did not, unless another node is at it."""
        self.is_behind = True
        await self._catch_up()  # before it leads: a node that can't reach the database must not keep others from it
        if not await self._shared.hold(self._lease, self._owner, LEASE_SECONDS):
            return
        renewal = asyncio.get_running_loop().create_task(self._renew_lease())
        try:
            while rows := await self._next():
                await self.publish(rows, self._publish_revocations)
                if not await self._shared.hold(self._lease, self._owner, LEASE_SECONDS):
                    return
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
            with contextlib.suppress(StoreError):
                await self._shared.release(self._lease, self._owner)

    async def _renew_lease(self) -> None:
        """Keep the lease while a batch takes long: a tenant may have thousands of overrides."""
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            with contextlib.suppress(StoreError):
                await self._shared.hold(self._lease, self._owner, LEASE_SECONDS)

    async def publish(
        self, announcements: Sequence[Announcement], between: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Publish these rows and mark them. Copies come first, so that a node that receives the message finds them.

        `between` is called from time to time while overrides are compared, which may take long.
        """
        tenants = {each.tenant_id for each in announcements if each.config}
        keys = {key_id for each in announcements for key_id in (*each.keys, *each.gone)}
        # What is read from now on is at least as new as this.
        stamp = max(self._history.head or Stamp(), *(each.stamp for each in announcements))
        async with self._database.reading() as connection:
            configs = await queries.tenant_configs(connection, tenants)
            found = {key.id: key for key in await queries.some(connection, Key, "id", keys)}
        failure: StoreError | None = None
        try:
            await self._warm.put_head(stamp)
            new_configs = {tenant_id: configs.get(tenant_id) for tenant_id in tenants}
            await self._warm.put_all(new_configs, {key_id: found.get(key_id) for key_id in keys}, stamp)
            await self._shared.publish(self.channel, _encode(announcements))
        except StoreError as error:
            failure = error  # one server of several may be away: overrides that are elsewhere don't wait for it
        if self._mirror is not None:
            await mirror_changed(self._mirror, self._database, announcements, between)
        if failure is not None:
            raise failure
        async with self._database.writing() as connection:
            await queries.mark_published(connection, announcements)

    async def _next(self) -> list[Announcement]:
        """The next batch: rows that revoke something, else the oldest."""
        self._looked = time.monotonic()
        self._in_hand.clear()
        async with self._database.reading() as connection:
            rows = self._due(await queries.unpublished(connection, BATCH, revoking=True))
            if not rows:
                owed = await queries.unpublished(connection, BATCH)
                self.is_behind = bool(owed)
                rows = self._due(owed)
        self._in_hand = {(row.revision, row.tenant_id) for row in rows}
        return rows

    def _due(self, rows: Sequence[Owed]) -> list[Announcement]:
        """Those that their writers had the time to publish, and that are not being published here."""
        newest = at_time(self._clock.now_us()) - timedelta(seconds=RELAY_AFTER_SECONDS)
        due = [row.announcement for row in rows if row.at <= newest]
        return [row for row in due if (row.revision, row.tenant_id) not in self._in_hand]

    async def _publish_revocations(self) -> None:
        """Publish what was revoked meanwhile, before the batch in hand is done."""
        if time.monotonic() - self._looked < RELAY_AFTER_SECONDS:
            return
        self._looked = time.monotonic()
        await self._shared.hold(self._lease, self._owner, LEASE_SECONDS)
        async with self._database.reading() as connection:
            rows = self._due(await queries.unpublished(connection, 2 * BATCH, revoking=True))
        if rows:
            await self.publish(rows)


async def mirror_changed(
    mirror: Mirror,
    database: Database,
    announcements: Sequence[Announcement],
    between: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Bring the overrides of tenants that have changed into the store."""
    wanted = {each.tenant_id for each in announcements if each.overrides}
    configured = {each.tenant_id for each in announcements if each.config and each.tenant_id != NOBODY}
    if configured - wanted:  # that what decides has changed concerns the store only where a tenant has overrides
        async with database.reading() as connection:
            wanted |= set(await queries.tenants_with_overrides(connection, configured - wanted))
    for tenant_id in sorted(wanted):
        await mirror.reconcile(tenant_id, anew=tenant_id in configured)
        if between is not None:
            await between()
