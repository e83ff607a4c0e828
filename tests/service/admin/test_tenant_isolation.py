"""Isolation of tenants: every route with a token of one tenant and the ids of another."""

from typing import Any

import pytest
from fastapi.routing import iter_route_contexts

from tests.service.live_service import AdminClient, LiveService, TenantFixture
from tests.service.problems import assert_problem

Row = tuple[str, str, Any]


@pytest.fixture(scope="module")
def two(sqlite_service: LiveService) -> tuple[TenantFixture, TenantFixture]:
    return TenantFixture(sqlite_service.admin()), TenantFixture(sqlite_service.admin())


def requests_for_other(other: TenantFixture) -> list[Row]:
    """Return the requests that name an entity of the other tenant. The answer is 404."""
    own = {"tenant_id": other.id}
    plan, key = other.plan["id"], other.key["id"]
    rows: list[Row] = []
    for path, entity, change in (
        ("tenants", other.tenant, {"mode": "off"}),
        ("plans", other.plan, {"limits": "1/minute"}),
        ("keys", other.key, {"name": "mine"}),
        ("policies", other.policy, {"mode": "off"}),
        ("overrides", other.override, {"reason": "mine"}),
        ("tokens", other.token, {"name": "mine"}),
    ):
        target = f"/{path}/{entity['id']}"
        rows += [("GET", target, None), ("PATCH", target, change), ("DELETE", target, None)]
    return [
        *rows,
        ("GET", f"/plans/{plan}/versions", None),
        ("POST", f"/plans/{plan}/rollback", {"version": 1}),
        ("POST", f"/keys/{key}/rotate", {"grace_seconds": 60}),
        ("POST", f"/keys/{key}/disable", None),
        ("POST", f"/keys/{key}/enable", None),
        ("POST", "/plans", {**own, "name": "x", "limits": "1/minute"}),
        ("POST", "/keys", {**own, "name": "x"}),
        ("POST", "/policies", {**own, "resource": "*", "plan_id": plan}),
        ("POST", "/overrides", {**own, "subject": "s", "limits": {"burst": "blocked"}, "ttl_seconds": 60}),
        ("POST", "/tokens", {**own, "name": "x"}),
        ("POST", "/reset", {**own, "resource": "GET:/orders/1", "subject": "user:1"}),
        ("PUT", "/mode", {**own, "mode": "off"}),
    ]


ALL_TENANTS_REQUESTS: list[Row] = [
    ("POST", "/tenants", {"name": "x"}),
    ("GET", "/operator", None),
    ("PUT", "/operator", {"plan_id": None}),
    ("PUT", "/mode", {"mode": "off"}),
    ("POST", "/tokens", {"name": "x"}),
]
"""The requests that require a token for all tenants."""
LISTS = ("tenants", "plans", "keys", "policies", "overrides", "tokens", "audit", "usage", "throttled")


def test_every_route_is_covered(sqlite_service: LiveService, two: tuple[TenantFixture, TenantFixture]) -> None:
    tried = {
        (method, template(path, two[1])) for method, path, _ in [*requests_for_other(two[1]), *ALL_TENANTS_REQUESTS]
    }
    tried |= {("GET", f"/v1/admin/{path}") for path in LISTS}
    app = sqlite_service.service._router._admin_app
    known = {
        (method, context.path)
        for context in iter_route_contexts(app.routes)  # type: ignore[attr-defined]
        if context.path is not None and context.path.startswith("/v1/admin")
        for method in context.methods or ()
    }
    assert tried == known


def template(path: str, account: TenantFixture) -> str:
    """Return the route of a path."""
    for kind in ("tenant", "plan", "key", "policy", "override", "token"):
        path = path.replace(getattr(account, kind)["id"], f"{{{kind}_id}}")
    return f"/v1/admin{path}"


def all_entities(account: TenantFixture) -> dict[str, Any]:
    """Return all entities of a tenant, without the times of their last use."""
    admin = account.admin.live.admin()
    found = {path: list(admin.list_all(f"/{path}", tenant_id=account.id)) for path in LISTS[1:6]}
    found["tenants"] = [admin.get(f"/tenants/{account.id}").json()]
    for items in found.values():
        for item in items:
            item.pop("last_used_at", None)
    return found


def test_entities_of_another_tenant_are_not_found_and_not_changed(two: tuple[TenantFixture, TenantFixture]) -> None:
    mine, other = two
    own = mine.tenant_admin()
    before = all_entities(other)
    for method, path, body in requests_for_other(other):
        answer = own.call(method, path, body)
        assert_problem(answer, 404, "not_found")
        unknown = (
            own.call(method, path.replace(path.split("/")[2], "pla_0000000000000000"), body) if "_" in path else None
        )
        if unknown is not None:
            assert unknown.status_code == 404, "an entity of another tenant looks like an unknown one"
    assert all_entities(other) == before
    assert other.check().status_code == 200


def test_operations_on_all_tenants_are_forbidden(two: tuple[TenantFixture, TenantFixture]) -> None:
    own = two[0].tenant_admin()
    for method, path, body in ALL_TENANTS_REQUESTS:
        assert_problem(own.call(method, path, body), 403, "forbidden")
    assert_problem(own.delete(f"/tenants/{two[0].id}"), 403, "forbidden")
    before = own.get(f"/tenants/{two[0].id}").json()
    for change in ({"name": "another"}, {"lanes": 4}, {"suspended": True}, {"suspended": False}):
        assert_problem(own.patch(f"/tenants/{two[0].id}", {**change, "mode": "monitor"}), 403, "forbidden")
    assert own.get(f"/tenants/{two[0].id}").json() == before


def test_lists_contain_only_entities_of_the_tenant(two: tuple[TenantFixture, TenantFixture]) -> None:
    mine, other = two
    for account in two:
        assert [account.check("user:throttled").status_code for _ in range(4)][-1] == 429
    own = mine.tenant_admin()
    for path in LISTS:
        answer = own.get(f"/{path}")
        assert answer.status_code == 200
        assert other.id not in answer.text, path
        assert other.tenant["name"] not in answer.text, path
        owners = {item["id"] if path == "tenants" else item["tenant_id"] for item in answer.json()["items"]}
        assert owners == {mine.id}, path
        if path == "tenants":
            assert own.get("/tenants", name=other.tenant["name"]).json()["items"] == []
        else:
            assert own.get(f"/{path}", tenant_id=other.id).json() == {"items": [], "cursor": None}


def test_an_entity_can_not_refer_to_another_tenants_plan(two: tuple[TenantFixture, TenantFixture]) -> None:
    mine, other = two
    own = mine.tenant_admin()
    theirs = other.plan["id"]
    for method, path, body in (
        ("PATCH", f"/tenants/{mine.id}", {"default_plan_id": theirs}),
        ("PATCH", f"/keys/{mine.key['id']}", {"plan_id": theirs}),
        ("PATCH", f"/policies/{mine.policy['id']}", {"plan_id": theirs}),
        ("PATCH", f"/policies/{mine.policy['id']}", {"shadow_plan_id": theirs}),
        ("POST", "/keys", {"tenant_id": mine.id, "name": "x", "plan_id": theirs}),
        ("POST", "/policies", {"tenant_id": mine.id, "resource": "*", "plan_id": theirs}),
    ):
        assert_problem(own.call(method, path, body), 404, "not_found")
    check = mine.check(plan_id=theirs)
    assert_problem(check, 404, "not_found", "plan_id")


def test_a_token_of_one_tenant_administers_that_tenant(two: tuple[TenantFixture, TenantFixture]) -> None:
    mine = TenantFixture(two[0].admin)
    own = mine.tenant_admin()
    created = own.create("/plans", {"tenant_id": mine.id, "name": "pro", "limits": "9/minute"})
    assert own.patch(f"/tenants/{mine.id}", {"default_plan_id": created["id"]}).status_code == 200
    assert own.put("/mode", {"mode": "monitor", "tenant_id": mine.id}).json()["mode"] == "monitor"
    assert own.create("/keys", {"tenant_id": mine.id, "name": "more"})["key"]
    assert own.patch(f"/policies/{mine.policy['id']}", {"mode": "monitor"}).status_code == 200
    assert own.delete(f"/overrides/{mine.override['id']}").status_code == 204
    assert own.delete(f"/tokens/{mine.token['id']}").status_code == 204
    assert_problem(own.get("/tenants"), 401, "unknown_key")


def test_the_operators_plans_require_a_token_for_all_tenants(
    two: tuple[TenantFixture, TenantFixture], admin: AdminClient
) -> None:
    own = two[0].tenant_admin()
    plan = admin.create("/plans", {"tenant_id": "operator", "name": two[0].id, "limits": "1000/second"})
    assert_problem(own.get(f"/plans/{plan['id']}"), 404, "not_found")
    assert_problem(own.post("/plans", {"tenant_id": "operator", "name": "x", "limits": "1/second"}), 404, "not_found")
    assert plan["id"] in [each["id"] for each in admin.list_all("/plans", tenant_id="operator")]
    assert own.get("/plans", tenant_id="operator").json()["items"] == []
