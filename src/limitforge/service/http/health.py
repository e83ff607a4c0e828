"""Health and readiness for load balancers. Neither call waits for the store or the database."""

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
    """Answers `/v1/health` and `/v1/ready`.

    Anyone may call these, so they show no sizes, revisions, addresses or error texts. The metrics and the log do.
    """

    def __init__(self, limiter: Limiter, catalog_status: Callable[[], dict[str, Any]]) -> None:
        """`catalog_status` returns the `state` of the catalog, ok or degraded, and `since` when."""
        self._limiter = limiter
        self._catalog_status = catalog_status
        self._live_body = _encode({"status": "ok", "version": version("limitforge")})
        self._has_answered = False
        self._since = time.time()
        self._probe_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Probe the store until it answers once, so that readiness is known before the first check."""
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
        return Response(200, JSON_TYPE, b"", self._live_body)

    async def ready(self, *_: Any) -> Response:
        """Return 200 while checks are answered, and the status `degraded` while a failure behaviour answers them."""
        store, catalog = self._store_status(), self._catalog_status()
        is_ok = store["state"] == catalog["state"] == "ok"
        return Response(
            200, JSON_TYPE, b"", _encode({"status": "ok" if is_ok else "degraded", "store": store, "catalog": catalog})
        )

    def _store_status(self) -> dict[str, Any]:
        """Return the store's state: `unreached` until it has answered once, then `ok` or that of the breaker."""
        status = self._limiter.status()
        since = self._since if status.since is None else status.since
        state = "ok" if self._has_answered else "unreached"
        return {"state": state if status.breaker == "closed" else status.breaker, "since": since}
