"""Every write of a run, set-based: births, entries, new calls, and how the run goes on or ends.

A put is ONE statement, which carries what it depends on: there is no row yet, or the row stands exactly as the run last
saw it (epoch, checkpoint, sequence number), and what a park waits for is not over. Every reply that is claimed takes
the next sequence number under the task's lock; so a row at the number the run has seen has no news, and the calls are
as the run knows them. The row is locked in the statement, with SKIP LOCKED.

What does not stand like that is put under the lock, in a transaction (`put_locked`):

    1. lock the tasks by id                             (epoch or checkpoint differ: refused; nothing is written)
    2. read what ended since the run last looked        (the news; they decide whether a park holds)
    3. the same statement, which now holds true

A crash before the commit leaves nothing; after it, the rows say all, and the unacked trigger or the lease brings the
task back. A put whose outcome is unknown is simply put again: the checkpoint number tells whether it is in already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, assert_never

from sqlalchemy import TextClause, text

from coatcheck.store.batcher import Busy
from coatcheck.store.postgres.connection import Connection
from coatcheck.store.postgres.database import columns, rows, spread
from coatcheck.store.postgres.records import (
    CALL_STATES,
    ENTRY_COLUMNS,
    PEER_COLUMNS,
    addresses_of,
    lock_tasks,
    peer_of,
    recorded_of,
    to_json,
)
from coatcheck.store.postgres.task_inserts import (
    INSERT_BIRTHS,
    RESEND_AFTER_S,
    STANDING_COLUMNS,
    Standing,
    birth_values,
)
from coatcheck.store.rows import (
    Address,
    Again,
    CallId,
    CallState,
    Finish,
    Going,
    Hold,
    Kind,
    NewCall,
    NewEntry,
    Park,
    Peer,
    Put,
    PutDone,
    PutRefused,
    Recorded,
    Task,
    TaskId,
    TaskState,
)

# --- the statement, in parts: it is made of those that have something to write ---

PARTS = {
    "born": f"{INSERT_BIRTHS} RETURNING id",
    # Waits that are over already, by the states of calls that were opened before. One opened just now has no row.
    "met": """
        SELECT id FROM (
            SELECT u.id, u.need, count(*) FILTER (WHERE c.state = 'ok') AS ok,
                   count(*) FILTER (WHERE coalesce(c.state, 'open') = 'open') AS still_open
              FROM unnest(CAST(:m_id AS uuid[]), CAST(:m_number AS integer[]), CAST(:m_need AS integer[]),
                          CAST(:m_call_id AS uuid[])) AS u(id, number, need, call_id)
              LEFT JOIN coatcheck.call c ON c.id = u.call_id
             GROUP BY u.id, u.number, u.need) AS counted
         WHERE CASE WHEN need IS NULL THEN still_open = 0 ELSE ok >= need OR ok + still_open < need END
    """,
    "held": """
        SELECT u.*, u.state IN ('done', 'failed') AS is_final, t.addresses
          FROM unnest(CAST(:u_id AS uuid[]), CAST(:u_epoch AS integer[]), CAST(:u_follows AS integer[]),
                      CAST(:u_seen AS integer[]), CAST(:u_is_progress AS boolean[]), CAST(:u_state AS text[]),
                      CAST(:u_seq AS integer[]), CAST(:u_is_detached AS boolean[]), CAST(:u_wait_calls AS text[]),
                      CAST(:u_wait_groups AS text[]), CAST(:u_wait_needs AS text[]), CAST(:u_value AS bytea[]),
                      CAST(:u_traceback AS text[]), CAST(:u_progress AS text[]), CAST(:u_due_s AS float8[]))
            AS u(id, epoch, follows, seen, is_progress, state, seq, is_detached, wait_calls, wait_groups, wait_needs,
                 value, traceback, progress, due_s)
          JOIN coatcheck.task t ON t.id = u.id
         WHERE t.state = 'running' AND t.epoch = u.epoch AND t.checkpoint = u.follows AND t.seq = u.seen
               {unless_met}
         ORDER BY t.id FOR UPDATE OF t SKIP LOCKED
    """,
    "closed": f"""
        UPDATE coatcheck.call c
           SET state = 'closed', seq = u.seq, closed_at = clock_timestamp(), look_at = NULL,
               is_forgotten = (c.task_id, c.key) IN (SELECT * FROM unnest(CAST(:f_task_id AS uuid[]),
                                                                          CAST(:f_key AS text[])))
          FROM unnest(CAST(:x_id AS uuid[]), CAST(:x_task_id AS uuid[]), CAST(:x_seq AS integer[]))
            AS u(id, task_id, seq), coatcheck.task t
         WHERE c.id = u.id AND c.state = 'open' AND t.id = c.task_id AND u.task_id IN (SELECT id FROM writing)
        RETURNING {PEER_COLUMNS}
    """,
    "entries": """
        INSERT INTO coatcheck.journal (task_id, seq, key, kind, name, digest, is_ok, value, checkpoint, is_forgotten)
        SELECT * FROM unnest(CAST(:e_task_id AS uuid[]), CAST(:e_seq AS integer[]), CAST(:e_key AS text[]),
                             CAST(:e_kind AS text[]), CAST(:e_name AS text[]), CAST(:e_digest AS bytea[]),
                             CAST(:e_is_ok AS boolean[]), CAST(:e_value AS bytea[]), CAST(:e_checkpoint AS integer[]),
                             CAST(:e_is_forgotten AS boolean[])) AS u(task_id)
         WHERE task_id IN (SELECT id FROM writing)
    """,
    "calls": f"""
        INSERT INTO coatcheck.call (id, task_id, key, kind, name, digest, peer, handler, headers, body, state, seq,
                                    idle, hard_due_at, due_at, look_at, checkpoint)
        SELECT u.id, task_id, key, kind, name, digest, peer, handler, coalesce(headers::jsonb, '{{}}'), body, 'open',
               seq, idle_s * interval '1 s', t.now + hard_s * interval '1 s',
               t.now + least(idle_s, hard_s) * interval '1 s',
               t.now + least(idle_s, hard_s, CASE WHEN kind <> 'timer' THEN CAST(:resend_after_s AS float8) END)
                       * interval '1 s',
               checkpoint
          FROM unnest(CAST(:c_id AS uuid[]), CAST(:c_task_id AS uuid[]), CAST(:c_key AS text[]),
                      {spread("c_kind", "text", over="c_id")}, {spread("c_name", "text", over="c_id")},
                      CAST(:c_digest AS bytea[]), {spread("c_peer", "text", over="c_id")},
                      CAST(:c_handler AS text[]), CAST(:c_headers AS text[]), CAST(:c_body AS bytea[]),
                      CAST(:c_seq AS integer[]), CAST(:c_idle_s AS float8[]),
                      {spread("c_hard_s", "float8", over="c_id")}, {spread("c_checkpoint", "integer", over="c_id")})
            AS u(id, task_id, key, kind, name, digest, peer, handler, headers, body, seq, idle_s, hard_s, checkpoint),
               (SELECT clock_timestamp() AS now) AS t
         WHERE task_id IN (SELECT id FROM writing)
    """,
    # An end gives up what is still open; that comes last in the order of things.
    "leftover": f"""
        UPDATE coatcheck.call c
           SET state = 'closed', seq = numbered.seq, closed_at = clock_timestamp(), look_at = NULL
          FROM (SELECT id, seq + row_number() OVER (PARTITION BY task_id ORDER BY id) AS seq
                  FROM (SELECT c.id, c.task_id, held.seq FROM held JOIN coatcheck.call c ON c.task_id = held.id
                         WHERE held.is_final AND c.state = 'open' AND c.kind <> 'send'
                           AND c.id <> ALL(CAST(:closing AS uuid[]))
                         ORDER BY c.id FOR UPDATE OF c) AS still_open) AS numbered, coatcheck.task t
         WHERE c.id = numbered.id AND t.id = c.task_id
        RETURNING {PEER_COLUMNS}
    """,
    "forgotten": """
        UPDATE coatcheck.call c SET is_forgotten = true
          FROM unnest(CAST(:f_task_id AS uuid[]), CAST(:f_key AS text[])) AS u(task_id, key)
         WHERE c.task_id = u.task_id AND c.key = u.key AND c.state NOT IN ('open', 'ok')
           AND u.task_id IN (SELECT id FROM writing)
    """,
    "forgotten_entries": """
        UPDATE coatcheck.journal j SET is_forgotten = true
          FROM unnest(CAST(:f_task_id AS uuid[]), CAST(:f_key AS text[])) AS u(task_id, key)
         WHERE j.task_id = u.task_id AND j.key = u.key AND NOT j.is_ok AND u.task_id IN (SELECT id FROM writing)
    """,
    "updated": """
        UPDATE coatcheck.task t SET
               state = u.state, checkpoint = t.checkpoint + 1, seq = u.seq + coalesce(n.leftover_count, 0),
               attempt = t.attempt + CASE WHEN u.state = 'retrying' THEN 1 ELSE 0 END,
               pickups = CASE WHEN u.is_progress THEN 0 ELSE t.pickups END,
               trigger = CASE WHEN u.is_final OR NOT u.is_detached THEN t.trigger END,
               wait_calls = u.wait_calls::uuid[], wait_groups = u.wait_groups::integer[],
               wait_needs = u.wait_needs::integer[],
               value = coalesce(u.value, t.value), traceback = coalesce(u.traceback, t.traceback),
               progress = coalesce(u.progress::jsonb, t.progress),
               due_at = clock_timestamp() + u.due_s * interval '1 s',
               -- Only a final reply that nothing else would bring back is the sweeper's to look at. The row knows best:
               -- it may have lost its trigger while this end was on its way.
               look_at = clock_timestamp() + CASE WHEN NOT u.is_final THEN u.due_s
                                                  WHEN u.is_detached OR t.trigger IS NULL
                                                  THEN CAST(:resend_after_s AS float8) END * interval '1 s',
               updated_at = clock_timestamp(),
               finished_at = CASE WHEN u.is_final THEN clock_timestamp() END
          FROM held AS u
          LEFT JOIN (SELECT task_id, count(*) AS leftover_count FROM leftover GROUP BY task_id) AS n ON n.task_id = u.id
         WHERE t.id = u.id
        RETURNING t.id, t.addresses, t.seq
    """,
}
_NO_PEER = f"{'NULL::text, ' * 5} NULL::bytea, NULL::jsonb, NULL::timestamptz, NULL::text"
ANSWERS = {
    "born": f"SELECT NULL::uuid, id, {_NO_PEER}, NULL::jsonb, NULL::integer FROM born",
    "updated": f"SELECT NULL::uuid, id, {_NO_PEER}, addresses, seq FROM updated",
    "closed": "SELECT *, NULL::jsonb, NULL::integer FROM closed",
    "leftover": "SELECT *, NULL::jsonb, NULL::integer FROM leftover",
}
"""What the parts give back: a row for each task that is written, and one for each call that is closed."""

NEWS = text("""
    SELECT c.task_id, c.key, c.kind, c.name, c.digest, c.seq, c.state, c.value, c.id
      FROM unnest(CAST(:id AS uuid[]), CAST(:seen AS integer[])) AS u(task_id, seen)
      JOIN coatcheck.call c ON c.task_id = u.task_id AND c.seq > u.seen AND c.kind <> 'send'
     ORDER BY c.seq
""")
STATES = text("SELECT id, state FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[]))")
OPENED_CALLS = text("SELECT id, task_id, checkpoint FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[]))")
OWN_ENTRIES = text(f"""
    SELECT {ENTRY_COLUMNS} FROM coatcheck.journal
     WHERE task_id = CAST(:id AS uuid) AND checkpoint = CAST(:checkpoint AS integer) ORDER BY seq
""")
CLOSED_SINCE = text(f"""
    SELECT {PEER_COLUMNS} FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
     WHERE c.task_id = CAST(:id AS uuid) AND c.state = 'closed' AND c.kind = 'call' AND c.seq > CAST(:seen AS integer)
     ORDER BY c.seq
""")


@cache
def _statement(parts: tuple[str, ...]) -> TextClause:
    written = " UNION ALL ".join(f"SELECT id FROM {one}" for one in ("born", "held") if one in parts)
    bodies = {one: PARTS[one] for one in parts}
    if "held" in bodies:
        unless_met = "AND t.id NOT IN (SELECT id FROM met)" if "met" in parts else ""
        bodies["held"] = bodies["held"].format(unless_met=unless_met)
    last_fence = "held" if "held" in bodies else "born"
    clauses = []
    for one, body in bodies.items():
        clauses.append(f"{one} AS {'MATERIALIZED ' if one == 'held' else ''}({body})")
        if one == last_fence:
            clauses.append(f"writing AS MATERIALIZED ({written})")
    answers = "\n UNION ALL\n".join(answer for one, answer in ANSWERS.items() if one in parts)
    return text("WITH " + ",\n".join(clauses) + "\n" + answers)


ENTRY_NAMES = (
    *("e_task_id", "e_seq", "e_key", "e_kind", "e_name", "e_digest", "e_is_ok", "e_value", "e_checkpoint"),
    "e_is_forgotten",
)
CALL_NAMES = (
    *("c_id", "c_task_id", "c_key", "c_kind", "c_name", "c_digest", "c_peer", "c_handler", "c_headers", "c_body"),
    *("c_seq", "c_idle_s", "c_hard_s", "c_checkpoint"),
)
CALL_ALIKE = ("c_kind", "c_name", "c_peer", "c_hard_s", "c_checkpoint")
CLOSE_NAMES = ("x_id", "x_task_id", "x_seq")
WAIT_NAMES = ("m_id", "m_number", "m_need", "m_call_id")
FORGET_NAMES = ("f_task_id", "f_key")
UPDATE_NAMES = tuple(f"u_{it}" for it in ("id", "epoch", "follows", "seen", "is_progress", *STANDING_COLUMNS))


@dataclass(slots=True)
class _Writing:
    """A put on its way into the statement. `seen` is the sequence number its row must have."""

    put: Put
    seen: int
    seq: int = 0
    is_parked: bool = False
    news: list[Recorded] = field(default_factory=list)
    cancels: list[Peer] = field(default_factory=list)
    addresses: tuple[Address, ...] = ()
    is_written: bool = False

    def __post_init__(self) -> None:
        self.seq = self.seen

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def done(self) -> PutDone:
        return PutDone(
            epoch=self.put.epoch or 1,
            checkpoint=self.put.follows + 1,
            seq=self.seq,
            is_parked=self.is_parked,
            news=() if self.is_parked else tuple(self.news),
            cancels=tuple(self.cancels),
            addresses=self.addresses,
        )


async def put(connection: Connection, puts: Sequence[Put], waits: bool) -> Sequence[PutDone | None]:
    """Write the puts whose rows stand as their runs believe; None: not written, `put_locked` will know why."""
    first: dict[TaskId, _Writing] = {}
    writing = [_Writing(one, one.seen) for one in puts]
    for one in writing:
        first.setdefault(one.put.task_id, one)
    for one in first.values():
        one.is_parked = isinstance(one.put.end, Park) and not _is_met(one.put.end, {})
    await _write(connection, first)
    return [one.done() if one.is_written else None for one in writing]


async def put_locked(connection: Connection, puts: Sequence[Put], waits: bool) -> Sequence[PutDone | PutRefused | Busy]:
    """Write a batch of puts under their tasks' locks; the answers come in the order of the puts."""
    await connection.begin()
    answers: dict[int, PutDone | PutRefused | Busy] = {}
    writing = await _fence(connection, puts, waits, answers)
    held = {one.put.task_id: one for one in writing.values()}
    await _read_news(connection, held.values())
    states = await _read_states(connection, held.values())
    for one in held.values():
        one.is_parked = isinstance(one.put.end, Park) and not _is_met(one.put.end, states)
    await _write(connection, held)
    for index, one in writing.items():
        # A birth that waited for another one of its id finds that one's row at its next turn.
        answers[index] = one.done() if one.is_written else Busy(one.put.task_id)
    return [answers[index] for index in range(len(puts))]


async def _fence(
    connection: Connection, puts: Sequence[Put], waits: bool, answers: dict[int, PutDone | PutRefused | Busy]
) -> dict[int, _Writing]:
    """Lock the tasks, and let through only puts that follow the row as it stands, and births that find none."""
    locked = await lock_tasks(connection, (one.task_id for one in puts), waits=waits)
    writing: dict[int, _Writing] = {}
    taken: set[TaskId] = set()
    for index, one in enumerate(puts):
        task = locked.tasks.get(one.task_id)
        if one.task_id in taken or one.task_id in locked.busy:
            answers[index] = Busy(one.task_id)  # two puts of one task in a batch: the second one waits its turn
        elif task is None and one.birth is None:
            answers[index] = PutRefused(None)
        elif task is None:
            writing[index] = _Writing(one, 0)
            taken.add(one.task_id)
        elif one.birth is None and _follows(one, task):
            writing[index] = _Writing(one, task.seq)
            taken.add(one.task_id)
        elif await _is_in_already(connection, one, task):
            answers[index] = await _answer_again(connection, one, task)
            taken.add(one.task_id)
        else:
            answers[index] = PutRefused(task)
    return writing


def _follows(one: Put, task: Task) -> bool:
    return task.state is TaskState.RUNNING and task.epoch == one.epoch and task.checkpoint == one.follows


async def _is_in_already(connection: Connection, one: Put, task: Task) -> bool:
    """Whether this very put was committed before, when its run could not know: its traces are in the row.

    The ids of the calls it opened are random, so they prove it. Without any, its end must be what the row shows; for a
    birth that proves nothing (a duplicate of the request may have run elsewhere), unless it is the same final state.
    """
    if task.epoch != (one.epoch or 1) or task.checkpoint != one.follows + 1:
        return False
    entries = await rows(connection, OWN_ENTRIES, id=one.task_id, checkpoint=task.checkpoint)
    if [row.key for row in entries] != [entry.key for entry in one.changes.entries]:
        return False
    if wanted := {call.call_id for call in _opens(one)}:
        found = await rows(connection, OPENED_CALLS, ids=list(wanted))
        mine = {row.id for row in found if row.task_id == one.task_id and row.checkpoint == task.checkpoint}
        return mine == wanted
    match one.end:
        case Finish(state, value):
            return task.state is state and task.value == value
        case Park():
            return one.birth is None and task.state in (TaskState.PARKED, TaskState.RUNNING)
        case Going(is_detached=is_detached):
            is_as_wanted = task.state is TaskState.RUNNING and not (is_detached and task.trigger is not None)
            return one.birth is None and is_as_wanted
        case Again(failure=failure):
            return one.birth is None and task.state is TaskState.RETRYING and task.value == failure
        case Hold(failure=failure):
            return one.birth is None and task.state is TaskState.HELD and task.value == failure
        case end:
            assert_never(end)


async def _answer_again(connection: Connection, one: Put, task: Task) -> PutDone:
    """Answer a put that is in: with the news, read again, and with what it closed, for nobody has heard of that yet."""
    again = _Writing(one, task.seq)
    is_parked = task.state is TaskState.PARKED
    await _read_news(connection, [again])
    own = await rows(connection, OWN_ENTRIES, id=one.task_id, checkpoint=task.checkpoint)
    news = () if is_parked else (*again.news, *(recorded_of(row) for row in own))
    cancels = tuple([peer_of(row) for row in await rows(connection, CLOSED_SINCE, id=one.task_id, seen=one.seen)])
    return PutDone(task.epoch, task.checkpoint, task.seq, is_parked, news, cancels, task.addresses)


async def _read_news(connection: Connection, held: Iterable[_Writing]) -> None:
    """Replies may have been claimed while the run was live: whatever ended since it last looked."""
    known = {one.put.task_id: one for one in held if one.seen > one.put.seen}
    if not known:
        return
    found = await rows(connection, NEWS, id=list(known), seen=[one.put.seen for one in known.values()])
    for task_id, *ended in found:
        known[task_id].news.append(recorded_of(ended))


async def _read_states(connection: Connection, held: Iterable[_Writing]) -> Mapping[CallId, CallState]:
    """The states of calls that are waited for, as the rows have them. Not by the news alone: a live run may have been
    told of a reply already, out of turn, without having come to it before it asked to be put down.
    """
    wanted = [call_id for one in held for _, _, call_id in _waits_for_older(one.put)]
    if not wanted:
        return {}
    return {call_id: CALL_STATES[state] for call_id, state in await rows(connection, STATES, ids=wanted)}


def _waits_for_older(put: Put) -> list[tuple[int, int | None, CallId]]:
    """The members of the groups that a task which has a row is parked with, if any was opened before this put."""
    if put.birth is not None or not isinstance(put.end, Park):
        return []
    opened = {call.call_id for call in put.changes.opens}
    groups = enumerate(put.end.groups)
    members = [(number, group.need, call_id) for number, group in groups for call_id in group.calls]
    return members if any(call_id not in opened for _, _, call_id in members) else []


def _is_met(end: Park, states: Mapping[CallId, CallState]) -> bool:
    """Whether a wait is over before it began, by what ended during the run. Calls that are opened just now are open."""
    return any(group.is_met(states) for group in end.groups)


def _opens(put: Put) -> Sequence[NewCall]:
    """What a put opens. An end that closes all calls opens none, save the sends, which leave all the same."""
    if isinstance(put.end, Finish):
        return [call for call in put.changes.opens if call.kind is Kind.SEND]
    return put.changes.opens


async def _write(connection: Connection, writing: Mapping[TaskId, _Writing]) -> None:
    """Write what its precondition lets pass, and note what became of each."""
    parts, values = _parts(writing)
    if not parts:
        return
    for row in await connection.execute(_statement(parts), values):
        call_id, task_id, *_, addresses, seq = row
        one = writing[task_id]
        if call_id is None:
            one.is_written = True
            if seq is not None:
                one.addresses, one.seq = addresses_of(addresses), seq
        elif row[3] == Kind.CALL:
            one.cancels.append(peer_of(row))


def _parts(writing: Mapping[TaskId, _Writing]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The parts that have something to write, and the values they take. Gives each put its places in the order."""
    held = writing.values()
    closes = [(call_id, one.put.task_id, one.next_seq()) for one in held for call_id in one.put.changes.closes]
    entries = [_entry_row(one, entry) for one in held for entry in one.put.changes.entries]
    calls = [_call_row(one, call) for one in held for call in _opens(one.put)]
    births = [(one.put.birth, _standing(one)) for one in held if one.put.birth is not None]
    updates = [(*_fence_of(one), *_standing(one)) for one in held if one.put.birth is None]
    waits = [(one.put.task_id, *member) for one in held if one.is_parked for member in _waits_for_older(one.put)]
    forgets = [(one.put.task_id, key) for one in held if isinstance(one.put.end, Again) for key in one.put.end.forget]
    values: dict[str, Any] = {"closing": [call_id for call_id, _, _ in closes], "f_task_id": [], "f_key": []}
    has = {"born": births, "met": waits, "held": updates, "closed": closes, "entries": entries, "calls": calls}
    has |= {"leftover": updates, "forgotten": forgets, "forgotten_entries": forgets, "updated": updates}
    if births:
        born = [birth for birth, _ in births]
        values |= birth_values(born, [standing for _, standing in births], checkpoint=1, pickups=0)
    values["resend_after_s"] = RESEND_AFTER_S
    for names, items in (
        (UPDATE_NAMES, updates),
        (ENTRY_NAMES, entries),
        (CALL_NAMES, calls),
        (CLOSE_NAMES, closes),
        (WAIT_NAMES, waits),
        (FORGET_NAMES, forgets),
    ):
        if items:
            values |= columns(names, items, alike=CALL_ALIKE)
    return tuple([part for part, items in has.items() if items]), values


def _entry_row(one: _Writing, entry: NewEntry) -> tuple[Any, ...]:
    seq, key, kind, name, digest = one.next_seq(), entry.key, entry.kind, entry.name, entry.digest
    state = CallState.OK if entry.is_ok else CallState.FAILED
    one.news.append(Recorded(key, kind, name, digest, seq, state, entry.value))
    end, checkpoint = one.put.end, one.put.follows + 1
    is_forgotten = isinstance(end, Again) and not entry.is_ok and key in end.forget
    return (one.put.task_id, seq, key, kind, name, digest, entry.is_ok, entry.value, checkpoint, is_forgotten)


def _call_row(one: _Writing, call: NewCall) -> tuple[Any, ...]:
    return (
        call.call_id,
        one.put.task_id,
        call.key,
        call.kind,
        call.name,
        call.digest,
        call.peer,
        call.handler,
        to_json(dict(call.headers)) if call.headers else None,
        call.body,
        one.next_seq() if call.kind is Kind.SEND else None,
        call.idle.total_seconds() if call.idle is not None else None,
        call.hard.total_seconds() if call.hard is not None else None,
        one.put.follows + 1,
    )


def _fence_of(one: _Writing) -> tuple[TaskId, int, int, int, bool]:
    put = one.put
    # A run that only renews its lease has shown nothing yet; any other end shows that it did not kill its worker.
    is_progress = bool(put.changes.entries or put.changes.opens) or not isinstance(put.end, Going)
    return (put.task_id, put.epoch, put.follows, one.seen, is_progress)


def _standing(one: _Writing) -> Standing:
    """How the row stands after the put; once all that it opens and closes has its place in the order."""
    put, seq = one.put, one.seq
    progress = to_json(dict(put.progress)) if put.progress is not None else None
    match put.end:
        case Park() as end if one.is_parked:
            return (TaskState.PARKED, seq, True, *_waits(end), None, None, progress, None)
        case Park(lease=lease):
            return (TaskState.RUNNING, seq, False, None, None, None, None, None, progress, lease.total_seconds())
        case Going(lease, is_detached):
            lease_s = lease.total_seconds()
            return (TaskState.RUNNING, seq, is_detached, None, None, None, None, None, progress, lease_s)
        case Finish(state, value, keep, traceback, is_detached):
            words, keep_s = printable(traceback), keep.total_seconds()
            return (state, seq, is_detached, None, None, None, value, words, progress, keep_s)
        case Again(delay, failure, traceback):
            words, delay_s = printable(traceback), delay.total_seconds()
            return (TaskState.RETRYING, seq, True, None, None, None, failure, words, progress, delay_s)
        case Hold(delay, failure):
            return (TaskState.HELD, seq, True, None, None, None, failure, None, progress, delay.total_seconds())
        case end:
            assert_never(end)


def _waits(end: Park) -> tuple[str, str, str]:
    """The groups as three arrays in Postgres's own words: members, the group of each, and what each group needs."""
    calls, numbers, needs = [], [], []
    for number, group in enumerate(end.groups, start=1):
        calls += [call_id.hex for call_id in group.calls]
        numbers += [str(number)] * len(group.calls)
        needs.append("NULL" if group.need is None else str(group.need))
    return f"{{{','.join(calls)}}}", f"{{{','.join(numbers)}}}", f"{{{','.join(needs)}}}"


def printable(words: str | None) -> str | None:
    """Text for people as Postgres takes it: a NUL or half a surrogate in a message must not keep a task from ending."""
    return None if words is None else words.encode("utf-8", "replace").decode().replace("\0", "?")
