"""How long a step took. Its row is written when it ends, so nothing told when it began.

A column without a default is added without reading the table. Rows of older releases have none: how long their steps
took is not known.
"""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.execute("ALTER TABLE coatcheck.journal ADD COLUMN took interval")


def downgrade() -> None:
    op.execute("ALTER TABLE coatcheck.journal DROP COLUMN took")
