"""The database as a source of configuration."""

import logging
from collections.abc import Iterable
from datetime import datetime

from limitforge.catalog.database import override_queries, queries
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Key, Override, TenantConfig
from limitforge.catalog.override_rows import DeletedOverride, OverrideRow
from limitforge.observability.events import log_event

_log = logging.getLogger(__name__)


class DatabaseSource:
    """The database as a source. Reading a tenant takes three queries, reading a key two."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def config(self, tenant_id: str) -> TenantConfig | None:
        async with self._database.reading() as connection:
            return await queries.tenant_config(connection, tenant_id)

    async def key(self, key_id: str) -> Key | None:
        async with self._database.reading() as connection:
            return await queries.find(connection, Key, key_id)

    async def overrides(self, tenant_id: str) -> list[Override]:
        async with self._database.reading() as connection:
            return await queries.list_for_tenant(connection, Override, tenant_id)

    async def override(self, tenant_id: str, resource: str, subject: str) -> Override | None:
        same = {"tenant_id": tenant_id, "resource": resource, "subject": subject}
        async with self._database.reading() as connection:
            found = await queries.find_by(connection, Override, **same)
            return found[0] if found else None

    async def tenants_with_overrides(self) -> list[str]:
        async with self._database.reading() as connection:
            return await queries.tenants_with_overrides(connection)

    async def configs(self, tenant_ids: Iterable[str]) -> dict[str, TenantConfig]:
        async with self._database.reading() as connection:
            invalid: dict[str, str] = {}
            found = await queries.tenant_configs(connection, list(tenant_ids), invalid)
        for tenant_id in set(invalid.values()):
            log_event(
                _log,
                logging.WARNING,
                "catalog.invalid_tenant",
                "the database holds invalid configuration, not restoring the overrides of this tenant",
                tenant=tenant_id,
            )
        return found

    async def revisions(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        async with self._database.reading() as connection:
            return await override_queries.tenant_revisions(connection, list(tenant_ids))

    async def overrides_by_id(self, ids: Iterable[str]) -> list[Override]:
        async with self._database.reading() as connection:
            return await queries.find_where_in(connection, Override, "id", ids)

    async def override_rows(self, after: OverrideRow | None, expires_after: datetime, limit: int) -> list[OverrideRow]:
        async with self._database.reading() as connection:
            return await override_queries.override_rows(connection, after, expires_after, limit)

    async def deleted_overrides(self, tenant_id: str, after: int, since: datetime, limit: int) -> list[DeletedOverride]:
        async with self._database.reading() as connection:
            return await override_queries.deleted_overrides(connection, tenant_id, after, since, limit)

    async def tenants_with_unpublished_changes(self, tenant_ids: Iterable[str], since: datetime) -> set[str]:
        async with self._database.reading() as connection:
            return await override_queries.tenants_with_unpublished_changes(connection, tenant_ids, since)
