"""The real program while its database is restored from a backup, cut off or frozen, and Redis keeps its content."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Plan
from tests.catalog.backups import restore_postgres
from tests.cli.command import run_cli
from tests.postgres import PostgresServer, _environment, program_path
from tests.proxy import DropReplies, Proxy
from tests.servers import RedisServer, find_free_port
from tests.service.program import HttpResponse, RunningService, run_service

pytestmark = pytest.mark.slow

PEPPERS = "1:a pepper that the tests alone know"
PATIENCE_SECONDS = 60.0
IN_A_ROW = 40  # answers; the chance that one of two workers gives all of them is 1 in 10 ** 12


@dataclass
class Deployment:
    """A service with several workers, and an admin token."""

    service: RunningService
    token: str

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> HttpResponse:
        sent = {"authorization": f"Bearer {self.token}", **headers}
        content = None if body is None else json.dumps(body).encode()
        return self.service.request(method, f"/v1/admin{path}", content, sent)

    def create(self, path: str, body: Any) -> dict[str, Any]:
        answer = self.call("POST", path, body)
        assert answer.status == 201, answer.body
        found: dict[str, Any] = answer.json
        return found

    def set_limit(self, plan: str, limit: int) -> None:
        answer = self.call("PATCH", f"/plans/{plan}", {"limits": window(limit)})
        assert answer.status == 200, answer.body

    def limit(self, key: str) -> int:
        """Return the size of the limit that a check reports, or the status of its refusal."""
        answer = self.service.check(key, cost=0)
        return int(answer.json["limit"]) if answer.status == 200 else -answer.status

    def wait_for_limit(self, key: str, wanted: int) -> None:
        eventually(lambda: self.limit(key) == wanted, f"a check never says {wanted}")

    def all_workers_apply(self, key: str, wanted: int) -> bool:
        return all(self.limit(key) == wanted for _ in range(IN_A_ROW))

    def create_customer(self, name: str, limit: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        tenant = self.create("/tenants", {"name": name})
        plan = self.create("/plans", {"tenant_id": tenant["id"], "name": "plan", "limits": window(limit)})
        given = {"default_plan_id": plan["id"]}
        assert self.call("PATCH", f"/tenants/{tenant['id']}", given).status == 200
        return tenant, plan, self.create("/keys", {"tenant_id": tenant["id"], "name": "web"})


def window(limit: int) -> list[dict[str, Any]]:
    return [{"name": "calls", "algorithm": "fixed_window", "limit": limit, "window_seconds": 3_600}]


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def settings(database: str) -> dict[str, str]:
    return {"LIMITFORGE_PEPPERS": PEPPERS, "LIMITFORGE_DATABASE_URL": database, "LIMITFORGE_DEADLINE_MS": "10000"}


@contextlib.contextmanager
def deployment(database: str, redis: RedisServer, token: str, workers: int = 2, **more: str) -> Iterator[Deployment]:
    environment = settings(database) | {"LIMITFORGE_STORE_URL": redis.url, "LIMITFORGE_WORKERS": str(workers), **more}
    with run_service(find_free_port(), environment=environment) as service:
        eventually(lambda: service.request("GET", "/v1/ready").json["status"] == "ok", "it does not get ready")
        yield Deployment(service, token)


def prepare(database: str) -> str:
    """Create the schema, and return an admin token."""
    run_cli("db", "upgrade", LIMITFORGE_DATABASE_URL=database)
    given = ("tokens", "create", "ops", "--scope", "read", "--scope", "write", "--json")
    made = run_cli(*given, LIMITFORGE_DATABASE_URL=database, LIMITFORGE_PEPPERS=PEPPERS)
    token: str = json.loads(made.stdout)["token"]
    return token


def libpq(server: PostgresServer) -> str:
    return server.url.replace("+asyncpg", "")


def run(program: str, *arguments: str) -> None:
    subprocess.run([program_path(program), *arguments], check=True, env=_environment(), timeout=PATIENCE_SECONDS)


def dump(server: PostgresServer, file: Path) -> None:
    run("pg_dump", "--format=custom", f"--file={file}", "-d", libpq(server))


def restore(server: PostgresServer, file: Path) -> None:
    restore_postgres(libpq(server), file)


def end_sessions(server: PostgresServer) -> None:
    """End all sessions: a worker stopped within a transaction keeps its locks, and a restore would wait for them."""
    server.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename <> ''")


def test_after_a_restore_a_change_is_obeyed_by_every_worker(
    tmp_path: Path, own_postgres_server: PostgresServer, own_redis_server: RedisServer
) -> None:
    """After a restore, the database is behind what the workers have seen."""
    token = prepare(own_postgres_server.url)
    with deployment(own_postgres_server.url, own_redis_server, token) as running:
        tenant, plan, key = running.create_customer("acme", 1_000)
        eventually(lambda: running.all_workers_apply(key["key"], 1_000), "the plan does not decide")
        dump(own_postgres_server, tmp_path / "dump")
        for limit in (2_000, 3_000, 4_000):
            running.set_limit(plan["id"], limit)
        eventually(lambda: running.all_workers_apply(key["key"], 4_000), "the change does not decide")
        restore(own_postgres_server, tmp_path / "dump")
        running.set_limit(plan["id"], 1_500)
        eventually(lambda: running.all_workers_apply(key["key"], 1_500), "a worker does not obey the restored database")
        assert running.service.request("GET", "/v1/ready").json["status"] == "ok"
        answer = running.call("PATCH", f"/tenants/{tenant['id']}", {"suspended": True})
        assert answer.status == 200
        eventually(lambda: running.all_workers_apply(key["key"], -403), "a worker does not obey the suspension")


def test_a_restored_database_that_has_come_further_than_the_workers_is_obeyed(
    tmp_path: Path, own_postgres_server: PostgresServer, own_redis_server: RedisServer
) -> None:
    """The workers miss the restore and all that follows. Its numbers go on where they were; the change that counts is
    among those that the workers think to have seen.
    """
    token = prepare(own_postgres_server.url)
    with deployment(own_postgres_server.url, own_redis_server, token) as running:
        _, plan, key = running.create_customer("acme", 1_000)
        other = running.create_customer("other", 10)[1]
        dump(own_postgres_server, tmp_path / "dump")
        for limit in (2_000, 3_000, 4_000):
            running.set_limit(plan["id"], limit)
        eventually(lambda: running.all_workers_apply(key["key"], 4_000), "the change does not decide")
        workers = _children(running.service.process.pid)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        try:
            end_sessions(own_postgres_server)
            restore(own_postgres_server, tmp_path / "dump")
            changes = [(plan["id"], 1_500), *((other["id"], limit) for limit in range(20, 30))]
            asyncio.run(change_plans(own_postgres_server.url, changes))
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGCONT)
        eventually(lambda: running.all_workers_apply(key["key"], 1_500), "a worker does not obey the restored database")


async def change_plans(database_url: str, changes: list[tuple[str, int]]) -> None:
    """Write to the database as the command line does, without Redis."""
    database = Database(database_url)
    try:
        for plan_id, limit in changes:
            async with Catalog(database).edit("test") as edit:
                await edit.update(Plan, plan_id, {"limits": window(limit)})
    finally:
        await database.close()


def test_after_a_restore_with_the_service_stopped_the_copies_in_redis_count_for_nothing(
    tmp_path: Path, own_postgres_server: PostgresServer, own_redis_server: RedisServer
) -> None:
    token = prepare(own_postgres_server.url)
    with deployment(own_postgres_server.url, own_redis_server, token) as running:
        tenant, plan, key = running.create_customer("acme", 1_000)
        dump(own_postgres_server, tmp_path / "dump")
        for limit in (2_000, 3_000, 4_000):
            running.set_limit(plan["id"], limit)
        eventually(lambda: running.all_workers_apply(key["key"], 4_000), "the change does not decide")
    restore(own_postgres_server, tmp_path / "dump")
    with deployment(own_postgres_server.url, own_redis_server, token) as running:
        assert running.all_workers_apply(key["key"], 1_000)
        running.set_limit(plan["id"], 1_500)
        eventually(lambda: running.all_workers_apply(key["key"], 1_500), "a worker does not obey the change")
        assert running.call("PATCH", f"/tenants/{tenant['id']}", {"suspended": True}).status == 200
        eventually(lambda: running.all_workers_apply(key["key"], -403), "a worker does not obey the suspension")


def test_what_was_created_in_the_lost_time_can_be_created_again(
    tmp_path: Path, own_postgres_server: PostgresServer, own_redis_server: RedisServer
) -> None:
    """A request with the same idempotency key is executed again, because the stored answer is lost too."""
    token = prepare(own_postgres_server.url)
    with deployment(own_postgres_server.url, own_redis_server, token) as running:
        dump(own_postgres_server, tmp_path / "dump")
        once = {"idempotency-key": "the-same"}
        first = running.call("POST", "/tenants", {"name": "acme"}, **once)
        assert first.status == 201
        restore(own_postgres_server, tmp_path / "dump")
        second = running.call("POST", "/tenants", {"name": "acme"}, **once)
        assert second.status == 201
        assert "idempotency-replayed" not in second.headers
        assert second.json["id"] != first.json["id"]
        assert running.call("GET", f"/tenants/{second.json['id']}").status == 200


def test_a_worker_without_its_database_applies_changes_from_redis(
    own_postgres_server: PostgresServer, own_redis_server: RedisServer
) -> None:
    """The worker's connections stay open but carry nothing, while another service changes keys and tenants."""
    token = prepare(own_postgres_server.url)
    with Proxy(own_postgres_server.port) as proxy:
        behind = own_postgres_server.url.replace(str(own_postgres_server.port), str(proxy.port))
        with (
            deployment(own_postgres_server.url, own_redis_server, token, 1) as here,
            deployment(behind, own_redis_server, token, 1) as there,
        ):
            customers = {
                name: here.create_customer(name, 1_000) for name in ("disable", "rotate", "delete", "suspend", "on")
            }
            for _, _, key in customers.values():
                there.wait_for_limit(key["key"], 1_000)
            with proxy.in_mode(DropReplies()):
                ids = {name: (tenant["id"], key["id"]) for name, (tenant, _, key) in customers.items()}
                for method, path, body in (
                    ("POST", f"/keys/{ids['disable'][1]}/disable", None),
                    ("POST", f"/keys/{ids['rotate'][1]}/rotate", {}),
                    ("DELETE", f"/keys/{ids['delete'][1]}", None),
                    ("PATCH", f"/tenants/{ids['suspend'][0]}", {"suspended": True}),
                ):
                    answer = here.call(method, path, body)
                    assert answer.status < 300, (path, answer.body)
                for name, status in {"disable": 403, "rotate": 401, "delete": 401, "suspend": 403}.items():
                    there.wait_for_limit(customers[name][2]["key"], -status)
                assert there.limit(customers["on"][2]["key"]) == 1_000


def test_a_frozen_database_holds_a_cold_key_for_its_deadline_and_warm_ones_not_at_all(
    own_postgres_server: PostgresServer, own_redis_server: RedisServer
) -> None:
    """Sixty uncached keys at once take no more connections than the pool allows."""
    token = prepare(own_postgres_server.url)
    with deployment(own_postgres_server.url, own_redis_server, token, 1) as running:
        _, _, warm = running.create_customer("acme", 1_000)
        keys = [
            running.create("/keys", {"tenant_id": warm["tenant_id"], "name": f"k{index}"})["key"] for index in range(60)
        ]
        assert running.limit(warm["key"]) == 1_000
        own_redis_server.command(
            "EVAL \"for _, k in ipairs(redis.call('KEYS', '*:%k')) do redis.call('DEL', k) end\" 0"
        )
        own_postgres_server.pause()
        try:
            began = time.monotonic()
            answer = running.service.check(keys[0], cost=0)
            took = time.monotonic() - began
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.json["code"] == "catalog_unavailable"
            assert 0.5 < took < 4, took  # it took 7 s without a deadline
            with ThreadPoolExecutor(20) as threads:
                statuses = list(threads.map(running.limit, keys[1:]))
                assert running.limit(warm["key"]) == 1_000
            assert set(statuses) <= {-503, -429}
            assert connections(running.service, own_postgres_server.port) <= 20
        finally:
            own_postgres_server.resume()
        eventually(lambda: running.limit(keys[30]) == 1_000, "it does not recover")


def connections(running: RunningService, port: int) -> int:
    """Return how many connections the service's processes have to a port of this machine."""
    processes = [running.process.pid, *_children(running.process.pid)]
    inodes = set()
    for process in processes:
        for fd in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(fd.readlink()))
    wanted = f":{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(wanted) and f"socket:[{row[9]}]" in inodes for row in rows)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found]
