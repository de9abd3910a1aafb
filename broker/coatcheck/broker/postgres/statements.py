"""Every statement the adapter runs, by name. Tables are named with their schema: the connection searches none but
Postgres's own.

Locks, always in this order: a session's row, then messages. Whatever a session does to the messages it holds begins
with a share lock on its own row; whoever takes them away from it locks that row for update first. So a process that was
taken for dead finds its row gone, and its late acks and fetches do nothing. FETCH is the exception that proves it: it
locks ready messages first, which nobody takes away from anyone.

Channels are named by queue: a process is woken for the queues it consumes and for no others.
"""

from __future__ import annotations

NAMESPACE = 0x636F6163
"""The first half of the advisory locks by which a session shows that it lives; the second is its id."""

CHANNEL_PREFIX = "coatcheck_broker_"

# --- publishing ---

PUBLISH = """
WITH sent AS MATERIALIZED (
    SELECT * FROM unnest($1::integer[], $2::text[], $3::boolean[], $4::bytea[], $5::bytea[], $6::interval[])
               AS given (place, name, is_broadcast, head, body, delay)
), routed AS MATERIALIZED (
    SELECT sent.*, queue.id AS queue_id
      FROM sent JOIN coatcheck_broker.queue ON queue.name = sent.name
     WHERE NOT sent.is_broadcast
    UNION ALL
    SELECT sent.*, binding.queue_id
      FROM sent
      JOIN coatcheck_broker.binding ON binding.broadcast = sent.name
      JOIN coatcheck_broker.queue ON queue.id = binding.queue_id AND queue.deleted_at IS NULL
     WHERE sent.is_broadcast
), put AS (
    INSERT INTO coatcheck_broker.message (queue_id, due_at, head, body)
    SELECT queue_id, clock_timestamp() + delay, head, body FROM routed ORDER BY place
    RETURNING queue_id
), told AS MATERIALIZED (
    SELECT pg_notify('coatcheck_broker_' || queue_id, '') FROM (SELECT DISTINCT queue_id FROM put) AS touched
)
SELECT ARRAY(
           SELECT place FROM routed
           UNION
           SELECT place FROM sent JOIN coatcheck_broker.broadcast ON broadcast.name = sent.name WHERE sent.is_broadcast
       ) AS routed,
       (SELECT count(*) FROM told) AS told_count
"""
"""Route, insert and notify, in one transaction. Gives the places of the messages that had somewhere to go."""

# --- consuming ---

FETCH = """
WITH wanted AS MATERIALIZED (
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
), picked AS MATERIALIZED (
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
), taken AS (
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
 ORDER BY wanted.place, taken.id
"""
"""Take for each consumer up to so many, what was delayed first, then in order of arrival; at least a row for each.

A consumer without a row is gone: its queue was deleted, or its session taken for dead. The lock on the session's row is
taken with the first message, so looking at empty queues writes nothing. If that row is gone, `holder` stays NULL.
Of a body over the limit only the beginning is sent; its size is known without reading it.
"""

TAKE = """
WITH picked AS MATERIALIZED (
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
), taken AS (
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
  FROM taken WHERE holder = $1 ORDER BY id
"""
"""Take up to so many from one queue, to look at."""

ACK = """
WITH me AS MATERIALIZED (SELECT id FROM coatcheck_broker.session WHERE id = $1 FOR KEY SHARE)
DELETE FROM coatcheck_broker.message USING me WHERE message.id = ANY($2::bigint[]) AND message.holder = me.id
"""

GIVE_BACK = """
WITH losers AS MATERIALIZED (
    SELECT id FROM coatcheck_broker.session WHERE id = ANY($1::integer[]) FOR KEY SHARE
), held AS MATERIALIZED (
    SELECT message.id, queue.name, dead.id AS dead_id
      FROM losers
      JOIN coatcheck_broker.message ON message.holder = losers.id
      JOIN coatcheck_broker.queue ON queue.id = message.queue_id
      LEFT JOIN coatcheck_broker.queue AS dead
        ON dead.name = queue.dead AND message.delivery_count > queue.delivery_limit
     WHERE $2::bigint[] IS NULL OR message.id = ANY($2::bigint[])
), returned AS (
    UPDATE coatcheck_broker.message SET holder = NULL FROM held WHERE message.id = held.id AND held.dead_id IS NULL
    RETURNING message.queue_id
), buried AS (
    UPDATE coatcheck_broker.message
       SET holder = NULL, queue_id = held.dead_id, delivery_count = 0, reason = 'delivery_limit', origin = held.name
      FROM held
     WHERE message.id = held.id AND held.dead_id IS NOT NULL
    RETURNING message.queue_id
)
SELECT pg_notify('coatcheck_broker_' || queue_id, '')
  FROM (SELECT queue_id FROM returned UNION SELECT queue_id FROM buried) AS touched
"""
"""Put back what sessions hold, all or the given ones, where it was; over its queue's limit it goes to the dead.

Over the limit with no dead queue there, a message stays where it is: better again than never.
"""

ATTACH = """
INSERT INTO coatcheck_broker.consumer (queue_id, session_id)
SELECT id, $2 FROM coatcheck_broker.queue WHERE name = $1
RETURNING id, queue_id
"""

DETACH = """
DELETE FROM coatcheck_broker.consumer WHERE id = $1 RETURNING pg_notify('coatcheck_broker_' || queue_id, '')
"""
"""Leave the line. Where one is active at a time, the next one hears of it."""

# --- sessions ---

OPEN_SESSION = """
WITH opened AS (
    INSERT INTO coatcheck_broker.session (process, name, lease) VALUES ($1, $2, $3) RETURNING id
)
SELECT id, pg_advisory_lock($4, id) FROM opened
"""
"""The lock is taken before anybody can see the row, and held until the connection is gone."""

RENEW_SESSION = "UPDATE coatcheck_broker.session SET seen_at = clock_timestamp() WHERE id = $1 RETURNING id"

FIND_OWN_SESSIONS = "SELECT id FROM coatcheck_broker.session WHERE process = $1 AND id <> $2"

FIND_DEAD = """
SELECT id FROM coatcheck_broker.session
 WHERE id <> $1 AND (seen_at + lease < clock_timestamp() OR pg_try_advisory_xact_lock_shared($2, id))
"""
"""Sessions whose connection is gone, so that nobody holds their lock, or whose lease ran out."""

LOCK_DEAD = """
SELECT id, process FROM coatcheck_broker.session
 WHERE id = ANY($1::integer[])
   AND ($3 OR seen_at + lease < clock_timestamp() OR pg_try_advisory_xact_lock_shared($2, id))
 ORDER BY id FOR UPDATE SKIP LOCKED
"""
"""Lock the sessions that are to go; one that was seen again meanwhile, or that somebody else buries, is left alone."""

FORGET_SESSIONS = """
WITH gone AS (
    DELETE FROM coatcheck_broker.consumer WHERE session_id = ANY($1::integer[]) RETURNING queue_id
), ended AS (
    DELETE FROM coatcheck_broker.session WHERE id = ANY($1::integer[]) RETURNING process
), abandoned AS (
    UPDATE coatcheck_broker.queue SET abandoned_at = clock_timestamp()
      FROM ended
     WHERE queue.owner = ended.process AND abandoned_at IS NULL
)
SELECT pg_notify('coatcheck_broker_' || queue_id, '') FROM (SELECT DISTINCT queue_id FROM gone) AS touched
"""
"""Remove sessions whose messages were given back. Queues of their processes expire unless those have others."""

# --- queues ---

DECLARE = """
INSERT INTO coatcheck_broker.queue (name, delivery_limit, dead, is_single_active, owner, expires)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (name) DO UPDATE SET abandoned_at = NULL WHERE queue.owner = excluded.owner
"""

DECLARE_BROADCAST = "INSERT INTO coatcheck_broker.broadcast (name) VALUES ($1) ON CONFLICT DO NOTHING"

BIND = """
INSERT INTO coatcheck_broker.binding (broadcast, queue_id)
SELECT $1, id FROM coatcheck_broker.queue WHERE name = $2
ON CONFLICT DO NOTHING
"""

FIND_MISSING = """
SELECT name FROM unnest($1::text[]) AS wanted (name)
 WHERE NOT EXISTS (SELECT FROM coatcheck_broker.queue WHERE queue.name = wanted.name)
UNION ALL
SELECT name FROM unnest($2::text[]) AS wanted (name)
 WHERE NOT EXISTS (SELECT FROM coatcheck_broker.broadcast WHERE broadcast.name = wanted.name)
"""
"""Which of these queues and these broadcasts are not there."""

FIND_QUEUE = "SELECT id FROM coatcheck_broker.queue WHERE name = $1"

DEPTH = """
SELECT (SELECT count(*) FROM coatcheck_broker.message
         WHERE queue_id = queue.id AND holder IS NULL AND due_at IS NULL)
     + (SELECT count(*) FROM coatcheck_broker.message
         WHERE queue_id = queue.id AND due_at <= statement_timestamp()) AS count
  FROM coatcheck_broker.queue WHERE name = $1
"""

COUNT_CONSUMERS = """
SELECT (SELECT count(*) FROM coatcheck_broker.consumer WHERE queue_id = queue.id) AS count
  FROM coatcheck_broker.queue WHERE name = $1
"""

DELETE_QUEUE = """
UPDATE coatcheck_broker.queue SET name = NULL, deleted_at = clock_timestamp() WHERE name = $1
RETURNING id, pg_notify('coatcheck_broker_' || id, '')
"""
"""Take the name away. Its consumers hear of it, and what is in it is cleared in bites."""

DELETE_BROADCAST = "DELETE FROM coatcheck_broker.broadcast WHERE name = $1"

EXPIRE = """
UPDATE coatcheck_broker.queue SET name = NULL, deleted_at = clock_timestamp()
 WHERE abandoned_at + expires < clock_timestamp() AND name IS NOT NULL
   AND NOT EXISTS (SELECT FROM coatcheck_broker.session WHERE session.process = queue.owner)
"""
"""Delete the queues of processes that are gone for longer than their queues should outlive them."""

CLEAR = """
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
RETURNING id
"""
"""Delete a bite of what queues hold; what is in somebody's hands too, if told so."""

FIND_DELETED = "SELECT id FROM coatcheck_broker.queue WHERE deleted_at IS NOT NULL"

FORGET_DELETED = """
DELETE FROM coatcheck_broker.queue WHERE id = ANY($1::bigint[]) AND deleted_at + $2 < clock_timestamp()
"""
