"""The judge: sees every commit, every message and every ack of a simulated world, and says what must never be.

It knows the promises, not the code: what is read here are rows and messages, as anybody could read them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from tests.simulation.world import Process, World

from coatcheck.broker.port import Message, Outgoing
from coatcheck.store import CallState, TaskState, chain
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.memory.tables import CallRow, Tables, TaskRow
from coatcheck.store.rows import FINAL_STATES, CallId, HistoryLevel, Task, TaskId
from coatcheck.worker.messages import task_id_of, to_body
from coatcheck.worker.phases import Phase

BY_ORDER = ("rewound", "retried", "paused", "unpaused", "damaged")
"""What takes a task into another epoch, or back from its end."""


def _is_told_to_be_over(told: Sequence[HistoryEntry]) -> bool | None:
    """Whether a history says that its task has ended; None: it says so twice, without an order in between."""
    is_over = False
    for entry in told:
        if entry.kind in ("finished", "cancelled"):
            if is_over:
                return None
            is_over = True
        elif entry.kind in BY_ORDER:
            is_over = False
    return is_over


class Judge:
    """Everything that is held against a run of the world."""

    def __init__(self, world: World, service: str) -> None:
        self.world = world
        self.tables = Tables(world.clock)
        self.service = service
        self.finals: dict[str, set[bytes]] = defaultdict(set)
        """By task: the different final replies that left."""
        self.answered: set[str] = set()
        """Correlation ids of requests that got a final reply."""
        self.buried = 0
        self.counts: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._ends: dict[tuple[TaskId, int], tuple[TaskState, bytes | None]] = {}
        """By task and revision: an order may take a failed task back."""
        self._epochs: dict[TaskId, int] = {}
        self._closed: dict[CallId, tuple[CallState, bytes | None]] = {}
        self._entry_counts: dict[TaskId, int] = {}
        self._answered_by: dict[str, str] = {}
        self._chains: dict[TaskId, tuple[int, bytes]] = {}
        """How far each history was seen to hold."""

    # --- commits ---

    def on_commit(self) -> None:
        """Whatever was just written, this holds for the rows."""
        self.counts["commits"] += 1
        for task_id, row in self.tables.tasks.items():
            self._check_end(task_id, row)
            if row.task.state not in FINAL_STATES and not self._has_waker(task_id, row):
                self.world.complain(f"task {_short(task_id)} is {row.task.state} and has no waker")
            if row.task.epoch < self._epochs.get(task_id, 0):
                self.world.complain(f"task {_short(task_id)} went back to epoch {row.task.epoch}")
            self._epochs[task_id] = row.task.epoch
            self._check_calls(task_id)
            if len(self.tables.entries_of[task_id]) < self._entry_counts.get(task_id, 0):
                self.world.complain(f"task {_short(task_id)} has lost what it had recorded")
            self._entry_counts[task_id] = len(self.tables.entries_of[task_id])
            self._check_history(task_id, row.task)

    def _check_history(self, task_id: TaskId, task: Task) -> None:
        """The chain holds and the row stands at its end; what it says of the task's beginning, epochs and end fits."""
        if task.history is HistoryLevel.OFF:
            return
        told = self.tables.history[task_id]
        count, head = self._chains.get(task_id, (0, chain.GENESIS))
        bad = chain.first_bad(task_id, told[count:], previous=head, number=count + 1)
        if bad is not None or (task.entry_count, task.head) != (len(told), told[-1].hash):
            self.world.complain(f"the history of task {_short(task_id)} is broken at entry {bad}")
        self._chains[task_id] = (len(told), told[-1].hash)
        kinds = Counter(entry.kind for entry in told)
        if (kinds["accepted"] + kinds["forked"], _is_told_to_be_over(told)) != (1, task.state in FINAL_STATES):
            self.world.complain(f"task {_short(task_id)} is {task.state}, and its history says {dict(kinds)}")
        granted = sum(kinds[kind] for kind in ("resumed", "taken_over", "cancelled", *BY_ORDER))
        if task.history is HistoryLevel.FULL and granted < task.epoch - 1:
            self.world.complain(f"task {_short(task_id)} has epoch {task.epoch}, and its history says {dict(kinds)}")

    def _check_end(self, task_id: TaskId, row: TaskRow) -> None:
        if row.task.state in FINAL_STATES:
            end = (row.task.state, row.task.value)
            if self._ends.setdefault((task_id, row.task.revision), end) != end:
                self.world.complain(f"task {_short(task_id)} ended twice, the second time as {end}")
        elif (task_id, row.task.revision) in self._ends:
            self.world.complain(f"task {_short(task_id)} had ended and is {row.task.state} again")

    def _has_waker(self, task_id: TaskId, row: TaskRow) -> bool:
        if row.task.state is not TaskState.PARKED:
            return row.task.due_at is not None and row.look_at is not None
        awaited = {call for group in row.waits for call in group.calls}
        return any(
            call.state is CallState.OPEN and call.due_at is not None and call.look_at is not None
            for call in self.tables.calls_of[task_id]
            if call.new.call_id in awaited
        )

    def _check_calls(self, task_id: TaskId) -> None:
        seqs = [entry.seq for entry in self.tables.entries_of[task_id]]
        for call in self.tables.calls_of[task_id]:
            if call.seq is not None:
                seqs.append(call.seq)
            if call.state is not CallState.OPEN:
                end = (call.state, call.value)
                if call.new.call_id not in self._closed:
                    self._check_timeout(call)
                if self._closed.setdefault(call.new.call_id, end) != end:
                    self.world.complain(f"call {_short(call.new.call_id)} was answered twice")
            elif call.new.call_id in self._closed:
                self.world.complain(f"call {_short(call.new.call_id)} was closed and is open again")
        if len(seqs) != len(set(seqs)):
            self.world.complain(f"task {_short(task_id)} gave a sequence number twice: {sorted(seqs)}")

    def _check_timeout(self, call: CallRow) -> None:
        if call.state is CallState.TIMED_OUT and (call.due_at is None or call.due_at > self.tables.now):
            self.world.complain(f"call {_short(call.new.call_id)} timed out before it was due")

    # --- messages ---

    def on_route(self, outgoing: Outgoing) -> None:
        message = outgoing.message
        kind = message.headers.get("cc-kind")
        if outgoing.to.endswith(".dead"):
            self.buried += 1
            if not (message.correlation_id or "").startswith("bad-"):
                self.world.complain(f"a good message was buried: {message}")
        elif kind is None and message.headers.get("cc-task"):
            self._check_call(message)
        elif kind in ("result", "error") and message.headers.get("cc-id"):
            self._check_final(message)

    def _check_call(self, message: Message) -> None:
        self.counts["calls"] += 1
        call_id = CallId(UUID(str(message.headers["cc-id"])))
        if call_id not in self.tables.calls:
            self.world.complain(f"call {_short(call_id)} left before it was committed")

    def _check_final(self, message: Message) -> None:
        self.counts["finals"] += 1
        task = str(message.headers["cc-id"])
        if message.correlation_id:
            self.answered.add(message.correlation_id)
            base = task.partition(":")[0]
            if self._answered_by.setdefault(message.correlation_id, base) != base:
                self.world.complain(f"request {message.correlation_id[:8]} was answered by two tasks")
        row = self.tables.tasks.get(TaskId(UUID(task.partition(":")[0])))
        if row is not None and row.task.revision and not task.endswith(f":{row.task.revision}"):
            return  # it was taken back while its answer was on its way
        if row is not None and row.task.epoch == 0:
            return  # a tombstone: a run that needed no row may have been faster, for one copy of a request or for all
        # Copies that need no row answer for themselves: alike among each other, but one with a row may be cancelled.
        # The answer of such a copy may arrive long after that, from a process that is gone.
        is_of_row = row is not None and (self._has_recorded(row.task.task_id) or message.headers["cc-kind"] == "error")
        given = self.finals[task if is_of_row else f"{task} without a row"]
        given.add(message.body)
        if len(given) > 1:
            self.world.complain(f"task {task[:8]} gave two different answers: {sorted(given)}")
        if row is None or row.task.checkpoint == 0:
            return  # nothing was ever recorded: a copy that needs no row answers for itself
        if row.task.state not in FINAL_STATES:
            self.world.complain(f"task {task[:8]} was answered while it is {row.task.state}")
        elif row.task.state is TaskState.DONE and to_body(row.task.value or b"").raw != message.body:
            self.world.complain(f"task {task[:8]} was answered with something else than its row says")

    def _has_recorded(self, task_id: TaskId) -> bool:
        return bool(self.tables.entries_of[task_id] or self.tables.calls_of[task_id])

    def on_ack(self, queue: str, message: Message, process: Process) -> None:
        self.counts["acks"] += 1
        if queue == self.service and message.headers.get("cc-id"):
            task_id = task_id_of(self.service, str(message.headers["cc-id"]))
            if task_id not in self.tables.tasks and message.correlation_id not in self.answered:
                self.world.complain(f"{process.name} acked the request of {_short(task_id)}, which nobody knows")
        elif queue == f"{self.service}.replies" and message.headers.get("cc-kind") in ("result", "error"):
            call = self.tables.calls.get(CallId(UUID(str(message.correlation_id))))
            if call is not None and call.state is CallState.OPEN:
                self.world.complain(f"{process.name} acked the reply to call {_short(call.new.call_id)} unclaimed")

    # --- effects ---

    def effect(self, task: str, key: str) -> int:
        """A step happens. It must not be one that is recorded, unless by a zombie that does not know better yet."""
        number = next(self._numbers)
        task_id = TaskId(UUID(task))
        process = self.world.current
        assert process is not None
        self.world.note(process.name, f"does step {key} of {task[:8]} (number {number})")
        self.counts["steps"] += 1
        entries = self.tables.entries_of.get(task_id, ())
        if any(entry.new.key.startswith(key) and not entry.is_forgotten for entry in entries):
            epoch = self.tables.tasks[task_id].task.epoch
            if all(
                live.epoch == epoch
                for live in process.lives
                if live.task_id == task_id and live.phase is not Phase.SETTLED
            ):
                self.world.complain(f"step {key} of {task[:8]} was run again though it is recorded")
            self.counts["zombie steps"] += 1
        return number

    # --- the end ---

    def unfinished(self) -> list[str]:
        return [
            f"{_short(task_id)} {row.task.handler} is {row.task.state} (epoch {row.task.epoch})"
            for task_id, row in self.tables.tasks.items()
            if row.task.state not in FINAL_STATES
        ]


def _short(value: Any) -> str:
    return str(value)[:8]
