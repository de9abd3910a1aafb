"""The values that travel between a run and the rows: what was recorded, what is open, what a run wants to write.

They are msgspec structs, made in a fifth of the time of a frozen dataclass; there are dozens in a lifecycle. What they
carry for users (requests, results, failures) is left out of their `repr`, so that it reaches no log.

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
    any unfinished ── pause  ──► paused ── resume (by order) ──► running, its lease over
    any unfinished, failed ── rewind, retry (by order) ──► running, its lease over
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, NewType
from uuid import UUID

import msgspec

from coatcheck.store.kinds import Kind

ALONE = 1_000_000
"""Added to the pick-ups of a task that runs with nobody beside it: if the process ends now, it was this one."""

MAX_HISTORY = 64 << 20
MOST_ADDRESSES = 100
"""How many requesters wait for one task: each is sent the whole answer when it ends."""

TaskId = NewType("TaskId", UUID)
CallId = NewType("CallId", UUID)


class TaskState(StrEnum):
    RUNNING = "running"
    PARKED = "parked"
    RETRYING = "retrying"
    HELD = "held"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED})


class HistoryLevel(IntEnum):
    """How much of what happens to a task is kept as its history."""

    OFF = 0
    OUTCOME = 1
    FULL = 2


class CallState(StrEnum):
    OPEN = "open"
    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CLOSED = "closed"  # given up: by the handler, or because its task ended


_PAYLOADS = frozenset({"body", "claims", "data", "failure", "input", "request", "sets", "traceback", "value"})


class Value(msgspec.Struct, frozen=True, gc=False):
    """A value that is never changed, and so never part of a circle that only the garbage collector would find."""

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in _PAYLOADS)
        return f"{type(self).__name__}({', '.join(shown)})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What a traceback drawn by rich shows: no more than any other."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in _PAYLOADS]


class Recorded(Value, frozen=True):
    """An ended piece of work: a step, a note, or a call that was closed. `seq` orders all of a task's."""

    key: str
    kind: Kind
    name: str
    digest: bytes
    seq: int
    state: CallState
    value: bytes  # a blob: the result, or a problem document unless `state` is OK
    call_id: CallId | None = None


class OpenCall(Value, frozen=True):
    """A call that a row knows and nobody has answered yet."""

    call_id: CallId
    key: str
    kind: Kind
    name: str
    digest: bytes
    due_at: datetime | None


class NewEntry(Value, frozen=True):
    """A step or note that just ended, to be recorded."""

    key: str
    kind: Kind
    name: str
    digest: bytes
    is_ok: bool
    value: bytes
    took: timedelta | None = None
    """How long a step took, all its tries together. A note takes no time."""


class NewCall(Value, frozen=True):
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
    body: bytes = b""  # a blob
    headers: Mapping[str, str] = {}
    handler: str | None = None
    idle: timedelta | None = None
    hard: timedelta | None = None


class Group(Value, frozen=True):
    """A wait: met at `need` successes, or when that many are out of reach; `need=None`: when all have ended."""

    calls: tuple[CallId, ...]
    need: int | None

    def is_met(self, states: Mapping[CallId, CallState]) -> bool:
        """Tell whether the wait is over, given the state of each of its calls (missing means open)."""
        ok, still_open = self._count(states) if states else (0, len(self.calls))
        if self.need is None:
            return still_open == 0
        return ok >= self.need or ok + still_open < self.need

    def _count(self, states: Mapping[CallId, CallState]) -> tuple[int, int]:
        found = [states.get(call, CallState.OPEN) for call in self.calls]
        return found.count(CallState.OK), found.count(CallState.OPEN)


class Changes(Value, frozen=True):
    """What a run wants recorded in one commit. `waits` given: and then it wants to be put down."""

    entries: tuple[NewEntry, ...] = ()
    opens: tuple[NewCall, ...] = ()
    closes: tuple[CallId, ...] = ()
    waits: tuple[Group, ...] | None = None


class Committed(Value, frozen=True):
    """The answer to `Changes`: is the task parked now, or are there news to go on with under the same epoch.

    `news` holds, in order of `seq`, everything that ended since the run last looked, its own entries included.
    """

    is_parked: bool
    news: tuple[Recorded, ...] = ()


class Known(Value, frozen=True):
    """What the rows of a task know when a run begins. Empty for a task that has no row."""

    recorded: tuple[Recorded, ...] = ()
    open_calls: tuple[OpenCall, ...] = ()
    is_withheld: bool = False
    """Its values are more bytes than a run may be given, and were left where they are."""


class Address(Value, frozen=True):
    """Where an answer goes: the requester's queue and the correlation id it knows the request by."""

    reply_to: str
    correlation_id: str | None


class Answered(NamedTuple):
    """Which end of a task was sent, and where: one that is taken back by order comes to another end."""

    addresses: Sequence[Address]
    revision: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked for a task: what the app made of a token, and never the token itself.

    `claims` are whatever the app wants to know of the caller later, fit for JSON.
    """

    subject: str
    claims: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Birth(Value, frozen=True):
    """A task's row as it is first written, by whoever writes it first."""

    task_id: TaskId
    service: str
    handler: str | None
    version: str
    request: bytes  # a blob
    digest: bytes
    identity: str | None = None
    address: Address | None = None
    correlation_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    caller: Caller | None = None
    deadline_at: datetime | None = None
    history: HistoryLevel = HistoryLevel.OFF


class Chain(Value, frozen=True):
    """Where a task's history stands: its level, how many entries it has, and the hash of the last one."""

    level: HistoryLevel = HistoryLevel.OFF
    count: int = 0
    head: bytes | None = None


class NewHistory(Value, frozen=True):
    """An entry of a task's history that a decision made. `chain.append` gives it its number and its hash."""

    kind: str
    actor: str | None = None
    key: str | None = None
    data: bytes | None = None  # a blob


class Task(Value, frozen=True):
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
    request: bytes
    addresses: tuple[Address, ...]
    traceparent: str | None
    tracestate: str | None
    value: bytes | None
    traceback: str | None
    is_final_sent: bool
    progress: Mapping[str, Any] | None
    due_at: datetime | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    caller: Caller | None = None
    deadline_at: datetime | None = None
    """Until when its requester waits, as its request said."""
    history: HistoryLevel = HistoryLevel.OFF
    entry_count: int = 0
    head: bytes | None = None
    """The hash of the last of its `entry_count` history entries."""
    revision: int = 0
    """How often it was taken back by order; peers are to see work that is done anew as new work."""
    is_pausing: bool = False
    """Its live run is to be put down at its next write."""
    forked_from: UUID | None = None
    forked_at: int | None = None
    """The checkpoint of `forked_from` that it began with."""

    @property
    def chain(self) -> Chain:
        """Where its history stands."""
        return Chain(self.history, self.entry_count, self.head)

    @property
    def answered(self) -> Answered:
        """What is answered once its end was sent to all its addresses."""
        return Answered(self.addresses, self.revision)

    def wants(self, birth: Birth) -> bool:
        """Tell whether the same request came with one more address to answer, while the task is unfinished."""
        is_same = self.digest == birth.digest and not self.state.is_final
        return is_same and birth.address is not None and birth.address not in self.addresses


class Peer(Value, frozen=True):
    """A call as the wire needs it: to send it (again), or to tell its peer that nobody waits any more."""

    call_id: CallId
    task_id: TaskId
    service: str
    kind: Kind
    key: str
    peer: str
    handler: str | None
    body: bytes
    headers: Mapping[str, str]
    hard_due_at: datetime | None
    traceparent: str | None


# --- what a run writes, and how it ends -------------------------------------------------------------------------


class Going(Value, frozen=True):
    """Record and go on under a lease. `is_detached`: the trigger is acked, only the lease looks after the run now."""

    lease: timedelta
    is_detached: bool = False


class Park(Value, frozen=True):
    """Put the task down until a group is met. The lease is for going on when one already is."""

    groups: tuple[Group, ...]
    lease: timedelta


class Finish(Value, frozen=True):
    """The final state. `is_detached`: no unacked trigger would bring a lost final reply back, so the sweeper will."""

    state: TaskState
    value: bytes
    keep: timedelta
    traceback: str | None = None
    is_detached: bool = False


class Again(Value, frozen=True):
    """The attempt failed; forget the failures it stumbled over and run again after a delay."""

    delay: timedelta
    failure: bytes
    traceback: str | None
    forget: tuple[str, ...] = ()
    attempt: int = 1
    """Which attempt failed."""


class Hold(Value, frozen=True):
    """This code cannot run the task; keep it, say why, try again later."""

    delay: timedelta
    failure: bytes


class Put(Value, frozen=True):
    """One write of a run, fenced by `epoch` and by the checkpoint it follows. `birth` given: there is no row yet."""

    task_id: TaskId
    epoch: int
    follows: int
    seen: int
    changes: Changes
    end: Going | Park | Finish | Again | Hold
    birth: Birth | None = None
    progress: Mapping[str, Any] | None = None
    chain: Chain = Chain()
    """Where its task's history stood when the run last looked."""


class PutDone(Value, frozen=True):
    """The write is in. `cancels` are the calls it closed whose peers should hear of it."""

    epoch: int
    checkpoint: int
    seq: int  # the last place in the order that is taken now; the run has heard of all up to it
    is_parked: bool
    news: tuple[Recorded, ...] = ()
    cancels: tuple[Peer, ...] = ()
    addresses: tuple[Address, ...] = ()  # whom the row knows to want the answer; none for a birth
    chain: Chain = Chain()


class PutRefused(Value, frozen=True):
    """Another replica owns the task, or it has ended: nothing was written. `task` is what is there, None: no row."""

    task: Task | None


# --- what arrives ---------------------------------------------------------------------------------------------


class Arrival(Value, frozen=True):
    """A reply to one call. `state` None is a progress, which closes nothing; TIMED_OUT needs a call that is due.

    `service` is whose queue it came on: another service's call is unknown there. Empty: any.
    """

    call_id: CallId
    state: CallState | None
    value: bytes
    is_redelivered: bool = False
    progress: Mapping[str, Any] | None = None
    service: str = ""


class Wake(Value, frozen=True):
    """A `resume` message: pick the task up if it still stands at this epoch and its time is over.

    `service` is whose queue it came on: another service's task is unknown there. Empty: any.
    """

    task_id: TaskId
    epoch: int
    is_redelivered: bool = False
    service: str = ""


class Request(Value, frozen=True):
    """A request whose task may have a row already; one is made if not, and granted."""

    birth: Birth
    is_redelivered: bool = False


class CancelAsk(Value, frozen=True):
    """Cancel a task of this service by its id, or by the correlation id its requester used. `task_id` names the
    tombstone too. `failure` makes the answer of the task that is found.
    """

    service: str
    task_id: TaskId
    failure: Callable[[TaskId], bytes]
    keep: timedelta
    correlation_id: str | None = None
    reason: str | None = None


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
    CROWDED = "crowded"  # one more address for an unfinished task that has as many as it may have


class Unsent(Value, frozen=True):
    """What a task's rows say was perhaps never sent."""

    calls: tuple[Peer, ...] = ()
    is_final_unsent: bool = False


class Ruling(Value, frozen=True):
    """The store's answer to one arrival.

    `task` is there for whoever runs the task or answers for it; a claim names all other tasks by id and state alone,
    as they stood before it.
    """

    verdict: Verdict
    task: Task | None = None
    known: Known = Known()
    unsent: Unsent = Unsent()
    name: str = ""  # the call's peer, for logs
    cancels: tuple[Peer, ...] = ()
    task_id: TaskId | None = None
    state: TaskState | None = None
