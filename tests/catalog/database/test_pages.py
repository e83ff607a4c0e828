"""Lists by pages: no item is skipped or repeated while others are inserted."""

from base64 import urlsafe_b64encode
from typing import Any

import msgspec
import pytest

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.pages import Page
from limitforge.catalog.model import Entity, Key, Override, Plan, Policy, Tenant, Token
from limitforge.errors import InvalidInput
from tests.catalog.factories import (
    ACTOR,
    audit_of,
    delete,
    new_customer,
    new_key,
    new_override,
    new_plan,
    new_policy,
    new_tenant,
    new_token,
    update,
)


async def pages(catalog: Catalog, kind: type[Entity], size: int, **values: Any) -> list[Page]:
    found = [await catalog.list_page(kind, size=size, **values)]
    while found[-1].cursor is not None:
        found.append(await catalog.list_page(kind, size=size, cursor=found[-1].cursor, **values))
    return found


async def test_pages_of_any_size_are_the_whole_list_in_order(catalog: Catalog) -> None:
    names = [f"t{number:02}" for number in range(11)]
    async with catalog.edit(ACTOR) as edit:
        for name in reversed(names):
            await edit.create(Tenant, {"name": name})
    for size in (1, 2, 5, 10, 11, 12, 1_000):
        found = await pages(catalog, Tenant, size)
        assert [tenant.name for page in found for tenant in page.items] == names
        assert [len(page.items) for page in found[:-1]] == [size] * (len(found) - 1)
        assert len(found) == -(-len(names) // size)


async def test_every_kind_of_thing_is_listed_by_pages(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    tenant_id = customer.tenant.id
    for number in range(4):
        await new_tenant(catalog, f"other-{number}")
        await new_plan(catalog, tenant_id, f"plan-{number}")
        await new_policy(catalog, customer.plan, f"GET:/{number}")
        await new_key(catalog, tenant_id, "the-same-name")
        await new_token(catalog, f"token-{number}", tenant_id=tenant_id)
        await new_override(catalog, tenant_id, resource=f"GET:/{number}")  # all of one subject
    for kind in (Tenant, Plan, Policy, Key, Token, Override):
        values = {} if kind is Tenant else {"tenant_id": tenant_id}
        (whole,) = await pages(catalog, kind, 1_000, **values)
        assert len(whole.items) == 5
        assert len({each.id for each in whole.items}) == 5
        assert [each for page in await pages(catalog, kind, 2, **values) for each in page.items] == whole.items
        assert all(type(each) is kind for each in whole.items)


async def test_a_list_may_be_narrowed(catalog: Catalog) -> None:
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")
    for kind, own in ((Plan, acme.plan), (Policy, acme.policy), (Key, acme.key), (Override, acme.override)):
        assert (await catalog.list_page(kind, tenant_id=acme.tenant.id)).items == [own]
        assert len((await catalog.list_page(kind)).items) == 2
        assert (await catalog.list_page(kind, tenant_id="ten_none")).items == []
    assert (await catalog.list_page(Override, subject="user:42", tenant_id=globex.tenant.id)).items == [globex.override]
    assert (await catalog.list_page(Override, subject="unknown")).items == []
    assert (await catalog.list_page(Key, plan_id=acme.plan.id)).items == [acme.key]
    assert (await catalog.list_page(Key, disabled=True)).items == []


async def test_pages_neither_skip_nor_repeat_while_others_insert_and_delete(catalog: Catalog) -> None:
    """An item that exists from the first page to the last is listed exactly once."""
    made = {}
    for number in range(10, 30):
        made[number] = await new_tenant(catalog, f"t{number}")
    listed: list[str] = []
    cursor: str | None = None
    for turn in range(100):
        page = await catalog.list_page(Tenant, size=3, cursor=cursor)
        listed += [tenant.name for tenant in page.items]
        cursor = page.cursor
        if cursor is None:
            break
        await new_tenant(catalog, f"a-before-all-{turn}")
        await new_tenant(catalog, f"{listed[-1]}-just-behind")
        if turn < 3:
            await new_tenant(catalog, f"z-behind-all-{turn}")
        if turn == 1:  # one that was listed, the one that the cursor names, and one that was not listed yet
            for name in ("t10", listed[-1], "t29"):
                await delete(catalog, await catalog.get_by_name_or_id(Tenant, name))
    assert len(listed) == len(set(listed))
    assert listed == sorted(listed)
    assert {f"t{number}" for number in range(10, 29)} <= set(listed)
    assert "t29" not in listed


async def test_pages_of_equal_names_neither_skip_nor_repeat(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    made = {(await new_key(catalog, tenant.id, "web"))[0].id for _ in range(7)}
    listed = [key.id for page in await pages(catalog, Key, 2) for key in page.items]
    assert sorted(listed) == sorted(made)


async def test_a_page_has_from_1_to_1000_items(catalog: Catalog) -> None:
    sizes: list[Any] = [0, -1, 1_001, 2**70, True, "5", None, 1.0]
    for size in sizes:
        for listing in (catalog.list_page(Tenant, size=size), catalog.audit_page(size=size)):
            with pytest.raises(InvalidInput, match="from 1 to 1000"):
                await listing


def cursor_of(value: Any) -> str:
    return urlsafe_b64encode(msgspec.json.encode(value)).rstrip(b"=").decode()


WRONG: dict[str, Any] = {
    "empty": "",
    "no base64": "!!!!",
    "no ASCII": "é",
    "no JSON": "abcd",
    "an object": cursor_of({"a": 1}),
    "too few": cursor_of(["a"]),
    "too many": cursor_of(["a", "b", "c"]),
    "numbers": cursor_of([1, 2]),
    "nothing": cursor_of([None, None]),
    "NUL": cursor_of(["a\0", "b"]),
    "a surrogate": urlsafe_b64encode(b'["\\ud800", "b"]').decode(),
    "something at its end": cursor_of(["a", "b"]) + "*",
    "a huge number": cursor_of([2**70]),
    "a number above 63 bits": cursor_of([2**63]),
}


async def test_a_cursor_that_no_list_returned_is_refused(catalog: Catalog) -> None:
    for name in ("acme", "globex", "initech"):
        await new_tenant(catalog, name)
    outcomes: dict[str, str] = {}
    for what, cursor in WRONG.items():
        for listing in (catalog.list_page(Tenant, size=1, cursor=cursor), catalog.audit_page(size=1, cursor=cursor)):
            try:
                await listing
                outcomes[what] = "was not refused"
            except InvalidInput as refused:
                if refused.field != "cursor":
                    outcomes[what] = refused.field
            except Exception as error:  # noqa: BLE001 - any other error is reported
                outcomes[what] = repr(error)
    assert outcomes == {}


async def test_a_cursor_of_one_list_is_not_one_of_another(catalog: Catalog) -> None:
    for name in ("acme", "globex"):
        await new_tenant(catalog, name)
    of_tenants = (await catalog.list_page(Tenant, size=1)).cursor
    of_audit = (await catalog.audit_page(size=1)).cursor
    with pytest.raises(InvalidInput, match="cursor"):
        await catalog.audit_page(cursor=of_tenants)
    with pytest.raises(InvalidInput, match="cursor"):
        await catalog.list_page(Tenant, cursor=of_audit)


# -- the audit log


async def test_the_audit_log_is_listed_by_pages_the_newest_first(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    other = await new_customer(catalog, "globex")
    await update(catalog, customer.plan, {"limits": "burst=5/minute"})
    whole = (await catalog.audit_page(size=1_000)).items
    assert [entry.id for entry in whole] == sorted((entry.id for entry in whole), reverse=True)
    listed = []
    cursor = None
    while True:
        page = await catalog.audit_page(size=3, cursor=cursor)
        listed += page.items
        await new_tenant(catalog, f"meanwhile-{len(listed)}")  # it is newer than the rest of the list
        cursor = page.cursor
        if cursor is None:
            break
    assert listed == whole
    mine = await audit_of(catalog, tenant_id=customer.tenant.id)
    assert {entry.tenant_id for entry in mine} == {customer.tenant.id}
    assert len(mine) == len(await audit_of(catalog, tenant_id=other.tenant.id)) + 1
    assert [entry.action for entry in await audit_of(catalog, entity_id=customer.plan.id)] == [
        "plan.create",
        "plan.update",
    ]
    assert await audit_of(catalog, tenant_id=other.tenant.id, entity_id=customer.plan.id) == []
