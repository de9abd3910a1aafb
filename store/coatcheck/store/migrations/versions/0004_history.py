"""What happened to each task, and what people order: a history, rewinds, forks and pauses.

`history` holds one row for each thing that happened to a task, chained by hashes (`chain.py`). It has no foreign key:
it outlives its task. `xid` tells the sealer which transactions are all in. A task's `history` is its level, 0 to 2;
`entry_count` and `head` say where its chain stands. Tasks of older releases have the level 0, and no chain.

`revision` counts how often a task was taken back by order. Journal and calls name the replica and the epoch that
wrote them.

Columns with a constant default are added without reading the tables. The new constraints hold for what is written from
now on.
"""

from alembic import op

revision = "0004"
down_revision = "0003"

UPGRADE = """
ALTER TABLE coatcheck.task
    ADD COLUMN history smallint NOT NULL DEFAULT 0,
    ADD COLUMN is_pausing boolean NOT NULL DEFAULT false,
    ADD COLUMN entry_count integer NOT NULL DEFAULT 0,
    ADD COLUMN revision integer NOT NULL DEFAULT 0,
    ADD COLUMN forked_at integer,
    ADD COLUMN forked_from uuid,
    ADD COLUMN head bytea,
    DROP CONSTRAINT task_state_is_known,
    DROP CONSTRAINT task_has_a_waker,
    ADD CONSTRAINT task_state_is_known CHECK
        (state IN ('running', 'parked', 'retrying', 'held', 'paused', 'done', 'failed', 'cancelled')) NOT VALID,
    ADD CONSTRAINT task_has_a_waker CHECK
        (state NOT IN ('running', 'retrying', 'held', 'paused') OR (due_at IS NOT NULL AND look_at IS NOT NULL))
        NOT VALID,
    ADD CONSTRAINT task_chain_has_a_head CHECK (entry_count = 0 OR head IS NOT NULL) NOT VALID;

ALTER TABLE coatcheck.call ADD COLUMN epoch integer, ADD COLUMN replica text;
ALTER TABLE coatcheck.journal ADD COLUMN epoch integer, ADD COLUMN replica text;

CREATE TABLE coatcheck.history (
    task_id         uuid NOT NULL,
    at              timestamptz NOT NULL,
    xid             xid8 NOT NULL DEFAULT pg_current_xact_id(),
    number          integer NOT NULL,
    epoch           integer NOT NULL,
    kind            text NOT NULL,
    replica         text NOT NULL,
    actor           text,
    key             text,
    data            bytea,
    digest          bytea NOT NULL,
    hash            bytea NOT NULL,
    PRIMARY KEY (task_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX history_xid ON coatcheck.history (xid);
CREATE INDEX history_at ON coatcheck.history USING brin (at);
"""


def upgrade() -> None:
    for statement in UPGRADE.split(";\n"):
        if statement.strip():
            op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TABLE coatcheck.history")
    op.execute("ALTER TABLE coatcheck.journal DROP COLUMN epoch, DROP COLUMN replica")
    op.execute("ALTER TABLE coatcheck.call DROP COLUMN epoch, DROP COLUMN replica")
    op.execute("""
        ALTER TABLE coatcheck.task
            DROP CONSTRAINT task_state_is_known,
            DROP CONSTRAINT task_has_a_waker,
            DROP COLUMN history, DROP COLUMN is_pausing, DROP COLUMN entry_count, DROP COLUMN revision,
            DROP COLUMN forked_at, DROP COLUMN forked_from, DROP COLUMN head,
            ADD CONSTRAINT task_state_is_known CHECK
                (state IN ('running', 'parked', 'retrying', 'held', 'done', 'failed', 'cancelled')) NOT VALID,
            ADD CONSTRAINT task_has_a_waker CHECK
                (state NOT IN ('running', 'retrying', 'held') OR (due_at IS NOT NULL AND look_at IS NOT NULL))
                NOT VALID
    """)
