"""Until when the requester of a task waits, as its request said (`cc-deadline`): it caps the calls the task makes.

A column without a default is added without reading the table. Older releases leave it
empty: such a task has no deadline.
"""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.execute("ALTER TABLE coatcheck.task ADD COLUMN deadline_at timestamptz")
    op.execute("""
        ALTER TABLE coatcheck.task
          ADD CONSTRAINT task_deadline_at_can_be_read CHECK (deadline_at < '9999-01-01Z') NOT VALID
    """)


def downgrade() -> None:
    op.execute("ALTER TABLE coatcheck.task DROP COLUMN deadline_at")
