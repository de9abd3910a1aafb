"""Every write of a run, put after put: the tables are locked for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import assert_never

from msgspec.structs import replace

from coatcheck.store.batcher import Busy
from coatcheck.store.memory.tables import (
    RESEND_AFTER,
    Tables,
    TaskRow,
    as_json,
    check_bytes,
    check_text,
    refuse,
)
from coatcheck.store.postgres.puts import printable
from coatcheck.store.postgres.task_inserts import REQUEST_TRIGGER
from coatcheck.store.rows import (
    Again,
    CallState,
    Finish,
    Going,
    Group,
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

BIRTH_LEASE = timedelta(minutes=1)


def put(tables: Tables, puts: Sequence[Put], waits: bool) -> list[PutDone | PutRefused | Busy]:
    births = [one.birth for one in puts if one.birth is not None]
    born = tables.insert_births(births, trigger=REQUEST_TRIGGER, pickups=0, lease=BIRTH_LEASE)
    taken: set[TaskId] = set()
    answers: list[PutDone | PutRefused | Busy] = []
    for one in puts:
        row, is_born = tables.tasks.get(one.task_id), one.task_id in born
        if one.task_id in taken:
            answers.append(Busy(one.task_id))  # two puts of one task in a batch: the second one waits its turn
            continue
        if row is None or (is_born and one.birth is None):
            answers.append(PutRefused(None))  # a row that was made just now is another life of the task
            continue
        if is_born or (one.birth is None and _follows(one, row.task)):
            answers.append(_write(tables, one, row, is_born=is_born))
        elif _is_in_already(tables, one, row.task):
            answers.append(_answer_again(tables, one, row.task))
        else:
            answers.append(PutRefused(row.task))
            continue
        taken.add(one.task_id)
    return answers


def close_leftovers(tables: Tables, task_id: TaskId, seq: int) -> tuple[int, list[Peer]]:
    """Close what is open, numbered on from `seq`; give the last number and the calls whose peers should hear of it."""
    leftover = [call for call in tables.calls_of[task_id] if call.is_open_wait]
    leftover.sort(key=lambda call: call.new.call_id)
    for call in leftover:
        seq += 1
        tables.change(call, state=CallState.CLOSED, seq=seq, closed_at=tables.now, look_at=None)
    return seq, [tables.peer(call) for call in leftover if call.new.kind is Kind.CALL]


def _follows(one: Put, task: Task) -> bool:
    return task.state is TaskState.RUNNING and task.epoch == one.epoch and task.checkpoint == one.follows


def _write(tables: Tables, one: Put, row: TaskRow, *, is_born: bool) -> PutDone:
    before, checkpoint = row.task, one.follows + 1
    news = tables.news(one.task_id, seen=one.seen)
    is_parked = isinstance(one.end, Park) and not tables.is_met(one.end.groups)
    seq, cancels = _close_calls(tables, one, before.seq)
    for entry in one.changes.entries:
        seq += 1
        news.append(tables.insert_entry(one.task_id, entry, checkpoint=checkpoint, seq=seq).recorded())
    for call in _opens(one):
        is_send = call.kind is Kind.SEND
        seq += is_send
        tables.insert_call(one.task_id, call, checkpoint=checkpoint, seq=seq if is_send else None)
    if isinstance(one.end, Finish):
        seq, leftover = close_leftovers(tables, one.task_id, seq)
        cancels += leftover
    if isinstance(one.end, Again):
        _forget(tables, one.task_id, one.end.forget)
    _update_task(tables, one, row, seq=seq, is_parked=is_parked)
    return PutDone(
        epoch=one.epoch or 1,
        checkpoint=checkpoint,
        seq=seq,
        is_parked=is_parked,
        news=() if is_parked else tuple(news),
        cancels=tuple(cancels),
        addresses=() if is_born else before.addresses,
    )


def _close_calls(tables: Tables, one: Put, seq: int) -> tuple[int, list[Peer]]:
    cancels = []
    for call_id in one.changes.closes:
        seq += 1
        call = tables.calls.get(call_id)
        if call is not None and call.state is CallState.OPEN:
            tables.change(call, state=CallState.CLOSED, seq=seq, closed_at=tables.now, look_at=None)
            if call.new.kind is Kind.CALL:
                cancels.append(tables.peer(call))
    return seq, cancels


def _opens(one: Put) -> Sequence[NewCall]:
    if isinstance(one.end, Finish):
        return [call for call in one.changes.opens if call.kind is Kind.SEND]
    return one.changes.opens


def _forget(tables: Tables, task_id: TaskId, keys: Sequence[str]) -> None:
    check_text(*keys)
    for call in tables.calls_of[task_id]:
        if call.new.key in keys and call.state not in (CallState.OPEN, CallState.OK):
            tables.change(call, is_forgotten=True)
    for entry in tables.entries_of[task_id]:
        if entry.new.key in keys and not entry.new.is_ok:
            tables.change(entry, is_forgotten=True)


@dataclass(slots=True)
class _Ending:
    """How a run goes on or ends."""

    state: TaskState
    due_at: datetime | None
    look_at: datetime | None
    is_detached: bool = False
    value: bytes | None = None
    traceback: str | None = None
    waits: tuple[Group, ...] = ()


def _ending(tables: Tables, one: Put, *, is_parked: bool) -> _Ending:
    later = tables.later
    match one.end:
        case Park(groups) if is_parked:
            return _Ending(TaskState.PARKED, None, None, is_detached=True, waits=groups)
        case Park(lease=lease):
            return _Ending(TaskState.RUNNING, later(lease), later(lease))
        case Going(lease, is_detached):
            return _Ending(TaskState.RUNNING, later(lease), later(lease), is_detached)
        case Finish(state, value, keep, traceback, is_detached):
            is_detached = is_detached or tables.tasks[one.task_id].task.trigger is None
            look_at = tables.now + RESEND_AFTER if is_detached else None
            return _Ending(state, later(keep), look_at, value=value, traceback=traceback)
        case Again(delay, failure, traceback):
            return _Ending(TaskState.RETRYING, later(delay), later(delay), True, failure, traceback)
        case Hold(delay, failure):
            return _Ending(TaskState.HELD, later(delay), later(delay), True, failure)
        case end:
            assert_never(end)


def _update_task(tables: Tables, one: Put, row: TaskRow, *, seq: int, is_parked: bool) -> None:
    task, now = row.task, tables.now
    ending = _ending(tables, one, is_parked=is_parked)
    if ending.state is TaskState.PARKED and not any(group.calls for group in ending.waits):
        refuse("task_parked_waits_for_something")
    if ending.value is not None:
        check_bytes(ending.value)
    shows_progress = bool(one.changes.entries or one.changes.opens) or not isinstance(one.end, Going)
    updated = replace(
        task,
        state=ending.state,
        checkpoint=task.checkpoint + 1,
        seq=seq,
        attempt=task.attempt + isinstance(one.end, Again),
        pickups=0 if shows_progress else task.pickups,
        trigger=None if ending.is_detached else task.trigger,
        value=task.value if ending.value is None else ending.value,
        traceback=task.traceback if ending.traceback is None else printable(ending.traceback),
        progress=task.progress if one.progress is None else as_json(one.progress),
        due_at=ending.due_at,
        updated_at=now,
        finished_at=now if isinstance(one.end, Finish) else None,
    )
    tables.change(row, task=updated, look_at=ending.look_at, waits=ending.waits)


# --- a put that comes again ---


def _is_in_already(tables: Tables, one: Put, task: Task) -> bool:
    if task.epoch != (one.epoch or 1) or task.checkpoint != one.follows + 1:
        return False
    if [entry.key for entry in _own_entries(tables, task)] != [entry.key for entry in one.changes.entries]:
        return False
    if wanted := {call.call_id for call in _opens(one)}:
        mine = {call.new.call_id for call in tables.calls_of[task.task_id] if call.checkpoint == task.checkpoint}
        return wanted <= mine
    if isinstance(one.end, Finish):
        return task.state is one.end.state and task.value == one.end.value
    return one.birth is None and _shows(task, one.end)


def _shows(task: Task, end: Park | Going | Again | Hold) -> bool:
    match end:
        case Park():
            return task.state in (TaskState.PARKED, TaskState.RUNNING)
        case Going(is_detached=is_detached):
            return task.state is TaskState.RUNNING and not (is_detached and task.trigger is not None)
        case Again(failure=failure):
            return task.state is TaskState.RETRYING and task.value == failure
        case Hold(failure=failure):
            return task.state is TaskState.HELD and task.value == failure
        case _:
            assert_never(end)


def _answer_again(tables: Tables, one: Put, task: Task) -> PutDone:
    is_parked = task.state is TaskState.PARKED
    news = [] if is_parked else [*tables.news(task.task_id, seen=one.seen), *_own_entries(tables, task)]
    closed = [
        (call.seq, tables.peer(call))
        for call in tables.calls_of[task.task_id]
        if call.state is CallState.CLOSED and call.new.kind is Kind.CALL and (call.seq or 0) > one.seen
    ]
    cancels = tuple(peer for _, peer in sorted(closed, key=lambda pair: pair[0] or 0))
    return PutDone(task.epoch, task.checkpoint, task.seq, is_parked, tuple(news), cancels, task.addresses)


def _own_entries(tables: Tables, task: Task) -> list[Recorded]:
    return [entry.recorded() for entry in tables.entries_of[task.task_id] if entry.checkpoint == task.checkpoint]
