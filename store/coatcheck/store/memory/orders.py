"""What people order: found in the tables, decided, applied."""

from __future__ import annotations

from msgspec.structs import replace

from coatcheck.points import reach
from coatcheck.store import orders
from coatcheck.store.decide import Found
from coatcheck.store.history import Author
from coatcheck.store.kinds import Kind
from coatcheck.store.memory.tables import Tables, TaskRow, check_text
from coatcheck.store.orders import ORIGINS, Deed, Filter, Fork, Order, OrderDone, OrderRefused
from coatcheck.store.rows import CallState, NewEntry, Peer, Task, TaskId
from coatcheck.store.targets import Place


def order(tables: Tables, order: Order, *, author: Author) -> OrderDone | OrderRefused:
    row = tables.tasks.get(order.task_id)
    found = None if row is None else Found(row.task, tables.is_over(row.task.due_at))
    deed = orders.decide(order, found, _places(tables, order.task_id))
    if isinstance(deed, OrderRefused) or order.is_dry_run:
        return deed if isinstance(deed, OrderRefused) else deed.done
    check_text(order.by)
    reach("before_order")
    if isinstance(order, Fork) and order.new_task_id in tables.tasks:
        detail = f"there is a task {order.new_task_id} already; give the fork another id"
        return OrderRefused(order.task_id, "exists", detail)
    entries, chain = author.tell(deed.task.task_id, deed.drafts, at=deed.task.chain, epoch=deed.task.epoch)
    if isinstance(order, Fork):
        tables.append_history(_fork(tables, deed, author.replica), entries, chain)
        return deed.done
    cancels = _forget(tables, deed)
    _supersede(tables, deed, author.replica)
    _write(tables, deed)
    tables.append_history(tables.tasks[order.task_id], entries, chain)
    return replace(deed.done, cancels=tuple(cancels))


def find_for_order(tables: Tables, wanted: Filter, *, limit: int) -> list[TaskId]:
    check_text(wanted.service, wanted.handler)
    found = sorted((row.task for row in tables.tasks.values()), key=lambda task: (task.created_at, task.task_id))
    return [task.task_id for task in found if _passes(task, wanted)][:limit]


def _passes(task: Task, wanted: Filter) -> bool:
    return (
        task.epoch > 0
        and (not wanted.states or task.state in wanted.states)
        and wanted.service in (None, task.service)
        and wanted.handler in (None, task.handler)
        and (wanted.since is None or task.created_at >= wanted.since)
        and (wanted.until is None or task.created_at < wanted.until)
        and wanted.has_code(task.value)
    )


def _places(tables: Tables, task_id: TaskId) -> list[Place]:
    places = [
        Place(
            row.new.key,
            row.new.kind,
            row.new.name,
            row.state,
            row.seq,
            None,
            row.is_forgotten,
            row.checkpoint,
            row.new.value if row.new.key == ORIGINS else None,
        )
        for row in tables.entries_of.get(task_id, ())
    ]
    return places + [
        Place(
            call.new.key,
            call.new.kind,
            call.new.name,
            call.state,
            call.seq,
            call.new.call_id,
            call.is_forgotten,
            call.checkpoint,
        )
        for call in tables.calls_of.get(task_id, ())
    ]


def _forget(tables: Tables, deed: Deed) -> list[Peer]:
    for row in tables.entries_of[deed.task.task_id]:
        if row.seq in deed.entries:
            tables.change(row, is_forgotten=True)
    closed = []
    for call_id, seq in deed.calls:
        call = tables.calls[call_id]
        tables.change(call, is_forgotten=True, look_at=None)
        if seq is not None:
            tables.change(call, state=CallState.CLOSED, seq=seq, closed_at=tables.now)
            if call.new.kind.has_listener:
                closed.append(tables.peer(call))
    return sorted(closed, key=lambda peer: peer.call_id)


def _supersede(tables: Tables, deed: Deed, replica: str) -> None:
    task, by = deed.task, (deed.task.epoch, replica)
    for one in deed.superseding:
        if one.call_id is None:
            old = next(row for row in tables.entries_of[task.task_id] if row.seq == one.place.seq)
            new = replace(old.new, is_ok=True, value=one.value)
            tables.insert_entry(task.task_id, new, checkpoint=task.checkpoint, seq=one.seq, by=by)
            continue
        assert one.place.call_id is not None
        call = tables.calls[one.place.call_id]
        tables.insert_call_row(
            call,
            new=replace(call.new, call_id=one.call_id),
            checkpoint=task.checkpoint,
            closed_at=tables.now,
            look_at=None,
            seq=one.seq,
            state=CallState.OK,
            value=one.value,
            progress=None,
            is_sent=True,
            is_forgotten=False,
            epoch=by[0],
            replica=by[1],
        )


def _write(tables: Tables, deed: Deed) -> None:
    task = deed.task
    row = tables.tasks[task.task_id]
    if deed.due is None:
        tables.change(row, task=replace(task, updated_at=tables.now))
        return
    due_at = tables.now + deed.due
    task = replace(task, trigger=None, due_at=due_at, finished_at=None, updated_at=tables.now)
    tables.change(row, task=task, look_at=due_at, waits=())


def _fork(tables: Tables, deed: Deed, replica: str) -> TaskRow:
    task, now = deed.task, tables.now
    row = tables.insert_task(replace(task, due_at=now, created_at=now, updated_at=now), now)
    for place, call_id in deed.copies:
        if call_id is None:
            assert task.forked_from is not None
            old = next(row for row in tables.entries_of[TaskId(task.forked_from)] if row.seq == place.seq)
            by = (old.epoch, old.replica)
            made = tables.insert_entry(task.task_id, old.new, checkpoint=old.checkpoint, seq=old.seq, by=by)
            tables.change(made, recorded_at=old.recorded_at)
            continue
        assert place.call_id is not None
        call = tables.calls[place.call_id]
        tables.insert_call_row(
            call,
            task_id=task.task_id,
            new=replace(call.new, call_id=call_id),
            look_at=None,
            is_sent=True,
            closed_at=call.closed_at or now,
            state=CallState.OK if call.state is CallState.OPEN else call.state,
        )
    if deed.origins is not None:
        note = NewEntry(ORIGINS, Kind.NOTE, ORIGINS, b"", True, deed.origins)
        tables.insert_entry(task.task_id, note, checkpoint=0, seq=0, by=(1, replica))
    return row
