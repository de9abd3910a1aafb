"""Replies, resumes, requests and cancels: found in the tables, decided, applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from msgspec.structs import replace

from coatcheck.store import decide, history
from coatcheck.store.batcher import Busy
from coatcheck.store.decide import REQUEST_TRIGGER, Called, Closing, Found, Grant, Plan
from coatcheck.store.history import Author
from coatcheck.store.memory.puts import close_leftovers
from coatcheck.store.memory.tables import (
    CallRow,
    Tables,
    as_json,
    check_address,
    check_birth,
    check_bytes,
    check_text,
    earliest,
)
from coatcheck.store.rows import (
    MAX_HISTORY,
    Arrival,
    Birth,
    CallState,
    CancelAsk,
    Peer,
    Request,
    Ruling,
    Task,
    TaskId,
    TaskState,
    Verdict,
    Wake,
)


def claim(
    tables: Tables,
    arrivals: Sequence[Arrival],
    waits: bool,
    *,
    lease: timedelta,
    author: Author,
    max_history: int = MAX_HISTORY,
) -> list[Ruling | None]:
    calls = [tables.calls[one.call_id] for one in arrivals if one.call_id in tables.calls]
    found = {call.new.call_id: _called(tables, call) for call in calls}
    plan = decide.claim(found, arrivals, has_values=author.has_values)
    for closing in plan.closing.values():
        _close(tables, closing)
    for call_id, (_, arrival) in plan.progress.items():
        _move_due_time(tables, tables.calls[call_id], arrival)
    return _apply(tables, plan, lease=lease, max_history=max_history, author=author)


def resume(
    tables: Tables,
    wakes: Sequence[Wake],
    waits: bool,
    *,
    lease: timedelta,
    author: Author,
    max_history: int = MAX_HISTORY,
) -> list[Ruling | None]:
    plan = decide.resume(_found(tables, (one.task_id for one in wakes)), wakes)
    return _apply(tables, plan, lease=lease, max_history=max_history, author=author)


def create(
    tables: Tables, requests: Sequence[Request], waits: bool, *, lease: timedelta, author: Author
) -> list[Ruling | None]:
    born: dict[TaskId, Task] = {}
    for task_id, (one, pickups) in sorted(decide.first_pickups(requests).items(), key=lambda pair: pair[0]):
        check_birth(one.birth)
        if task_id not in tables.tasks and not tables.left_chain(one.birth).count:  # that is left to `accept`
            born[task_id] = _bear(tables, one.birth, pickups=pickups, lease=lease, author=author)
    return [
        None if (task := born.pop(one.birth.task_id, None)) is None else Ruling(Verdict.GRANTED, task)
        for one in requests
    ]


def accept(
    tables: Tables,
    requests: Sequence[Request],
    waits: bool,
    *,
    lease: timedelta,
    author: Author,
    max_history: int = MAX_HISTORY,
) -> list[Ruling | Busy | None]:
    plan = decide.accept(_found(tables, (one.birth.task_id for one in requests)), requests)
    rulings: dict[int, Ruling | Busy | None] = dict(
        enumerate(_apply(tables, plan, lease=lease, max_history=max_history, author=author))
    )
    for task_id, (one, pickups) in decide.first_pickups(requests).items():
        if task_id not in tables.tasks and tables.left_chain(one.birth).count:
            task = _bear(tables, one.birth, pickups=pickups, lease=lease, author=author)
            copies = [index for index, copy in enumerate(requests) if copy.birth.task_id == task_id]
            rulings |= {index: Busy(task_id) for index in copies} | {copies[0]: Ruling(Verdict.GRANTED, task)}
    for task_id, task in plan.joined.items():
        check_address(task.addresses[-1])
        row = tables.tasks[task_id]
        tables.change(row, task=replace(row.task, addresses=task.addresses))
    return list(rulings.values())


def _bear(tables: Tables, birth: Birth, *, pickups: int, lease: timedelta, author: Author) -> Task:
    check_birth(birth)
    drafts = history.of_birth(birth, has_values=author.has_values)
    told = author.tell(birth.task_id, drafts, at=tables.left_chain(birth), epoch=1)
    row = tables.insert_birth(birth, trigger=REQUEST_TRIGGER, pickups=pickups, lease=lease)
    return tables.append_history(row, *told)


def _called(tables: Tables, call: CallRow) -> Called:
    task, new = tables.tasks[call.task_id].task, call.new
    return Called(
        call_id=new.call_id,
        task_id=call.task_id,
        kind=new.kind,
        peer=new.peer,
        state=call.state,
        is_due=tables.is_over(call.due_at),
        version=0,
        service=task.service,
        task_state=task.state,
        seq=task.seq,
        trigger=task.trigger,
        key=new.key,
        epoch=task.epoch,
        history=task.history,
        entry_count=task.entry_count,
        head=task.head,
    )


def _found(tables: Tables, ids: Iterable[TaskId]) -> dict[TaskId, Found]:
    rows = {task_id: tables.tasks[task_id].task for task_id in ids if task_id in tables.tasks}
    return {task_id: Found(task, tables.is_over(task.due_at)) for task_id, task in rows.items()}


def _apply(tables: Tables, plan: Plan, *, lease: timedelta, max_history: int, author: Author) -> list[Ruling | None]:
    """Write the grants and sequence numbers, and tell the granted runs what they need."""
    met = {task_id: grant for task_id, grant in plan.if_met.items() if tables.is_met(tables.tasks[task_id].waits)}
    grants = met | plan.grants
    for task_id, telling in plan.telling.items():
        entries, chain = telling.entries(task_id, author, is_granted=task_id in grants)
        tables.append_history(tables.tasks[task_id], entries, chain)
    for task_id, grant in grants.items():
        seq = plan.seqs.get(task_id, tables.tasks[task_id].task.seq)
        task = _grant(tables, task_id, grant, seq=seq, lease=lease)
        known = tables.known(task_id, max_history=max_history)
        ruling = plan.rulings[grant.event]
        assert ruling is not None
        plan.rulings[grant.event] = replace(ruling, verdict=Verdict.GRANTED, task=task, known=known)
    for task_id in plan.seqs.keys() - grants.keys():
        row = tables.tasks[task_id]
        tables.change(row, task=replace(row.task, seq=plan.seqs[task_id], updated_at=tables.now))
    for index, task_id in plan.came_back.items():
        ruling = plan.rulings[index]
        assert ruling is not None
        task = ruling.task or tables.tasks[task_id].task
        plan.rulings[index] = replace(ruling, task=task, unsent=tables.unsent(task))
    return plan.rulings


def _grant(tables: Tables, task_id: TaskId, grant: Grant, *, seq: int, lease: timedelta) -> Task:
    row, due_at = tables.tasks[task_id], tables.now + lease
    task = replace(decide.granted(row.task, grant, seq=seq), due_at=due_at, updated_at=tables.now)
    tables.change(row, task=task, look_at=due_at, waits=())
    return task


def _close(tables: Tables, closing: Closing) -> None:
    call_id, state, seq, value = closing
    check_bytes(value)
    tables.change(
        tables.calls[call_id],
        state=state,
        seq=seq,
        value=value,
        closed_at=tables.now,
        is_sent=True,
        look_at=None,
    )


def _move_due_time(tables: Tables, call: CallRow, arrival: Arrival) -> None:
    idle_due_at = None if call.new.idle is None else tables.now + call.new.idle
    due_at = earliest(idle_due_at, call.hard_due_at)
    tables.change(call, progress=as_json(arrival.progress or {}), is_sent=True, due_at=due_at, look_at=due_at)


# --- cancels ---


def cancel(tables: Tables, asks: Sequence[CancelAsk], waits: bool, *, author: Author) -> list[Ruling]:
    asked = [(_target(tables, ask), ask) for ask in asks]
    known = {target: tables.tasks[target].task for target, _ in asked if target in tables.tasks}
    plan = decide.cancel(known, asked)
    for target, ask in sorted(plan.buried.items(), key=lambda pair: pair[0]):
        _bury(tables, target, ask)
    cancels = {target: _end(tables, *plan.ending[target], author) for target in sorted(plan.ending)}
    cancels |= {target: _closed(tables, task) for target, task in plan.ended.items() if decide.tells_peers_again(task)}
    return [decide.answer_cancel(plan, target, ask, cancels.get(target, ())) for target, ask in asked]


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


def _end(tables: Tables, task: Task, ask: CancelAsk, author: Author) -> Sequence[Peer]:
    row = tables.tasks[task.task_id]
    seq, cancels = close_leftovers(tables, task.task_id, task.seq)
    told = author.tell(task.task_id, history.of_cancel(task, ask), at=task.chain, epoch=task.epoch + 1)
    ended = replace(
        tables.append_history(row, *told),
        state=TaskState.CANCELLED,
        epoch=task.epoch + 1,
        checkpoint=task.checkpoint + 1,
        seq=seq,
        value=_answer(task.task_id, ask),
        trigger=None,
        due_at=tables.later(ask.keep),
        finished_at=tables.now,
        updated_at=tables.now,
    )
    tables.change(row, task=ended, look_at=tables.now + decide.RESEND_AFTER, waits=())
    return cancels


def _closed(tables: Tables, task: Task) -> Sequence[Peer]:
    calls = tables.calls_of[task.task_id]
    return [tables.peer(call) for call in calls if call.state is CallState.CLOSED and call.new.kind.has_listener]


def _answer(target: TaskId, ask: CancelAsk) -> bytes:
    value = ask.failure(target)
    check_bytes(value)
    return value


def _bury(tables: Tables, target: TaskId, ask: CancelAsk) -> None:
    unknown = Birth(target, ask.service, None, "", b"", b"")
    tombstone = replace(
        tables.newborn(unknown, trigger=None, pickups=0, due_at=tables.later(ask.keep)),
        state=TaskState.CANCELLED,
        epoch=0,
        value=_answer(target, ask),
        is_final_sent=True,
        finished_at=tables.now,
    )
    tables.insert_task(tombstone, look_at=None)
