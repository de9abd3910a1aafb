"""Cancelling: first commit wins, and an unknown task gets a tombstone."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from coatcheck.store.memory.puts import close_leftovers
from coatcheck.store.memory.tables import RESEND_AFTER, Tables, check_bytes, check_text
from coatcheck.store.rows import (
    Birth,
    CallState,
    CancelAsk,
    Kind,
    Peer,
    Ruling,
    Task,
    TaskId,
    TaskState,
    Unsent,
    Verdict,
)


def cancel(tables: Tables, asks: Sequence[CancelAsk], waits: bool) -> list[Ruling]:
    asked = [(_target(tables, ask), ask) for ask in asks]
    first: dict[TaskId, CancelAsk] = {}
    for target, ask in asked:
        row = tables.tasks.get(target)
        if row is None or row.task.service == ask.service:
            first.setdefault(target, ask)
    done = {target: _cancel(tables, target, first[target]) for target in sorted(first)}
    rulings = []
    for target, ask in asked:
        if tables.tasks[target].task.service != ask.service:
            rulings.append(Ruling(Verdict.UNKNOWN))
        else:
            rulings.append(done[target] if first[target] is ask else _said_twice(done[target]))
    return rulings


def _target(tables: Tables, ask: CancelAsk) -> TaskId:
    check_text(ask.correlation_id, ask.service)
    if not ask.correlation_id:
        return ask.task_id
    found = [
        row.task
        for row in tables.newest_first()
        if row.task.correlation_id == ask.correlation_id and row.task.service == ask.service
    ]
    return min(found, key=lambda task: task.state.is_final).task_id if found else ask.task_id


def _cancel(tables: Tables, target: TaskId, ask: CancelAsk) -> Ruling:
    row = tables.tasks.get(target)
    if row is None:
        _bury(tables, target, ask)
        return Ruling(Verdict.UNKNOWN)
    task = row.task
    if task.state.is_final:
        is_unsent = bool(task.addresses) and not task.is_final_sent
        return Ruling(Verdict.FINISHED, task, cancels=_closed(tables, task), unsent=Unsent((), is_unsent))
    seq, cancels = close_leftovers(tables, target, task.seq)
    told = replace(task, state=TaskState.CANCELLED, epoch=task.epoch + 1, value=_answer(target, ask))
    ended = replace(
        told,
        checkpoint=task.checkpoint + 1,
        seq=seq,
        trigger=None,
        due_at=tables.later(ask.keep),
        finished_at=tables.now,
        updated_at=tables.now,
    )
    tables.change(row, task=ended, look_at=tables.now + RESEND_AFTER, waits=())
    return Ruling(Verdict.RECORDED, told, cancels=tuple(cancels), unsent=Unsent((), True))


def _answer(target: TaskId, ask: CancelAsk) -> bytes:
    value = ask.failure(target)
    check_bytes(value)
    return value


def _said_twice(ruling: Ruling) -> Ruling:
    """What a second ask of the same batch hears: the first one tells everyone."""
    return Ruling(Verdict.FINISHED, ruling.task) if ruling.verdict is Verdict.RECORDED else ruling


def _closed(tables: Tables, task: Task) -> tuple[Peer, ...]:
    if task.state is not TaskState.CANCELLED or task.is_final_sent:
        return ()
    return tuple(
        tables.peer(call)
        for call in tables.calls_of[task.task_id]
        if call.state is CallState.CLOSED and call.new.kind is Kind.CALL
    )


def _bury(tables: Tables, target: TaskId, ask: CancelAsk) -> None:
    nobody = Birth(target, ask.service, None, "", b"", b"")
    tombstone = replace(
        tables.newborn(nobody, trigger=None, pickups=0, due_at=tables.later(ask.keep)),
        state=TaskState.CANCELLED,
        epoch=0,
        value=_answer(target, ask),
        is_final_sent=True,
        finished_at=tables.now,
    )
    tables.insert_task(tombstone, look_at=None)
