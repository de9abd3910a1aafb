"""Seals: signed roots over what the histories of tasks stand at, so that later changes to them can be told.

`seal` is insert-only. Its number is the primary key, so two sweepers cannot make two different seals of one number.
`horizon` says up to which transaction it covers history; `trimmed_to`, up to which seal history may be gone. The key
that signs is never in the database: only its name is.

`seal_leaf` holds what each seal's root is made of: one row for each task that had changed, in the order of the tree.
`seal_sink` says up to which seal each place outside has them. It is the sweeper's note to itself and proves nothing.
`history_pruned` finds the histories of removed tasks, which go after a while, too.
"""

from alembic import op

revision = "0005"
down_revision = "0004"

UPGRADE = """
CREATE TABLE coatcheck.seal (
    number          bigint PRIMARY KEY,
    sealed_at       timestamptz NOT NULL,
    horizon         xid8 NOT NULL,
    task_count      integer NOT NULL,
    entry_count     bigint NOT NULL,
    trimmed_to      bigint NOT NULL,
    root            bytea NOT NULL,
    previous        bytea NOT NULL,
    key_id          text NOT NULL,
    signature       bytea NOT NULL,
    token           bytea
);

CREATE TABLE coatcheck.seal_leaf (
    seal            bigint NOT NULL,
    place           integer NOT NULL,
    task_id         uuid NOT NULL,
    entry_count     integer NOT NULL,
    head            bytea NOT NULL,
    PRIMARY KEY (seal, place)
);

CREATE INDEX seal_leaf_task ON coatcheck.seal_leaf (task_id, seal);

CREATE INDEX history_pruned ON coatcheck.history (at) WHERE kind = 'pruned';

CREATE TABLE coatcheck.seal_sink (
    sink            text PRIMARY KEY,
    number          bigint NOT NULL,
    written_at      timestamptz NOT NULL DEFAULT clock_timestamp()
);
"""


def upgrade() -> None:
    for statement in UPGRADE.split(";\n"):
        if statement.strip():
            op.execute(statement)


def downgrade() -> None:
    op.execute("DROP INDEX coatcheck.history_pruned")
    op.execute("DROP TABLE coatcheck.seal_sink, coatcheck.seal_leaf, coatcheck.seal")
