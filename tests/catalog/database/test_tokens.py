"""Admin tokens, which give access to the catalog of one tenant or of all."""

from datetime import timedelta
from typing import Any

import pytest

from limitforge import ManualClock
from limitforge.catalog.credentials import Credential, Peppers
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Token, TokenScope, to_datetime
from limitforge.errors import Conflict, InvalidInput, NotFound, UnknownKey
from tests.catalog.environments import one_database
from tests.catalog.factories import delete, new_customer, new_key, new_tenant, new_token, rows, table_contents, update
from tests.catalog.replicas import old_credential


async def test_a_token_needs_only_a_name(catalog: Catalog) -> None:
    token, credential = await new_token(catalog, "ci")
    assert credential.text.startswith("lf_admin_")
    assert token.id == f"tok_{credential.id}"
    assert await catalog.get(Token, token.id) == token
    assert (token.scopes, token.tenant_id, token.expires_at) == ((TokenScope.READ,), None, None)
    assert await catalog.authenticate_token(credential.text) == token


async def test_a_token_may_be_of_one_tenant_and_have_both_scopes(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    token, credential = await new_token(catalog, "ci", tenant_id=tenant.id, scopes=["read", "write"])
    found = await catalog.authenticate_token(credential.text)
    assert found == token
    assert (found.tenant_id, found.scopes) == (tenant.id, (TokenScope.READ, TokenScope.WRITE))
    page = await catalog.list_page(Token, tenant_id=tenant.id)
    assert page.items == [token]


async def test_a_token_is_good_until_exactly_its_end(catalog: Catalog, clock: ManualClock) -> None:
    ends = to_datetime(clock.now_us()) + timedelta(hours=1)
    _, credential = await new_token(catalog, "ci", expires_at=ends)
    clock.advance_us(3_600_000_000 - 1)
    await catalog.authenticate_token(credential.text)
    clock.advance_us(1)
    with pytest.raises(UnknownKey):
        await catalog.authenticate_token(credential.text)


async def test_a_deleted_token_is_gone_with_its_secret(catalog: Catalog) -> None:
    token, credential = await new_token(catalog)
    await delete(catalog, token)
    with pytest.raises(UnknownKey):
        await catalog.authenticate_token(credential.text)
    assert await rows(catalog.database, "SELECT hash FROM secrets") == []


@one_database
async def test_an_unknown_token_is_refused(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    _, key = await new_key(catalog, customer.tenant.id)
    assert catalog.peppers is not None
    identities = "0" * 16, customer.token.id.removeprefix("tok_")
    made = [Credential.generate("lf_admin_", each, catalog.peppers).text for each in identities]
    made += [old_credential("lf_admin_", each).text for each in identities]
    for text in (*made, key.text, key.text.replace("lf_live_", "lf_admin_"), "", "lf_admin_"):
        with pytest.raises(UnknownKey):
            await catalog.authenticate_token(text)


async def test_a_new_pepper_recognises_old_tokens_until_the_old_one_is_removed(
    catalog: Catalog, database: Database, clock: ManualClock
) -> None:
    _, old = await new_token(catalog, "old")
    first, second = "1:a pepper that the tests alone know", "2:another one that they alone know"
    both = Catalog(database, peppers=Peppers.parse(f"{first},{second}"), clock=clock)
    token, new = await new_token(both, "new")
    assert [secret.pepper for secret in token.secrets] == [2]
    assert {(await both.authenticate_token(each.text)).name for each in (old, new)} == {"old", "new"}
    later = Catalog(database, peppers=Peppers.parse(second), clock=clock)
    assert (await later.authenticate_token(new.text)).name == "new"
    with pytest.raises(UnknownKey):
        await later.authenticate_token(old.text)


async def test_without_peppers_no_token_is_recognised(catalog: Catalog, database: Database) -> None:
    _, credential = await new_token(catalog)
    with pytest.raises(InvalidInput, match="LIMITFORGE_PEPPERS"):
        await Catalog(database).authenticate_token(credential.text)


async def test_tokens_have_names_of_their_own_even_across_tenants(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    await new_token(catalog, "ci")
    other, _ = await new_token(catalog, "cd")
    before = await table_contents(database)
    with pytest.raises(Conflict, match="token called ci"):
        await new_token(catalog, "ci", tenant_id=tenant.id)
    with pytest.raises(Conflict, match="token called ci"):
        await update(catalog, other, {"name": "ci"})
    assert await table_contents(database) == before


async def test_a_tokens_scopes_and_end_may_be_changed_and_its_tenant_not(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    token, credential = await new_token(catalog, "ci")
    changed = await update(
        catalog, token, {"scopes": ["write"], "expires_at": "2030-01-01T00:00:00Z"}, expected_version=1
    )
    assert await catalog.authenticate_token(credential.text) == changed
    assert (changed.scopes, changed.version) == ((TokenScope.WRITE,), 2)
    before = await table_contents(database)
    with pytest.raises(InvalidInput, match="can't be changed") as refused:
        await update(catalog, token, {"tenant_id": tenant.id})
    assert refused.value.field == "tenant_id"
    assert await table_contents(database) == before


async def test_an_invalid_field_is_refused_by_its_name(catalog: Catalog, database: Database) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["read", "read"]}, "scopes"),
        ({"scopes": ["check"]}, "scopes[0]"),
        ({"expires_at": "2030-01-01"}, "expires_at"),
        ({"expires_at": "9999-12-31T23:59:59-05:00"}, "expires_at"),
        ({"tenant_id": 5}, "tenant_id"),
        ({"secrets": []}, "secrets"),
        ({"metadata": {}}, "metadata"),
    ]
    before = await table_contents(database)
    outcomes: list[tuple[dict[str, Any], str]] = []
    for fields, _ in wrong:
        try:
            await new_token(catalog, **{"name": "ci", **fields})
            outcomes.append((fields, "was not refused"))
        except InvalidInput as refused:
            outcomes.append((fields, refused.field))
        except Exception as error:  # noqa: BLE001 - any other error is reported
            outcomes.append((fields, repr(error)))
    assert outcomes == wrong
    with pytest.raises(NotFound, match=r"^tenant_id: unknown tenant"):
        await new_token(catalog, "ci", tenant_id="ten_none")
    assert await table_contents(database) == before
