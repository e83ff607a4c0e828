"""The composition root: the one place where settings become a running service."""

import asyncio
import logging
from typing import Any

from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database import Database
from limitforge.catalog.model import Tenant
from limitforge.catalog.node import Node
from limitforge.errors import InvalidInput
from limitforge.limiter import Limiter
from limitforge.service.admin.access import Access
from limitforge.service.admin.app import create_admin
from limitforge.service.admin.throttled import Throttled
from limitforge.service.admin.usage import UsageLog
from limitforge.service.asgi import DoorTwo, Receive, Scope, Send
from limitforge.service.calls import Calls
from limitforge.service.check import Checks
from limitforge.service.counters import Counters
from limitforge.service.health import Health
from limitforge.service.protocol import Doors
from limitforge.service.settings import Settings, load
from limitforge.service.tickets import Tickets

FLUSH_SECONDS = 10.0  # how often what was counted is written down

_log = logging.getLogger(__name__)


class Service:
    """An ASGI application, which starts and ends with its lifespan."""

    def __init__(self, settings: Settings) -> None:
        if not settings.peppers:
            raise InvalidInput(
                "LIMITFORGE_PEPPERS",
                f"is needed to recognise keys. Keep one that nobody knows, such as {Peppers.generate()}",
            )
        peppers = Peppers.parse(settings.peppers)
        self.settings = settings
        self._limiter = Limiter.connect(
            settings.store_url, key_prefix=settings.key_prefix, options=settings.store_options()
        )
        self._shared = _shared(settings.store_url)
        self._database = Database(settings.database_url)
        self.node = Node(
            self._database,
            peppers,
            shared=self._shared,
            sink=self._limiter,
            placed=self._place,
            key_prefix=settings.key_prefix,
        )
        self.counters = Counters()
        tickets = Tickets(peppers)
        checks = Checks(self._limiter, self.node.snapshots, tickets, self.counters)
        self._health = Health(self._limiter, self.node.status)
        self.doors = Doors(checks, settings.root_path)
        calls = Calls(self._limiter, checks, tickets)
        access = Access(self.node.catalog, self.node.snapshots, self._limiter)
        self.throttled = Throttled()
        self.usage = UsageLog(self._database, self.counters, used_tokens=access.used)
        self._flushing: asyncio.Task[None] | None = None
        admin = create_admin(
            self.node,
            self._limiter,
            access,
            usage_log=self.usage,
            heavy_hitters=self.throttled,
            root_path=settings.root_path,
        )
        self._door = DoorTwo(checks, calls, self._health, settings.root_path, admin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        else:
            await self._door(scope, receive, send)

    async def start(self) -> None:
        await self.node.start()
        self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            await self.usage.flush()
        await self.node.close()
        await self._limiter.close()
        if self._shared is not None:
            await self._shared.close()
        await self._database.close()

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server must hear of it
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        scope["state"]["doors"] = self.doors
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.shield(self.close())
        await send({"type": "lifespan.shutdown.complete"})

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.usage.flush()

    def _place(self, tenant: Tenant) -> None:
        self._limiter.set_lanes(tenant.id, tenant.placement)


def create_app(settings: Settings | None = None) -> Service:
    """The service of these settings; without any, of this process's environment."""
    return Service(settings or load())


def _shared(store_url: str) -> Any:
    if store_url.startswith("memory:"):
        return None
    from limitforge.stores.shared import SharedRedis

    return SharedRedis(store_url)
