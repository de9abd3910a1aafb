"""Every write of a run, as one set-based transaction: births, entries, new calls, and how the run goes on or ends.

    1. insert the rows of tasks that have none yet, as they will stand (a conflict: somebody was first: refused)
    2. lock the tasks by id                             (epoch or checkpoint differ: refused; nothing is written)
    3. read what ended since the run last looked        (the news; they decide whether a park holds)
    4. close calls, insert entries and calls, update the tasks that had a row

A crash before COMMIT leaves nothing; after it, the rows say all, and the unacked trigger or the lease brings the task
back. A put whose outcome is unknown is simply put again: the checkpoint number tells whether it is in already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from sqlalchemy import text

from coatcheck.store.batcher import Busy
from coatcheck.store.births import REQUEST_TRIGGER, insert_births
from coatcheck.store.connection import Connection, Row
from coatcheck.store.database import columns, rows
from coatcheck.store.records import (
    PEER_COLUMNS,
    lock_tasks,
    peer_of,
    recorded_of,
    to_json,
)
from coatcheck.store.rows import (
    Again,
    CallId,
    CallState,
    Finish,
    Going,
    Hold,
    Kind,
    NewCall,
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

RESEND_AFTER_S = 60.0
"""How long a call or final reply may stand unmarked before the sweeper sends it again."""

NEWS = text("""
    SELECT c.task_id, c.key, c.kind, c.name, c.digest, c.seq, c.state, c.value, c.id AS call_id
      FROM unnest(CAST(:id AS uuid[]), CAST(:seen AS integer[])) AS u(id, seen)
      JOIN coatcheck.call c ON c.task_id = u.id AND c.seq > u.seen AND c.kind <> 'send'
     ORDER BY c.seq
""")
CLOSE_CALLS = text(f"""
    UPDATE coatcheck.call c
       SET state = 'closed', seq = u.seq, closed_at = clock_timestamp(), look_at = NULL
      FROM unnest(CAST(:id AS uuid[]), CAST(:seq AS integer[])) AS u(id, seq), coatcheck.task t
     WHERE c.id = u.id AND c.state = 'open' AND t.id = c.task_id
    RETURNING {PEER_COLUMNS}
""")
CLOSE_LEFTOVERS = text(f"""
    UPDATE coatcheck.call c
       SET state = 'closed', seq = leftover.seq, closed_at = clock_timestamp(), look_at = NULL
      FROM (SELECT held.id, u.seq + row_number() OVER (PARTITION BY u.id ORDER BY held.id) AS seq
              FROM (SELECT id, task_id FROM coatcheck.call
                     WHERE task_id = ANY(CAST(:id AS uuid[])) AND state = 'open' AND kind <> 'send'
                     ORDER BY id FOR UPDATE) AS held
              JOIN unnest(CAST(:id AS uuid[]), CAST(:seq AS integer[])) AS u(id, seq) ON u.id = held.task_id
           ) AS leftover, coatcheck.task t
     WHERE c.id = leftover.id AND t.id = c.task_id
    RETURNING {PEER_COLUMNS}
""")
CALL_STATES = text("SELECT id, state FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[]))")
OPENED_CALLS = text("SELECT id, task_id, checkpoint FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[]))")
OWN_ENTRIES = text("""
    SELECT key, kind, name, digest, seq, CASE WHEN is_ok THEN 'ok' ELSE 'failed' END AS state, value,
           NULL::uuid AS call_id
      FROM coatcheck.journal WHERE task_id = CAST(:id AS uuid) AND checkpoint = CAST(:checkpoint AS integer)
     ORDER BY seq
""")
CLOSED_SINCE = text(f"""
    SELECT {PEER_COLUMNS} FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
     WHERE c.task_id = CAST(:id AS uuid) AND c.state = 'closed' AND c.kind = 'call' AND c.seq > CAST(:seen AS integer)
     ORDER BY c.seq
""")
INSERT_ENTRIES = text("""
    INSERT INTO coatcheck.journal (task_id, seq, key, kind, name, digest, is_ok, value, checkpoint)
    SELECT * FROM unnest(CAST(:task_id AS uuid[]), CAST(:seq AS integer[]), CAST(:key AS text[]), CAST(:kind AS text[]),
                         CAST(:name AS text[]), CAST(:digest AS bytea[]), CAST(:is_ok AS boolean[]),
                         CAST(:value AS bytea[]), CAST(:checkpoint AS integer[]))
""")
INSERT_CALLS = text("""
    INSERT INTO coatcheck.call (id, task_id, key, kind, name, digest, peer, handler, headers, body, state, seq, idle,
                                hard_due_at, due_at, look_at, checkpoint)
    SELECT u.id, task_id, key, kind, name, digest, peer, handler, headers::jsonb, body, 'open', seq,
           idle_s * interval '1 s', t.now + hard_s * interval '1 s', t.now + least(idle_s, hard_s) * interval '1 s',
           t.now + least(idle_s, hard_s,
                         CASE WHEN kind <> 'timer' THEN CAST(:resend_after_s AS float8) END) * interval '1 s',
           checkpoint
      FROM unnest(CAST(:id AS uuid[]), CAST(:task_id AS uuid[]), CAST(:key AS text[]), CAST(:kind AS text[]),
                  CAST(:name AS text[]), CAST(:digest AS bytea[]), CAST(:peer AS text[]), CAST(:handler AS text[]),
                  CAST(:headers AS text[]), CAST(:body AS bytea[]), CAST(:seq AS integer[]), CAST(:idle_s AS float8[]),
                  CAST(:hard_s AS float8[]), CAST(:checkpoint AS integer[]))
        AS u(id, task_id, key, kind, name, digest, peer, handler, headers, body, seq, idle_s, hard_s, checkpoint),
           (SELECT clock_timestamp() AS now) AS t
""")
FORGET = text("""
    WITH u AS (SELECT * FROM unnest(CAST(:task_id AS uuid[]), CAST(:key AS text[])) AS u(task_id, key)),
         calls AS (UPDATE coatcheck.call c SET is_forgotten = true FROM u
                    WHERE c.task_id = u.task_id AND c.key = u.key AND c.state NOT IN ('open', 'ok'))
    UPDATE coatcheck.journal j SET is_forgotten = true FROM u
     WHERE j.task_id = u.task_id AND j.key = u.key AND NOT j.is_ok
""")
UPDATE_TASKS = text("""
    UPDATE coatcheck.task t SET
           state = u.state, checkpoint = t.checkpoint + 1, seq = u.seq, attempt = t.attempt + u.more_attempts,
           pickups = CASE WHEN u.is_progress THEN 0 ELSE t.pickups END,
           trigger = CASE WHEN u.is_detached THEN NULL ELSE t.trigger END,
           wait_calls = u.wait_calls::uuid[], wait_groups = u.wait_groups::integer[],
           wait_needs = u.wait_needs::integer[],
           value = coalesce(u.value, t.value), traceback = coalesce(u.traceback, t.traceback),
           progress = coalesce(u.progress::jsonb, t.progress),
           due_at = clock_timestamp() + u.due_s * interval '1 s',
           look_at = clock_timestamp() + u.look_s * interval '1 s',
           updated_at = clock_timestamp(),
           finished_at = CASE WHEN u.is_final THEN clock_timestamp() END
      FROM unnest(CAST(:id AS uuid[]), CAST(:state AS text[]), CAST(:seq AS integer[]),
                  CAST(:more_attempts AS integer[]), CAST(:is_progress AS boolean[]),
                  CAST(:is_detached AS boolean[]), CAST(:wait_calls AS text[]),
                  CAST(:wait_groups AS text[]), CAST(:wait_needs AS text[]), CAST(:value AS bytea[]),
                  CAST(:traceback AS text[]), CAST(:progress AS text[]), CAST(:due_s AS float8[]),
                  CAST(:look_s AS float8[]), CAST(:is_final AS boolean[]))
        AS u(id, state, seq, more_attempts, is_progress, is_detached, wait_calls, wait_groups, wait_needs, value,
             traceback, progress, due_s, look_s, is_final)
     WHERE t.id = u.id
""")


@dataclass(slots=True)
class _Writing:
    """A put that holds its task's lock and passed the fence."""

    put: Put
    task: Task | None  # None: born in this transaction
    seq: int
    news: list[Recorded] = field(default_factory=list)
    cancels: list[Peer] = field(default_factory=list)
    is_parked: bool = False

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def note_closed(self, row: Row) -> None:
        if row.kind == Kind.CALL:
            self.cancels.append(peer_of(row))

    @property
    def checkpoint(self) -> int:
        return self.put.follows + 1


async def put(connection: Connection, puts: Sequence[Put], waits: bool) -> Sequence[PutDone | PutRefused | Busy]:
    """Write a batch of puts; the answers come in the order of the puts."""
    answers: dict[int, PutDone | PutRefused | Busy] = {}
    writing = await _fence(connection, puts, waits, answers)
    held = list(writing.values())
    await _read_news(connection, held)
    states = await _read_states(connection, held)
    for one in held:
        one.is_parked = isinstance(one.put.end, Park) and not _is_met(one, states)
    await _close_calls(connection, held)
    await _insert_entries(connection, held)
    await _insert_calls(connection, held)
    await _close_leftovers(connection, held)
    await _forget(connection, held)
    await _update_tasks(connection, held)
    for index, one in writing.items():
        answers[index] = PutDone(
            epoch=one.put.epoch or 1,
            checkpoint=one.checkpoint,
            is_parked=one.is_parked,
            news=() if one.is_parked else tuple(one.news),
            cancels=tuple(one.cancels),
            task=one.task,
        )
    return [answers[index] for index in range(len(puts))]


async def _fence(
    connection: Connection, puts: Sequence[Put], waits: bool, answers: dict[int, PutDone | PutRefused | Busy]
) -> dict[int, _Writing]:
    """Insert births, lock the rest, and let through only puts that follow the row as it stands."""
    born = await insert_births(connection, [(one.birth, _first_row(one)) for one in puts if one.birth is not None])
    locked = await lock_tasks(connection, (one.task_id for one in puts if one.task_id not in born), waits=waits)
    writing: dict[int, _Writing] = {}
    taken: set[TaskId] = set()
    for index, one in enumerate(puts):
        task = locked.tasks.get(one.task_id)
        if one.task_id in taken or one.task_id in locked.busy:
            answers[index] = Busy(one.task_id)  # two puts of one task in a batch: the second one waits its turn
        elif one.task_id in born and one.birth is not None:
            writing[index] = _Writing(one, None, 0)
            taken.add(one.task_id)
        elif task is None:
            # A birth that met a row which is gone now: retention took it in between, and the next try is the first.
            answers[index] = PutRefused(None) if one.birth is None else Busy(one.task_id)
        elif one.birth is None and _follows(one, task):
            writing[index] = _Writing(one, task, task.seq)
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
        found = await rows(connection, OPENED_CALLS, ids=sorted(wanted))
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
    again = _Writing(one, task, task.seq)
    is_parked = task.state is TaskState.PARKED
    await _read_news(connection, [again])
    if not is_parked:
        again.news += [
            recorded_of(row) for row in await rows(connection, OWN_ENTRIES, id=one.task_id, checkpoint=task.checkpoint)
        ]
    cancels = [peer_of(row) for row in await rows(connection, CLOSED_SINCE, id=one.task_id, seen=one.seen)]
    return PutDone(task.epoch, task.checkpoint, is_parked, () if is_parked else tuple(again.news), tuple(cancels), task)


async def _read_news(connection: Connection, held: Sequence[_Writing]) -> None:
    """Replies may have been claimed while the run was live: whatever ended since it last looked."""
    known = {one.put.task_id: one for one in held if one.task is not None and one.task.seq > one.put.seen}
    if not known:
        return
    found = await rows(connection, NEWS, id=list(known), seen=[one.put.seen for one in known.values()])
    for row in found:
        known[row.task_id].news.append(recorded_of(row))


async def _read_states(connection: Connection, held: Sequence[_Writing]) -> dict[CallId, CallState]:
    """The states of calls that are waited for, as the rows have them. Not by the news alone: a live run may have been
    told of a reply already, out of turn, without having come to it before it asked to be put down.
    """
    wanted = {
        call_id
        for one in held
        if one.task is not None and isinstance(one.put.end, Park)
        for group in one.put.end.groups
        for call_id in group.calls
    } - {call.call_id for one in held for call in one.put.changes.opens}
    if not wanted:
        return {}
    return {row.id: CallState(row.state) for row in await rows(connection, CALL_STATES, ids=sorted(wanted))}


def _is_met(one: _Writing, states: Mapping[CallId, CallState]) -> bool:
    """Whether a wait is over before it began, by what ended during the run. Calls that are opened just now are open."""
    assert isinstance(one.put.end, Park)
    return any(group.is_met(states) for group in one.put.end.groups)


def _opens(put: Put) -> Sequence[NewCall]:
    """What a put opens. An end that closes all calls opens none, save the sends, which leave all the same."""
    if isinstance(put.end, Finish):
        return [call for call in put.changes.opens if call.kind is Kind.SEND]
    return put.changes.opens


async def _close_calls(connection: Connection, held: Sequence[_Writing]) -> None:
    by_task = {one.put.task_id: one for one in held}
    closing = sorted((call_id, one.next_seq()) for one in held for call_id in one.put.changes.closes)
    if closing:
        found = await rows(connection, CLOSE_CALLS, id=[c for c, _ in closing], seq=[seq for _, seq in closing])
        for row in found:
            by_task[row.task_id].note_closed(row)


async def _close_leftovers(connection: Connection, held: Sequence[_Writing]) -> None:
    """An end gives up what is still open; that comes last in the order of things."""
    ending = {one.put.task_id: one for one in held if one.task is not None and isinstance(one.put.end, Finish)}
    if ending:
        for row in await close_leftovers(connection, {task_id: one.seq for task_id, one in ending.items()}):
            ending[row.task_id].next_seq()
            ending[row.task_id].note_closed(row)


async def close_leftovers(connection: Connection, seqs: Mapping[TaskId, int]) -> Sequence[Row]:
    """Close every open call of these tasks, which the caller has locked; they are numbered on from the given `seq`."""
    return await rows(connection, CLOSE_LEFTOVERS, id=list(seqs), seq=list(seqs.values()))


async def _insert_entries(connection: Connection, held: Sequence[_Writing]) -> None:
    items = []
    for one in held:
        for entry in one.put.changes.entries:
            seq = one.next_seq()
            state = CallState.OK if entry.is_ok else CallState.FAILED
            one.news.append(Recorded(entry.key, entry.kind, entry.name, entry.digest, seq, state, entry.value))
            items.append(
                {
                    "task_id": one.put.task_id,
                    "seq": seq,
                    "key": entry.key,
                    "kind": entry.kind,
                    "name": entry.name,
                    "digest": entry.digest,
                    "is_ok": entry.is_ok,
                    "value": entry.value,
                    "checkpoint": one.checkpoint,
                }
            )
    if items:
        await connection.execute(INSERT_ENTRIES, columns(items, *items[0]))


async def _insert_calls(connection: Connection, held: Sequence[_Writing]) -> None:
    items = [
        {
            "id": call.call_id,
            "task_id": one.put.task_id,
            "key": call.key,
            "kind": call.kind,
            "name": call.name,
            "digest": call.digest,
            "peer": call.peer,
            "handler": call.handler,
            "headers": to_json(dict(call.headers)),
            "body": call.body,
            "seq": one.next_seq() if call.kind is Kind.SEND else None,
            "idle_s": call.idle.total_seconds() if call.idle is not None else None,
            "hard_s": call.hard.total_seconds() if call.hard is not None else None,
            "checkpoint": one.checkpoint,
        }
        for one in held
        for call in _opens(one.put)
    ]
    if items:
        values: dict[str, Any] = columns(items, *items[0])
        await connection.execute(INSERT_CALLS, values | {"resend_after_s": RESEND_AFTER_S})


async def _forget(connection: Connection, held: Sequence[_Writing]) -> None:
    pairs = [(one.put.task_id, key) for one in held if isinstance(one.put.end, Again) for key in one.put.end.forget]
    if pairs:
        await connection.execute(FORGET, {"task_id": [t for t, _ in pairs], "key": [k for _, k in pairs]})


async def _update_tasks(connection: Connection, held: Sequence[_Writing]) -> None:
    """Those that were born here were written as they stand: an update would leave a dead version behind each."""
    assert all(one.seq == _number_count(one.put) for one in held if one.task is None)
    known = [one for one in held if one.task is not None]
    items = [_task_update(one) for one in sorted(known, key=lambda one: one.put.task_id)]
    if items:
        await connection.execute(UPDATE_TASKS, columns(items, *items[0]))


def _first_row(put: Put) -> dict[str, Any]:
    """How a task that is born with this put stands after it. Nobody can have answered it yet, so nothing is awaited."""
    one = _Writing(put, None, _number_count(put))
    one.is_parked = isinstance(put.end, Park) and not _is_met(one, {})
    row = _task_update(one)
    trigger = None if row.pop("is_detached") else REQUEST_TRIGGER
    del row["id"], row["is_progress"]
    return row | {"checkpoint": one.checkpoint, "pickups": 0, "trigger": trigger}


def _number_count(put: Put) -> int:
    """How many places in the order of things a put takes."""
    sends = sum(call.kind is Kind.SEND for call in _opens(put))
    return len(put.changes.closes) + len(put.changes.entries) + sends


def _task_update(one: _Writing) -> dict[str, Any]:
    put, changes = one.put, one.put.changes
    update: dict[str, Any] = {
        "id": put.task_id,
        "seq": one.seq,
        "more_attempts": 0,
        # A run that only renews its lease has shown nothing yet; any other end shows that it did not kill its worker.
        "is_progress": bool(changes.entries or changes.opens) or not isinstance(put.end, Going),
        "is_detached": False,
        "wait_calls": None,
        "wait_groups": None,
        "wait_needs": None,
        "value": None,
        "traceback": None,
        "progress": to_json(dict(put.progress)) if put.progress is not None else None,
        "is_final": False,
    }
    return update | _ending(one)


def _ending(one: _Writing) -> dict[str, Any]:
    """The columns that say how the run goes on or ends. `due_s` and `look_s` count from now."""
    ending: dict[str, Any]
    match one.put.end:
        case Park() as end if one.is_parked:
            ending = {"state": TaskState.PARKED, "is_detached": True, "due_s": None, "look_s": None}
            return ending | _waits(end)
        case Park(lease=lease) | Going(lease=lease, is_detached=False):
            return {"state": TaskState.RUNNING, "due_s": lease.total_seconds(), "look_s": lease.total_seconds()}
        case Going(lease=lease):
            lease_s = lease.total_seconds()
            return {"state": TaskState.RUNNING, "due_s": lease_s, "look_s": lease_s, "is_detached": True}
        case Finish(state, value, keep, traceback, is_detached):
            # Only a final reply that nothing else would bring back is the sweeper's to look at. The row knows best: it
            # may have lost its trigger while this end was on its way.
            is_detached = is_detached or (one.task is not None and one.task.trigger is None)
            look_s = RESEND_AFTER_S if is_detached else None
            ending = {"state": state, "value": value, "traceback": printable(traceback), "is_final": True}
            return ending | {"due_s": keep.total_seconds(), "look_s": look_s}
        case Again(delay, failure, traceback):
            ending = {"state": TaskState.RETRYING, "value": failure, "more_attempts": 1}
            ending["traceback"] = printable(traceback)
            return ending | {"due_s": delay.total_seconds(), "look_s": delay.total_seconds(), "is_detached": True}
        case Hold(delay, failure):
            ending = {"state": TaskState.HELD, "value": failure, "is_detached": True}
            return ending | {"due_s": delay.total_seconds(), "look_s": delay.total_seconds()}
        case end:
            assert_never(end)


def _waits(end: Park) -> dict[str, Any]:
    calls, numbers, needs = [], [], []
    for number, group in enumerate(end.groups, start=1):
        calls += [str(call_id) for call_id in group.calls]
        numbers += [str(number)] * len(group.calls)
        needs.append("NULL" if group.need is None else str(group.need))
    arrays = {"wait_calls": calls, "wait_groups": numbers, "wait_needs": needs}
    return {name: "{" + ",".join(values) + "}" for name, values in arrays.items()}


def printable(words: str | None) -> str | None:
    """Text for people as Postgres takes it: a NUL or half a surrogate in a message must not keep a task from ending."""
    return None if words is None else words.encode("utf-8", "replace").decode().replace("\0", "?")
