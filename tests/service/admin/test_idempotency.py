"""Idempotent creates: requests repeated with the same key."""

import asyncio
from typing import Any

import httpx

from limitforge.catalog.database import service_records
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import to_datetime
from limitforge.core.clock import SystemClock
from tests.service.live_service import NO_TLS, AdminClient, LiveService, TenantFixture
from tests.service.problems import assert_problem


def bodies(account: TenantFixture) -> dict[str, dict[str, Any]]:
    own = {"tenant_id": account.id}
    return {
        "tenants": {"name": f"{account.id}-again"},
        "plans": {**own, "name": "again", "algorithm": "fixed_window", "limit": 5, "window_seconds": 60},
        "policies": {**own, "resource": "again", "plan_id": account.plan["id"]},
        "keys": {**own, "name": "again"},
        "overrides": {**own, "subject": "again", "limits": {"burst": "blocked"}, "ttl_seconds": 60},
        "tokens": {**own, "name": f"{account.id}-again"},
    }


def test_the_same_key_and_body_create_one_entity_and_get_the_same_response(
    admin: AdminClient, account: TenantFixture
) -> None:
    for path, body in bodies(account).items():
        first = admin.post(f"/{path}", body, idempotency_key=f"key-{path}")
        reordered = dict(reversed(body.items()))
        again = admin.post(f"/{path}", reordered, idempotency_key=f"key-{path}")
        assert (first.status_code, again.status_code) == (201, 201), path
        assert "idempotency-replayed" not in first.headers
        assert (again.headers["idempotency-replayed"], again.headers["etag"]) == ("true", first.headers["etag"])
        secret = {"keys": "key", "tokens": "token"}.get(path)
        if secret is None:
            assert again.json() == first.json()
        else:
            assert first.json()[secret]
            assert again.json()[secret] is None
            assert "first response" in again.json()["notice"]
            assert again.json()["id"] == first.json()["id"]
            assert first.json()[secret] not in again.text
        assert len(list(admin.list_all("/audit", entity_id=first.json()["id"]))) == 1, path


def test_the_same_key_with_another_request_is_refused(admin: AdminClient, account: TenantFixture) -> None:
    body = {"tenant_id": account.id, "name": "one"}
    assert admin.post("/keys", body, idempotency_key="k").status_code == 201
    for path, other in (("/keys", {**body, "name": "two"}), ("/tokens", body)):
        assert_problem(admin.post(path, other, idempotency_key="k"), 422, "idempotency_key_reused", "idempotency-key")
    assert admin.post("/keys", {**body, "name": "two"}, idempotency_key="l").status_code == 201


def test_a_key_belongs_to_its_token(sqlite_service: LiveService, account: TenantFixture) -> None:
    body = {"tenant_id": account.id, "name": "web"}
    created = {sqlite_service.admin().post("/keys", body, idempotency_key="same").json()["id"] for _ in range(3)}
    assert len(created) == 3


def test_a_refused_request_can_be_repeated(admin: AdminClient, account: TenantFixture) -> None:
    body = {"tenant_id": account.id, "name": "free", "limits": "1/minute"}
    assert_problem(admin.post("/plans", body, idempotency_key="k"), 409, "conflict")
    admin.patch(f"/plans/{account.plan['id']}", {"name": "basic"})
    assert admin.post("/plans", body, idempotency_key="k").status_code == 201


def test_a_key_has_bounds(admin: AdminClient) -> None:
    for key in ("", "a b", "a" * 129, "é", "tab\tbed"):
        headers = {"idempotency-key": key.encode()}
        answer = admin.call("POST", "/tenants", {"name": "x"}, headers=headers)
        assert_problem(answer, 422, "invalid_field", "idempotency-key")


def test_a_replayed_response_is_unchanged_after_a_change_or_deletion(
    admin: AdminClient, account: TenantFixture
) -> None:
    body = {"tenant_id": account.id, "name": "one"}
    first = admin.post("/keys", body, idempotency_key="k").json()
    admin.patch(f"/keys/{first['id']}", {"name": "two"})
    assert admin.post("/keys", body, idempotency_key="k").json()["name"] == "one"
    admin.delete(f"/keys/{first['id']}")
    assert admin.post("/keys", body, idempotency_key="k").json()["id"] == first["id"]


def test_of_concurrent_requests_one_creates_and_the_others_get_its_response(each_service: LiveService) -> None:
    admin = each_service.admin()
    account = TenantFixture(admin)
    body = {"tenant_id": account.id, "name": "once", "limits": "1/minute"}

    async def all_at_once() -> list[httpx.Response]:
        headers = {"authorization": f"Bearer {admin.token}", "idempotency-key": "at-once"}
        async with httpx.AsyncClient(base_url=each_service.url, headers=headers, timeout=60, verify=NO_TLS) as http:
            return list(await asyncio.gather(*(http.post("/v1/admin/plans", json=body) for _ in range(12))))

    answers = asyncio.run(all_at_once())
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert len(list(admin.list_all("/plans", tenant_id=account.id, name="once"))) == 1


def test_no_secret_is_stored_with_the_response(
    sqlite_service: LiveService, admin: AdminClient, account: TenantFixture
) -> None:
    created = admin.post("/keys", {"tenant_id": account.id, "name": "kept"}, idempotency_key="kept").json()

    async def kept() -> str:
        database = Database(sqlite_service.settings.database_url)
        try:
            async with database.reading() as connection:
                token_id = "tok_" + admin.token.removeprefix("lf_admin_")[:16]
                since = to_datetime(SystemClock().now_us() - 60_000_000)
                return repr(await service_records.find_stored_response(connection, token_id, "kept", since))
        finally:
            await database.close()

    found = asyncio.run(kept())
    assert created["id"] in found
    assert created["key"] not in found
    assert created["key_hash"] not in found
