"""Taking things up: replies, resumes and requests. A batch is decided first, against the rows as it found them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from msgspec.structs import replace

from coatcheck.store.memory.tables import CallRow, Tables, as_json, check_address, check_bytes, earliest
from coatcheck.store.postgres.task_inserts import REQUEST_TRIGGER, births_by_pickups
from coatcheck.store.rows import (
    MAX_HISTORY,
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


@dataclass(slots=True)
class _Batch:
    """What a batch has decided so far."""

    tables: Tables
    lease: timedelta
    max_history: int = MAX_HISTORY
    rulings: list[Ruling] = field(default_factory=list)
    seqs: dict[TaskId, int] = field(default_factory=dict)
    grants: dict[TaskId, tuple[int, str]] = field(default_factory=dict)  # task → (index of the ruling, trigger)
    came_back: dict[int, Task] = field(default_factory=dict)

    def rule(self, verdict: Verdict, task: Task | None = None) -> int:
        self.rulings.append(Ruling(verdict, task))
        return len(self.rulings) - 1

    def rule_call(self, verdict: Verdict, task: Task, *, name: str) -> int:
        self.rulings.append(Ruling(verdict, name=name, task_id=task.task_id, state=task.state))
        return len(self.rulings) - 1

    def next_seq(self, task: Task) -> int:
        seq = self.seqs[task.task_id] = self.seqs.get(task.task_id, task.seq) + 1
        return seq

    def come_back(self, index: int, task: Task, *, trigger: str) -> None:
        """A message was delivered before: what is unsent is looked up, and the run it triggered is its own."""
        self.came_back[index] = task
        if task.state is TaskState.RUNNING and task.trigger == trigger:
            self.grants.setdefault(task.task_id, (index, trigger))

    def answer(self) -> list[Ruling]:
        """Write the grants and sequence numbers, and tell the granted runs what they need."""
        tables = self.tables
        for task_id, (index, trigger) in self.grants.items():
            self._grant(task_id, index, trigger)
        for task_id in self.seqs.keys() - self.grants.keys():
            row = tables.tasks[task_id]
            tables.change(row, task=replace(row.task, seq=self.seqs[task_id], updated_at=tables.now))
        for index, task in self.came_back.items():
            found = self.rulings[index].task or tables.tasks[task.task_id].task
            self.rulings[index] = replace(self.rulings[index], task=found, unsent=tables.unsent(found))
        return self.rulings

    def _grant(self, task_id: TaskId, index: int, trigger: str) -> None:
        tables, row = self.tables, self.tables.tasks[task_id]
        found = row.task
        granted = replace(
            found,
            state=TaskState.RUNNING,
            epoch=found.epoch + 1,
            pickups=found.pickups + 1,
            trigger=trigger,
            seq=self.seqs.get(task_id, found.seq),
            due_at=(due_at := tables.now + self.lease),
            updated_at=tables.now,
        )
        tables.change(row, task=granted, look_at=due_at, waits=())
        self.rulings[index] = replace(
            self.rulings[index],
            verdict=Verdict.GRANTED,
            task=granted,
            history=tables.history(task_id, max_history=self.max_history),
        )


def claim(
    tables: Tables, arrivals: Sequence[Arrival], waits: bool, *, lease: timedelta, max_history: int = MAX_HISTORY
) -> list[Ruling]:
    batch = _Batch(tables, lease, max_history)
    closing: dict[CallId, tuple[int, Arrival, int]] = {}
    progress: dict[CallId, Arrival] = {}
    for arrival in arrivals:
        call = tables.calls.get(arrival.call_id)
        if call is None:
            batch.rule(Verdict.UNKNOWN)
            continue
        task = tables.tasks[call.task_id].task
        if arrival.service not in ("", task.service):
            batch.rule(Verdict.UNKNOWN)
            continue
        verdict = Verdict.DUPLICATE if arrival.call_id in closing else _judge(tables, arrival, call)
        index = batch.rule_call(verdict, task, name=call.new.peer)
        if verdict is Verdict.RECORDED and arrival.state is None:
            progress[arrival.call_id] = arrival
        elif verdict is Verdict.RECORDED:
            closing[arrival.call_id] = (index, arrival, batch.next_seq(task))
        elif arrival.is_redelivered:
            batch.come_back(index, task, trigger=str(arrival.call_id))
    for call_id, (_, arrival, seq) in closing.items():
        _close(tables, tables.calls[call_id], arrival, seq)
    for call_id, arrival in progress.items():
        if call_id not in closing:
            _move_due_time(tables, tables.calls[call_id], arrival)
    _wake(batch, closing)
    return batch.answer()


def resume(
    tables: Tables, wakes: Sequence[Wake], waits: bool, *, lease: timedelta, max_history: int = MAX_HISTORY
) -> list[Ruling]:
    batch = _Batch(tables, lease, max_history)
    for one in wakes:
        row = tables.tasks.get(one.task_id)
        if row is None or one.service not in ("", row.task.service):
            batch.rule(Verdict.UNKNOWN)
            continue
        task, trigger = row.task, f"resume:{one.epoch}"
        if task.state in (TaskState.RUNNING, TaskState.RETRYING, TaskState.HELD) and task.epoch == one.epoch:
            index = batch.rule(Verdict.EARLY, task)
            if tables.is_over(task.due_at):
                batch.grants.setdefault(one.task_id, (index, trigger))
        else:
            index = batch.rule(Verdict.FINISHED if task.state.is_final else Verdict.DUPLICATE, task)
            if one.is_redelivered:
                batch.come_back(index, task, trigger=trigger)
    return batch.answer()


def accept(
    tables: Tables, requests: Sequence[Request], waits: bool, *, lease: timedelta, max_history: int = MAX_HISTORY
) -> list[Ruling]:
    born = set[TaskId]()
    for pickups, births in births_by_pickups(requests).items():
        born |= tables.insert_births(births, trigger=REQUEST_TRIGGER, pickups=pickups, lease=lease)
    batch = _Batch(tables, lease, max_history)
    joined: dict[TaskId, Task] = {}
    for one in requests:
        task_id = one.birth.task_id
        task = joined.get(task_id, tables.tasks[task_id].task)
        if task_id in born:
            born.discard(task_id)  # the next copy in this batch is a duplicate
            batch.rule(Verdict.GRANTED, task)
            continue
        if task.digest != one.birth.digest and task.request:
            batch.rule(Verdict.CONFLICT, task)
            continue
        if task.wants(one.birth) and len(task.addresses) >= MOST_ADDRESSES:
            batch.rule(Verdict.CROWDED, task)
            continue
        index = batch.rule(Verdict.FINISHED if task.state.is_final else Verdict.DUPLICATE, task)
        if one.is_redelivered:
            batch.come_back(index, task, trigger=REQUEST_TRIGGER)
        address = one.birth.address
        if address is not None and task.wants(one.birth):
            check_address(address)
            joined[task_id] = replace(task, addresses=(*task.addresses, address))
    rulings = batch.answer()
    for task_id, task in joined.items():
        row = tables.tasks[task_id]
        tables.change(row, task=replace(row.task, addresses=task.addresses))
    return rulings


def _judge(tables: Tables, arrival: Arrival, call: CallRow) -> Verdict:
    if call.new.kind is Kind.SEND:
        return Verdict.LATE
    if call.state in (CallState.OK, CallState.FAILED) and arrival.state is not CallState.TIMED_OUT:
        return Verdict.DUPLICATE
    if call.state is not CallState.OPEN:
        return Verdict.LATE
    if arrival.state is CallState.TIMED_OUT and not tables.is_over(call.due_at):
        return Verdict.EARLY
    return Verdict.RECORDED


def _close(tables: Tables, call: CallRow, arrival: Arrival, seq: int) -> None:
    check_bytes(arrival.value)
    tables.change(
        call,
        state=CallState.OK if call.new.kind is Kind.TIMER else arrival.state,
        seq=seq,
        value=arrival.value,
        closed_at=tables.now,
        is_sent=True,
        look_at=None,
    )


def _move_due_time(tables: Tables, call: CallRow, arrival: Arrival) -> None:
    idle_due_at = None if call.new.idle is None else tables.now + call.new.idle
    due_at = earliest(idle_due_at, call.hard_due_at)
    tables.change(call, progress=as_json(arrival.progress or {}), is_sent=True, due_at=due_at, look_at=due_at)


def _wake(batch: _Batch, closing: dict[CallId, tuple[int, Arrival, int]]) -> None:
    """Grant each parked task whose wait is over to the last of the replies that ended it."""
    tables = batch.tables
    last = {tables.calls[call_id].task_id: (index, str(call_id)) for call_id, (index, _, _) in closing.items()}
    for task_id, grant in last.items():
        row = tables.tasks[task_id]
        if row.task.state is TaskState.PARKED and tables.is_met(row.waits):
            batch.grants[task_id] = grant
