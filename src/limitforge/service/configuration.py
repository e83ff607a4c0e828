"""Where a service has its configuration: in a database, with an admin API, or in a file, without one."""

import asyncio
from collections.abc import Iterable
from typing import Any

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.database import Database
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.catalog.live.live_file import LiveFile
from limitforge.catalog.live.shared_redis import SharedRedis
from limitforge.catalog.model import TokenScope
from limitforge.limiter import Limiter
from limitforge.service.admin.app import create_admin_app
from limitforge.service.admin.authentication import TokenAuthenticator
from limitforge.service.admin.session import AdminSession
from limitforge.service.admin.usage_recorder import UsageRecorder
from limitforge.service.checks.responses import problem_response
from limitforge.service.counters.process_counters import ProcessCounters
from limitforge.service.counters.throttled import ThrottledTracker
from limitforge.service.http.asgi import ASGIApp, Receive, Scope, Send, send_response
from limitforge.service.problems import HttpError
from limitforge.service.settings import Settings

USAGE_FLUSH_SECONDS = 10.0  # how often usage is written to the database


class DatabaseConfiguration:
    """A configuration in a database: the admin API changes it, and usage is recorded in it."""

    def __init__(
        self,
        settings: Settings,
        peppers: Peppers,
        limiter: Limiter,
        counters: ProcessCounters,
        throttled: ThrottledTracker,
    ) -> None:
        self._catalog_redis = _connect_catalog_redis(settings.store_url)
        self._database = Database(settings.database_url)
        self.live_configuration = LiveCatalog(
            self._database,
            peppers,
            lookup_seconds=settings.lookup_deadline_ms / 1_000,
            catalog_redis=self._catalog_redis,
            override_store=limiter,
            on_tenant_loaded=lambda tenant: limiter.set_lanes(tenant.id, tenant.lane_layout),
            key_prefix=settings.key_prefix,
            header_options=settings.header_options(),
            on_overrides_restored=counters.count_restored_overrides,
            on_redis_memory_limit=limiter.set_server_memory,
        )
        self._authenticator = TokenAuthenticator(
            self.live_configuration.catalog, self.live_configuration.cache, limiter
        )
        self._throttled = throttled
        self._usage = UsageRecorder(self._database, counters, take_last_used=self._authenticator.take_last_used)
        self._flush_task: asyncio.Task[None] | None = None
        self.admin_app: ASGIApp = create_admin_app(
            self.live_configuration,
            limiter,
            self._authenticator,
            usage_recorder=self._usage,
            throttled_tracker=throttled,
            root_path=settings.root_path,
        )

    async def start(self) -> None:
        await self.live_configuration.start()
        await self._throttled.start()
        self._flush_task = asyncio.get_running_loop().create_task(self._flush_usage())

    async def close(self) -> None:
        if self._flush_task is not None:
            self._flush_task.cancel()
            await asyncio.gather(self._flush_task, return_exceptions=True)
            await self._usage.flush()
        await self._throttled.close()
        await self.live_configuration.close()
        if self._catalog_redis is not None:
            await self._catalog_redis.close()
        await self._database.close()

    def catalog_status(self) -> dict[str, Any]:
        """Return the `catalog` member of a readiness response."""
        status = self.live_configuration.status()
        return {"state": status.database, "since": status.since}

    async def authorize_metrics(self, authorization: Iterable[str], client_address: str) -> None:
        """Raise an error unless the token may read the numbers of all tenants."""
        token = await self._authenticator.authenticate(authorization, client_address)
        session = AdminSession(token, self.live_configuration.catalog)
        session.require_scope(TokenScope.READ)
        session.require_all_tenants("metrics")

    async def _flush_usage(self) -> None:
        while True:
            await asyncio.sleep(USAGE_FLUSH_SECONDS)
            await self._usage.flush()


class FileConfiguration:
    """A configuration in a file. Changes are made in the file, so there is no admin API."""

    def __init__(self, settings: Settings, peppers: Peppers, limiter: Limiter, counters: ProcessCounters) -> None:
        self._catalog_redis = _connect_catalog_redis(settings.store_url)
        self.live_configuration = LiveFile(
            settings.config,
            peppers,
            catalog_redis=self._catalog_redis,
            override_store=limiter,
            on_tenant_loaded=lambda tenant: limiter.set_lanes(tenant.id, tenant.lane_layout),
            key_prefix=settings.key_prefix,
            header_options=settings.header_options(),
            on_overrides_restored=counters.count_restored_overrides,
            on_redis_memory_limit=limiter.set_server_memory,
        )

    async def start(self) -> None:
        await self.live_configuration.start()

    async def close(self) -> None:
        await self.live_configuration.close()
        if self._catalog_redis is not None:
            await self._catalog_redis.close()

    def catalog_status(self) -> dict[str, Any]:
        """Return the `catalog` member of a readiness response."""
        status = self.live_configuration.status()
        return {"state": status.file, "since": status.since}

    async def authorize_metrics(self, authorization: Iterable[str], client_address: str) -> None:
        """Raise an error: without an admin API there are no tokens."""
        detail = "a service with a configuration file has no admin tokens; set LIMITFORGE_METRICS_PORT to read metrics"
        raise HttpError(404, "unknown_path", detail)

    async def admin_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            detail = "unknown path; a service with a configuration file has no admin API"
            await send_response(send, problem_response(HttpError(404, "unknown_path", detail)))


Configuration = DatabaseConfiguration | FileConfiguration


def _connect_catalog_redis(store_url: str) -> SharedRedis | None:
    if store_url.startswith("memory:"):
        return None
    from limitforge.stores.redis.catalog_redis import CatalogRedis

    return CatalogRedis(store_url)
