-- Every statement that workers and sweepers run all the time, by name. What people ask now and then is in queries.py.
--
-- `-- name: x` begins a statement, `-- part: x` a piece that other statements hold as {x}. The lines below it, up to the
-- SQL, say what it is for. Values are bound by name (:ids) and cast where they stand, because a plan is made before
-- their types are known. Tables are named with their schema; the search path holds Postgres's own names only.
--
-- Lock order, everywhere: tasks by id, then calls by id. A batch locks its tasks with SKIP LOCKED and leaves out what is
-- locked elsewhere; only in a lane is a lock waited for, one task at a time. So no two transactions wait in a circle.

-- part: task_columns
t.id, t.service, t.handler, t.version, t.state, t.epoch, t.checkpoint, t.seq, t.attempt, t.pickups, t.trigger,
t.identity, t.digest, t.correlation_id, t.request, t.addresses, t.traceparent, t.tracestate, t.value, t.traceback,
t.is_final_sent, t.progress, t.due_at, t.created_at, t.updated_at, t.finished_at, t.caller_subject, t.caller_claims,
t.deadline_at, t.history, t.entry_count, t.head, t.revision, t.is_pausing, t.forked_from, t.forked_at

-- part: no_task
-- In the place of the task columns behind the id.
NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL

-- part: peer_columns
-- A call as the wire needs it.
c.id, c.task_id, t.service, c.kind, c.key, c.peer, c.handler, c.body, c.headers, c.hard_due_at, t.traceparent

-- part: no_peer
-- In the place of the columns of a call behind its id and its task's.
NULL::text AS service, NULL::text AS kind, NULL::text AS key, NULL::text AS peer, NULL::text AS handler,
NULL::bytea AS body, NULL::jsonb AS headers, NULL::timestamptz AS hard_due_at, NULL::text AS traceparent

-- part: no_known
NULL::text AS h_key, NULL::text AS h_kind, NULL::text AS h_name, NULL::bytea AS h_digest, NULL::integer AS h_seq,
NULL::text AS h_state, NULL::bytea AS h_value, NULL::uuid AS h_call_id, NULL::timestamptz AS h_due_at,
NULL::boolean AS h_is_withheld

-- part: known_of_task
-- What a task has recorded and what is open, and the size of all its values, which Postgres knows without reading them.
-- Rows and no array of them for each task: of a value that is a record, the driver looks up each column's type anew.
LATERAL (SELECT known.*, sum(octet_length(known.value)) OVER () AS size
           FROM (SELECT key, kind, name, digest, seq, CASE WHEN is_ok THEN 'ok' ELSE 'failed' END, value, NULL::uuid,
                        NULL::timestamptz
                   FROM coatcheck.journal WHERE task_id = t.id AND NOT is_forgotten
                  UNION ALL
                 SELECT key, kind, name, digest, seq, state, value, id, due_at
                   FROM coatcheck.call WHERE task_id = t.id AND NOT is_forgotten)
             AS known(key, kind, name, digest, seq, state, value, call_id, due_at)) AS h

-- part: insert_history
-- Entries of histories, all of one replica.
INSERT INTO coatcheck.history (task_id, number, at, epoch, kind, actor, key, data, digest, hash, replica)
SELECT t_task_id, number, at, epoch, kind, actor, key, data, digest, hash, CAST(:t_replica AS text)
  FROM unnest(CAST(:t_task_id AS uuid[]), CAST(:t_number AS integer[]), CAST(:t_at AS timestamptz[]),
              CAST(:t_epoch AS integer[]), CAST(:t_kind AS text[]), CAST(:t_actor AS text[]), CAST(:t_key AS text[]),
              CAST(:t_data AS bytea[]), CAST(:t_digest AS bytea[]), CAST(:t_hash AS bytea[]),
              CAST(:t_if_granted AS boolean[]))
    AS t(t_task_id, number, at, epoch, kind, actor, key, data, digest, hash, if_granted)

-- part: is_met
-- A group's wait is over at `need` successes, or when that many are out of reach; without a need, when all have ended.
CASE WHEN need IS NULL THEN still_open = 0 ELSE ok >= need OR ok + still_open < need END


-- ===== reading and locking =====

-- name: read_tasks
SELECT {task_columns}, t.due_at <= clock_timestamp() AS is_due, t.xmin AS row_version
  FROM coatcheck.task t WHERE t.id = ANY(CAST(:ids AS uuid[]))

-- name: lock_tasks
SELECT {task_columns}, t.due_at <= clock_timestamp() AS is_due, t.xmin AS row_version
  FROM coatcheck.task t WHERE t.id = ANY(CAST(:ids AS uuid[])) ORDER BY t.id FOR UPDATE

-- name: lock_free_tasks
-- The same, without those that another transaction holds.
SELECT {task_columns}, t.due_at <= clock_timestamp() AS is_due, t.xmin AS row_version
  FROM coatcheck.task t WHERE t.id = ANY(CAST(:ids AS uuid[])) ORDER BY t.id FOR UPDATE SKIP LOCKED

-- name: existing_tasks
SELECT id FROM coatcheck.task WHERE id = ANY(CAST(:ids AS uuid[]))

-- name: known_rows
SELECT t.id, h.key AS h_key, h.kind AS h_kind, h.name AS h_name, h.digest AS h_digest, h.seq AS h_seq,
       h.state AS h_state, h.value AS h_value, h.call_id AS h_call_id, h.due_at AS h_due_at, false AS h_is_withheld
  FROM unnest(CAST(:ids AS uuid[])) AS t(id) CROSS JOIN {known_of_task}

-- name: unsent_calls
SELECT {peer_columns} FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
 WHERE c.task_id = ANY(CAST(:ids AS uuid[])) AND c.state = 'open' AND NOT c.is_sent AND c.kind <> 'timer'
 ORDER BY c.id


-- ===== births =====

-- part: insert_births
-- A row is made no later than its task ends: the column's own default is worked out last, and would come after the end.
-- A task whose id had a task before is born only where it goes on with the history of that one: `first_entry`.
-- ON CONFLICT alone would wait for the transaction that updates a row that is there already; such a row is left to the
-- locks. What is still waited for is another birth of the same id that is not committed yet.
INSERT INTO coatcheck.task AS t (id, service, handler, version, identity, digest, correlation_id, request, addresses,
                                 traceparent, tracestate, caller_subject, caller_claims, deadline_at, history, epoch,
                                 entry_count, head, checkpoint, pickups, state, seq, attempt, trigger, wait_calls,
                                 wait_groups, wait_needs, value, traceback, progress, due_at, look_at, finished_at,
                                 created_at)
SELECT id, service, handler, version, identity, digest, correlation_id, request, addresses::jsonb, traceparent,
       tracestate, caller_subject, caller_claims::jsonb, deadline_at, history, 1, entry_count, head,
       CAST(:checkpoint AS integer), pickups, state, seq, CASE WHEN state = 'retrying' THEN 2 ELSE 1 END,
       CASE WHEN is_final OR NOT is_detached THEN 'request' END,
       wait_calls::uuid[], wait_groups::integer[], wait_needs::integer[], value, traceback, progress::jsonb,
       clock_timestamp() + due_s * interval '1 s',
       clock_timestamp() + CASE WHEN NOT is_final THEN due_s
                                WHEN is_detached THEN CAST(:resend_after_s AS float8) END * interval '1 s',
       CASE WHEN is_final THEN clock_timestamp() END, statement_timestamp()
  FROM (SELECT *, state IN ('done', 'failed', 'cancelled') AS is_final
          FROM unnest(CAST(:id AS uuid[]), CAST(:service AS text[]), CAST(:handler AS text[]),
                      CAST(:version AS text[]), CAST(:identity AS text[]), CAST(:digest AS bytea[]),
                      CAST(:correlation_id AS text[]), CAST(:request AS bytea[]), CAST(:addresses AS text[]),
                      CAST(:traceparent AS text[]), CAST(:tracestate AS text[]), CAST(:caller_subject AS text[]),
                      CAST(:caller_claims AS text[]), CAST(:deadline_at AS timestamptz[]), CAST(:history AS smallint[]),
                      CAST(:first_entry AS integer[]), CAST(:entry_count AS integer[]), CAST(:head AS bytea[]),
                      CAST(:pickups AS integer[]),
                      CAST(:state AS text[]), CAST(:seq AS integer[]), CAST(:is_detached AS boolean[]),
                      CAST(:wait_calls AS text[]), CAST(:wait_groups AS text[]), CAST(:wait_needs AS text[]),
                      CAST(:value AS bytea[]), CAST(:traceback AS text[]), CAST(:progress AS text[]),
                      CAST(:due_s AS float8[]))
            AS u(id, service, handler, version, identity, digest, correlation_id, request, addresses, traceparent,
                 tracestate, caller_subject, caller_claims, deadline_at, history, first_entry, entry_count, head, pickups, state, seq,
                 is_detached, wait_calls, wait_groups, wait_needs, value, traceback, progress, due_s)) AS u
 WHERE NOT EXISTS (SELECT FROM coatcheck.task t WHERE t.id = u.id)
   AND NOT EXISTS (SELECT FROM coatcheck.history h WHERE h.task_id = u.id AND h.number = u.first_entry)
 ORDER BY id
ON CONFLICT (id) DO NOTHING

-- name: create
{insert_births} RETURNING {task_columns}

-- name: create_telling
-- The same, with what their histories begin with.
WITH born AS ({insert_births} RETURNING {task_columns}),
told AS ({insert_history} WHERE t_task_id IN (SELECT id FROM born))
SELECT * FROM born

-- name: lock_chains
-- No other birth of these ids goes on with their histories, and no sweeper removes them, until this transaction ends.
SELECT pg_advisory_xact_lock(hashtextextended(id::text, 0)) FROM unnest(CAST(:ids AS uuid[])) AS u(id) ORDER BY id

-- name: last_entries
-- Where the histories stand that tasks of these ids have left behind.
SELECT DISTINCT ON (task_id) task_id, number, hash FROM coatcheck.history
 WHERE task_id = ANY(CAST(:ids AS uuid[])) ORDER BY task_id, number DESC

-- name: add_addresses
UPDATE coatcheck.task t SET addresses = u.addresses::jsonb
  FROM unnest(CAST(:id AS uuid[]), CAST(:addresses AS text[])) AS u(id, addresses) WHERE t.id = u.id


-- ===== replies, resumes and requests =====

-- name: lock_owners
SELECT FROM coatcheck.task
 WHERE id IN (SELECT task_id FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[]))) ORDER BY id FOR UPDATE

-- name: lock_calls
SELECT FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[])) ORDER BY id FOR UPDATE

-- name: called
-- The columns are those of `decide.Called`.
SELECT c.id, c.task_id, c.kind, c.peer, c.state, c.due_at <= clock_timestamp(), t.xmin, t.service, t.state, t.seq,
       t.trigger, c.key, t.epoch, t.history, t.entry_count, t.head
  FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
 WHERE c.id = ANY(CAST(:ids AS uuid[]))

-- name: note_progress
-- It needs no lock on the task: of a call that is open it changes nothing that anything but a timeout depends on.
UPDATE coatcheck.call c
   SET progress = u.progress::jsonb, is_sent = true,
       due_at = least(clock_timestamp() + c.idle, c.hard_due_at),
       look_at = least(clock_timestamp() + c.idle, c.hard_due_at)
  FROM (SELECT u.* FROM unnest(CAST(:id AS uuid[]), CAST(:progress AS text[])) AS u(id, progress)
          JOIN coatcheck.call c ON c.id = u.id
         WHERE c.state = 'open' ORDER BY c.id FOR UPDATE OF c SKIP LOCKED) AS u
 WHERE c.id = u.id
RETURNING c.id

-- part: apply_plan
-- Close calls, wake tasks whose wait is over, grant those that are taken over. All of a task's replies are written, or
-- none: the one that would be left out may be the one that is to run the task.
-- No two of the lists here are joined: the planner takes each for a row or ten, and would go through one for every row
-- of the other. An IN that is no plain condition looks up in a hash.
-- It gives back three kinds of rows: a task that is granted, a piece of its history, and a task that is only written.
WITH
-- The tasks that are still as they were read, locked. Each reply takes one number of its task's sequence, which tells
-- how many there are.
held AS MATERIALIZED (
    SELECT u.*, coalesce(u.seq - t.seq, 0) AS call_count, t.state, t.wait_calls, t.wait_groups, t.wait_needs
      FROM unnest(CAST(:id AS uuid[]), CAST(:version AS xid[]), CAST(:seq AS integer[]), CAST(:trigger AS text[]),
                  CAST(:takes_over AS boolean[]){chain_arrays}) AS u(id, version, seq, trigger, takes_over{chain_names})
      JOIN coatcheck.task t ON t.id = u.id
     WHERE t.xmin = u.version ORDER BY t.id FOR UPDATE OF t SKIP LOCKED),
-- The calls to be closed, locked. A progress may just have moved the due time of one whose timeout was read to be due.
held_call AS MATERIALIZED (
    SELECT u.*, c.task_id
      FROM unnest(CAST(:c_id AS uuid[]), CAST(:c_state AS text[]), CAST(:c_seq AS integer[]), CAST(:c_value AS bytea[]))
        AS u(id, state, seq, value)
      JOIN coatcheck.call c ON c.id = u.id
     WHERE (c.task_id IN (SELECT id FROM held)) IS TRUE AND c.state = 'open'
       AND (u.state <> 'timed_out' OR c.due_at <= clock_timestamp())
     ORDER BY c.id FOR UPDATE OF c SKIP LOCKED),
-- The tasks of which all calls could be locked.
ready AS MATERIALIZED (
    SELECT * FROM held
     WHERE call_count = 0 OR (id, call_count) IN (SELECT task_id, count(*) FROM held_call GROUP BY task_id)),
closed AS (
    UPDATE coatcheck.call c
       SET state = u.state, seq = u.seq, value = u.value, closed_at = clock_timestamp(), is_sent = true,
           look_at = NULL
      FROM held_call AS u WHERE c.id = u.id AND (u.task_id IN (SELECT id FROM ready)) IS TRUE),
-- The parked tasks that one of these replies wakes. Counted by rows, never by decrement.
met AS MATERIALIZED (
    SELECT DISTINCT id FROM (
        SELECT r.id, r.wait_needs[w.number] AS need,
               count(*) FILTER (WHERE c.state = 'ok'
                                   OR c.id IN (SELECT id FROM held_call WHERE state = 'ok')) AS ok,
               count(*) FILTER (WHERE c.state = 'open'
                                  AND c.id NOT IN (SELECT id FROM held_call)) AS still_open
          FROM ready AS r CROSS JOIN unnest(r.wait_calls, r.wait_groups) AS w(call_id, number)
          JOIN coatcheck.call c ON c.id = w.call_id
         WHERE r.state = 'parked' AND r.trigger IS NOT NULL
         GROUP BY r.id, w.number, r.wait_needs[w.number]) AS counted
     WHERE {is_met}),
-- The tasks that wait on, or whose live run will find the reply.
recorded AS (
    UPDATE coatcheck.task t SET seq = r.seq, {recorded_chain} updated_at = clock_timestamp()
      FROM ready AS r
     WHERE t.id = r.id AND r.seq IS NOT NULL AND NOT r.takes_over AND r.id NOT IN (SELECT id FROM met)),
granted AS (
    UPDATE coatcheck.task t
       SET state = 'running', epoch = t.epoch + 1, trigger = r.trigger, seq = coalesce(r.seq, t.seq), {granted_chain}
           pickups = t.pickups + 1, wait_calls = NULL, wait_groups = NULL, wait_needs = NULL,
           updated_at = clock_timestamp(),
           due_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s',
           look_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s'
      FROM ready AS r
     WHERE t.id = r.id AND (r.takes_over OR r.id IN (SELECT id FROM met))
    RETURNING {task_columns}){told}
SELECT t.*, {no_known} FROM granted AS t
 UNION ALL
SELECT t.id, {no_task}, h.key, h.kind, h.name, h.digest, h.seq, h.state,
       CASE WHEN h.size > CAST(:max_history AS bigint) THEN NULL ELSE h.value END, h.call_id,
       CASE WHEN (h.call_id IN (SELECT id FROM held_call)) IS NOT TRUE THEN h.due_at END,
       coalesce(h.size > CAST(:max_history AS bigint), false)
  FROM granted AS t CROSS JOIN {known_of_task}
 UNION ALL
SELECT id, {no_task}, {no_known} FROM ready WHERE (id IN (SELECT id FROM granted)) IS NOT TRUE


-- What a plan that appends to histories holds besides. A history tells of a grant only if it came about.

-- part: plan_chain_arrays
, CAST(:entry_count AS integer[]), CAST(:head AS bytea[]), CAST(:granted_count AS integer[]),
CAST(:granted_head AS bytea[])

-- part: plan_chain_names
, entry_count, head, granted_count, granted_head

-- part: plan_recorded_chain
entry_count = coalesce(r.entry_count, t.entry_count), head = coalesce(r.head, t.head),

-- part: plan_granted_chain
entry_count = coalesce(r.granted_count, t.entry_count), head = coalesce(r.granted_head, t.head),

-- part: plan_told
, told AS (
    {insert_history}
     WHERE t_task_id IN (SELECT id FROM ready) AND (NOT if_granted OR t_task_id IN (SELECT id FROM granted)))


-- ===== what a run writes =====
-- A put is one statement of those parts below that have something to write. `writing` are the tasks that it writes.

-- part: put_born
{insert_births} RETURNING id

-- part: put_met
-- Waits that are over already, by the states of calls that were opened before. One opened just now has no row.
SELECT id FROM (
    SELECT u.id, u.need, count(*) FILTER (WHERE c.state = 'ok') AS ok,
           count(*) FILTER (WHERE coalesce(c.state, 'open') = 'open') AS still_open
      FROM unnest(CAST(:m_id AS uuid[]), CAST(:m_number AS integer[]), CAST(:m_need AS integer[]),
                  CAST(:m_call_id AS uuid[])) AS u(id, number, need, call_id)
      LEFT JOIN coatcheck.call c ON c.id = u.call_id
     GROUP BY u.id, u.number, u.need) AS counted
 WHERE {is_met}

-- part: put_held
-- The rows that stand exactly as their runs last saw them, locked. A claimed reply would have taken a number. One that
-- is to be paused takes an end or a pause, and nothing else.
SELECT u.*, u.state IN ('done', 'failed', 'cancelled') AS is_final, t.addresses
  FROM unnest(CAST(:u_id AS uuid[]), CAST(:u_epoch AS integer[]), CAST(:u_follows AS integer[]),
              CAST(:u_seen AS integer[]), CAST(:u_is_progress AS boolean[]), CAST(:u_state AS text[]),
              CAST(:u_seq AS integer[]), CAST(:u_is_detached AS boolean[]), CAST(:u_wait_calls AS text[]),
              CAST(:u_wait_groups AS text[]), CAST(:u_wait_needs AS text[]), CAST(:u_value AS bytea[]),
              CAST(:u_traceback AS text[]), CAST(:u_progress AS text[]), CAST(:u_due_s AS float8[]){chain_arrays})
    AS u(id, epoch, follows, seen, is_progress, state, seq, is_detached, wait_calls, wait_groups, wait_needs,
         value, traceback, progress, due_s{chain_names})
  JOIN coatcheck.task t ON t.id = u.id
 WHERE t.state = 'running' AND t.epoch = u.epoch AND t.checkpoint = u.follows AND t.seq = u.seen
       AND (NOT t.is_pausing OR u.state IN ('paused', 'done', 'failed', 'cancelled')) {unless_met}
 ORDER BY t.id FOR UPDATE OF t SKIP LOCKED

-- part: put_closed
UPDATE coatcheck.call c
   SET state = 'closed', seq = u.seq, closed_at = clock_timestamp(), look_at = NULL,
       is_forgotten = (c.task_id, c.key) IN (SELECT * FROM unnest(CAST(:f_task_id AS uuid[]), CAST(:f_key AS text[])))
  FROM unnest(CAST(:x_id AS uuid[]), CAST(:x_task_id AS uuid[]), CAST(:x_seq AS integer[]))
    AS u(id, task_id, seq), coatcheck.task t
 WHERE c.id = u.id AND c.state = 'open' AND t.id = c.task_id AND u.task_id IN (SELECT id FROM writing)
RETURNING {peer_columns}

-- part: put_entries
INSERT INTO coatcheck.journal (task_id, seq, key, kind, name, digest, is_ok, value, checkpoint, is_forgotten,
                               epoch, replica, took)
SELECT * FROM unnest(CAST(:e_task_id AS uuid[]), CAST(:e_seq AS integer[]), CAST(:e_key AS text[]),
                     CAST(:e_kind AS text[]), CAST(:e_name AS text[]), CAST(:e_digest AS bytea[]),
                     CAST(:e_is_ok AS boolean[]), CAST(:e_value AS bytea[]), CAST(:e_checkpoint AS integer[]),
                     CAST(:e_is_forgotten AS boolean[]), CAST(:e_epoch AS integer[]),
                     CAST(:e_replica AS text[]), CAST(:e_took AS interval[])) AS u(task_id)
 WHERE task_id IN (SELECT id FROM writing)

-- part: put_calls
INSERT INTO coatcheck.call (id, task_id, key, kind, name, digest, peer, handler, headers, body, state, seq,
                            idle, hard_due_at, due_at, look_at, checkpoint, epoch, replica)
SELECT u.id, task_id, key, kind, name, digest, peer, handler, coalesce(headers::jsonb, '{}'), body, 'open',
       seq, idle_s * interval '1 s', t.now + hard_s * interval '1 s',
       t.now + least(idle_s, hard_s) * interval '1 s',
       t.now + least(idle_s, hard_s, CASE WHEN kind <> 'timer' THEN CAST(:resend_after_s AS float8) END) * interval '1 s',
       checkpoint, epoch, replica
  FROM unnest(CAST(:c_id AS uuid[]), CAST(:c_task_id AS uuid[]), CAST(:c_key AS text[]), CAST(:c_kind AS text[]),
              CAST(:c_name AS text[]), CAST(:c_digest AS bytea[]), CAST(:c_peer AS text[]),
              CAST(:c_handler AS text[]), CAST(:c_headers AS text[]), CAST(:c_body AS bytea[]),
              CAST(:c_seq AS integer[]), CAST(:c_idle_s AS float8[]), CAST(:c_hard_s AS float8[]),
              CAST(:c_checkpoint AS integer[]), CAST(:c_epoch AS integer[]), CAST(:c_replica AS text[]))
    AS u(id, task_id, key, kind, name, digest, peer, handler, headers, body, seq, idle_s, hard_s, checkpoint, epoch,
         replica),
       (SELECT clock_timestamp() AS now) AS t
 WHERE task_id IN (SELECT id FROM writing)

-- part: put_leftover
-- An end gives up what is still open; that comes last in the order of things.
UPDATE coatcheck.call c
   SET state = 'closed', seq = numbered.seq, closed_at = clock_timestamp(), look_at = NULL
  FROM (SELECT id, seq + row_number() OVER (PARTITION BY task_id ORDER BY id) AS seq
          FROM (SELECT c.id, c.task_id, held.seq FROM held JOIN coatcheck.call c ON c.task_id = held.id
                 WHERE held.is_final AND c.state = 'open' AND c.kind <> 'send'
                   AND c.id <> ALL(CAST(:closing AS uuid[]))
                 ORDER BY c.id FOR UPDATE OF c) AS still_open) AS numbered, coatcheck.task t
 WHERE c.id = numbered.id AND t.id = c.task_id
RETURNING {peer_columns}

-- part: put_forgotten
UPDATE coatcheck.call c SET is_forgotten = true
  FROM unnest(CAST(:f_task_id AS uuid[]), CAST(:f_key AS text[])) AS u(task_id, key)
 WHERE c.task_id = u.task_id AND c.key = u.key AND c.state NOT IN ('open', 'ok')
   AND u.task_id IN (SELECT id FROM writing)

-- part: put_forgotten_entries
UPDATE coatcheck.journal j SET is_forgotten = true
  FROM unnest(CAST(:f_task_id AS uuid[]), CAST(:f_key AS text[])) AS u(task_id, key)
 WHERE j.task_id = u.task_id AND j.key = u.key AND NOT j.is_ok AND u.task_id IN (SELECT id FROM writing)

-- part: put_history
{insert_history} WHERE t_task_id IN (SELECT id FROM writing)

-- part: put_chain_arrays
-- What a put that appends to histories holds besides.
, CAST(:u_entry_count AS integer[]), CAST(:u_head AS bytea[])

-- part: put_chain_names
, entry_count, head

-- part: put_chain_set
entry_count = coalesce(u.entry_count, t.entry_count), head = coalesce(u.head, t.head),

-- part: put_updated
-- What the row alone knows is taken from it: `decide.Standing.trigger_after` and `look_after` say the same. A task that
-- is paused when its attempt failed begins the next one (`Standing.ends_attempt`).
UPDATE coatcheck.task t SET
       state = u.state, checkpoint = t.checkpoint + 1, seq = u.seq + coalesce(n.leftover_count, 0),
       attempt = t.attempt + CASE WHEN u.state = 'retrying' OR (u.state = 'paused' AND u.traceback IS NOT NULL)
                                  THEN 1 ELSE 0 END,
       is_pausing = false,
       pickups = CASE WHEN u.is_progress THEN 0 ELSE t.pickups END,
       trigger = CASE WHEN u.is_final OR NOT u.is_detached THEN t.trigger END,
       wait_calls = u.wait_calls::uuid[], wait_groups = u.wait_groups::integer[],
       wait_needs = u.wait_needs::integer[],
       value = coalesce(u.value, t.value), traceback = coalesce(u.traceback, t.traceback),
       progress = coalesce(u.progress::jsonb, t.progress), {chain_set}
       due_at = clock_timestamp() + u.due_s * interval '1 s',
       look_at = clock_timestamp() + CASE WHEN NOT u.is_final THEN u.due_s
                                          WHEN u.is_detached OR t.trigger IS NULL
                                          THEN CAST(:resend_after_s AS float8) END * interval '1 s',
       updated_at = clock_timestamp(),
       finished_at = CASE WHEN u.is_final THEN clock_timestamp() END
  FROM held AS u
  LEFT JOIN (SELECT task_id, count(*) AS leftover_count FROM leftover GROUP BY task_id) AS n ON n.task_id = u.id
 WHERE t.id = u.id
RETURNING t.id, t.addresses, t.seq

-- part: answer_born
-- What the parts give back: a row for each task that is written, and one for each call that is closed.
SELECT NULL::uuid AS id, id AS task_id, {no_peer}, NULL::jsonb AS addresses, NULL::integer AS seq FROM born

-- part: answer_updated
SELECT NULL::uuid AS id, id AS task_id, {no_peer}, addresses, seq FROM updated

-- part: answer_closed
SELECT *, NULL::jsonb AS addresses, NULL::integer AS seq FROM closed

-- part: answer_leftover
SELECT *, NULL::jsonb AS addresses, NULL::integer AS seq FROM leftover

-- name: news
-- What ended since a run last looked.
SELECT c.task_id, c.key AS h_key, c.kind AS h_kind, c.name AS h_name, c.digest AS h_digest, c.seq AS h_seq,
       c.state AS h_state, c.value AS h_value, c.id AS h_call_id
  FROM unnest(CAST(:id AS uuid[]), CAST(:seen AS integer[])) AS u(task_id, seen)
  JOIN coatcheck.call c ON c.task_id = u.task_id AND c.seq > u.seen AND c.kind <> 'send'
 ORDER BY c.seq

-- name: call_states
SELECT id, state FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[]))

-- name: entries_of_checkpoint
SELECT key AS h_key, kind AS h_kind, name AS h_name, digest AS h_digest, seq AS h_seq,
       CASE WHEN is_ok THEN 'ok' ELSE 'failed' END AS h_state, value AS h_value, NULL::uuid AS h_call_id
  FROM coatcheck.journal
 WHERE task_id = CAST(:id AS uuid) AND checkpoint = CAST(:checkpoint AS integer) ORDER BY seq

-- name: calls_of_checkpoint
SELECT id FROM coatcheck.call WHERE task_id = CAST(:id AS uuid) AND checkpoint = CAST(:checkpoint AS integer)

-- name: closed_since
SELECT {peer_columns} FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
 WHERE c.task_id = CAST(:id AS uuid) AND c.state = 'closed' AND c.kind = 'call' AND c.seq > CAST(:seen AS integer)
 ORDER BY c.seq


-- ===== cancels =====

-- name: find_by_correlation
-- An unfinished task before a finished one; but a finished one too, so that a cancel that comes back finds what it did.
SELECT DISTINCT ON (service, correlation_id) id, service, correlation_id FROM coatcheck.task
 WHERE correlation_id = ANY(CAST(:ids AS text[]))
 ORDER BY service, correlation_id, state IN ('done', 'failed', 'cancelled'), created_at DESC, id DESC

-- name: insert_tombstones
INSERT INTO coatcheck.task (id, service, version, state, epoch, digest, request, value, is_final_sent, due_at,
                            finished_at, created_at)
SELECT id, service, '', 'cancelled', 0, '', '', value, true, clock_timestamp() + keep_s * interval '1 s',
       clock_timestamp(), statement_timestamp()
  FROM unnest(CAST(:id AS uuid[]), CAST(:service AS text[]), CAST(:value AS bytea[]), CAST(:keep_s AS float8[]))
    AS u(id, service, value, keep_s)
 WHERE NOT EXISTS (SELECT FROM coatcheck.task t WHERE t.id = u.id)
 ORDER BY id
ON CONFLICT (id) DO NOTHING
RETURNING id

-- name: history
SELECT number, kind, at, replica, epoch, actor, key, data, digest, hash FROM coatcheck.history
 WHERE task_id = CAST(:id AS uuid) ORDER BY number

-- name: tell
{insert_history}

-- name: cancel_tasks
UPDATE coatcheck.task t
   SET state = 'cancelled', epoch = t.epoch + 1, checkpoint = t.checkpoint + 1, seq = u.seq, value = u.value,
       entry_count = u.entry_count, head = u.head,
       trigger = NULL, wait_calls = NULL, wait_groups = NULL, wait_needs = NULL,
       due_at = clock_timestamp() + u.keep_s * interval '1 s',
       look_at = clock_timestamp() + CAST(:resend_after_s AS float8) * interval '1 s',
       finished_at = clock_timestamp(), updated_at = clock_timestamp()
  FROM unnest(CAST(:id AS uuid[]), CAST(:value AS bytea[]), CAST(:keep_s AS float8[]), CAST(:seq AS integer[]),
              CAST(:entry_count AS integer[]), CAST(:head AS bytea[])) AS u(id, value, keep_s, seq, entry_count, head)
 WHERE t.id = u.id

-- name: close_leftovers
UPDATE coatcheck.call c
   SET state = 'closed', seq = leftover.seq, closed_at = clock_timestamp(), look_at = NULL
  FROM (SELECT held.id, u.seq + row_number() OVER (PARTITION BY u.id ORDER BY held.id) AS seq
          FROM (SELECT id, task_id FROM coatcheck.call
                 WHERE task_id = ANY(CAST(:id AS uuid[])) AND state = 'open' AND kind <> 'send'
                 ORDER BY id FOR UPDATE) AS held
          JOIN unnest(CAST(:id AS uuid[]), CAST(:seq AS integer[])) AS u(id, seq) ON u.id = held.task_id
       ) AS leftover, coatcheck.task t
 WHERE c.id = leftover.id AND t.id = c.task_id
RETURNING {peer_columns}

-- name: closed_calls
SELECT {peer_columns} FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
 WHERE c.task_id = ANY(CAST(:ids AS uuid[])) AND c.state = 'closed'


-- ===== what people order =====
-- One task at a time, locked first, then its calls by id.

-- name: lock_calls_of
SELECT FROM coatcheck.call WHERE task_id = CAST(:id AS uuid) ORDER BY id FOR UPDATE

-- name: places
-- The columns are those of `orders.Place`. Of values only the one that a fork begins with is read.
SELECT key, kind, name, CASE WHEN is_ok THEN 'ok' ELSE 'failed' END AS state, seq, NULL::uuid AS call_id, is_forgotten,
       checkpoint, CASE WHEN key = CAST(:origins AS text) THEN value END AS value
  FROM coatcheck.journal WHERE task_id = CAST(:id AS uuid)
 UNION ALL
SELECT key, kind, name, state, seq, id, is_forgotten, checkpoint, NULL
  FROM coatcheck.call WHERE task_id = CAST(:id AS uuid)

-- name: forget_entries
UPDATE coatcheck.journal SET is_forgotten = true
 WHERE task_id = CAST(:id AS uuid) AND seq = ANY(CAST(:seqs AS integer[]))

-- name: forget_calls
-- One that is open is closed at its place in the order.
UPDATE coatcheck.call c
   SET is_forgotten = true, seq = coalesce(u.seq, c.seq), state = CASE WHEN u.seq IS NULL THEN c.state ELSE 'closed' END,
       closed_at = CASE WHEN u.seq IS NULL THEN c.closed_at ELSE clock_timestamp() END, look_at = NULL
  FROM unnest(CAST(:ids AS uuid[]), CAST(:seqs AS integer[])) AS u(id, seq), coatcheck.task t
 WHERE c.id = u.id AND t.id = c.task_id
RETURNING {peer_columns}, u.seq IS NOT NULL AS is_closed

-- name: set_entries
INSERT INTO coatcheck.journal (task_id, seq, key, kind, name, digest, is_ok, value, checkpoint, epoch, replica)
SELECT j.task_id, u.seq, j.key, j.kind, j.name, j.digest, true, u.value, CAST(:checkpoint AS integer),
       CAST(:epoch AS integer), CAST(:replica AS text)
  FROM unnest(CAST(:old AS integer[]), CAST(:seq AS integer[]), CAST(:value AS bytea[])) AS u(old, seq, value)
  JOIN coatcheck.journal j ON j.task_id = CAST(:id AS uuid) AND j.seq = u.old

-- name: set_calls
INSERT INTO coatcheck.call (id, task_id, key, kind, name, digest, peer, handler, headers, body, idle, hard_due_at,
                            due_at, opened_at, closed_at, state, seq, value, is_sent, checkpoint, epoch, replica)
SELECT u.id, c.task_id, c.key, c.kind, c.name, c.digest, c.peer, c.handler, c.headers, c.body, c.idle, c.hard_due_at,
       c.due_at, c.opened_at, clock_timestamp(), 'ok', u.seq, u.value, true, CAST(:checkpoint AS integer),
       CAST(:epoch AS integer), CAST(:replica AS text)
  FROM unnest(CAST(:old AS uuid[]), CAST(:call_id AS uuid[]), CAST(:seq AS integer[]), CAST(:value AS bytea[]))
    AS u(old, id, seq, value)
  JOIN coatcheck.call c ON c.id = u.old

-- name: order_task
-- It is left to the sweeper, or put off: no message stands behind it, and it waits for nothing.
UPDATE coatcheck.task
   SET state = CAST(:state AS text), epoch = CAST(:epoch AS integer), checkpoint = CAST(:checkpoint AS integer),
       seq = CAST(:seq AS integer), attempt = CAST(:attempt AS integer), pickups = CAST(:pickups AS integer),
       revision = CAST(:revision AS integer), is_pausing = CAST(:is_pausing AS boolean),
       is_final_sent = CAST(:is_final_sent AS boolean), value = CAST(:value AS bytea),
       traceback = CAST(:traceback AS text), request = CAST(:request AS bytea),
       entry_count = CAST(:entry_count AS integer), head = CAST(:head AS bytea),
       trigger = NULL, wait_calls = NULL, wait_groups = NULL, wait_needs = NULL, finished_at = NULL,
       due_at = clock_timestamp() + CAST(:due_s AS float8) * interval '1 s',
       look_at = clock_timestamp() + CAST(:due_s AS float8) * interval '1 s', updated_at = clock_timestamp()
 WHERE id = CAST(:id AS uuid)

-- name: order_run
-- It runs on; its next write finds the flag.
UPDATE coatcheck.task
   SET is_pausing = CAST(:is_pausing AS boolean), seq = CAST(:seq AS integer),
       entry_count = CAST(:entry_count AS integer), head = CAST(:head AS bytea), updated_at = clock_timestamp()
 WHERE id = CAST(:id AS uuid)

-- name: fork_task
INSERT INTO coatcheck.task (id, service, handler, version, state, epoch, checkpoint, seq, digest, request, traceparent,
                            tracestate, caller_subject, caller_claims, history, entry_count, head, forked_from,
                            forked_at, due_at, look_at, created_at, updated_at)
SELECT CAST(:new_id AS uuid), service, handler, version, 'running', 1, CAST(:checkpoint AS integer),
       CAST(:seq AS integer), digest, CAST(:request AS bytea), traceparent, tracestate, caller_subject, caller_claims,
       history, CAST(:entry_count AS integer), CAST(:head AS bytea), id, CAST(:checkpoint AS integer), now, now, now, now
  FROM coatcheck.task, (SELECT clock_timestamp() AS now) AS t
 WHERE id = CAST(:id AS uuid)
ON CONFLICT (id) DO NOTHING
RETURNING id

-- name: copy_entries
INSERT INTO coatcheck.journal (task_id, recorded_at, seq, key, kind, name, digest, is_ok, value, checkpoint, epoch,
                               replica, took)
SELECT CAST(:new_id AS uuid), recorded_at, seq, key, kind, name, digest, is_ok, value, checkpoint, epoch, replica, took
  FROM coatcheck.journal WHERE task_id = CAST(:id AS uuid) AND seq = ANY(CAST(:seqs AS integer[]))

-- name: copy_calls
-- A send that has not left yet leaves from its origin, and only from there.
INSERT INTO coatcheck.call (id, task_id, opened_at, closed_at, hard_due_at, due_at, idle, checkpoint, seq, is_sent,
                            state, value, progress, body, key, kind, name, digest, peer, handler, headers, epoch,
                            replica)
SELECT u.id, CAST(:new_id AS uuid), opened_at, coalesce(closed_at, clock_timestamp()), hard_due_at, due_at, idle,
       checkpoint, seq, true, CASE WHEN state = 'open' THEN 'ok' ELSE state END, value, progress, body, key, kind, name,
       digest, peer, handler, headers, epoch, replica
  FROM unnest(CAST(:old AS uuid[]), CAST(:call_id AS uuid[])) AS u(old, id) JOIN coatcheck.call c ON c.id = u.old

-- name: note_origins
INSERT INTO coatcheck.journal (task_id, seq, key, kind, name, digest, is_ok, value, checkpoint, epoch, replica)
VALUES (CAST(:id AS uuid), 0, CAST(:key AS text), 'note', CAST(:key AS text), '', true, CAST(:value AS bytea), 0, 1,
        CAST(:replica AS text))

-- name: find_for_order
-- A page, the oldest first. `code` is in a value, which the caller reads, if it asks for one.
SELECT id, created_at,
       CASE WHEN CAST(:has_values AS boolean) AND state IN ('failed', 'cancelled', 'held', 'retrying')
            THEN value END AS value
  FROM coatcheck.task
 WHERE epoch > 0 AND (CAST(:states AS text[]) IS NULL OR state = ANY(CAST(:states AS text[])))
   AND (CAST(:service AS text) IS NULL OR service = CAST(:service AS text))
   AND (CAST(:handler AS text) IS NULL OR handler = CAST(:handler AS text))
   AND (CAST(:since AS timestamptz) IS NULL OR created_at >= CAST(:since AS timestamptz))
   AND (CAST(:until AS timestamptz) IS NULL OR created_at < CAST(:until AS timestamptz))
   AND (CAST(:after_at AS timestamptz) IS NULL
        OR (created_at, id) > (CAST(:after_at AS timestamptz), CAST(:after_id AS uuid)))
 ORDER BY created_at, id LIMIT CAST(:limit AS integer)


-- ===== the sweeper =====
-- `look_at` is pushed forward in the transaction that reads a row, so two sweepers never emit for one row at once, and a
-- sweeper that dies after reading loses nothing: the row comes up again. Rows locked elsewhere are skipped, never
-- waited for; so these statements, which take calls without their tasks, cannot close a circle of locks.
-- What an index is to be cut off at is compared with `statement_timestamp()`: `clock_timestamp()` may change from row to
-- row, so Postgres would read the index to its end, past everything that is not due for hours.

-- name: calls_to_look_at
WITH picked AS MATERIALIZED (
    SELECT id FROM coatcheck.call
     WHERE state = 'open' AND look_at <= statement_timestamp()
     ORDER BY look_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED)
SELECT {peer_columns}, c.is_sent, extract(epoch FROM c.due_at - clock_timestamp())::float8 AS waits_s,
       extract(epoch FROM clock_timestamp() - c.opened_at)::float8 AS since_s
  FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
 WHERE c.id = ANY(ARRAY(SELECT id FROM picked))
 ORDER BY c.opened_at

-- name: tasks_to_look_at
WITH picked AS MATERIALIZED (
    SELECT id FROM coatcheck.task
     WHERE look_at <= statement_timestamp()
     ORDER BY look_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED)
SELECT {task_columns}, extract(epoch FROM t.due_at - clock_timestamp())::float8 AS waits_s,
       extract(epoch FROM clock_timestamp() - t.finished_at)::float8 AS since_s
  FROM coatcheck.task t
 WHERE t.id = ANY(ARRAY(SELECT id FROM picked))
 ORDER BY t.finished_at

-- name: look_at_calls_again
UPDATE coatcheck.call c SET look_at = clock_timestamp() + u.pause_s * interval '1 s'
  FROM unnest(CAST(:id AS uuid[]), CAST(:pause_s AS float8[])) AS u(id, pause_s)
 WHERE c.id = u.id

-- name: look_at_tasks_again
UPDATE coatcheck.task t SET look_at = clock_timestamp() + u.pause_s * interval '1 s'
  FROM unnest(CAST(:id AS uuid[]), CAST(:pause_s AS float8[])) AS u(id, pause_s)
 WHERE t.id = u.id

-- name: next_look
-- Not min(): where it expects few rows the planner adds up the whole index instead of reading its first entry.
SELECT extract(epoch FROM least(
    (SELECT look_at FROM coatcheck.call WHERE state = 'open' AND look_at IS NOT NULL ORDER BY look_at LIMIT 1),
    (SELECT look_at FROM coatcheck.task WHERE look_at IS NOT NULL ORDER BY look_at LIMIT 1)
    ) - clock_timestamp())::float8 AS in_s

-- part: tasks_to_retire
-- One for each state: they are kept for different times, and each is read off the end of the index.
SELECT id, state, epoch, history, entry_count, head FROM coatcheck.task
 WHERE state = '{state}' AND finished_at <= statement_timestamp() - CAST(:keep_s AS float8) * interval '1 s'
   AND look_at IS NULL
   AND NOT EXISTS (SELECT FROM coatcheck.call c WHERE c.task_id = task.id AND c.state = 'open')
 ORDER BY finished_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED

-- name: delete_calls
DELETE FROM coatcheck.call WHERE task_id = ANY(CAST(:ids AS uuid[]))

-- name: delete_journal
DELETE FROM coatcheck.journal WHERE task_id = ANY(CAST(:ids AS uuid[]))

-- name: delete_tasks
DELETE FROM coatcheck.task WHERE id = ANY(CAST(:ids AS uuid[]))

-- name: histories_to_forget
-- Those whose last entry says that their task was removed, so long ago.
SELECT task_id FROM coatcheck.history h
 WHERE kind = 'pruned' AND at <= CAST(:before AS timestamptz)
   AND NOT EXISTS (SELECT FROM coatcheck.history l WHERE l.task_id = h.task_id AND l.number > h.number)
   AND {may_go}
 LIMIT CAST(:limit AS integer)

-- name: lock_free_chains
-- Those of which no task is just born again.
SELECT id FROM unnest(CAST(:ids AS uuid[])) AS u(id)
 WHERE pg_try_advisory_xact_lock(hashtextextended(id::text, 0))

-- name: delete_histories
-- A task that was born again meanwhile has a row that goes on with it.
DELETE FROM coatcheck.history h
 WHERE task_id = ANY(CAST(:ids AS uuid[]))
   AND NOT EXISTS (SELECT FROM coatcheck.task t WHERE t.id = h.task_id AND t.entry_count > 0)

-- name: parked_after
SELECT id FROM coatcheck.task
 WHERE id > CAST(:after AS uuid) AND state = 'parked'
   AND updated_at < clock_timestamp() - CAST(:quiet_s AS float8) * interval '1 s'
 ORDER BY id LIMIT CAST(:limit AS integer)

-- name: without_waker
-- OFFSET 0 keeps the planner from joining a page of tasks with the whole table of calls.
SELECT t.id FROM coatcheck.task t
 WHERE t.id = ANY(CAST(:ids AS uuid[])) AND t.state = 'parked'
   AND NOT EXISTS (SELECT FROM coatcheck.call c WHERE c.task_id = t.id AND c.id = ANY(t.wait_calls)
                                                  AND c.state = 'open' AND c.due_at IS NOT NULL OFFSET 0)

-- name: all_without_waker
SELECT t.id FROM coatcheck.task t
 WHERE (t.state = 'parked' AND NOT EXISTS (
            SELECT FROM coatcheck.call c WHERE c.task_id = t.id AND c.id = ANY(t.wait_calls) AND c.state = 'open'
                                           AND c.due_at IS NOT NULL AND c.look_at IS NOT NULL))
    OR (t.state IN ('running', 'retrying', 'held', 'paused') AND (t.due_at IS NULL OR t.look_at IS NULL))
 LIMIT CAST(:limit AS integer)

-- name: met
SELECT DISTINCT counted.id FROM (
    SELECT t.id, t.wait_needs[w.number] AS need,
           count(*) FILTER (WHERE c.state = 'ok') AS ok, count(*) FILTER (WHERE c.state = 'open') AS still_open
      FROM coatcheck.task t, unnest(t.wait_calls, t.wait_groups) AS w(call_id, number), coatcheck.call c
     WHERE t.id = ANY(CAST(:ids AS uuid[])) AND c.id = w.call_id
     GROUP BY t.id, w.number, t.wait_needs[w.number]) AS counted
 WHERE {is_met}

-- name: rewake
UPDATE coatcheck.task
   SET state = 'running', due_at = clock_timestamp(), look_at = clock_timestamp(), trigger = NULL,
       wait_calls = NULL, wait_groups = NULL, wait_needs = NULL, updated_at = clock_timestamp()
 WHERE id IN (SELECT id FROM coatcheck.task WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'parked'
               ORDER BY id FOR UPDATE SKIP LOCKED)
RETURNING id

-- name: hasten_held
-- By the index of what is looked at, whose few entries hold all that is held.
UPDATE coatcheck.task SET due_at = clock_timestamp(), look_at = clock_timestamp()
 WHERE id IN (SELECT id FROM coatcheck.task
               WHERE look_at IS NOT NULL AND state = 'held' AND service = CAST(:service AS text)
               ORDER BY look_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED)
RETURNING id

-- name: hasten_calls
-- Unsent calls to a peer whose queue takes again, the oldest first. The sweeper looks at an unsent call within minutes,
-- so calls that are due later need not be read.
UPDATE coatcheck.call SET look_at = clock_timestamp()
 WHERE id IN (SELECT id FROM coatcheck.call
               WHERE state = 'open' AND look_at > clock_timestamp()
                 AND look_at < statement_timestamp() + CAST(:longest_s AS float8) * interval '1 s'
                 AND NOT is_sent AND kind <> 'timer' AND peer = CAST(:queue AS text)
                 AND opened_at <= clock_timestamp() - CAST(:from_s AS float8) * interval '1 s'
               ORDER BY opened_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED)
RETURNING id

-- name: hasten_finals
-- Final replies to a queue that takes again, the oldest first.
UPDATE coatcheck.task SET look_at = clock_timestamp()
 WHERE id IN (SELECT id FROM coatcheck.task
               WHERE look_at > clock_timestamp()
                 AND look_at < statement_timestamp() + CAST(:longest_s AS float8) * interval '1 s'
                 AND state IN ('done', 'failed', 'cancelled') AND NOT is_final_sent
                 AND addresses @> jsonb_build_array(jsonb_build_array(CAST(:queue AS text)))
                 AND finished_at <= clock_timestamp() - CAST(:from_s AS float8) * interval '1 s'
               ORDER BY finished_at LIMIT CAST(:limit AS integer) FOR UPDATE SKIP LOCKED)
RETURNING id

-- name: mark_sent
UPDATE coatcheck.call SET is_sent = true, look_at = due_at,
       state = CASE WHEN kind = 'send' THEN 'ok' ELSE state END,
       closed_at = CASE WHEN kind = 'send' THEN clock_timestamp() END
 WHERE id IN (SELECT id FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'open' AND NOT is_sent
               ORDER BY id FOR UPDATE SKIP LOCKED)

-- name: mark_final_sent
-- Not where the row has learnt an address meanwhile (`resend_to`): that one is still to be told. Nor where the task was
-- taken back after the end that was told.
UPDATE coatcheck.task t SET is_final_sent = true, look_at = NULL
  FROM (SELECT t.id FROM coatcheck.task t
          JOIN unnest(CAST(:ids AS uuid[]), CAST(:told AS text[]), CAST(:revisions AS integer[]))
            AS u(id, told, revision) ON u.id = t.id AND u.revision = t.revision
         WHERE t.state IN ('done', 'failed', 'cancelled')
           AND NOT EXISTS (SELECT FROM jsonb_array_elements(t.addresses) AS each
                            WHERE each NOT IN (SELECT jsonb_array_elements(u.told::jsonb)))
         ORDER BY t.id FOR UPDATE OF t SKIP LOCKED) AS told
 WHERE t.id = told.id

-- name: resend_calls
UPDATE coatcheck.call
   SET look_at = least(look_at, clock_timestamp() + CAST(:after_s AS float8) * interval '1 s')
 WHERE id IN (SELECT id FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'open' AND NOT is_sent
               ORDER BY id FOR UPDATE SKIP LOCKED)

-- name: resend_to
-- The lock is waited for, not skipped: the message that would bring the reply back is about to be acked.
UPDATE coatcheck.task t
   SET is_final_sent = false,
       look_at = least(look_at, clock_timestamp() + CAST(:after_s AS float8) * interval '1 s'),
       addresses = CASE WHEN known.is_known THEN t.addresses
                        ELSE t.addresses || jsonb_build_array(CAST(:address AS jsonb)) END
  FROM (SELECT id, EXISTS (SELECT FROM jsonb_array_elements(addresses) AS each
                            WHERE each = CAST(:address AS jsonb)) AS is_known
          FROM coatcheck.task WHERE id = CAST(:id AS uuid) FOR UPDATE) AS known
 WHERE t.id = known.id AND t.state IN ('done', 'failed', 'cancelled') AND t.due_at > clock_timestamp()
   AND (known.is_known OR jsonb_array_length(t.addresses) < CAST(:most AS integer))
RETURNING t.id

-- name: renew
UPDATE coatcheck.task t
   SET due_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s',
       look_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s',
       pickups = CASE WHEN CAST(:uncounted AS integer) = 0 THEN t.pickups
                      WHEN CAST(:uncounted AS integer) < 0
                      THEN t.pickups % CAST(:alone AS integer) - CAST(:uncounted AS integer)
                      ELSE greatest(0, t.pickups % CAST(:alone AS integer)
                                       - CAST(:uncounted AS integer) % CAST(:alone AS integer)) END,
       trigger = CASE WHEN CAST(:detaches AS boolean) THEN NULL ELSE t.trigger END
  FROM (SELECT t.id FROM coatcheck.task t
          JOIN unnest(CAST(:ids AS uuid[]), CAST(:epochs AS integer[])) AS u(id, epoch)
            ON u.id = t.id AND u.epoch = t.epoch
         WHERE t.state = 'running' ORDER BY t.id FOR UPDATE OF t SKIP LOCKED) AS mine
 WHERE t.id = mine.id
RETURNING t.id

-- name: still_running
SELECT t.id FROM coatcheck.task t
  JOIN unnest(CAST(:ids AS uuid[]), CAST(:epochs AS integer[])) AS u(id, epoch) ON u.id = t.id AND u.epoch = t.epoch
 WHERE t.state = 'running'


-- ===== seals =====

-- part: seal_columns
number, sealed_at, horizon, task_count, entry_count, root, previous, trimmed_to, key_id, signature, token

-- part: may_go
-- Of a history entry h, once there are seals: the newest one says that it may be gone. So nothing goes that is not
-- sealed, and nothing goes before a signature says so.
(NOT EXISTS (SELECT FROM coatcheck.seal)
 OR h.number <= (SELECT max(l.entry_count) FROM coatcheck.seal_leaf l
                  WHERE l.task_id = h.task_id
                    AND l.seal <= (SELECT trimmed_to FROM coatcheck.seal ORDER BY number DESC LIMIT 1)))

-- name: newest_seal
SELECT {seal_columns} FROM coatcheck.seal ORDER BY number DESC LIMIT 1

-- name: seal_horizon
-- All transactions below it have ended: their history is all there is of them.
SELECT pg_snapshot_xmin(pg_current_snapshot()) AS horizon, clock_timestamp() AS now

-- name: unsealed_cut
-- The transaction of the entry behind the first `limit` ones.
SELECT xid FROM coatcheck.history WHERE xid >= CAST(:floor AS xid8) AND xid < CAST(:ceiling AS xid8)
 ORDER BY xid OFFSET CAST(:limit AS bigint) LIMIT 1

-- name: unsealed_leaves
SELECT DISTINCT ON (task_id) task_id, number, hash, count(*) OVER () AS entry_count
  FROM coatcheck.history WHERE xid >= CAST(:floor AS xid8) AND xid < CAST(:ceiling AS xid8)
 ORDER BY task_id, number DESC

-- name: oldest_unsealed
-- The first by number of its transaction, which is the oldest one or as good as that.
SELECT at FROM coatcheck.history WHERE xid >= CAST(:floor AS xid8) ORDER BY xid LIMIT 1

-- name: seal_before
-- The newest seal that is old enough, among the thousand behind the one that was found last.
SELECT max(number) FROM (SELECT number, sealed_at FROM coatcheck.seal WHERE number > CAST(:after AS bigint)
                          ORDER BY number LIMIT 1000) AS s
 WHERE sealed_at <= clock_timestamp() - CAST(:keep_s AS float8) * interval '1 s'

-- name: add_seal
-- Seal and leaves, or nothing. Another sweeper's insertion of the same number is waited for.
WITH made AS (
    INSERT INTO coatcheck.seal ({seal_columns})
    VALUES (CAST(:number AS bigint), CAST(:sealed_at AS timestamptz), CAST(:horizon AS xid8),
            CAST(:task_count AS integer), CAST(:entry_count AS bigint), CAST(:root AS bytea), CAST(:previous AS bytea),
            CAST(:trimmed_to AS bigint), CAST(:key_id AS text), CAST(:signature AS bytea), CAST(:token AS bytea))
    ON CONFLICT (number) DO NOTHING
    RETURNING number),
leaves AS (
    INSERT INTO coatcheck.seal_leaf (seal, place, task_id, entry_count, head)
    SELECT made.number, u.place - 1, u.task_id, u.entry_count, u.head
      FROM made, unnest(CAST(:l_task_id AS uuid[]), CAST(:l_entry_count AS integer[]), CAST(:l_head AS bytea[]))
        WITH ORDINALITY AS u(task_id, entry_count, head, place))
SELECT number FROM made

-- name: seals_after
SELECT {seal_columns} FROM coatcheck.seal
 WHERE number > CAST(:after AS bigint) ORDER BY number LIMIT CAST(:limit AS integer)

-- name: leaves_between
SELECT seal, task_id, entry_count, head FROM coatcheck.seal_leaf
 WHERE seal > CAST(:after AS bigint) AND seal <= CAST(:last AS bigint)
 ORDER BY seal, place LIMIT CAST(:limit AS bigint)

-- name: sinks
SELECT sink, number, written_at FROM coatcheck.seal_sink ORDER BY sink

-- name: mark_sink
INSERT INTO coatcheck.seal_sink AS s (sink, number) VALUES (CAST(:sink AS text), CAST(:number AS bigint))
ON CONFLICT (sink) DO UPDATE SET number = greatest(s.number, excluded.number), written_at = clock_timestamp()
