"""The runs alive in this process: what each hangs on, and who may run next."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import msgspec

from coatcheck.broker.bodies import Body
from coatcheck.broker.port import Delivery, Outgoing
from coatcheck.points import reach
from coatcheck.store.blobs import unpacked_size
from coatcheck.store.decide import REQUEST_TRIGGER
from coatcheck.store.rows import Address, Birth, Caller, CallId, History, Task, TaskId
from coatcheck.worker.app import Handler
from coatcheck.worker.engine.run import Run

NOTHING_RECORDED = History()
MOST_CANCELLED = 10_000
"""How many of the tasks that were cancelled last a replica knows without asking the rows."""


class Live(msgspec.Struct, eq=False):
    """One run, from the message that triggered it to its last write."""

    task_id: TaskId
    handler: Handler | None
    handler_name: str | None
    request: Body | bytes
    """The body as it came, or the blob that the row keeps of it."""
    identity: str | None
    correlation_id: str | None
    traceparent: str | None
    addresses: tuple[Address, ...]
    trigger: Delivery | None
    """The unacked message that brought the run here; None once it is acked, and only the lease looks after the run."""
    trigger_name: str
    begun_s: float
    renewed_s: float
    """When its lease began to count, if it has one."""
    make_birth: Callable[[], Birth] | None = None
    """Makes what the row would be, while there is none: most tasks that never wait need none at all."""
    row_digest: bytes = b""
    """Of the request, as the row has it, once there is one."""
    caller: Caller | None = None
    deadline_at: datetime | None = None
    keeps_result: bool = False
    epoch: int = 0
    checkpoint: int = 0
    seen: int = 0
    attempt: int = 1
    pickups: int = 0
    version: str = ""
    age_s: float = 0.0
    history: History = NOTHING_RECORDED
    gathered: int = 0
    """Bytes of the values that the run was given, unpacked."""
    is_detached: bool = False
    is_put_down: bool = False
    """Its last write is in: the row is parked or ended, so there is no lease left to renew."""
    is_in_doubt: bool = False
    """A write may have been committed without our knowing: the rows are asked as if the trigger had come back."""
    is_in_ram: bool = False
    is_let_go: bool = False
    """The process is going down and the run was cut short: its trigger goes back as it is."""
    is_settled: bool = False
    """How it ends is decided: a duplicate that comes now is too late to join, and must look for itself."""
    is_fenced: bool = False
    """Another replica has the task, under an epoch and a lease of its own."""
    is_reattached: bool = False
    """Its trigger was away and came back: whoever had it meanwhile may have had the task too, and be dead."""
    is_unsent: bool = False
    """Something committed could not be handed to the broker: the trigger must come back to send it."""
    unanswered: list[Outgoing] = []
    """Final replies that a queue refused, of a task that no row remembers: to be sent before the trigger is acked."""
    progress: dict[str, Any] | None = None
    copies: list[Delivery] = []
    """The same message once more, from before it came back; settled with the trigger."""
    followers: list[Delivery] = []
    """Duplicates of the request, perhaps from others, that arrived while there was no row to tell them apart."""
    open_calls: set[CallId] = set()
    """Its calls and timers that are open, as far as this run was told."""
    run: Run | None = None
    lock: asyncio.Lock | None = None

    def __repr__(self) -> str:
        return f"Live({self.task_id}, epoch={self.epoch})"  # its request is the users'

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("task_id", self.task_id), ("epoch", self.epoch)]

    @property
    def writing(self) -> asyncio.Lock:
        """Held by whoever writes for the run; made for the first who does."""
        if self.lock is None:
            self.lock = asyncio.Lock()
        return self.lock

    @property
    def has_row(self) -> bool:
        return self.make_birth is None

    @property
    def digest(self) -> bytes:
        """Of the request. Hardly anybody asks while there is no row to know it."""
        return self.row_digest if self.make_birth is None else self.make_birth().digest

    def attach(self, delivery: Delivery) -> None:
        """The trigger has come back while its run lives here: this is the delivery to settle with the run."""
        if self.trigger is not None and not self.trigger.is_lost:
            self.copies.append(self.trigger)
        self.trigger = delivery
        self.is_reattached = True

    def ack(self, *, is_answered: bool = False) -> None:
        """Take the trigger off its queue: the rows say all there is to know.

        Its duplicates are acked with it only if they were answered too. Else whoever began the run sees them through:
        the row does not know yet whom else to answer.
        """
        self.is_settled = True
        reach("before_ack")
        for delivery in self.deliveries():
            delivery.ack()
        for delivery in self.followers if is_answered else ():
            delivery.ack()
        reach("after_ack")

    def requeue(self, *, all_but: Delivery | None = None) -> None:
        """Let the trigger come back, here or elsewhere; what it finds in the rows decides what is left to do."""
        self.is_settled = True
        for delivery in [*self.deliveries(), *self.followers]:
            if delivery is not all_but:
                delivery.requeue()

    def deliveries(self) -> list[Delivery]:
        """The trigger and whatever came back of it, all to be settled alike."""
        return [self.trigger, *self.copies] if self.trigger is not None else self.copies


def live_from_task(
    task: Task,
    history: History,
    *,
    handler: Handler | None,
    trigger: Delivery,
    asked_s: float,
    trigger_name: str | None = None,
) -> Live:
    """A run of a task that has a row and was granted to us. Its lease counts from when it was asked for."""
    return Live(
        task_id=task.task_id,
        handler=handler,
        handler_name=task.handler,
        request=task.request,
        identity=task.identity,
        correlation_id=task.correlation_id,
        traceparent=task.traceparent,
        addresses=task.addresses,
        trigger=trigger,
        trigger_name=trigger_name or task.trigger or REQUEST_TRIGGER,
        begun_s=time.monotonic(),
        renewed_s=asked_s,
        row_digest=task.digest,
        caller=task.caller,
        deadline_at=task.deadline_at,
        epoch=task.epoch,
        checkpoint=task.checkpoint,
        seen=task.seq,
        attempt=task.attempt,
        pickups=task.pickups,
        version=task.version,
        age_s=(task.updated_at - task.created_at).total_seconds(),
        history=history,
        gathered=sum([unpacked_size(one.value) for one in history.recorded]),
        open_calls={call.call_id for call in history.open_calls},
    )


class LiveRuns:
    """Finds a live run by its task, by the message that triggered it, or by its requester's correlation id."""

    def __init__(self) -> None:
        self._by_task: dict[TaskId, Live] = {}
        self.is_closed = False
        """The grace time is over: whoever still waits for a slot must not begin."""
        self._cancelled: dict[TaskId, None] = {}

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._by_task.values()))

    def __len__(self) -> int:
        return len(self._by_task)

    def add(self, live: Live) -> None:
        self._by_task[live.task_id] = live

    def remove(self, live: Live) -> None:
        if self._by_task.get(live.task_id) is live:
            del self._by_task[live.task_id]

    def find(self, task_id: TaskId) -> Live | None:
        return self._by_task.get(task_id)

    def find_by_trigger(self, name: str) -> Live | None:
        """By the message that began a run; of resumes only the task's id tells them apart, so the name holds it."""
        return next((live for live in self._by_task.values() if live.trigger_name == name), None)

    def note_cancelled(self, task_id: TaskId) -> None:
        """Remember that this replica has heard of a cancel: if its request comes now, the rows are asked first."""
        self._cancelled[task_id] = None
        if len(self._cancelled) > MOST_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    def was_cancelled(self, task_id: TaskId) -> bool:
        return task_id in self._cancelled

    def find_by_correlation(self, correlation_id: str) -> Live | None:
        return next((live for live in self._by_task.values() if live.correlation_id == correlation_id), None)


class Slots:
    """How many handlers run at once. Resumes go before new requests; a suspect runs with nobody beside it."""

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
                return  # whoever is first in line has waited longest: nobody overtakes it
