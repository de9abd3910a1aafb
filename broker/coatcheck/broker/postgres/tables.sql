-- Version 1 of the tables.
--
--     queue      a name and its rules. Deleted: the name goes at once, the row when its messages are cleared
--     broadcast  a name that fans out; `binding` says to which queues
--     session    one connection of one process. A message that is out belongs to a session, and goes back with it
--     consumer   a session that takes from a queue, in the order they came; the first is active where only one may be
--     message    ready: no session holds it, and it is due. Held: until its session acks or is gone
--
-- `message` has no foreign keys: checking one per row costs more than writing the row. Instead a deleted queue's row
-- stays for as long as a publish that still saw its name may be under way.
--
-- Each state of a message has a partial index of its own, so a fetch reads what is ready and nothing else. Going from
-- ready to held leaves one and enters the other; such an update is never HOT, so there is no point in a fill factor, and
-- vacuum is told to come early instead.

CREATE TABLE coatcheck_broker.schema_version (version integer NOT NULL);

CREATE TABLE coatcheck_broker.queue (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text CONSTRAINT queue_name_is_unique UNIQUE,
    delivery_limit integer,
    dead text,
    is_single_active boolean NOT NULL DEFAULT false,
    owner uuid,
    expires interval,
    abandoned_at timestamptz,
    deleted_at timestamptz,
    CONSTRAINT queue_loses_its_name_when_deleted CHECK ((name IS NULL) = (deleted_at IS NOT NULL))
);
CREATE INDEX queue_by_owner ON coatcheck_broker.queue (owner) WHERE owner IS NOT NULL;
CREATE INDEX queue_deleted ON coatcheck_broker.queue (id) WHERE deleted_at IS NOT NULL;

CREATE TABLE coatcheck_broker.broadcast (name text PRIMARY KEY);

CREATE TABLE coatcheck_broker.binding (
    broadcast text REFERENCES coatcheck_broker.broadcast ON DELETE CASCADE,
    queue_id bigint REFERENCES coatcheck_broker.queue ON DELETE CASCADE,
    PRIMARY KEY (broadcast, queue_id)
);
CREATE INDEX binding_by_queue ON coatcheck_broker.binding (queue_id);

CREATE TABLE coatcheck_broker.session (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    process uuid NOT NULL,
    name text NOT NULL,
    lease interval NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);

CREATE TABLE coatcheck_broker.consumer (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id bigint NOT NULL REFERENCES coatcheck_broker.queue ON DELETE CASCADE,
    session_id integer NOT NULL REFERENCES coatcheck_broker.session ON DELETE CASCADE
);
CREATE INDEX consumer_in_line ON coatcheck_broker.consumer (queue_id, id);
CREATE INDEX consumer_by_session ON coatcheck_broker.consumer (session_id);

CREATE TABLE coatcheck_broker.message (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id bigint NOT NULL,
    due_at timestamptz,
    holder integer,
    delivery_count integer NOT NULL DEFAULT 0,
    reason text,
    origin text,
    head bytea NOT NULL,
    body bytea NOT NULL,
    CONSTRAINT message_held_is_not_delayed CHECK (holder IS NULL OR due_at IS NULL)
) WITH (
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.2, autovacuum_analyze_threshold = 5000
);
ALTER TABLE coatcheck_broker.message ALTER COLUMN body SET STORAGE EXTERNAL, ALTER COLUMN head SET STORAGE EXTERNAL;
CREATE INDEX message_ready ON coatcheck_broker.message (queue_id, id) WHERE holder IS NULL AND due_at IS NULL;
CREATE INDEX message_later ON coatcheck_broker.message (queue_id, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX message_held ON coatcheck_broker.message (holder) WHERE holder IS NOT NULL;

INSERT INTO coatcheck_broker.schema_version VALUES (1);
