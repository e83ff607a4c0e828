"""The catalog: read it, and begin edits.

async with catalog.edit("cli:ann") as edit:
    tenant = await edit.create(Tenant, {"name": "acme"})
    await edit.create(Plan, {"tenant_id": tenant.id, "name": "free", "limits": "100/minute"})
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from limitforge.catalog.announcements import NO_TENANT, Announcement
from limitforge.catalog.credentials import Credential, Peppers, require_peppers
from limitforge.catalog.database import catalog_revision, outbox, queries
from limitforge.catalog.database.change_recorder import stamp_announcement
from limitforge.catalog.database.database import Database
from limitforge.catalog.database.edits import Edit
from limitforge.catalog.database.pages import Page
from limitforge.catalog.history import timeline_after
from limitforge.catalog.model import AnyEntity, Entity, TenantConfig, Token, to_datetime
from limitforge.core.clock import Clock, SystemClock
from limitforge.core.exact import short_repr
from limitforge.errors import InvalidInput, NotFound

MAX_ACTOR_LENGTH = 128
CommitListener = Callable[[Sequence[Announcement]], Awaitable[None]]


class Catalog:
    """The tenants in a database, and everything that they own.

    `on_commit` is awaited after a commit and before the edit returns, so a process has applied its own change before
    the caller continues.
    """

    def __init__(
        self,
        database: Database,
        *,
        peppers: Peppers | None = None,
        clock: Clock | None = None,
        on_commit: CommitListener | None = None,
    ) -> None:
        self.database = database
        self.peppers = peppers
        self.clock = clock or SystemClock()
        self.on_commit = on_commit

    @contextlib.asynccontextmanager
    async def edit(self, actor: str) -> AsyncIterator[Edit]:
        """Begin a transaction of changes by `actor`. It commits when the block ends, and rolls back on an error."""
        if not actor or len(actor) > MAX_ACTOR_LENGTH or not actor.isprintable():
            raise InvalidInput(
                "actor", f"must be 1 to {MAX_ACTOR_LENGTH} printable characters, got {short_repr(actor)}"
            )
        async with self.database.writing() as connection:
            now = to_datetime(self.clock.now_us())
            revision = await catalog_revision.next_revision(connection)
            edit = Edit(connection, revision, actor=actor, now=now, peppers=self.peppers)
            yield edit
            announcements = await edit.finish()
            if not self.database.is_sqlite:
                await outbox.notify_postgres(connection, edit.revision)
        if self.on_commit is not None:
            await self.on_commit(announcements)

    async def begin_timeline(self, lost_timeline: int) -> None:
        """Begin a new timeline, because the database was restored to an earlier state of `lost_timeline`.

        Does nothing if another process has begun one. All processes then discard their caches, and no longer accept
        copies of the lost timeline.
        """
        async with self.database.writing() as connection:
            if (await catalog_revision.read_last_stamp(connection, lock=True)).timeline > lost_timeline:
                return
            await catalog_revision.set_timeline(connection, timeline_after(lost_timeline))
            revision = await catalog_revision.next_revision(connection)
            announcement = stamp_announcement(Announcement(0, NO_TENANT), revision)
            await outbox.add_announcements(connection, [announcement], to_datetime(self.clock.now_us()))
            if not self.database.is_sqlite:
                await outbox.notify_postgres(connection, revision.stamp.revision)

    async def get(self, entity_type: type[AnyEntity], identity: str) -> AnyEntity:
        """Return the entity with this id. Raises `NotFound` for an unknown id."""
        async with self.database.reading() as connection:
            return await queries.get(connection, entity_type, identity)

    async def get_by_name_or_id(self, entity_type: type[AnyEntity], name: str, **values: Any) -> AnyEntity:
        """Return the entity with this id, or the only one with this name, as `queries.get_by_name_or_id`."""
        async with self.database.reading() as connection:
            return await queries.get_by_name_or_id(connection, entity_type, name, **values)

    async def list_page(
        self, entity_type: type[Entity], *, cursor: str | None = None, size: int = 100, **values: Any
    ) -> Page:
        """Return a page of entities sorted by name; `values` such as `tenant_id` filter them."""
        async with self.database.reading() as connection:
            return await queries.list_page(connection, entity_type, cursor, size, **values)

    async def list_for_tenant(self, entity_type: type[AnyEntity], tenant_id: str) -> list[AnyEntity]:
        """Return all entities of a tenant, sorted by name."""
        async with self.database.reading() as connection:
            return await queries.list_for_tenant(connection, entity_type, tenant_id)

    async def tenant_config(self, tenant_id: str) -> TenantConfig:
        """Return the configuration of a tenant. Raises `NotFound` for an unknown id."""
        async with self.database.reading() as connection:
            config = await queries.tenant_config(connection, tenant_id)
        if config is None:
            raise NotFound(f"unknown tenant {short_repr(tenant_id)}")
        return config

    async def plan_versions(self, plan_id: str) -> list[dict[str, Any]]:
        """Return the versions of a plan, the newest first: version, limits, created_at, created_by."""
        async with self.database.reading() as connection:
            return [dict(row) for row in await queries.plan_versions(connection, plan_id)]

    async def audit_page(
        self,
        *,
        cursor: str | None = None,
        size: int = 100,
        tenant_id: str | None = None,
        entity_id: str | None = None,
    ) -> Page:
        """Return a page of the audit log, the newest entry first."""
        async with self.database.reading() as connection:
            return await queries.audit_page(connection, cursor, size, tenant_id, entity_id)

    def parse_credential(self, text: str) -> Credential:
        """Parse a key or token. Raises `UnknownKey` if its text shows that it was never issued."""
        return Credential.parse(text, require_peppers(self.peppers))

    async def authenticate_token(self, text: str) -> Token:
        """Return the admin token with this text. Raises `UnknownKey` if it is unknown or has expired."""
        credential = self.parse_credential(text)
        async with self.database.reading() as connection:
            token = await queries.find(connection, Token, f"{Token.id_prefix}_{credential.id}")
        return require_peppers(self.peppers).authenticate(credential, token, to_datetime(self.clock.now_us()))
