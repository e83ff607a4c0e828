"""Add ids of revisions and a timeline, so that processes detect a restored database."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Move the row to a new table, since SQLite can't add a NOT NULL column without a default.

    The row receives a random id, so that two copies of a database differ after each is upgraded.
    """
    value = op.get_bind().scalar(sa.text("SELECT value FROM revision"))
    op.drop_table("revision")
    table = _create(
        sa.Column("change_id", sa.BigInteger, nullable=False),
        sa.Column("previous_id", sa.BigInteger, nullable=False),
        sa.Column("timeline", sa.BigInteger, nullable=False),
    )
    if value is not None:
        row = {"id": 1, "value": value, "change_id": secrets.randbits(62) | 1, "previous_id": 0, "timeline": 0}
        op.bulk_insert(table, [row])


def downgrade() -> None:
    value = op.get_bind().scalar(sa.text("SELECT value FROM revision"))
    op.drop_table("revision")
    table = _create()
    if value is not None:
        op.bulk_insert(table, [{"id": 1, "value": value}])


def _create(*columns: sa.Column[int]) -> sa.Table:
    return op.create_table(
        "revision",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        *columns,
        sa.CheckConstraint("id = 1", name=op.f("ck_revision_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_revision")),
    )
