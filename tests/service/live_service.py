"""A running service in this process, and clients of its admin API."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any, Self
from uuid import uuid4

import httpx
import msgspec
import uvicorn

from limitforge.catalog.credentials import PREFIXES, Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.live.live_catalog import LiveCatalog
from limitforge.catalog.model import Entity, Plan, Policy, Tenant, to_public_dict
from limitforge.service.app import Service
from limitforge.service.processes.worker import uvicorn_config
from limitforge.service.settings import Settings
from tests.service.databases import migrate

PEPPERS = "1:a pepper that the tests alone know"
START_SECONDS = 60.0  # generous, because the machine may be busy
CALL_SECONDS = 60.0
Fields = dict[str, Any]
LIMITS = [{"name": "burst", "algorithm": "token_bucket", "bucket_capacity": 3, "refill_rate_per_sec": 0.001}]
RESOURCE = "GET:/orders/{id}"
OVERRIDE = {"subject": "user:42", "limits": {"burst": {"limit": 5}}, "ttl_seconds": 3_600}
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Shared, because httpx would make a context for each client, even for plain HTTP, in 40 ms of CPU time."""


class LiveService:
    """The service on a free port of this machine, in its own thread."""

    def __init__(self, database_url: str, store_url: str = "memory://", **settings: Any) -> None:
        self.settings = Settings(database_url=database_url, store_url=store_url, peppers=PEPPERS, **settings)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.service = Service(self.settings)
        self._server = uvicorn.Server(uvicorn_config(self.service, self.settings))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._clients: list[AdminClient] = []
        self._runner = asyncio.Runner()  # for writes to the database that bypass the service
        self._database = Database(database_url)

    @property
    def catalog(self) -> Catalog:
        """The catalog in the database of the service."""
        live_catalog = self.service.live_configuration
        assert isinstance(live_catalog, LiveCatalog)
        return live_catalog.catalog

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    @property
    def url(self) -> str:
        return f"{self.origin}{self.settings.root_path}"

    def __enter__(self) -> Self:
        migrate(self.settings.database_url)
        self._thread.start()
        for _ in range(int(START_SECONDS / 0.02)):
            if self._server.started or not self._thread.is_alive():
                break
            time.sleep(0.02)
        assert self._server.started, "the service did not start"
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.http.close()
        self._server.should_exit = True
        self._thread.join(START_SECONDS)
        self._socket.close()
        self._runner.run(self._database.close())
        self._runner.close()
        assert not self._thread.is_alive(), "the service did not end"

    def admin(self, name: str = "", **fields: Any) -> "AdminClient":
        """Return a client with a new token, for all tenants and both scopes unless `fields` say otherwise."""
        given = {"name": name or f"t-{uuid4().hex[:12]}", "scopes": ["read", "write"], **fields}
        return self.client(self._runner.run(self._create_token(given)))

    def client(self, token: str | None = None) -> "AdminClient":
        """Return a client with this token, or without one."""
        self._clients.append(AdminClient(self, token))
        return self._clients[-1]

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine on the event loop of the service."""
        (server,) = self._server.servers
        asyncio.run_coroutine_threadsafe(work, server.get_loop()).result(CALL_SECONDS)

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    async def _create_token(self, fields: Fields) -> str:
        catalog = Catalog(self._database, peppers=Peppers.parse(PEPPERS))
        async with catalog.edit("test:live") as edit:
            _, credential = await edit.create_token(fields)
        return credential.text


class AdminClient:
    """Calls the admin API with one token. Paths are those under `/v1/admin`."""

    def __init__(self, live: LiveService, token: str | None) -> None:
        self.live = live
        self.token = token or ""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=live.url, headers=headers, timeout=CALL_SECONDS, verify=NO_TLS)

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Return the answer. If the token calls too often, wait and try again."""
        if body is not None:
            options["json"] = body
        while True:
            answer = self.http.request(method, f"/v1/admin{path}", **options)
            if answer.status_code != 429 or answer.json()["code"] != "rate_limit_exceeded":
                return answer
            time.sleep(int(answer.headers["retry-after"]))

    def get(self, path: str, **query: Any) -> httpx.Response:
        return self.call("GET", path, params=query)

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return self.call("POST", path, body, headers=_header_names(headers))

    def put(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.call("PUT", path, body, headers=_header_names(headers))

    def patch(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.call("PATCH", path, body, headers=_header_names(headers))

    def delete(self, path: str, **headers: str) -> httpx.Response:
        return self.call("DELETE", path, headers=_header_names(headers))

    def create(self, path: str, body: Any) -> Fields:
        """Create an entity and return it."""
        answer = self.post(path, body)
        assert answer.status_code == 201, answer.text
        found: Fields = answer.json()
        return found

    def list_all(self, path: str, **query: Any) -> Iterator[Fields]:
        """Yield all entries of a list, page by page."""
        cursor: str | None = None
        while True:
            page = self.get(path, **query, **({} if cursor is None else {"cursor": cursor})).json()
            yield from page["items"]
            cursor = page["cursor"]
            if cursor is None:
                return


class TenantFixture:
    """A tenant with one entity of each kind, created in one edit, or with six calls of the admin API (`over_http`)."""

    def __init__(self, admin: AdminClient, name: str = "", *, over_http: bool = False) -> None:
        self.admin = admin
        tenant_name = name or f"n-{uuid4().hex[:12]}"
        if over_http:
            self._create_over_http(tenant_name)
        else:
            admin.live.run(self._create_in_one_edit(admin.live.catalog, tenant_name))
        self.id: str = self.tenant["id"]
        self.secret: str = self.key["key"]

    def _create_over_http(self, name: str) -> None:
        made = self.admin.create
        self.tenant = made("/tenants", {"name": name})
        own = {"tenant_id": self.tenant["id"]}
        self.plan = made("/plans", {**own, "name": "free", "limits": LIMITS})
        self.policy = made("/policies", {**own, "resource": RESOURCE, "plan_id": self.plan["id"]})
        self.key = made("/keys", {**own, "name": "web"})
        self.override = made("/overrides", {**own, **OVERRIDE})
        self.token = made("/tokens", {**own, "name": f"{name}-own", "scopes": ["read", "write"]})

    async def _create_in_one_edit(self, catalog: Catalog, name: str) -> None:
        token_id = f"tok_{self.admin.token.removeprefix(PREFIXES['admin'])[:16]}"
        async with catalog.edit(f"token:{token_id}") as edit:
            tenant = await edit.create(Tenant, {"name": name})
            own = {"tenant_id": tenant.id}
            plan = await edit.create(Plan, {**own, "name": "free", "limits": LIMITS})
            policy = await edit.create(Policy, {**own, "resource": RESOURCE, "plan_id": plan.id})
            key, secret = await edit.create_key({**own, "name": "web"})
            override = await edit.set_override({**own, **OVERRIDE})
            token, own_token = await edit.create_token({**own, "name": f"{name}-own", "scopes": ["read", "write"]})
        self.tenant, self.plan, self.policy, self.override = map(_as_json, (tenant, plan, policy, override))
        self.key = {**_as_json(key), "key": secret.text, "key_hash": key.secrets[0].hash}
        self.token = {**_as_json(token), "token": own_token.text}

    def tenant_admin(self) -> AdminClient:
        """Return a client whose token is for this tenant alone."""
        return self.admin.live.client(self.token["token"])

    def check(self, subject: str = "user:1", resource: str = "GET:/orders/7", **fields: Any) -> httpx.Response:
        body = {"resource": resource, "subject": subject, **fields}
        return self.admin.http.post("/v1/check", json=body, headers={"authorization": f"Bearer {self.secret}"})


def _as_json(entity: Entity) -> Fields:
    """Return an entity as responses contain it."""
    found: Fields = msgspec.json.decode(msgspec.json.encode(to_public_dict(entity)))
    return found


def _header_names(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
