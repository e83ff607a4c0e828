"""Live and ready: what a load balancer asks. Neither waits for anything."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec

from limitforge.limiter import Limiter
from limitforge.service.answers import JSON, Answer

_encode = msgspec.json.Encoder().encode


class Health:
    """`catalog` tells how the catalog is doing: its `state` is ok or degraded."""

    def __init__(self, limiter: Limiter, catalog: Callable[[], dict[str, Any]]) -> None:
        self._limiter = limiter
        self._catalog = catalog
        self._live = _encode({"status": "ok", "version": version("limitforge")})

    async def live(self, *_: Any) -> Answer:
        return Answer(200, JSON, b"", self._live)

    async def ready(self, *_: Any) -> Answer:
        """Ready as long as checks are answered, also by a failure behaviour; `degraded` says that they are."""
        store, catalog = self._limiter.status(), self._catalog()
        is_degraded = store.breaker != "closed" or catalog["state"] != "ok"
        told = {
            "status": "degraded" if is_degraded else "ok",
            "store": {"state": "ok" if store.breaker == "closed" else store.breaker, "since": store.since},
            "catalog": catalog,
        }
        return Answer(200, JSON, b"", _encode(told))
