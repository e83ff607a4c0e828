"""Whether a key may name the plan that decides, as a column.

A new word in `keys.scopes` would make nodes of the release before refuse every key during a rolling upgrade. They
neither read nor write this column: keys that they create or change get the default, or keep what they have.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("keys", sa.Column("may_name_plans", sa.Boolean, nullable=False, server_default=sa.true()))


def downgrade() -> None:
    """Every key may name a plan again."""
    op.drop_column("keys", "may_name_plans")
