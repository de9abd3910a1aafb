"""The three tables: task, call, journal.

`due_at` is a fact (when a lease, a retry time or a call's deadline is over); `look_at` is when the sweeper should next
look at the row, so that it needs one index per table and a row it dealt with stays out of its way for a while. A row
that needs nobody has no `look_at`: a parked task, a finished one whose reply is out. A finished one goes at `due_at`.
Postgres can keep years that Python cannot read; one such row would fail whatever reads it with others.

The order of columns is for the disk: what has a fixed width comes first, so that nothing is padded; then what changes;
then what never does, the widest of it first. An update whose new version fits on the page of the old one logs only what
lies between the first and the last byte that differ, and the request is not among that. Little room is left for that
on a page: most updates move a row in an index, so they cannot stay in place, and a parked task pays for the room.
"""

from alembic import op

revision = "0001"
down_revision = None

TABLES = """
CREATE TABLE coatcheck.task (
    id              uuid PRIMARY KEY,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at     timestamptz,
    due_at          timestamptz,
    look_at         timestamptz,
    epoch           integer NOT NULL,
    checkpoint      integer NOT NULL DEFAULT 0,
    seq             integer NOT NULL DEFAULT 0,
    attempt         integer NOT NULL DEFAULT 1,
    pickups         integer NOT NULL DEFAULT 0,
    is_final_sent   boolean NOT NULL DEFAULT false,
    state           text NOT NULL,
    trigger         text,
    wait_calls      uuid[],
    wait_groups     integer[],
    wait_needs      integer[],
    value           bytea,
    traceback       text,
    progress        jsonb,
    labels          jsonb,
    request         bytea NOT NULL,
    service         text NOT NULL,
    handler         text,
    version         text NOT NULL,
    identity        text,
    digest          bytea NOT NULL,
    correlation_id  text,
    addresses       jsonb NOT NULL DEFAULT '[]',
    traceparent     text,
    tracestate      text,
    caller_subject  text,
    caller_claims   jsonb,
    CONSTRAINT task_state_is_known CHECK
        (state IN ('running', 'parked', 'retrying', 'held', 'done', 'failed', 'cancelled')),
    CONSTRAINT task_due_at_can_be_read CHECK (due_at < '9999-01-01Z'),
    CONSTRAINT task_has_a_waker CHECK
        (state NOT IN ('running', 'retrying', 'held') OR (due_at IS NOT NULL AND look_at IS NOT NULL)),
    CONSTRAINT task_parked_waits_for_something CHECK
        (state <> 'parked' OR coalesce(cardinality(wait_calls), 0) > 0),
    CONSTRAINT task_ended_has_a_value CHECK
        (state NOT IN ('done', 'failed', 'cancelled')
         OR (value IS NOT NULL AND finished_at IS NOT NULL AND due_at IS NOT NULL))
) WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX task_look_at ON coatcheck.task (look_at) WHERE look_at IS NOT NULL;
CREATE INDEX task_retention ON coatcheck.task (due_at) WHERE state IN ('done', 'failed', 'cancelled');
CREATE INDEX task_correlation_id ON coatcheck.task (correlation_id) WHERE correlation_id IS NOT NULL;

CREATE TABLE coatcheck.call (
    id              uuid PRIMARY KEY,
    task_id         uuid NOT NULL REFERENCES coatcheck.task (id),
    opened_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    closed_at       timestamptz,
    hard_due_at     timestamptz,
    due_at          timestamptz,
    look_at         timestamptz,
    idle            interval,
    checkpoint      integer NOT NULL,
    seq             integer,
    is_sent         boolean NOT NULL DEFAULT false,
    is_forgotten    boolean NOT NULL DEFAULT false,
    state           text NOT NULL,
    value           bytea,
    progress        jsonb,
    body            bytea NOT NULL,
    key             text NOT NULL,
    kind            text NOT NULL,
    name            text NOT NULL,
    digest          bytea NOT NULL,
    peer            text NOT NULL,
    handler         text,
    headers         jsonb NOT NULL,
    CONSTRAINT call_kind_is_known CHECK (kind IN ('call', 'timer', 'send')),
    CONSTRAINT call_state_is_known CHECK (state IN ('open', 'ok', 'failed', 'timed_out', 'closed')),
    CONSTRAINT call_due_at_can_be_read CHECK (greatest(due_at, hard_due_at) < '9999-01-01Z'),
    CONSTRAINT call_open_is_due_or_a_send CHECK (state <> 'open' OR kind = 'send' OR due_at IS NOT NULL),
    CONSTRAINT call_open_is_looked_at CHECK (state <> 'open' OR look_at IS NOT NULL),
    CONSTRAINT call_ended_has_a_place_in_the_order CHECK (state = 'open' OR seq IS NOT NULL)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

CREATE INDEX call_task_id ON coatcheck.call (task_id);
CREATE INDEX call_look_at ON coatcheck.call (look_at) WHERE state = 'open' AND look_at IS NOT NULL;

CREATE TABLE coatcheck.journal (
    task_id         uuid NOT NULL REFERENCES coatcheck.task (id),
    recorded_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    seq             integer NOT NULL,
    checkpoint      integer NOT NULL,
    is_ok           boolean NOT NULL,
    is_forgotten    boolean NOT NULL DEFAULT false,
    value           bytea NOT NULL,
    key             text NOT NULL,
    kind            text NOT NULL,
    name            text NOT NULL,
    digest          bytea NOT NULL,
    PRIMARY KEY (task_id, seq),
    CONSTRAINT journal_kind_is_known CHECK (kind IN ('step', 'note'))
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
"""


def upgrade() -> None:
    for statement in TABLES.split(";\n"):
        if statement.strip():
            op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TABLE coatcheck.journal, coatcheck.call, coatcheck.task")
