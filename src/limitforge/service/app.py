"""The composition root: the one place where settings become a running service."""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from limitforge.catalog.catalog import Catalog
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import Database
from limitforge.catalog.file import FileNode
from limitforge.catalog.model import TokenScope
from limitforge.catalog.node import Node
from limitforge.core.clock import SystemClock
from limitforge.errors import InvalidInput
from limitforge.limiter import Limiter
from limitforge.service.admin.access import Access
from limitforge.service.admin.app import create_admin
from limitforge.service.admin.session import Session
from limitforge.service.admin.usage import UsageLog
from limitforge.service.answers import refused
from limitforge.service.asgi import App, DoorTwo, Receive, Scope, Send, send_answer
from limitforge.service.calls import Calls
from limitforge.service.check import Checks
from limitforge.service.connections import Connections, fitting
from limitforge.service.counters import Counters
from limitforge.service.doors import Doors
from limitforge.service.health import Health
from limitforge.service.metrics import Metrics
from limitforge.service.problems import BadRequest
from limitforge.service.proxies import Proxies
from limitforge.service.settings import Settings, load
from limitforge.service.sums import Sums
from limitforge.service.throttled import Throttled
from limitforge.service.tickets import Tickets

FLUSH_SECONDS = 10.0  # how often what was counted is written down
MAX_SCRAPERS = 64  # connections to the port for metrics
MAX_SCRAPED_BYTES = 1_048_576

_log = logging.getLogger(__name__)


class FromDatabase:
    """What is particular to a service whose catalog is a database: it can be administered, and writes down usage."""

    def __init__(
        self, settings: Settings, peppers: Peppers, limiter: Limiter, counters: Counters, throttled: Throttled
    ) -> None:
        self._shared = _shared(settings.store_url)
        self._database = Database(settings.database_url)
        self.node = Node(
            self._database,
            peppers,
            shared=self._shared,
            sink=limiter,
            placed=lambda tenant: limiter.set_lanes(tenant.id, tenant.placement),
            key_prefix=settings.key_prefix,
            form=settings.header_form(),
            on_restored=counters.restored,
            on_memory=limiter.store.fit_memory,
            lookup_seconds=settings.lookup_deadline_ms / 1_000,
        )
        self._access = Access(self.node.catalog, self.node.snapshots, limiter)
        self._throttled = throttled
        self._usage = UsageLog(self._database, counters, used_tokens=self._access.used)
        self._flushing: asyncio.Task[None] | None = None
        self.other: App = create_admin(
            self.node,
            limiter,
            self._access,
            usage_log=self._usage,
            heavy_hitters=throttled,
            root_path=settings.root_path,
        )

    async def start(self) -> None:
        await self.node.start()
        await self._throttled.start()
        self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            await self._usage.flush()
        await self._throttled.close()
        await self.node.close()
        if self._shared is not None:
            await self._shared.close()
        await self._database.close()

    def told(self) -> dict[str, Any]:
        status = self.node.status()
        return {"state": status.database, "since": status.since}

    async def admit(self, authorization: Iterable[str], source: str) -> None:
        """For whoever may see the numbers of all tenants."""
        session = Session(await self._access.admit(authorization, source), self.node.catalog)
        session.require(TokenScope.READ)
        session.require_fleet("metrics")

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._usage.flush()


class FromFile:
    """What is particular to a service that reads a file: whoever may write the file administers it."""

    def __init__(self, settings: Settings, peppers: Peppers, limiter: Limiter, counters: Counters) -> None:
        self._shared = _shared(settings.store_url)
        self.node = FileNode(
            settings.config,
            peppers,
            sink=limiter,
            shared=self._shared,
            placed=lambda tenant: limiter.set_lanes(tenant.id, tenant.placement),
            key_prefix=settings.key_prefix,
            form=settings.header_form(),
            on_restored=counters.restored,
            on_memory=limiter.store.fit_memory,
        )

    async def start(self) -> None:
        await self.node.start()

    async def close(self) -> None:
        await self.node.close()
        if self._shared is not None:
            await self._shared.close()

    def told(self) -> dict[str, Any]:
        status = self.node.status()
        return {"state": status.file, "since": status.since}

    async def admit(self, authorization: Iterable[str], source: str) -> None:
        detail = "a service that reads a file has no admin tokens: give metrics a port, with LIMITFORGE_METRICS_PORT"
        raise BadRequest(404, "unknown_path", detail)

    async def other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            detail = "there is nothing at this path; a service that reads a file has no admin API"
            await send_answer(send, refused(BadRequest(404, "unknown_path", detail)))


Parts = FromDatabase | FromFile


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
        self.counters = Counters()
        self.throttled = Throttled(peppers, folder)
        self._parts: Parts = (
            FromFile(settings, peppers, self._limiter, self.counters)
            if settings.config
            else FromDatabase(settings, peppers, self._limiter, self.counters, self.throttled)
        )
        self.node = self._parts.node
        tickets = Tickets(peppers)
        checks = Checks(self._limiter, self.node.snapshots, tickets, self.counters, self._denied)
        self._health = Health(self._limiter, self._parts.told)
        connections = Connections(fitting(settings.max_connections))
        self.doors = Doors.of_checks(checks, settings.root_path, settings.proxies(), connections)
        self.metrics_doors = Doors(checks, {}, Proxies(), Connections(MAX_SCRAPERS, MAX_SCRAPED_BYTES))
        calls = Calls(self._limiter, checks, tickets)
        self._sums = Sums(self.counters, folder)
        self.metrics = Metrics(
            self._sums, self._parts.admit, lambda: self._limiter.status().new_buckets_per_minute, self.node.status
        )
        self._door = DoorTwo(checks, calls, self._health, self.metrics.guarded, settings.root_path, self._parts.other)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        else:
            await self._door(scope, receive, send)

    async def start(self) -> None:
        await self._parts.start()
        await self._sums.start()
        self._health.start()

    async def close(self) -> None:
        await self._health.close()
        await self._sums.close()
        await self._parts.close()
        await self._limiter.close()

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        if isinstance(self.node, FileNode):
            raise InvalidInput("config", "a service that reads a file has no catalog to change")
        return self.node.catalog

    def _denied(self, tenant_id: str, subject: str) -> None:
        self.throttled.denied(tenant_id, subject, self._clock.now_us())


def create_app(settings: Settings | None = None) -> Service:
    """The service of these settings; without any, of this process's environment."""
    return Service(settings or load())


def _shared(store_url: str) -> Any:
    if store_url.startswith("memory:"):
        return None
    from limitforge.stores.shared import SharedRedis

    return SharedRedis(store_url)
