"""Making up what runs, peers and people do to a few tasks: mostly what fits the rows as they are, sometimes not."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace
from tests.store.kit import DAY, MINUTE, birth

from coatcheck.store import CallId, CallState, Kind, Tables, Task, TaskId, TaskState, encode
from coatcheck.store.memory.tables import CallRow, TaskRow
from coatcheck.store.orders import Fork, Order, Pause, Resume, Retry, Rewind
from coatcheck.store.rows import (
    Again,
    Arrival,
    Birth,
    Caller,
    CancelAsk,
    Chain,
    Changes,
    Finish,
    Going,
    Group,
    HistoryLevel,
    Hold,
    NewCall,
    NewEntry,
    Park,
    Put,
    Request,
    Wake,
)
from coatcheck.store.views import Renewal

NOW = timedelta()
TASK_COUNT = 8
KEYS = ("a#1", "b#1", "c#1")
ENDS = (TaskState.DONE, TaskState.DONE, TaskState.FAILED, TaskState.FAILED, TaskState.CANCELLED)
POINTS = ("start", "latest", "before:last-failure", "nowhere", *(f"before:{key}" for key in (*KEYS, "none")))
LEASES = (NOW, MINUTE, 5 * MINUTE)
REPLIES: dict[str, tuple[CallState | None, bytes, dict[str, Any] | None]] = {
    "ok": (CallState.OK, b"value", None),
    "failed": (CallState.FAILED, b"failure", None),
    "timed out": (CallState.TIMED_OUT, b"timeout", None),
    "progress": (None, b"", {"done": 1, "rate": 0.5}),
    "refused": (None, b"", {"message": "nul \0"}),
}

End = Going | Park | Finish | Again | Hold


class Maker:
    """Remembers what has been made, so that it can come again. Its ids are the same whenever an example is repeated."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._random = random.Random(0)
        self._data: st.DataObject | None = None
        self.births = [self._birth(number) for number in range(TASK_COUNT)]
        self._near = self.births
        self.tasks: list[Task] = []  # as they once were: what a run that stood still believes
        self.puts: list[Put] = []
        self.calls: list[CallId] = []
        self._seen: dict[tuple[TaskId, int, int], int] = {}

    def by(self, data: st.DataObject) -> Maker:
        """Make the next batch by these choices. It is about few tasks, so that they meet in it."""
        self._data = data
        self._seen = {}
        self._near = self.some(self.births, least=1, most=3)
        return self

    # --- messages ---

    def request(self) -> Request:
        newborn = self.one(self._near)
        changed = {
            "as it was": newborn,
            "another body": replace(newborn, digest=b"another"),
            "another address": replace(newborn, address=birth(reply_to="second").address),
            "refused": replace(newborn, handler="nul \0"),
        }
        kind = self._weighted({"as it was": 6, "another body": 1, "another address": 2, "refused": 1})
        return Request(changed[kind], self.maybe())

    def arrival(self, call_id: CallId | None = None) -> Arrival:
        """A reply to that call, or to any, known or not."""
        if call_id is None:
            calls = [call for row in self._rows() for call in self._tables.calls_of[row.task.task_id]]
            waited = [call for call in calls if call.is_open_wait]
            usual = (waited if self.maybe() else calls) or calls
            call_id = self.one([call.new.call_id for call in usual] or [*self.calls, CallId(self._id())])
        state, value, progress = REPLIES[
            self._weighted({"ok": 6, "failed": 2, "timed out": 4, "progress": 2, "refused": 1})
        ]
        return Arrival(call_id, state, value, self.maybe(), progress, self._queue())

    def wake(self) -> Wake:
        resting = [row.task for row in self._rows(TaskState.RUNNING, TaskState.RETRYING, TaskState.HELD)]
        if resting and self.maybe():
            task = self.one(resting)
            return Wake(task.task_id, task.epoch, self.maybe(), self._queue())
        task_id = self.one(self._near).task_id
        row = self._tables.tasks.get(task_id)
        return Wake(task_id, row.task.epoch - self.one([0, 1]) if row is not None else 1, self.maybe())

    def ask(self) -> CancelAsk:
        correlation_id = self.one([None, None, "c-0", "c-1", "c-none"])
        task_id, keep = self.one(self._near).task_id, self.one([NOW, DAY])
        return CancelAsk(self._queue() or "svc", task_id, lambda _: b"reason", keep, correlation_id)

    def order(self) -> Order:
        """Mostly of a task that is there, and to a point that it has."""
        tasks = [row.task for row in self._rows()]
        task_id = self.one(tasks).task_id if tasks else self.one(self._near).task_id
        is_dry_run = self.one([False] * 5 + [True])
        who: dict[str, Any] = {"task_id": task_id, "by": self.one([None, "ann"]), "is_dry_run": is_dry_run}
        failed = [row.task.task_id for row in self._rows(TaskState.FAILED, TaskState.HELD, TaskState.RETRYING)]
        known = [row.task for row in self._tables.tasks.values()]
        paused = [task.task_id for task in known if task.state is TaskState.PAUSED or task.is_pausing]
        # Tasks that can be retried or resumed are few: where there are some, that is done to one of them.
        weights = {"rewind": 5, "set": 2, "retry": 5 if failed else 1, "pause": 4, "resume": 8 if paused else 1}
        match self._weighted(weights):
            case "rewind":
                to = self.one([0, 1, 2, 3, *POINTS])
                body = self.one([None, None, None, encode("another")])
                return Rewind(**who, to=to, same_keys=self.maybe(), input=body)
            case "set":
                return Rewind(**who, sets={key: encode("set") for key in self.some(KEYS, least=1, most=2)})
            case "retry":
                return Retry(**who | {"task_id": self.one(failed or [task_id])})
            case "pause":
                return Pause(**who)
            case _:
                return Resume(**who | {"task_id": self.one(paused or [task_id])})

    def fork(self) -> Fork:
        return Fork(task_id=self.one(self._near).task_id, at=self.one([1, 2, *POINTS]), new_task_id=TaskId(self._id()))

    def _queue(self) -> str:
        """On whose queue something came; mostly nobody asks."""
        return self.one(["", "", "", "", "svc", "another"])

    def waited(self) -> list[CallId]:
        """The open calls that some parked task waits for."""
        parked = [row for row in self._tables.tasks.values() if row.waits]
        groups = self.one(parked).waits if parked else ()
        found = dict.fromkeys(call_id for group in groups for call_id in group.calls)
        return [call_id for call_id in found if self._tables.calls[call_id].is_open_wait]

    def renewals(self) -> list[Renewal]:
        current = [row.task for row in self._tables.tasks.values()]
        return [Renewal(task.task_id, task.epoch) for task in self.some([*current, *self.tasks])]

    # --- what a run writes ---

    def put(self) -> Put:
        put = self._put()
        self.puts = [*self.puts[-20:], put]
        self.calls = [*self.calls[-50:], *(call.call_id for call in put.changes.opens)]
        return put

    def _put(self) -> Put:
        running = [row.task for row in self._rows(TaskState.RUNNING)]
        stopped = [task for task in self.tasks if task.task_id in {one.task_id for one in self._near}]
        kind = self._weighted({"of a run": 12, "birth": 2, "of an old run": 1, "again": 2})
        if kind == "again" and self.puts:
            return self.one(self.puts)
        if kind == "of a run" and running:
            return self._put_of(self.one(running))
        if kind == "of an old run" and stopped:
            return self._put_of(self.one(stopped))
        new = [one for one in (*self._near, *self.births) if one.task_id not in self._tables.tasks]
        newborn = self.one(new if new and kind != "birth" else self._near)
        changes = self._changes(newborn.task_id)
        # A birth knows of no older call; those of an earlier life of the task may be gone when it is put again.
        return Put(newborn.task_id, 0, 0, 0, changes, self._end(None, changes), birth=newborn)

    def _put_of(self, task: Task) -> Put:
        changes = self._changes(task.task_id)
        end = self._end(task.task_id, changes)
        # Of one instant: which of two puts of a run goes first is told by their order only if it has seen one thing.
        run = (task.task_id, task.epoch, task.checkpoint)
        seen = self._seen.setdefault(run, self.one(range(max(0, task.seq - 3), task.seq + 1)))
        progress = {"done": 1} if self.maybe() else None
        # Where the row has moved on, so has its history, and the run cannot know.
        chain = task.chain if seen == task.seq else Chain(task.history, 0, b"stale")
        return Put(task.task_id, task.epoch, task.checkpoint, seen, changes, end, progress=progress, chain=chain)

    def _changes(self, task_id: TaskId) -> Changes:
        waited = [call.new.call_id for call in self._waited_of(task_id)]
        return Changes(
            entries=tuple(self._entry() for _ in range(self.one([0, 0, 1, 2]))),
            opens=tuple(self._call() for _ in range(self.one([1, 2, 3, 0]))),
            closes=tuple(self.some(waited, most=self.one([0, 0, 1]))),
        )

    def _end(self, task_id: TaskId | None, changes: Changes) -> End:
        lease, value = self.one(LEASES), b"value" if self.maybe() else b"another"
        traceback = self.one([None, "a line with a \0"])
        match self._weighted({"park": 10, "going": 6, "again": 6, "finish": 4, "hold": 2, "refused": 1}):
            case "park":
                groups = tuple(self._groups(task_id, changes))
                return Park(groups, lease) if groups else Going(lease)
            case "finish":
                state, keep = self.one(ENDS), self.one([NOW, 5 * MINUTE, DAY])
                return Finish(state, value, keep, traceback, is_detached=self.maybe())
            case "again":
                return Again(lease, value, traceback, tuple(self.some(KEYS)))
            case "hold":
                return Hold(lease, value)
            case "refused":
                return Park((), lease)
            case _:
                return Going(lease, is_detached=self.maybe())

    def _groups(self, task_id: TaskId | None, changes: Changes) -> Iterable[Group]:
        """Waits for calls that exist or are opened with them, but not for what is given up."""
        known = (call.new for call in (self._tables.calls_of.get(task_id, ()) if task_id else ()))
        members = [
            call.call_id
            for call in (*known, *changes.opens)
            if call.kind is not Kind.SEND and call.call_id not in changes.closes
        ]
        for _ in range(self.one([1, 1, 2])):
            if picked := self.some(members, least=min(len(members), self.one([1, 2, 3])), most=4):
                yield Group(tuple(picked), self.one([None, 1, len(picked), max(1, len(picked) - 1)]))

    def _call(self) -> NewCall:
        call_id, key, soon = CallId(self._id()), self.one(KEYS), self.one([NOW, MINUTE, 3 * MINUTE])
        match self._weighted({"call": 12, "timer": 4, "send": 6, "never due": 1, "known": 1}):
            case "timer":
                return NewCall(call_id, key, Kind.TIMER, "sleep", b"digest", hard=soon)
            case "send":
                return NewCall(call_id, key, Kind.SEND, "audit", b"digest", "audit", b"note")
            case "never due":
                return NewCall(call_id, key, Kind.CALL, "search", b"digest", "search")
            case "known":
                return NewCall(CallId(self.births[0].task_id), key, Kind.CALL, "search", b"digest", hard=MINUTE)
            case _:
                idle, hard = (soon, 2 * DAY) if self.maybe() else (None, soon)
                headers = {"traceparent": "00"}
                return NewCall(
                    call_id, key, Kind.CALL, "find", b"digest", "search", b"body", headers, "find", idle, hard
                )

    def _entry(self) -> NewEntry:
        kind, name = self.one([(Kind.STEP, "plan"), (Kind.NOTE, "@now"), (Kind.NOTE, "user:decision")])
        return NewEntry(self.one(KEYS), kind, name, b"digest", self.maybe(), b"value")

    # --- choosing ---

    def _rows(self, *states: TaskState) -> list[TaskRow]:
        """The rows in these states of the tasks that this batch is about; of all tasks, if there are none."""
        rows = [row for row in self._tables.tasks.values() if row.task.state in (states or TaskState)]
        near = {one.task_id for one in self._near}
        return [row for row in rows if row.task.task_id in near] or rows

    def _waited_of(self, task_id: TaskId) -> list[CallRow]:
        return [call for call in self._tables.calls_of.get(task_id, ()) if call.is_open_wait]

    def several(self, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(self.one(range(1, 5)))]

    def some(self, found: Iterable[Any], *, least: int = 0, most: int = 3) -> list[Any]:
        found = list(found)
        numbers = st.lists(st.integers(0, len(found) - 1), min_size=least, max_size=most, unique=True)
        return [found[number] for number in self._draw(numbers)] if found and most else []

    def one(self, found: Any) -> Any:
        return self._draw(st.sampled_from(found))

    def _weighted(self, kinds: dict[str, int]) -> str:
        return str(self.one([kind for kind, weight in kinds.items() for _ in range(weight)]))

    def maybe(self) -> bool:
        return self._draw(st.booleans())

    def _draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        assert self._data is not None
        return self._data.draw(strategy)

    def _id(self) -> uuid.UUID:
        return uuid.UUID(int=self._random.getrandbits(128))

    def _birth(self, number: int) -> Birth:
        service = "another" if number == 4 else "svc"
        newborn = birth(TaskId(self._id()), correlation_id=f"c-{number % 2}", service=service)
        named: dict[int, dict[str, Any]] = {
            1: {"identity": None},
            2: {"caller": Caller("somebody", {"role": "guest"})},
            3: {"deadline_at": datetime(2031, 1, 1, tzinfo=UTC)},
        }
        return replace(newborn, history=HistoryLevel(number % 3), **named.get(number, {}))
