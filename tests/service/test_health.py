"""Readiness names the degraded part, and stays 200."""

import asyncio
import time
from typing import Any

import msgspec

from limitforge import FixedWindow, Limiter, StoreOptions
from limitforge.service.http.health import Health
from tests.servers import RedisServer

SECONDS = 30.0
TEN = FixedWindow(name="ten", limit=10, window_seconds=60)


class HealthProbe:
    """A `Health` on a real limiter. `catalog` is the status of the catalog."""

    def __init__(self, limiter: Limiter) -> None:
        self.catalog = {"state": "ok", "since": 1.0}
        self.health = Health(limiter, lambda: self.catalog)

    async def ready(self) -> dict[str, Any]:
        answer = await self.health.ready()
        assert answer.status == 200  # checks are answered, if only by the failure behaviour
        body: dict[str, Any] = msgspec.json.decode(answer.body)
        return body

    async def eventually(self, store: str) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while (body := await self.ready())["store"]["state"] != store:
            assert time.monotonic() < deadline, body
            await asyncio.sleep(0.01)
        return body


async def test_ready_is_degraded_until_the_store_has_answered_and_while_the_catalog_is_away() -> None:
    async with Limiter.connect("memory://") as limiter:
        probe = HealthProbe(limiter)
        body = await probe.ready()
        assert (body["status"], body["store"]["state"]) == ("degraded", "unreached")
        probe.health.start()
        body = await probe.eventually("ok")
        assert (body["status"], body["catalog"]) == ("ok", {"state": "ok", "since": 1.0})
        probe.catalog = {"state": "degraded", "since": 2.0}
        body = await probe.ready()
        assert (body["status"], body["store"]["state"], body["catalog"]["since"]) == ("degraded", "ok", 2.0)
        await probe.health.close()


async def test_ready_is_degraded_while_redis_is_down_and_ok_once_it_is_back(own_redis_server: RedisServer) -> None:
    options = StoreOptions(failure="open", deadline_ms=1_000, breaker_seconds=0.05)
    async with Limiter.connect(own_redis_server.url, options=options) as limiter:
        probe = HealthProbe(limiter)
        probe.health.start()
        before = await probe.eventually("ok")
        own_redis_server.kill()
        while limiter.status().breaker == "closed":
            await limiter.check("r", "s", limits=TEN)
        body = await probe.ready()
        assert body["status"] == "degraded"
        assert body["store"]["state"] != "ok"
        assert body["store"]["since"] >= before["store"]["since"]
        own_redis_server.restart()
        while limiter.status().breaker != "closed":
            await limiter.check("r", "s", limits=TEN, cost=0)
        assert (await probe.eventually("ok"))["status"] == "ok"
        await probe.health.close()
