"""The values that travel between a run and the rows: what was recorded, what is open, what a run wants to write.

What they carry for users (requests, results, failures) is left out of their `repr`, so that it reaches no log.

States of a task, and who moves it::

                 put (park)                    claim (group met)
    (no row) ───────────────► parked ─────────────────────────────► running
        │ accept / put                ◄───────────────────────────────┘ │ put (park)
        └───────► running                                               │
                     ├── put (finish) ──► done | failed                 │
                     ├── put (retry)  ──► retrying ── resume ──► running
                     ├── put (hold)   ──► held ────── resume ──► running
                     └── lease over   ──► running, epoch + 1 (resume, or the redelivered trigger)
    any unfinished ── cancel ──► cancelled
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NewType
from uuid import UUID

ALONE = 1_000_000
"""Added to the pick-ups of a task that runs with nobody beside it: if the process ends now, it was this one."""

TaskId = NewType("TaskId", UUID)
CallId = NewType("CallId", UUID)


class TaskState(StrEnum):
    RUNNING = "running"
    PARKED = "parked"
    RETRYING = "retrying"
    HELD = "held"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED})


class Kind(StrEnum):
    """What a journal key stands for. All but STEP and NOTE live as rows of the call table."""

    STEP = "step"
    NOTE = "note"  # a value the run made up and must see again (now, random)
    CALL = "call"
    TIMER = "timer"
    SEND = "send"


class CallState(StrEnum):
    OPEN = "open"
    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CLOSED = "closed"  # given up: by the handler, or because its task ended


@dataclass(frozen=True, slots=True)
class Recorded:
    """An ended piece of work: a step, a note, or a call that was closed. `seq` orders all of a task's."""

    key: str
    kind: Kind
    name: str
    digest: bytes
    seq: int
    state: CallState
    value: bytes = field(repr=False)  # a blob: the result, or a problem document unless `state` is OK
    call_id: CallId | None = None


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that a row knows and nobody has answered yet."""

    call_id: CallId
    key: str
    kind: Kind
    name: str
    digest: bytes
    due_at: datetime | None


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A step or note that just ended, to be recorded."""

    key: str
    kind: Kind
    name: str
    digest: bytes
    is_ok: bool
    value: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NewCall:
    """A call to be opened. `body` is the message to send, kept so that anyone can send it again.

    `idle` and `hard` count from the commit that opens the call, by Postgres's clock. A timer has only `hard`; a
    timer with an absolute `due_at` (of `asyncio.timeout`) keeps it. A send has neither.
    """

    call_id: CallId
    key: str
    kind: Kind
    name: str
    digest: bytes
    peer: str = ""
    body: bytes = field(default=b"", repr=False)  # a blob
    headers: Mapping[str, str] = field(default_factory=dict)
    handler: str | None = None
    idle: timedelta | None = None
    hard: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A wait: met at `need` successes, or when that many are out of reach; `need=None`: when all have ended."""

    calls: tuple[CallId, ...]
    need: int | None

    def is_met(self, states: Mapping[CallId, CallState]) -> bool:
        """Tell whether the wait is over, given the state of each of its calls (missing means open)."""
        found = [states.get(call, CallState.OPEN) for call in self.calls]
        ok, still_open = found.count(CallState.OK), found.count(CallState.OPEN)
        if self.need is None:
            return still_open == 0
        return ok >= self.need or ok + still_open < self.need


@dataclass(frozen=True, slots=True)
class Changes:
    """What a run wants recorded in one commit. `waits` given: and then it wants to be put down."""

    entries: tuple[NewEntry, ...] = ()
    opens: tuple[NewCall, ...] = ()
    closes: tuple[CallId, ...] = ()
    waits: tuple[Group, ...] | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """The answer to `Changes`: is the task parked now, or are there news to go on with under the same epoch.

    `news` holds, in order of `seq`, everything that ended since the run last looked, its own entries included.
    """

    is_parked: bool
    news: tuple[Recorded, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """What the rows of a task know when a run begins. Empty for a task that has no row."""

    recorded: tuple[Recorded, ...] = ()
    open_calls: tuple[OpenCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Address:
    """Where an answer goes: the requester's queue and the correlation id it knows the request by."""

    reply_to: str
    correlation_id: str | None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked for a task: what the app made of a token, and never the token itself.

    `claims` are whatever the app wants to know of the caller later, fit for JSON.
    """

    subject: str
    claims: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Birth:
    """A task's row as it is first written, by whoever writes it first."""

    task_id: TaskId
    service: str
    handler: str | None
    version: str
    request: bytes = field(repr=False)  # a blob
    digest: bytes
    identity: str | None = None
    address: Address | None = None
    correlation_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    caller: Caller | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A task row: all that a replica needs to pick the task up, and all that `show` prints."""

    task_id: TaskId
    service: str
    handler: str | None
    version: str
    state: TaskState
    epoch: int
    checkpoint: int
    seq: int
    attempt: int
    pickups: int
    trigger: str | None
    identity: str | None
    digest: bytes
    correlation_id: str | None
    request: bytes = field(repr=False)
    addresses: tuple[Address, ...]
    traceparent: str | None
    tracestate: str | None
    value: bytes | None = field(repr=False)
    traceback: str | None = field(repr=False)
    is_final_sent: bool
    progress: Mapping[str, Any] | None
    due_at: datetime | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    caller: Caller | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """A call as the wire needs it: to send it (again), or to tell its peer that nobody waits any more."""

    call_id: CallId
    task_id: TaskId
    service: str
    kind: Kind
    key: str
    peer: str
    handler: str | None
    body: bytes = field(repr=False)
    headers: Mapping[str, str]
    hard_due_at: datetime | None
    traceparent: str | None


# --- what a run writes, and how it ends -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Going:
    """Record and go on under a lease. `is_detached`: the trigger is acked, only the lease looks after the run now."""

    lease: timedelta
    is_detached: bool = False


@dataclass(frozen=True, slots=True)
class Park:
    """Put the task down until a group is met. The lease is for going on when one already is."""

    groups: tuple[Group, ...]
    lease: timedelta


@dataclass(frozen=True, slots=True)
class Finish:
    """The final state. `is_detached`: no unacked trigger would bring a lost final reply back, so the sweeper will."""

    state: TaskState
    value: bytes = field(repr=False)
    keep: timedelta
    traceback: str | None = field(default=None, repr=False)
    is_detached: bool = False


@dataclass(frozen=True, slots=True)
class Again:
    """The attempt failed; forget the failures it stumbled over and run again after a delay."""

    delay: timedelta
    failure: bytes = field(repr=False)
    traceback: str | None = field(repr=False)
    forget: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hold:
    """This code cannot run the task; keep it, say why, try again later."""

    delay: timedelta
    failure: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Put:
    """One write of a run, fenced by `epoch` and by the checkpoint it follows. `birth` given: there is no row yet."""

    task_id: TaskId
    epoch: int
    follows: int
    seen: int
    changes: Changes
    end: Going | Park | Finish | Again | Hold
    birth: Birth | None = None
    progress: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PutDone:
    """The write is in. `cancels` are the calls it closed whose peers should hear of it."""

    epoch: int
    checkpoint: int
    is_parked: bool
    news: tuple[Recorded, ...] = ()
    cancels: tuple[Peer, ...] = ()
    task: Task | None = None  # as it was before the write; None for a birth


@dataclass(frozen=True, slots=True)
class PutRefused:
    """Another replica owns the task, or it has ended: nothing was written. `task` is what is there, None: no row."""

    task: Task | None


# --- what arrives ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """A reply to one call. `state` None is a progress, which closes nothing; TIMED_OUT needs a call that is due.

    `service` is whose queue it came on: another service's call is unknown there. Empty: any.
    """

    call_id: CallId
    state: CallState | None
    value: bytes = field(repr=False)
    is_redelivered: bool = False
    progress: Mapping[str, Any] | None = None
    service: str = ""


@dataclass(frozen=True, slots=True)
class Wake:
    """A `resume` message: pick the task up if it still stands at this epoch and its time is over.

    `service` is whose queue it came on: another service's task is unknown there. Empty: any.
    """

    task_id: TaskId
    epoch: int
    is_redelivered: bool = False
    service: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose task may have a row already; one is made if not, and granted."""

    birth: Birth
    is_redelivered: bool = False


@dataclass(frozen=True, slots=True)
class CancelAsk:
    """Cancel a task of this service by its id, or by the correlation id its requester used. `task_id` names the
    tombstone too.
    """

    service: str
    task_id: TaskId
    failure: bytes
    keep: timedelta
    correlation_id: str | None = None


class Verdict(StrEnum):
    """What became of something that arrived."""

    GRANTED = "granted"  # this replica runs the task now
    RECORDED = "recorded"  # stored; the task waits for more, or a live run will find it
    DUPLICATE = "duplicate"  # known already
    LATE = "late"  # its call was closed before: timed out, given up, or the task ended
    EARLY = "early"  # a timeout or resume whose time is not over
    UNKNOWN = "unknown"  # no such call or task
    FINISHED = "finished"  # the task has ended; its stored answer is in `task`
    CONFLICT = "conflict"  # the same identity with another body


@dataclass(frozen=True, slots=True)
class Unsent:
    """What a task's rows say was perhaps never sent."""

    calls: tuple[Peer, ...] = ()
    is_final_unsent: bool = False


@dataclass(frozen=True, slots=True)
class Ruling:
    """The store's answer to one arrival."""

    verdict: Verdict
    task: Task | None = None
    history: History = field(default_factory=History)
    unsent: Unsent = field(default_factory=Unsent)
    name: str = ""  # the call's peer, for logs
    cancels: tuple[Peer, ...] = ()
