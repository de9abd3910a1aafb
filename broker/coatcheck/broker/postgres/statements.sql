-- Every statement the adapter runs, by name. Tables are named with their schema: the connection searches none but
-- Postgres's own.
--
-- Locks, always in this order: a session's row, then messages. What a session does to the messages it holds begins with
-- a share lock on its own row; a process that takes them away from it locks that row for update first. So a process that
-- was taken for dead finds its row gone, and its late acks and fetches do nothing. `fetch` is the exception: it locks
-- ready messages first, which no session holds.
--
-- Channels are named by queue: a process is woken for the queues it consumes and for no others.


-- --- publishing ---

-- name: publish
-- Route, insert and notify, in one transaction. Gives the places of the messages that had somewhere to go.
WITH
-- The batch, a row for each message.
sent AS MATERIALIZED (
    SELECT * FROM unnest($1::integer[], $2::text[], $3::boolean[], $4::bytea[], $5::bytea[], $6::interval[])
               AS given (place, name, is_broadcast, head, body, delay)
),
-- A row for each queue that a message goes to: one by its name, or all that are bound to a broadcast.
routed AS MATERIALIZED (
    SELECT sent.*, queue.id AS queue_id
      FROM sent JOIN coatcheck_broker.queue ON queue.name = sent.name
     WHERE NOT sent.is_broadcast
    UNION ALL
    SELECT sent.*, binding.queue_id
      FROM sent
      JOIN coatcheck_broker.binding ON binding.broadcast = sent.name
      JOIN coatcheck_broker.queue ON queue.id = binding.queue_id AND queue.deleted_at IS NULL
     WHERE sent.is_broadcast
),
-- The messages get their ids in the order they were sent.
put AS (
    INSERT INTO coatcheck_broker.message (queue_id, due_at, head, body)
    SELECT queue_id, clock_timestamp() + delay, head, body FROM routed ORDER BY place
    RETURNING queue_id
),
-- One notification for each queue, however many messages it got.
told AS MATERIALIZED (
    SELECT pg_notify('coatcheck_broker_' || queue_id, '') FROM (SELECT DISTINCT queue_id FROM put) AS touched
)
SELECT ARRAY(
           SELECT place FROM routed
           UNION
           SELECT place FROM sent JOIN coatcheck_broker.broadcast ON broadcast.name = sent.name WHERE sent.is_broadcast
       ) AS routed,
       (SELECT count(*) FROM told) AS told_count;


-- --- consuming ---

-- name: fetch
-- Take for each consumer up to so many, what was delayed first, then in order of arrival; at least a row for each.
-- A consumer without a row is gone: its queue was deleted, or its session taken for dead. The lock on the session's row
-- is taken with the first message, so looking at empty queues writes nothing. If that row is gone, `holder` stays NULL.
-- Of a body over the limit only the beginning is sent; its size is known without reading it.
WITH
-- The consumers that still stand in line, whether each is the active one, and when its next delayed message is due.
wanted AS MATERIALIZED (
    SELECT given.place, given.room, consumer.id AS consumer_id, consumer.queue_id,
           NOT queue.is_single_active OR consumer.id = (
               SELECT first.id FROM coatcheck_broker.consumer AS first
                WHERE first.queue_id = queue.id ORDER BY first.id LIMIT 1
           ) AS is_active,
           extract(epoch FROM (
               SELECT later.due_at FROM coatcheck_broker.message AS later
                WHERE later.queue_id = queue.id AND later.due_at > statement_timestamp()
                ORDER BY later.due_at LIMIT 1
           ) - statement_timestamp())::float8 AS due_in_s
      FROM unnest($2::bigint[], $3::integer[]) WITH ORDINALITY AS given (consumer_id, room, place)
      JOIN coatcheck_broker.consumer ON consumer.id = given.consumer_id AND consumer.session_id = $1
      JOIN coatcheck_broker.queue ON queue.id = consumer.queue_id AND queue.deleted_at IS NULL
),
-- The messages for each of them, locked. What another process locks at this moment is left to it.
picked AS MATERIALIZED (
    SELECT wanted.place, found.id
      FROM wanted CROSS JOIN LATERAL (
               SELECT id FROM (
                   SELECT message.id FROM coatcheck_broker.message
                    WHERE message.queue_id = wanted.queue_id AND message.due_at <= statement_timestamp()
                    ORDER BY message.due_at LIMIT wanted.room FOR UPDATE SKIP LOCKED
               ) AS late
               UNION ALL
               SELECT id FROM (
                   SELECT message.id FROM coatcheck_broker.message
                    WHERE message.queue_id = wanted.queue_id AND message.holder IS NULL AND message.due_at IS NULL
                    ORDER BY message.id LIMIT wanted.room FOR UPDATE SKIP LOCKED
               ) AS ready
               LIMIT wanted.room
           ) AS found
     WHERE wanted.is_active
),
-- They belong to the session from here on, if there still is one.
taken AS (
    UPDATE coatcheck_broker.message
       SET holder = (SELECT session.id FROM coatcheck_broker.session WHERE session.id = $1 FOR KEY SHARE),
           delivery_count = delivery_count + 1,
           due_at = NULL
      FROM picked
     WHERE message.id = picked.id
    RETURNING picked.place, message.*
)
SELECT wanted.consumer_id, wanted.due_in_s,
       taken.id, taken.delivery_count, taken.reason, taken.origin, taken.head, octet_length(taken.body) AS size,
       CASE WHEN octet_length(taken.body) > $4 THEN substr(taken.body, 1, $5) ELSE taken.body END AS body
  FROM wanted LEFT JOIN taken ON taken.place = wanted.place AND taken.holder = $1
 ORDER BY wanted.place, taken.id;

-- name: take
-- Take up to so many from one queue, to look at.
WITH
-- What was delayed first, then in order of arrival.
picked AS MATERIALIZED (
    SELECT id FROM (
        SELECT id FROM coatcheck_broker.message
         WHERE queue_id = $2 AND due_at <= statement_timestamp()
         ORDER BY due_at LIMIT $3 FOR UPDATE SKIP LOCKED
    ) AS late
    UNION ALL
    SELECT id FROM (
        SELECT id FROM coatcheck_broker.message
         WHERE queue_id = $2 AND holder IS NULL AND due_at IS NULL
         ORDER BY id LIMIT $3 FOR UPDATE SKIP LOCKED
    ) AS ready
    LIMIT $3
),
-- They belong to the session from here on, if there still is one.
taken AS (
    UPDATE coatcheck_broker.message
       SET holder = (SELECT session.id FROM coatcheck_broker.session WHERE session.id = $1 FOR KEY SHARE),
           delivery_count = delivery_count + 1,
           due_at = NULL
      FROM picked
     WHERE message.id = picked.id
    RETURNING message.*
)
SELECT id, delivery_count, reason, origin, head, octet_length(body) AS size,
       CASE WHEN octet_length(body) > $4 THEN substr(body, 1, $5) ELSE body END AS body
  FROM taken WHERE holder = $1 ORDER BY id;

-- name: ack
-- Delete messages that a session holds. If its row is gone, it holds none.
WITH
-- The share lock with which everything begins that a session does to its messages.
me AS MATERIALIZED (SELECT id FROM coatcheck_broker.session WHERE id = $1 FOR KEY SHARE)
DELETE FROM coatcheck_broker.message USING me WHERE message.id = ANY($2::bigint[]) AND message.holder = me.id;

-- name: give_back
-- Put back what sessions hold, all or the given ones, where it was; over its queue's limit it goes to the dead.
-- Over the limit with no dead queue there, a message stays where it is: better again than never.
WITH
-- The share lock with which everything begins that is done to a session's messages.
losers AS MATERIALIZED (
    SELECT id FROM coatcheck_broker.session WHERE id = ANY($1::integer[]) FOR KEY SHARE
),
-- What they hold, with the dead queue of what was delivered too often.
held AS MATERIALIZED (
    SELECT message.id, queue.name, dead.id AS dead_id
      FROM losers
      JOIN coatcheck_broker.message ON message.holder = losers.id
      JOIN coatcheck_broker.queue ON queue.id = message.queue_id
      LEFT JOIN coatcheck_broker.queue AS dead
        ON dead.name = queue.dead AND message.delivery_count > queue.delivery_limit
     WHERE $2::bigint[] IS NULL OR message.id = ANY($2::bigint[])
),
-- Most of it is ready again.
returned AS (
    UPDATE coatcheck_broker.message SET holder = NULL FROM held WHERE message.id = held.id AND held.dead_id IS NULL
    RETURNING message.queue_id
),
-- The rest is a dead letter, and says why and from where.
buried AS (
    UPDATE coatcheck_broker.message
       SET holder = NULL, queue_id = held.dead_id, delivery_count = 0, reason = 'delivery_limit', origin = held.name
      FROM held
     WHERE message.id = held.id AND held.dead_id IS NOT NULL
    RETURNING message.queue_id
)
SELECT pg_notify('coatcheck_broker_' || queue_id, '')
  FROM (SELECT queue_id FROM returned UNION SELECT queue_id FROM buried) AS touched;

-- name: attach
-- Stand in the line of a queue.
INSERT INTO coatcheck_broker.consumer (queue_id, session_id)
SELECT id, $2 FROM coatcheck_broker.queue WHERE name = $1
RETURNING id, queue_id;

-- name: detach
-- Leave the line. Where one consumer is active at a time, the next one hears of it.
DELETE FROM coatcheck_broker.consumer WHERE id = $1 RETURNING pg_notify('coatcheck_broker_' || queue_id, '');


-- --- sessions ---

-- name: open_session
-- The lock is taken before any other process can see the row, and held until the connection is gone.
WITH
-- The session's row.
opened AS (
    INSERT INTO coatcheck_broker.session (process, name, lease) VALUES ($1, $2, $3) RETURNING id
)
SELECT id, pg_advisory_lock($4, id) FROM opened;

-- name: renew_session
-- Say that a session lives. No row: it was taken for dead.
UPDATE coatcheck_broker.session SET seen_at = clock_timestamp() WHERE id = $1 RETURNING id;

-- name: find_own_sessions
-- Earlier sessions of the same process.
SELECT id FROM coatcheck_broker.session WHERE process = $1 AND id <> $2;

-- name: find_dead
-- Sessions whose connection is gone, so that their lock is free, or whose lease ran out.
SELECT id FROM coatcheck_broker.session
 WHERE id <> $1 AND (seen_at + lease < clock_timestamp() OR pg_try_advisory_xact_lock_shared($2, id));

-- name: lock_dead
-- Lock the sessions that are to go; one that was seen again meanwhile, or that another process buries, is left alone.
SELECT id, process FROM coatcheck_broker.session
 WHERE id = ANY($1::integer[])
   AND ($3 OR seen_at + lease < clock_timestamp() OR pg_try_advisory_xact_lock_shared($2, id))
 ORDER BY id FOR UPDATE SKIP LOCKED;

-- name: forget_sessions
-- Remove sessions whose messages were given back. Queues of their processes expire unless those have other sessions.
WITH
-- Their consumers leave the line.
gone AS (
    DELETE FROM coatcheck_broker.consumer WHERE session_id = ANY($1::integer[]) RETURNING queue_id
),
-- The sessions themselves.
ended AS (
    DELETE FROM coatcheck_broker.session WHERE id = ANY($1::integer[]) RETURNING process
),
-- From now on their queues grow old.
abandoned AS (
    UPDATE coatcheck_broker.queue SET abandoned_at = clock_timestamp()
      FROM ended
     WHERE queue.owner = ended.process AND abandoned_at IS NULL
)
SELECT pg_notify('coatcheck_broker_' || queue_id, '') FROM (SELECT DISTINCT queue_id FROM gone) AS touched;


-- --- queues ---

-- name: declare
-- Make a queue. One that is there stays as it is; a process that declares its own again has not abandoned it.
INSERT INTO coatcheck_broker.queue (name, delivery_limit, dead, is_single_active, owner, expires)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (name) DO UPDATE SET abandoned_at = NULL WHERE queue.owner = excluded.owner;

-- name: declare_broadcast
-- Make a name that fans out.
INSERT INTO coatcheck_broker.broadcast (name) VALUES ($1) ON CONFLICT DO NOTHING;

-- name: bind
-- Let a queue have what is sent to a broadcast.
INSERT INTO coatcheck_broker.binding (broadcast, queue_id)
SELECT $1, id FROM coatcheck_broker.queue WHERE name = $2
ON CONFLICT DO NOTHING;

-- name: find_missing
-- Which of these queues and these broadcasts are not there.
SELECT name FROM unnest($1::text[]) AS wanted (name)
 WHERE NOT EXISTS (SELECT FROM coatcheck_broker.queue WHERE queue.name = wanted.name)
UNION ALL
SELECT name FROM unnest($2::text[]) AS wanted (name)
 WHERE NOT EXISTS (SELECT FROM coatcheck_broker.broadcast WHERE broadcast.name = wanted.name);

-- name: find_queue
-- The id of a queue, if it is there.
SELECT id FROM coatcheck_broker.queue WHERE name = $1;

-- name: depth
-- How many messages are ready in a queue, delayed ones included that are due.
SELECT (SELECT count(*) FROM coatcheck_broker.message
         WHERE queue_id = queue.id AND holder IS NULL AND due_at IS NULL)
     + (SELECT count(*) FROM coatcheck_broker.message
         WHERE queue_id = queue.id AND due_at <= statement_timestamp()) AS count
  FROM coatcheck_broker.queue WHERE name = $1;

-- name: count_consumers
-- How many consumers a queue has, of any process.
SELECT (SELECT count(*) FROM coatcheck_broker.consumer WHERE queue_id = queue.id) AS count
  FROM coatcheck_broker.queue WHERE name = $1;

-- name: delete_queue
-- Take the name away. The queue's consumers hear of it, and what is in it is cleared in bites.
UPDATE coatcheck_broker.queue SET name = NULL, deleted_at = clock_timestamp() WHERE name = $1
RETURNING id, pg_notify('coatcheck_broker_' || id, '');

-- name: delete_broadcast
-- Remove a name that fans out, with its bindings.
DELETE FROM coatcheck_broker.broadcast WHERE name = $1;

-- name: expire
-- Delete the queues of processes that are gone for longer than their queues should outlive them.
UPDATE coatcheck_broker.queue SET name = NULL, deleted_at = clock_timestamp()
 WHERE abandoned_at + expires < clock_timestamp() AND name IS NOT NULL
   AND NOT EXISTS (SELECT FROM coatcheck_broker.session WHERE session.process = queue.owner);

-- name: clear
-- Delete a bite of what queues hold; what sessions have in hand too, if told so.
DELETE FROM coatcheck_broker.message WHERE id IN (
    SELECT id FROM (
        SELECT id FROM coatcheck_broker.message
         WHERE queue_id = ANY($1::bigint[]) AND holder IS NULL AND due_at IS NULL LIMIT $2 FOR UPDATE SKIP LOCKED
    ) AS ready
    UNION ALL
    SELECT id FROM (
        SELECT id FROM coatcheck_broker.message
         WHERE queue_id = ANY($1::bigint[]) AND due_at IS NOT NULL LIMIT $2 FOR UPDATE SKIP LOCKED
    ) AS later
    UNION ALL
    SELECT id FROM (
        SELECT id FROM coatcheck_broker.message
         WHERE queue_id = ANY($1::bigint[]) AND holder IS NOT NULL AND $3 LIMIT $2 FOR UPDATE SKIP LOCKED
    ) AS held
)
RETURNING id;

-- name: find_deleted
-- Queues that were deleted, and whose rows are still there.
SELECT id FROM coatcheck_broker.queue WHERE deleted_at IS NOT NULL;

-- name: forget_deleted
-- Remove the rows of queues that were deleted so long ago.
DELETE FROM coatcheck_broker.queue WHERE id = ANY($1::bigint[]) AND deleted_at + $2 < clock_timestamp();


-- --- the schema ---

-- name: has_schema
-- Read from the catalogue's tables: to_regclass() asks a cache, which may not know yet what another process has made
-- while we waited for the lock.
SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'coatcheck_broker') AS answer;

-- name: has_version
-- Whether the tables are there.
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
     WHERE nspname = 'coatcheck_broker' AND relname = 'schema_version'
) AS answer;

-- name: find_version
-- The version of the tables.
SELECT version FROM coatcheck_broker.schema_version;
