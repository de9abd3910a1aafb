"""What a task's history tells: the kinds of entries, from which level on each is kept, and what each one says.

| kind         | says that                                                        | level   |
|--------------|------------------------------------------------------------------|---------|
| `accepted`   | a request became a row                                           | outcome |
| `recorded`   | the result of a step, or a note, was recorded                    | full    |
| `opened`     | a call, timer or send was opened                                 | full    |
| `claimed`    | a reply was taken, or a timer rang                               | full    |
| `timed_out`  | a call was not answered in time                                  | full    |
| `parked`     | the task was put down to wait                                    | full    |
| `resumed`    | it was picked up again                                           | full    |
| `taken_over` | a run was picked up whose replica died, was cut off or gave it up | outcome |
| `retried`    | an attempt failed, and another one follows                       | outcome |
| `held`       | this code cannot run it                                          | outcome |
| `finished`   | it ended                                                         | outcome |
| `cancelled`  | it was ended by an order                                         | outcome |
| `pruned`     | retention removed its rows                                       | outcome |
| `user:NAME`  | what `ctx.record(NAME)` says                                     | outcome |

Orders (`rewound`, `forked`, `paused`, `unpaused`), `damaged` and `erased` are kept from `outcome` on, too. Values enter
by size and SHA-256 alone, unless they are asked for in full; what a user records is always in full. Nothing here does
I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, assert_never

import msgspec

from coatcheck.store import chain
from coatcheck.store.blobs import Codec, CorruptBlob, decode, decode_body, encode, unpack
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import (
    Again,
    Birth,
    CallState,
    CancelAsk,
    Chain,
    Finish,
    Going,
    HistoryLevel,
    Hold,
    NewCall,
    NewEntry,
    NewHistory,
    Park,
    Put,
    Task,
    TaskId,
    TaskState,
)

ACCEPTED = "accepted"
RECORDED = "recorded"
OPENED = "opened"
CLAIMED = "claimed"
TIMED_OUT = "timed_out"
PARKED = "parked"
RESUMED = "resumed"
TAKEN_OVER = "taken_over"
RETRIED = "retried"
HELD = "held"
FINISHED = "finished"
CANCELLED = "cancelled"
PRUNED = "pruned"
USER = "user:"
"""What the kinds of a user's own entries begin with; and the names of the notes that carry them."""

IN_FULL_ONLY = frozenset({RECORDED, OPENED, CLAIMED, TIMED_OUT, PARKED, RESUMED})


def is_kept(kind: str, level: HistoryLevel) -> bool:
    """Tell whether a task of this level keeps entries of this kind."""
    return level is HistoryLevel.FULL or (level is HistoryLevel.OUTCOME and kind not in IN_FULL_ONLY)


# --- who writes ---


class Author(NamedTuple):
    """Who appends: the replica and its clock. `has_values`: values are told in full."""

    clock: Callable[[], datetime]
    replica: str = ""
    has_values: bool = False

    def tell(
        self, task_id: TaskId, drafts: Sequence[NewHistory], *, at: Chain, epoch: int
    ) -> tuple[list[HistoryEntry], Chain]:
        """The drafts as entries that follow where the chain stands, and where it stands after them."""
        if not drafts:
            return [], at
        entries, head = chain.append(
            task_id, drafts, number=at.count, head=at.head, at=self.clock(), replica=self.replica, epoch=epoch
        )
        return entries, Chain(at.level, at.count + len(entries), head)


# --- what each one says ---


def of_birth(birth: Birth, *, has_values: bool = False) -> list[NewHistory]:
    """A request became a row."""
    if birth.history is HistoryLevel.OFF:
        return []
    about = {"service": birth.service, "handler": birth.handler, "version": birth.version}
    data = encode(about | _summary(birth.request, has_values=has_values))
    return [NewHistory(ACCEPTED, None if birth.caller is None else birth.caller.subject, None, data)]


def of_put(
    put: Put, level: HistoryLevel, *, opens: Sequence[NewCall], is_parked: bool, has_values: bool = False
) -> list[NewHistory]:
    """What a run writes: its birth, what it recorded and opened, and how it goes on or ends."""
    if level is HistoryLevel.OFF:
        return []
    drafts = [] if put.birth is None else of_birth(put.birth, has_values=has_values)
    for entry in put.changes.entries:
        if entry.kind is Kind.NOTE and entry.name.startswith(USER):
            drafts.append(NewHistory(entry.name, None, entry.key, entry.value))
        elif level is HistoryLevel.FULL:
            drafts.append(_of_entry(entry, has_values=has_values))
    if level is HistoryLevel.FULL:
        drafts += [_of_call(call, has_values=has_values) for call in opens]
    end = _of_end(put.end, is_parked=is_parked, has_values=has_values)
    if end is not None and is_kept(end.kind, level):
        drafts.append(end)
    return drafts


def of_claim(state: CallState, value: bytes, *, peer: str, key: str, has_values: bool = False) -> NewHistory:
    """A reply was taken, a timer rang, or a call was not answered in time."""
    kind = TIMED_OUT if state is CallState.TIMED_OUT else CLAIMED
    data = encode({"state": state} | _summary(value, has_values=has_values))
    return NewHistory(kind, peer or None, key, data)


def of_grant(level: HistoryLevel, *, trigger: str, was: TaskState, key: str | None = None) -> NewHistory | None:
    """A task was picked up. One that was running is taken from the replica that had it."""
    kind = TAKEN_OVER if was is TaskState.RUNNING else RESUMED
    return NewHistory(kind, None, key, encode({"trigger": trigger})) if is_kept(kind, level) else None


def of_cancel(task: Task, ask: CancelAsk) -> list[NewHistory]:
    """A task was ended by an order."""
    if task.history is HistoryLevel.OFF:
        return []
    return [NewHistory(CANCELLED, None, None, encode({"state": TaskState.CANCELLED, "reason": ask.reason}))]


def of_pruning(level: HistoryLevel, state: str) -> list[NewHistory]:
    """Retention removes a task's rows, and leaves its history."""
    return [] if level is HistoryLevel.OFF else [NewHistory(PRUNED, None, None, encode({"state": state}))]


def _of_entry(entry: NewEntry, *, has_values: bool) -> NewHistory:
    state = CallState.OK if entry.is_ok else CallState.FAILED
    about = {"kind": entry.kind, "name": entry.name, "state": state}
    return NewHistory(RECORDED, None, entry.key, encode(about | _summary(entry.value, has_values=has_values)))


def _of_call(call: NewCall, *, has_values: bool) -> NewHistory:
    about: dict[str, Any] = {"kind": call.kind, "name": call.name}
    if call.kind.is_published:
        about |= {"peer": call.peer, "call": call.call_id} | _summary(call.body, has_values=has_values)
    due = min((time for time in (call.idle, call.hard) if time is not None), default=None)
    if due is not None:
        about["due_s"] = due.total_seconds()
    return NewHistory(OPENED, None, call.key, encode(about))


def _of_end(end: Going | Park | Finish | Again | Hold, *, is_parked: bool, has_values: bool) -> NewHistory | None:
    match end:
        case Park(groups):
            waits = encode({"waits_for": sum(len(group.calls) for group in groups)})
            return NewHistory(PARKED, None, None, waits) if is_parked else None
        case Going():
            return None
        case Finish(state, value):
            about = {"state": state} | ({} if state is TaskState.DONE else _problem(value))
            kind = CANCELLED if state is TaskState.CANCELLED else FINISHED
            return NewHistory(kind, None, None, encode(about | _summary(value, has_values=has_values)))
        case Again(delay, failure, attempt=attempt):
            about = {"attempt": attempt, "delay_s": delay.total_seconds()} | _problem(failure)
            return NewHistory(RETRIED, None, None, encode(about))
        case Hold(_, failure):
            return NewHistory(HELD, None, None, encode(_problem(failure)))
        case _:
            assert_never(end)


def _problem(failure: bytes) -> dict[str, Any]:
    """The code of a problem document; its texts are the users'."""
    try:
        document = decode(failure)
    except (CorruptBlob, msgspec.MsgspecError):
        return {}
    return {"code": document.get("code")} if isinstance(document, dict) else {}


def _summary(blob: bytes, *, has_values: bool) -> dict[str, Any]:
    """What is told of a value: the size and the digest of its body, whether or not the row keeps it compressed."""
    if not blob:
        return {}
    try:
        codec, body = unpack(blob)
    except CorruptBlob:
        codec, body = Codec.BYTES, blob
    told: dict[str, Any] = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return told | {"value": _value(codec, body)} if has_values else told


def _value(codec: Codec, body: bytes) -> Any:
    """The value as JSON can hold it."""
    try:
        return msgspec.to_builtins(decode_body(codec, body), str_keys=True)
    except (CorruptBlob, msgspec.MsgspecError, UnicodeDecodeError, EOFError, TypeError):
        return None
