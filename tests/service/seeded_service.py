"""The program as it is deployed: `serve` on a database with the demo tenant, and calls of its administrator."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from limitforge.catalog import model
from limitforge.catalog.credentials import Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from tests.servers import find_free_port
from tests.service.databases import seed_demo
from tests.service.program import HttpResponse, RunningService, run_service

PEPPER = "an-unmistakable-pepper-of-these-tests"
SETTINGS = {"LIMITFORGE_PEPPERS": f"1:{PEPPER}", "LIMITFORGE_DEADLINE_MS": "20000"}  # the machine may be busy


@dataclass(frozen=True)
class SeededService:
    """A running service. `demo` is the content of `limitforge demo --json`."""

    running: RunningService
    demo: dict[str, Any]
    catalog: "DirectCatalog"
    prefix: str = ""

    def admin(self, method: str, path: str, body: Any = None, **headers: str) -> HttpResponse:
        """Call the admin API with a token for everything. `path` follows `/v1/admin/`.

        If the token calls too often, wait and try again.
        """
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent["authorization"] = f"Bearer {self.demo['admin_token']}"
        content = None if body is None else json.dumps(body).encode()
        while True:
            answer = self.running.request(method, f"{self.prefix}/v1/admin/{path}", content, sent)
            if answer.status != 429:
                return answer
            time.sleep(int(answer.headers["retry-after"]))

    def create(self, path: str, body: Any) -> dict[str, Any]:
        answer = self.admin("POST", path, body)
        assert answer.status == 201, answer
        made: dict[str, Any] = answer.json
        return made

    def tenant(self, *limits: dict[str, Any], **fields: Any) -> "TenantClient":
        """Create a tenant whose default plan has these limits."""
        return TenantClient(self, list(limits), fields)


class DirectCatalog:
    """Writes to the database directly, as the command line does: in one edit, and without a rate limit."""

    def __init__(self, database: str) -> None:
        self._runner = asyncio.Runner()
        self._catalog = Catalog(Database(database), peppers=Peppers.parse(SETTINGS["LIMITFORGE_PEPPERS"]))

    def create_tenant(self, limits: list[dict[str, Any]], fields: dict[str, Any]) -> tuple[str, str, str, str]:
        """Create a tenant. Return its id, those of its plan (empty without limits) and key, and the key itself."""
        return self._runner.run(self._create_tenant(limits, fields))

    def close(self) -> None:
        self._runner.run(self._catalog.database.close())
        self._runner.close()

    async def _create_tenant(self, limits: list[dict[str, Any]], fields: dict[str, Any]) -> tuple[str, str, str, str]:
        async with self._catalog.edit("test:seeded") as edit:
            tenant_id = (await edit.create(model.Tenant, fields)).id
            plan_id = ""
            if limits:
                plan = {"tenant_id": tenant_id, "name": "default", "limits": limits}
                plan_id = (await edit.create(model.Plan, plan)).id
                await edit.update(model.Tenant, tenant_id, {"default_plan_id": plan_id})
            key, secret = await edit.create_key({"tenant_id": tenant_id, "name": "web"})
        return tenant_id, plan_id, key.id, secret.text


class TenantClient:
    """A tenant with a key, and calls with that key."""

    def __init__(self, service: SeededService, limits: list[dict[str, Any]], fields: dict[str, Any]) -> None:
        self.service = service
        self.name = f"t-{uuid4().hex[:12]}"
        made = service.catalog.create_tenant(limits, {"name": self.name, **fields})
        self.id, self.plan_id, self.key_id, self.key = made

    def create(self, path: str, **fields: Any) -> dict[str, Any]:
        return self.service.create(path, {"tenant_id": self.id, **fields})

    def change(self, **fields: Any) -> None:
        answer = self.service.admin("PATCH", f"tenants/{self.id}", fields)
        assert answer.status == 200, answer

    def check(self, key: str | None = None, **fields: Any) -> HttpResponse:
        return self.post("check", key, **{"resource": "GET:/orders", "subject": "user:42", **fields})

    def post(self, call: str, key: str | None = None, **body: Any) -> HttpResponse:
        return self.service.running.post(f"{self.service.prefix}/v1/{call}", body, key=key or self.key)

    def usage(self, query: str = "resource=GET:/orders&subject=user:42", key: str | None = None) -> HttpResponse:
        path = f"{self.service.prefix}/v1/usage?{query}"
        return self.service.running.request("GET", path, headers={"x-api-key": key or self.key})


@contextlib.contextmanager
def run_seeded_service(
    database: str, store: str = "memory://", *options: str, log: Path | None = None, **settings: str
) -> Iterator[SeededService]:
    """Run the program on a database with the demo tenant. `settings` are its settings, such as `log_level="debug"`."""
    made: dict[str, Any] = msgspec.to_builtins(seed_demo(database, SETTINGS["LIMITFORGE_PEPPERS"]))
    environment = SETTINGS | {f"LIMITFORGE_{name.upper()}": value for name, value in settings.items()}
    environment["LIMITFORGE_KEY_PREFIX"] = uuid4().hex
    where = ("--database", database, "--store", store, *options)
    with (
        contextlib.closing(DirectCatalog(database)) as beside,
        run_service(find_free_port(), *where, environment=environment, log=log) as running,
    ):
        yield SeededService(running, made, beside, prefix=settings.get("root_path", ""))
