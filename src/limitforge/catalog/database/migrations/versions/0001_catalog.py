"""The catalog: tenants, plans and their versions, policies, keys, tokens, overrides, audit log, outbox.

Migrations never change: this one states the tables as they were then, and does not import `tables.py`.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

MODES = "mode IN ('off', 'monitor', 'on')"
FAILURES = "failure IN ('open', 'closed', 'local')"
OPERATOR = "id <> 'operator' OR (name = 'operator' AND NOT suspended AND failure IS NULL AND priority IS NULL)"
PRIORITIES = "priority IN ('P0', 'P1', 'P2', 'P3')"


def upgrade() -> None:
    """Create the tables, then the triggers, which differ between SQLite and Postgres."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    _create_revision()
    _create_tenants(is_sqlite=is_sqlite)
    _create_plans(is_sqlite=is_sqlite)
    _create_policies()
    _create_credentials()
    _create_overrides()
    _create_logs()
    _forbid_changes_of_the_audit_log(is_sqlite=is_sqlite)
    now = sa.func.now() if not is_sqlite else sa.text("CURRENT_TIMESTAMP")
    op.execute(sa.table("revision", sa.column("id"), sa.column("value")).insert().values(id=1, value=0))
    names = ("id", "name", "mode", "time_zone", "lanes", "suspended", "revision", "version", "created_at", "updated_at")
    operator = sa.table("tenants", *(sa.column(name) for name in names))
    values = ("operator", "operator", "on", "UTC", sa.text("'1'"), sa.false(), 0, 1, now, now)
    op.execute(operator.insert().values(dict(zip(names, values, strict=True))))


def downgrade() -> None:
    """Drop all tables with their content."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    op.execute("UPDATE tenants SET default_plan_id = NULL")
    if not is_sqlite:
        op.drop_constraint("fk_tenants_default_plan_id", "tenants", type_="foreignkey")
    for table in ("outbox", "audit", "overrides", "secrets", "tokens", "keys", "policies", "plan_versions", "plans"):
        op.drop_table(table)
    op.drop_table("tenants")
    op.drop_table("revision")
    if not is_sqlite:
        op.execute("DROP FUNCTION audit_is_append_only")


def _moment(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _bookkeeping() -> tuple[Any, ...]:
    return (
        sa.Column("version", sa.Integer, nullable=False),
        _moment("created_at"),
        _moment("updated_at"),
    )


def _check(table: str, name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{table}_{name}"))


def _refers(table: str, columns: list[str], to: list[str]) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(columns, to, name=op.f(f"fk_{table}_{columns[0]}"))


def _primary(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=op.f(f"pk_{table}"))


def _unique(table: str, *columns: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(*columns, name=op.f(f"uq_{table}_{'_'.join(columns)}"))


def _index(table: str, *columns: str) -> None:
    op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, list(columns))


def _create_revision() -> None:
    op.create_table(
        "revision",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        _primary("revision", "id"),
        _check("revision", "one_row", "id = 1"),
    )


def _create_tenants(*, is_sqlite: bool) -> None:
    # Tenants and plans refer to each other. SQLite can't add a constraint later, but accepts one to a table that does
    # not exist yet.
    circular = _refers("tenants", ["default_plan_id", "id"], ["plans.id", "plans.tenant_id"])
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("time_zone", sa.String(64), nullable=False),
        sa.Column("failure", sa.String(16)),
        sa.Column("priority", sa.String(2)),
        sa.Column("default_plan_id", sa.String(64)),
        sa.Column("lanes", sa.JSON, nullable=False),
        sa.Column("suspended", sa.Boolean, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        *_bookkeeping(),
        _primary("tenants", "id"),
        _unique("tenants", "name"),
        *([circular] if is_sqlite else []),
        _check("tenants", "version", "version >= 1"),
        _check("tenants", "name", "name <> ''"),
        _check("tenants", "operator", OPERATOR),
        _check("tenants", "mode", MODES),
        _check("tenants", "failure", FAILURES),
        _check("tenants", "priority", PRIORITIES),
    )


def _create_plans(*, is_sqlite: bool) -> None:
    op.create_table(
        "plans",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        *_bookkeeping(),
        _primary("plans", "id"),
        _refers("plans", ["tenant_id"], ["tenants.id"]),
        _unique("plans", "tenant_id", "name"),
        _unique("plans", "id", "tenant_id"),
        _check("plans", "version", "version >= 1"),
        _check("plans", "name", "name <> ''"),
    )
    if not is_sqlite:
        name = op.f("fk_tenants_default_plan_id")
        op.create_foreign_key(name, "tenants", "plans", ["default_plan_id", "id"], ["id", "tenant_id"])
    op.create_table(
        "plan_versions",
        sa.Column("plan_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("limits", sa.JSON, nullable=False),
        _moment("created_at"),
        sa.Column("created_by", sa.String(512), nullable=False),
        _primary("plan_versions", "plan_id", "version"),
        _refers("plan_versions", ["plan_id"], ["plans.id"]),
        _check("plan_versions", "version", "version >= 1"),
    )


def _create_policies() -> None:
    op.create_table(
        "policies",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("resource", sa.String(512), nullable=False),
        sa.Column("pattern", sa.String(512), nullable=False),
        sa.Column("plan_id", sa.String(64), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("failure", sa.String(16)),
        sa.Column("priority", sa.String(2)),
        sa.Column("shadow_plan_id", sa.String(64)),
        *_bookkeeping(),
        _primary("policies", "id"),
        _refers("policies", ["tenant_id"], ["tenants.id"]),
        _refers("policies", ["plan_id", "tenant_id"], ["plans.id", "plans.tenant_id"]),
        _refers("policies", ["shadow_plan_id", "tenant_id"], ["plans.id", "plans.tenant_id"]),
        _unique("policies", "tenant_id", "pattern"),
        _check("policies", "not_the_operator", "tenant_id <> 'operator'"),
        _check("policies", "version", "version >= 1"),
        _check("policies", "mode", MODES),
        _check("policies", "failure", FAILURES),
        _check("policies", "priority", PRIORITIES),
    )


def _create_credentials() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("plan_id", sa.String(64)),
        sa.Column("scopes", sa.JSON, nullable=False),
        _moment("expires_at", nullable=True),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        _moment("last_used_at", nullable=True),
        *_bookkeeping(),
        _primary("keys", "id"),
        _refers("keys", ["tenant_id"], ["tenants.id"]),
        _refers("keys", ["plan_id", "tenant_id"], ["plans.id", "plans.tenant_id"]),
        _check("keys", "not_the_operator", "tenant_id <> 'operator'"),
        _check("keys", "version", "version >= 1"),
        _check("keys", "type", "type IN ('live', 'test')"),
    )
    _index("keys", "tenant_id", "id")
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("tenant_id", sa.String(64)),
        _moment("expires_at", nullable=True),
        _moment("last_used_at", nullable=True),
        *_bookkeeping(),
        _primary("tokens", "id"),
        _refers("tokens", ["tenant_id"], ["tenants.id"]),
        _unique("tokens", "name"),
        _check("tokens", "version", "version >= 1"),
    )
    op.create_table(
        "secrets",
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(64)),
        sa.Column("token_id", sa.String(64)),
        sa.Column("pepper", sa.Integer, nullable=False),
        _moment("expires_at", nullable=True),
        _moment("created_at"),
        _primary("secrets", "hash"),
        _refers("secrets", ["key_id"], ["keys.id"]),
        _refers("secrets", ["token_id"], ["tokens.id"]),
        _check("secrets", "of_one", "(key_id IS NULL) <> (token_id IS NULL)"),
        _check("secrets", "hash", "length(hash) = 64"),
        _check("secrets", "pepper", "pepper >= 1"),
    )
    _index("secrets", "key_id")
    _index("secrets", "token_id")


def _create_overrides() -> None:
    op.create_table(
        "overrides",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("resource", sa.String(512), nullable=False),
        sa.Column("subject", sa.String(512), nullable=False),
        sa.Column("limits", sa.JSON, nullable=False),
        _moment("expires_at"),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("set_by", sa.String(512), nullable=False),
        *_bookkeeping(),
        _primary("overrides", "id"),
        _refers("overrides", ["tenant_id"], ["tenants.id"]),
        _unique("overrides", "tenant_id", "subject", "resource"),
        _check("overrides", "not_the_operator", "tenant_id <> 'operator'"),
        _check("overrides", "version", "version >= 1"),
    )
    _index("overrides", "expires_at")


def _create_logs() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=True, nullable=False),
        _moment("at"),
        sa.Column("actor", sa.String(512), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64)),
        sa.Column("entity_id", sa.String(64), nullable=False),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
        _primary("audit", "id"),
    )
    _index("audit", "tenant_id", "id")
    _index("audit", "entity_id", "id")
    _index("audit", "action", "tenant_id")
    op.create_table(
        "outbox",
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("change", sa.JSON, nullable=False),
        _moment("at"),
        sa.Column("published", sa.Boolean, nullable=False),
        _primary("outbox", "revision", "tenant_id"),
    )
    _index("outbox", "published", "revision")


def _forbid_changes_of_the_audit_log(*, is_sqlite: bool) -> None:
    if is_sqlite:
        op.execute(  # a REPLACE deletes the old row without firing its triggers
            "CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit "
            "WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id) "
            "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit "
                "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()"
    )
