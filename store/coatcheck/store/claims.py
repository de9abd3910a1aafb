"""Taking things up by row lock: replies, resumes and requests. Exactly one replica gets each.

A claim is ONE transaction: lock the task, close the open call, store the value, count whether a group is met, wake.
Counting happens under the task's lock and by rows, never by decrement; without the lock, two last replies that arrive
together would each see the other's call open, and nobody would resume the task.

What triggered a run is named in the row. A message that comes back (redelivered) and is that trigger takes the run
over, because its holder is dead or has lost it; a plain duplicate never does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from sqlalchemy import text

from coatcheck.store.batcher import Busy
from coatcheck.store.births import REQUEST_TRIGGER, insert_births, running
from coatcheck.store.connection import Connection, Row
from coatcheck.store.database import columns, rows
from coatcheck.store.records import Locked, addresses_json, load_histories, load_unsent, lock_tasks, to_json
from coatcheck.store.rows import (
    Arrival,
    CallId,
    CallState,
    Kind,
    Request,
    Ruling,
    Task,
    TaskId,
    TaskState,
    Unsent,
    Verdict,
    Wake,
)

TASKS_OF_CALLS = text("SELECT id, task_id FROM coatcheck.call WHERE id = ANY(CAST(:ids AS uuid[]))")
LOCK_CALLS = text("""
    SELECT id, task_id, kind, peer, state, due_at <= clock_timestamp() AS is_due
      FROM coatcheck.call
     WHERE id = ANY(CAST(:ids AS uuid[])) AND task_id = ANY(CAST(:task_ids AS uuid[])) ORDER BY id FOR UPDATE
""")
LOCK_FREE_CALLS = text(f"{LOCK_CALLS.text} SKIP LOCKED")
CLOSE = text("""
    UPDATE coatcheck.call c
       SET state = u.state, seq = u.seq, value = u.value, closed_at = clock_timestamp(), is_sent = true, look_at = NULL
      FROM unnest(CAST(:id AS uuid[]), CAST(:state AS text[]), CAST(:seq AS integer[]), CAST(:value AS bytea[]))
        AS u(id, state, seq, value)
     WHERE c.id = u.id
""")
PROGRESS = text("""
    UPDATE coatcheck.call c
       SET progress = u.progress::jsonb, is_sent = true,
           due_at = least(clock_timestamp() + c.idle, c.hard_due_at),
           look_at = least(clock_timestamp() + c.idle, c.hard_due_at)
      FROM unnest(CAST(:id AS uuid[]), CAST(:progress AS text[])) AS u(id, progress)
     WHERE c.id = u.id AND c.state = 'open'
""")
MET = text("""
    SELECT DISTINCT counted.id FROM (
        SELECT t.id, t.wait_needs[w.number] AS need,
               count(*) FILTER (WHERE c.state = 'ok') AS ok, count(*) FILTER (WHERE c.state = 'open') AS still_open
          FROM coatcheck.task t, unnest(t.wait_calls, t.wait_groups) AS w(call_id, number), coatcheck.call c
         WHERE t.id = ANY(CAST(:ids AS uuid[])) AND c.id = w.call_id
         GROUP BY t.id, w.number, t.wait_needs[w.number]) AS counted
     WHERE CASE WHEN need IS NULL THEN still_open = 0 ELSE ok >= need OR ok + still_open < need END
""")
RECORD = text("""
    UPDATE coatcheck.task t SET seq = u.seq, updated_at = clock_timestamp()
      FROM unnest(CAST(:id AS uuid[]), CAST(:seq AS integer[])) AS u(id, seq) WHERE t.id = u.id
""")
GRANT = text("""
    UPDATE coatcheck.task t
       SET state = 'running', epoch = t.epoch + 1, trigger = u.trigger, seq = u.seq, pickups = t.pickups + 1,
           wait_calls = NULL, wait_groups = NULL, wait_needs = NULL, updated_at = clock_timestamp(),
           due_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s',
           look_at = clock_timestamp() + CAST(:lease_s AS float8) * interval '1 s'
      FROM unnest(CAST(:id AS uuid[]), CAST(:trigger AS text[]), CAST(:seq AS integer[])) AS u(id, trigger, seq)
     WHERE t.id = u.id
""")
ADDRESSES = text("""
    UPDATE coatcheck.task t SET addresses = u.addresses::jsonb
      FROM unnest(CAST(:id AS uuid[]), CAST(:addresses AS text[])) AS u(id, addresses) WHERE t.id = u.id
""")


@dataclass(slots=True)
class _Batch:
    """What a transaction decided, before it writes."""

    seq: dict[TaskId, int] = field(default_factory=dict)
    grants: dict[TaskId, tuple[int, str]] = field(default_factory=dict)  # task → (index of the arrival, trigger)
    look_again: dict[int, Task] = field(default_factory=dict)  # redelivered: find what is unsent

    def next_seq(self, task: Task) -> int:
        self.seq[task.task_id] = self.seq.get(task.task_id, task.seq) + 1
        return self.seq[task.task_id]


Rulings = dict[int, Ruling | Busy]


async def claim(
    connection: Connection, arrivals: Sequence[Arrival], waits: bool, *, lease: timedelta
) -> Sequence[Ruling | Busy]:
    """Apply replies, progress and timeouts; grant the tasks whose wait they end."""
    owners = {row.id: row.task_id for row in await rows(connection, TASKS_OF_CALLS, ids=_ids(arrivals))}
    locked = await lock_tasks(connection, owners.values(), waits=waits)
    calls = {row.id: row for row in await _lock_calls(connection, arrivals, locked, waits=waits)}
    batch, rulings = _Batch(), Rulings()
    closing: dict[CallId, tuple[int, Arrival, int]] = {}
    progress: dict[CallId, Arrival] = {}
    for index, arrival in enumerate(arrivals):
        task_id = owners.get(arrival.call_id)
        if task_id is None:
            rulings[index] = Ruling(Verdict.UNKNOWN)
        elif arrival.call_id not in calls:
            rulings[index] = Busy(task_id)  # its task or, by a sweeper, its call is locked; or retention just took it
        elif _is_foreign(arrival, locked.tasks[task_id]):
            rulings[index] = Ruling(Verdict.UNKNOWN)
        else:
            call, task = calls[arrival.call_id], locked.tasks[task_id]
            verdict = _judge(arrival, call, is_closing=arrival.call_id in closing)
            rulings[index] = Ruling(verdict, task, name=call.peer)
            if verdict is Verdict.RECORDED and arrival.state is None:
                progress[arrival.call_id] = arrival
            elif verdict is Verdict.RECORDED:
                closing[arrival.call_id] = (index, arrival, batch.next_seq(task))
            elif arrival.is_redelivered:
                _take_over(batch, index, task, trigger=str(arrival.call_id))
    await _close(connection, calls, closing)
    if progress:
        values = [to_json(one.progress or {}) for one in progress.values()]
        await connection.execute(PROGRESS, {"id": list(progress), "progress": values})
    await _wake(connection, batch, locked, [(owners[call], index, call) for call, (index, _, _) in closing.items()])
    return await _answer(connection, batch, locked, rulings, lease)


async def resume(
    connection: Connection, wakes: Sequence[Wake], waits: bool, *, lease: timedelta
) -> Sequence[Ruling | Busy]:
    """Grant tasks whose lease or retry time is over, if they still stand at the epoch the message names."""
    locked = await lock_tasks(connection, (one.task_id for one in wakes), waits=waits)
    batch, rulings = _Batch(), Rulings()
    for index, one in enumerate(wakes):
        task = locked.tasks.get(one.task_id)
        trigger = f"resume:{one.epoch}"
        if one.task_id in locked.busy:
            rulings[index] = Busy(one.task_id)
        elif task is None or _is_foreign(one, task):
            rulings[index] = Ruling(Verdict.UNKNOWN)
        elif task.state in (TaskState.RUNNING, TaskState.RETRYING, TaskState.HELD) and task.epoch == one.epoch:
            is_over = one.task_id in locked.due and one.task_id not in batch.grants
            rulings[index] = Ruling(Verdict.RECORDED if is_over else Verdict.EARLY, task)
            if is_over:
                batch.grants[one.task_id] = (index, trigger)
        else:
            rulings[index] = Ruling(Verdict.FINISHED if task.state.is_final else Verdict.DUPLICATE, task)
            if one.is_redelivered:
                _take_over(batch, index, task, trigger=trigger)
    return await _answer(connection, batch, locked, rulings, lease)


async def accept(
    connection: Connection, requests: Sequence[Request], waits: bool, *, lease: timedelta
) -> Sequence[Ruling | Busy]:
    """Give each request its task: a new row is granted, an old one answers for itself."""
    standing = running(lease.total_seconds(), pickups=1)
    born = await insert_births(connection, [(one.birth, standing) for one in requests])
    locked = await lock_tasks(connection, (one.birth.task_id for one in requests), waits=waits)
    batch, rulings = _Batch(), Rulings()
    joining: dict[TaskId, Task] = {}
    for index, one in enumerate(requests):
        task_id, task = one.birth.task_id, locked.tasks.get(one.birth.task_id)
        if task is None:
            rulings[index] = Busy(task_id)
        elif task_id in born:
            born.discard(task_id)  # a second copy in this batch is a duplicate of the first
            rulings[index] = Ruling(Verdict.GRANTED, task)
        else:
            rulings[index] = _judge_request(batch, index, one, joining.get(task_id, task))
            task = _joined(one, joining.get(task_id, task))
            if task is not None:
                joining[task_id] = task
    if joining:
        values = [addresses_json(task.addresses) for task in joining.values()]
        await connection.execute(ADDRESSES, {"id": list(joining), "addresses": values})
    return await _answer(connection, batch, locked, rulings, lease)


def _is_foreign(arrived: Arrival | Wake, task: Task) -> bool:
    """Tell whether it came on the queue of another service than the task's: whose code could not run the task."""
    return arrived.service not in ("", task.service)


def _judge(arrival: Arrival, call: Row, *, is_closing: bool) -> Verdict:
    if is_closing:
        return Verdict.DUPLICATE
    if call.kind == Kind.SEND:
        return Verdict.LATE  # nobody ever waited for it, and its place in the order must not move
    if call.state != CallState.OPEN:
        answered = call.state in (CallState.OK, CallState.FAILED)
        return Verdict.DUPLICATE if answered and arrival.state is not CallState.TIMED_OUT else Verdict.LATE
    if arrival.state is CallState.TIMED_OUT and not call.is_due:
        return Verdict.EARLY
    return Verdict.RECORDED


def _judge_request(batch: _Batch, index: int, one: Request, task: Task) -> Ruling:
    if task.digest != one.birth.digest and task.request:
        return Ruling(Verdict.CONFLICT, task)
    if one.is_redelivered:
        _take_over(batch, index, task, trigger=REQUEST_TRIGGER)
    return Ruling(Verdict.FINISHED if task.state.is_final else Verdict.DUPLICATE, task)


def _joined(one: Request, task: Task) -> Task | None:
    """The task with one more address to answer, if the same request came with another one while it is unfinished."""
    address = one.birth.address
    is_same = task.digest == one.birth.digest
    if address is None or not is_same or task.state.is_final or address in task.addresses:
        return None
    return replace(task, addresses=(*task.addresses, address))


def _take_over(batch: _Batch, index: int, task: Task, *, trigger: str) -> None:
    """A message came back: first its task's unsent things are sent, then it takes the run over if it triggered it."""
    batch.look_again[index] = task
    is_mine = task.state is TaskState.RUNNING and task.trigger == trigger
    if is_mine and task.task_id not in batch.grants:
        batch.grants[task.task_id] = (index, trigger)


async def _lock_calls(
    connection: Connection, arrivals: Sequence[Arrival], locked: Locked, *, waits: bool
) -> Iterable[Row]:
    if not locked.tasks:
        return ()
    statement = LOCK_CALLS if waits else LOCK_FREE_CALLS
    return await rows(connection, statement, ids=_ids(arrivals), task_ids=sorted(locked.tasks))


async def _close(
    connection: Connection, calls: dict[CallId, Row], closing: dict[CallId, tuple[int, Arrival, int]]
) -> None:
    items = [
        {"id": call_id, "state": _end_state(arrival, calls[call_id]), "seq": seq, "value": arrival.value}
        for call_id, (_, arrival, seq) in closing.items()
    ]
    if items:
        await connection.execute(CLOSE, columns(items, *items[0]))


def _end_state(arrival: Arrival, call: Row) -> CallState:
    """A timer that is due has simply rung."""
    assert arrival.state is not None
    return CallState.OK if call.kind == Kind.TIMER else arrival.state


async def _wake(
    connection: Connection, batch: _Batch, locked: Locked, closed: Collection[tuple[TaskId, int, CallId]]
) -> None:
    """Grant each parked task whose wait is over to the last of the replies that ended it."""
    last = {task_id: (index, str(call)) for task_id, index, call in closed}
    parked = sorted(task_id for task_id in last if locked.tasks[task_id].state is TaskState.PARKED)
    if parked:
        for row in await rows(connection, MET, ids=parked):
            batch.grants[row.id] = last[row.id]


async def _answer(
    connection: Connection, batch: _Batch, locked: Locked, rulings: Rulings, lease: timedelta
) -> Sequence[Ruling | Busy]:
    """Write the grants and sequence numbers, load what the granted runs need, and put the rulings in order."""
    recorded = {task_id: seq for task_id, seq in batch.seq.items() if task_id not in batch.grants}
    if recorded:
        await connection.execute(RECORD, {"id": list(recorded), "seq": list(recorded.values())})
    if batch.grants:
        items = [
            {"id": task_id, "trigger": trigger, "seq": batch.seq.get(task_id, locked.tasks[task_id].seq)}
            for task_id, (_, trigger) in batch.grants.items()
        ]
        await connection.execute(GRANT, columns(items, *items[0]) | {"lease_s": lease.total_seconds()})
    histories = await load_histories(connection, batch.grants.keys())
    unsent = await load_unsent(connection, list({one.task_id: one for one in batch.look_again.values()}.values()))
    for task_id, (index, trigger) in batch.grants.items():
        task = locked.tasks[task_id]
        granted = replace(
            task,
            state=TaskState.RUNNING,
            epoch=task.epoch + 1,
            pickups=task.pickups + 1,
            trigger=trigger,
            seq=batch.seq.get(task_id, task.seq),
        )
        ruling = rulings[index]
        assert isinstance(ruling, Ruling)
        rulings[index] = replace(ruling, verdict=Verdict.GRANTED, task=granted, history=histories[task_id])
    by_task: dict[int, Unsent] = defaultdict(Unsent) | {
        index: unsent[task.task_id] for index, task in batch.look_again.items()
    }
    for index, found in by_task.items():
        ruling = rulings[index]
        if isinstance(ruling, Ruling):
            rulings[index] = replace(ruling, unsent=found)
    return [rulings[index] for index in range(len(rulings))]


def _ids(arrivals: Sequence[Arrival]) -> list[CallId]:
    return sorted({arrival.call_id for arrival in arrivals})
