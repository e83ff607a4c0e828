"""Publish changes to all processes: copies in Redis, then a message, then the overrides in the store."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

import msgspec

from limitforge.catalog.announcements import NO_TENANT, Announcement
from limitforge.catalog.database import outbox, queries
from limitforge.catalog.database.database import Database
from limitforge.catalog.history import RevisionHistory, Stamp
from limitforge.catalog.live.overrides.override_sync import OverrideSync
from limitforge.catalog.live.shared_copies import SharedCopies
from limitforge.catalog.live.shared_redis import SharedRedis
from limitforge.catalog.live.signing import Signer
from limitforge.catalog.model import Key
from limitforge.core.exact import short_repr
from limitforge.errors import CatalogError, PartialFailure, StoreError

_encode = msgspec.msgpack.Encoder().encode


class ChangePublisher:
    """Publishes announcements, and marks them as published in the outbox."""

    def __init__(
        self,
        database: Database,
        catalog_redis: SharedRedis,
        copies: SharedCopies,
        signer: Signer,
        override_sync: OverrideSync | None,
        *,
        key_prefix: str,
        history: RevisionHistory,
    ) -> None:
        self.channel = f"{key_prefix}:%changes"  # older releases, which did not sign messages, use `%catalog`
        self._database = database
        self._catalog_redis = catalog_redis
        self._copies = copies
        self._signer = signer
        self._override_sync = override_sync
        self._history = history

    async def publish(
        self, announcements: Sequence[Announcement], on_tenant_synced: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Publish these announcements, as many as possible.

        Copies are written first, so that a process that receives the message finds them. An announcement stays
        unpublished if its tenant is not valid, or if a server fails that has a copy or the overrides of the tenant.
        Raises `StoreError` or `CatalogError` if any stays unpublished, or if the head was not written. The order of a
        tenant's announcements does not matter, since the current state of the database is written and not the change.
        `on_tenant_synced` is called after the overrides of each tenant were compared, which may take long.
        """
        tenants = {each.tenant_id for each in announcements if each.config}
        keys = {key_id for each in announcements for key_id in (*each.keys, *each.gone)}
        # The state that is read from now on includes all changes up to this one.
        stamp = max(self._history.head or Stamp(), *(each.stamp for each in announcements))
        invalid: dict[str, str] = {}
        invalid_keys: dict[str, str] = {}
        async with self._database.reading() as connection:
            configs = await queries.tenant_configs(connection, tenants, invalid)
            found = {key.id: key for key in await queries.find_where_in(connection, Key, "id", keys, invalid_keys)}
        # Tenants with an invalid entry, and invalid keys: their announcements wait.
        failed = {*invalid.values(), *invalid_keys}
        valid = [each for each in announcements if not _concerns(each, failed)]
        new_configs = {tenant_id: configs.get(tenant_id) for tenant_id in tenants - failed}
        new_keys = {key_id: found.get(key_id) for key_id in keys - failed}
        first_error: StoreError | None = None
        for step in (
            partial(self._copies.put_head, stamp),  # if it fails: each process writes it again within a minute
            partial(self._copies.put_all, new_configs, new_keys, stamp),
            partial(self._send, valid),
            partial(self._sync_overrides, valid, on_tenant_synced),
        ):
            try:
                await step()
            except StoreError as error:
                first_error = first_error or error
                failed |= error.failed if isinstance(error, PartialFailure) else set()
        published = [each for each in valid if not _concerns(each, failed)]
        if published:
            async with self._database.writing() as connection:
                await outbox.mark_published(connection, published)
        if first_error is not None:
            raise first_error
        if failed_ids := sorted({*invalid, *invalid_keys}):
            raise CatalogError(f"the database holds invalid entries, which are not published: {short_repr(failed_ids)}")

    async def _send(self, announcements: Sequence[Announcement]) -> None:
        if not announcements:
            return
        try:
            await self._catalog_redis.publish(self.channel, self._signer.sign(self.channel, _encode(announcements)))
        except StoreError as error:
            raise PartialFailure(str(error), (each.tenant_id for each in announcements)) from None

    async def _sync_overrides(
        self, announcements: Sequence[Announcement], on_tenant_synced: Callable[[], Awaitable[None]] | None
    ) -> None:
        if self._override_sync is not None:
            await sync_changed_overrides(self._override_sync, self._database, announcements, on_tenant_synced)


async def sync_changed_overrides(
    override_sync: OverrideSync,
    database: Database,
    announcements: Sequence[Announcement],
    on_tenant_synced: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Write the overrides of tenants that have changed to the store.

    Raises `PartialFailure` with the tenants whose servers failed.
    """
    changed = {each.tenant_id for each in announcements if each.overrides}
    configured = {each.tenant_id for each in announcements if each.config and each.tenant_id != NO_TENANT}
    if configured - changed:  # a change of plans or policies concerns the store only if the tenant has overrides
        async with database.reading() as connection:
            changed |= set(await queries.tenants_with_overrides(connection, configured - changed))
    await override_sync.sync_tenants(changed, configured, on_tenant_synced)


def _concerns(announcement: Announcement, ids: Collection[str]) -> bool:
    """Return True if the tenant of an announcement, or one of its keys, is among these ids."""
    return any(each in ids for each in (announcement.tenant_id, *announcement.keys, *announcement.gone))
