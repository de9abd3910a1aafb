"""What the sweeper, `doctor` and people are told of the rows, as values. Every store gives the same."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, CallState, Peer, Task, TaskId, TaskState

# --- for the sweeper and for leases ---


class Renewed(NamedTuple):
    """Whose lease was moved on, and whose row was held by somebody else. The rest is not ours any more."""

    mine: set[TaskId]
    busy: set[TaskId]


@dataclass(frozen=True, slots=True)
class Renewal:
    task_id: TaskId
    epoch: int


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a finished task is kept, counted from its end: what failed, and the rest."""

    results: timedelta
    failures: timedelta

    def of(self, state: TaskState) -> timedelta:
        return self.failures if state is TaskState.FAILED else self.results


@dataclass(frozen=True, slots=True)
class LookedAt:
    """One round of the sweeper: what is due, what was perhaps never sent, what waits for a waker that is over.

    A call that never left as its body is damaged is unsent, and not due: its handler would take a timeout for the
    peer's silence. It leaves once the row is restored, or times out then, if its time is over.
    """

    due: tuple[Peer, ...] = ()
    unsent: tuple[Peer, ...] = ()
    overdue: tuple[Task, ...] = ()
    unsent_finals: tuple[Task, ...] = ()
    oldest: timedelta = timedelta()
    unreadable: tuple[UUID, ...] = ()
    """Rows that this code cannot read, such as those of a newer release; the others are looked at all the same."""

    def __bool__(self) -> bool:
        return bool(self.due or self.unsent or self.overdue or self.unsent_finals)


# --- for people ---


@dataclass(frozen=True, slots=True)
class Summary:
    """A task in one line: where it stands, what it waits for. Times are Postgres's; `seen_at` is when it was read."""

    task_id: TaskId
    service: str
    handler: str | None
    version: str
    state: TaskState
    attempt: int
    open_count: int
    peers: tuple[str, ...]
    """Whom its open calls went to; `(timer)` for a sleep."""
    next_due_at: datetime | None
    """When its lease, retry time or earliest open call is over; None for a finished task."""
    progress: dict[str, Any] | None
    failure: bytes | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class ServiceCount:
    """How many tasks the table holds for one service. `nameless_count`: came without an identity; a
    cancel that met no task left a row, too, but never came as a request.
    """

    service: str
    unfinished_count: int
    nameless_count: int


@dataclass(frozen=True, slots=True)
class Late:
    """Tasks of one service whose time is over. `unlooked_count`: no sweeper has looked at them since."""

    service: str
    overdue_count: int
    unlooked_count: int
    oldest: timedelta


@dataclass(frozen=True, slots=True)
class Backlog:
    """Messages that wait in their rows to be sent: calls to one peer, or with peer None final replies."""

    peer: str | None
    count: int
    oldest: timedelta


@dataclass(frozen=True, slots=True)
class HistoryLine:
    """One entry of a task's history, its data decoded. `data` is None if there is none, or it was erased."""

    number: int
    kind: str
    at: datetime
    replica: str
    epoch: int
    actor: str | None
    key: str | None
    data: dict[str, Any] | None
    digest: str
    """SHA-256 of the data as it is stored, in hex."""
    hash: str


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a task's story: a step, or a call open or ended."""

    key: str
    kind: Kind
    name: str
    state: CallState
    seq: int | None
    value: bytes | None
    call_id: CallId | None
    peer: str
    due_at: datetime | None
    opened_at: datetime
    closed_at: datetime | None
    progress: dict[str, Any] | None
    is_sent: bool
    is_forgotten: bool
    checkpoint: int
    epoch: int | None = None
    """The epoch and the replica that recorded or opened it; None in rows of older releases."""
    replica: str | None = None
