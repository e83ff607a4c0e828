"""A tenant that sends ever new subjects can't fill the store for all others."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from limitforge.errors import InvalidInput
from limitforge.service.settings import load_settings
from tests.servers import RedisServer
from tests.service.seeded_service import SeededService, TenantClient, run_seeded_service

HOUR = {"name": "hour", "algorithm": "fixed_window", "limit": 5, "window_seconds": 3_600}
MINUTE = {"name": "minute", "algorithm": "sliding_window_counter", "limit": 100, "window_seconds": 60}
PATIENCE_SECONDS = 60.0


def eventually(is_so: Callable[[], Any], what: str) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < ends, what
        time.sleep(0.1)


def metrics(service: SeededService) -> dict[str, float]:
    headers = {"authorization": f"Bearer {service.demo['admin_token']}"}
    answer = service.running.request("GET", "/metrics", headers=headers)
    lines = answer.body.decode().splitlines()
    return {name: float(value) for name, value in (each.rsplit(" ", 1) for each in lines if not each.startswith("#"))}


def flood(tenant: TenantClient, count: int, size: int = 200) -> list[dict[str, Any]]:
    decisions: list[dict[str, Any]] = []
    for start in range(0, count, size):
        subjects = range(start, min(start + size, count))
        checks = [{"resource": "GET:/orders", "subject": f"new:{number}"} for number in subjects]
        decisions += tenant.post("check/batch", checks=checks).json["decisions"]
    return decisions


@pytest.fixture(params=["memory://", "redis"], scope="module")
def bounded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[SeededService]:
    """A service where a tenant may create 40 buckets a minute. Each test creates its own tenants."""
    url = redis_server.url if request.param == "redis" else request.param
    folder = tmp_path_factory.mktemp("overflow")
    with run_seeded_service(f"sqlite:///{folder}/c.db", url, new_buckets_per_minute="40") as service:
        yield service


def test_new_subjects_beyond_the_budget_share_a_bucket_and_see_it(bounded: SeededService) -> None:
    greedy, modest = bounded.tenant(HOUR, MINUTE), bounded.tenant(HOUR)
    decisions = flood(greedy, 30)
    assert ["overflow" in decision for decision in decisions] == [False] * 20 + [True] * 10
    assert [decision["allowed"] for decision in decisions] == [True] * 25 + [False] * 5
    answer = greedy.post("check", resource="GET:/orders", subject="another")
    assert (answer.status, answer.json["overflow"], answer.json["code"]) == (429, True, "rate_limit_exceeded")
    known = greedy.post("check", resource="GET:/orders", subject="new:3")
    assert (known.status, known.json["remaining"], "overflow" in known.json) == (200, 3, False)
    others = flood(modest, 30)
    assert {(decision["remaining"], decision.get("overflow")) for decision in others} == {(4, None)}


def test_the_budget_and_what_overflows_can_be_seen(bounded: SeededService) -> None:
    greedy = bounded.tenant(HOUR)
    flood(greedy, 45)
    found = metrics(bounded)
    assert found["rl_new_buckets_per_minute"] == 40
    assert found[f'rl_overflow_total{{tenant="{greedy.name}"}}'] == 5


@pytest.mark.parametrize("path", ["usage", "explain"])
def test_usage_and_explain_show_the_shared_bucket(bounded: SeededService, path: str) -> None:
    greedy = bounded.tenant(HOUR)
    flood(greedy, 42)
    if path == "usage":
        answer = greedy.usage("resource=GET:/orders&subject=another")
    else:
        answer = greedy.post(path, resource="GET:/orders", subject="another")
    assert answer.status == 200
    assert '"overflow":true' in answer.body.decode()
    assert '"remaining":3' in answer.body.decode()


def test_a_small_redis_gives_each_tenant_a_small_budget_and_is_not_filled(
    tmp_path: Path, own_redis_server: RedisServer
) -> None:
    """A tenant floods a Redis server of 24 MB, and then twelve new subjects of another tenant are checked."""
    own_redis_server.command_ok("CONFIG SET maxmemory 24mb")
    with run_seeded_service(f"sqlite:///{tmp_path}/c.db", own_redis_server.url) as service:
        greedy, modest = service.tenant(HOUR, MINUTE), service.tenant(HOUR)
        eventually(lambda: metrics(service)["rl_new_buckets_per_minute"] < 10_000, "the budget does not fit the memory")
        decisions = flood(greedy, 10_000, 1_000)
        assert sum("overflow" in decision for decision in decisions) > 5_000
        assert {decision.get("degraded") for decision in decisions} == {None}
        for decision in flood(modest, 12):
            assert (decision["remaining"], decision.get("degraded"), decision.get("overflow")) == (4, None, None)


def test_a_full_redis_decides_locally_unless_the_policy_says_otherwise(
    tmp_path: Path, own_redis_server: RedisServer
) -> None:
    with run_seeded_service(f"sqlite:///{tmp_path}/c.db", own_redis_server.url) as service:
        silent, explicit = service.tenant(HOUR), service.tenant(HOUR)
        explicit.create("policies", resource="GET:/open", plan_id=explicit.plan_id, failure="open")
        own_redis_server.command_ok("CONFIG SET maxmemory 1mb")
        answers = [silent.post("check", resource="GET:/orders", subject="a") for _ in range(6)]
        assert [answer.status for answer in answers] == [200] * 5 + [429]
        assert {answer.json["degraded"] for answer in answers} == {"local"}
        answer = explicit.post("check", resource="GET:/open", subject="a")
        assert (answer.status, answer.json["degraded"]) == (200, "open")


@pytest.mark.parametrize("given", ["0", "-5", "many", "1.5", ""])
def test_an_invalid_budget_is_refused_by_its_setting(given: str) -> None:
    with pytest.raises(InvalidInput, match="new_buckets_per_minute"):
        load_settings({"LIMITFORGE_NEW_BUCKETS_PER_MINUTE": given})


@pytest.mark.parametrize(("given", "budget"), [("auto", 60_000), ("none", None), ("250", 250)])
def test_a_budget_is_a_number_or_a_word(given: str, budget: int | None) -> None:
    settings = load_settings({"LIMITFORGE_NEW_BUCKETS_PER_MINUTE": given})
    assert settings.store_options().new_buckets_per_minute == budget


def test_a_file_of_settings_may_have_the_number_itself(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("new_buckets_per_minute = 250\n")
    assert load_settings({"LIMITFORGE_SETTINGS": str(file)}).store_options().new_buckets_per_minute == 250
