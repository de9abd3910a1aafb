"""Taking things up by row lock: replies, resumes and requests. Exactly one replica gets each.

A claim is two statements. The first reads the calls and how their tasks stand, without a lock; what to do is decided by
that. The second does all of it: it locks each task, if it is still the version of the row that was read (`xmin` is
the transaction that wrote it), locks the calls, closes them, stores the values, counts whether a group is met, wakes.
Whatever changes a task's calls writes the task's row too; so where the version holds, all that was read still is so,
and what the statement itself sees of the calls is too. Without a lock and a version from
before the count, two last replies that arrive together would each see the other's call open, and nobody would resume
the task. What is locked elsewhere or has changed is left out, and claimed with the next batch, in the end in a lane of
its own, which locks first.

Counting is by rows, never by decrement: four replies of one task may come in one batch.

What triggered a run is named in the row. A message that comes back (redelivered) and is that trigger takes the run
over, because its holder is dead or has lost it; a plain duplicate never does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from msgspec.structs import replace
from sqlalchemy import text

from coatcheck.store.batcher import Busy, Unreadable
from coatcheck.store.postgres.connection import Connection, Row
from coatcheck.store.postgres.database import columns, rows, spread
from coatcheck.store.postgres.records import (
    HISTORY_OF_TASK,
    TASK_COLUMNS,
    TASK_STATES,
    UNREADABLE,
    Closing,
    addresses_json,
    history_of,
    load_unsent,
    lock_tasks,
    read_tasks,
    task_of,
    to_json,
)
from coatcheck.store.postgres.task_inserts import (
    INSERT_BIRTHS,
    REQUEST_TRIGGER,
    birth_values,
    births_by_pickups,
    running,
)
from coatcheck.store.rows import (
    MOST_ADDRESSES,
    Arrival,
    CallId,
    CallState,
    Kind,
    Request,
    Ruling,
    Task,
    TaskId,
    TaskState,
    Verdict,
    Wake,
)

LOCK_OWNERS = text("""
    SELECT FROM coatcheck.task
     WHERE id IN (SELECT task_id FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[]))) ORDER BY id FOR UPDATE
""")
LOCK_CALLS = text("SELECT FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[])) ORDER BY id FOR UPDATE")
CALLED = text("""
    SELECT c.id, c.task_id, c.kind, c.peer, c.state, c.due_at <= clock_timestamp(), t.xmin, t.service, t.state, t.seq,
           t.trigger
      FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
     WHERE c.id = ANY(CAST(:ids AS uuid[]))
""")
# It needs no lock on the task: of a call that is open it changes nothing that anything but a timeout depends on.
PROGRESS = text("""
    UPDATE coatcheck.call c
       SET progress = u.progress::jsonb, is_sent = true,
           due_at = least(clock_timestamp() + c.idle, c.hard_due_at),
           look_at = least(clock_timestamp() + c.idle, c.hard_due_at)
      FROM (SELECT u.* FROM unnest(CAST(:id AS uuid[]), CAST(:progress AS text[])) AS u(id, progress)
              JOIN coatcheck.call c ON c.id = u.id
             WHERE c.state = 'open' ORDER BY c.id FOR UPDATE OF c SKIP LOCKED) AS u
     WHERE c.id = u.id
    RETURNING c.id
""")
# All of a task's replies are written, or none: the one that would be left out may be the one that is to run the task.
# Each takes one number of its task's sequence, which tells how many there are.
# No two of the lists here are joined: the planner takes each for a row or ten, and would go through one for every row
# of the other. An IN that is no plain condition looks up in a hash.
# A progress may just have moved the due time of a call whose timeout was read to be due.
# It gives back three kinds of rows: a task that is granted, a piece of its history, and a task that is only written.
_TASK_WIDTH = TASK_COLUMNS.count(",") + 1
_NO_TASK = ", ".join(["NULL"] * (_TASK_WIDTH - 1))  # but its id
_NO_HISTORY = ", ".join(["NULL"] * 10)
WRITE = text(f"""
    WITH held AS MATERIALIZED (
        SELECT u.*, coalesce(u.seq - t.seq, 0) AS call_count, t.state, t.wait_calls, t.wait_groups, t.wait_needs
          FROM unnest(CAST(:id AS uuid[]), CAST(:version AS xid[]), CAST(:seq AS integer[]), CAST(:trigger AS text[]),
                      CAST(:takes_over AS boolean[])) AS u(id, version, seq, trigger, takes_over)
          JOIN coatcheck.task t ON t.id = u.id
         WHERE t.xmin = u.version ORDER BY t.id FOR UPDATE OF t SKIP LOCKED),
    held_call AS MATERIALIZED (
        SELECT u.*, c.task_id
          FROM unnest(CAST(:c_id AS uuid[]), {spread("c_state", "text", over="c_id")}, CAST(:c_seq AS integer[]),
                      CAST(:c_value AS bytea[])) AS u(id, state, seq, value)
          JOIN coatcheck.call c ON c.id = u.id
         WHERE (c.task_id IN (SELECT id FROM held)) IS TRUE AND c.state = 'open'
           AND (u.state <> 'timed_out' OR c.due_at <= clock_timestamp())
         ORDER BY c.id FOR UPDATE OF c SKIP LOCKED),
    ready AS MATERIALIZED (
        SELECT * FROM held
         WHERE call_count = 0 OR (id, call_count) IN (SELECT task_id, count(*) FROM held_call GROUP BY task_id)),
    closed AS (
        UPDATE coatcheck.call c
           SET state = u.state, seq = u.seq, value = u.value, closed_at = clock_timestamp(), is_sent = true,
               look_at = NULL
          FROM held_call AS u WHERE c.id = u.id AND (u.task_id IN (SELECT id FROM ready)) IS TRUE),
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
         WHERE CASE WHEN need IS NULL THEN still_open = 0 ELSE ok >= need OR ok + still_open < need END),
    recorded AS (
        UPDATE coatcheck.task t SET seq = r.seq, updated_at = clock_timestamp()
          FROM ready AS r
         WHERE t.id = r.id AND r.seq IS NOT NULL AND NOT r.takes_over AND r.id NOT IN (SELECT id FROM met)),
    granted AS (
        UPDATE coatcheck.task t
           SET state = 'running', epoch = t.epoch + 1, trigger = r.trigger, seq = coalesce(r.seq, t.seq),
               pickups = t.pickups + 1, wait_calls = NULL, wait_groups = NULL, wait_needs = NULL,
               updated_at = clock_timestamp(),
               due_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s',
               look_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s'
          FROM ready AS r
         WHERE t.id = r.id AND (r.takes_over OR r.id IN (SELECT id FROM met))
        RETURNING {TASK_COLUMNS})
    SELECT t.*, {_NO_HISTORY} FROM granted AS t
     UNION ALL
    SELECT t.id, {_NO_TASK}, h.key, h.kind, h.name, h.digest, h.seq, h.state,
           CASE WHEN h.size > CAST(:max_history AS bigint) THEN NULL ELSE h.value END, h.call_id,
           CASE WHEN (h.call_id IN (SELECT id FROM held_call)) IS NOT TRUE THEN h.due_at END,
           coalesce(h.size > CAST(:max_history AS bigint), false)
      FROM granted AS t CROSS JOIN {HISTORY_OF_TASK}
     UNION ALL
    SELECT id, {_NO_TASK}, {_NO_HISTORY} FROM ready WHERE (id IN (SELECT id FROM granted)) IS NOT TRUE
""")
TASK_NAMES = ("id", "version", "seq", "trigger", "takes_over")
CALL_NAMES = ("c_id", "c_state", "c_seq", "c_value")
CALL_ALIKE = ("c_state",)
CREATE = text(f"{INSERT_BIRTHS.replace('coatcheck.task (', 'coatcheck.task AS t (')} RETURNING {TASK_COLUMNS}")
ADDRESSES = text("""
    UPDATE coatcheck.task t SET addresses = u.addresses::jsonb
      FROM unnest(CAST(:id AS uuid[]), CAST(:addresses AS text[])) AS u(id, addresses) WHERE t.id = u.id
""")

Version = int


class _Called(NamedTuple):
    """A call, and how its task stands: in the order of the columns of CALLED."""

    call_id: CallId
    task_id: TaskId
    kind: str
    peer: str
    state: str
    is_due: bool | None
    version: Version
    service: str
    task_state: str
    seq: int
    trigger: str | None


@dataclass(slots=True)
class _Batch:
    """What is decided, before it is written. A grant is (index of the arrival, trigger: a call's id, or words)."""

    versions: dict[TaskId, Version] = field(default_factory=dict)
    seqs: dict[TaskId, int] = field(default_factory=dict)
    closing: dict[CallId, Closing] = field(default_factory=dict)
    progress: dict[CallId, tuple[int, Arrival]] = field(default_factory=dict)
    grants: dict[TaskId, tuple[int, str]] = field(default_factory=dict)
    perhaps: dict[TaskId, tuple[int, CallId]] = field(default_factory=dict)  # parked: if a group is met
    came_back: dict[int, TaskId] = field(default_factory=dict)  # find what is unsent

    def close(self, call: _Called, state: CallState, value: bytes) -> None:
        """Give the call the next place in its task's order."""
        call_id, task_id = call.call_id, call.task_id
        self.versions[task_id] = call.version
        seq = self.seqs[task_id] = self.seqs.get(task_id, call.seq) + 1
        self.closing[call_id] = (call_id, state, seq, value)


@dataclass(slots=True)
class _Written:
    """What WRITE gives back: the tasks that are written, the rows of those that are granted, and their histories."""

    tasks: set[TaskId] = field(default_factory=set)
    granted: list[Row] = field(default_factory=list)
    known: dict[TaskId, list[Sequence[Any]]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        task_id, service, key = row[0], row[1], row[_TASK_WIDTH]
        if key is not None:
            self.known.setdefault(task_id, []).append(row[_TASK_WIDTH:])
            return
        self.tasks.add(task_id)
        if service is not None:
            self.granted.append(row)


Answer = Ruling | Busy | Unreadable | None
Rulings = dict[int, Answer]


async def claim(
    connection: Connection, arrivals: Sequence[Arrival], waits: bool, *, lease: timedelta, max_history: int
) -> Sequence[Answer]:
    """Apply replies, progress and timeouts; grant the tasks whose wait they end."""
    ids = [arrival.call_id for arrival in arrivals]
    if waits:
        await connection.begin()
        await rows(connection, LOCK_OWNERS, ids=ids)
        await rows(connection, LOCK_CALLS, ids=ids)
    found = {row[0]: _Called._make(row) for row in await rows(connection, CALLED, ids=ids)}
    batch, rulings = _Batch(), Rulings()
    for index, arrival in enumerate(arrivals):
        call = found.get(arrival.call_id)
        if call is None or arrival.service not in ("", call.service):
            rulings[index] = Ruling(Verdict.UNKNOWN)  # of another service, its code could not run the task
        else:
            rulings[index] = _rule(batch, index, arrival, call)
    if batch.progress:
        await _note_progress(connection, batch, rulings, found)
    return await _answer(connection, batch, rulings, lease=lease, max_history=max_history)


async def _note_progress(
    connection: Connection, batch: _Batch, rulings: Rulings, found: Mapping[CallId, _Called]
) -> None:
    """Move the due times of calls that get on. One that is answered in the same batch needs it no more."""
    told = {call_id: one for call_id, one in batch.progress.items() if call_id not in batch.closing}
    values = [to_json(arrival.progress or {}) for _, arrival in told.values()]
    noted = await connection.execute(PROGRESS, {"id": list(told), "progress": values})
    for call_id in told.keys() - {row[0] for row in noted}:
        index, _ = told[call_id]
        rulings[index] = Busy(found[call_id].task_id)


def _rule(batch: _Batch, index: int, arrival: Arrival, call: _Called) -> Ruling:
    call_id, task_id = call.call_id, call.task_id
    verdict = Verdict.DUPLICATE if call_id in batch.closing else _judge(arrival, call)
    if verdict is not Verdict.RECORDED:
        if arrival.is_redelivered:
            is_mine = call.task_state == TaskState.RUNNING and call.trigger == str(call_id)
            _take_over(batch, index, task_id, call.version, trigger=str(call_id) if is_mine else None)
    elif arrival.state is None:
        batch.progress[call_id] = (index, arrival)
    else:
        # A timer that is due has simply rung.
        state = CallState.OK if call.kind == Kind.TIMER else arrival.state
        batch.close(call, state, arrival.value)
        if call.task_state == TaskState.PARKED:
            batch.perhaps[task_id] = (index, call_id)
    return Ruling(verdict, name=call.peer, task_id=task_id, state=TASK_STATES[call.task_state])


def _judge(arrival: Arrival, call: _Called) -> Verdict:
    if call.kind == Kind.SEND:
        return Verdict.LATE  # nobody ever waited for it, and its place in the order must not move
    if call.state != CallState.OPEN:
        answered = call.state in (CallState.OK, CallState.FAILED)
        return Verdict.DUPLICATE if answered and arrival.state is not CallState.TIMED_OUT else Verdict.LATE
    if arrival.state is CallState.TIMED_OUT and not call.is_due:
        return Verdict.EARLY
    return Verdict.RECORDED


def _take_over(batch: _Batch, index: int, task_id: TaskId, version: Version, *, trigger: str | None) -> None:
    """A message came back: first its task's unsent things are sent, then it takes the run over if it triggered it."""
    batch.came_back[index] = task_id
    if trigger is not None and task_id not in batch.grants:
        batch.versions[task_id] = version
        batch.grants[task_id] = (index, trigger)


async def resume(
    connection: Connection, wakes: Sequence[Wake], waits: bool, *, lease: timedelta, max_history: int
) -> Sequence[Answer]:
    """Grant tasks whose lease or retry time is over, if they still stand at the epoch the message names."""
    ids = [one.task_id for one in wakes]
    if waits:
        await connection.begin()
    found = await read_tasks(connection, ids, locks=waits)
    batch, rulings = _Batch(), Rulings()
    for index, one in enumerate(wakes):
        task, trigger = found.tasks.get(one.task_id), f"resume:{one.epoch}"
        if task is None or one.service not in ("", task.service):
            rulings[index] = Ruling(Verdict.UNKNOWN)
        elif task.state in (TaskState.RUNNING, TaskState.RETRYING, TaskState.HELD) and task.epoch == one.epoch:
            is_over = one.task_id in found.due and one.task_id not in batch.grants
            rulings[index] = Ruling(Verdict.RECORDED if is_over else Verdict.EARLY, task)
            if is_over:
                batch.versions[one.task_id] = found.versions[one.task_id]
                batch.grants[one.task_id] = (index, trigger)
        else:
            rulings[index] = Ruling(Verdict.FINISHED if task.state.is_final else Verdict.DUPLICATE, task)
            if one.is_redelivered:
                _take_task_over(batch, index, task, found.versions[task.task_id], trigger=trigger)
    return await _answer(connection, batch, rulings, lease=lease, max_history=max_history)


def _take_task_over(batch: _Batch, index: int, task: Task, version: Version, *, trigger: str) -> None:
    is_mine = task.state is TaskState.RUNNING and task.trigger == trigger
    _take_over(batch, index, task.task_id, version, trigger=trigger if is_mine else None)


async def create(
    connection: Connection, requests: Sequence[Request], waits: bool, *, lease: timedelta
) -> Sequence[Ruling | None]:
    """Give each request a new row, and grant it. None: there is one already, or it was made for an earlier copy."""
    born: dict[TaskId, Task] = {}
    by_pickups = births_by_pickups(requests)
    if len(by_pickups) > 1:
        await connection.begin()  # all of a batch, or none of it
    for pickups, births in by_pickups.items():
        standings = [running(lease.total_seconds())] * len(births)
        values = birth_values(births, standings, checkpoint=0, pickups=pickups)
        born |= {row[0]: task_of(row) for row in await connection.execute(CREATE, values)}
    return [
        None if (task := born.pop(one.birth.task_id, None)) is None else Ruling(Verdict.GRANTED, task)
        for one in requests
    ]


async def accept(
    connection: Connection, requests: Sequence[Request], waits: bool, *, lease: timedelta, max_history: int
) -> Sequence[Answer]:
    """Let the row of each request answer for itself. None: there is none any more."""
    await connection.begin()
    locked = await lock_tasks(connection, (one.birth.task_id for one in requests), waits=waits)
    batch, rulings = _Batch(), Rulings()
    joining: dict[TaskId, Task] = {}
    for index, one in enumerate(requests):
        task_id, task = one.birth.task_id, locked.tasks.get(one.birth.task_id)
        if task is None:
            rulings[index] = Busy(task_id) if task_id in locked.busy else None
        else:
            task = joining.get(task_id, task)
            rulings[index] = ruling = _judge_request(batch, index, one, task, locked.versions[task_id])
            if task.wants(one.birth) and ruling.verdict is not Verdict.CROWDED:
                joining[task_id] = replace(task, addresses=(*task.addresses, one.birth.address))
    answer = await _answer(connection, batch, rulings, lease=lease, max_history=max_history)
    if joining:
        values = [addresses_json(task.addresses) for task in joining.values()]
        await connection.execute(ADDRESSES, {"id": list(joining), "addresses": values})
    return answer


def _judge_request(batch: _Batch, index: int, one: Request, task: Task, version: Version) -> Ruling:
    if task.digest != one.birth.digest and task.request:
        return Ruling(Verdict.CONFLICT, task)
    if task.wants(one.birth) and len(task.addresses) >= MOST_ADDRESSES:
        return Ruling(Verdict.CROWDED, task)
    if one.is_redelivered:
        _take_task_over(batch, index, task, version, trigger=REQUEST_TRIGGER)
    return Ruling(Verdict.FINISHED if task.state.is_final else Verdict.DUPLICATE, task)


async def _answer(
    connection: Connection, batch: _Batch, rulings: Rulings, *, lease: timedelta, max_history: int
) -> Sequence[Answer]:
    """Write what was decided, tell the granted runs what they need, and put the rulings in order."""
    written = await _write(connection, batch, {"lease_s": lease.total_seconds(), "max_history": max_history})
    if len(written.tasks) < len(batch.versions):
        _leave(rulings, batch.versions.keys() - written.tasks)
    for row in written.granted:
        task_id = row[0]
        index, _ = batch.grants.get(task_id) or batch.perhaps[task_id]
        rulings[index] = _granted(rulings[index], row, written.known.get(task_id, ()), batch)
    if batch.came_back:
        await _find_unsent(connection, batch, rulings)
    return [rulings[index] for index in range(len(rulings))]


def _granted(ruling: Answer, row: Row, known: Iterable[Sequence[Any]], batch: _Batch) -> Ruling | Unreadable:
    """A grant with all the run needs. It is committed by now: were the whole batch to fail for one row that this code
    cannot read, such as one of a newer release, it would be repeated, and each item taken for a duplicate of itself.
    """
    assert isinstance(ruling, Ruling)
    try:
        task, history = task_of(row), history_of(known, batch.closing)
    except UNREADABLE as error:
        return Unreadable(error)
    return replace(ruling, verdict=Verdict.GRANTED, task=task, history=history)


async def _write(connection: Connection, batch: _Batch, options: dict[str, Any]) -> _Written:
    """Write what was decided, where it still holds."""
    written = _Written()
    if not batch.versions:
        return written
    tasks = []
    for task_id, version in batch.versions.items():
        is_taken_over = task_id in batch.grants
        _, trigger = batch.grants[task_id] if is_taken_over else batch.perhaps.get(task_id, (0, None))
        words = None if trigger is None else str(trigger)
        tasks.append((task_id, version, batch.seqs.get(task_id), words, is_taken_over))
    calls = columns(CALL_NAMES, list(batch.closing.values()), alike=CALL_ALIKE)
    values = columns(TASK_NAMES, tasks) | calls
    for row in await connection.execute(WRITE, values | options):
        written.add(row)
    return written


def _leave(rulings: Rulings, busy: Collection[TaskId]) -> None:
    """Whatever arrived for a task that could not be written is tried again."""
    for index, ruling in rulings.items():
        if isinstance(ruling, Ruling):
            task_id = ruling.task_id if ruling.task is None else ruling.task.task_id
            if task_id is not None and task_id in busy:
                rulings[index] = Busy(task_id)


async def _find_unsent(connection: Connection, batch: _Batch, rulings: Rulings) -> None:
    """Look up what the tasks of redelivered messages have perhaps never sent. A claim has not read their rows yet."""
    came_back = {index: one for index in batch.came_back if isinstance(one := rulings[index], Ruling)}
    tasks = {ruling.task.task_id: ruling.task for ruling in came_back.values() if ruling.task is not None}
    missing = [task_id for index in came_back if (task_id := batch.came_back[index]) not in tasks]
    if missing:
        tasks |= (await read_tasks(connection, missing, locks=False)).tasks
    try:
        unsent = await load_unsent(connection, tasks.values())
    except UNREADABLE as error:
        rulings |= dict.fromkeys(came_back, Unreadable(error))
        return
    for index, ruling in came_back.items():
        task = tasks.get(batch.came_back[index])
        if task is not None:
            rulings[index] = replace(ruling, task=ruling.task or task, unsent=unsent[task.task_id])
