"""An index by state and end, for retention: how long a finished task is kept is the sweeper's to say, and may change.

Until now the time was written into `due_at` when the task ended, and `task_retention` found what was past it. Releases
that still do so read the table instead, now and then, until they are gone; they remove nothing too early.

While the index is made, the store waits: about a second for a million finished tasks. To let nothing wait, make it
before::

    CREATE INDEX CONCURRENTLY IF NOT EXISTS task_ended ON coatcheck.task (state, finished_at)
     WHERE state IN ('done', 'failed', 'cancelled');
"""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    # First what needs the table for itself, as the next version does too. Behind the lock that makes an index, which
    # lets rows be locked but not written, a transaction of a live replica and this one would wait for each other.
    op.execute("DROP INDEX coatcheck.task_retention")
    op.execute("""
        CREATE INDEX IF NOT EXISTS task_ended ON coatcheck.task (state, finished_at)
         WHERE state IN ('done', 'failed', 'cancelled')
    """)


def downgrade() -> None:
    op.execute("""
        CREATE INDEX task_retention ON coatcheck.task (due_at) WHERE state IN ('done', 'failed', 'cancelled')
    """)
    op.execute("DROP INDEX coatcheck.task_ended")
