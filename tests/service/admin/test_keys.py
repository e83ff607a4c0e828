"""Keys over HTTP: shown once, rotated with a grace period, disabled and revoked. The next check applies a change."""

from typing import Any

import httpx

from tests.service.live_service import AdminClient, TenantFixture
from tests.service.problems import assert_problem


def check(account: TenantFixture, key: str) -> httpx.Response:
    body = {"resource": "GET:/orders", "subject": "user:1"}
    return account.admin.http.post("/v1/check", json=body, headers={"authorization": f"Bearer {key}"})


def test_a_key_is_shown_once_with_its_hash(admin: AdminClient, account: TenantFixture) -> None:
    body = {"tenant_id": account.id, "name": "ci", "type": "test", "expires_at": "2099-01-01T00:00:00Z"}
    created = admin.create("/keys", {**body, "scopes": ["check"], "metadata": {"team": "web", "at": [1, 2.5, None]}})
    assert created["key"].startswith("lf_test_")
    assert len(created["key_hash"]) == 64
    assert (created["scopes"], created["metadata"]) == (["check"], {"team": "web", "at": [1, 2.5, None]})
    assert created["expires_at"] == "2099-01-01T00:00:00Z"
    read = admin.get(f"/keys/{created['id']}")
    assert not {"key", "key_hash", "hash"} & read.json().keys()
    assert created["key"] not in read.text
    assert created["key_hash"] not in read.text
    assert check(account, created["key"]).status_code == 200


def test_the_old_secret_works_until_its_grace_ends(admin: AdminClient, account: TenantFixture) -> None:
    key = f"/keys/{account.key['id']}"
    rotated = admin.post(f"{key}/rotate", {"grace_seconds": 3_600}, if_match='"1"')
    assert (rotated.status_code, rotated.headers["etag"]) == (200, '"2"')
    assert rotated.json()["id"] == account.key["id"]
    assert len(rotated.json()["secrets"]) == 2
    fresh = rotated.json()["key"]
    assert [check(account, secret).status_code for secret in (account.secret, fresh)] == [200, 200]
    last = admin.post(f"{key}/rotate").json()["key"]
    assert [check(account, secret).status_code for secret in (account.secret, fresh, last)] == [401, 401, 200]
    wrongs: tuple[Any, ...] = (-1, 366 * 86_400 + 1, "long", True, None, [], {})
    for wrong in wrongs:
        assert_problem(admin.post(f"{key}/rotate", {"grace_seconds": wrong}), 422, "invalid_field", "grace_seconds")
    assert_problem(admin.post(f"{key}/rotate", {}, if_match='"1"'), 412, "outdated")


def test_a_disabled_key_is_refused_until_it_is_enabled(admin: AdminClient, account: TenantFixture) -> None:
    key = f"/keys/{account.key['id']}"
    assert admin.post(f"{key}/disable").json()["disabled"] is True
    assert_problem(check(account, account.secret), 403, "forbidden")
    assert admin.post(f"{key}/disable").headers["etag"] == '"2"'
    assert admin.get("/keys", tenant_id=account.id, disabled="true").json()["items"][0]["id"] == account.key["id"]
    assert admin.post(f"{key}/enable", if_match='"2"').json()["disabled"] is False
    assert check(account, account.secret).status_code == 200


def test_a_deleted_key_is_rejected(admin: AdminClient, account: TenantFixture) -> None:
    assert check(account, account.secret).status_code == 200
    assert admin.delete(f"/keys/{account.key['id']}").status_code == 204
    assert_problem(check(account, account.secret), 401, "unknown_key")
    assert_problem(admin.post(f"/keys/{account.key['id']}/enable"), 404, "not_found")
    assert_problem(admin.post(f"/keys/{account.key['id']}/rotate"), 404, "not_found")


def test_the_plan_of_a_key_replaces_the_default_plan_of_the_tenant(admin: AdminClient, account: TenantFixture) -> None:
    assert check(account, account.secret).json()["limits"] == {}
    admin.patch(f"/keys/{account.key['id']}", {"plan_id": account.plan["id"]})
    assert check(account, account.secret).json()["limit"] == 3
    admin.patch(f"/keys/{account.key['id']}", {"plan_id": None, "expires_at": None})
    assert check(account, account.secret).json()["limits"] == {}
