"""Where configuration is read from, as protocols: `DatabaseSource` and `FileSource` implement them."""

from collections.abc import Iterable
from datetime import datetime
from typing import Protocol

from limitforge.catalog.model import Key, Override, TenantConfig
from limitforge.catalog.override_rows import DeletedOverride, OverrideRow


class ConfigSource(Protocol):
    """The authoritative configuration: a database or a file. Methods raise `CatalogUnavailable`."""

    async def config(self, tenant_id: str) -> TenantConfig | None: ...

    async def key(self, key_id: str) -> Key | None: ...

    async def overrides(self, tenant_id: str) -> list[Override]: ...

    async def override(self, tenant_id: str, resource: str, subject: str) -> Override | None: ...

    async def tenants_with_overrides(self) -> list[str]: ...


class OverrideSource(ConfigSource, Protocol):
    """A source whose overrides are written to a store."""

    async def configs(self, tenant_ids: Iterable[str]) -> dict[str, TenantConfig]:
        """Return the configuration of those tenants that exist and are valid, by id."""

    async def revisions(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        """Return the revision of each existing tenant. It grows with each change that affects the tenant's checks."""

    async def overrides_by_id(self, ids: Iterable[str]) -> list[Override]: ...

    async def override_rows(self, after: OverrideRow | None, expires_after: datetime, limit: int) -> list[OverrideRow]:
        """Return a page of all overrides that expire later than `expires_after`, starting after the row `after`."""

    async def deleted_overrides(self, tenant_id: str, after: int, since: datetime, limit: int) -> list[DeletedOverride]:
        """Return the newest deletions with a number above `after`, oldest first."""

    async def tenants_with_unpublished_changes(self, tenant_ids: Iterable[str], since: datetime) -> set[str]:
        """Return those tenants with a change after `since` that another process is about to write to the store."""
