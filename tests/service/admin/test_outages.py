"""The admin API during an outage of the database or the store, and after it."""

import asyncio

import httpx
import pytest

from limitforge.catalog.database import catalog_revision
from limitforge.catalog.database.database import Database
from tests.postgres import PostgresServer
from tests.servers import RedisServer
from tests.service.live_service import LiveService, TenantFixture
from tests.service.problems import assert_problem


@pytest.mark.slow
def test_without_the_database_admin_requests_get_503_and_checks_continue(
    own_postgres_server: PostgresServer, redis_url: str
) -> None:
    with LiveService(own_postgres_server.create_database("faults"), redis_url) as live:
        admin = live.admin()
        account = TenantFixture(admin)
        assert account.check("user:1").status_code == 200
        own_postgres_server.kill()
        for answer in (admin.get("/tenants"), admin.put("/mode", {"mode": "off"}), account.tenant_admin().get("/keys")):
            assert_problem(answer, 503, "catalog_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["cache-control"] == "no-store"
        assert account.check("user:2").status_code == 200
        own_postgres_server.restart()
        assert admin.get("/tenants").status_code == 200
        assert sum(item["allowed"] for item in admin.get("/usage", tenant_id=account.id).json()["items"]) == 2


@pytest.mark.slow
def test_without_the_store_the_kill_switch_still_works(own_redis_server: RedisServer, postgres_url: str) -> None:
    with LiveService(postgres_url, own_redis_server.url, failure="closed") as live:
        admin = live.admin()
        account = TenantFixture(admin)
        assert account.check().status_code == 200
        own_redis_server.kill()
        assert account.check().status_code == 503
        assert admin.put("/mode", {"mode": "off"}).status_code == 200
        assert admin.get("/operator").json()["mode"] == "off"
        assert account.check().status_code == 200
        body = {"tenant_id": account.id, "resource": "GET:/orders/7", "subject": "user:1"}
        assert_problem(admin.post("/reset", body), 503, "store_unavailable")
        own_redis_server.restart()


@pytest.mark.slow
def test_a_write_behind_a_long_transaction_is_answered_503_with_retry_after(each_service: LiveService) -> None:
    """Another writer holds the lock of all writes for longer than a request waits."""
    admin = each_service.admin()
    account = TenantFixture(admin)

    async def busy() -> list[httpx.Response]:
        database = Database(each_service.settings.database_url)
        try:
            async with database.writing() as connection:
                await catalog_revision.next_revision(connection)
                calls = [
                    asyncio.to_thread(admin.post, "/tenants", {"name": "held-up"}),
                    asyncio.to_thread(admin.patch, f"/keys/{account.key['id']}", {"name": "other"}),
                ]
                return list(await asyncio.gather(*calls))
        finally:
            await database.close()

    for answer in asyncio.run(busy()):
        assert_problem(answer, 503, "catalog_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
    assert admin.post("/tenants", {"name": f"free-{account.id}"[:64]}).status_code == 201


def test_text_with_nul_is_stored_in_json_and_refused_elsewhere(postgres_service: LiveService) -> None:
    admin = postgres_service.admin()
    account = TenantFixture(admin)
    metadata = {"a\0b": ["\0", {"c": "d\0"}]}
    created = admin.create("/keys", {"tenant_id": account.id, "name": "nul", "metadata": metadata})
    assert admin.get(f"/keys/{created['id']}").json()["metadata"] == metadata
    for path, query in (("/keys", {"name": "\0"}), ("/overrides", {"subject": "a\0"}), ("/audit", {"entity_id": "\0"})):
        assert_problem(admin.get(path, **query), 422, "invalid_field")
    for path in ("/keys/%00", "/plans/a%00b/versions"):
        assert_problem(admin.get(path), 404, "not_found")
