"""The tables, in a schema of their own, made on start. Ten processes may start at once on an empty database.

    queue      a name and its rules. Deleted: the name goes at once, the row when its messages are cleared
    broadcast  a name that fans out; `binding` says to which queues
    session    one connection of one process. A message that is out belongs to a session, and goes back with it
    consumer   who takes from a queue, in the order they came; the first is the active one where only one may be
    message    ready: nobody holds it, and it is due. Held: until its session acks or is gone

`message` has no foreign keys: checking one per row costs more than writing the row. Instead a deleted queue's row stays
for as long as a publish that still saw its name may be under way.

Each state of a message has a partial index of its own, so a fetch reads what is ready and nothing else. Going from
ready to held leaves one and enters the other; such an update is never HOT, so there is no point in a fill factor, and
vacuum is told to come early instead.
"""

from __future__ import annotations

import asyncpg

from coatcheck.errors import InvalidSettings

SCHEMA = "coatcheck_broker"
_LOCK = 0x636F6162  # "coab"

_TABLES = """
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
"""

# Each takes the schema from the version of its place to the next one. Old and new releases run side by side for a
# while, so a later one may only add.
_STEPS = (_TABLES,)
VERSION = len(_STEPS)

# Read from the catalogue's tables: to_regclass() asks a cache, which may not know yet what another process has made
# while we waited for the lock.
_HAS_SCHEMA = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)"
_HAS_VERSION = """
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
     WHERE nspname = $1 AND relname = 'schema_version'
)
"""


async def ensure_schema(connection: asyncpg.Connection, *, declares: bool) -> None:
    """Make the tables, or bring them up to date; without `declares`, only look. Repeating it changes nothing.

    The tables of a newer release will do: it may only have added to them. Raises InvalidSettings if they are not there
    and must not or cannot be made.
    """
    found = await _find_version(connection)
    if found >= VERSION:
        return
    if not declares:
        raise InvalidSettings(
            f"the schema {SCHEMA} {f'is at version {found}, not {VERSION}' if found else 'is not there'}, and this "
            "process was told not to make it; run `coatcheck declare` as a user who may"
        )
    try:
        async with connection.transaction():
            await _upgrade(connection)
    except asyncpg.InsufficientPrivilegeError as exc:
        raise InvalidSettings(
            f"this user may not make the schema {SCHEMA} ({exc}); run `coatcheck declare` as a user who may"
        ) from exc


async def _upgrade(connection: asyncpg.Connection) -> None:
    await connection.execute("SET LOCAL statement_timeout = '10min'")
    await connection.execute("SET LOCAL lock_timeout = '60s'")
    await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
    found = await _find_version(connection)
    if not await connection.fetchval(_HAS_SCHEMA, SCHEMA):
        # Not IF NOT EXISTS: that needs the right to create schemas even where there is nothing to create.
        await connection.execute(f"CREATE SCHEMA {SCHEMA}")
    for step in _STEPS[found:]:
        await connection.execute(step)


async def _find_version(connection: asyncpg.Connection) -> int:
    if not await connection.fetchval(_HAS_VERSION, SCHEMA):
        return 0
    version: int = await connection.fetchval("SELECT version FROM coatcheck_broker.schema_version")
    return version
