"""API keys: created, rotated with a grace period, disabled, revoked."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from limitforge import ManualClock
from limitforge.catalog import credentials
from limitforge.catalog.credentials import Credential, Peppers
from limitforge.catalog.database import queries, writes
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import Key, KeyScope, to_datetime
from limitforge.errors import Conflict, InvalidInput, NotFound, UnknownKey, VersionConflict
from tests.catalog.environments import one_database
from tests.catalog.factories import (
    ACTOR,
    UNUSUAL_TEXTS,
    delete,
    new_customer,
    new_key,
    new_plan,
    new_tenant,
    rows,
    table_contents,
    update,
)

HOUR_US = 3_600_000_000
HOUR = timedelta(hours=1)


async def is_accepted(catalog: Catalog, credential: Credential | str) -> bool:
    """Return True if a process with an empty cache would accept the key now."""
    assert catalog.peppers is not None
    try:
        presented = catalog.parse_credential(credential if isinstance(credential, str) else credential.text)
        async with catalog.database.reading() as connection:
            key = await queries.find(connection, Key, f"key_{presented.id}")
        catalog.peppers.authenticate(presented, key, to_datetime(catalog.clock.now_us()))
    except UnknownKey:
        return False
    return True


async def rotate(catalog: Catalog, key: Key, grace_seconds: Any = 0, **options: Any) -> tuple[Key, Credential]:
    async with catalog.edit(ACTOR) as edit:
        return await edit.rotate_key(key.id, grace_seconds, **options)


# -- creation


async def test_a_key_needs_a_tenant_and_a_name(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    key, credential = await new_key(catalog, tenant.id, "web")
    assert credential.text.startswith("lf_live_")
    assert key.id == f"key_{credential.id}"
    assert await catalog.get(Key, key.id) == key
    assert (key.plan_id, key.expires_at, key.metadata, key.disabled, key.last_used_at) == (None, None, {}, False, None)
    assert key.scopes == (KeyScope.CHECK, KeyScope.USAGE, KeyScope.PLANS)
    assert [secret.pepper for secret in key.secrets] == [1]
    assert await is_accepted(catalog, credential)


async def test_every_field_of_a_key_is_kept(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    plan = await new_plan(catalog, tenant.id)
    fields: dict[str, Any] = {
        "type": "test",
        "plan_id": plan.id,
        "scopes": ["usage"],
        "expires_at": "2030-06-01T12:00:00.123456+02:00",
        "metadata": {"team": "ü", "ids": [1, 2.5, None, True], "nested": {"\0": "\n"}},
    }
    key, credential = await new_key(catalog, tenant.id, "web", **fields)
    assert credential.text.startswith("lf_test_")
    found = await catalog.get(Key, key.id)
    assert found == key
    assert (found.type, found.plan_id, found.scopes, found.metadata) == (
        "test",
        plan.id,
        (KeyScope.USAGE,),
        fields["metadata"],
    )
    assert found.expires_at == datetime(2030, 6, 1, 10, 0, 0, 123456, tzinfo=UTC)
    changed = await update(catalog, key, {"name": "app", "plan_id": None, "expires_at": None, "metadata": {"a": 1}})
    assert await catalog.get(Key, key.id) == changed
    assert (changed.name, changed.plan_id, changed.expires_at, changed.type) == ("app", None, None, "test")
    assert changed.secrets == key.secrets
    assert await is_accepted(catalog, credential)


async def test_several_keys_may_have_one_name(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    first, _ = await new_key(catalog, tenant.id, "web")
    second, _ = await new_key(catalog, tenant.id, "web")
    assert await catalog.get_by_name_or_id(Key, first.id) == first
    assert second.id != first.id
    with pytest.raises(Conflict, match="pass an id instead"):
        await catalog.get_by_name_or_id(Key, "web")


@one_database
async def test_a_key_stays_its_tenants_and_of_its_kind(catalog: Catalog, database: Database) -> None:
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")
    before = await table_contents(database)
    for field, value in (("tenant_id", globex.tenant.id), ("type", "test")):
        with pytest.raises(InvalidInput, match="can't be changed") as refused:
            await update(catalog, acme.key, {field: value})
        assert refused.value.field == field
    with pytest.raises(NotFound, match=r"^plan_id: unknown plan"):
        await update(catalog, acme.key, {"plan_id": globex.plan.id})
    with pytest.raises(NotFound, match=r"^plan_id: unknown plan"):
        await new_key(catalog, acme.tenant.id, plan_id=globex.plan.id)
    with pytest.raises(NotFound, match=r"^tenant_id: unknown tenant"):
        await new_key(catalog, "ten_none")
    assert await table_contents(database) == before


@one_database
async def test_an_invalid_field_is_refused_by_its_name(catalog: Catalog, database: Database) -> None:
    customer = await new_customer(catalog)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"name": "é"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": None}, "name"),
        ({"type": "admin"}, "type"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["check", "check"]}, "scopes"),
        ({"scopes": ["plans"]}, "scopes"),
        ({"scopes": ["write"]}, "scopes[0]"),
        ({"scopes": "check"}, "scopes"),
        ({"expires_at": "2030-01-01T00:00:00"}, "expires_at"),
        ({"expires_at": "soon"}, "expires_at"),
        ({"expires_at": 5}, "expires_at"),
        ({"expires_at": "9999-12-31T23:59:59-05:00"}, "expires_at"),
        ({"expires_at": "0001-01-01T00:00:00+05:00"}, "expires_at"),
        ({"metadata": []}, "metadata"),
        ({"metadata": None}, "metadata"),
        ({"metadata": {"a": "x" * 4_096}}, "metadata"),
        ({"metadata": {"a": "ü" * 2_048}}, "metadata"),
        ({"disabled": True}, "disabled"),
        ({"secrets": []}, "secrets"),
        ({"id": "key_1"}, "id"),
        ({"version": 7}, "version"),
        ({"bogus": 1}, "bogus"),
    ]
    assert await errors_of(catalog, customer.tenant.id, [fields for fields, _ in wrong]) == wrong
    before = await table_contents(database)
    for fields, field in wrong:
        if field not in ("type", "id", "version"):
            with pytest.raises(InvalidInput):
                await update(catalog, customer.key, fields)
    assert await table_contents(database) == before


async def errors_of(
    catalog: Catalog, tenant_id: str, attempts: list[dict[str, Any]]
) -> list[tuple[Mapping[str, Any], str]]:
    """Return the error of each case, after checking that nothing was written."""
    before = await table_contents(catalog.database)
    outcomes: list[tuple[Mapping[str, Any], str]] = []
    for fields in attempts:
        try:
            await new_key(catalog, tenant_id, **fields)
            outcomes.append((fields, "was not refused"))
        except InvalidInput as refused:
            outcomes.append((fields, refused.field))
        except Exception as error:  # noqa: BLE001 - any other error is reported
            outcomes.append((fields, repr(error)))
    assert await table_contents(catalog.database) == before
    return outcomes


# -- metadata


async def test_metadata_may_be_4096_bytes_of_json(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    for text in ("x" * (4_096 - len('{"a": ""}')), "ü" * ((4_096 - len('{"a": ""}')) // 2)):
        key, _ = await new_key(catalog, tenant.id, metadata={"a": text})
        assert (await catalog.get(Key, key.id)).metadata == {"a": text}


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


UNCARRIABLE: dict[str, dict[str, Any]] = {
    "not a number": {"a": float("nan")},
    "infinity": {"a": [float("inf")]},
    "half a surrogate": {"a": "\ud800"},
    "half a surrogate as a key": {"\ud800": 1},
    "above 64 bits": {"a": 2**64},
    "below 64 bits": {"a": -(2**63) - 1},
    "thousands of digits": {"a": 10**4_000},
    "bytes": {"a": b"bytes"},
    "a set": {"a": {1, 2}},
    "a number as a key": {"a": {1: 2}},
    "a moment": {"a": datetime(2026, 1, 1, tzinfo=UTC)},
    "very deep": {"a": deep(1_500)},
}


async def test_metadata_that_could_not_be_carried_everywhere_is_refused(catalog: Catalog) -> None:
    """Databases store metadata as JSON, and copies in Redis as MessagePack: both must return equal values."""
    tenant = await new_tenant(catalog)
    before = await table_contents(catalog.database)
    outcomes: dict[str, str] = {}
    for what, metadata in UNCARRIABLE.items():
        try:
            await new_key(catalog, tenant.id, metadata=metadata)
            outcomes[what] = "was not refused"
        except InvalidInput as refused:
            if refused.field != "metadata":
                outcomes[what] = refused.field
        except Exception as error:  # noqa: BLE001 - any other error is reported
            outcomes[what] = repr(error)
    assert outcomes == {}
    assert await table_contents(catalog.database) == before


async def test_metadata_that_is_taken_can_be_carried_everywhere(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    taken: list[dict[str, Any]] = [{"a": text} for text in UNUSUAL_TEXTS]
    taken += [{"": ""}, {"a": deep(50)}, {"a": 2**64 - 1}, {"a": -(2**63)}, {"\0": "\0"}, {"a": {}, "b": [], "c": None}]
    for metadata in taken:
        key, _ = await new_key(catalog, tenant.id, metadata=metadata)
        found = await catalog.get(Key, key.id)
        assert found.metadata == metadata
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Key) == found
        assert msgspec.json.decode(msgspec.json.encode(found), type=Key) == found


async def test_numbers_past_2_to_the_53_are_kept_exactly(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    numbers = {"a": 2**53 + 1, "b": 2**63 - 1, "c": -(2**63), "d": 0.1, "e": 1e308, "f": 5e-324}
    key, _ = await new_key(catalog, tenant.id, metadata=numbers)
    found = (await catalog.get(Key, key.id)).metadata
    assert found == numbers
    assert {name: type(number) for name, number in found.items()} == {n: type(v) for n, v in numbers.items()}
    (entry,) = (await catalog.audit_page(entity_id=key.id)).items
    assert entry.after is not None
    assert entry.after["metadata"] == numbers


# -- expiry


async def test_a_key_is_good_until_exactly_its_end(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    _, credential = await new_key(catalog, tenant.id, expires_at=to_datetime(clock.now_us()) + HOUR)
    clock.advance_us(HOUR_US - 1)
    assert await is_accepted(catalog, credential)
    clock.advance_us(1)
    assert not await is_accepted(catalog, credential)


async def test_the_end_of_a_key_may_be_moved(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    key, credential = await new_key(catalog, tenant.id, expires_at=to_datetime(clock.now_us()) + HOUR)
    clock.advance_us(2 * HOUR_US)
    await update(catalog, key, {"expires_at": None})
    assert await is_accepted(catalog, credential)
    await update(catalog, key, {"expires_at": to_datetime(clock.now_us())})
    assert not await is_accepted(catalog, credential)


# -- rotation


async def test_without_grace_the_old_secret_ends_at_once(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    key, old = await new_key(catalog, tenant.id)
    after, new = await rotate(catalog, key)
    assert (await is_accepted(catalog, old), await is_accepted(catalog, new)) == (False, True)
    assert (new.id, after.version, len(after.secrets)) == (old.id, 2, 1)
    assert new.text != old.text
    assert len(await rows(catalog.database, "SELECT hash FROM secrets")) == 1


async def test_with_grace_the_old_secret_works_until_exactly_its_end(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    key, old = await new_key(catalog, tenant.id)
    _, new = await rotate(catalog, key, 3_600)
    assert (await is_accepted(catalog, old), await is_accepted(catalog, new)) == (True, True)
    clock.advance_us(HOUR_US - 1)
    assert (await is_accepted(catalog, old), await is_accepted(catalog, new)) == (True, True)
    clock.advance_us(1)
    assert (await is_accepted(catalog, old), await is_accepted(catalog, new)) == (False, True)


async def test_a_grace_period_may_be_of_any_length_up_to_a_year(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    graces: list[Any] = [0.001, "0.5", 86_400, 366 * 86_400]
    for grace in graces:
        key, old = await new_key(catalog, tenant.id)
        await rotate(catalog, key, grace)
        clock.advance_us(int(float(grace) * 1e6) - 1)
        assert await is_accepted(catalog, old)
        clock.advance_us(1)
        assert not await is_accepted(catalog, old)


async def test_rotating_twice_keeps_each_secret_for_its_own_grace(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    key, first = await new_key(catalog, tenant.id)
    _, second = await rotate(catalog, key, 3_600)
    clock.advance_us(HOUR_US // 2)
    _, third = await rotate(catalog, key, 3_600)
    assert [await is_accepted(catalog, each) for each in (first, second, third)] == [True, True, True]
    clock.advance_us(HOUR_US // 2)  # the first one's end, which the second rotation did not move
    assert [await is_accepted(catalog, each) for each in (first, second, third)] == [False, True, True]
    clock.advance_us(HOUR_US // 2)
    assert [await is_accepted(catalog, each) for each in (first, second, third)] == [False, False, True]


async def test_a_shorter_grace_shortens_an_earlier_one(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    key, first = await new_key(catalog, tenant.id)
    _, second = await rotate(catalog, key, 86_400)
    _, third = await rotate(catalog, key, 60)
    clock.advance_us(60_000_000 - 1)
    assert [await is_accepted(catalog, each) for each in (first, second, third)] == [True, True, True]
    clock.advance_us(1)
    assert [await is_accepted(catalog, each) for each in (first, second, third)] == [False, False, True]


async def test_without_grace_all_the_old_secrets_end(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    key, first = await new_key(catalog, tenant.id)
    _, second = await rotate(catalog, key, 86_400)
    _, third = await rotate(catalog, key, 0)
    assert [await is_accepted(catalog, each) for each in (first, second, third)] == [False, False, True]


async def test_a_rotation_does_not_move_the_end_of_the_key(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    key, old = await new_key(catalog, tenant.id, expires_at=to_datetime(clock.now_us()) + HOUR)
    _, new = await rotate(catalog, key, 86_400)
    clock.advance_us(HOUR_US)
    assert [await is_accepted(catalog, each) for each in (old, new)] == [False, False]


async def test_what_a_rotation_returns_is_what_is_read(catalog: Catalog, clock: ManualClock) -> None:
    """The newest secret first, on either database."""
    tenant = await new_tenant(catalog)
    key, _ = await new_key(catalog, tenant.id)
    for grace in (3_600, 7_200, 60, 1_800):
        clock.advance_us(1_000_000)
        key, credential = await rotate(catalog, key, grace)
        found = await catalog.get(Key, key.id)
        assert found.secrets[0].expires_at is None
        assert catalog.peppers is not None
        assert catalog.peppers.matches(credential, found.secrets[0])
        assert found == key


async def test_the_newest_secret_is_the_first_even_if_all_are_of_one_moment(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    assert catalog.peppers is not None
    for _ in range(5):  # their order must not depend on chance
        async with catalog.edit(ACTOR) as edit:
            key, _ = await edit.create_key({"tenant_id": tenant.id, "name": "web"})
            key, newest = await edit.rotate_key(key.id, 3_600)
        found = await catalog.get(Key, key.id)
        assert catalog.peppers.matches(newest, found.secrets[0])
        assert found == key


async def test_a_secret_keeps_the_date_on_which_it_was_made(catalog: Catalog, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    key, _ = await new_key(catalog, tenant.id)
    clock.advance_us(HOUR_US)
    await rotate(catalog, key, 86_400)
    made = await rows(catalog.database, "SELECT created_at FROM secrets ORDER BY created_at")
    assert len({str(at) for (at,) in made}) == 2


async def test_an_invalid_grace_period_is_refused(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    key, old = await new_key(catalog, tenant.id)
    before = await table_contents(database)
    outcomes: dict[str, str] = {}
    wrong: list[Any] = [-1, 0.0001, 366 * 86_400 + 1, float("nan"), float("inf"), True, "x", "", None, [], 2**70]
    for grace in wrong:
        try:
            await rotate(catalog, key, grace)
        except InvalidInput as refused:
            if refused.field != "grace_seconds":
                outcomes[repr(grace)] = refused.field
        except Exception as error:  # noqa: BLE001 - any other error is reported
            outcomes[repr(grace)] = repr(error)
        else:
            outcomes[repr(grace)] = "was not refused"
    assert outcomes == {}
    assert await table_contents(database) == before
    assert await is_accepted(catalog, old)


async def test_rotating_a_key_that_was_rotated_meanwhile_is_a_conflict(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    key, _ = await new_key(catalog, tenant.id)
    _, first = await rotate(catalog, key, expected_version=1)
    with pytest.raises(VersionConflict):
        await rotate(catalog, key, expected_version=1)
    assert await is_accepted(catalog, first)


async def test_a_rotation_brings_in_the_new_pepper(catalog: Catalog, database: Database, clock: ManualClock) -> None:
    tenant = await new_tenant(catalog)
    key, old = await new_key(catalog, tenant.id)
    first, second = "1:a pepper that the tests alone know", "2:another one that they alone know"
    both = Catalog(database, peppers=Peppers.parse(f"{first},{second}"), clock=clock)
    assert await is_accepted(both, old)
    after, new = await rotate(both, key, 3_600)
    assert sorted(secret.pepper for secret in after.secrets) == [1, 2]
    assert [await is_accepted(both, each) for each in (old, new)] == [True, True]
    later = Catalog(database, peppers=Peppers.parse(second), clock=clock)
    assert [await is_accepted(later, each) for each in (old, new)] == [False, True]
    assert [await is_accepted(catalog, each) for each in (old, new)] == [True, False]


async def test_without_peppers_there_are_no_new_secrets(database: Database, catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    bare = Catalog(database)
    before = await table_contents(database)
    with pytest.raises(InvalidInput, match="LIMITFORGE_PEPPERS") as refused:
        await new_key(bare, customer.tenant.id)
    assert refused.value.field == "peppers"
    with pytest.raises(InvalidInput, match="LIMITFORGE_PEPPERS"):
        await rotate(bare, customer.key)
    assert await table_contents(database) == before
    assert (await update(bare, customer.key, {"name": "app"})).name == "app"


# -- disabling and revoking


async def test_a_disabled_key_is_recognised_and_says_that_it_is(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    key, credential = await new_key(catalog, tenant.id)
    async with catalog.edit(ACTOR) as edit:
        disabled = await edit.set_key_disabled(key.id, disabled=True, expected_version=1)
    assert (disabled.disabled, disabled.version) == (True, 2)
    assert await catalog.get(Key, key.id) == disabled
    assert await is_accepted(catalog, credential)
    before = await table_contents(database, leave_out=("outbox", "revision"))
    async with catalog.edit(ACTOR) as edit:
        assert await edit.set_key_disabled(key.id, disabled=True) == disabled
    assert await table_contents(database, leave_out=("outbox", "revision")) == before
    with pytest.raises(VersionConflict):
        async with catalog.edit(ACTOR) as edit:
            await edit.set_key_disabled(key.id, disabled=False, expected_version=1)
    async with catalog.edit(ACTOR) as edit:
        enabled = await edit.set_key_disabled(key.id, disabled=False)
    assert (enabled.disabled, enabled.version) == (False, 3)
    assert [each.action for each in (await catalog.audit_page(entity_id=key.id)).items] == [
        "key.enable",
        "key.disable",
        "key.create",
    ]


async def test_a_disabled_key_can_be_rotated_and_stays_disabled(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    key, _ = await new_key(catalog, tenant.id)
    async with catalog.edit(ACTOR) as edit:
        await edit.set_key_disabled(key.id, disabled=True)
    after, _ = await rotate(catalog, key, 60)
    assert after.disabled


async def test_a_deleted_key_is_gone_with_all_its_secrets(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    key, old = await new_key(catalog, tenant.id)
    _, new = await rotate(catalog, key, 3_600)
    _, other = await new_key(catalog, tenant.id, "other")
    await delete(catalog, key)
    assert [await is_accepted(catalog, each) for each in (old, new, other)] == [False, False, True]
    assert len(await rows(catalog.database, "SELECT hash FROM secrets")) == 1


async def test_the_secret_of_one_key_does_not_open_another(catalog: Catalog) -> None:
    """Not even with the other key's id and a valid checksum."""
    tenant = await new_tenant(catalog)
    _, mine = await new_key(catalog, tenant.id)
    theirs, _ = await new_key(catalog, tenant.id)
    body = mine.text.replace(mine.id, theirs.id.removeprefix("key_"))[: -credentials.CHECKSUM_LENGTH]
    assert catalog.peppers is not None
    for forged in (body + catalog.peppers.checksum(body), body + credentials.crc_checksum(body)):
        assert catalog.parse_credential(forged).id == theirs.id.removeprefix("key_")
        assert not await is_accepted(catalog, forged)


# -- when it was last used


async def test_when_a_key_was_used_is_written_without_a_new_version(catalog: Catalog, database: Database) -> None:
    tenant = await new_tenant(catalog)
    key, _ = await new_key(catalog, tenant.id)
    other, _ = await new_key(catalog, tenant.id, "other")
    late, early = datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    for at in (early, late, early):
        async with database.writing() as connection:
            await writes.record_key_use(connection, {key.id: at, "key_none": at})
    assert await catalog.get(Key, key.id) == msgspec.structs.replace(key, last_used_at=late)
    assert await catalog.get(Key, other.id) == other


# -- keys that were generated elsewhere


async def test_a_key_that_was_made_elsewhere_can_be_added(catalog: Catalog, database: Database) -> None:
    """It is added with the hashes of its secrets, as from a file."""
    customer = await new_customer(catalog)
    _, credential = await new_key(catalog, customer.tenant.id)
    key = await catalog.get(Key, f"key_{credential.id}")
    await delete(catalog, key)
    assert not await is_accepted(catalog, credential)
    async with catalog.edit(ACTOR) as edit:
        added = await edit.add_key(key)
    assert await catalog.get(Key, key.id) == added
    assert await is_accepted(catalog, credential)
    before = await table_contents(database)
    with pytest.raises(Conflict, match="already"):
        async with catalog.edit(ACTOR) as edit:
            await edit.add_key(key)
    with pytest.raises(Conflict):
        async with catalog.edit(ACTOR) as edit:
            await edit.add_key(msgspec.structs.replace(key, id="key_0000000000000000"))  # of the same secret
    assert await table_contents(database) == before
    async with catalog.edit(ACTOR) as edit:
        await edit.set_secrets(key.id, [])
    assert not await is_accepted(catalog, credential)


async def test_a_key_whose_id_no_credential_could_carry_is_refused(catalog: Catalog) -> None:
    """Such a key could never be presented, and the key that a rotation returns could not be parsed."""
    customer = await new_customer(catalog)
    for identity in ("web", "key_short", "tok_0000000000000000", "key_" + "ü" * 16, "key_" + "0" * 17):
        key = Key(id=identity, tenant_id=customer.tenant.id, name="web")
        with pytest.raises(InvalidInput) as refused:
            async with catalog.edit(ACTOR) as edit:
                await edit.add_key(key)
        assert refused.value.field == "id"
