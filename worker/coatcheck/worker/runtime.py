"""The parts of a running worker that its consumers share. Put together in `worker.py`, handed to everything else."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coatcheck.broker.bodies import Limits
from coatcheck.store.front import Store
from coatcheck.store.rows import HistoryLevel, TaskId
from coatcheck.worker.app import App, Handler
from coatcheck.worker.events import Events
from coatcheck.worker.metrics import Metrics
from coatcheck.worker.outbox import Outbox
from coatcheck.worker.ram_waits import RamCalls
from coatcheck.worker.resending import Hints, Marks
from coatcheck.worker.settings import Checkpointing, Settings
from coatcheck.worker.store_outage import StoreGate

if TYPE_CHECKING:
    from coatcheck.worker.task_run import TaskRun

MOST_CANCELLED = 10_000
"""How many of the tasks that were cancelled last a replica knows without asking the rows."""


class LiveRuns:
    """Finds a live run by its task, by the message that triggered it, or by its requester's correlation id."""

    def __init__(self) -> None:
        self._by_task: dict[TaskId, TaskRun] = {}
        self.is_closed = False
        """The grace time is over: a run that still waits for a slot must not begin."""
        self._cancelled: dict[TaskId, None] = {}

    def __iter__(self) -> Iterator[TaskRun]:
        return iter(list(self._by_task.values()))

    def __len__(self) -> int:
        return len(self._by_task)

    def add(self, live: TaskRun) -> None:
        self._by_task[live.task_id] = live

    def remove(self, live: TaskRun) -> None:
        if self._by_task.get(live.task_id) is live:
            del self._by_task[live.task_id]

    def find(self, task_id: TaskId) -> TaskRun | None:
        return self._by_task.get(task_id)

    def find_by_trigger(self, name: str) -> TaskRun | None:
        """By the message that began a run; of resumes only the task's id tells them apart, so the name holds it."""
        return next((live for live in self._by_task.values() if live.trigger_name == name), None)

    def note_cancelled(self, task_id: TaskId) -> None:
        """Remember that this replica has heard of a cancel: if its request comes now, the rows are asked first."""
        self._cancelled[task_id] = None
        if len(self._cancelled) > MOST_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    def was_cancelled(self, task_id: TaskId) -> bool:
        return task_id in self._cancelled

    def find_by_correlation(self, correlation_id: str) -> TaskRun | None:
        return next((live for live in self._by_task.values() if live.correlation_id == correlation_id), None)


class Slots:
    """How many handlers run at once. Resumes go before new requests; a suspect runs alone."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._taken = 0
        self._resumes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._requests: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting_resume_count(self) -> int:
        return len(self._resumes)

    async def acquire(self, *, is_resume: bool, is_alone: bool = False) -> int:
        """Wait for a place and take it; a suspect takes them all. Returns how many to give back."""
        size = self._capacity if is_alone else 1
        # A suspect waits among the resumes: behind a steady stream of them it would never see all places free.
        queue = self._resumes if is_resume or is_alone else self._requests
        if not self._resumes and not queue and self._taken + size <= self._capacity:
            self._taken += size
            return size
        place: tuple[int, asyncio.Future[None]] = (size, asyncio.get_running_loop().create_future())
        queue.append(place)
        try:
            await place[1]
        except asyncio.CancelledError:
            if place in queue:
                queue.remove(place)
            elif not place[1].cancelled():
                self.release(size)
            raise
        return size

    def release(self, size: int) -> None:
        self._taken -= size
        for queue in (self._resumes, self._requests):
            while queue and self._taken + queue[0][0] <= self._capacity:
                taken, future = queue.popleft()
                if not future.done():
                    self._taken += taken
                    future.set_result(None)
            if queue:
                return  # the first in line has waited longest, and is not overtaken


@dataclass(frozen=True, slots=True)
class Runtime:
    app: App
    settings: Settings
    limits: Limits
    metrics: Metrics
    events: Events
    outbox: Outbox
    lives: LiveRuns
    slots: Slots
    hints: Hints
    store: Store
    gate: StoreGate
    marks: Marks
    ram_calls: RamCalls
    private_queue: str | None = None
    """Where replies to in-RAM waits arrive; None when every wait is a row."""

    def history_level(self, handler: Handler | None) -> HistoryLevel:
        """How much is kept of what happens to a new task of this handler."""
        return self.settings.history.level if handler is None or handler.history is None else handler.history

    @property
    def uses_store(self) -> bool:
        return self.settings.checkpointing is not Checkpointing.OFF

    @property
    def may_use_ram(self) -> bool:
        return self.settings.checkpointing is not Checkpointing.REQUIRED
