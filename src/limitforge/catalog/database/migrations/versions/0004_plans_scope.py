"""Add the scope `plans` of keys, as a column.

During a rolling upgrade, processes of the earlier release would reject every key with a new word in `keys.scopes`. They
neither read nor write this column: keys that they create get the default, and keys that they change keep their value.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("keys", sa.Column("may_name_plans", sa.Boolean, nullable=False, server_default=sa.true()))


def downgrade() -> None:
    """Drop the column, so that every key may name a plan again."""
    op.drop_column("keys", "may_name_plans")
