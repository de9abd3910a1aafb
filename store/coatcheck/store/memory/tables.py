"""The three tables as plain Python: what Postgres keeps, in dicts that all stores of one process share.

An operation is one synchronous function on the tables, so it is never seen half done; what it changed is undone if it
raises. Rows refuse what the schema refuses, by the same names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as copy_row
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

from msgspec.structs import replace

from coatcheck.errors import Rejected
from coatcheck.store import decide
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.documents import from_json, to_json
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import (
    Address,
    Birth,
    Caller,
    CallId,
    CallState,
    Chain,
    Group,
    HistoryLevel,
    Known,
    NewCall,
    NewEntry,
    OpenCall,
    Peer,
    Recorded,
    Task,
    TaskId,
    TaskState,
    Unsent,
)
from coatcheck.store.seals import Leaf, Seal, SinkMark

T = TypeVar("T")
Clock = Callable[[], datetime]
By = tuple[int | None, str | None]
"""The epoch and the replica that wrote a row."""
NO_ONE: By = (None, None)

LAST_DAY = datetime(9999, 1, 1, tzinfo=UTC)
_NUL_IN_JSON = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(slots=True)
class TaskRow:
    """A task, what it waits for, and when the sweeper should look at it."""

    task: Task
    look_at: datetime | None
    waits: tuple[Group, ...] = ()


@dataclass(slots=True)
class CallRow:
    """A call, open or ended."""

    task_id: TaskId
    new: NewCall
    checkpoint: int
    opened_at: datetime
    hard_due_at: datetime | None
    due_at: datetime | None
    look_at: datetime | None
    seq: int | None
    state: CallState = CallState.OPEN
    is_sent: bool = False
    is_forgotten: bool = False
    value: bytes | None = None
    progress: dict[str, Any] | None = None
    closed_at: datetime | None = None
    epoch: int | None = None
    replica: str | None = None

    @property
    def is_open_wait(self) -> bool:
        """Whether a run may be waiting for it."""
        return self.state is CallState.OPEN and self.new.kind.is_awaited

    def recorded(self) -> Recorded:
        new, seq = self.new, self.seq
        assert seq is not None
        state = self.state if new.kind.is_awaited else CallState.OK
        return Recorded(new.key, new.kind, new.name, new.digest, seq, state, self.value or b"", new.call_id)


@dataclass(slots=True)
class EntryRow:
    """A step or note of the journal."""

    new: NewEntry
    seq: int
    checkpoint: int
    recorded_at: datetime
    is_forgotten: bool = False
    epoch: int | None = None
    replica: str | None = None

    @property
    def state(self) -> CallState:
        return CallState.OK if self.new.is_ok else CallState.FAILED

    def recorded(self) -> Recorded:
        new = self.new
        return Recorded(new.key, new.kind, new.name, new.digest, self.seq, self.state, new.value)


class Tables:
    """The rows, shared by all replicas, and the clock that decides deadlines: `now` stands still in an operation."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or partial(datetime.now, UTC)
        self.now = self.clock()
        self.tasks: dict[TaskId, TaskRow] = {}
        self.calls: dict[CallId, CallRow] = {}
        self.calls_of: dict[TaskId, list[CallRow]] = {}
        self.entries_of: dict[TaskId, list[EntryRow]] = {}
        self.history: dict[TaskId, list[HistoryEntry]] = {}
        """It outlives its task."""
        self.seals: list[Seal] = []
        self.leaves: list[tuple[Leaf, ...]] = []
        self.sinks: dict[str, SinkMark] = {}
        self._undo: list[Callable[[], object]] = []

    def atomically(self, work: Callable[[Tables], T]) -> T:
        """Do all of `work` or, if it raises, nothing."""
        self.now = self.clock()
        try:
            return work(self)
        except BaseException:
            for undo in reversed(self._undo):
                undo()
            raise
        finally:
            self._undo.clear()

    # --- writing ---

    def change(self, row: TaskRow | CallRow | EntryRow, **values: Any) -> None:
        for name, value in values.items():
            self._undo.append(partial(setattr, row, name, getattr(row, name)))
            setattr(row, name, value)

    def append(self, rows: list[Any], row: object) -> None:
        rows.append(row)
        self._undo.append(rows.pop)

    def undo(self, by: Callable[[], object]) -> None:
        """Do this if the operation raises."""
        self._undo.append(by)

    def insert_task(self, task: Task, look_at: datetime | None) -> TaskRow:
        task_id = task.task_id
        row = self.tasks[task_id] = TaskRow(task, look_at)
        self.calls_of[task_id] = []
        self.entries_of[task_id] = []
        self._undo.append(partial(self._drop_task, task_id))
        return row

    def delete_task(self, task_id: TaskId) -> None:
        row, calls, entries = self.tasks[task_id], self.calls_of[task_id], self.entries_of[task_id]
        self._drop_task(task_id)
        self._undo.append(partial(self.entries_of.__setitem__, task_id, entries))
        self._undo.append(partial(self.calls_of.__setitem__, task_id, calls))
        self._undo.append(partial(self.calls.update, {call.new.call_id: call for call in calls}))
        self._undo.append(partial(self.tasks.__setitem__, task_id, row))

    def insert_call(self, task_id: TaskId, new: NewCall, *, checkpoint: int, seq: int | None, by: By = NO_ONE) -> None:
        check_text(new.key, new.name, new.peer, new.handler)
        check_bytes(new.digest, new.body)
        as_json(dict(new.headers))
        hard_due_at = self._call_due_at(new.hard)
        due_at = earliest(self._call_due_at(new.idle), hard_due_at)
        if new.kind not in set(Kind) or Kind(new.kind).is_entry:
            refuse("call_kind_is_known")
        if due_at is None and new.kind.is_awaited:
            refuse("call_open_is_due_or_a_send")
        if new.call_id in self.calls:
            refuse("call_pkey")
        look_at = earliest(due_at, self.now + decide.RESEND_AFTER) if new.kind.is_published else due_at
        row = CallRow(task_id, new, checkpoint, self.now, hard_due_at, due_at, look_at, seq, epoch=by[0], replica=by[1])
        self._add_call(row)

    def insert_call_row(self, like: CallRow, **values: Any) -> None:
        """A call like another one, but for these values."""
        self._add_call(copy_row(like, **values))

    def _add_call(self, row: CallRow) -> None:
        self.calls[row.new.call_id] = row
        self.calls_of[row.task_id].append(row)
        self._undo.append(self.calls_of[row.task_id].pop)
        self._undo.append(partial(self.calls.pop, row.new.call_id))

    def _call_due_at(self, delay: timedelta | None) -> datetime | None:
        return None if delay is None else self.later(delay, or_refuse="call_due_at_can_be_read")

    def insert_entry(self, task_id: TaskId, new: NewEntry, *, checkpoint: int, seq: int, by: By = NO_ONE) -> EntryRow:
        check_text(new.key, new.name)
        check_bytes(new.digest, new.value)
        if new.kind not in set(Kind) or not Kind(new.kind).is_entry:
            refuse("journal_kind_is_known")
        row = EntryRow(new, seq, checkpoint, self.now, epoch=by[0], replica=by[1])
        self.entries_of[task_id].append(row)
        self._undo.append(self.entries_of[task_id].pop)
        return row

    def append_history(self, row: TaskRow, entries: Sequence[HistoryEntry], chain: Chain) -> Task:
        """Append to a task's history, which stands at `chain` then. Gives the task as it is now."""
        if entries:
            told = self.history.setdefault(row.task.task_id, [])
            for entry in entries:
                check_text(entry.kind, entry.actor, entry.key)
                if entry.number != len(told) + 1:
                    refuse("history_pkey", "23505")
                told.append(entry)
                self._undo.append(told.pop)
            self.change(row, task=replace(row.task, entry_count=chain.count, head=chain.head))
        return row.task

    def delete_history(self, task_id: TaskId) -> None:
        told = self.history.pop(task_id)
        self._undo.append(partial(self.history.__setitem__, task_id, told))

    def left_chain(self, birth: Birth) -> Chain:
        """Where the history of a new task begins: an earlier task of its id may have left one."""
        left = self.history.get(birth.task_id) if birth.history is not HistoryLevel.OFF else None
        return Chain(birth.history, left[-1].number, left[-1].hash) if left else Chain(birth.history)

    def insert_birth(self, birth: Birth, *, trigger: str, pickups: int, lease: timedelta) -> TaskRow:
        due_at = self.now + lease
        return self.insert_task(self.newborn(birth, trigger=trigger, pickups=pickups, due_at=due_at), due_at)

    def newborn(self, birth: Birth, *, trigger: str | None, pickups: int, due_at: datetime) -> Task:
        caller = birth.caller
        return Task(
            task_id=birth.task_id,
            service=birth.service,
            handler=birth.handler,
            version=birth.version,
            state=TaskState.RUNNING,
            epoch=1,
            checkpoint=0,
            seq=0,
            attempt=1,
            pickups=pickups,
            trigger=trigger,
            identity=birth.identity,
            digest=birth.digest,
            correlation_id=birth.correlation_id,
            request=birth.request,
            addresses=(birth.address,) if birth.address else (),
            traceparent=birth.traceparent,
            tracestate=birth.tracestate,
            value=None,
            traceback=None,
            is_final_sent=False,
            progress=None,
            due_at=due_at,
            created_at=self.now,
            updated_at=self.now,
            finished_at=None,
            caller=None if caller is None else Caller(caller.subject, as_json(caller.claims)),
            deadline_at=birth.deadline_at,
            history=birth.history,
        )

    def _drop_task(self, task_id: TaskId) -> None:
        del self.tasks[task_id], self.entries_of[task_id]
        for call in self.calls_of.pop(task_id):
            del self.calls[call.new.call_id]

    # --- reading ---

    def newest_first(self) -> list[TaskRow]:
        """All tasks by the time of their making; of one moment, the one that came in last stands first."""
        rows = sorted(self.tasks.values(), key=lambda row: row.task.created_at)
        rows.reverse()
        return rows

    def later(self, delay: timedelta, *, or_refuse: str = "task_due_at_can_be_read") -> datetime:
        """A time to come, unless it is too far away to be read again."""
        return self.now + delay if delay < LAST_DAY - self.now else refuse(or_refuse)

    def is_over(self, due_at: datetime | None) -> bool:
        return due_at is not None and due_at <= self.now

    def peer(self, call: CallRow) -> Peer:
        task, new = self.tasks[call.task_id].task, call.new
        return Peer(
            new.call_id,
            call.task_id,
            task.service,
            new.kind,
            new.key,
            new.peer,
            new.handler,
            new.body,
            new.headers,
            call.hard_due_at,
            task.traceparent,
        )

    def known(self, task_id: TaskId, *, max_history: int | None = None) -> Known:
        calls = [call for call in self.calls_of[task_id] if not call.is_forgotten]
        recorded = [call.recorded() for call in calls if not call.is_open_wait]
        recorded += [entry.recorded() for entry in self.entries_of[task_id] if not entry.is_forgotten]
        still_open = tuple(
            OpenCall(call.new.call_id, call.new.key, call.new.kind, call.new.name, call.new.digest, call.due_at)
            for call in calls
            if call.is_open_wait
        )
        is_withheld = max_history is not None and sum(len(one.value) for one in recorded) > max_history
        if is_withheld:
            recorded = [replace(one, value=b"") for one in recorded]
        return Known(tuple(sorted(recorded, key=lambda one: one.seq)), still_open, is_withheld)

    def news(self, task_id: TaskId, *, seen: int) -> list[Recorded]:
        """What ended since a run last looked, in order; its own entries and sends are no news."""
        ended = (call for call in self.calls_of[task_id] if call.seq is not None and call.seq > seen)
        return sorted((call.recorded() for call in ended if call.new.kind.is_awaited), key=lambda one: one.seq)

    def unsent(self, task: Task) -> Unsent:
        calls = [
            self.peer(call)
            for call in self.calls_of[task.task_id]
            if call.state is CallState.OPEN and not call.is_sent and call.new.kind.is_published
        ]
        calls.sort(key=lambda one: one.call_id)
        return Unsent(tuple(calls), task.state.is_final and not task.is_final_sent)

    def is_met(self, groups: Iterable[Group]) -> bool:
        return any(group.is_met(self.states(group.calls)) for group in groups)

    def states(self, ids: Iterable[CallId]) -> Mapping[CallId, CallState]:
        calls = self.calls
        return {call_id: calls[call_id].state for call_id in ids if call_id in calls}


# --- what the schema refuses ---


_REFUSED = "the tables refused the values of a write"


def refuse(what: str, code: str = "23514") -> NoReturn:
    raise Rejected(f"{_REFUSED} ({code}): constraint {what}")


def check_text(*values: object) -> None:
    for value in values:
        if value is None or (isinstance(value, str) and value.isascii() and "\0" not in value):
            continue
        if not isinstance(value, str) or value != value.encode("utf-8", "replace").decode():
            raise Rejected(f"{_REFUSED} (22000): not a text")
        if "\0" in value:
            raise Rejected(f"{_REFUSED} (22021): a NUL in a text")


def check_bytes(*values: object) -> None:
    for value in values:
        if not isinstance(value, bytes):
            raise Rejected(f"{_REFUSED} (22000): not bytes")


def as_json(value: Any) -> Any:
    """The document as it comes back from a `jsonb`."""
    written = to_json(value)
    if _NUL_IN_JSON.search(written):
        raise Rejected(f"{_REFUSED} (22P05): a NUL in a document")
    return from_json(written)


def check_birth(birth: Birth) -> None:
    check_text(birth.service, birth.handler, birth.version, birth.identity, birth.correlation_id)
    check_text(birth.traceparent, birth.tracestate, birth.caller.subject if birth.caller else None)
    check_bytes(birth.digest, birth.request)
    if birth.address is not None:
        check_address(birth.address)


def check_address(address: Address) -> None:
    as_json([address.reply_to, address.correlation_id])


def earliest(*times: datetime | None) -> datetime | None:
    return min((time for time in times if time is not None), default=None)
