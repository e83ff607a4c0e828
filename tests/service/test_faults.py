"""The service under load while Redis, Postgres or its workers are killed, frozen and restarted."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run_cli
from tests.postgres import PostgresServer
from tests.servers import RedisServer, find_free_port
from tests.service.load import Load, run_load
from tests.service.program import RunningService, read_response, run_service
from tests.service.seeded_service import run_seeded_service

pytestmark = pytest.mark.slow

PEPPERS = "1:a pepper that the tests alone know"
RESOURCES = ("open", "closed", "local")
PATIENCE_SECONDS = 60.0
HANGS_SECONDS = 10.0  # an answer that takes longer counts as a hang, even on a slow machine


@contextlib.contextmanager
def from_file(
    folder: Path, store: str, *options: str, is_installed: bool = False, **settings: str
) -> Iterator[tuple[RunningService, str]]:
    """Run a service with a policy for each failure behaviour. Yield it and its key."""
    made = json.loads(run_cli("keys", "make", "--name", "a", "--json", LIMITFORGE_PEPPERS=PEPPERS).stdout)
    plan = {"name": "wide", "limits": [_window(1_000_000)]}
    exact = {"name": "exact", "limits": [_window(1_000)]}
    policies: list[dict[str, Any]] = [{"resource": name, "plan": "wide", "failure": name} for name in RESOURCES]
    policies.append({"resource": "exact", "plan": "exact"})
    tenant = {"name": "acme", "plans": [plan, exact], "policies": policies, "keys": [made["entry"]]}
    file = folder / "plans.json"
    file.write_text(json.dumps({"tenants": [tenant]}))
    environment = {
        "LIMITFORGE_PEPPERS": PEPPERS,
        "LIMITFORGE_BREAKER_SECONDS": "0.5",
        "LIMITFORGE_DEADLINE_MS": "2000",  # the machine may be busy
        **settings,
    }
    arguments, log = ("--config", str(file), "--store", store, *options), folder / "log"
    with run_service(
        find_free_port(), *arguments, environment=environment, log=log, is_installed=is_installed
    ) as service:
        eventually(lambda: "is ready at" in log.read_text(), "not every worker starts")
        yield service, made["key"]


def _window(limit: int) -> dict[str, Any]:
    return {"name": "a", "algorithm": "fixed_window", "limit": limit, "window_seconds": 86_400}


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def workers_of(service: RunningService) -> list[int]:
    children = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def are_replaced(service: RunningService, old: set[int]) -> bool:
    now = workers_of(service)
    return len(now) == len(old) and old.isdisjoint(now)


# -- many at once


def test_four_workers_and_256_connections_admit_exactly_a_thousand(tmp_path: Path, redis_url: str) -> None:
    with from_file(tmp_path, redis_url, "--workers", "4", LIMITFORGE_DEADLINE_MS="10000") as (service, key):
        assert len(workers_of(service)) == 4
        with run_load(service.port, key, ["exact"], clients=256, subject="one") as running:
            running.wait_for(3_000)
        assert not running.lost
        statuses = running.statuses()
        assert set(statuses) == {("exact", 200, None), ("exact", 429, None)}
        assert statuses["exact", 200, None] == 1_000


# -- Redis


def killed(server: RedisServer) -> None:
    server.kill()


def frozen(server: RedisServer) -> None:
    server.pause()


@pytest.mark.parametrize("fault", [killed, frozen], ids=lambda fault: fault.__name__)
def test_without_redis_each_policy_fails_as_it_says_and_then_recovers(
    tmp_path: Path, own_redis_server: RedisServer, fault: Callable[[RedisServer], None]
) -> None:
    with (
        from_file(tmp_path, own_redis_server.url) as (service, key),
        run_load(service.port, key, RESOURCES) as running,
    ):
        running.wait_for(300)
        assert set(running.statuses()) == {(name, 200, None) for name in RESOURCES}
        fault(own_redis_server)
        eventually(lambda: _is_degraded(service), "ready does not say that the store is away")
        away = time.monotonic()
        running.wait_for(600)
        assert set(running.statuses(away)) == {
            ("open", 200, "open"),
            ("closed", 503, "closed"),
            ("local", 200, "local"),
        }
        _recover(own_redis_server)
        eventually(lambda: not _is_degraded(service), "the service does not find Redis again")
        back = time.monotonic()
        running.wait_for(300)
        assert set(running.statuses(back)) == {(name, 200, None) for name in RESOURCES}
        assert not running.lost
        assert max(seen.seconds for seen in running.answers) < HANGS_SECONDS


def test_a_restart_of_redis_under_load_is_survived(tmp_path: Path, own_redis_server: RedisServer) -> None:
    with (
        from_file(tmp_path, own_redis_server.url) as (service, key),
        run_load(service.port, key, RESOURCES) as running,
    ):
        for _ in range(2):
            running.wait_for(200)
            own_redis_server.restart()
            eventually(lambda: not _is_degraded(service) and _is_decided(running), "it does not recover")
        assert not running.lost
        assert {seen.status for seen in running.answers} <= {200, 503}


def _is_degraded(service: RunningService) -> bool:
    ready = service.request("GET", "/v1/ready")
    assert ready.status == 200
    return bool(ready.json["store"]["state"] != "ok")


def _is_decided(running: Load) -> bool:
    """Return whether the last answers came from the store."""
    return all(seen.degraded is None for seen in running.answers[-30:])


def _recover(server: RedisServer) -> None:
    if server.running:
        server.resume()
    else:
        server.restart()


# -- the database


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_checks_continue_without_the_database(own_postgres_server: PostgresServer, redis_url: str, fault: str) -> None:
    with (
        run_seeded_service(own_postgres_server.url, redis_url) as found,
        run_load(found.running.port, found.demo["keys"]["pro"], ["a", "b"]) as running,
    ):
        service = found.running
        running.wait_for(100)
        getattr(own_postgres_server, fault)()
        gone = time.monotonic()
        eventually(lambda: _catalog(service) == "degraded", "ready does not say that the catalog is away")
        running.wait_for(300)
        assert {seen.degraded for seen in running.since(gone)} == {None}
        assert {seen.status for seen in running.since(gone)} <= {200, 429}
        if fault == "kill":
            own_postgres_server.restart()
        else:
            own_postgres_server.resume()
        eventually(lambda: _catalog(service) == "ok", "the service does not find its database again")
        running.wait_for(100)
        assert not running.lost


def _catalog(service: RunningService) -> Any:
    return service.request("GET", "/v1/ready").json["catalog"]["state"]


# -- workers


def test_a_worker_that_is_killed_takes_only_its_own_requests_with_it(tmp_path: Path, redis_url: str) -> None:
    clients = 16
    with (
        from_file(tmp_path, redis_url, "--workers", "2", is_installed=True, LIMITFORGE_DEADLINE_MS="10000") as (
            service,
            key,
        ),
        run_load(service.port, key, ["open"], clients) as running,
    ):
        running.wait_for(200)
        before = workers_of(service)
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: len({*workers_of(service)} - {before[0]}) == 2, "no worker takes its place")
        running.wait_for(200)
        assert len(running.lost) <= clients
        assert set(running.statuses()) == {("open", 200, None)}


def test_a_reload_under_load_loses_no_request(tmp_path: Path, redis_url: str) -> None:
    with (
        from_file(tmp_path, redis_url, "--workers", "2", LIMITFORGE_DEADLINE_MS="10000") as (service, key),
        run_load(service.port, key, ["open"], 32) as running,
    ):
        for _ in range(2):
            running.wait_for(200)
            old = {*workers_of(service)}
            service.process.send_signal(signal.SIGHUP)
            eventually(partial(are_replaced, service, old), "the old workers do not go")
        running.wait_for(200)
    assert not running.lost
    assert set(running.statuses()) == {("open", 200, None)}


@pytest.mark.parametrize(("checks", "padding", "most"), [(200, 0, 64), (20, 30_000, 9)], ids=["many", "large"])
def test_a_connection_has_a_bounded_number_of_checks_under_way(
    own_redis_server: RedisServer, tmp_path: Path, checks: int, padding: int, most: int
) -> None:
    """At 64 checks, or more than 256 KiB of bodies, the rest of a pipeline waits until these are answered."""
    with run_seeded_service(f"sqlite:///{tmp_path}/catalog.db", own_redis_server.url) as service:
        tenant = service.tenant(_window(1_000))
        body = json.dumps({"resource": "GET:/orders", "subject": "user:42"}).encode() + b" " * padding
        head = f"POST /v1/check HTTP/1.1\r\nhost: a\r\nx-api-key: {tenant.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        with service.running.connection() as connection:
            connection.sendall(head.encode() + body)
            assert read_response(connection).status == 200
            own_redis_server.pause()
            connection.sendall((head.encode() + body) * checks)
            health = [service.running.request("GET", "/v1/health").status for _ in range(20)]  # it continues to read
        health += [
            service.running.request("GET", "/v1/health").status for _ in range(20)
        ]  # and notices that the client has disconnected
        own_redis_server.resume()
        assert set(health) == {200}
        taken = 1_000 - tenant.check(cost=0).json["remaining"]  # it is decided after those in flight
        assert 1 < taken <= 1 + most
