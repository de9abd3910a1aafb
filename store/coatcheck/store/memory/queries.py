"""Reading for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from coatcheck.store.chain import HistoryEntry
from coatcheck.store.checkpoints import Stored, in_order
from coatcheck.store.memory.tables import CallRow, EntryRow, Tables, TaskRow, check_text, earliest
from coatcheck.store.rows import CallState, Known, Task, TaskId, TaskState
from coatcheck.store.views import Backlog, Late, Line, ServiceCount, Summary

WITH_A_FAILURE = (TaskState.HELD, TaskState.RETRYING, TaskState.FAILED, TaskState.CANCELLED)
WITH_A_TIME = (TaskState.RUNNING, TaskState.RETRYING, TaskState.HELD)


def find_tasks(tables: Tables, ids: Sequence[TaskId], waits: bool) -> list[Task | None]:
    rows = tables.tasks
    return [rows[task_id].task if task_id in rows else None for task_id in ids]


def list_tasks(
    tables: Tables,
    *,
    service: str | None,
    states: Collection[TaskState],
    limit: int,
    handler: str | None = None,
    after: UUID | None = None,
) -> list[Task]:
    check_text(service, handler)
    newest = [row.task for row in tables.newest_first()]
    if after is not None:
        newest = newest[[task.task_id for task in newest].index(TaskId(after)) + 1 :] if after in tables.tasks else []
    wanted = (task for task in newest if service in (None, task.service))
    found = (task for task in wanted if handler in (None, task.handler))
    return [task for task in found if (task.state in states if states else task.epoch > 0)][:limit]


def summarise_tasks(tables: Tables, /, **wanted: Any) -> list[Summary]:
    return [_summary(tables, task) for task in list_tasks(tables, **wanted)]


def find_ids(tables: Tables, *, prefix: str, limit: int) -> list[TaskId]:
    low, high = UUID(prefix.ljust(32, "0")), UUID(prefix.ljust(32, "f"))
    return sorted(task_id for task_id in tables.tasks if low <= task_id <= high)[:limit]


def count_tasks(tables: Tables) -> dict[TaskState, int]:
    return dict(Counter(row.task.state for row in tables.tasks.values()))


def count_services(tables: Tables) -> list[ServiceCount]:
    tasks = [row.task for row in tables.tasks.values()]
    return [
        ServiceCount(
            service,
            sum(task.service == service and not task.state.is_final for task in tasks),
            sum(task.service == service and task.identity is None and task.epoch > 0 for task in tasks),
        )
        for service in sorted({task.service for task in tasks})
    ]


def find_late(tables: Tables, *, grace: timedelta) -> list[Late]:
    by_service: dict[str, list[_Lateness]] = defaultdict(list)
    for row in tables.tasks.values():
        for late in _lateness(tables, row, tables.now - grace):
            by_service[row.task.service].append(late)
    return [
        Late(
            service,
            len({one.task_id for one in late if one.is_overdue}),
            len({one.task_id for one in late if one.is_unlooked}),
            max((tables.now - one.due_at for one in late if one.due_at is not None), default=timedelta()),
        )
        for service, late in sorted(by_service.items())
    ]


def find_unsent(tables: Tables, *, grace: timedelta) -> list[Backlog]:
    since_by_peer: dict[str | None, list[datetime]] = defaultdict(list)
    for call in tables.calls.values():
        if call.state is CallState.OPEN and call.look_at and not call.is_sent and call.new.kind.is_published:
            since_by_peer[call.new.peer].append(call.opened_at)
    for row in tables.tasks.values():
        if row.look_at is not None and row.task.state.is_final and not row.task.is_final_sent and row.task.finished_at:
            since_by_peer[None].append(row.task.finished_at)
    before = tables.now - grace
    old = {peer: [at for at in since if at < before] for peer, since in since_by_peer.items()}
    peers = sorted((peer for peer, since in old.items() if since), key=lambda peer: (peer is None, peer or ""))
    return [Backlog(peer, len(old[peer]), tables.now - min(old[peer])) for peer in peers]


def read_history(tables: Tables, task_id: UUID) -> list[HistoryEntry]:
    return list(tables.history.get(TaskId(task_id), ()))


def load_known(tables: Tables, ids: Collection[TaskId]) -> dict[TaskId, Known]:
    return {task_id: tables.known(task_id) for task_id in ids if task_id in tables.tasks}


def task_lines(tables: Tables, task_id: UUID) -> list[Line]:
    known = TaskId(task_id)
    lines = [_entry_line(entry) for entry in tables.entries_of.get(known, ())]
    lines += [_call_line(call) for call in tables.calls_of.get(known, ())]
    replicas = {line.checkpoint: line.replica for line in lines if line.replica is not None}
    lines = [replace(line, replica=replicas.get(line.checkpoint)) for line in lines]
    return sorted(lines, key=lambda line: (line.seq is None, line.seq or 0, line.opened_at))


def read_stored(tables: Tables, task_id: TaskId) -> list[Stored]:
    found = [_stored_entry(entry) for entry in tables.entries_of.get(task_id, ())]
    found += [_stored_call(call) for call in tables.calls_of.get(task_id, ())]
    return sorted(found, key=in_order)


class _Lateness(NamedTuple):
    task_id: TaskId
    due_at: datetime | None
    is_overdue: bool
    is_unlooked: bool


def _lateness(tables: Tables, row: TaskRow, before: datetime) -> Iterator[_Lateness]:
    """The times of a task and of its open calls that were over before that moment."""
    task = row.task
    times = [(call.due_at, call.look_at) for call in tables.calls_of[task.task_id] if call.state is CallState.OPEN]
    if task.state in WITH_A_TIME:
        times.append((task.due_at, row.look_at))
    elif task.state.is_final and not tables.is_over(task.due_at):
        times.append((None, row.look_at))
    for due_at, look_at in times:
        is_overdue = due_at is not None and due_at < before
        is_unlooked = look_at is not None and look_at < before
        if is_overdue or is_unlooked:
            yield _Lateness(task.task_id, due_at, is_overdue, is_unlooked)


def _summary(tables: Tables, task: Task) -> Summary:
    waited = [call for call in tables.calls_of[task.task_id] if call.is_open_wait]
    due_at = task.due_at if task.state in WITH_A_TIME else None
    if task.state is TaskState.PARKED:
        due_at = earliest(*(call.due_at for call in waited))
    return Summary(
        task_id=task.task_id,
        service=task.service,
        handler=task.handler,
        version=task.version,
        state=task.state,
        attempt=task.attempt,
        open_count=len(waited),
        peers=tuple(sorted({"(timer)" if call.new.kind.rings else call.new.peer for call in waited})),
        next_due_at=due_at,
        progress=dict(task.progress) if task.progress is not None else None,
        failure=task.value if task.state in WITH_A_FAILURE else None,
        created_at=task.created_at,
        updated_at=task.updated_at,
        finished_at=task.finished_at,
        seen_at=tables.now,
    )


def _stored_entry(row: EntryRow) -> Stored:
    return Stored(
        key=row.new.key,
        kind=row.new.kind,
        state=row.state,
        seq=row.seq,
        digest=row.new.digest,
        value=row.new.value,
        body=None,
        call_id=None,
        checkpoint=row.checkpoint,
        epoch=row.epoch,
        replica=row.replica,
        opened_at=row.recorded_at,
        closed_at=row.recorded_at,
        is_forgotten=row.is_forgotten,
    )


def _stored_call(row: CallRow) -> Stored:
    return Stored(
        key=row.new.key,
        kind=row.new.kind,
        state=row.state,
        seq=row.seq,
        digest=row.new.digest,
        value=row.value,
        body=row.new.body,
        call_id=row.new.call_id,
        checkpoint=row.checkpoint,
        epoch=row.epoch,
        replica=row.replica,
        opened_at=row.opened_at,
        closed_at=row.closed_at,
        is_forgotten=row.is_forgotten,
    )


def _entry_line(row: EntryRow) -> Line:
    return Line(
        key=row.new.key,
        kind=row.new.kind,
        name=row.new.name,
        state=row.state,
        seq=row.seq,
        value=row.new.value,
        call_id=None,
        peer="",
        due_at=None,
        opened_at=row.recorded_at - (row.new.took or timedelta()),
        closed_at=row.recorded_at,
        progress=None,
        is_sent=True,
        is_forgotten=row.is_forgotten,
        checkpoint=row.checkpoint,
        epoch=row.epoch,
        replica=row.replica,
    )


def _call_line(row: CallRow) -> Line:
    return Line(
        key=row.new.key,
        kind=row.new.kind,
        name=row.new.name,
        state=row.state,
        seq=row.seq,
        value=row.value,
        call_id=row.new.call_id,
        peer=row.new.peer,
        due_at=row.due_at,
        opened_at=row.opened_at,
        closed_at=row.closed_at,
        progress=row.progress,
        is_sent=row.is_sent,
        is_forgotten=row.is_forgotten,
        checkpoint=row.checkpoint,
        epoch=row.epoch,
        replica=row.replica,
    )
