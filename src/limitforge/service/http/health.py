"""Live and ready: what a load balancer asks. Neither waits for anything."""

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec

from limitforge.errors import StoreError
from limitforge.limiter import Limiter
from limitforge.service.checks.responses import JSON_TYPE, Response

PROBE_SECONDS = 1.0

_encode = msgspec.json.Encoder().encode


class Health:
    """`catalog` returns how the catalog is doing: its `state`, ok or degraded, and `since` when.

    Both calls are open to strangers. They show no sizes, revisions, addresses or error texts: those are in the metrics
    and in the log.
    """

    def __init__(self, limiter: Limiter, catalog: Callable[[], dict[str, Any]]) -> None:
        self._limiter = limiter
        self._catalog = catalog
        self._live = _encode({"status": "ok", "version": version("limitforge")})
        self._has_answered = False
        self._since = time.time()
        self._probe_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Find out whether the store is there, before the first check does."""
        self._probe_task = asyncio.get_running_loop().create_task(self._probe_store())

    async def close(self) -> None:
        if self._probe_task is not None:
            self._probe_task.cancel()
            await asyncio.gather(self._probe_task, return_exceptions=True)

    async def _probe_store(self) -> None:
        while not self._has_answered:
            try:
                await self._limiter.get_override("*", "ready", tenant="%ready")
            except StoreError:
                await asyncio.sleep(PROBE_SECONDS)
            else:
                self._has_answered, self._since = True, time.time()

    async def live(self, *_: Any) -> Response:
        return Response(200, JSON_TYPE, b"", self._live)

    async def ready(self, *_: Any) -> Response:
        """Ready as long as checks are answered, also by a failure behaviour; `degraded` says that they are."""
        store, catalog = self._store_status(), self._catalog()
        is_ok = store["state"] == catalog["state"] == "ok"
        return Response(
            200, JSON_TYPE, b"", _encode({"status": "ok" if is_ok else "degraded", "store": store, "catalog": catalog})
        )

    def _store_status(self) -> dict[str, Any]:
        """`unreached` until it has answered once."""
        status = self._limiter.status()
        since = self._since if status.since is None else status.since
        state = "ok" if self._has_answered else "unreached"
        return {"state": state if status.breaker == "closed" else status.breaker, "since": since}
