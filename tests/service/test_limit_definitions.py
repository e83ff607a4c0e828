"""Limits of one name with different windows are counted apart, overrides do not mix them, and writers are warned."""

from typing import Any

import pytest

from tests.service.live_service import LiveService, TenantFixture
from tests.service.problems import assert_problem

WIDE = {"name": "w", "algorithm": "fixed_window", "limit": 3, "window_seconds": 3_600}


@pytest.fixture
def account(each_service: LiveService) -> TenantFixture:
    """With SQLite and memory, and with Postgres and Redis."""
    return TenantFixture(each_service.admin())


def plan(account: TenantFixture, name: str, **changes: Any) -> dict[str, Any]:
    return account.admin.create("/plans", {"tenant_id": account.id, "name": name, "limits": [{**WIDE, **changes}]})


def policy(account: TenantFixture, resource: str, of: dict[str, Any]) -> dict[str, Any]:
    return account.admin.create("/policies", {"tenant_id": account.id, "resource": resource, "plan_id": of["id"]})


@pytest.mark.parametrize("scope", ["caller", "tenant"])
def test_two_policies_with_other_windows_each_keep_to_their_limit(account: TenantFixture, scope: str) -> None:
    policy(account, "GET:/a", plan(account, "a", scope=scope, align="first_hit"))
    policy(account, "GET:/b", plan(account, "b", scope=scope, align="first_hit", limit=8, window_seconds=86_400))
    admitted = {"GET:/a": 0, "GET:/b": 0}
    for _ in range(12):
        for resource in admitted:
            admitted[resource] += account.check(resource=resource).status_code == 200
    assert admitted == {"GET:/a": 3, "GET:/b": 8}


def test_another_window_for_one_resource_of_a_caller_wide_limit_is_refused(account: TenantFixture) -> None:
    policy(account, "GET:/a", plan(account, "a", scope="caller"))
    body = {
        "tenant_id": account.id,
        "resource": "GET:/a",
        "subject": "user:1",
        "limits": {"w": {"window_seconds": 60}},
        "ttl_seconds": 60,
    }
    refused = account.admin.post("/overrides", body)
    assert_problem(refused, 422, "invalid_field", "limits.w.window_seconds")
    assert "'*'" in refused.json()["detail"]
    account.admin.create("/overrides", {**body, "resource": "*"})


def test_writing_a_plan_or_policy_warns_of_limits_that_count_apart(account: TenantFixture) -> None:
    one, two = plan(account, "one", scope="tenant"), plan(account, "two", scope="tenant", window_seconds=60)
    assert "warnings" not in one
    [warning] = two["warnings"]
    assert "limit w " in warning
    assert "one, two" in warning
    assert "warnings" not in policy(account, "GET:/a", one)
    assert policy(account, "GET:/b", two)["warnings"] == [warning]
    changed = account.admin.patch(f"/plans/{two['id']}", {"limits": [{**WIDE, "scope": "tenant", "limit": 9}]})
    assert "warnings" not in changed.json()
    back = account.admin.post(f"/plans/{two['id']}/rollback", {})
    assert back.json()["warnings"] == [warning]
    assert "warnings" not in account.admin.get(f"/plans/{two['id']}").json()
    found = [each["id"] for each in account.admin.list_all("/policies", tenant_id=account.id)]
    answers = [account.admin.patch(f"/policies/{each}", {"mode": "monitor"}).json() for each in found]
    assert sorted(len(answer.get("warnings", ())) for answer in answers) == [0, 1, 1]


def test_a_repeated_answer_has_its_warnings(account: TenantFixture) -> None:
    plan(account, "one", scope="tenant")
    limits = [{**WIDE, "scope": "tenant", "window_seconds": 60}]
    body = {"tenant_id": account.id, "name": "two", "limits": limits}
    first, again = (account.admin.post("/plans", body, idempotency_key="once") for _ in range(2))
    assert again.headers["idempotency-replayed"] == "true"
    assert len(first.json()["warnings"]) == 1
    assert again.json() == first.json()


def test_the_reference_says_that_there_may_be_warnings(sqlite_service: LiveService) -> None:
    schemas = sqlite_service.client().http.get("/openapi.json").json()["components"]["schemas"]
    for kind in ("Plan", "Policy"):
        assert "warnings" in schemas[f"{kind}WithWarnings"]["properties"]
        assert "warnings" not in schemas[f"{kind}WithWarnings"]["required"]
        assert "warnings" not in schemas[kind]["properties"]
