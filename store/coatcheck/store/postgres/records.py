"""Reading rows: the statements that lock and load, and the values they become.

Lock order, everywhere: tasks by id, then calls by id. A batch locks its tasks with SKIP LOCKED and leaves out what is
locked elsewhere; only in a lane is a lock waited for, one task at a time. So no two transactions ever wait in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import text

from coatcheck.store.postgres.connection import Connection, Row
from coatcheck.store.postgres.database import rows
from coatcheck.store.rows import (
    Address,
    Caller,
    CallId,
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

T = TypeVar("T")

# A dict's look-up is a tenth of an enum's.
KINDS: Mapping[str, Kind] = {one.value: one for one in Kind}
CALL_STATES: Mapping[str, CallState] = {one.value: one for one in CallState}
TASK_STATES: Mapping[str, TaskState] = {one.value: one for one in TaskState}

TASK_COLUMNS = """
    t.id, t.service, t.handler, t.version, t.state, t.epoch, t.checkpoint, t.seq, t.attempt, t.pickups, t.trigger,
    t.identity, t.digest, t.correlation_id, t.request, t.addresses, t.traceparent, t.tracestate, t.value, t.traceback,
    t.is_final_sent, t.progress, t.due_at, t.created_at, t.updated_at, t.finished_at, t.caller_subject, t.caller_claims,
    t.deadline_at
"""
READ_TASKS = text(f"""
    SELECT {TASK_COLUMNS}, t.due_at <= clock_timestamp() AS is_due, t.xmin AS version
      FROM coatcheck.task t WHERE t.id = ANY(CAST(:ids AS uuid[]))
""")
LOCK_TASKS = text(f"{READ_TASKS.text} ORDER BY t.id FOR UPDATE")
LOCK_FREE_TASKS = text(f"{LOCK_TASKS.text} SKIP LOCKED")
EXISTING_TASKS = text("SELECT id FROM coatcheck.task WHERE id = ANY(CAST(:ids AS uuid[]))")

# What `recorded_of` reads, in this order, and `history_of` with a due time behind, and whether values are withheld. The
# size of all values is known without reading them: Postgres keeps it beside each. Rows, and no array of them for each
# task: of a value that is a record, the driver looks up the type of each column anew.
ENTRY_COLUMNS = "key, kind, name, digest, seq, CASE WHEN is_ok THEN 'ok' ELSE 'failed' END, value, NULL::uuid"
CALL_COLUMNS = "key, kind, name, digest, seq, state, value, id"
HISTORY_OF_TASK = f"""
    LATERAL (SELECT known.*, sum(octet_length(known.value)) OVER () AS size
               FROM (SELECT {ENTRY_COLUMNS}, NULL::timestamptz FROM coatcheck.journal
                      WHERE task_id = t.id AND NOT is_forgotten
                      UNION ALL
                     SELECT {CALL_COLUMNS}, due_at FROM coatcheck.call WHERE task_id = t.id AND NOT is_forgotten)
                 AS known(key, kind, name, digest, seq, state, value, call_id, due_at)) AS h
"""
HISTORY = text(f"""
    SELECT t.id, h.key, h.kind, h.name, h.digest, h.seq, h.state, h.value, h.call_id, h.due_at, false
      FROM unnest(CAST(:ids AS uuid[])) AS t(id) CROSS JOIN {HISTORY_OF_TASK}
""")
PEER_COLUMNS = """
    c.id, c.task_id, t.service, c.kind, c.key, c.peer, c.handler, c.body, c.headers, c.hard_due_at, t.traceparent
"""
UNSENT_CALLS = text(f"""
    SELECT {PEER_COLUMNS} FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
     WHERE c.task_id = ANY(CAST(:ids AS uuid[])) AND c.state = 'open' AND NOT c.is_sent AND c.kind <> 'timer'
     ORDER BY c.id
""")


UNREADABLE = (LookupError, TypeError, ValueError, msgspec.MsgspecError)
"""What bytes and words that another release or another program wrote are known to raise."""

Closing = tuple[CallId, CallState, int, bytes]
"""A call that is to be closed: with this state, in this place of the order, with this value."""


class Locked:
    """The task rows a batch holds or has read, which version of each, and which another transaction holds."""

    def __init__(self, found: Sequence[Row], busy: Collection[TaskId]) -> None:
        self.tasks = {row[0]: task_of(row) for row in found}
        self.due = {row[0] for row in found if row.is_due}
        self.versions = {row[0]: row.version for row in found}
        self.busy = busy


async def lock_tasks(connection: Connection, ids: Iterable[TaskId], *, waits: bool) -> Locked:
    """Lock the rows that exist, by id. Unless told to wait, rows locked elsewhere are left out and named in `busy`."""
    wanted = set(ids)
    if not wanted:
        return Locked([], ())
    if waits:
        return Locked(await rows(connection, LOCK_TASKS, ids=list(wanted)), ())
    found = await rows(connection, LOCK_FREE_TASKS, ids=list(wanted))
    missing = [] if len(found) == len(wanted) else list(wanted.difference(row[0] for row in found))
    busy = {row[0] for row in await rows(connection, EXISTING_TASKS, ids=missing)} if missing else ()
    return Locked(found, busy)


async def read_tasks(connection: Connection, ids: Sequence[TaskId], *, locks: bool) -> Locked:
    """Read the rows that exist; and lock them, by id, waiting for each."""
    return Locked(await rows(connection, LOCK_TASKS if locks else READ_TASKS, ids=ids), ())


async def load_histories(connection: Connection, ids: Collection[TaskId]) -> Mapping[TaskId, History]:
    """Everything recorded and open for these tasks; one that has nothing is left out."""
    if not ids:
        return {}
    known: dict[TaskId, list[Sequence[Any]]] = defaultdict(list)
    for task_id, *about in await rows(connection, HISTORY, ids=list(ids)):
        known[task_id].append(about)
    return {task_id: history_of(about, {}) for task_id, about in known.items()}


async def load_unsent(connection: Connection, tasks: Collection[Task]) -> Mapping[TaskId, Unsent]:
    """What these tasks have perhaps never sent: looked up only for messages that were delivered before."""
    if not tasks:
        return {}
    calls: dict[TaskId, list[Peer]] = defaultdict(list)
    for row in await rows(connection, UNSENT_CALLS, ids=[task.task_id for task in tasks]):
        calls[row[1]].append(peer_of(row))
    return {
        task.task_id: Unsent(tuple(calls[task.task_id]), task.state.is_final and not task.is_final_sent)
        for task in tasks
    }


def history_of(known: Iterable[Sequence[Any]], closing: Mapping[CallId, Closing]) -> History:
    """A task's journal entries and calls, as HISTORY_OF_TASK has them, in the order of `seq`. A statement that closes
    calls reads them as they were before; so how they are now comes with them.
    """
    recorded, still_open, is_withheld = [], [], False
    for row in known:
        key, kind, name, digest, seq, state, value, call_id, due_at, is_withheld = row
        if call_id in closing:
            _, state, seq, value = closing[call_id]
        # A send counts as done from the moment its row exists: the handler never waits for it.
        if state == CallState.OPEN and kind != Kind.SEND:
            still_open.append(OpenCall(call_id, key, KINDS[kind], name, digest, due_at))
        else:
            recorded.append(recorded_of((key, kind, name, digest, seq, state, b"" if is_withheld else value, call_id)))
    recorded.sort(key=_seq_of)
    return History(tuple(recorded), tuple(still_open), is_withheld)


_seq_of = attrgetter("seq")


def recorded_of(row: Sequence[Any]) -> Recorded:
    """A row of ENTRY_COLUMNS or CALL_COLUMNS."""
    key, kind, name, digest, seq, state, value, call_id = row
    ended = CallState.OK if kind == Kind.SEND else CALL_STATES[state]
    return Recorded(key, KINDS[kind], name, digest, seq, ended, value or b"", call_id)


def peer_of(row: Sequence[Any]) -> Peer:
    """A row that begins with PEER_COLUMNS."""
    call_id, task_id, service, kind, key, peer, handler, body, headers, hard_due_at, traceparent, *_ = row
    return Peer(
        call_id,
        task_id,
        service,
        KINDS[kind],
        key,
        peer,
        handler,
        body,
        from_json(headers),
        hard_due_at,
        traceparent,
    )


def task_of(row: Sequence[Any]) -> Task:
    """A row that begins with TASK_COLUMNS."""
    # fmt: off
    (task_id, service, handler, version, state, epoch, checkpoint, seq, attempt, pickups, trigger,
     identity, digest, correlation_id, request, addresses, traceparent, tracestate, value, traceback,
     is_final_sent, progress, due_at, created_at, updated_at, finished_at, caller_subject, caller_claims,
     deadline_at, *_) = row
    return Task(
        task_id, service, handler, version, TASK_STATES[state], epoch, checkpoint, seq, attempt, pickups, trigger,
        identity, digest, correlation_id, request, addresses_of(addresses), traceparent, tracestate, value, traceback,
        is_final_sent, None if progress is None else from_json(progress), due_at, created_at, updated_at, finished_at,
        None if caller_subject is None else Caller(caller_subject, from_json(caller_claims) or {}), deadline_at,
    )
    # fmt: on


def readable(found: Iterable[Row], of: Callable[[Row], T]) -> tuple[list[T], list[UUID]]:
    """What the rows become, and the ids of those that this code cannot read: one must not fail the others."""
    values, unreadable = [], []
    for row in found:
        try:
            values.append(of(row))
        except UNREADABLE:
            unreadable.append(row[0])
    return values, unreadable


def addresses_of(written: Any) -> tuple[Address, ...]:
    return tuple([Address(*pair) for pair in from_json(written)])


def from_json(value: Any) -> Any:
    """jsonb arrives as text through plain statements."""
    return msgspec.json.decode(value) if isinstance(value, str | bytes) else value


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def addresses_json(addresses: Iterable[Address]) -> str:
    return to_json([[address.reply_to, address.correlation_id] for address in addresses])
