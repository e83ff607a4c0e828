"""Admin tokens: their scopes, expiry and rate limit, and the throttling of guessed tokens."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi.routing import APIRoute

from limitforge.catalog.credentials import PREFIXES, Peppers, new_id
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Tenant, Token
from limitforge.errors import Forbidden, UnknownKey
from limitforge.service.admin import authentication
from limitforge.service.admin.app import ROUTE_MODULES
from limitforge.service.admin.routing import AdminRoute
from limitforge.service.admin.session import AdminSession, ReadSession
from tests.catalog.replicas import old_credential
from tests.service.live_service import NO_TLS, PEPPERS, AdminClient, LiveService, TenantFixture
from tests.service.problems import assert_problem


def unknown_token() -> str:
    return old_credential(PREFIXES["admin"], new_id("tok").partition("_")[2]).text


@pytest.fixture
def fresh(tmp_path: Path) -> LiveService:
    return LiveService(f"sqlite:///{tmp_path}/fresh.db")


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    database = Database(f"sqlite:///{tmp_path}/catalog.db")
    await database.ensure_schema()
    yield Catalog(database, peppers=Peppers.parse(PEPPERS))
    await database.close()


def test_without_a_valid_token_a_request_is_rejected(fresh: LiveService) -> None:
    with fresh:
        account = TenantFixture(fresh.admin())
        typo = account.token["token"][:-1] + ("a" if account.token["token"][-1] != "a" else "b")
        for authorization in (
            None,
            "",
            "Bearer",
            f"Basic {account.token['token']}",
            account.token["token"],
            f"Bearer {account.secret}",
            f"Bearer {typo}",
            f"Bearer {unknown_token()}",
            "Bearer " + "x" * 4_000,
        ):
            headers = {} if authorization is None else {"authorization": authorization}
            answer = fresh.client().call("GET", "/tenants", headers=headers)
            assert_problem(answer, 401, "unknown_key")
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.headers["cache-control"] == "no-store"
        lower = fresh.client().call("GET", "/tenants", headers={"authorization": f"bearer {account.token['token']}"})
        assert lower.status_code == 200
        with_key = fresh.client().call("GET", "/tenants", headers={"x-api-key": account.token["token"]})
        assert_problem(with_key, 401, "unknown_key")
        two = [("authorization", f"Bearer {account.token['token']}"), ("authorization", f"Bearer {account.secret}")]
        answer = fresh.client().http.get("/v1/admin/tenants", headers=two)
        assert_problem(answer, 400, "malformed_request", "authorization")


def test_the_token_is_checked_before_the_body_is_read(admin: AdminClient) -> None:
    answer = admin.live.client().call("POST", "/tenants", content=b"{nonsense" * 100)
    assert_problem(answer, 401, "unknown_key")


def test_a_deleted_or_expired_token_is_rejected_at_once(
    admin: AdminClient, account: TenantFixture, tenant_admin: AdminClient
) -> None:
    assert tenant_admin.get("/tenants").status_code == 200
    admin.delete(f"/tokens/{account.token['id']}")
    assert_problem(tenant_admin.get("/tenants"), 401, "unknown_key")
    short = admin.create("/tokens", {"name": f"{account.id}-short", "expires_at": "2020-01-01T00:00:00Z"})
    assert_problem(admin.live.client(short["token"]).get("/tenants"), 401, "unknown_key")
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    good = admin.create("/tokens", {"name": f"{account.id}-good", "expires_at": soon})
    assert admin.live.client(good["token"]).get("/tenants").status_code == 200


def test_reading_and_writing_require_their_scopes(sqlite_service: LiveService, account: TenantFixture) -> None:
    reader, writer = sqlite_service.admin(scopes=["read"]), sqlite_service.admin(scopes=["write"])
    tenant = f"/tenants/{account.id}"
    assert reader.get(tenant).status_code == 200
    assert writer.patch(tenant, {"mode": "on"}).status_code == 200
    for answer in (
        reader.patch(tenant, {"mode": "off"}),
        reader.patch(tenant, {"nonsense": "off"}),
        reader.post("/tenants", {"name": "x"}),
        reader.delete(tenant),
        reader.put("/mode", {"mode": "off"}),
        reader.put("/operator", {"plan_id": None}),
        reader.post("/reset", {"tenant_id": account.id, "resource": "x", "subject": "y"}),
        reader.post(f"/keys/{account.key['id']}/rotate"),
        writer.get(tenant),
        writer.get("/tenants"),
        writer.get("/audit"),
        writer.get("/usage"),
        writer.get("/throttled"),
    ):
        assert_problem(answer, 403, "forbidden", "this token lacks the scope")


def test_each_call_requires_a_scope() -> None:
    """The class of a route requires `write` for all methods except GET, and `ReadSession` requires `read`."""
    require_read = get_args(ReadSession)[1].dependency
    routes = [route for module in ROUTE_MODULES for route in module.router.routes]
    assert len(routes) > 30
    for route in routes:
        assert isinstance(route, APIRoute)
        is_read = any(each.call is require_read for each in route.dependant.dependencies)
        assert isinstance(route, AdminRoute), route.path
        assert is_read == (route.methods == {"GET"}), route.path


def test_a_token_can_not_grant_more_than_it_has(
    sqlite_service: LiveService, account: TenantFixture, tenant_admin: AdminClient
) -> None:
    writer = sqlite_service.admin(scopes=["write"])
    assert_problem(writer.post("/tokens", {"name": "all", "scopes": ["read", "write"]}), 403, "forbidden", "scopes")
    half = sqlite_service.admin().create("/tokens", {"name": f"{account.id}-half", "scopes": ["write"]})
    assert_problem(writer.patch(f"/tokens/{half['id']}", {"scopes": ["read", "write"]}), 403, "forbidden", "scopes")
    assert writer.patch(f"/tokens/{half['id']}", {"scopes": ["write"]}).status_code == 200
    for body in ({"name": "fleet", "scopes": ["read"]}, {"name": "fleet", "scopes": ["read"], "tenant_id": None}):
        assert_problem(tenant_admin.post("/tokens", body), 403, "forbidden")
    assert (
        tenant_admin.create("/tokens", {"name": f"{account.id}-mine", "tenant_id": account.id})["tenant_id"]
        == account.id
    )


def in_seconds(seconds: int) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


@pytest.fixture
def expiring(sqlite_service: LiveService) -> AdminClient:
    """A token for all tenants, with both scopes, that expires in an hour."""
    return sqlite_service.admin(expires_at=in_seconds(3_600))


def own_token(admin: AdminClient, expiring: AdminClient) -> str:
    """Return the id of the token of `expiring`."""
    identity = "tok_" + expiring.token.removeprefix(PREFIXES["admin"])[:16]
    assert admin.get(f"/tokens/{identity}").status_code == 200
    return identity


@pytest.mark.parametrize("fields", [{}, {"expires_at": None}, {"expires_at": "2999-01-01T00:00:00Z"}])
def test_a_token_that_expires_can_not_create_one_that_outlives_it(
    expiring: AdminClient, account: TenantFixture, fields: dict[str, Any]
) -> None:
    for tenant_id in (None, account.id):
        body = {"name": f"{account.id}-heir", "tenant_id": tenant_id, **fields}
        assert_problem(expiring.post("/tokens", body), 403, "forbidden", "expires_at: this token expires at ")
    assert expiring.get("/tokens", name=f"{account.id}-heir").json()["items"] == []
    created = expiring.create("/tokens", {"name": f"{account.id}-heir", "expires_at": in_seconds(3_000)})
    assert expiring.live.client(created["token"]).get("/tenants").status_code == 200


@pytest.mark.parametrize("expires_at", [None, "2999-01-01T00:00:00Z"])
def test_a_token_can_not_extend_itself_or_another_beyond_its_own_expiry(
    admin: AdminClient, expiring: AdminClient, account: TenantFixture, expires_at: str | None
) -> None:
    itself = own_token(admin, expiring)
    other = admin.create("/tokens", {"name": f"{account.id}-other", "expires_at": in_seconds(60)})["id"]
    gone = admin.create("/tokens", {"name": f"{account.id}-gone", "expires_at": "2020-01-01T00:00:00Z"})["id"]
    for identity in (itself, other, gone):
        before = admin.get(f"/tokens/{identity}").json()
        refused = expiring.patch(f"/tokens/{identity}", {"expires_at": expires_at})
        assert_problem(refused, 403, "forbidden", "expires_at: this token expires at ")
        after = admin.get(f"/tokens/{identity}").json()
        assert (after["version"], after["expires_at"]) == (before["version"], before["expires_at"])
    assert expiring.patch(f"/tokens/{other}", {"expires_at": in_seconds(600)}).status_code == 200


def test_a_token_that_expires_may_shorten_and_rename_one_that_does_not(
    admin: AdminClient, expiring: AdminClient, account: TenantFixture
) -> None:
    other = admin.create("/tokens", {"name": f"{account.id}-ever"})["id"]
    assert expiring.patch(f"/tokens/{other}", {"name": f"{account.id}-other"}).status_code == 200
    assert expiring.patch(f"/tokens/{other}", {"expires_at": in_seconds(9_000)}).status_code == 200


def test_a_token_that_expires_can_not_add_scopes_to_one_that_outlives_it(
    admin: AdminClient, expiring: AdminClient, account: TenantFixture
) -> None:
    other = admin.create("/tokens", {"name": f"{account.id}-ever"})["id"]
    answer = expiring.patch(f"/tokens/{other}", {"scopes": ["read", "write"]})
    assert_problem(answer, 403, "forbidden", "expires_at: this token expires at ")
    both = {"scopes": ["read", "write"], "expires_at": in_seconds(600)}
    assert expiring.patch(f"/tokens/{other}", both).status_code == 200


def test_a_token_can_not_extend_a_scope_that_it_lacks(
    sqlite_service: LiveService, admin: AdminClient, account: TenantFixture
) -> None:
    writer = sqlite_service.admin(scopes=["write"])
    for end in ("2020-01-01T00:00:00Z", in_seconds(600)):
        name = f"{account.id}-{end[:4]}"
        other = admin.create("/tokens", {"name": name, "scopes": ["read", "write"], "expires_at": end})["id"]
        answer = writer.patch(f"/tokens/{other}", {"expires_at": in_seconds(1_200)})
        assert_problem(answer, 403, "forbidden", "scopes: this token lacks the scope read")
        assert writer.patch(f"/tokens/{other}", {"scopes": ["write"], "expires_at": None}).status_code == 200


def test_the_default_scopes_are_granted_only_by_a_token_that_has_them(
    sqlite_service: LiveService, account: TenantFixture
) -> None:
    writer = sqlite_service.admin(scopes=["write"])
    answer = writer.post("/tokens", {"name": f"{account.id}-default"})
    assert_problem(answer, 403, "forbidden", "scopes: this token lacks the scope read")
    assert writer.create("/tokens", {"name": f"{account.id}-default", "scopes": ["write"]})["scopes"] == ["write"]


async def test_an_edit_uses_the_current_rights_of_its_token(catalog: Catalog) -> None:
    """The token is restricted, shortened or deleted after authentication and before the write."""
    async with catalog.edit("test") as edit:
        token, _ = await edit.create_token({"name": "ops", "scopes": ["read", "write"]})
    for change, refusal in (({"scopes": ["read"]}, Forbidden), ({"expires_at": "2020-01-01T00:00:00Z"}, UnknownKey)):
        admitted = AdminSession(await catalog.get(Token, token.id), catalog)
        async with catalog.edit("test") as edit:
            await edit.update(Token, token.id, change)
        with pytest.raises(refusal):
            async with admitted.edit() as edit:
                await edit.create(Tenant, {"name": "late"})
        async with catalog.edit("test") as edit:
            await edit.update(Token, token.id, {"scopes": ["read", "write"], "expires_at": None})
    admitted = AdminSession(await catalog.get(Token, token.id), catalog)
    async with catalog.edit("test") as edit:
        await edit.delete(Token, token.id)
    with pytest.raises(UnknownKey):
        async with admitted.edit() as edit:
            await edit.create(Tenant, {"name": "late"})
    assert (await catalog.list_page(Tenant)).items == []


def test_the_tokens_of_a_suspended_tenant_can_not_resume_it(
    admin: AdminClient, account: TenantFixture, tenant_admin: AdminClient
) -> None:
    for change in ({"suspended": False}, {"lanes": 2}, {"name": "other"}):
        assert_problem(tenant_admin.patch(f"/tenants/{account.id}", change), 403, "forbidden", next(iter(change)))
    admin.patch(f"/tenants/{account.id}", {"suspended": True})
    for answer in (tenant_admin.get("/tenants"), tenant_admin.patch(f"/tenants/{account.id}", {"suspended": False})):
        assert_problem(answer, 403, "forbidden", "this tenant is suspended")


def test_a_token_over_its_rate_limit_gets_retry_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real limits refill as fast as a slow machine sends requests."""
    monkeypatch.setattr(authentication, "BURST_LIMIT", "burst=token:20/day")
    with LiveService(f"sqlite:///{tmp_path}/service.db") as live:
        hasty, other = live.admin(), live.admin()
        answers = [hasty.http.get("/v1/admin/tenants", params={"limit": 1}) for _ in range(21)]
        assert [answer.status_code for answer in answers] == [200] * 20 + [429]
        denied = answers[-1]
        assert_problem(denied, 429, "rate_limit_exceeded")
        assert denied.json()["type"].endswith("quota-exceeded")
        assert int(denied.headers["retry-after"]) >= 1
        assert other.get("/tenants").status_code == 200


def test_guessed_tokens_are_throttled_and_rarely_reach_the_database(fresh: LiveService) -> None:
    with fresh:
        right = fresh.admin()
        assert right.get("/tenants").status_code == 200
        before = fresh.catalog.database.statement_count
        answers = [fresh.client(unknown_token()).get("/tenants") for _ in range(40)]
        statements = fresh.catalog.database.statement_count - before
        assert {answer.status_code for answer in answers} == {401, 429}
        late = next(answer for answer in answers if answer.status_code == 429)
        assert_problem(late, 429, "too_many_unknown_keys")
        assert int(late.headers["retry-after"]) >= 1
        assert statements < 60
        assert right.get("/tenants").status_code == 200, "a known token is not throttled"


def test_concurrent_first_requests_of_a_valid_token_all_succeed(fresh: LiveService) -> None:
    async def all_at_once(live: LiveService, token: str) -> list[int]:
        import httpx

        headers = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=live.url, headers=headers, timeout=20, verify=NO_TLS) as http:
            answers = await asyncio.gather(*(http.get("/v1/admin/tenants") for _ in range(20)))
        return [answer.status_code for answer in answers]

    with fresh:
        token = fresh.admin().token
        assert asyncio.run(all_at_once(fresh, token)) == [200] * 20


def test_the_last_use_of_a_token_is_recorded(
    admin: AdminClient, account: TenantFixture, tenant_admin: AdminClient
) -> None:
    assert admin.get(f"/tokens/{account.token['id']}").json()["last_used_at"] is None
    tenant_admin.get("/tenants")
    tenant_admin.get("/usage")  # which writes the last use to the database
    used = admin.get(f"/tokens/{account.token['id']}").json()["last_used_at"]
    assert datetime.now(UTC) - datetime.fromisoformat(used) < timedelta(minutes=1)
