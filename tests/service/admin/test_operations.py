"""Operations on a running service: reset, the operator's plan, the kill switch, usage, throttled subjects."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.service.live_service import AdminClient, LiveService, TenantFixture
from tests.service.problems import assert_problem

SLOW = {"algorithm": "fixed_window", "window_seconds": 86_400}


def limits(*scopes: str) -> list[dict[str, Any]]:
    return [{"name": scope, "scope": scope, "limit": 2, **SLOW} for scope in scopes]


def exhaust(account: TenantFixture, subject: str = "user:1", **fields: Any) -> None:
    assert [account.check(subject, **fields).status_code for _ in range(3)] == [200, 200, 429]


# --- Reset -----------------------------------------------------------------------------------------------------------


def test_a_reset_clears_the_counters_of_one_subject(each_service: LiveService) -> None:
    admin = each_service.admin()
    account = TenantFixture(admin)
    admin.patch(f"/plans/{account.plan['id']}", {"limits": limits("subject", "caller")})
    exhaust(account, "user:1")
    exhaust(account, "user:2")
    body = {"tenant_id": account.id, "resource": "GET:/orders/99", "subject": "user:1"}
    answer = admin.post("/reset", body)
    assert answer.status_code == 200
    assert answer.json() == {**body, "resource": "GET:/orders/{id}", "forgotten": ["subject", "caller"]}
    exhaust(account, "user:1")
    assert account.check("user:2").status_code == 429


def test_a_reset_covers_every_plan_that_can_apply(admin: AdminClient, account: TenantFixture) -> None:
    own = {"tenant_id": account.id}
    by_default = admin.create("/plans", {**own, "name": "default", "limits": [{"name": "a", "limit": 2, **SLOW}]})
    of_key = admin.create("/plans", {**own, "name": "key", "limits": [{"name": "b", "limit": 2, **SLOW}]})
    by_name = admin.create("/plans", {**own, "name": "named", "limits": [{"name": "c", "limit": 2, **SLOW}]})
    body = {**own, "resource": "job", "subject": "user:1"}
    admin.patch(f"/tenants/{account.id}", {"default_plan_id": by_default["id"]})
    exhaust(account, resource="job")
    admin.post("/reset", body)
    assert account.check(resource="job").status_code == 200
    admin.patch(f"/keys/{account.key['id']}", {"plan_id": of_key["id"]})
    exhaust(account, resource="job")
    exhaust(account, resource="job", plan_id=by_name["id"])
    assert set(admin.post("/reset", body).json()["forgotten"]) == {"a", "b", "burst", "c"}
    exhaust(account, resource="job")
    exhaust(account, resource="job", plan_id=by_name["id"])


def test_shared_counters_are_cleared_only_on_request(admin: AdminClient, account: TenantFixture) -> None:
    admin.patch(f"/plans/{account.plan['id']}", {"limits": limits("tenant", "resource", "caller")})
    exhaust(account)
    body = {"tenant_id": account.id, "resource": "GET:/orders/1", "subject": "user:1"}
    assert admin.post("/reset", body).json()["forgotten"] == ["caller"]
    assert account.check().status_code == 429
    assert admin.post("/reset", {**body, "shared": True}).json()["forgotten"] == ["tenant", "resource", "caller"]
    exhaust(account)


def test_a_reset_clears_limits_of_one_name_and_different_algorithms(admin: AdminClient, account: TenantFixture) -> None:
    for at in range(3):
        bucket = {"algorithm": "token_bucket", "name": "same", "bucket_capacity": 2, "refill_rate_per_sec": 0.001}
        kinds = [{"name": "same", "limit": 2, **SLOW}, {"name": "same", "limit": 2, "scope": "caller", **SLOW}, bucket]
        admin.create("/plans", {"tenant_id": account.id, "name": f"p{at}", "limits": [kinds[at]]})
    plans = [plan["id"] for plan in admin.list_all("/plans", tenant_id=account.id) if plan["name"] != "free"]
    for plan_id in plans:
        exhaust(account, resource="x", plan_id=plan_id)
    admin.post("/reset", {"tenant_id": account.id, "resource": "x", "subject": "user:1"})
    for plan_id in plans:
        exhaust(account, resource="x", plan_id=plan_id)


def test_a_reset_clears_limits_of_one_name_and_different_windows(admin: AdminClient, account: TenantFixture) -> None:
    plans = []
    for seconds in (86_400, 604_800):
        window = {"algorithm": "fixed_window", "name": "same", "limit": 2, "window_seconds": seconds}
        body = {"tenant_id": account.id, "name": f"w{seconds}", "limits": [window]}
        plans.append(admin.create("/plans", body)["id"])
    for plan_id in plans:
        exhaust(account, resource="x", plan_id=plan_id)
    admin.post("/reset", {"tenant_id": account.id, "resource": "x", "subject": "user:1"})
    for plan_id in plans:
        exhaust(account, resource="x", plan_id=plan_id)


def test_a_reset_is_in_the_audit_log(admin: AdminClient, account: TenantFixture) -> None:
    body = {"tenant_id": account.id, "resource": "x", "subject": "user:1"}
    admin.post("/reset", body)
    entry = admin.get("/audit", tenant_id=account.id).json()["items"][0]
    assert (entry["action"], entry["tenant_id"]) == ("subject.reset", account.id)
    assert entry["after"] == {**body, "forgotten": ["burst"]}


# --- The operator and the kill switch: they affect all tenants, so each test has a service of its own ---------------


@pytest.fixture(params=["sqlite", "postgres"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "sqlite":
        live = LiveService(f"sqlite:///{tmp_path_factory.mktemp('alone')}/alone.db")
    else:
        live = LiveService(request.getfixturevalue("postgres_url"), request.getfixturevalue("redis_url"))
    with live:
        yield live


def test_the_operators_plan_applies_to_all_tenants(alone: LiveService) -> None:
    admin = alone.admin()
    account, other = TenantFixture(admin), TenantFixture(admin)
    first = admin.get("/operator")
    assert (first.json()["plan_id"], first.headers["etag"]) == (None, '"1"')
    plan = admin.create("/plans", {"tenant_id": "operator", "name": "top", "limits": limits("subject", "global")})
    set_to = admin.put("/operator", {"plan_id": plan["id"]}, if_match='"1"')
    assert (set_to.status_code, set_to.json()["plan_id"], set_to.headers["etag"]) == (200, plan["id"], '"2"')
    assert account.check().json()["limits"].keys() == {"subject", "global", "burst"}
    assert other.check().status_code == 200
    assert account.check().json()["binding"] == "global"
    body = {"tenant_id": account.id, "resource": "GET:/orders/7", "subject": "user:1"}
    assert account.tenant_admin().post("/reset", body).json()["forgotten"] == ["burst"], (
        "a tenant can't lift what is above"
    )
    assert admin.post("/reset", body).json()["forgotten"] == ["burst", "subject"]
    assert_problem(admin.put("/operator", {"plan_id": None}, if_match='"1"'), 412, "outdated")
    assert_problem(admin.put("/operator", {"plan_id": account.plan["id"]}), 404, "not_found", "plan_id")
    assert_problem(admin.put("/operator", {"plan_id": "nope"}), 404, "not_found", "plan_id")
    assert_problem(admin.put("/operator", {}), 422, "invalid_field", "plan_id")
    assert_problem(admin.delete(f"/plans/{plan['id']}"), 409, "conflict")
    assert admin.put("/operator", {"plan_id": None}).json()["plan_id"] is None
    assert account.check().json()["limits"].keys() == {"burst"}


def test_the_kill_switch_applies_to_one_tenant_or_to_all(alone: LiveService) -> None:
    admin = alone.admin()
    account, other = TenantFixture(admin), TenantFixture(admin)
    for each in (account, other):
        assert [each.check().status_code for _ in range(6)] == [200, 200, 200, 429, 429, 429]
    switched = admin.put("/mode", {"mode": "monitor", "tenant_id": account.id}, if_match='"1"')
    assert switched.json() == {"mode": "monitor", "tenant_id": account.id, "version": 2}
    assert switched.headers["etag"] == '"2"'
    allowed = account.check()
    assert (allowed.status_code, allowed.json()["mode"], allowed.json()["would_deny"]) == (200, "monitor", ["burst"])
    assert other.check().status_code == 429
    assert admin.put("/mode", {"mode": "off"}).json() == {"mode": "off", "tenant_id": None, "version": 2}
    for each in (account, other):
        answer = each.check()
        assert (answer.status_code, answer.json()["mode"]) == (200, "off")
        assert "x-ratelimit-limit" not in answer.headers
    assert_problem(admin.put("/mode", {"mode": "on", "tenant_id": account.id}, if_match='"1"'), 412, "outdated")
    for wrong, field in (
        ({}, "mode"),
        ({"mode": "loud"}, "mode"),
        ({"mode": None}, "mode"),
        ({"mode": "off", "tenant_id": None}, "tenant_id"),
        ({"mode": "off", "tenant_id": ""}, "tenant_id"),
        ({"mode": "off", "tenant": account.id}, "tenant"),
    ):
        assert_problem(admin.put("/mode", wrong), 422, "invalid_field", field)
    admin.put("/mode", {"mode": "on"})
    assert other.check().status_code == 429


# --- Usage and throttled subjects------------------------------------------------------------------------------------


def test_usage_is_listed_by_hour_tenant_and_key(each_service: LiveService) -> None:
    admin = each_service.admin()
    account = TenantFixture(admin)
    assert [account.check().status_code for _ in range(5)] == [200, 200, 200, 429, 429]
    admin.put("/mode", {"mode": "monitor", "tenant_id": account.id})
    account.check()
    items = admin.get("/usage", tenant_id=account.id).json()["items"]
    totals = {name: sum(item[name] for item in items) for name in ("allowed", "denied", "would_deny", "degraded")}
    assert totals == {"allowed": 4, "denied": 2, "would_deny": 1, "degraded": 0}
    assert {(item["tenant_id"], item["key_id"]) for item in items} == {(account.id, account.key["id"])}
    assert items[0]["hour"].endswith(":00:00Z")
    account.check()
    later = admin.get("/usage", key_id=account.key["id"]).json()["items"]
    assert sum(item["allowed"] for item in later) == 5


def test_usage_can_be_filtered_by_time(admin: AdminClient, account: TenantFixture) -> None:
    account.check()
    now = datetime.now(UTC)
    for query, found in (
        ({"since": now - timedelta(hours=2)}, True),
        ({"until": now + timedelta(hours=1)}, True),
        ({"since": now + timedelta(hours=1)}, False),
        ({"until": now - timedelta(hours=2)}, False),
    ):
        times = {name: time.isoformat() for name, time in query.items()}
        assert bool(admin.get("/usage", tenant_id=account.id, **times).json()["items"]) is found
    for wrong in ("yesterday", "2026-01-01T00:00:00", "5"):
        assert_problem(admin.get("/usage", since=wrong), 422, "invalid_field", "since")


def test_the_subject_with_the_most_denials_is_first(
    sqlite_service: LiveService, account: TenantFixture, tenant_admin: AdminClient
) -> None:
    throttled, now_us = sqlite_service.service.throttled, sqlite_service.catalog.clock.now_us()
    for subject, times in (("user:7", 5), ("user:8", 9)):
        for _ in range(times):
            throttled.record_denial(account.id, subject, now_us)
    items = tenant_admin.get("/throttled").json()["items"]
    assert [(item["subject_hash"], item["denied"]) for item in items] == [
        (throttled.subject_hash(account.id, "user:8"), 9),
        (throttled.subject_hash(account.id, "user:7"), 5),
    ]
    assert {item["tenant_id"] for item in items} == {account.id}
    assert items[0]["last_denied_at"].endswith("Z")
    assert len(tenant_admin.get("/throttled", subject="user:7").json()["items"]) == 1
    assert len(tenant_admin.get("/throttled", limit=1).json()["items"]) == 1
    assert tenant_admin.get("/throttled", tenant_id="ten_0000000000000000").json()["items"] == []
    assert_problem(tenant_admin.get("/throttled", limit=0), 422, "invalid_field", "limit")
