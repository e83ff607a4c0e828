"""Only the response that creates a secret contains it: not lists, the audit log, logs, problems or the database."""

import logging
from pathlib import Path

import pytest

from tests.service.live_service import AdminClient, LiveService, TenantFixture


def test_no_secret_appears_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with LiveService(f"sqlite:///{tmp_path}/secrets.db") as live:
        admin = live.admin()
        account = TenantFixture(admin, over_http=True)
        own = account.tenant_admin()
        rotated = admin.post(f"/keys/{account.key['id']}/rotate", {"grace_seconds": 60}).json()
        secrets = [admin.token, account.secret, rotated["key"], account.token["token"]]
        hashes = [account.key["key_hash"], rotated["key_hash"]]
        texts = provoke(admin, own, account)
        for path in ("tenants", "plans", "keys", "policies", "overrides", "tokens", "audit", "usage", "throttled"):
            texts.append(admin.get(f"/{path}", limit=1_000).text)
        texts += [admin.get(f"/keys/{account.key['id']}").text, admin.get(f"/tokens/{account.token['id']}").text]
        texts += [admin.get("/operator").text, repr(live.service.settings.masked())]
    assert any("key.rotate" in text for text in texts)
    for text in (*texts, caplog.text):
        for secret in secrets:
            assert secret[-20:] not in text
    for text in texts:
        for each in hashes:
            assert each not in text
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    for secret in secrets:
        assert secret[30:].encode() not in kept


def provoke(admin: AdminClient, own: AdminClient, account: TenantFixture) -> list[str]:
    """Return the responses to invalid requests that contain a secret."""
    answers = [
        admin.get("/keys", cursor="x"),
        admin.post("/keys", {"tenant_id": account.id, "name": "x", "nonsense": 1}),
        admin.post(f"/keys/{account.key['id']}/rotate", {"grace_seconds": -1}),
        admin.put("/operator", {"plan_id": "x"}),
        own.post("/tenants", {"name": "x"}),
        own.get(f"/tokens/{'x' * 16}"),
        admin.live.client(account.secret).get("/tenants"),
        admin.live.client(account.token["token"][:-1] + "0").get("/tenants"),
        account.check(),
    ]
    return [answer.text for answer in answers]
