"""The HTTP contract, row by row, against the program with SQLite and memory and with Postgres and Redis."""

import json
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import http_sf
import pytest
import urllib3

from tests.postgres import PostgresServer
from tests.servers import RedisServer
from tests.service.program import HttpResponse, read_response
from tests.service.seeded_service import SeededService, TenantClient, run_seeded_service

TOP = 3
AGES = 300_000_000  # seconds; no such window ends while a test runs
SLOW = 0.0001  # per second; nothing is refilled while a test runs
ALGORITHMS: dict[str, dict[str, Any]] = {
    "token_bucket": {"bucket_capacity": TOP, "refill_rate_per_sec": SLOW},
    "leaky_bucket": {"bucket_capacity": TOP, "leak_rate_per_sec": SLOW},
    "fixed_window": {"limit": TOP, "window_seconds": AGES},
    "sliding_window": {"limit": TOP, "window_seconds": AGES},
    "sliding_window_counter": {"limit": TOP, "window_seconds": 4_000_000},
    "concurrency": {"max_concurrent": TOP, "lease_ttl_seconds": AGES},
    "quota": {"limit": TOP, "period": "year"},
}
WIDTH = {"fixed_window": "limit", "sliding_window": "limit", "sliding_window_counter": "limit", "quota": "limit"} | {
    "token_bucket": "bucket_capacity",
    "leaky_bucket": "bucket_capacity",
    "concurrency": "max_concurrent",
}


def limit_of(algorithm: str = "fixed_window", name: str = "burst", **fields: Any) -> dict[str, Any]:
    return {"name": name, "algorithm": algorithm, **ALGORITHMS[algorithm], **fields}


@pytest.fixture(scope="module", params=["sqlite and memory", "postgres and redis"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeededService]:
    """The service of all tests of this file. Create your own tenant."""
    if request.param == "sqlite and memory":
        with run_seeded_service(f"sqlite:///{tmp_path_factory.mktemp('wire')}/wire.db") as running:
            yield running
        return
    postgres: PostgresServer = request.getfixturevalue("postgres_server")
    redis: RedisServer = request.getfixturevalue("redis_server")
    name = f"wire_{uuid4().hex}"
    with run_seeded_service(postgres.create_database(name), redis.url) as running:
        yield running
    postgres.drop_database(name)


def assert_problem(answer: HttpResponse, status: int, code: str = "", names: str = "") -> None:
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json
    assert problem["status"] == status
    assert problem["type"]
    assert problem["title"]
    assert problem["code"] == (code or problem["code"])
    assert names in problem["detail"]


def remaining(tenant: TenantClient, **fields: Any) -> int:
    """Return the remaining capacity, by a peek."""
    answer = tenant.check(cost=0, **fields)
    assert answer.status == 200, answer
    left: int = answer.json["remaining"]
    return left


# --- Decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestEveryAlgorithm:
    """The same contract for each algorithm."""

    def test_admits_exactly_its_limit(self, service: SeededService, algorithm: str) -> None:
        tenant = service.tenant(limit_of(algorithm))
        answers = [tenant.check() for _ in range(TOP + 2)]
        assert [answer.status for answer in answers] == [200] * TOP + [429] * 2
        assert [answer.json["remaining"] for answer in answers] == [2, 1, 0, 0, 0]
        assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["2", "1", "0", "0", "0"]
        assert {answer.headers["x-ratelimit-limit"] for answer in answers} == {str(TOP)}
        assert [answer.json["allowed"] for answer in answers] == [True] * TOP + [False] * 2
        assert {answer.json["binding"] for answer in answers} == {"burst"}
        assert {answer.headers["retry-after"] for answer in answers[:TOP]} == {"0"}

    def test_a_denial_has_retry_after_and_took_nothing(self, service: SeededService, algorithm: str) -> None:
        tenant = service.tenant(limit_of(algorithm))
        assert tenant.check(cost=2).json["remaining"] == 1
        denied = tenant.check(cost=2)
        assert_problem(denied, 429, "rate_limit_exceeded")
        assert int(denied.headers["retry-after"]) >= 1
        body = denied.json
        assert int(denied.headers["retry-after"]) == -(-body["retry_after_ms"] // 1_000)
        assert body["violated-policies"] == ["burst"]
        assert body["type"] == "https://iana.org/assignments/http-problem-types#quota-exceeded"
        assert "lease_id" not in body
        assert tenant.check(cost=1).json["remaining"] == 0

    def test_what_can_never_be_allowed_has_no_time_to_come_back(self, service: SeededService, algorithm: str) -> None:
        tenant = service.tenant(limit_of(algorithm))
        denied = tenant.check(cost=TOP + 1)
        assert denied.status == 429
        assert denied.json["retry_after_ms"] is None
        assert "retry-after" not in denied.headers
        assert remaining(tenant) == TOP

    def test_a_limit_of_0_is_blocked(self, service: SeededService, algorithm: str) -> None:
        tenant = service.tenant({**limit_of(algorithm), WIDTH[algorithm]: 0})
        denied = tenant.check()
        assert (denied.status, denied.json["remaining"], denied.json["retry_after_ms"]) == (429, 0, None)
        assert "retry-after" not in denied.headers
        assert tenant.check(cost=0).status == 200

    def test_a_peek_takes_nothing(self, service: SeededService, algorithm: str) -> None:
        tenant = service.tenant(limit_of(algorithm))
        assert [remaining(tenant) for _ in range(TOP + 1)] == [TOP] * (TOP + 1)

    def test_subjects_and_resources_are_counted_apart(self, service: SeededService, algorithm: str) -> None:
        tenant = service.tenant(limit_of(algorithm))
        for other in ({}, {"subject": "user:43"}, {"resource": "POST:/orders"}):
            assert tenant.check(cost=TOP, **other).status == 200
            assert tenant.check(**other).status == 429

    def test_a_reset_forgets(self, service: SeededService, algorithm: str) -> None:
        tenant = service.tenant(limit_of(algorithm))
        tenant.check(cost=TOP)
        assert tenant.check().status == 429
        body = {"tenant_id": tenant.id, "resource": "GET:/orders", "subject": "user:42"}
        assert service.admin("POST", "reset", body).status == 200
        assert remaining(tenant) == TOP

    def test_usage_and_explain_return_the_same_and_take_nothing(self, service: SeededService, algorithm: str) -> None:
        tenant = service.tenant(limit_of(algorithm))
        tenant.check(cost=2)
        for _ in range(2):
            usage = tenant.usage()
            assert (usage.status, usage.json["limit"], usage.json["remaining"]) == (200, TOP, 1)
            explained = tenant.post("explain", resource="GET:/orders", subject="user:42")
            assert (explained.status, explained.json["decision"]["remaining"]) == (200, 1)
        assert tenant.check().json["remaining"] == 0


def test_a_leaky_bucket_returns_the_delay(service: SeededService) -> None:
    tenant = service.tenant(limit_of("leaky_bucket", leak_rate_per_sec=0.5))
    assert tenant.check(cost=1).json["delay_ms"] == 0
    assert 0 < tenant.check(cost=1).json["delay_ms"] <= 2_000


def test_without_a_plan_nothing_is_limited(service: SeededService) -> None:
    answer = service.tenant().check()
    assert (answer.status, answer.json["allowed"], answer.json["limits"]) == (200, True, {})
    assert not [name for name in answer.headers if "ratelimit" in name]


def test_an_unlimited_limit_never_binds(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=None), limit_of(name="other"))
    answer = tenant.check(cost=2)
    assert (answer.json["binding"], answer.headers["x-ratelimit-limit"]) == ("other", str(TOP))
    assert answer.json["limits"]["burst"]["limit"] is None


def test_all_limits_of_a_plan_decide_together(service: SeededService) -> None:
    tenant = service.tenant(limit_of(name="wide", limit=10), limit_of(name="narrow", limit=2))
    assert tenant.check(cost=2).json["binding"] == "narrow"
    denied = tenant.check()
    assert denied.json["violated-policies"] == ["narrow"]
    assert list(denied.json["limits"]) == ["wide", "narrow"]
    assert denied.json["limits"]["wide"]["remaining"] == 8
    assert tenant.usage().json["limits"]["wide"]["remaining"] == 8


def test_the_plans_of_tenant_and_policy_decide_together(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=5))
    plan = tenant.create("plans", name="orders", limits=[limit_of(limit=2)])
    policy = tenant.create("policies", resource="GET:/orders/{id}", plan_id=plan["id"])
    answer = tenant.check(resource="GET:/orders/7")
    assert {name: state["remaining"] for name, state in answer.json["limits"].items()} == {
        "tenant:burst": 4,
        "policy:burst": 1,
    }
    assert tenant.check(resource="GET:/orders/8").json["limits"]["policy:burst"]["remaining"] == 0
    explained = tenant.post("explain", resource="GET:/orders/9", subject="user:42").json
    assert explained["policy"]["id"] == policy["id"]
    assert {(each["place"], each["id"]) for each in explained["plans"]} == {
        ("tenant", tenant.plan_id),
        ("policy", plan["id"]),
    }
    assert explained["why"]


@pytest.mark.parametrize(
    ("resource", "type_", "left"),
    [("GET:/x", "live", 8), ("HEAD:/x", "live", 8), ("POST:/x", "live", 9), ("GET:/x", "test", 7)],
)
def test_a_check_without_a_priority_gets_a_default(
    service: SeededService, resource: str, type_: str, left: int
) -> None:
    shares = {"P1": 90, "P2": 80, "P3": 70}
    tenant = service.tenant(limit_of(limit=10, shares=shares))
    key = tenant.create("keys", name="other", type=type_)["key"]
    assert key.startswith(f"lf_{type_}_")
    answer = tenant.check(key=key, resource=resource, cost=0)
    assert (answer.json["remaining"], answer.json["limit"]) == (left, 10)
    for priority, own in {"P0": 10, "P1": 9, "P2": 8, "P3": 7}.items():
        assert tenant.check(key=key, resource=resource, cost=0, priority=priority).json["remaining"] == own


def test_costs_are_each_limits_own(service: SeededService) -> None:
    tenant = service.tenant(limit_of(name="calls", limit=10, counts="requests"), limit_of(name="elements", limit=100))
    left = tenant.check(cost=7).json["limits"]
    assert {name: state["remaining"] for name, state in left.items()} == {"calls": 9, "elements": 93}
    left = tenant.check(costs={"elements": 50}).json["limits"]
    assert {name: state["remaining"] for name, state in left.items()} == {"calls": 8, "elements": 43}
    denied = tenant.check(costs={"elements": 44})
    assert (denied.status, denied.json["violated-policies"]) == (429, ["elements"])
    assert_problem(tenant.check(costs={"nothing": 1}), 422, "invalid_field", "nothing")
    assert {name: state["remaining"] for name, state in tenant.usage().json["limits"].items()} == {
        "calls": 8,
        "elements": 43,
    }


@pytest.mark.parametrize(("tier", "limit"), [("free", 100), ("pro", 1_000), ("enterprise", 10_000)])
def test_a_tier_of_the_demo_has_its_limit(service: SeededService, tier: str, limit: int) -> None:
    key = service.demo["keys"][tier]
    answer = service.running.check(key=key, subject=uuid4().hex)
    assert answer.headers["x-ratelimit-limit"] == str(limit)
    assert answer.headers["x-ratelimit-remaining"] == str(limit - 1)
    named = service.running.check(
        key=service.demo["keys"]["free"], subject=uuid4().hex, plan_id=service.demo["plans"][tier]
    )
    assert named.headers["x-ratelimit-limit"] == str(limit), "a plan that the check names stands in for the key's"


# --- Headers ---------------------------------------------------------------------------------------------------------


def fields_of(answer: HttpResponse) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of `RateLimit-Policy` and `RateLimit` by name, as a third-party parser reads them."""
    parsed: list[dict[str, Any]] = []
    for name in ("ratelimit-policy", "ratelimit"):
        items: Any = http_sf.parse(answer.headers[name].encode(), tltype="list")
        assert all(isinstance(key, str) and not isinstance(key, http_sf.Token) for key, _ in items)
        parsed.append({key: dict(parameters) for key, parameters in items})
        assert len(parsed[-1]) == len(items)
    return parsed[0], parsed[1]


@pytest.mark.parametrize("cost", [1, 3, 6])
def test_the_fields_are_structured_and_say_what_the_body_says(service: SeededService, cost: int) -> None:
    tenant = service.tenant(
        limit_of(name="burst", limit=5),
        limit_of("sliding_window", name="log", limit=4, window_seconds=60),
        limit_of("token_bucket", name="bucket", bucket_capacity=10, refill_rate_per_sec=2),
        limit_of("quota", name="yearly", limit=1_000),
        limit_of("concurrency", name="slots"),
    )
    tenant.check(cost=2)
    answer = tenant.check(cost=cost)
    policy, state = fields_of(answer)
    body = answer.json["limits"]
    assert list(policy) == list(state) == list(body) == ["burst", "log", "bucket", "yearly", "slots"]
    for name, entry in body.items():
        assert policy[name]["q"] == entry["limit"]
        assert state[name]["r"] == entry["remaining"]
        reset = entry["reset_after_ms"] if entry["allowed"] else entry["retry_after_ms"]
        assert state[name].get("t") == (None if reset is None else -(-reset // 1_000))
        assert all(type(value) is int for value in state[name].values())
    assert policy["burst"]["w"] == AGES
    assert policy["log"]["w"] == 60
    assert policy["slots"]["qu"] == "concurrent-requests"
    assert "w" not in policy["slots"]
    assert answer.headers["x-ratelimit-limit"] == str(answer.json["limit"])
    assert answer.headers["x-ratelimit-remaining"] == str(answer.json["remaining"])
    assert answer.headers["x-ratelimit-reset"] == str(answer.json["reset_at"])
    if "retry-after" in answer.headers and answer.status == 429:
        waits = [state[name]["t"] for name in answer.json["violated-policies"]]
        assert int(answer.headers["retry-after"]) >= max(waits)


def test_names_with_every_letter_that_they_may_have_are_parsed(service: SeededService) -> None:
    names = ["a-b_c.d/e", "0", "A" * 64]
    policy, state = fields_of(service.tenant(*(limit_of(name=name) for name in names)).check())
    assert list(policy) == list(state) == names


def test_the_reset_is_in_epoch_seconds(service: SeededService) -> None:
    tenant = service.tenant(limit_of("sliding_window", window_seconds=1_000))
    before = int(time.time())
    reset = int(tenant.check().headers["x-ratelimit-reset"])
    assert before + 1_000 <= reset <= int(time.time()) + 1_002


def test_a_client_that_honours_retry_after_gets_through(service: SeededService) -> None:
    tenant = service.tenant(limit_of("token_bucket", bucket_capacity=1, refill_rate_per_sec=1))
    url = f"http://127.0.0.1:{service.running.port}/v1/check"
    body = json.dumps({"resource": "POST:/orders", "subject": "user:42"}).encode()
    headers = {"x-api-key": tenant.key, "content-type": "application/json"}
    patient = urllib3.Retry(total=5, allowed_methods=None, respect_retry_after_header=True)
    with urllib3.PoolManager() as pool:
        assert pool.request("POST", url, body=body, headers=headers, retries=False).status == 200
        refused = pool.request("POST", url, body=body, headers=headers, retries=False)
        answer = pool.request("POST", url, body=body, headers=headers, retries=patient)
    assert refused.status == 429
    assert answer.status == 200
    assert answer.retries is not None
    assert {attempt.status for attempt in answer.retries.history} <= {429}


# --- Tenants and keys ------------------------------------------------------------------------------------------------


def test_a_plan_is_named_by_its_own_tenant_alone(service: SeededService) -> None:
    tenant, other = service.tenant(limit_of()), service.tenant(limit_of(limit=7))
    check: dict[str, Any] = {"resource": "GET:/orders", "subject": "user:42", "plan_id": other.plan_id}
    for call in ("check", "reserve", "explain"):
        assert_problem(tenant.post(call, **check), 404, "not_found")
    assert_problem(tenant.usage(f"resource=r&subject=s&plan_id={other.plan_id}"), 404, "not_found")
    decisions = tenant.post("check/batch", checks=[check]).json["decisions"]
    assert (decisions[0]["status"], decisions[0]["code"]) == (404, "not_found")
    assert other.post("check", **check).json["limit"] == 7


def test_two_tenants_with_the_same_names_are_counted_apart(service: SeededService) -> None:
    tenants = [service.tenant(limit_of(limit=2), limit_of(name="all", scope="tenant", limit=2)) for _ in range(2)]
    for tenant in tenants:
        tenant.create("overrides", subject="user:42", limits={"burst": {"limit": 2}}, ttl_seconds=60)
        assert [tenant.check().status for _ in range(3)] == [200, 200, 429]
    service.admin("POST", "reset", {"tenant_id": tenants[0].id, "resource": "GET:/orders", "subject": "user:42"})
    assert tenants[1].check().status == 429


def test_the_ids_of_one_tenant_are_not_found_by_another(service: SeededService) -> None:
    tenant, other = service.tenant(limit_of("concurrency")), service.tenant(limit_of("concurrency"))
    lease_id = tenant.check().json["lease_id"]
    reservation_id = tenant.post("reserve", resource="r", subject="s").json["reservation_id"]
    for call in ("release", "renew"):
        assert_problem(other.post(call, lease_id=lease_id), 404)
    assert_problem(other.post("settle", reservation_id=reservation_id, cost=0), 404)
    assert tenant.post("renew", lease_id=lease_id).status == 200
    assert remaining(tenant) == TOP - 1


def test_a_token_of_one_tenant_sees_nothing_of_another(service: SeededService) -> None:
    tenant, other = service.tenant(limit_of()), service.tenant(limit_of())
    token = tenant.create("tokens", name=uuid4().hex, scopes=["read", "write"])["token"]
    own = {"authorization": f"Bearer {token}"}
    for path in (f"tenants/{other.id}", f"plans/{other.plan_id}", f"keys/{other.key_id}"):
        assert service.running.request("GET", f"/v1/admin/{path}", headers=own).status == 404
    for path in ("plans", "keys", "policies", "overrides", "tenants", "audit"):
        listed = service.running.request("GET", f"/v1/admin/{path}", headers=own)
        assert listed.status == 200, listed
        assert other.id not in listed.body.decode()


def test_a_suspended_tenant_is_refused_in_every_call(service: SeededService) -> None:
    tenant = service.tenant(limit_of())
    tenant.check()
    tenant.change(suspended=True)
    check: dict[str, Any] = {"resource": "r", "subject": "s"}
    for answer in (
        tenant.check(),
        tenant.post("check/batch", checks=[check]),
        tenant.post("reserve", **check),
        tenant.post("explain", **check),
        tenant.usage(),
        tenant.post("release", lease_id="x"),
        tenant.post("renew", lease_id="x"),
        tenant.post("settle", reservation_id="x", cost=0),
    ):
        assert_problem(answer, 403, "forbidden")
    tenant.change(suspended=False)
    assert tenant.check().json["remaining"] == TOP - 2


def test_a_disabled_key_is_refused_and_a_deleted_one_unknown(service: SeededService) -> None:
    tenant = service.tenant(limit_of())
    tenant.check()
    assert service.admin("POST", f"keys/{tenant.key_id}/disable").status == 200
    assert_problem(tenant.check(), 403, "forbidden")
    assert_problem(tenant.usage(), 403, "forbidden")
    assert service.admin("POST", f"keys/{tenant.key_id}/enable").status == 200
    assert tenant.check().status == 200
    assert service.admin("DELETE", f"keys/{tenant.key_id}").status == 204
    assert_problem(tenant.check(), 401, "unknown_key")


def test_a_rotated_key_works_at_once_and_the_old_one_until_its_grace_ends(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=10))
    tenant.check()
    fresh = service.admin("POST", f"keys/{tenant.key_id}/rotate", {"grace_seconds": 3_600}).json["key"]
    assert [tenant.check(key=key).status for key in (fresh, tenant.key)] == [200, 200]
    last = service.admin("POST", f"keys/{tenant.key_id}/rotate", {"grace_seconds": 0}).json["key"]
    assert [tenant.check(key=key).status for key in (last, fresh, tenant.key)] == [200, 401, 401]


def test_an_expired_key_is_refused(service: SeededService) -> None:
    tenant = service.tenant(limit_of())
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3_600))
    assert tenant.check(key=tenant.create("keys", name="later", expires_at=later)["key"]).status == 200
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 2))
    key = tenant.create("keys", name="soon", expires_at=soon)["key"]
    deadline = time.monotonic() + 60
    while tenant.check(key=key, cost=0).status == 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert_problem(tenant.check(key=key), 401, "unknown_key")


@pytest.mark.parametrize(("scope", "is_check_allowed"), [("check", True), ("usage", False)])
def test_a_key_does_what_its_scopes_say(service: SeededService, scope: str, is_check_allowed: bool) -> None:
    tenant = service.tenant(limit_of())
    key = tenant.create("keys", name="narrow", scopes=[scope])["key"]
    check: dict[str, Any] = {"resource": "GET:/orders", "subject": "user:42"}
    checks = [
        tenant.post("check", key, **check),
        tenant.post("check/batch", key, checks=[check]),
        tenant.post("reserve", key, **check),
    ]
    reads = [tenant.usage(key=key), tenant.post("explain", key, **check)]
    may, may_not = (checks, reads) if is_check_allowed else (reads, checks)
    assert [answer.status for answer in may] == [200] * len(may)
    for answer in may_not:
        assert_problem(answer, 403, "forbidden")


def test_a_key_may_come_as_bearer(service: SeededService) -> None:
    tenant = service.tenant(limit_of())
    body = json.dumps({"resource": "r", "subject": "s"}).encode()
    left = [
        service.running.request("POST", "/v1/check", body, {name: f"{before}{tenant.key}"}).json["remaining"]
        for name, before in (("x-api-key", ""), ("authorization", "Bearer "), ("Authorization", "bearer "))
    ]
    assert left == [2, 1, 0]


# --- Modes and overrides ---------------------------------------------------------------------------------------------


def test_a_monitored_tenant_sees_what_would_be_denied(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=1), mode="monitor")
    first, second = tenant.check(), tenant.check()
    assert [answer.status for answer in (first, second)] == [200, 200]
    assert second.json["would_deny"] == ["burst"]
    assert second.json["mode"] == "monitor"
    assert second.json["limits"]["burst"]["monitored"] is True
    assert (second.headers["x-ratelimit-limit"], second.headers["x-ratelimit-remaining"]) == ("1", "0")
    tenant.change(mode="on")
    assert tenant.check().status == 429


def test_what_is_off_is_not_limited_and_has_no_fields(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=1), mode="off")
    for _ in range(3):
        answer = tenant.check()
        assert (answer.status, answer.json["mode"]) == (200, "off")
        assert not [name for name in answer.headers if "ratelimit" in name]
    tenant.change(mode="on")
    assert [tenant.check().status for _ in range(2)] == [200, 429]


def test_a_monitored_limit_denies_nothing_beside_one_that_does(service: SeededService) -> None:
    tenant = service.tenant(limit_of(name="new", limit=1, mode="monitor"), limit_of(limit=3))
    answers = [tenant.check() for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert [answer.json.get("would_deny", []) for answer in answers] == [[], ["new"], ["new"], ["new"]]
    assert answers[-1].json["violated-policies"] == ["burst"]


def test_the_mode_of_a_policy_is_for_its_own_plan(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=2))
    plan = tenant.create("plans", name="tight", limits=[limit_of(name="tight", limit=1)])
    tenant.create("policies", resource="GET:/orders", plan_id=plan["id"], mode="monitor")
    answers = [tenant.check() for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[1].json["would_deny"] == ["tight"]


@pytest.mark.parametrize("mode", ["monitor", "off"])
def test_the_kill_switch_applies_to_all_tenants(service: SeededService, mode: str) -> None:
    tenants = [service.tenant(limit_of(limit=1)) for _ in range(2)]
    for tenant in tenants:
        assert [tenant.check().status for _ in range(2)] == [200, 429]
    try:
        assert service.admin("PUT", "mode", {"mode": mode}).status == 200
        for tenant in tenants:
            answer = tenant.check()
            assert (answer.status, answer.json["mode"]) == (200, mode)
    finally:
        assert service.admin("PUT", "mode", {"mode": "on"}).status == 200
    assert [tenant.check().status for tenant in tenants] == [429, 429]


def test_the_kill_switch_may_be_for_one_tenant(service: SeededService) -> None:
    tenant, other = (service.tenant(limit_of(limit=1)) for _ in range(2))
    for each in (tenant, other):
        assert [each.check().status for _ in range(2)] == [200, 429]
    assert service.admin("PUT", "mode", {"mode": "off", "tenant_id": tenant.id}).status == 200
    assert [each.check().status for each in (tenant, other)] == [200, 429]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_override_changes_the_numbers_of_one_subject_at_once(service: SeededService, algorithm: str) -> None:
    tenant = service.tenant(limit_of(algorithm))
    tenant.check(cost=TOP)
    assert tenant.check().status == 429
    made = tenant.create(
        "overrides", resource="GET:/orders", subject="user:42", limits={"burst": {"limit": TOP + 2}}, ttl_seconds=600
    )
    explained = tenant.post("explain", resource="GET:/orders", subject="user:42").json
    assert explained["override"]["limits"] == {"burst": {"limit": TOP + 2}}
    if algorithm == "token_bucket":
        assert tenant.check(cost=0).json["limit"] == TOP + 2, "a larger capacity must not refill the bucket"
    else:
        assert [tenant.check().status for _ in range(3)] == [200, 200, 429]
    assert tenant.check(subject="user:43").json["limit"] == TOP
    assert service.admin("DELETE", f"overrides/{made['id']}").status == 204
    assert tenant.check(cost=0).json["limit"] == TOP


@pytest.mark.parametrize(("change", "status"), [("unlimited", 200), ("blocked", 429)])
def test_an_override_may_lift_or_block_everywhere(service: SeededService, change: str, status: int) -> None:
    tenant = service.tenant(limit_of(limit=1))
    tenant.create("overrides", resource="*", subject="user:42", limits={"burst": change}, ttl_seconds=600)
    for resource in ("GET:/orders", "POST:/orders"):
        answers = [tenant.check(resource=resource) for _ in range(2)]
        assert [answer.status for answer in answers] == [status] * 2
        assert {answer.json["retry_after_ms"] for answer in answers} == {0 if status == 200 else None}
    assert tenant.check(subject="user:43").json["limit"] == 1


def test_the_exact_override_wins(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=1))
    for resource, limit in (("*", 5), ("GET:/orders", 7)):
        given = {"resource": resource, "subject": "user:42", "limits": {"burst": {"limit": limit}}}
        tenant.create("overrides", ttl_seconds=600, **given)
    assert tenant.check(cost=0).json["limit"] == 7
    assert tenant.check(cost=0, resource="GET:/other").json["limit"] == 5


# --- Leases and reservations -----------------------------------------------------------------------------------------


def test_a_lease_is_released_once_or_twice(service: SeededService) -> None:
    tenant = service.tenant(limit_of("concurrency", max_concurrent=1))
    lease_id = tenant.check().json["lease_id"]
    assert tenant.check().status == 429
    assert [tenant.post("release", lease_id=lease_id).status for _ in range(2)] == [200, 200]
    again = tenant.check()
    assert again.status == 200
    assert again.json["lease_id"] != lease_id
    assert tenant.post("release", lease_id=lease_id).status == 200
    assert tenant.check().status == 429, "the old id frees nothing that is not its own"


def test_a_lease_is_renewed_until_it_is_stale(service: SeededService) -> None:
    tenant = service.tenant(limit_of("concurrency", max_concurrent=1))
    lease_id = tenant.check().json["lease_id"]
    assert [tenant.post("renew", lease_id=lease_id).status for _ in range(2)] == [200, 200]
    tenant.post("release", lease_id=lease_id)
    assert_problem(tenant.post("renew", lease_id=lease_id), 409, "conflict")


def test_a_lease_that_is_not_renewed_expires(service: SeededService) -> None:
    tenant = service.tenant(limit_of("concurrency", max_concurrent=1, lease_ttl_seconds=0.3))
    lease_id = tenant.check().json["lease_id"]
    deadline = time.monotonic() + 60
    while tenant.check(cost=0).json["remaining"] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert_problem(tenant.post("renew", lease_id=lease_id), 409, "conflict")
    assert tenant.post("release", lease_id=lease_id).status == 200
    assert tenant.check().status == 200


def test_a_lease_is_opaque_and_authenticated(service: SeededService) -> None:
    tenant = service.tenant(limit_of("concurrency"))
    lease_id = tenant.check(subject="a-name-that-shows").json["lease_id"]
    assert "a-name-that-shows" not in lease_id
    for index in range(0, len(lease_id), 7):
        forged = lease_id[:index] + ("A" if lease_id[index] != "A" else "B") + lease_id[index + 1 :]
        assert tenant.post("release", lease_id=forged).status in (404, 422), index
    assert remaining(tenant, subject="a-name-that-shows") == TOP - 1


def test_settling_is_idempotent(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=10))
    held = tenant.post("reserve", resource="GET:/orders", subject="user:42", cost=6)
    assert (held.status, held.json["remaining"]) == (200, 4)
    settled = [tenant.post("settle", reservation_id=held.json["reservation_id"], cost=2) for _ in range(3)]
    assert [answer.status for answer in settled] == [200] * 3
    assert settled[0].json["cost"] == settled[2].json["cost"] == 2
    assert remaining(tenant) == 8
    tenant.post("settle", reservation_id=held.json["reservation_id"], cost=9)
    assert remaining(tenant) == 8


def test_a_settlement_may_be_for_more_than_was_held(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=10))
    reservation_id = tenant.post("reserve", resource="GET:/orders", subject="user:42", cost=6).json["reservation_id"]
    assert tenant.post("settle", reservation_id=reservation_id, cost=15).status == 200
    assert remaining(tenant) == 0
    assert tenant.check().status == 429


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "concurrency"])
def test_less_than_was_held_is_given_back(service: SeededService, algorithm: str) -> None:
    tenant = service.tenant(limit_of(algorithm))
    reservation_id = tenant.post("reserve", resource="GET:/orders", subject="user:42", cost=3).json["reservation_id"]
    assert tenant.check().status == 429
    assert tenant.post("settle", reservation_id=reservation_id, cost=1).status == 200
    assert remaining(tenant) == 2


def test_a_reservation_without_room_is_a_denial(service: SeededService) -> None:
    tenant = service.tenant(limit_of())
    denied = tenant.post("reserve", resource="GET:/orders", subject="user:42", cost=TOP + 1)
    assert_problem(denied, 429, "rate_limit_exceeded")
    assert "reservation_id" not in denied.json
    assert remaining(tenant) == TOP


@pytest.mark.parametrize(("on_lapse", "left"), [("keep", 1), ("refund", 3)])
def test_a_reservation_that_is_not_settled_expires(service: SeededService, on_lapse: str, left: int) -> None:
    tenant = service.tenant(limit_of())
    check: dict[str, Any] = {"resource": "GET:/orders", "subject": "user:42", "cost": 2}
    held = tenant.post("reserve", **check, ttl_seconds=0.05, on_lapse=on_lapse)
    time.sleep(0.1)
    settled = tenant.post("settle", reservation_id=held.json["reservation_id"], cost=0)
    assert (settled.status, settled.json["outcome"]) == (200, "lapsed")
    assert remaining(tenant) == left


# --- Batches ---------------------------------------------------------------------------------------------------------


def test_an_invalid_check_in_the_middle_affects_no_other(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=2))
    good = {"resource": "GET:/orders", "subject": "user:42"}
    wrong: list[Any] = [
        {"resource": "GET:/orders"},
        {**good, "cost": -1},
        {**good, "hits": 1},
        {**good, "plan_id": "nothing"},
        {**good, "costs": {"nothing": 1}},
        {**good, "priority": "P9"},
        {**good, "subject": ""},
        {**good, "cost": 2**60},
        {**good, "cost": 1.5},
        7,
        None,
        [],
    ]
    answer = tenant.post("check/batch", checks=[good, *wrong, good, good])
    assert answer.status == 200
    decisions = answer.json["decisions"]
    assert [decisions[index]["allowed"] for index in (0, -2, -1)] == [True, True, False]
    assert [decisions[index]["remaining"] for index in (0, -2, -1)] == [1, 0, 0]
    for problem in decisions[1:-2]:
        assert problem["status"] in (404, 422)
        assert {"type", "title", "detail", "code"} <= problem.keys()
    assert "subject" in decisions[1]["detail"]


@pytest.mark.parametrize("count", [0, 1, 1_000])
def test_a_batch_is_answered_in_order(service: SeededService, count: int) -> None:
    tenant = service.tenant(limit_of(limit=2_000))
    checks = [
        {"resource": "GET:/orders", "subject": f"user:{index % 2}", "cost": 1 + index % 2} for index in range(count)
    ]
    decisions = tenant.post("check/batch", checks=checks).json["decisions"]
    used = [0, 0]
    assert len(decisions) == count
    for check, decision in zip(checks, decisions, strict=True):
        used[int(str(check["subject"])[-1])] += int(str(check["cost"]))
        assert decision["remaining"] == 2_000 - used[int(str(check["subject"])[-1])]


def test_leases_of_a_batch_are_as_good_as_any(service: SeededService) -> None:
    tenant = service.tenant(limit_of("concurrency"))
    check: dict[str, Any] = {"resource": "GET:/orders", "subject": "user:42"}
    decisions = tenant.post("check/batch", checks=[check] * (TOP + 1)).json["decisions"]
    assert [decision["allowed"] for decision in decisions] == [True] * TOP + [False]
    for decision in decisions[:TOP]:
        assert tenant.post("release", lease_id=decision["lease_id"]).status == 200
    assert remaining(tenant) == TOP


# --- The rest of the tables ------------------------------------------------------------------------------------------


def test_health_and_readiness(service: SeededService) -> None:
    health = service.running.request("GET", "/v1/health")
    assert (health.status, health.json["status"]) == (200, "ok")
    assert health.json["version"]
    ready = service.running.request("GET", "/v1/ready")
    assert ready.status == 200
    assert {name: set(ready.json[name]) for name in ("store", "catalog")} == {
        "store": {"state", "since"},
        "catalog": {"state", "since"},
    }
    assert set(ready.json) == {
        "status",
        "store",
        "catalog",
    }  # no sizes, revisions or names, because anyone may call this


@pytest.mark.parametrize("path", ["/v1/health", "/v1/ready"])
def test_head_has_the_fields_of_get_and_no_body(service: SeededService, path: str) -> None:
    got = service.running.request("GET", path)
    with service.running.connection() as connection:
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b""
    assert got.headers["content-type"].encode() in head


def test_head_leaves_the_connection_in_order(service: SeededService) -> None:
    ask = "{} /v1/usage?resource=r&subject=s HTTP/1.1\r\nhost: test\r\nx-api-key: {}\r\n\r\n"
    tenant = service.tenant(limit_of())
    with service.running.connection() as connection:
        connection.sendall(ask.format("HEAD", tenant.key).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1)
        assert head.startswith(b"HTTP/1.1 200 ")
        connection.sendall(ask.format("GET", tenant.key).encode())
        assert read_response(connection).json["remaining"] == TOP


def test_options_returns_the_allowed_methods(service: SeededService) -> None:
    for path, allowed in {"/v1/check": {"POST"}, "/v1/usage": {"GET", "HEAD"}, "/v1/settle": {"POST"}}.items():
        answer = service.running.request("OPTIONS", path)
        assert answer.status in (204, 405)
        assert set(answer.headers["allow"].split(", ")) >= allowed


def test_metrics_take_an_admin_token(service: SeededService) -> None:
    assert service.running.request("GET", "/metrics").status == 401
    own = {"authorization": f"Bearer {service.demo['admin_token']}"}
    assert service.running.request("GET", "/metrics", headers=own).status == 200


def test_what_was_created_is_changed_and_deleted_with_the_documented_statuses(service: SeededService) -> None:
    tenant = service.tenant(limit_of())
    plan = tenant.create("plans", name="flat", algorithm="token_bucket", bucket_capacity=100, refill_rate_per_sec=20)
    assert plan["id"]
    assert tenant.check(cost=0, plan_id=plan["id"]).json["binding"] == "flat"
    assert_problem(
        service.admin("POST", "plans", {"tenant_id": tenant.id, "name": "flat", "limits": [limit_of()]}),
        409,
        "conflict",
    )
    path = f"plans/{plan['id']}"
    stale = service.admin("GET", path).headers["etag"]
    assert service.admin("PATCH", path, {"name": "other"}, if_match=stale).status == 200
    assert_problem(service.admin("PATCH", path, {"name": "third"}, if_match=stale), 412, "outdated")
    assert_problem(service.admin("PATCH", path, {"nonsense": 1}), 422, "invalid_field", "nonsense")
    assert service.admin("DELETE", path).status == 204
    assert_problem(service.admin("GET", path), 404, "not_found")
    assert_problem(tenant.check(plan_id=plan["id"]), 404, "not_found")


def test_lists_continue_with_a_cursor(service: SeededService) -> None:
    tenant = service.tenant()
    made = {tenant.create("keys", name=f"k{number}")["id"] for number in range(5)} | {tenant.key_id}
    found: list[str] = []
    cursor = ""
    while True:
        page = service.admin("GET", f"keys?tenant_id={tenant.id}&limit=2{cursor}").json
        assert len(page["items"]) <= 2
        found += [each["id"] for each in page["items"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert len(found) == len(made)
    assert set(found) == made


def test_the_throttled_list_has_hashes_only(service: SeededService) -> None:
    tenant = service.tenant(limit_of(limit=1))
    for _ in range(4):
        tenant.check(subject="a-name-that-shows")
    answer = service.admin("GET", f"throttled?tenant_id={tenant.id}")
    assert answer.status == 200
    assert tenant.id in answer.body.decode()
    assert "a-name-that-shows" not in answer.body.decode()


def test_the_operators_plan_is_above_all_tenants(service: SeededService) -> None:
    tenant = service.tenant(limit_of())
    plan = service.create("plans", {"tenant_id": "operator", "name": uuid4().hex, "limits": [limit_of(limit=2)]})
    try:
        assert service.admin("PUT", "operator", {"plan_id": plan["id"]}).status == 200
        answers = [tenant.check() for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert set(answers[0].json["limits"]) == {"operator:burst", "tenant:burst"}
        assert answers[2].json["violated-policies"] == ["operator:burst"]
    finally:
        assert service.admin("PUT", "operator", {"plan_id": None}).status == 200


def test_the_service_may_live_under_a_prefix(tmp_path_factory: pytest.TempPathFactory) -> None:
    database = f"sqlite:///{tmp_path_factory.mktemp('prefix')}/wire.db"
    with run_seeded_service(database, root_path="/limitforge-rls") as service:
        tenant = service.tenant(limit_of())
        check: dict[str, Any] = {"resource": "GET:/orders", "subject": "user:42"}
        assert tenant.check().json["remaining"] == 2
        assert tenant.post("check/batch", checks=[check]).json["decisions"][0]["remaining"] == 1
        assert tenant.usage().json["remaining"] == 1
        assert tenant.post("reserve", **check).status == 200
        for path in (
            "/v1/check",
            "/v1/check/batch",
            "/v1/usage",
            "/v1/health",
            "/v1/admin/tenants",
            "/limitforge-rlsx",
        ):
            for method in ("GET", "POST"):
                assert_problem(service.running.request(method, path, headers={"x-api-key": tenant.key}), 404)


def test_without_the_store_a_tenant_that_fails_closed_gets_503(
    own_redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    database = f"sqlite:///{tmp_path_factory.mktemp('closed')}/wire.db"
    with run_seeded_service(database, own_redis_server.url, deadline_ms="500") as service:
        closed, opened = (service.tenant(limit_of(), failure=failure) for failure in ("closed", "open"))
        assert [tenant.check().status for tenant in (closed, opened)] == [200, 200]
        own_redis_server.kill()
        refused = closed.check()
        assert_problem(refused, 503)
        assert refused.json["degraded"] == "closed"
        assert int(refused.headers["retry-after"]) >= 1
        allowed = opened.check()
        assert (allowed.status, allowed.json["degraded"]) == (200, "open")
