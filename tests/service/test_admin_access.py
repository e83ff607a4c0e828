"""Who may administer: tokens, their scopes, how often they may call, and what happens to those that guess."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from limitforge.catalog.credentials import PREFIXES, new_id
from limitforge.service.admin import access
from tests.catalog.live import old_credential
from tests.service.live import Account, Admin, Live
from tests.service.problems import assert_problem


def unknown_token() -> str:
    return old_credential(PREFIXES["admin"], new_id("tok").partition("_")[2]).text


@pytest.fixture
def fresh(tmp_path: Path) -> Live:
    return Live(f"sqlite:///{tmp_path}/fresh.db")


def test_without_a_right_token_nothing_is_shown(fresh: Live) -> None:
    with fresh:
        account = Account(fresh.admin())
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
            answer = fresh.caller().call("GET", "/tenants", headers=headers)
            assert_problem(answer, 401, "unknown_key")
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.headers["cache-control"] == "no-store"
        lower = fresh.caller().call("GET", "/tenants", headers={"authorization": f"bearer {account.token['token']}"})
        assert lower.status_code == 200
        with_key = fresh.caller().call("GET", "/tenants", headers={"x-api-key": account.token["token"]})
        assert_problem(with_key, 401, "unknown_key")
        two = [("authorization", f"Bearer {account.token['token']}"), ("authorization", f"Bearer {account.secret}")]
        answer = fresh.caller().http.get("/v1/admin/tenants", headers=two)
        assert_problem(answer, 400, "malformed_request", "authorization")


def test_a_token_is_asked_for_before_a_body_is_read(admin: Admin) -> None:
    answer = admin.live.caller().call("POST", "/tenants", content=b"{nonsense" * 100)
    assert_problem(answer, 401, "unknown_key")


def test_a_token_that_was_deleted_or_has_expired_is_refused_at_once(admin: Admin, account: Account, own: Admin) -> None:
    assert own.get("/tenants").status_code == 200
    admin.delete(f"/tokens/{account.token['id']}")
    assert_problem(own.get("/tenants"), 401, "unknown_key")
    short = admin.made("/tokens", {"name": f"{account.id}-short", "expires_at": "2020-01-01T00:00:00Z"})
    assert_problem(admin.live.caller(short["token"]).get("/tenants"), 401, "unknown_key")
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    good = admin.made("/tokens", {"name": f"{account.id}-good", "expires_at": soon})
    assert admin.live.caller(good["token"]).get("/tenants").status_code == 200


def test_reading_and_writing_take_their_scopes(embedded: Live, account: Account) -> None:
    reader, writer = embedded.admin(scopes=["read"]), embedded.admin(scopes=["write"])
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


def test_nobody_gives_away_more_than_they_have(embedded: Live, account: Account, own: Admin) -> None:
    writer = embedded.admin(scopes=["write"])
    assert_problem(writer.post("/tokens", {"name": "all", "scopes": ["read", "write"]}), 403, "forbidden", "scopes")
    half = embedded.admin().made("/tokens", {"name": f"{account.id}-half", "scopes": ["write"]})
    assert_problem(writer.patch(f"/tokens/{half['id']}", {"scopes": ["read", "write"]}), 403, "forbidden", "scopes")
    assert writer.patch(f"/tokens/{half['id']}", {"scopes": ["write"]}).status_code == 200
    for body in ({"name": "fleet", "scopes": ["read"]}, {"name": "fleet", "scopes": ["read"], "tenant_id": None}):
        assert_problem(own.post("/tokens", body), 403, "forbidden")
    assert own.made("/tokens", {"name": f"{account.id}-mine", "tenant_id": account.id})["tenant_id"] == account.id


def test_the_tokens_of_a_suspended_tenant_can_not_lift_that(admin: Admin, account: Account, own: Admin) -> None:
    for change in ({"suspended": False}, {"lanes": 2}, {"name": "other"}):
        assert_problem(own.patch(f"/tenants/{account.id}", change), 403, "forbidden", next(iter(change)))
    admin.patch(f"/tenants/{account.id}", {"suspended": True})
    for answer in (own.get("/tenants"), own.patch(f"/tenants/{account.id}", {"suspended": False})):
        assert_problem(answer, 403, "forbidden", "this tenant is suspended")


def test_a_token_that_calls_too_often_is_told_when_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real limits fill up again as fast as a slow machine calls."""
    monkeypatch.setattr(access, "BURST", "burst=token:20/day")
    with Live(f"sqlite:///{tmp_path}/service.db") as live:
        hasty, other = live.admin(), live.admin()
        answers = [hasty.http.get("/v1/admin/tenants", params={"limit": 1}) for _ in range(21)]
        assert [answer.status_code for answer in answers] == [200] * 20 + [429]
        denied = answers[-1]
        assert_problem(denied, 429, "rate_limit_exceeded")
        assert denied.json()["type"].endswith("quota-exceeded")
        assert int(denied.headers["retry-after"]) >= 1
        assert other.get("/tenants").status_code == 200


def test_whoever_guesses_tokens_is_made_to_wait_and_the_database_is_not_asked(fresh: Live) -> None:
    with fresh:
        right = fresh.admin()
        assert right.get("/tenants").status_code == 200
        before = fresh.service.catalog.database.statements
        answers = [fresh.caller(unknown_token()).get("/tenants") for _ in range(40)]
        asked = fresh.service.catalog.database.statements - before
        assert {answer.status_code for answer in answers} == {401, 429}
        late = next(answer for answer in answers if answer.status_code == 429)
        assert_problem(late, 429, "too_many_unknown_keys")
        assert int(late.headers["retry-after"]) >= 1
        assert asked < 60
        assert right.get("/tenants").status_code == 200, "who is known is not made to wait"


def test_many_first_calls_of_a_right_token_at_once_are_all_answered(fresh: Live) -> None:
    async def all_at_once(live: Live, token: str) -> list[int]:
        import httpx

        headers = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=live.url, headers=headers, timeout=20) as http:
            answers = await asyncio.gather(*(http.get("/v1/admin/tenants") for _ in range(20)))
        return [answer.status_code for answer in answers]

    with fresh:
        token = fresh.admin().token
        assert asyncio.run(all_at_once(fresh, token)) == [200] * 20


def test_it_is_written_down_when_a_token_was_last_used(admin: Admin, account: Account, own: Admin) -> None:
    assert admin.get(f"/tokens/{account.token['id']}").json()["last_used_at"] is None
    own.get("/tenants")
    own.get("/usage")  # which writes down what is known here
    used = admin.get(f"/tokens/{account.token['id']}").json()["last_used_at"]
    assert datetime.now(UTC) - datetime.fromisoformat(used) < timedelta(minutes=1)
