"""Create, read, change, list and delete entities over HTTP."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from limitforge.catalog.credentials import Credential, Peppers
from tests.service.live_service import PEPPERS, AdminClient, LiveService, TenantFixture
from tests.service.problems import assert_problem

PATHS = ("tenants", "plans", "policies", "keys", "overrides", "tokens")


def entities(account: TenantFixture) -> dict[str, dict[str, Any]]:
    return {
        "tenants": account.tenant,
        "plans": account.plan,
        "policies": account.policy,
        "keys": account.key,
        "overrides": account.override,
        "tokens": account.token,
    }


CHANGES: dict[str, dict[str, Any]] = {
    "tenants": {"time_zone": "Europe/Berlin"},
    "plans": {"limits": "burst=7/minute"},
    "policies": {"mode": "monitor"},
    "keys": {"metadata": {"team": "web"}},
    "overrides": {"reason": "launch day"},
    "tokens": {"scopes": ["read"]},
}


def test_everything_works_on_sqlite_and_memory_and_on_postgres_and_redis(each_service: LiveService) -> None:
    admin = each_service.admin()
    account = TenantFixture(admin, over_http=True)
    for path, entity in entities(account).items():
        read = admin.get(f"/{path}/{entity['id']}")
        assert read.status_code == 200
        changed = admin.patch(f"/{path}/{entity['id']}", CHANGES[path], if_match=read.headers["etag"])
        assert changed.status_code == 200, changed.text
        assert changed.json()["version"] == read.json()["version"] + 1
    assert account.check().json()["limits"]["burst"]["limit"] == 7
    for path in ("policies", "keys", "overrides", "plans", "tenants"):
        assert admin.delete(f"/{path}/{entities(account)[path]['id']}").status_code == 204
    assert_problem(account.check(), 401, "unknown_key")


def test_a_created_entity_is_read_and_listed_unchanged(admin: AdminClient) -> None:
    account = TenantFixture(admin, over_http=True)
    for path, created in entities(account).items():
        secrets = {"key", "key_hash", "token"} & created.keys()
        plain = {name: value for name, value in created.items() if name not in secrets}
        read = admin.get(f"/{path}/{created['id']}")
        assert read.headers["etag"] == f'"{created["version"]}"'
        assert read.headers["cache-control"] == "no-store", path
        narrowed = {"name": created["name"]} if path == "tenants" else {"tenant_id": account.id}
        listed = admin.get(f"/{path}", **narrowed).json()
        varying = {"revision", "last_used_at"}
        for found in (read.json(), *listed["items"]):
            assert {name: found[name] for name in plain if name not in varying} == {
                name: plain[name] for name in plain if name not in varying
            }, path
            assert found.keys() == plain.keys()
        assert listed["cursor"] is None


@pytest.mark.parametrize("path", PATHS)
def test_a_change_with_if_match_needs_the_current_version(
    admin: AdminClient, account: TenantFixture, path: str
) -> None:
    target = f"/{path}/{entities(account)[path]['id']}"
    assert_problem(admin.patch(target, CHANGES[path], if_match='"7"'), 412, "outdated")
    assert_problem(admin.patch(target, CHANGES[path], if_match='"seven"'), 412, "outdated")
    assert_problem(admin.patch(target, CHANGES[path], if_match="7"), 422, "invalid_field", "if-match")
    assert_problem(admin.delete(target, if_match='"7"'), 412, "outdated")
    assert admin.patch(target, CHANGES[path], if_match='W/"1"').json()["version"] == 2
    assert_problem(admin.patch(target, CHANGES[path], if_match='"1"'), 412, "outdated")
    assert admin.patch(target, {}, if_match='"2"').status_code == 200
    assert admin.patch(target, {}, if_match="*").status_code == 200
    again = admin.patch(target, CHANGES[path])
    assert again.headers["etag"] == (
        '"3"' if path == "overrides" else '"2"'
    )  # an override is set again, even without changes


UNKNOWN_IDS = ("nope", "ten_0000000000000000", "%00", "a" * 300, "%F0%9F%99%82", "..%2f", "'--")


@pytest.mark.parametrize(
    ("path", "identities"), [("tenants", UNKNOWN_IDS), *((path, UNKNOWN_IDS[1:3]) for path in PATHS[1:])]
)
def test_an_unknown_entity_is_not_found(admin: AdminClient, path: str, identities: tuple[str, ...]) -> None:
    for identity in identities:
        target = f"/{path}/{identity}"
        for answer in (admin.get(target), admin.patch(target, CHANGES[path]), admin.delete(target)):
            assert answer.status_code == 404
            assert answer.json()["code"] in ("not_found", "unknown_path")


def test_unknown_fields_are_refused_by_name(admin: AdminClient, account: TenantFixture) -> None:
    for path, entity in entities(account).items():
        answer = admin.patch(f"/{path}/{entity['id']}", {**CHANGES[path], "colour": "red"})
        assert_problem(answer, 422, "invalid_field", "colour")
        assert_problem(admin.get(f"/{path}", colour="red"), 422, "invalid_field", "colour")


def test_read_only_fields_can_not_be_set(admin: AdminClient, account: TenantFixture) -> None:
    for path, entity in entities(account).items():
        target = f"/{path}/{entity['id']}"
        for field, value in (("id", "x"), ("version", 9), ("created_at", "2026-01-01T00:00:00Z")):
            assert_problem(admin.patch(target, {field: value}), 422, "invalid_field", field)
        if path != "tenants":
            answer = admin.patch(target, {"tenant_id": "ten_0000000000000000"})
            assert_problem(answer, 422, "invalid_field", "tenant_id")


def test_duplicate_names_are_a_conflict(admin: AdminClient, account: TenantFixture) -> None:
    own = {"tenant_id": account.id}
    for path, body in (
        ("/tenants", {"name": account.tenant["name"]}),
        ("/plans", {**own, "name": "free", "limits": "1/minute"}),
        ("/policies", {**own, "resource": "GET:/orders/{number}", "plan_id": account.plan["id"]}),
        ("/tokens", {"name": account.token["name"]}),
    ):
        assert_problem(admin.post(path, body), 409, "conflict")


INVALID_BODIES: list[tuple[str, Callable[[TenantFixture], Any], str]] = [
    ("/tenants", lambda _: {}, "name"),
    ("/tenants", lambda _: {"name": ""}, "name"),
    ("/tenants", lambda _: {"name": "a b"}, "name"),
    ("/tenants", lambda _: {"name": "a" * 65}, "name"),
    ("/tenants", lambda _: {"name": 5}, "name"),
    ("/tenants", lambda _: {"name": None}, "name"),
    ("/tenants", lambda _: {"name": "x", "mode": "loud"}, "mode"),
    ("/tenants", lambda _: {"name": "x", "mode": None}, "mode"),
    ("/tenants", lambda _: {"name": "x", "time_zone": "Mars/Olympus"}, "time_zone"),
    ("/tenants", lambda _: {"name": "x", "failure": "raise"}, "failure"),
    ("/tenants", lambda _: {"name": "x", "priority": "P9"}, "priority"),
    ("/tenants", lambda _: {"name": "x", "lanes": 0}, "lanes"),
    ("/tenants", lambda _: {"name": "x", "lanes": "many"}, "lanes"),
    ("/tenants", lambda _: {"name": "x", "suspended": "yes"}, "suspended"),
    ("/tenants", lambda _: {"name": "x", "suspended": 1}, "suspended"),
    ("/tenants", lambda _: {"name": "x", "default_plan_id": 5}, "default_plan_id"),
    ("/tenants", lambda _: {"name": "x", "default_plan_id": "\0"}, "default_plan_id"),
    ("/tenants", lambda _: [], "body"),
    ("/tenants", lambda _: "x", "body"),
    ("/policies", lambda a: {"tenant_id": a.id, "plan_id": a.plan["id"]}, "resource"),
    ("/policies", lambda a: {"tenant_id": a.id, "resource": "GET:/x"}, "plan_id"),
    ("/policies", lambda a: {"resource": "GET:/x", "plan_id": a.plan["id"]}, "tenant_id"),
    ("/policies", lambda a: {"tenant_id": a.id, "plan_id": a.plan["id"], "resource": ""}, "resource"),
    ("/policies", lambda a: {"tenant_id": a.id, "plan_id": a.plan["id"], "resource": "GET:/a*b"}, "resource"),
    ("/policies", lambda a: {"tenant_id": a.id, "plan_id": a.plan["id"], "resource": "é" * 300}, "resource"),
    ("/policies", lambda a: {"tenant_id": "operator", "plan_id": a.plan["id"], "resource": "*"}, "tenant_id"),
    ("/keys", lambda a: {"tenant_id": a.id}, "name"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "type": "gold"}, "type"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "scopes": []}, "scopes"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "scopes": ["check", "check"]}, "scopes"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "scopes": ["fly"]}, "scopes[0]"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "scopes": "check"}, "scopes"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "expires_at": "tomorrow"}, "expires_at"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "expires_at": "2026-01-01T00:00:00"}, "expires_at"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "expires_at": 1_800_000_000}, "expires_at"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "expires_at": "9999-12-31T23:59:59-23:59"}, "expires_at"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "metadata": []}, "metadata"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "metadata": {"a": "b" * 4_097}}, "metadata"),
    ("/keys", lambda a: {"tenant_id": a.id, "name": "x", "metadata": {"a": 2**70}}, "metadata.a"),
    ("/tokens", lambda _: {"scopes": ["read"]}, "name"),
    ("/tokens", lambda _: {"name": "x", "scopes": ["rule"]}, "scopes[0]"),
    ("/tokens", lambda _: {"name": "x", "scopes": []}, "scopes"),
    ("/overrides", lambda a: {"tenant_id": a.id, "subject": "s", "ttl_seconds": 5}, "limits"),
    ("/overrides", lambda a: {"tenant_id": a.id, "subject": "s", "limits": {}, "ttl_seconds": 5}, "limits"),
    ("/overrides", lambda a: {"tenant_id": a.id, "subject": "s", "limits": {"burst": "blocked"}}, "expires_at"),
    (
        "/overrides",
        lambda a: {"tenant_id": a.id, "subject": "s", "limits": {"burst": {"limit": -1}}, "ttl_seconds": 5},
        "limits.burst.bucket_capacity",
    ),
    (
        "/overrides",
        lambda a: {"tenant_id": a.id, "subject": "s", "limits": {"nope": "blocked"}, "ttl_seconds": 5},
        "limits.nope",
    ),
    (
        "/overrides",
        lambda a: {"tenant_id": a.id, "subject": "", "limits": {"burst": "blocked"}, "ttl_seconds": 5},
        "subject",
    ),
    (
        "/overrides",
        lambda a: {"tenant_id": a.id, "subject": "a\0", "limits": {"burst": "blocked"}, "ttl_seconds": 5},
        "subject",
    ),
    (
        "/overrides",
        lambda a: {"tenant_id": a.id, "subject": "s", "limits": {"burst": "blocked"}, "ttl_seconds": "long"},
        "ttl_seconds",
    ),
    (
        "/overrides",
        lambda a: {"tenant_id": a.id, "subject": "s", "limits": {"burst": "blocked"}, "ttl_seconds": [1]},
        "ttl_seconds",
    ),
    (
        "/overrides",
        lambda a: {"tenant_id": a.id, "subject": "s", "limits": {"burst": "blocked"}, "ttl_seconds": 0},
        "ttl_seconds",
    ),
    (
        "/overrides",
        lambda a: {
            "tenant_id": a.id,
            "subject": "s",
            "limits": {"burst": "blocked"},
            "expires_at": "2020-01-01T00:00:00Z",
        },
        "expires_at",
    ),
    (
        "/overrides",
        lambda a: {
            "tenant_id": a.id,
            "subject": "s",
            "limits": {"burst": "blocked"},
            "ttl_seconds": 5,
            "expires_at": "2099-01-01T00:00:00Z",
        },
        "ttl_seconds",
    ),
    (
        "/overrides",
        lambda a: {"tenant_id": a.id, "subject": "s", "limits": {"burst": 5}, "ttl_seconds": 5},
        "limits.burst",
    ),
    ("/reset", lambda a: {"tenant_id": a.id, "resource": "GET:/x"}, "subject"),
    ("/reset", lambda a: {"tenant_id": a.id, "resource": "", "subject": "s"}, "resource"),
    ("/reset", lambda a: {"tenant_id": a.id, "resource": "x" * 513, "subject": "s"}, "resource"),
    ("/reset", lambda a: {"tenant_id": a.id, "resource": "x", "subject": "s", "shared": "all"}, "shared"),
]


def test_an_invalid_field_is_named(sqlite_service: LiveService, account: TenantFixture) -> None:
    admin = sqlite_service.admin()
    unexpected = {}
    for index, (path, body, field) in enumerate(INVALID_BODIES):
        if index % 40 == 39:
            admin = sqlite_service.admin()  # a token has a burst of 50 requests
        answer = admin.post(path, body(account))
        problem = answer.json()
        if (answer.status_code, problem.get("field")) != (422, field):
            unexpected[f"{index} {path} {field}"] = problem
    assert unexpected == {}


def test_a_referenced_entity_must_exist(admin: AdminClient, account: TenantFixture) -> None:
    no_tenant, no_plan = "ten_0000000000000000", "pla_0000000000000000"
    own = {"tenant_id": account.id}
    for path, body, field in (
        ("/plans", {"tenant_id": no_tenant, "name": "x", "limits": "1/minute"}, "tenant_id"),
        ("/policies", {"tenant_id": no_tenant, "resource": "*", "plan_id": no_plan}, "tenant_id"),
        ("/policies", {**own, "resource": "*", "plan_id": no_plan}, "plan_id"),
        ("/policies", {**own, "resource": "*", "plan_id": account.plan["id"], "shadow_plan_id": no_plan}, "shadow_pl"),
        ("/keys", {"tenant_id": no_tenant, "name": "x"}, "tenant_id"),
        ("/keys", {**own, "name": "x", "plan_id": no_plan}, "plan_id"),
        (
            "/overrides",
            {"tenant_id": no_tenant, "subject": "s", "limits": {"a": "blocked"}, "ttl_seconds": 9},
            "tenant_id",
        ),
        ("/tokens", {"tenant_id": no_tenant, "name": "x"}, "tenant_id"),
        ("/reset", {"tenant_id": no_tenant, "resource": "*", "subject": "s"}, "tenant_id"),
        ("/reset", {"tenant_id": "operator", "resource": "*", "subject": "s"}, "tenant_id"),
    ):
        assert_problem(admin.post(path, body), 404, "not_found", field)
    assert_problem(admin.put("/mode", {"mode": "off", "tenant_id": no_tenant}), 404, "not_found")
    assert_problem(admin.put("/mode", {"mode": "off", "tenant_id": "operator"}), 404, "not_found")
    assert_problem(admin.get("/tenants/operator"), 404, "not_found")


def test_a_page_of_a_list_continues_after_the_previous_one(admin: AdminClient, account: TenantFixture) -> None:
    names = [f"k{number}" for number in range(7)]
    for name in names:
        admin.create("/keys", {"tenant_id": account.id, "name": name})
    found = [key["name"] for key in admin.list_all("/keys", tenant_id=account.id, limit=3)]
    assert found == [*names, "web"]
    assert len(admin.get("/keys", tenant_id=account.id, limit=3).json()["items"]) == 3
    for query in ({"limit": 0}, {"limit": 1_001}, {"limit": "x"}):
        assert_problem(admin.get("/keys", **query), 422, "invalid_field", "limit")
    for cursor in ("nonsense", "WzFd", "", "\0", "é", "A" * 5_000):
        assert_problem(admin.get("/keys", cursor=cursor), 422, "invalid_field", "cursor")
    assert_problem(
        admin.get("/audit", cursor="WzEwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDBd"), 422, "invalid_field", "cursor"
    )


def test_lists_can_be_filtered(admin: AdminClient, account: TenantFixture) -> None:
    own = {"tenant_id": account.id}
    test_key = admin.create("/keys", {**own, "name": "ci", "type": "test", "plan_id": account.plan["id"]})
    assert admin.post(f"/keys/{test_key['id']}/disable").status_code == 200
    for path, query, expected in (
        ("/tenants", {"name": account.tenant["name"]}, [account.id]),
        ("/plans", {**own, "name": "free"}, [account.plan["id"]]),
        ("/plans", {**own, "name": "nope"}, []),
        ("/keys", {**own, "type": "test"}, [test_key["id"]]),
        ("/keys", {**own, "plan_id": account.plan["id"]}, [test_key["id"]]),
        ("/keys", {**own, "disabled": "true"}, [test_key["id"]]),
        ("/keys", {**own, "disabled": "false"}, [account.key["id"]]),
        ("/keys", {**own, "name": "web"}, [account.key["id"]]),
        ("/policies", {**own, "resource": "GET:/orders/{id}"}, [account.policy["id"]]),
        ("/overrides", {**own, "subject": "user:42"}, [account.override["id"]]),
        ("/overrides", {**own, "subject": "user:43"}, []),
        ("/tokens", {**own, "name": account.token["name"]}, [account.token["id"]]),
        ("/tenants", {"name": "\0"}, None),
        ("/tenants", {"name": "a" * 513}, None),
    ):
        answer = admin.get(path, **query)
        if expected is None:
            assert_problem(answer, 422, "invalid_field", "name")
        else:
            assert [item["id"] for item in answer.json()["items"]] == expected, (path, query)


def test_an_override_is_created_once_and_replaced_after_that(admin: AdminClient, account: TenantFixture) -> None:
    body = {"tenant_id": account.id, "subject": "user:1", "limits": {"burst": {"limit": 9}}, "ttl_seconds": 60}
    first = admin.post("/overrides", body)
    again = admin.post("/overrides", {**body, "limits": {"burst": "unlimited"}})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["etag"] == '"2"'
    assert_problem(admin.post("/overrides", body, if_match='"1"'), 412, "outdated")
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=0)
    until = {name: value for name, value in body.items() if name != "ttl_seconds"}
    until["expires_at"] = tomorrow.astimezone(timezone(timedelta(hours=5))).isoformat()
    third = admin.post("/overrides", until, if_match='"2"')
    assert third.json()["expires_at"] == tomorrow.isoformat().replace("+00:00", "Z")
    assert again.json()["set_by"].startswith("token:tok_")


def test_an_override_applies_to_a_denied_caller_at_once_until_it_is_deleted(
    admin: AdminClient, account: TenantFixture
) -> None:
    assert [account.check("user:8").status_code for _ in range(4)] == [200, 200, 200, 429]
    body = {"tenant_id": account.id, "subject": "user:8", "limits": {"burst": "unlimited"}, "ttl_seconds": 60}
    override = admin.create("/overrides", body)
    assert account.check("user:8").status_code == 200
    changed = admin.patch(f"/overrides/{override['id']}", {"limits": {"burst": "blocked"}, "ttl_seconds": 600})
    assert (changed.status_code, changed.json()["reason"]) == (200, "")
    assert changed.json()["expires_at"] > override["expires_at"]
    assert account.check("user:8").status_code == 429
    assert admin.delete(f"/overrides/{override['id']}").status_code == 204
    back = account.check("user:8").json()  # the bucket that it had emptied decides again
    assert (back["allowed"], back["limit"], back["limits"]["burst"]["limit"]) == (False, 3, 3)
    assert account.check("user:9").json()["limit"] == 3


def test_a_changed_policy_applies_at_once(admin: AdminClient, account: TenantFixture) -> None:
    assert account.check().json()["limits"].keys() == {"burst"}
    admin.patch(f"/policies/{account.policy['id']}", {"mode": "monitor", "priority": "P1", "failure": "closed"})
    assert account.check().json()["limits"]["burst"]["monitored"] is True
    assert admin.delete(f"/policies/{account.policy['id']}").status_code == 204
    assert account.check().json()["limits"] == {}


def test_a_suspended_tenant_is_rejected_until_it_is_resumed(admin: AdminClient, account: TenantFixture) -> None:
    admin.patch(f"/tenants/{account.id}", {"suspended": True})
    assert_problem(account.check(), 403, "forbidden")
    admin.patch(f"/tenants/{account.id}", {"suspended": False})
    assert account.check().status_code == 200


def test_a_tenant_is_deleted_with_its_entities(admin: AdminClient, account: TenantFixture) -> None:
    assert admin.delete(f"/tenants/{account.id}").status_code == 204
    for path, entity in entities(account).items():
        assert_problem(admin.get(f"/{path}/{entity['id']}"), 404, "not_found")
    assert_problem(account.check(), 401, "unknown_key")


def test_changes_are_in_the_audit_log_with_their_token(admin: AdminClient) -> None:
    account = TenantFixture(admin, over_http=True)
    account.tenant_admin().patch(f"/tenants/{account.id}", {"mode": "monitor"})
    maker = f"token:tok_{Credential.parse(admin.token, Peppers.parse(PEPPERS)).id}"
    entries = admin.get("/audit", tenant_id=account.id).json()["items"]
    assert [entry["action"] for entry in entries] == [
        "tenant.update",
        "token.create",
        "override.create",
        "key.create",
        "policy.create",
        "plan.create",
        "tenant.create",
    ]
    assert [entry["actor"] for entry in entries] == [f"token:{account.token['id']}", *[maker] * 6]
    assert {entry["tenant_id"] for entry in entries} == {account.id}
    assert (entries[0]["before"]["mode"], entries[0]["after"]["mode"]) == ("on", "monitor")
    of_plan = admin.get("/audit", entity_id=account.plan["id"]).json()["items"]
    assert [entry["action"] for entry in of_plan] == ["plan.create"]
    pages = list(admin.list_all("/audit", tenant_id=account.id, limit=2))
    assert pages == entries
