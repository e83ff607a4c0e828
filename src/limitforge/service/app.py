"""The composition root: the one place where settings become a running service."""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.catalog.live.live_file import LiveFile
from limitforge.catalog.model import TokenScope
from limitforge.core.clock import SystemClock
from limitforge.errors import InvalidInput
from limitforge.limiter import Limiter
from limitforge.service.admin.app import create_admin_app
from limitforge.service.admin.authentication import TokenAuthenticator
from limitforge.service.admin.session import AdminSession
from limitforge.service.admin.usage_recorder import UsageRecorder
from limitforge.service.checks.handler import CheckHandler
from limitforge.service.checks.responses import problem_response
from limitforge.service.checks.sealed_ids import IdSealer
from limitforge.service.checks.tenant_api import TenantApi
from limitforge.service.counters.process_counters import ProcessCounters
from limitforge.service.counters.shared_counters import SharedCounters
from limitforge.service.counters.throttled import ThrottledTracker
from limitforge.service.http.asgi import ASGIApp, AsgiRouter, Receive, Scope, Send, send_response
from limitforge.service.http.connections import ConnectionRegistry, raise_file_limit
from limitforge.service.http.health import Health
from limitforge.service.http.listener import Listener
from limitforge.service.http.metrics import MetricsEndpoint
from limitforge.service.http.trusted_proxies import TrustedProxies
from limitforge.service.problems import HttpError
from limitforge.service.settings import Settings, load_settings

USAGE_FLUSH_SECONDS = 10.0  # how often what was counted is written down
MAX_METRICS_CONNECTIONS = 64  # connections to the port for metrics
MAX_METRICS_BUFFERED = 1_048_576

_log = logging.getLogger(__name__)


class DatabaseBackend:
    """What is particular to a service whose catalog is a database: it can be administered, and writes down usage."""

    def __init__(
        self,
        settings: Settings,
        peppers: Peppers,
        limiter: Limiter,
        counters: ProcessCounters,
        throttled: ThrottledTracker,
    ) -> None:
        self._catalog_copies = _catalog_copies(settings.store_url)
        self._database = Database(settings.database_url)
        self.live_catalog = LiveCatalog(
            self._database,
            peppers,
            shared=self._catalog_copies,
            sink=limiter,
            on_tenant_loaded=lambda tenant: limiter.set_lanes(tenant.id, tenant.placement),
            key_prefix=settings.key_prefix,
            header_options=settings.header_form(),
            on_restored=counters.count_restored_overrides,
            on_memory=limiter.store.set_server_memory,
            lookup_seconds=settings.lookup_deadline_ms / 1_000,
        )
        self._access = TokenAuthenticator(self.live_catalog.catalog, self.live_catalog.cache, limiter)
        self._throttled = throttled
        self._usage = UsageRecorder(self._database, counters, take_last_used=self._access.take_last_used)
        self._flush_task: asyncio.Task[None] | None = None
        self.fallback_app: ASGIApp = create_admin_app(
            self.live_catalog,
            limiter,
            self._access,
            usage_recorder=self._usage,
            throttled_subjects=throttled,
            root_path=settings.root_path,
        )

    async def start(self) -> None:
        await self.live_catalog.start()
        await self._throttled.start()
        self._flush_task = asyncio.get_running_loop().create_task(self._flush_usage())

    async def close(self) -> None:
        if self._flush_task is not None:
            self._flush_task.cancel()
            await asyncio.gather(self._flush_task, return_exceptions=True)
            await self._usage.flush()
        await self._throttled.close()
        await self.live_catalog.close()
        if self._catalog_copies is not None:
            await self._catalog_copies.close()
        await self._database.close()

    def catalog_status(self) -> dict[str, Any]:
        status = self.live_catalog.status()
        return {"state": status.database, "since": status.since}

    async def authorize_metrics(self, authorization: Iterable[str], source: str) -> None:
        """For whoever may see the numbers of all tenants."""
        session = AdminSession(await self._access.authenticate(authorization, source), self.live_catalog.catalog)
        session.require_scope(TokenScope.READ)
        session.require_all_tenants("metrics")

    async def _flush_usage(self) -> None:
        while True:
            await asyncio.sleep(USAGE_FLUSH_SECONDS)
            await self._usage.flush()


class FileBackend:
    """What is particular to a service that reads a file: whoever may write the file administers it."""

    def __init__(self, settings: Settings, peppers: Peppers, limiter: Limiter, counters: ProcessCounters) -> None:
        self._catalog_copies = _catalog_copies(settings.store_url)
        self.live_catalog = LiveFile(
            settings.config,
            peppers,
            sink=limiter,
            shared=self._catalog_copies,
            on_tenant_loaded=lambda tenant: limiter.set_lanes(tenant.id, tenant.placement),
            key_prefix=settings.key_prefix,
            header_options=settings.header_form(),
            on_restored=counters.count_restored_overrides,
            on_memory=limiter.store.set_server_memory,
        )

    async def start(self) -> None:
        await self.live_catalog.start()

    async def close(self) -> None:
        await self.live_catalog.close()
        if self._catalog_copies is not None:
            await self._catalog_copies.close()

    def catalog_status(self) -> dict[str, Any]:
        status = self.live_catalog.status()
        return {"state": status.file, "since": status.since}

    async def authorize_metrics(self, authorization: Iterable[str], source: str) -> None:
        detail = "a service that reads a file has no admin tokens: give metrics a port, with LIMITFORGE_METRICS_PORT"
        raise HttpError(404, "unknown_path", detail)

    async def fallback_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            detail = "there is nothing at this path; a service that reads a file has no admin API"
            await send_response(send, problem_response(HttpError(404, "unknown_path", detail)))


Backend = DatabaseBackend | FileBackend


class Service:
    """An ASGI application, which starts and ends with its lifespan. Processes that share a folder tell their metrics
    and who is throttled together.
    """

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        if not settings.peppers:
            raise InvalidInput(
                "LIMITFORGE_PEPPERS",
                f"is needed to recognise keys. Keep one that nobody knows, such as {Peppers.generate()}",
            )
        peppers = Peppers.parse(settings.peppers)
        self.settings = settings
        self._clock = SystemClock()
        self._limiter = Limiter.connect(
            settings.store_url, key_prefix=settings.key_prefix, options=settings.store_options()
        )
        self.counters = ProcessCounters()
        self.throttled = ThrottledTracker(peppers, folder)
        self._backend: Backend = (
            FileBackend(settings, peppers, self._limiter, self.counters)
            if settings.config
            else DatabaseBackend(settings, peppers, self._limiter, self.counters, self.throttled)
        )
        self.live_catalog = self._backend.live_catalog
        tickets = IdSealer(peppers)
        checks = CheckHandler(self._limiter, self.live_catalog.cache, tickets, self.counters, self._on_denied)
        self._health = Health(self._limiter, self._backend.catalog_status)
        connections = ConnectionRegistry(raise_file_limit(settings.max_connections))
        self.listener = Listener.for_checks(checks, settings.root_path, settings.parse_proxies(), connections)
        self.metrics_listener = Listener(
            checks, {}, TrustedProxies(), ConnectionRegistry(MAX_METRICS_CONNECTIONS, MAX_METRICS_BUFFERED)
        )
        calls = TenantApi(self._limiter, checks, tickets)
        self._shared_counters = SharedCounters(self.counters, folder)
        self.metrics = MetricsEndpoint(
            self._shared_counters,
            self._backend.authorize_metrics,
            lambda: self._limiter.status().new_buckets_per_minute,
            self.live_catalog.status,
        )
        self._router = AsgiRouter(
            checks, calls, self._health, self.metrics.respond_authorized, settings.root_path, self._backend.fallback_app
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(scope, receive, send)
        else:
            await self._router(scope, receive, send)

    async def start(self) -> None:
        await self._backend.start()
        await self._shared_counters.start()
        self._health.start()

    async def close(self) -> None:
        await self._health.close()
        await self._shared_counters.close()
        await self._backend.close()
        await self._limiter.close()

    async def _run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server must hear of it
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.shield(self.close())
        await send({"type": "lifespan.shutdown.complete"})

    @property
    def catalog(self) -> Catalog:
        """What can be administered; a service that reads a file has none."""
        if isinstance(self.live_catalog, LiveFile):
            raise InvalidInput("config", "a service that reads a file has no catalog to change")
        return self.live_catalog.catalog

    def _on_denied(self, tenant_id: str, subject: str) -> None:
        self.throttled.record_denial(tenant_id, subject, self._clock.now_us())


def create_app(settings: Settings | None = None) -> Service:
    """The service of these settings; without any, of this process's environment."""
    return Service(settings or load_settings())


def _catalog_copies(store_url: str) -> Any:
    if store_url.startswith("memory:"):
        return None
    from limitforge.stores.redis.catalog_copies import CatalogRedis

    return CatalogRedis(store_url)
