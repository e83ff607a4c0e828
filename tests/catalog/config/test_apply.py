"""Applying a file: what it changes, in transactions of whole tenants, and which changes it reports."""

import asyncio
from datetime import timedelta
from textwrap import dedent
from typing import Any

import msgspec
import pytest

from limitforge import ManualClock
from limitforge.catalog.announcements import Announcement
from limitforge.catalog.config import apply as applying
from limitforge.catalog.config import document
from limitforge.catalog.config.apply import apply_document, preview_document
from limitforge.catalog.config.diff import Change, changes_to_json, count_changes, format_changes
from limitforge.catalog.config.export import export_document
from limitforge.catalog.credentials import Credential
from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.model import OPERATOR, Key, Override, Plan, Policy, Tenant, to_datetime, to_public_dict
from limitforge.errors import InvalidFile, InvalidInput, NotFound
from tests.catalog.config.test_document import SAMPLE
from tests.catalog.environments import one_database
from tests.catalog.factories import (
    MINUTE_US,
    audit_of,
    new_customer,
    new_key,
    new_override,
    new_tenant,
    rows,
    table_contents,
    update,
)

ACTOR = "test:bob"
HASH = "0" * 62 + "%02x"


async def apply_text(catalog: Catalog, text: str, **options: Any) -> list[Change]:
    now = to_datetime(catalog.clock.now_us())
    wanted, source = document.parse_document(dedent(text).encode(), "plans.yaml", now)
    return await apply_document(catalog, wanted, ACTOR, source=source, **options)


async def preview_text(catalog: Catalog, text: str, **options: Any) -> list[str]:
    now = to_datetime(catalog.clock.now_us())
    wanted, source = document.parse_document(dedent(text).encode(), "plans.yaml", now)
    return list(format_changes(await preview_document(catalog, wanted, source=source, **options)))


async def apply_errors(catalog: Catalog, text: str, **options: Any) -> list[str]:
    """Return the errors of a file, after checking that nothing was written."""
    before = await table_contents(catalog.database)
    with pytest.raises(InvalidFile) as error:
        await apply_text(catalog, text, **options)
    assert await table_contents(catalog.database) == before
    return str(error.value).splitlines()


async def export_text(catalog: Catalog) -> str:
    return document.dump_document(await export_document(catalog))


# --- What it changes -------------------------------------------------------------------------------------------------


async def test_a_file_with_one_of_everything_is_what_is_exported_again(catalog: Catalog) -> None:
    await apply_text(catalog, SAMPLE.read_text())
    now = to_datetime(catalog.clock.now_us())
    wanted, _ = document.parse_document(SAMPLE.read_bytes(), "sample.yaml", now)
    found = await export_document(catalog)
    assert found.operator is not None
    assert wanted.operator is not None
    assert (found.operator.plan, found.operator.time_zone) == ("fleet", "America/New_York")
    assert sorted(map(repr, found.operator.plans or ())) == sorted(map(repr, wanted.operator.plans or ()))
    by_name = {each.name: each for each in found.tenants or ()}
    acme, empty, _ = wanted.tenants or ()
    assert by_name["empty"] == empty
    assert (
        document.dump_document(await export_document(catalog, tenant="left-alone")).splitlines()[1]
        == "  - name: left-alone"
    )
    for section in ("plans", "policies", "keys", "overrides"):
        ours, theirs = getattr(acme, section), getattr(by_name["acme"], section)
        assert sorted(map(repr, ours)) == sorted(map(repr, theirs))


@one_database
async def test_applied_twice_it_changes_nothing_the_second_time(catalog: Catalog) -> None:
    assert await apply_text(catalog, SAMPLE.read_text())
    before = await table_contents(catalog.database)
    assert await apply_text(catalog, SAMPLE.read_text()) == []
    assert await apply_text(catalog, await export_text(catalog), prune=True) == []
    assert await table_contents(catalog.database) == before


@one_database
async def test_what_a_file_omits_is_not_changed(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    await new_tenant(catalog, "other")
    before = await export_document(catalog)
    await apply_text(catalog, "tenants: [{name: acme, default_plan: free, mode: monitor}]")
    after = await export_document(catalog)
    assert after.operator == before.operator
    assert (await catalog.get(Tenant, customer.tenant.id)).mode == "monitor"
    for was, is_now in zip(before.tenants or (), after.tenants or (), strict=True):
        assert (was.plans, was.policies, was.keys, was.overrides) == (
            is_now.plans,
            is_now.policies,
            is_now.keys,
            is_now.overrides,
        )


@one_database
async def test_entries_that_a_section_omits_are_deleted(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    await apply_text(catalog, "tenants: [{name: acme, plans: [], policies: [], keys: [], overrides: []}]")
    (tenant,) = (await export_document(catalog)).tenants or ()
    assert (tenant.plans, tenant.policies, tenant.keys, tenant.overrides) == ((), (), (), ())
    assert (await catalog.get(Tenant, customer.tenant.id)).default_plan_id is None


@one_database
async def test_a_plain_field_that_is_absent_has_its_default(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog, mode="off", time_zone="Europe/Berlin", failure="closed", lanes=4, suspended=True)
    await apply_text(catalog, "tenants: [{name: acme}]")
    after = await catalog.get(Tenant, tenant.id)
    assert (after.mode, after.time_zone, after.failure, after.lanes, after.suspended) == ("on", "UTC", None, 1, False)


async def test_tenants_that_are_not_named_go_only_if_they_are_pruned(catalog: Catalog) -> None:
    await new_customer(catalog, "acme")
    await new_customer(catalog, "bolt")
    assert await apply_text(catalog, "tenants: [{name: acme, default_plan: free}]") == []
    (change,) = await apply_text(catalog, "tenants: [{name: acme, default_plan: free}]", prune=True)
    assert (change.action, change.title) == ("delete", "tenant bolt")
    assert [each.name for each in (await export_document(catalog)).tenants or ()] == ["acme"]


@one_database
async def test_a_file_without_tenants_prunes_none(catalog: Catalog) -> None:
    await new_tenant(catalog)
    with pytest.raises(InvalidInput, match="tenants: is required to prune other tenants"):
        await apply_text(catalog, "operator: {}", prune=True)


@one_database
async def test_a_changed_plan_gets_one_version_and_keeps_its_id(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    text = "tenants: [{name: acme, default_plan: free, plans: [{name: free, limits: burst=%d/minute}]}]"
    await apply_text(catalog, text % 200)
    await apply_text(catalog, text % 200)
    plan = await catalog.get(Plan, customer.plan.id)
    assert (plan.version, plan.limits[0]["limit"]) == (2, 200)
    assert [row["version"] for row in await catalog.plan_versions(plan.id)] == [2, 1]


async def test_a_plan_is_written_before_what_needs_it_and_deleted_after(catalog: Catalog) -> None:
    await new_customer(catalog)
    (key,) = await catalog.list_for_tenant(Key, (await catalog.get_by_name_or_id(Tenant, "acme")).id)
    await apply_text(
        catalog,
        f"""
        tenants:
          - name: acme
            default_plan: new
            plans: [{{name: new, limits: burst=1/second}}]
            policies: [{{resource: "GET:/orders/{{order}}", plan: new, shadow_plan: new}}]
            keys: [{{id: {key.id}, name: web, plan: new}}]
        """,
    )
    plan = await catalog.get_by_name_or_id(Plan, "new")
    (policy,) = await catalog.list_for_tenant(Policy, plan.tenant_id)
    assert (policy.resource, policy.plan_id, policy.shadow_plan_id) == ("GET:/orders/{order}", plan.id, plan.id)
    assert (await catalog.get(Key, key.id)).plan_id == plan.id
    assert [each.name for each in await catalog.list_for_tenant(Plan, plan.tenant_id)] == ["new"]


@one_database
async def test_what_is_not_changed_is_not_touched(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    text = (await export_text(catalog)).replace("name: web", "name: site")
    await apply_text(catalog, text)
    for before in (customer.tenant, customer.plan, customer.policy, customer.override):
        after = await catalog.get(type(before), before.id)
        assert (after.version, after.updated_at) == (before.version, before.updated_at)
    assert (await catalog.get(Key, customer.key.id)).version == customer.key.version + 1


@one_database
async def test_the_operator_is_applied_as_a_tenant_is(catalog: Catalog) -> None:
    await apply_text(
        catalog, "operator: {plan: a, mode: monitor, plans: [{name: a, limits: 1/s}, {name: b, limits: 2/s}]}"
    )
    await apply_text(catalog, "operator: {plan: b, plans: [{name: b, limits: 2/s}]}")
    operator = await catalog.get(Tenant, OPERATOR)
    plan = await catalog.get_by_name_or_id(Plan, "b", tenant_id=OPERATOR)
    assert (operator.mode, operator.default_plan_id) == ("on", plan.id)
    await apply_text(catalog, "operator: {mode: off}")
    operator = await catalog.get(Tenant, OPERATOR)
    assert (operator.mode, operator.default_plan_id) == ("off", None)
    assert len(await catalog.list_for_tenant(Plan, OPERATOR)) == 1


@one_database
async def test_overrides_that_have_expired_are_neither_set_nor_kept(catalog: Catalog, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    over = (to_datetime(clock.now_us()) - timedelta(seconds=1)).isoformat()
    one = f"{{subject: old, limits: {{x: blocked}}, expires_at: {over}}}"
    changes = await apply_text(catalog, f"tenants: [{{name: acme, default_plan: free, overrides: [{one}]}}]")
    assert [change.title for change in changes] == ["tenant acme / override user:42 on *"]
    assert await catalog.list_for_tenant(Override, customer.tenant.id) == []


async def test_an_override_may_take_the_place_of_one_that_has_expired(catalog: Catalog, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    clock.advance_us(120 * MINUTE_US)
    until = (to_datetime(clock.now_us()) + timedelta(hours=1)).isoformat()
    one = f"{{subject: 'user:42', limits: {{burst: blocked}}, expires_at: {until}, reason: again}}"
    (change,) = await apply_text(catalog, f"tenants: [{{name: acme, default_plan: free, overrides: [{one}]}}]")
    assert change.action == "create"
    (override,) = await catalog.list_for_tenant(Override, customer.tenant.id)
    assert (override.limits, override.reason, override.set_by) == ({"burst": "blocked"}, "again", ACTOR)


@one_database
async def test_a_key_without_secrets_keeps_its_own(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    await apply_text(
        catalog, f"tenants: [{{name: acme, default_plan: free, keys: [{{id: {customer.key.id}, name: new}}]}}]"
    )
    key = await catalog.get(Key, customer.key.id)
    assert (key.name, key.secrets) == ("new", customer.key.secrets)


@one_database
async def test_a_key_of_another_database_works_here(catalog: Catalog) -> None:
    tenant = await new_tenant(catalog)
    key, credential = await new_key(catalog, tenant.id)
    text = await export_text(catalog)
    async with catalog.edit(ACTOR) as edit:
        await edit.delete(Tenant, tenant.id)
    await apply_text(catalog, text)
    assert catalog.peppers is not None
    found = await catalog.get(Key, key.id)
    catalog.peppers.authenticate(
        Credential.parse(credential.text, catalog.peppers), found, to_datetime(catalog.clock.now_us())
    )


async def test_a_key_goes_to_the_tenant_that_replaces_its_own(catalog: Catalog) -> None:
    await new_customer(catalog, "acme")
    text = (await export_text(catalog)).replace("name: acme", "name: acme-2")
    await apply_text(catalog, text, prune=True)
    (tenant,) = (await export_document(catalog)).tenants or ()
    assert (tenant.name, len(tenant.keys or ())) == ("acme-2", 1)


@one_database
async def test_each_tenant_is_announced_once_with_everything_that_has_changed(catalog: Catalog) -> None:
    announcements: list[Announcement] = []

    async def on_commit(committed: Any) -> None:
        announcements.extend(committed)

    customer = await new_customer(catalog)
    other = await new_tenant(catalog, "other")
    catalog.on_commit = on_commit
    await apply_text(
        catalog,
        f"""
        tenants:
          - name: acme
            default_plan: free
            keys: [{{id: key_0123456789abcdef, name: a, secrets: [{{hash: {HASH % 1}, pepper: 1}}]}}]
            overrides: []
          - {{name: other, mode: off}}
        """,
    )
    by_tenant = {each.tenant_id: each for each in announcements}
    assert len(announcements) == len(by_tenant) == 2
    acme = by_tenant[customer.tenant.id]
    assert (acme.config, acme.overrides, acme.keys, acme.gone) == (
        False,
        True,
        ("key_0123456789abcdef",),
        (customer.key.id,),
    )
    assert by_tenant[other.id].config
    assert (await catalog.get(Tenant, other.id)).revision == by_tenant[other.id].revision


async def test_every_change_is_in_the_audit_log_without_hashes(catalog: Catalog) -> None:
    await apply_text(catalog, SAMPLE.read_text())
    entries = await audit_of(catalog)
    assert {entry.actor for entry in entries} == {ACTOR}
    actions = [entry.action for entry in entries]
    assert (actions.count("tenant.create"), actions.count("plan.create"), actions.count("override.create")) == (3, 5, 2)
    assert "00aa" not in repr(entries)
    created = next(entry for entry in entries if entry.action == "tenant.create" and entry.after["name"] == "acme")  # type: ignore[index]
    assert created.after is not None
    assert created.after["default_plan_id"].startswith("pla_")


async def test_what_an_apply_changes_and_deletes_is_in_the_audit_log(catalog: Catalog, clock: ManualClock) -> None:
    customer, gone = await new_customer(catalog), await new_customer(catalog, "gone")
    before = await audit_of(catalog)
    clock.advance_us(MINUTE_US)
    text = f"""
        operator: {{mode: monitor}}
        tenants:
          - name: acme
            mode: "off"
            default_plan: free
            plans: [{{name: free, limits: burst=200/minute}}]
            policies: [{{resource: "GET:/orders/{{id}}", plan: free, mode: monitor}}]
            keys: [{{id: {customer.key.id}, name: site, plan: free}}]
            overrides: [{{subject: "user:42", limits: {{burst: blocked}}, expires_at: 2030-01-01T00:00:00Z}}]
    """
    changes = await apply_text(catalog, text, prune=True)
    entries = (await audit_of(catalog))[len(before) :]
    assert count_changes(changes) == (0, 6, 1)
    assert {(entry.actor, entry.at) for entry in entries} == {(ACTOR, to_datetime(clock.now_us()))}
    by_key = {(entry.action, entry.tenant_id, entry.entity_id): entry for entry in entries}
    assert len(by_key) == len(entries)
    own = [(customer.tenant, "tenant"), (customer.plan, "plan"), (customer.policy, "policy")]
    own += [(customer.key, "key"), (customer.override, "override")]
    assert by_key.keys() == {
        ("tenant.update", OPERATOR, OPERATOR),
        ("tenant.delete", gone.tenant.id, gone.tenant.id),
        *((f"{kind}.update", customer.tenant.id, entity.id) for entity, kind in own),
    }
    for entity, kind in own:
        entry = by_key[f"{kind}.update", customer.tenant.id, entity.id]
        assert entry.before == msgspec.json.decode(msgspec.json.encode(to_public_dict(entity)))
        stored = msgspec.json.decode(msgspec.json.encode(to_public_dict(await catalog.get(type(entity), entity.id))))
        assert entry.after is not None
        assert {**entry.after, "revision": None} == {**stored, "revision": None}  # numbered when the edit ends
        assert entry.after != entry.before
    removed = by_key["tenant.delete", gone.tenant.id, gone.tenant.id]
    assert (removed.before or {})["name"] == "gone"
    assert removed.after is None


async def test_what_a_list_leaves_out_is_deleted_and_in_the_audit_log(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    before = await audit_of(catalog)
    await apply_text(catalog, "tenants: [{name: acme, plans: [], policies: [], keys: [], overrides: []}]")
    entries = (await audit_of(catalog))[len(before) :]
    deleted = [(entry.action, entry.entity_id) for entry in entries if entry.action.endswith(".delete")]
    assert sorted(deleted) == [
        ("key.delete", customer.key.id),
        ("override.delete", customer.override.id),
        ("plan.delete", customer.plan.id),
        ("policy.delete", customer.policy.id),
    ]
    for entry in entries:
        if entry.action.endswith(".delete"):
            assert entry.after is None
            assert (entry.before or {})["id"] == entry.entity_id


# --- What is refused -------------------------------------------------------------------------------------------------


@one_database
async def test_a_plan_that_is_in_neither_the_file_nor_the_catalog_is_refused(catalog: Catalog) -> None:
    await new_customer(catalog)
    errors = await apply_errors(
        catalog,
        """\
        tenants:
          - name: acme
            default_plan: nope
            policies:
              - {resource: "*", plan: free}
              - {resource: "POST:*", plan: nope}
          - name: fresh
            default_plan: free
        """,
    )
    assert errors == [
        "plans.yaml:3: tenants[0].default_plan: unknown plan 'nope'; known plans: free",
        "plans.yaml:6: tenants[0].policies[1].plan: unknown plan 'nope'; known plans: free",
        "plans.yaml:8: tenants[1].default_plan: unknown plan 'free'; known plans: none",
    ]


@one_database
async def test_a_plan_that_unchanged_entries_use_can_not_be_removed(catalog: Catalog) -> None:
    await new_customer(catalog)
    errors = await apply_errors(catalog, "tenants:\n  - name: acme\n    plans: []\n")
    assert [line.partition("plan free is missing, but ")[2] for line in errors] == [
        "policy GET:/orders/{id} uses it, which this file does not change",
        "key web uses it, which this file does not change",
    ]
    assert all(line.startswith("plans.yaml:3: tenants[0].plans: ") for line in errors)


@one_database
async def test_an_override_must_fit_the_plans_that_are_there(catalog: Catalog) -> None:
    await new_customer(catalog)
    over = "{subject: a, limits: {%s: blocked}, expires_at: 2030-01-01T00:00:00Z}"
    await apply_text(catalog, f"tenants: [{{name: acme, default_plan: free, overrides: [{over % 'burst'}]}}]")
    (error,) = await apply_errors(
        catalog, f"tenants: [{{name: acme, default_plan: free, overrides: [{over % 'other'}]}}]"
    )
    assert "tenants[0].overrides[0].limits.other: no plan of this tenant has a limit of that name" in error


@one_database
async def test_a_new_key_needs_its_secrets(catalog: Catalog) -> None:
    (error,) = await apply_errors(catalog, "tenants: [{name: acme, keys: [{id: key_0123456789abcdef, name: a}]}]")
    assert error.startswith("plans.yaml:1: tenants[0].keys[0].secrets: is required for a new key")


@one_database
async def test_a_key_of_another_tenant_is_refused(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    one = f"keys: [{{id: {customer.key.id}, name: a, secrets: [{{hash: {HASH % 1}, pepper: 1}}]}}]"
    (error,) = await apply_errors(catalog, f"tenants: [{{name: other, {one}}}]")
    assert error == "plans.yaml:1: tenants[0].keys[0].id: is the id of another tenant's key"
    (error,) = await apply_errors(catalog, f"tenants: [{{name: acme, default_plan: free}}, {{name: other, {one}}}]")
    assert error == "plans.yaml:1: tenants[1].keys[0].id: is the id of another tenant's key"


@one_database
async def test_a_secret_of_another_tenant_is_refused_before_anything_is_written(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "MAX_CHANGES", 2)  # so that the wrong tenant would come in a later transaction
    customer = await new_customer(catalog)
    (secret,) = customer.key.secrets
    keys = f"keys: [{{id: key_0123456789abcdef, name: a, secrets: [{{hash: {secret.hash}, pepper: 1}}]}}]"
    others = "{name: one}, {name: two}, {name: three}"
    why = "keys[0].secrets[0].hash: is the hash of another key or token"
    assert await apply_errors(catalog, f"tenants: [{others}, {{name: zz, {keys}}}]") == [
        f"plans.yaml:1: tenants[3].{why}"
    ]
    left_alone = "{name: acme, default_plan: free}"
    assert await apply_errors(catalog, f"tenants: [{left_alone}, {{name: zz, {keys}}}]") == [
        f"plans.yaml:1: tenants[1].{why}"
    ]
    renamed = f"{{name: acme, default_plan: free, keys: [{{id: {customer.key.id}, name: b}}]}}"
    assert await apply_errors(catalog, f"tenants: [{renamed}, {{name: zz, {keys}}}]") == [
        f"plans.yaml:1: tenants[1].{why}"
    ]


@one_database
async def test_the_secret_of_a_token_is_refused_for_a_key(catalog: Catalog) -> None:
    async with catalog.edit(ACTOR) as edit:
        token, _ = await edit.create_token({"name": "ops", "scopes": ["read"]})
    (secret,) = token.secrets
    keys = f"keys: [{{id: key_0123456789abcdef, name: a, secrets: [{{hash: {secret.hash}, pepper: 1}}]}}]"
    (error,) = await apply_errors(catalog, f"tenants: [{{name: acme, {keys}}}]")
    assert error == "plans.yaml:1: tenants[0].keys[0].secrets[0].hash: is the hash of another key or token"


async def test_a_secret_may_move_to_a_key_that_takes_the_place_of_its_own(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    (secret,) = customer.key.secrets
    keys = f"keys: [{{id: key_0123456789abcdef, name: a, secrets: [{{hash: {secret.hash}, pepper: 1}}]}}]"
    await apply_text(catalog, f"tenants: [{{name: acme, default_plan: free, keys: []}}, {{name: zz, {keys}}}]")
    assert (await catalog.get(Key, "key_0123456789abcdef")).secrets == (secret,)


@one_database
async def test_a_key_can_not_change_its_type(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    (error,) = await apply_errors(
        catalog,
        f"tenants: [{{name: acme, default_plan: free, keys: [{{id: {customer.key.id}, name: web, type: test}}]}}]",
    )
    assert error.endswith("keys[0].type: can't be changed from live; create another key")


@one_database
async def test_a_document_that_was_not_read_from_a_file_is_refused_by_its_fields(catalog: Catalog) -> None:
    now = to_datetime(catalog.clock.now_us())
    wanted, _ = document.parse_document(b"tenants: [{name: acme, default_plan: a}]", "plans.yaml", now)
    with pytest.raises(InvalidFile, match=r"configuration: tenants\[0\].default_plan: unknown plan 'a'"):
        await apply_document(catalog, wanted, ACTOR)


@one_database
async def test_only_a_tenant_that_is_there_is_exported(catalog: Catalog) -> None:
    await new_customer(catalog)
    await new_tenant(catalog, "other")
    found = await export_document(catalog, tenant="acme")
    assert (found.operator, [each.name for each in found.tenants or ()]) == (None, ["acme"])
    with pytest.raises(NotFound):
        await export_document(catalog, tenant="unknown")


async def test_more_tenants_than_a_page_has_are_all_exported_and_pruned(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limitforge.catalog.database.pages.MAX_PAGE_SIZE", 2)
    monkeypatch.setattr("limitforge.catalog.database.entity_rows.CHUNK_SIZE", 2)
    names = [f"t{at}" for at in range(5)]
    await apply_text(catalog, f"tenants: [{', '.join(f'{{name: {name}}}' for name in names)}]")
    assert [each.name for each in (await export_document(catalog)).tenants or ()] == names
    changes = await apply_text(catalog, "tenants: [{name: t2}]", prune=True)
    assert sorted(change.title for change in changes) == [f"tenant {name}" for name in names if name != "t2"]


# --- Reported changes ------------------------------------------------------------------------------------------------


@one_database
async def test_a_plan_of_changes_is_what_a_person_reads(catalog: Catalog) -> None:
    customer = await new_customer(catalog)
    before = await table_contents(catalog.database)
    lines = await preview_text(
        catalog,
        f"""
        operator: {{mode: monitor}}
        tenants:
          - name: acme
            mode: off
            default_plan: free
            plans:
              - name: free
                limits: [{{name: burst, algorithm: sliding_window_counter, limit: 200, window_seconds: 60}},
                         {{name: daily, algorithm: quota, limit: 1000, period: day}}]
            policies: []
            keys:
              - id: {customer.key.id}
                name: site
                scopes: [check]
                plan: free
                secrets: [{{hash: {HASH % 7}, pepper: 1}}]
            overrides:
              - {{subject: "a\\nb", limits: {{burst: unlimited}}, expires_at: 2030-01-01T00:00:00Z, reason: why not}}
          - name: fresh
        """,
    )
    assert lines == [
        "~ operator",
        "    mode: on -> monitor",
        "~ tenant acme",
        "    mode: on -> off",
        "~ tenant acme / plan free",
        "    limits.burst.limit: 100 -> 200",
        "  + limits.daily.algorithm: quota",
        "  + limits.daily.limit: 1000",
        "  + limits.daily.period: day",
        "- tenant acme / policy GET:/orders/{id}",
        f"~ tenant acme / key site ({customer.key.id})",
        "    name: web -> site",
        "    scopes: check, usage, plans -> check",
        "    secrets: 1 under pepper 1 -> others",
        '+ tenant acme / override "a\\nb on *"',
        "    limits.burst: unlimited",
        "    expires_at: 2030-01-01T00:00:00Z",
        "    reason: why not",
        "- tenant acme / override user:42 on *",
        "+ tenant fresh",
    ]
    assert await table_contents(catalog.database) == before


@one_database
async def test_hashes_are_never_shown(catalog: Catalog) -> None:
    changes = await apply_text(catalog, SAMPLE.read_text())
    assert "00aa" not in "\n".join(format_changes(changes))
    assert "00aa" not in repr(changes_to_json(changes))
    assert count_changes(changes) == (13, 1, 0)


@one_database
async def test_limits_in_another_order_are_a_change(catalog: Catalog) -> None:
    await apply_text(catalog, "tenants: [{name: a, plans: [{name: p, limits: x=1/s; y=2/s}]}]")
    assert await preview_text(catalog, "tenants: [{name: a, plans: [{name: p, limits: y=2/s; x=1/s}]}]") == [
        "~ tenant a / plan p",
        "    limits: x, y -> y, x",
    ]


# --- Export ----------------------------------------------------------------------------------------------------------


@one_database
async def test_an_override_of_a_removed_limit_is_not_exported_and_is_deleted_by_the_next_apply(
    catalog: Catalog,
) -> None:
    customer = await new_customer(catalog)
    limits = {"burst": {"limit": 5}, "extra": "blocked"}
    await update(catalog, customer.plan, {"limits": "burst=100/minute; extra=5/minute"})
    await new_override(catalog, customer.tenant.id, "user:7", limits=limits)
    await update(catalog, await catalog.get(Plan, customer.plan.id), {"limits": "extra=5/minute"})
    (tenant,) = (await export_document(catalog)).tenants or ()
    assert [(each.subject, each.limits) for each in tenant.overrides or ()] == [("user:7", {"extra": "blocked"})]
    text = await export_text(catalog)
    assert count_changes(await apply_text(catalog, text)) == (0, 1, 1)
    assert await apply_text(catalog, text) == []


@one_database
async def test_an_old_secret_that_has_expired_is_not_exported(catalog: Catalog, clock: ManualClock) -> None:
    customer = await new_customer(catalog)
    async with catalog.edit(ACTOR) as edit:
        await edit.rotate_key(customer.key.id, 60)
    text = await export_text(catalog)
    assert text.count("hash:") == 2
    clock.advance_us(2 * MINUTE_US)
    assert (await export_text(catalog)).count("hash:") == 1
    assert await apply_text(catalog, text) == []


@one_database
async def test_a_file_with_another_window_for_one_resource_of_a_caller_wide_limit_is_refused(catalog: Catalog) -> None:
    text = """
        tenants:
          - name: acme
            default_plan: free
            plans:
              - name: free
                limits: [{name: w, algorithm: fixed_window, limit: 5, window_seconds: 60, scope: caller}]
            overrides:
              - {resource: RESOURCE, subject: bob, limits: {w: {window_seconds: 600}}, expires_at: 2031-01-01T00:00:00Z}
    """
    [error] = await apply_errors(catalog, text.replace("RESOURCE", "'GET:/orders'"))
    assert "tenants[0].overrides[0].limits.w.window_seconds" in error
    assert "'*'" in error
    await apply_text(catalog, text.replace("RESOURCE", "'*'"))


# --- In short transactions -------------------------------------------------------------------------------------------


def many(count: int, limit: int) -> str:
    """Return a file of tenants with three entries each."""
    return "tenants:\n" + "".join(
        f"  - name: t{at:04}\n    default_plan: free\n    plans: [{{name: free, limits: burst={limit}/minute}}]\n"
        f"    policies: [{{resource: 'GET:/{limit}', plan: free}}]\n"
        for at in range(count)
    )


async def limits_of(catalog: Catalog) -> dict[str, tuple[int, str]]:
    """Return the limit of each tenant's plan, and the resource of its policy: one apply changes both."""
    found = (await export_document(catalog)).tenants or ()
    return {
        each.name: (each.plans[0].limits[0]["limit"], each.policies[0].resource)
        for each in found
        if each.plans and each.policies
    }


async def revisions(catalog: Catalog) -> list[int]:
    """Return the number of tenants that each transaction has changed, in order."""
    counted = await rows(catalog.database, "SELECT revision, count(*) FROM outbox GROUP BY revision ORDER BY revision")
    return [count for _, count in counted]


@one_database
async def test_a_large_file_is_applied_in_short_transactions(catalog: Catalog) -> None:
    await apply_text(catalog, many(400, 10))
    counts_ = await revisions(catalog)
    assert sum(counts_) == 400
    assert max(counts_) <= applying.MAX_CHANGES // 3
    assert len(await limits_of(catalog)) == 400


async def test_a_large_file_takes_few_statements(catalog: Catalog) -> None:
    """Updates and deletions are not written one by one."""
    await apply_text(catalog, many(300, 10))
    for wanted in (many(300, 20), "tenants: []"):
        before = catalog.database.statement_count
        await apply_text(catalog, wanted, prune=True)
        assert catalog.database.statement_count - before < 300


async def test_another_writer_gets_its_turn_in_the_middle_of_an_apply(catalog: Catalog) -> None:
    """A key can be revoked before the apply is done."""
    customer = await new_customer(catalog)
    begun = asyncio.Event()
    revoked: list[int] = []

    async def revoke() -> None:
        await begun.wait()
        async with catalog.edit("test:eve") as edit:
            await edit.set_key_disabled(customer.key.id, disabled=True)
        revoked.append(edit.revision)

    now = to_datetime(catalog.clock.now_us())
    wanted, _ = document.parse_document(many(400, 10).encode(), "plans.yaml", now)
    revoking = asyncio.create_task(revoke())
    await apply_document(catalog, wanted, ACTOR, on_progress=lambda _done, _total: begun.set())
    await revoking
    (last,) = (await rows(catalog.database, "SELECT value FROM revision"))[0]
    assert revoked[0] < last
    assert (await catalog.get(Key, customer.key.id)).disabled


async def test_concurrent_changes_in_the_middle_of_an_apply_end_as_the_file_says(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state that was read before the first transaction is out of date by then."""
    monkeypatch.setattr(applying, "MAX_CHANGES", 6)
    await apply_text(catalog, many(30, 10))
    last = await catalog.get_by_name_or_id(Tenant, "t0029")
    (plan,) = await catalog.list_for_tenant(Plan, last.id)
    begun = asyncio.Event()

    async def interfere() -> None:
        await begun.wait()
        async with catalog.edit("test:eve") as edit:
            await edit.update(Plan, plan.id, {"limits": "burst=7/minute"})
            await edit.create(Tenant, {"name": "t0030"})

    now = to_datetime(catalog.clock.now_us())
    wanted, _ = document.parse_document(many(31, 20).encode(), "plans.yaml", now)
    interfering = asyncio.create_task(interfere())
    await apply_document(catalog, wanted, ACTOR, on_progress=lambda done, _: begun.set() if done else None)
    await interfering
    assert await apply_text(catalog, many(31, 20)) == []
    assert set((await limits_of(catalog)).values()) == {(20, "GET:/20")}


async def test_an_apply_that_is_interrupted_leaves_whole_tenants_and_is_finished_by_the_next(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "MAX_CHANGES", 6)
    await apply_text(catalog, many(40, 10))
    progress: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        progress.append((done, total))
        if done >= 10 and not working.cancelling():
            working.cancel()

    now = to_datetime(catalog.clock.now_us())
    wanted, _ = document.parse_document(many(40, 20).encode(), "plans.yaml", now)
    working = asyncio.create_task(apply_document(catalog, wanted, ACTOR, on_progress=report))
    with pytest.raises(asyncio.CancelledError):
        await working
    done, total = progress[-1]
    found = list((await limits_of(catalog)).values())
    assert 10 <= done < total == 40
    assert found.count((20, "GET:/20")) == done
    assert found.count((10, "GET:/10")) == total - done
    assert len(await preview_text(catalog, many(40, 20))) > 0
    await apply_text(catalog, many(40, 20))
    assert set((await limits_of(catalog)).values()) == {(20, "GET:/20")}


@one_database
async def test_what_is_wrong_at_the_end_of_a_large_file_is_refused_before_anything_is_written(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "MAX_CHANGES", 1)
    (error,) = await apply_errors(catalog, many(20, 10) + "  - {name: last, default_plan: nope}\n")
    assert "tenants[20].default_plan: unknown plan 'nope'" in error


async def test_a_key_moves_to_another_tenant_in_one_transaction(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is valid at all times, even if other tenants are between the two in the file."""
    monkeypatch.setattr(applying, "MAX_CHANGES", 1)
    customer = await new_customer(catalog)
    given = (
        (await export_text(catalog)).partition("keys:\n")[2].partition("    overrides:")[0].replace("plan: free", "")
    )
    await apply_text(
        catalog,
        "tenants:\n  - {name: acme, default_plan: free, keys: []}\n  - {name: between}\n  - name: other\n    keys:\n"
        + given,
    )
    entries = await audit_of(catalog, entity_id=customer.key.id)
    assert [entry.action for entry in entries][-2:] == ["key.delete", "key.create"]
    assert entries[-1].at == entries[-2].at
    revisions = await rows(catalog.database, "SELECT revision FROM outbox ORDER BY revision")
    assert len(revisions) == 1 + 3  # the customer; the two together, and the one between
    assert len({number for (number,) in revisions}) == 1 + 2
