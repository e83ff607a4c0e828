"""Only keys with the scope `plans` may name a plan. Keys without explicit scopes have it."""

import time
from typing import Any

import httpx
import pytest

from tests.service.live_service import LiveService, TenantFixture
from tests.service.problems import assert_problem

CHECK: dict[str, Any] = {"resource": "GET:/other", "subject": "user:1"}


class KeyClient:
    """Calls with one API key."""

    def __init__(self, account: TenantFixture, **fields: Any) -> None:
        made = account.admin.create("/keys", {"tenant_id": account.id, "name": "narrow", **fields})
        self.id: str = made["id"]
        self._http = account.admin.http
        self._headers = {"authorization": f"Bearer {made['key']}"}

    def post(self, call: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(f"/v1/{call}", json=body, headers=self._headers)

    def usage(self, **query: str) -> httpx.Response:
        return self._http.get("/v1/usage", params=query, headers=self._headers)


@pytest.fixture
def account(each_service: LiveService) -> TenantFixture:
    return TenantFixture(each_service.admin())


def everywhere(caller: KeyClient, **fields: str) -> dict[str, httpx.Response]:
    """Return the answer of each call that accepts a plan. For a batch, it is that of its only check."""
    body = {**CHECK, **fields}
    return {
        "check": caller.post("check", body),
        "reserve": caller.post("reserve", body),
        "explain": caller.post("explain", body),
        "usage": caller.usage(**body),
    }


def test_a_key_without_the_scope_names_no_plan_in_any_call(account: TenantFixture) -> None:
    caller = KeyClient(account, scopes=["check", "usage"])
    for answer in everywhere(caller, plan_id=account.plan["id"]).values():
        assert_problem(answer, 403, "forbidden", "this key lacks the scope plans")
    assert {answer.status_code for answer in everywhere(caller).values()} == {200}


def test_in_a_batch_only_the_checks_that_name_a_plan_are_refused(account: TenantFixture) -> None:
    caller = KeyClient(account, scopes=["check"])
    checks = [CHECK, {**CHECK, "plan_id": account.plan["id"]}, {**CHECK, "plan_id": None}]
    answer = caller.post("check/batch", {"checks": checks})
    assert answer.status_code == 200
    first, second, third = answer.json()["decisions"]
    assert (first["allowed"], third["allowed"]) == (True, True)
    assert (second["status"], second["code"]) == (403, "forbidden")
    assert "this key lacks the scope plans" in second["detail"]


def test_a_key_that_lists_no_scopes_names_plans_as_before(account: TenantFixture) -> None:
    for subject, caller in (("a", KeyClient(account)), ("b", KeyClient(account, scopes=["plans", "usage", "check"]))):
        answers = everywhere(caller, plan_id=account.plan["id"], subject=subject)
        assert {call: answer.status_code for call, answer in answers.items()} == dict.fromkeys(answers, 200)
        assert "burst" in answers["check"].json()["limits"]
    assert account.key["scopes"] == ["check", "usage", "plans"]


def test_whether_a_plan_exists_is_not_shown_to_a_key_without_the_scope(account: TenantFixture) -> None:
    caller = KeyClient(account, scopes=["check", "usage"])
    known = caller.post("check", {**CHECK, "plan_id": account.plan["id"]})
    unknown = caller.post("check", {**CHECK, "plan_id": "pla_0000000000000000"})
    assert known.json() == unknown.json()


def test_a_key_that_loses_the_scope_loses_its_prepared_checks(account: TenantFixture) -> None:
    caller = KeyClient(account)
    named = {**CHECK, "plan_id": account.plan["id"]}
    assert [caller.post("check", {**named, "cost": 0}).status_code for _ in range(3)] == [200] * 3
    path = f"/keys/{caller.id}"
    assert account.admin.patch(path, {"scopes": ["check", "usage"]}).json()["scopes"] == ["check", "usage"]
    assert_problem(caller.post("check", named), 403, "forbidden", "this key lacks the scope plans")
    assert caller.post("check", CHECK).status_code == 200
    account.admin.patch(path, {"scopes": ["check", "plans"]})
    deadline = time.monotonic() + 30
    while caller.post("check", {**named, "cost": 0}).status_code != 200:
        assert time.monotonic() < deadline


def test_plans_alone_is_refused_by_name(account: TenantFixture) -> None:
    answer = account.admin.post("/keys", {"tenant_id": account.id, "name": "x", "scopes": ["plans"]})
    assert_problem(answer, 422, "invalid_field", "scopes")
    assert "must have check or usage" in answer.json()["detail"]
