"""Overrides that Redis evicts are in force again within seconds."""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py

from tests.cli.command import run_cli
from tests.servers import RedisServer, find_free_port
from tests.service.program import run_service
from tests.service.seeded_service import SeededService, TenantClient, run_seeded_service

BLOCKED = [f"user:{number}" for number in range(50)]
PATIENCE_SECONDS = 30.0  # far below the minute that it once took
WINDOW = {"name": "a", "algorithm": "fixed_window", "limit": 1_000, "window_seconds": 60}


def eventually(is_so: Callable[[], Any], what: str) -> float:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < PATIENCE_SECONDS, what
        time.sleep(0.1)
    return time.monotonic() - began


def admitted(tenant: TenantClient) -> list[str]:
    checks = [{"resource": "GET:/orders", "subject": each} for each in BLOCKED]
    answer = tenant.post("check/batch", checks=checks)
    assert answer.status == 200, answer.body
    return [each for each, decision in zip(BLOCKED, answer.json["decisions"], strict=True) if decision["allowed"]]


def blocked_tenant(service: SeededService) -> TenantClient:
    tenant = service.tenant(WINDOW)
    for each in BLOCKED:
        tenant.create("overrides", resource="*", subject=each, limits={"a": "blocked"}, ttl_seconds=3_600)
    assert admitted(tenant) == []
    return tenant


def metrics(service: SeededService) -> dict[str, int]:
    answer = service.running.request(
        "GET", "/metrics", headers={"authorization": f"Bearer {service.demo['admin_token']}"}
    )
    lines = (line.rsplit(" ", 1) for line in answer.body.decode().splitlines() if not line.startswith("#"))
    return {name: int(number) for name, number in lines}


def restored(service: SeededService) -> int:
    return metrics(service)["overrides_restored_total"]


def evicting(service: SeededService) -> dict[str, int]:
    return {name: number for name, number in metrics(service).items() if name.startswith("rl_redis_evicting")}


def drown(client: Any, policy: str) -> None:
    """Fill a Redis with other keys until it has evicted thousands."""
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 3_000_000)
    while client.info("stats")["evicted_keys"] < 10_000:
        pipeline = client.pipeline(transaction=False)
        for _ in range(2_000):
            pipeline.set(f"junk:{uuid4().hex}", b"x" * 500, ex=3_600)
        pipeline.execute()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_fifty_blocked_subjects_stay_blocked_on_a_redis_that_evicts(
    policy: str, tmp_path: Path, own_redis_server: RedisServer, record_property: Any
) -> None:
    log = tmp_path / "log"
    with (
        redis_py.Redis.from_url(own_redis_server.url) as client,
        run_seeded_service(f"sqlite:///{tmp_path}/c.db", own_redis_server.url, "--workers", "2", log=log) as service,
    ):
        tenant = blocked_tenant(service)
        drown(client, policy)
        record_property("seconds", eventually(lambda: not admitted(tenant), "blocked subjects are admitted"))
        eventually(lambda: restored(service) > 0, "it is not counted")
        eventually(
            lambda: evicting(service) == {f'rl_redis_evicting{{policy="{policy}"}}': 1},
            "the metrics do not report that Redis may evict",
        )
        client.flushall()
        record_property("after a flush", eventually(lambda: not admitted(tenant), "blocked subjects are admitted"))
        eventually(lambda: restored(service) >= 50, "it is not counted")
    text = log.read_text()
    assert "overrides.restored: " in text
    assert f"policy={policy}" in text
    assert "user:" not in text


def test_a_redis_that_does_not_evict_is_not_warned_of(tmp_path: Path, own_redis_server: RedisServer) -> None:
    log = tmp_path / "log"
    with run_seeded_service(f"sqlite:///{tmp_path}/c.db", own_redis_server.url, log=log) as service:
        tenant = blocked_tenant(service)
        assert evicting(service) == {}
        time.sleep(3)
        assert admitted(tenant) == []
        assert restored(service) == 0  # a new override was set by its author, not restored
    assert "overrides." not in log.read_text()
    assert "evicts" not in log.read_text()


def test_the_overrides_of_a_file_come_back_too(tmp_path: Path, own_redis_server: RedisServer) -> None:
    pepper = "1:a pepper that the tests alone know"
    made = run_cli("keys", "make", "--name", "web", "--json", LIMITFORGE_PEPPERS=pepper)
    key = json.loads(made.stdout)
    expires_at = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    overrides = [
        {"resource": "*", "subject": each, "limits": {"a": "blocked"}, "expires_at": expires_at} for each in BLOCKED
    ]
    plan = {"name": "free", "limits": "a=1000/minute"}
    tenant = {"name": "acme", "default_plan": "free", "plans": [plan], "keys": [key["entry"]], "overrides": overrides}
    file = tmp_path / "plans.json"
    file.write_text(json.dumps({"tenants": [tenant]}))
    metrics = find_free_port()
    environment = {"LIMITFORGE_PEPPERS": pepper, "LIMITFORGE_METRICS_PORT": str(metrics)}
    options = ("--config", str(file), "--store", own_redis_server.url)
    with run_service(find_free_port(), *options, environment=environment) as service:

        def is_blocked() -> bool:
            return all(service.check(key=key["key"], subject=each).status == 429 for each in BLOCKED)

        assert is_blocked()
        own_redis_server.flush()
        eventually(is_blocked, "blocked subjects are admitted")
