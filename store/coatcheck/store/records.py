"""Reading rows: the statements that lock and load, and the values they become.

Lock order, everywhere: tasks by id, then calls by id. A batch locks its tasks with SKIP LOCKED and hands what is locked
elsewhere to a lane of its own, where one task is waited for at a time; so no two transactions ever wait in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import text

from coatcheck.store.connection import Connection, Row
from coatcheck.store.database import rows
from coatcheck.store.rows import (
    Address,
    Caller,
    CallState,
    History,
    Kind,
    OpenCall,
    Peer,
    Recorded,
    Task,
    TaskId,
    TaskState,
    Unsent,
)

TASK_COLUMNS = """
    t.id, t.service, t.handler, t.version, t.state, t.epoch, t.checkpoint, t.seq, t.attempt, t.pickups, t.trigger,
    t.identity, t.digest, t.correlation_id, t.request, t.addresses, t.traceparent, t.tracestate, t.value, t.traceback,
    t.is_final_sent, t.progress, t.due_at, t.created_at, t.updated_at, t.finished_at, t.caller_subject, t.caller_claims
"""
LOCK_TASKS = text(f"""
    SELECT {TASK_COLUMNS}, t.due_at <= clock_timestamp() AS is_due
      FROM coatcheck.task t WHERE t.id = ANY(CAST(:ids AS uuid[])) ORDER BY t.id FOR UPDATE
""")
LOCK_FREE_TASKS = text(f"{LOCK_TASKS.text} SKIP LOCKED")
EXISTING_TASKS = text("SELECT id FROM coatcheck.task WHERE id = ANY(CAST(:ids AS uuid[]))")

HISTORY = text("""
    SELECT task_id, key, kind, name, digest, seq, CASE WHEN is_ok THEN 'ok' ELSE 'failed' END AS state, value,
           NULL::uuid AS call_id, NULL::timestamptz AS due_at
      FROM coatcheck.journal WHERE task_id = ANY(CAST(:ids AS uuid[])) AND NOT is_forgotten
     UNION ALL
    SELECT task_id, key, kind, name, digest, seq, state, value, id, due_at
      FROM coatcheck.call WHERE task_id = ANY(CAST(:ids AS uuid[])) AND NOT is_forgotten
     ORDER BY seq
""")
PEER_COLUMNS = """
    c.id, c.task_id, t.service, c.kind, c.key, c.peer, c.handler, c.body, c.headers, c.hard_due_at, t.traceparent
"""
UNSENT_CALLS = text(f"""
    SELECT {PEER_COLUMNS} FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
     WHERE c.task_id = ANY(CAST(:ids AS uuid[])) AND c.state = 'open' AND NOT c.is_sent AND c.kind <> 'timer'
     ORDER BY c.id
""")


class Locked:
    """The task rows a batch holds, and which of the wanted ones another transaction holds."""

    def __init__(self, found: Sequence[Row], busy: Collection[TaskId]) -> None:
        self.tasks = {row.id: task_of(row) for row in found}
        self.due = {row.id for row in found if row.is_due}
        self.busy = busy


async def lock_tasks(connection: Connection, ids: Iterable[TaskId], *, waits: bool) -> Locked:
    """Lock the rows that exist, by id. Unless told to wait, rows locked elsewhere are left out and named in `busy`."""
    wanted = sorted(set(ids))
    if not wanted:
        return Locked([], ())
    if waits:
        return Locked(await rows(connection, LOCK_TASKS, ids=wanted), ())
    found = await rows(connection, LOCK_FREE_TASKS, ids=wanted)
    missing = [] if len(found) == len(wanted) else sorted(set(wanted) - {row.id for row in found})
    busy = {row.id for row in await rows(connection, EXISTING_TASKS, ids=missing)} if missing else ()
    return Locked(found, busy)


async def load_histories(connection: Connection, ids: Collection[TaskId]) -> Mapping[TaskId, History]:
    """Everything recorded and open for these tasks; a task without anything is missing from the answer."""
    if not ids:
        return {}
    recorded: dict[TaskId, list[Recorded]] = defaultdict(list)
    still_open: dict[TaskId, list[OpenCall]] = defaultdict(list)
    for row in await rows(connection, HISTORY, ids=sorted(ids)):
        # A send counts as done from the moment its row exists: the handler never waits for it.
        if row.state == CallState.OPEN and row.kind != Kind.SEND:
            still_open[row.task_id].append(
                OpenCall(row.call_id, row.key, Kind(row.kind), row.name, row.digest, row.due_at)
            )
        else:
            recorded[row.task_id].append(recorded_of(row))
    return {task_id: History(tuple(recorded[task_id]), tuple(still_open[task_id])) for task_id in ids}


async def load_unsent(connection: Connection, tasks: Collection[Task]) -> Mapping[TaskId, Unsent]:
    """What these tasks have perhaps never sent: looked up only for messages that were delivered before."""
    if not tasks:
        return {}
    calls: dict[TaskId, list[Peer]] = defaultdict(list)
    for row in await rows(connection, UNSENT_CALLS, ids=sorted(task.task_id for task in tasks)):
        calls[row.task_id].append(peer_of(row))
    return {
        task.task_id: Unsent(tuple(calls[task.task_id]), task.state.is_final and not task.is_final_sent)
        for task in tasks
    }


def recorded_of(row: Row) -> Recorded:
    state = CallState.OK if row.kind == Kind.SEND else CallState(row.state)
    return Recorded(row.key, Kind(row.kind), row.name, row.digest, row.seq, state, row.value or b"", row.call_id)


def peer_of(row: Row) -> Peer:
    return Peer(
        row.id,
        row.task_id,
        row.service,
        Kind(row.kind),
        row.key,
        row.peer,
        row.handler,
        row.body,
        from_json(row.headers),
        row.hard_due_at,
        row.traceparent,
    )


def task_of(row: Row) -> Task:
    return Task(
        task_id=row.id,
        service=row.service,
        handler=row.handler,
        version=row.version,
        state=TaskState(row.state),
        epoch=row.epoch,
        checkpoint=row.checkpoint,
        seq=row.seq,
        attempt=row.attempt,
        pickups=row.pickups,
        trigger=row.trigger,
        identity=row.identity,
        digest=row.digest,
        correlation_id=row.correlation_id,
        request=row.request,
        addresses=tuple(Address(*pair) for pair in from_json(row.addresses)),
        traceparent=row.traceparent,
        tracestate=row.tracestate,
        value=row.value,
        traceback=row.traceback,
        is_final_sent=row.is_final_sent,
        progress=from_json(row.progress) if row.progress is not None else None,
        due_at=row.due_at,
        created_at=row.created_at,
        updated_at=row.updated_at,
        finished_at=row.finished_at,
        caller=None if row.caller_subject is None else Caller(row.caller_subject, from_json(row.caller_claims) or {}),
    )


def from_json(value: Any) -> Any:
    """jsonb arrives as text through plain statements."""
    return msgspec.json.decode(value) if isinstance(value, str | bytes) else value


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def addresses_json(addresses: Iterable[Address]) -> str:
    return to_json([[address.reply_to, address.correlation_id] for address in addresses])
