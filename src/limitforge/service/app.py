"""Build a service from its settings: an ASGI application with all of its parts."""

import asyncio
from pathlib import Path

from limitforge.catalog.credentials import Peppers
from limitforge.core.clock import SystemClock
from limitforge.errors import InvalidInput
from limitforge.limiter import Limiter
from limitforge.service.checks.authentication import Authenticator
from limitforge.service.checks.batches import BatchHandler
from limitforge.service.checks.body_sizes import MAX_BATCH_BODY_BYTES, MAX_BODY_BYTES
from limitforge.service.checks.handler import CheckHandler
from limitforge.service.checks.sealed_ids import IdSealer
from limitforge.service.checks.tenant_api import TenantApi
from limitforge.service.configuration import Configuration, DatabaseConfiguration, FileConfiguration
from limitforge.service.counters.process_counters import ProcessCounters
from limitforge.service.counters.shared_counters import SharedCounters
from limitforge.service.counters.throttled import ThrottledTracker
from limitforge.service.http.asgi import AsgiRouter, Receive, Scope, Send
from limitforge.service.http.connection_context import ConnectionContext, FastRoute
from limitforge.service.http.connections import ConnectionRegistry, raise_file_limit
from limitforge.service.http.health import Health
from limitforge.service.http.metrics import MetricsEndpoint
from limitforge.service.http.trusted_proxies import TrustedProxies
from limitforge.service.settings import Settings

MAX_METRICS_CONNECTIONS = 64
MAX_METRICS_BUFFERED_BYTES = 1_048_576


class Service:
    """An ASGI application that starts and stops with its lifespan.

    Processes that are given the same folder add up their metrics and their lists of throttled subjects there.
    """

    def __init__(self, settings: Settings, counters_folder: Path | None = None) -> None:
        if not settings.peppers:
            raise InvalidInput(
                "LIMITFORGE_PEPPERS",
                "is required: it is the secret that API keys are hashed with. Keep it: if it is lost, all keys are "
                f"invalid. A new one: {Peppers.generate_text()}",
            )
        peppers = Peppers.parse(settings.peppers)
        self.settings = settings
        self._clock = SystemClock()
        self._limiter = Limiter.connect(
            settings.store_url, key_prefix=settings.key_prefix, options=settings.store_options()
        )
        self.counters = ProcessCounters()
        self.throttled = ThrottledTracker(peppers, counters_folder)
        self._configuration: Configuration = (
            FileConfiguration(settings, peppers, self._limiter, self.counters)
            if settings.config
            else DatabaseConfiguration(settings, peppers, self._limiter, self.counters, self.throttled)
        )
        self.live_configuration = self._configuration.live_configuration

        id_sealer = IdSealer(peppers)
        authenticator = Authenticator(self.live_configuration.cache.callers)
        self.checks = CheckHandler(self._limiter, authenticator, id_sealer, self.counters, self._on_denied)
        self.batches = BatchHandler(self._limiter, self.checks)
        tenant_api = TenantApi(self._limiter, self.checks, id_sealer)

        self._health = Health(self._limiter, self._configuration.catalog_status)
        self._shared_counters = SharedCounters(self.counters, counters_folder)
        self.metrics = MetricsEndpoint(
            self._shared_counters,
            self._configuration.authorize_metrics,
            lambda: self._limiter.status().new_buckets_per_minute,
            self.live_configuration.status,
        )

        fast_routes: dict[bytes, FastRoute] = {
            f"{settings.root_path}/v1/check".encode(): (
                self.counters.response_counter("check"),
                self.checks.handle,
                MAX_BODY_BYTES,
            ),
            f"{settings.root_path}/v1/check/batch".encode(): (
                self.counters.response_counter("batch"),
                self.batches.handle,
                MAX_BATCH_BODY_BYTES,
            ),
        }
        self.connection_context = ConnectionContext(
            authenticator,
            self.counters,
            fast_routes,
            settings.parse_proxies(),
            ConnectionRegistry(raise_file_limit(settings.max_connections)),
        )
        self.metrics_context = ConnectionContext(
            authenticator,
            self.counters,
            {},
            TrustedProxies(),
            ConnectionRegistry(MAX_METRICS_CONNECTIONS, MAX_METRICS_BUFFERED_BYTES),
        )
        self._router = AsgiRouter(
            self.checks,
            self.batches,
            tenant_api,
            self.counters,
            self._health,
            self.metrics.respond_authorized,
            settings.root_path,
            self._configuration.admin_app,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(scope, receive, send)
        else:
            await self._router(scope, receive, send)

    async def start(self) -> None:
        await self._configuration.start()
        await self._shared_counters.start()
        self._health.start()

    async def close(self) -> None:
        await self._health.close()
        await self._shared_counters.close()
        await self._configuration.close()
        await self._limiter.close()

    async def _run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except Exception as error:  # noqa: BLE001 - ASGI has a message for it, and the server reports it
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.shield(self.close())
        await send({"type": "lifespan.shutdown.complete"})

    def _on_denied(self, tenant_id: str, subject: str) -> None:
        self.throttled.record_denial(tenant_id, subject, self._clock.now_us())
