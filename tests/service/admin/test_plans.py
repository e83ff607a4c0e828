"""Plans over HTTP: both forms, every algorithm, errors that name the field, versions and rollback."""

from typing import Any

from limitforge.core.limits import LIMIT_TYPES
from tests.service.live_service import AdminClient, TenantFixture
from tests.service.problems import assert_problem

NUMBERS: dict[str, dict[str, Any]] = {
    "token_bucket": {"bucket_capacity": 100, "refill_rate_per_sec": 20},
    "leaky_bucket": {"bucket_capacity": 10, "leak_rate_per_sec": 2.5},
    "fixed_window": {"limit": 10, "window_seconds": 60},
    "sliding_window": {"limit": 10, "window_seconds": 60},
    "sliding_window_counter": {"limit": 10, "window_seconds": 60},
    "concurrency": {"max_concurrent": 3, "lease_ttl_seconds": 30},
    "quota": {"limit": 1_000, "period": "month"},
}


def test_every_algorithm_is_tested() -> None:
    assert NUMBERS.keys() == LIMIT_TYPES.keys()


def test_a_plan_of_any_algorithm_may_be_flat_or_a_list(admin: AdminClient, account: TenantFixture) -> None:
    own = {"tenant_id": account.id}
    for algorithm, numbers in NUMBERS.items():
        fields = {"algorithm": algorithm, **numbers}
        flat = admin.create("/plans", {**own, "name": algorithm, **fields})
        limits = [{"name": algorithm, **fields}]
        whole = admin.create("/plans", {**own, "name": f"{algorithm}-whole", "limits": limits})
        assert flat["limits"] == whole["limits"]
        assert [limit["name"] for limit in flat["limits"]] == [algorithm]
        assert "algorithm" not in flat.keys() - {"limits"}
        decided = account.check(plan_id=flat["id"]).json()
        assert decided["limits"].keys() == {algorithm}


def test_limits_can_be_given_as_text(admin: AdminClient, account: TenantFixture) -> None:
    plan = admin.create("/plans", {"tenant_id": account.id, "name": "t", "limits": "100/minute; burst=token:10/second"})
    assert [limit["algorithm"] for limit in plan["limits"]] == ["sliding_window_counter", "token_bucket"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "limits"),
    ({"limits": None}, "limits"),
    ({"limits": 5}, "limits"),
    ({"limits": {}}, "limits"),
    ({"limits": "100/fortnight"}, "limits"),
    ({"limits": "1/minute", "algorithm": "quota"}, "algorithm"),
    ({"limits": "1/minute", "colour": "red"}, "colour"),
    ({"colour": "red"}, "colour"),
    ({"algorithm": "magic"}, "algorithm"),
    ({"algorithm": "token_bucket"}, "bucket_capacity"),
    ({"algorithm": "token_bucket", "bucket_capacity": 5}, "refill_rate_per_sec"),
    ({"algorithm": "token_bucket", "bucket_capacity": -1, "refill_rate_per_sec": 1}, "bucket_capacity"),
    ({"algorithm": "token_bucket", "bucket_capacity": "ten", "refill_rate_per_sec": 1}, "bucket_capacity"),
    ({"algorithm": "token_bucket", "bucket_capacity": 2**60, "refill_rate_per_sec": 1}, "bucket_capacity"),
    ({"algorithm": "token_bucket", "bucket_capacity": 5, "refill_rate_per_sec": 0}, "refill_rate_per_sec"),
    ({"algorithm": "token_bucket", "bucket_capacity": 5, "refill_rate_per_sec": 1, "window_seconds": 1}, "window_sec"),
    ({"algorithm": "fixed_window", "limit": 5}, "window_seconds"),
    ({"algorithm": "fixed_window", "limit": 5, "window_seconds": 0}, "window_seconds"),
    ({"algorithm": "fixed_window", "limit": True, "window_seconds": 5}, "limit"),
    ({"algorithm": "quota", "limit": 5, "period": "decade"}, "period"),
    ({"algorithm": "concurrency", "max_concurrent": 5, "lease_ttl_seconds": -5}, "lease_ttl_seconds"),
    ({"limits": [{"algorithm": "fixed_window", "name": "a b", "limit": 5, "window_seconds": 5}]}, "limits[0].name"),
    ({"limits": [{"algorithm": "fixed_window", "limit": 5, "window_seconds": 5}, 5]}, "limits[1]"),
    ({"limits": [{"algorithm": "fixed_window", "name": "a", "limit": 5}]}, "limits[0].window_seconds"),
    (
        {"limits": [{"algorithm": "fixed_window", "name": "a", "limit": 5, "window_seconds": 5, "scope": "world"}]},
        "limits[0].scope",
    ),
    (
        {"limits": [{"algorithm": "fixed_window", "name": "a", "limit": 5, "window_seconds": 5, "scope": "global"}]},
        "limits[0].scope",
    ),
    ({"limits": [{"algorithm": "fixed_window", "name": "a", "limit": 5, "window_seconds": 5}] * 2}, "limits"),
    ({"limits": ["1/minute"] * 11}, "limits"),
]


def test_an_invalid_plan_is_refused_with_the_field(admin: AdminClient, account: TenantFixture) -> None:
    unexpected = {}
    for body, field in WRONG:
        answer = admin.post("/plans", {"tenant_id": account.id, "name": "x", **body})
        problem = answer.json()
        if answer.status_code != 422 or not problem["field"].startswith(field):
            unexpected[str(body)] = problem
    assert unexpected == {}
    assert [plan["name"] for plan in admin.list_all("/plans", tenant_id=account.id)] == ["free"]


def test_a_change_is_a_new_version_and_applies_at_once(admin: AdminClient, account: TenantFixture) -> None:
    plan = f"/plans/{account.plan['id']}"
    assert account.check().json()["limit"] == 3
    changed = admin.patch(plan, {"algorithm": "fixed_window", "limit": 50, "window_seconds": 60})
    assert changed.json()["limits"] == [
        {"name": "free", "algorithm": "fixed_window", "limit": 50, "window_seconds": 60}
    ]
    assert account.check().json()["limit"] == 50
    named = admin.patch(plan, {"name": "basic"}).json()
    assert (named["name"], named["version"], named["limits"]) == ("basic", 3, changed.json()["limits"])
    assert_problem(admin.patch(plan, {"limit": 5}), 422, "invalid_field", "limit")


def test_a_plan_is_rolled_back(admin: AdminClient, account: TenantFixture) -> None:
    plan = f"/plans/{account.plan['id']}"
    for limit in (5, 6, 7):
        admin.patch(plan, {"limits": f"burst={limit}/minute"})
    versions = admin.get(f"{plan}/versions").json()["items"]
    assert [each["version"] for each in versions] == [4, 3, 2, 1]
    assert versions[-1]["limits"] == account.plan["limits"]
    assert {each["created_by"].partition("_")[0] for each in versions} == {"token:tok"}
    back = admin.post(f"{plan}/rollback")
    assert (back.json()["version"], back.json()["limits"]) == (5, versions[1]["limits"])
    first = admin.post(f"{plan}/rollback", {"version": 1}, if_match='"5"')
    assert (first.headers["etag"], first.json()["limits"]) == ('"6"', account.plan["limits"])
    assert_problem(admin.post(f"{plan}/rollback", {"version": 99}), 404, "not_found")
    assert_problem(admin.post(f"{plan}/rollback", {"version": 1}, if_match='"5"'), 412, "outdated")
    assert_problem(admin.post(f"{plan}/rollback", {"version": "1"}), 422, "invalid_field", "version")
    assert admin.get("/audit", entity_id=account.plan["id"]).json()["items"][0]["action"] == "plan.rollback"


def test_a_plan_in_use_can_not_be_deleted(admin: AdminClient, account: TenantFixture) -> None:
    plan = f"/plans/{account.plan['id']}"
    refused = admin.delete(plan)
    assert_problem(refused, 409, "conflict")
    assert "GET:/orders/{id}" in refused.json()["detail"]
    admin.delete(f"/policies/{account.policy['id']}")
    assert admin.delete(plan).status_code == 204
