"""The tables of the catalog. Constraints enforce the relational invariants, so that a bug in Python can't break them.

A row that refers to a plan does so together with its tenant, so it can't refer to another tenant's plan. The operator
is the tenant with the id `operator`; it has only plans, a mode and a time zone.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    true,
)
from sqlalchemy.engine import Dialect

from limitforge.catalog.model import KeyType
from limitforge.core.check import Failure
from limitforge.core.limits import Mode, Priority

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

Id = String(64)
Name = String(64)
Text512 = String(512)  # resources, subjects and actors
AutoId = BigInteger().with_variant(Integer, "sqlite")  # SQLite auto-increments only INTEGER


class UtcDateTime(TypeDecorator[datetime]):
    """A time with a time zone, in UTC. SQLite stores no zone, so values read from it are marked as UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _one_of(column: str, values: Any) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


def _tenant_columns() -> tuple[Column[Any], CheckConstraint]:
    """Return the owner of a row, which is a tenant and not the operator."""
    return (
        Column("tenant_id", Id, ForeignKey("tenants.id"), nullable=False),
        CheckConstraint("tenant_id <> 'operator'", name="not_the_operator"),
    )


def _plan_reference(column: str, owner: str = "tenant_id") -> ForeignKeyConstraint:
    return ForeignKeyConstraint([column, owner], ["plans.id", "plans.tenant_id"])


def _version_columns() -> tuple[Any, ...]:
    return (
        Column("version", Integer, nullable=False),
        Column("created_at", UtcDateTime, nullable=False),
        Column("updated_at", UtcDateTime, nullable=False),
        CheckConstraint("version >= 1", name="version"),
    )


_FAILURE_MODES = tuple(failure for failure in Failure if failure is not Failure.RAISE)

revision = Table(
    "revision",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("value", BigInteger, nullable=False),
    Column("change_id", BigInteger, nullable=False),
    Column("previous_id", BigInteger, nullable=False),
    Column("timeline", BigInteger, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)
"""Counts the edits. Each edit first takes the next number and holds the lock of this row until it commits, so revisions
become visible in order and without gaps. `change_id` is the random id of the last edit, `previous_id` that of the edit
before."""

tenants = Table(
    "tenants",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Name, nullable=False, unique=True),
    Column("mode", String(16), nullable=False),
    Column("time_zone", Name, nullable=False),
    Column("failure", String(16)),
    Column("priority", String(2)),
    Column("default_plan_id", Id),
    Column("lanes", JSON, nullable=False),
    Column("suspended", Boolean, nullable=False),
    Column("revision", BigInteger, nullable=False),
    *_version_columns(),
    ForeignKeyConstraint(["default_plan_id", "id"], ["plans.id", "plans.tenant_id"], use_alter=True),
    CheckConstraint("name <> ''", name="name"),
    CheckConstraint(
        "id <> 'operator' OR (name = 'operator' AND NOT suspended AND failure IS NULL AND priority IS NULL)",
        name="operator",
    ),
    _one_of("mode", Mode),
    _one_of("failure", _FAILURE_MODES),
    _one_of("priority", Priority),
)

plans = Table(
    "plans",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", Id, ForeignKey("tenants.id"), nullable=False),
    Column("name", Name, nullable=False),
    *_version_columns(),
    UniqueConstraint("tenant_id", "name"),
    UniqueConstraint("id", "tenant_id"),
    CheckConstraint("name <> ''", name="name"),
)

plan_versions = Table(
    "plan_versions",
    metadata,
    Column("plan_id", Id, ForeignKey("plans.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("limits", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("created_by", Text512, nullable=False),
    CheckConstraint("version >= 1", name="version"),
)

policies = Table(
    "policies",
    metadata,
    Column("id", Id, primary_key=True),
    *_tenant_columns(),
    Column("resource", Text512, nullable=False),
    Column("pattern", Text512, nullable=False),
    Column("plan_id", Id, nullable=False),
    Column("mode", String(16), nullable=False),
    Column("failure", String(16)),
    Column("priority", String(2)),
    Column("shadow_plan_id", Id),
    *_version_columns(),
    _plan_reference("plan_id"),
    _plan_reference("shadow_plan_id"),
    UniqueConstraint("tenant_id", "pattern"),
    _one_of("mode", Mode),
    _one_of("failure", _FAILURE_MODES),
    _one_of("priority", Priority),
)
"""`pattern` is the resource without the names of its parameters, so two policies can't match the same resources."""

keys = Table(
    "keys",
    metadata,
    Column("id", Id, primary_key=True),
    *_tenant_columns(),
    Column("name", Name, nullable=False),
    Column("type", String(16), nullable=False),
    Column("plan_id", Id),
    Column("scopes", JSON, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("metadata", JSON, nullable=False),
    Column("disabled", Boolean, nullable=False),
    Column("last_used_at", UtcDateTime),
    *_version_columns(),
    Column("may_name_plans", Boolean, nullable=False, server_default=true()),
    _plan_reference("plan_id"),
    _one_of("type", KeyType),
    Index(None, "tenant_id", "id"),
)
"""`may_name_plans` is the scope `plans`. It is not in the list `scopes`: earlier releases would reject the key."""

tokens = Table(
    "tokens",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Name, nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    Column("tenant_id", Id, ForeignKey("tenants.id")),
    Column("expires_at", UtcDateTime),
    Column("last_used_at", UtcDateTime),
    *_version_columns(),
)

secrets = Table(
    "secrets",
    metadata,
    Column("hash", String(64), primary_key=True),
    Column("key_id", Id, ForeignKey("keys.id"), index=True),
    Column("token_id", Id, ForeignKey("tokens.id"), index=True),
    Column("pepper", Integer, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("created_at", UtcDateTime, nullable=False),
    CheckConstraint("(key_id IS NULL) <> (token_id IS NULL)", name="of_one"),
    CheckConstraint("length(hash) = 64", name="hash"),
    CheckConstraint("pepper >= 1", name="pepper"),
)

overrides = Table(
    "overrides",
    metadata,
    Column("id", Id, primary_key=True),
    *_tenant_columns(),
    Column("resource", Text512, nullable=False),
    Column("subject", Text512, nullable=False),
    Column("limits", JSON, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
    Column("reason", Text, nullable=False),
    Column("set_by", Text512, nullable=False),
    *_version_columns(),
    UniqueConstraint("tenant_id", "subject", "resource"),
    Index(None, "expires_at"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", AutoId, primary_key=True, autoincrement=True),
    Column("at", UtcDateTime, nullable=False),
    Column("actor", Text512, nullable=False),
    Column("action", Name, nullable=False),
    Column("tenant_id", Id),
    Column("entity_id", Id, nullable=False),
    Column("before", JSON(none_as_null=True)),
    Column("after", JSON(none_as_null=True)),
    Index(None, "tenant_id", "id"),
    Index(None, "entity_id", "id"),
    Index(None, "action", "tenant_id"),
)
"""Append-only: triggers of the migration refuse any update or deletion."""

outbox = Table(
    "outbox",
    metadata,
    Column("revision", BigInteger, primary_key=True),
    Column("tenant_id", Id, primary_key=True),
    Column("change", JSON, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("published", Boolean, nullable=False),
    Index(None, "published", "revision"),
)
"""Announcements of the edits of the last day, for all processes; `change` is an `Announcement`.

It has no foreign keys, since rows outlive a deleted tenant.
"""

usage = Table(
    "usage",
    metadata,
    Column("hour", UtcDateTime, primary_key=True),
    Column("tenant_id", Id, primary_key=True),
    Column("key_id", Id, primary_key=True),
    Column("allowed", BigInteger, nullable=False),
    Column("denied", BigInteger, nullable=False),
    Column("would_deny", BigInteger, nullable=False),
    Column("degraded", BigInteger, nullable=False),
    Index(None, "tenant_id", "hour"),
)
"""Decisions per key and hour. It has no foreign keys, since rows outlive a deleted key or tenant."""

stored_responses = Table(
    "creations",
    metadata,
    Column("token_id", Id, primary_key=True),
    Column("idempotency_key", String(128), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("answer", JSON, nullable=False),
    Column("at", UtcDateTime, nullable=False, index=True),
)
"""Responses to create requests with an idempotency key, without secrets.

The table is called `creations` in the database, as in the first releases.
"""
