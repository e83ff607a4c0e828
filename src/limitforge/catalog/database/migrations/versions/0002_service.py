"""Tables of the service: usage per hour, and responses to create requests with an idempotency key."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("allowed", sa.BigInteger, nullable=False),
        sa.Column("denied", sa.BigInteger, nullable=False),
        sa.Column("would_deny", sa.BigInteger, nullable=False),
        sa.Column("degraded", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("hour", "tenant_id", "key_id", name=op.f("pk_usage")),
    )
    op.create_index(op.f("ix_usage_tenant_id_hour"), "usage", ["tenant_id", "hour"])
    op.create_table(
        "creations",
        sa.Column("token_id", sa.String(64), nullable=False),
        sa.Column("idempotency_key", sa.String(128), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("answer", sa.JSON, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("token_id", "idempotency_key", name=op.f("pk_creations")),
    )
    op.create_index(op.f("ix_creations_at"), "creations", ["at"])


def downgrade() -> None:
    """Drop both tables. Usage of the last 30 days is lost."""
    op.drop_table("creations")
    op.drop_table("usage")
