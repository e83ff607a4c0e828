"""The invariants of the schema: the database itself refuses plain SQL that would break them."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from limitforge.catalog.database.catalog import Catalog
from limitforge.catalog.database.database import Database
from limitforge.catalog.model import OPERATOR
from limitforge.errors import CatalogError, Conflict
from tests.catalog.factories import (
    execute,
    new_customer,
    new_plan,
    new_policy,
    new_tenant,
    open_database,
    rows,
    table_contents,
)

HASH = "0" * 64

# The words with which both databases refuse a row.
CHECK = "check constraint"
FOREIGN = "foreign key constraint"
UNIQUE = "unique constraint"
NOT_NULL = "not[ -]null constraint"
APPEND_ONLY = "append-only"


async def names(catalog: Catalog) -> dict[str, Any]:
    """Create two tenants with one of everything and a plan of the operator, and return their ids."""
    acme, globex = await new_customer(catalog, "acme"), await new_customer(catalog, "globex")
    other = await new_plan(catalog, acme.tenant.id, "other")
    await new_policy(catalog, other, "POST:*")
    await new_plan(catalog, OPERATOR, "everyone")
    return {
        "acme": acme.tenant.id,
        "plan": acme.plan.id,
        "other_plan": other.id,
        "policy": acme.policy.id,
        "key": acme.key.id,
        "token": acme.token.id,
        "override": acme.override.id,
        "globex": globex.tenant.id,
        "their_plan": globex.plan.id,
        "their_override": globex.override.id,
        "their_token": globex.token.id,
        "hash": HASH,
    }


BREAKS = [
    # -- tenants
    ("a tenant of an unknown mode", CHECK, "UPDATE tenants SET mode = 'maybe' WHERE id = :acme"),
    ("a tenant that raises", CHECK, "UPDATE tenants SET failure = 'raise' WHERE id = :acme"),
    ("a tenant of an unknown priority", CHECK, "UPDATE tenants SET priority = 'P9' WHERE id = :acme"),
    ("a tenant without a mode", NOT_NULL, "UPDATE tenants SET mode = NULL WHERE id = :acme"),
    ("a tenant without a name", NOT_NULL, "UPDATE tenants SET name = NULL WHERE id = :acme"),
    ("a tenant with an empty name", CHECK, "UPDATE tenants SET name = '' WHERE id = :acme"),
    ("two tenants of one name", UNIQUE, "UPDATE tenants SET name = 'globex' WHERE id = :acme"),
    ("a tenant called as the operator", UNIQUE, "UPDATE tenants SET name = 'operator' WHERE id = :acme"),
    ("a tenant at a negative version", CHECK, "UPDATE tenants SET version = -1 WHERE id = :acme"),
    ("a tenant at version 0", CHECK, "UPDATE tenants SET version = 0 WHERE id = :acme"),
    ("another's default plan", FOREIGN, "UPDATE tenants SET default_plan_id = :their_plan WHERE id = :acme"),
    ("a default plan that is not there", FOREIGN, "UPDATE tenants SET default_plan_id = 'none' WHERE id = :acme"),
    ("another's plan for the operator", FOREIGN, "UPDATE tenants SET default_plan_id = :plan WHERE id = 'operator'"),
    ("a tenant removed from under its plans", FOREIGN, "DELETE FROM tenants WHERE id = :acme"),
    ("the operator removed from under its plans", FOREIGN, "DELETE FROM tenants WHERE id = 'operator'"),
    # -- plans
    ("two plans of one name", UNIQUE, "UPDATE plans SET name = 'free' WHERE id = :other_plan"),
    ("a plan with an empty name", CHECK, "UPDATE plans SET name = '' WHERE id = :plan"),
    ("a plan at version 0", CHECK, "UPDATE plans SET version = 0 WHERE id = :plan"),
    ("a plan without a tenant", NOT_NULL, "UPDATE plans SET tenant_id = NULL WHERE id = :plan"),
    ("a plan of an unknown tenant", FOREIGN, "UPDATE plans SET tenant_id = 'none', name = 'x' WHERE id = :other_plan"),
    ("a plan in use given away", FOREIGN, "UPDATE plans SET tenant_id = :globex, name = 'x' WHERE id = :plan"),
    ("a plan in use removed", FOREIGN, "DELETE FROM plans WHERE id = :plan"),
    ("a version of no plan", FOREIGN, "UPDATE plan_versions SET plan_id = 'none' WHERE plan_id = :plan"),
    ("a version 0 of a plan", CHECK, "UPDATE plan_versions SET version = 0 WHERE plan_id = :plan"),
    ("the same version twice", UNIQUE, "UPDATE plan_versions SET plan_id = :plan WHERE plan_id = :other_plan"),
    ("a version without limits", NOT_NULL, "UPDATE plan_versions SET limits = NULL WHERE plan_id = :plan"),
    # -- policies
    ("a policy with another's plan", FOREIGN, "UPDATE policies SET plan_id = :their_plan WHERE id = :policy"),
    ("another's shadow plan", FOREIGN, "UPDATE policies SET shadow_plan_id = :their_plan WHERE id = :policy"),
    ("a policy given away", FOREIGN, "UPDATE policies SET tenant_id = :globex, pattern = 'x' WHERE id = :policy"),
    ("a policy without a plan", NOT_NULL, "UPDATE policies SET plan_id = NULL WHERE id = :policy"),
    ("a policy without a tenant", NOT_NULL, "UPDATE policies SET tenant_id = NULL WHERE id = :policy"),
    ("a policy of the operator", CHECK, "UPDATE policies SET tenant_id = 'operator' WHERE id = :policy"),
    ("a policy of an unknown mode", CHECK, "UPDATE policies SET mode = 'maybe' WHERE id = :policy"),
    ("a policy that raises", CHECK, "UPDATE policies SET failure = 'raise' WHERE id = :policy"),
    ("a policy of an unknown priority", CHECK, "UPDATE policies SET priority = 'P4' WHERE id = :policy"),
    ("two policies of one pattern", UNIQUE, "UPDATE policies SET pattern = 'POST:*' WHERE id = :policy"),
    ("a policy at version 0", CHECK, "UPDATE policies SET version = 0 WHERE id = :policy"),
    # -- keys, tokens and their secrets
    ("a key without a tenant", NOT_NULL, "UPDATE keys SET tenant_id = NULL WHERE id = :key"),
    ("a key of an unknown tenant", FOREIGN, "UPDATE keys SET tenant_id = 'none', plan_id = NULL WHERE id = :key"),
    ("a key of the operator", CHECK, "UPDATE keys SET tenant_id = 'operator', plan_id = NULL WHERE id = :key"),
    ("a key with another's plan", FOREIGN, "UPDATE keys SET plan_id = :their_plan WHERE id = :key"),
    ("a key of an unknown type", CHECK, "UPDATE keys SET type = 'admin' WHERE id = :key"),
    ("a key at version 0", CHECK, "UPDATE keys SET version = 0 WHERE id = :key"),
    ("a key removed from over its secret", FOREIGN, "DELETE FROM keys WHERE id = :key"),
    ("two tokens of one name", UNIQUE, "UPDATE tokens SET name = 'globex-ci' WHERE id = :token"),
    ("a token of an unknown tenant", FOREIGN, "UPDATE tokens SET tenant_id = 'none' WHERE id = :token"),
    ("a token at version 0", CHECK, "UPDATE tokens SET version = 0 WHERE id = :token"),
    ("a token without scopes", NOT_NULL, "UPDATE tokens SET scopes = NULL WHERE id = :token"),
    ("a token removed from over its secret", FOREIGN, "DELETE FROM tokens WHERE id = :token"),
    ("a secret without an owner", CHECK, "UPDATE secrets SET key_id = NULL WHERE key_id = :key"),
    ("a secret of two", CHECK, "UPDATE secrets SET token_id = :token WHERE key_id = :key"),
    ("a secret of an unknown key", FOREIGN, "UPDATE secrets SET key_id = 'none' WHERE key_id = :key"),
    ("a secret of an unknown token", FOREIGN, "UPDATE secrets SET token_id = 'none' WHERE token_id = :token"),
    ("a secret without a pepper", NOT_NULL, "UPDATE secrets SET pepper = NULL WHERE key_id = :key"),
    ("a secret under pepper 0", CHECK, "UPDATE secrets SET pepper = 0 WHERE key_id = :key"),
    ("a secret that is not a hash", CHECK, "UPDATE secrets SET hash = 'abc' WHERE key_id = :key"),
    ("two secrets alike", UNIQUE, "UPDATE secrets SET hash = :hash"),
    # -- overrides
    ("an override without a tenant", NOT_NULL, "UPDATE overrides SET tenant_id = NULL WHERE id = :override"),
    ("an override of an unknown tenant", FOREIGN, "UPDATE overrides SET tenant_id = 'none' WHERE id = :override"),
    ("an override of the operator", CHECK, "UPDATE overrides SET tenant_id = 'operator' WHERE id = :override"),
    ("two overrides of one subject", UNIQUE, "UPDATE overrides SET tenant_id = :acme WHERE id = :their_override"),
    ("an override without an end", NOT_NULL, "UPDATE overrides SET expires_at = NULL WHERE id = :override"),
    ("an override at version 0", CHECK, "UPDATE overrides SET version = 0 WHERE id = :override"),
    # -- logs
    (
        "a second revision",
        CHECK,
        "INSERT INTO revision (id, value, change_id, previous_id, timeline) VALUES (2, 0, 1, 0, 0)",
    ),
    (
        "the revision twice",
        UNIQUE,
        "INSERT INTO revision (id, value, change_id, previous_id, timeline) VALUES (1, 0, 1, 0, 0)",
    ),
    ("no revision", NOT_NULL, "UPDATE revision SET value = NULL"),
    ("an outbox row twice", UNIQUE, "INSERT INTO outbox SELECT * FROM outbox"),
    ("an audit entry changed", APPEND_ONLY, "UPDATE audit SET actor = 'intruder' WHERE id = 1"),
    ("the audit log changed", APPEND_ONLY, "UPDATE audit SET actor = 'intruder'"),
    ("an audit entry removed", APPEND_ONLY, "DELETE FROM audit WHERE id = 1"),
    ("the audit log removed", APPEND_ONLY, "DELETE FROM audit"),
    ("an audit entry twice", f"{UNIQUE}|{APPEND_ONLY}", "INSERT INTO audit SELECT * FROM audit WHERE id = 1"),
    (
        "an audit entry changed by an insert",
        APPEND_ONLY,
        "INSERT INTO audit SELECT * FROM audit WHERE id = 1 ON CONFLICT (id) DO UPDATE SET actor = 'intruder'",
    ),
]


def table_of(statement: str) -> str:
    found = re.match(r"(?:UPDATE|DELETE FROM|INSERT INTO) (\w+)", statement)
    assert found is not None
    return found[1]


async def test_the_database_itself_refuses_invalid_rows(catalog: Catalog, database: Database) -> None:
    known = await names(catalog)
    before = await table_contents(database)
    wrong: dict[str, str] = {}
    for table, breaks in groupby(sorted(BREAKS, key=lambda each: table_of(each[-1])), lambda each: table_of(each[-1])):
        for what, refusal, statement in breaks:
            try:
                await execute(database, statement, **used(known, statement))
            except CatalogError as refused:
                if not re.search(refusal, str(refused), re.IGNORECASE):
                    wrong[what] = str(refused)
                if refusal != APPEND_ONLY and not isinstance(refused, Conflict):
                    wrong[what] = repr(refused)
            else:
                wrong[what] = "was not refused"
        assert await table_contents(database) == before, (table, wrong)
    assert wrong == {}


async def test_the_audit_log_of_postgres_can_not_be_truncated(postgres_url: str) -> None:
    async with open_database(postgres_url) as database:
        await database.upgrade()
        await new_tenant(Catalog(database))
        before = await table_contents(database)
        for statement in ("TRUNCATE audit", "TRUNCATE audit, outbox", "TRUNCATE tenants, audit CASCADE"):
            with pytest.raises(CatalogError, match="append-only"):
                await execute(database, statement)
        assert await table_contents(database) == before


async def test_an_audit_entry_of_sqlite_can_not_be_replaced(tmp_path: Path) -> None:
    """SQLite's REPLACE deletes the old row without firing the trigger that forbids it."""
    values = "(id, at, actor, action, entity_id) VALUES (1, '2020-01-01 00:00:00.000000', 'intruder', 'x', 'x')"
    async with open_database(f"sqlite:///{tmp_path}/catalog.db") as database:
        await database.upgrade()
        await new_tenant(Catalog(database))
        before = await table_contents(database)
        for statement in ("UPDATE OR REPLACE audit SET actor = 'intruder'", f"INSERT OR REPLACE INTO audit {values}"):
            with pytest.raises(CatalogError, match="append-only"):
                await execute(database, statement)
            assert await table_contents(database) == before


async def test_the_operator_stays_what_it_is(database: Database) -> None:
    """It has only plans and a mode, as `tables.py` says."""
    before = await table_contents(database)
    for change in ("name = 'boss'", "suspended = true", "failure = 'open'", "priority = 'P0'"):
        with pytest.raises(Conflict, match=r"(?i)check"):
            await execute(database, f"UPDATE tenants SET {change} WHERE id = 'operator'")  # noqa: S608
        assert await table_contents(database) == before


async def test_valid_rows_are_not_refused(catalog: Catalog, database: Database) -> None:
    """The statements above are refused for their values, not for their form."""
    known = await names(catalog)
    for statement in (
        "UPDATE tenants SET mode = 'off', default_plan_id = NULL WHERE id = 'operator'",
        "UPDATE tenants SET mode = 'off', failure = 'closed', priority = 'P3', version = 7 WHERE id = :acme",
        "UPDATE tenants SET default_plan_id = :other_plan WHERE id = :acme",
        "UPDATE policies SET plan_id = :other_plan, shadow_plan_id = :plan, mode = 'monitor' WHERE id = :policy",
        "UPDATE keys SET plan_id = NULL, type = 'test' WHERE id = :key",
        "UPDATE tokens SET tenant_id = NULL WHERE id = :token",
        "UPDATE secrets SET pepper = 2, hash = :hash WHERE key_id = :key",
        "UPDATE overrides SET subject = 'another' WHERE id = :override",
        "INSERT INTO audit SELECT 1000, at, actor, action, tenant_id, entity_id, before, after FROM audit WHERE id = 1",
    ):
        await execute(database, statement, **used(known, statement))
    assert await rows(database, "SELECT type FROM keys WHERE id = :key", key=known["key"]) == [("test",)]


def used(known: dict[str, Any], statement: str) -> dict[str, Any]:
    return {name: known[name] for name in re.findall(r":(\w+)", statement) if name in known}
