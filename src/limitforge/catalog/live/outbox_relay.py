"""Publishes changes to all nodes: copies in Redis, then a message, then the overrides of the store.

A node publishes its own changes at once. The relay publishes those of writers that were killed or that know no Redis,
such as the command line: one node of all at a time, in batches, revocations first. Nodes don't wait for it to hear of a
change, since they read the outbox themselves.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from itertools import takewhile
from typing import Any
from uuid import uuid4

import msgspec

from limitforge.catalog.database import outbox, queries
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.outbox import NO_TENANT, Announcement, PendingAnnouncement
from limitforge.catalog.history import RevisionHistory, Stamp
from limitforge.catalog.live.override_sync import OverrideSync
from limitforge.catalog.live.shared_backend import SharedBackend
from limitforge.catalog.live.shared_copies import SharedCopies
from limitforge.catalog.live.signing import Signer
from limitforge.catalog.model import Key, to_datetime
from limitforge.core.clock import Clock
from limitforge.core.exact import short_repr
from limitforge.errors import (
    CatalogError,
    CatalogUnavailable,
    LimitforgeError,
    PartialFailure,
    StoreError,
    StoreUnavailable,
)

RELAY_AFTER_SECONDS = 0.2  # the writer publishes by itself; if it has not by then, it may be gone
RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0
LEASE_SECONDS = 10.0  # until another node takes over from a relay that was killed
BATCH = 200  # rows: about 0.1 s, for which a revocation may have to wait
LEASE_TAGS = ("%relay", "%relay1", "%relay4", "%relay3")  # one in each quarter of the slots of a Cluster
START = (0, "")  # before the first row

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class OutboxRelay:
    """Publishes outbox rows. `failed` is called with the error while Redis is away, and with None once it is back."""

    def __init__(
        self,
        database: Database,
        shared: SharedBackend,
        copies: SharedCopies,
        signer: Signer,
        override_sync: OverrideSync | None,
        *,
        key_prefix: str,
        clock: Clock,
        history: RevisionHistory,
        catch_up: Callable[[], Awaitable[None]],
        on_redis_status: Callable[[StoreError | None], None],
    ) -> None:
        """`catch_up` brings `history` to where the database is, and notices a restored one before anything of it is
        published.
        """
        self.channel = f"{key_prefix}:%changes"  # releases before MACs use `%catalog`
        self.has_unpublished = False
        """True while there may be rows that were not published."""
        self._database = database
        self._shared = shared
        self._warm = copies
        self._sealer = signer
        self._mirror = override_sync
        self._leases = [f"{key_prefix}:{{{tag}}}:" for tag in LEASE_TAGS]
        self._held: set[str] = set()
        self._owner = uuid4().bytes
        self._clock = clock
        self._history = history
        self._catch_up = catch_up
        self._failed = on_redis_status
        self._wake = asyncio.Event()
        self._looked = 0.0
        self._tried = {True: START, False: START}  # the last row that was tried: of those that revoke, and of all
        self._retried = START
        self._has_failed = False  # whether rows that were tried are still unpublished
        self._is_any_left = False  # whether some of them failed again
        self._has_untried = True  # whether there are rows that were too young to be tried
        self._retry_at = 0.0
        self._pause = RETRY_SECONDS
        self._problem: LimitforgeError | None = None
        self._warned = ""

    def wake(self) -> None:
        """Look for rows that were not published."""
        self.has_unpublished = True
        self._wake.set()

    def reset(self) -> None:
        """Forget which rows were tried: the database was restored, and counts from a lower revision."""
        self._tried, self._retried = {True: START, False: START}, START

    async def run(self, unbroken: Callable[[Coroutine[Any, Any, None]], Awaitable[None]]) -> None:
        """Publish what is owed until cancelled. `unbroken` keeps a transaction from being cut off by that."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(RELAY_AFTER_SECONDS)
            self._wake.clear()
            try:
                await unbroken(self.publish_pending())
                if not self.has_unpublished:
                    self._failed(None)
                    self._warned = ""
            except StoreError as error:
                self._failed(error)
            except CatalogError as error:
                if str(error) != self._warned:  # an invalid tenant stays so until someone corrects it
                    _log.warning("could not publish changes, will retry: %s", error)
                self._warned = str(error)
            except Exception:  # noqa: BLE001 - later changes must be published all the same
                _log.exception("could not publish changes, will retry")
            if self.has_unpublished:
                pause = RETRY_SECONDS
                if self._has_failed and not self._has_untried:
                    pause = max(pause, self._retry_at - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                self._wake.set()

    async def publish_pending(self) -> None:
        """Publish all rows whose writers did not, unless another node is at it. Raises after that if some failed: they
        stay unpublished, and are tried again by the next call.
        """
        self.has_unpublished = True
        self._problem = None
        await self._catch_up()  # before it leads: a node that can't reach the database must not keep others from it
        if not await self._lead():
            return
        renewal = asyncio.get_running_loop().create_task(self._renew_lease())
        try:
            await self._publish_all()
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
            for lease in self._held:
                with contextlib.suppress(StoreError):
                    await self._shared.release_lock(lease, self._owner)
            self._held.clear()
        if self._problem is not None:
            raise self._problem

    async def _publish_all(self) -> None:
        """Publish rows that were not tried yet; those that failed from time to time, so that they hold up no others."""
        while True:
            while self._has_failed and time.monotonic() >= self._retry_at:
                await self._retry()
            rows = await self._untried()
            if not rows:
                break
            await self._publish(rows, self._publish_revocations)
            if not await self._lead():
                return
        async with self._database.reading() as connection:
            self.has_unpublished = bool(await outbox.unpublished_announcements(connection, 1))
            self._has_untried = bool(await outbox.unpublished_announcements(connection, 1, after=self._tried[False]))
        if not self.has_unpublished:
            self._has_failed = False
        if not self._has_failed:
            self.reset()

    async def _retry(self) -> None:
        """Try rows that failed once more: all that revoke something, and the next batch from the oldest to the newest
        and again from there.
        """
        async with self._database.reading() as connection:
            rows = await outbox.unpublished_announcements(connection, BATCH, after=self._retried)
            revoking = await outbox.unpublished_announcements(connection, BATCH, revoking=True)
        self._retried = _position(rows[-1].announcement) if len(rows) == BATCH else START
        due = {_position(row.announcement): row.announcement for row in (*revoking, *rows) if self._is_due(row)}
        if due and not await self._publish(list(due.values()), self._publish_revocations):
            self._is_any_left = True
            self._pause = min(2 * self._pause, LONGEST_RETRY_SECONDS)
            self._retry_at = time.monotonic() + self._pause
        elif self._retried == START:
            self._has_failed, self._is_any_left = self._is_any_left, False
            self._pause = self._pause if self._has_failed else RETRY_SECONDS

    async def _lead(self) -> bool:
        """Take or extend the lease; False if another node has it. Where its server fails, another lease is used."""
        failure: StoreError | None = None
        for lease in self._leases:
            try:
                is_held = await self._shared.acquire_lock(lease, self._owner, LEASE_SECONDS)
            except StoreError as error:
                failure = failure or error
                continue
            if is_held:
                self._held.add(lease)
            return is_held
        raise failure or StoreUnavailable("there is no lease")

    async def _renew_lease(self) -> None:
        """Keep the lease while a batch takes long: a tenant may have thousands of overrides."""
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            with contextlib.suppress(StoreError):
                await self._lead()

    async def publish(
        self, announcements: Sequence[Announcement], after_each: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Publish these rows and mark them. Copies come first, so that a node that receives the message finds them.

        Does as much as is possible: a row stays unpublished if its tenant is not valid, or if a server fails that has
        a copy or the overrides of its tenant. Raises if there are such rows. The order of the rows of one tenant does
        not matter, since the state of the database is written, and not the change. `between` is called from time to
        time while overrides are compared, which may take long.
        """
        tenants = {each.tenant_id for each in announcements if each.config}
        keys = {key_id for each in announcements for key_id in (*each.keys, *each.gone)}
        # What is read from now on is at least as new as this.
        stamp = max(self._history.head or Stamp(), *(each.stamp for each in announcements))
        invalid: dict[str, str] = {}
        invalid_keys: dict[str, str] = {}
        async with self._database.reading() as connection:
            configs = await queries.tenant_configs(connection, tenants, invalid)
            found = {key.id: key for key in await queries.find_where_in(connection, Key, "id", keys, invalid_keys)}
        failed = {*invalid.values(), *invalid_keys}
        valid = [each for each in announcements if not _is_affected(each, failed)]
        new_configs = {tenant_id: configs.get(tenant_id) for tenant_id in tenants - failed}
        new_keys = {key_id: found.get(key_id) for key_id in keys - failed}
        problem: StoreError | None = None
        for step in (
            partial(self._warm.put_head, stamp),  # if it fails: each node writes it again within a minute
            partial(self._warm.put_all, new_configs, new_keys, stamp),
            partial(self._send, valid),
            partial(self._mirror_changed, valid, after_each),
        ):
            try:
                await step()
            except StoreError as error:
                problem = problem or error
                failed |= error.failed if isinstance(error, PartialFailure) else set()
        done = [each for each in valid if not _is_affected(each, failed)]
        if done:
            async with self._database.writing() as connection:
                await outbox.mark_published(connection, done)
        if problem is not None:
            raise problem
        if failed_ids := sorted({*invalid, *invalid_keys}):
            raise CatalogError(f"the database holds invalid entries, which are not published: {short_repr(failed_ids)}")

    async def _send(self, announcements: Sequence[Announcement]) -> None:
        if not announcements:
            return
        try:
            await self._shared.publish(self.channel, self._sealer.sign(self.channel, _encode(announcements)))
        except StoreError as error:
            raise PartialFailure(str(error), (each.tenant_id for each in announcements)) from None

    async def _mirror_changed(
        self, announcements: Sequence[Announcement], between: Callable[[], Awaitable[None]] | None
    ) -> None:
        if self._mirror is not None:
            await sync_changed_overrides(self._mirror, self._database, announcements, between)

    async def _publish(
        self, rows: Sequence[Announcement], between: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Publish these rows; False if some of them stay unpublished, or something else of it failed."""
        try:
            await self.publish(rows, between)
        except CatalogUnavailable:
            raise
        except (StoreError, CatalogError) as error:
            self._problem = self._problem or error
            if not self._has_failed:
                self._has_failed, self._retry_at = True, time.monotonic() + RETRY_SECONDS
            return False
        return True

    async def _untried(self) -> list[Announcement]:
        """The next batch of rows that were not tried yet: those that revoke something, else the oldest."""
        self._looked = time.monotonic()
        return await self._next(revoking=True) or await self._next()

    async def _next(self, *, revoking: bool = False) -> list[Announcement]:
        async with self._database.reading() as connection:
            rows = await outbox.unpublished_announcements(
                connection, BATCH, after=self._tried[revoking], revoking=revoking
            )
        due = [row.announcement for row in takewhile(self._is_due, rows)]
        if due:
            self._tried[revoking] = _position(due[-1])
            self._tried[True] = max(self._tried.values())  # what revokes something is among all rows
        return due

    def _is_due(self, row: PendingAnnouncement) -> bool:
        """Return True if its writer had the time to publish it, or has a clock that is wrong."""
        age = to_datetime(self._clock.now_us()) - row.at
        return abs(age.total_seconds()) >= RELAY_AFTER_SECONDS

    async def _publish_revocations(self) -> None:
        """Publish what was revoked meanwhile, before the batch in hand is done."""
        if time.monotonic() - self._looked < RELAY_AFTER_SECONDS:
            return
        self._looked = time.monotonic()
        if rows := await self._next(revoking=True):
            await self._publish(rows)


def _position(row: Announcement) -> tuple[int, str]:
    return row.revision, row.tenant_id


def _is_affected(row: Announcement, failed: Collection[str]) -> bool:
    """Return True if the tenant of a row, or one of its keys, is among those that failed."""
    return any(each in failed for each in (row.tenant_id, *row.keys, *row.gone))


async def sync_changed_overrides(
    override_sync: OverrideSync,
    database: Database,
    announcements: Sequence[Announcement],
    after_each: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Bring the overrides of tenants that have changed into the store.

    Raises `PartialFailure` with the tenants whose servers failed.
    """
    wanted = {each.tenant_id for each in announcements if each.overrides}
    configured = {each.tenant_id for each in announcements if each.config and each.tenant_id != NO_TENANT}
    if configured - wanted:  # that what decides has changed concerns the store only where a tenant has overrides
        async with database.reading() as connection:
            wanted |= set(await queries.tenants_with_overrides(connection, configured - wanted))
    await override_sync.sync_tenants(wanted, configured, after_each)
