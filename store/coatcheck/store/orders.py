"""What people order: rewind, fork, retry, pause, resume. The rules, each written once; nothing here does I/O.

    order ─► the store locks the task, then its calls, and reads them ─► decide ─► Deed ─► the store writes it

A task is taken back by marking rows as forgotten: they are kept, and no run is told of them. Checkpoint and sequence
never go back. A rewind is one more checkpoint in an epoch of its own, so a live run is fenced off, and the task is left
running with its lease over: the sweeper's next resume brings it to any replica, which replays what is left.

`targets.py` says which rows go.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from msgspec.structs import replace

from coatcheck.store.blobs import CorruptBlob, decode, encode
from coatcheck.store.decide import PAUSED_FOR, Found
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, CallState, HistoryLevel, NewHistory, Peer, Task, TaskId, TaskState, Value
from coatcheck.store.targets import MOST_NAMED, Cut, NotOrdered, Place, cut_after, cut_at, story_order, with_given_up

NOW = timedelta()
ORIGINS = "@fork"
"""The note by which a fork knows whose numbers it replays: a list of (task, last place in the order)."""
MOST_REDOS = 3
"""So often is one entry redone because it was damaged; then the task is held."""


class Order(Value, frozen=True, kw_only=True):
    """What a person wants done to a task. `by` and `reason` are recorded as they were said."""

    task_id: TaskId
    by: str | None = None
    reason: str | None = None
    is_dry_run: bool = False


class Rewind(Order, frozen=True, kw_only=True):
    """Discard what came after a point and go on from there.

    `to` is a checkpoint's number, `start`, `latest`, `before:NAME` or `before:last-failure`. With `sets` it goes to
    just after those entries, and they have these values (blobs) from then on. `input` is the new request, for `start`.
    `epoch` given: only if the task still stands at it.
    """

    to: int | str | None = None
    sets: Mapping[str, bytes] = {}
    input: bytes | None = None
    same_keys: bool = False
    epoch: int | None = None
    is_damage: bool = False
    """Made by `on_damage="redo"`: what stands at `to` cannot be read."""


class Fork(Order, frozen=True, kw_only=True):
    """Begin a new task with what another one had recorded up to a point; that one is left as it is."""

    at: int | str
    new_task_id: TaskId
    input: bytes | None = None


class Retry(Order, frozen=True, kw_only=True):
    """Let a failed task go on from its last checkpoint, its failures forgotten; one that waits for its retry, now."""


class Pause(Order, frozen=True, kw_only=True):
    """Let nothing of a task run until it is resumed. Replies are recorded meanwhile."""


class Resume(Order, frozen=True, kw_only=True):
    """Let a paused task go on."""


class OrderDone(Value, frozen=True):
    """What an order did, or with `is_dry_run` would do."""

    task_id: TaskId
    verb: str
    before: TaskState
    after: TaskState
    checkpoint: int
    """The one that was used."""
    discarded: tuple[str, ...] = ()
    """Keys, in the order they were recorded or opened."""
    set_keys: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    """Those of the discarded that were open."""
    replay_count: int = 0
    """How many recorded entries and answered calls the next run replays."""
    warnings: tuple[str, ...] = ()
    cancels: tuple[Peer, ...] = ()
    new_task_id: TaskId | None = None
    revision: int = 0
    is_dry_run: bool = False


class OrderRefused(Value, frozen=True):
    """Nothing was done. `detail` says why, and what would help."""

    task_id: TaskId
    code: str
    detail: str


class Forgotten(NamedTuple):
    """A call to be forgotten. `seq` given: it is open, and closed at this place of the order."""

    call_id: CallId
    seq: int | None


class Superseding(NamedTuple):
    """A row to be written like another one, with a value that a person gave it."""

    place: Place
    seq: int
    value: bytes
    call_id: CallId | None


@dataclass(frozen=True, slots=True)
class Deed:
    """What an order comes to. `task` is how the row stands after it, but for its times."""

    done: OrderDone
    task: Task
    due: timedelta | None = None
    """When it is due, from now. None: its lease, trigger and waits stay as they are."""
    entries: tuple[int, ...] = ()
    """The places of the journal's entries to be forgotten."""
    calls: tuple[Forgotten, ...] = ()
    superseding: tuple[Superseding, ...] = ()
    copies: tuple[tuple[Place, CallId | None], ...] = ()
    """What a fork begins with: rows of its origin, calls with their new ids."""
    origins: bytes | None = None
    drafts: tuple[NewHistory, ...] = ()


def decide(order: Order, found: Found | None, places: Iterable[Place]) -> Deed | OrderRefused:
    """Say what an order comes to, given the task's row and all that it has recorded and opened."""
    try:
        if found is None or found.task.epoch == 0:
            raise NotOrdered("no_such_task", f"no row knows task {order.task_id}; see `coatcheck ps --all`")
        live = sorted((one for one in places if not one.is_forgotten), key=story_order)
        match order:
            case Rewind():
                return _rewind(order, found.task, live, [one for one in places if one.is_forgotten])
            case Fork():
                return _fork(order, found.task, live)
            case Retry():
                return _retry(order, found.task, live)
            case Pause():
                return _pause(order, found)
            case Resume():
                return _resume(order, found.task)
            case _:
                raise AssertionError(f"no such order: {order!r}")
    except NotOrdered as refusal:
        code, detail = refusal.args
        return OrderRefused(order.task_id, code, detail)


# --- rewind and retry ---


def _rewind(order: Rewind, task: Task, live: Sequence[Place], forgotten: Sequence[Place]) -> Deed:
    _check_rewind(order, task)
    if order.is_damage:
        redone = sum(order.to == f"before:{one.key}" for one in forgotten)
        if redone >= MOST_REDOS:
            raise NotOrdered("damaged_again", f"what {order.to} names was redone {redone} times, and is damaged again")
    cut = cut_after(order.sets, live) if order.sets else cut_at(order.to, task, live)
    cut = with_given_up(cut, task, live)
    changed = [one for one in live if one.key in order.sets and one not in cut.gone]
    revision = task.revision + (not order.same_keys)
    taken = replace(
        _restarted(task),
        revision=revision,
        request=task.request if order.input is None else order.input,
        is_pausing=order.is_damage and task.is_pausing,  # nobody has taken the pause back
    )
    return _take_back(order, cut, live, changed=changed, taken=taken, before=task)


def _check_rewind(order: Rewind, task: Task) -> None:
    if task.state in (TaskState.DONE, TaskState.CANCELLED):
        at = "N" if order.to is None else order.to
        raise NotOrdered(
            "finished",
            f"task {task.task_id} is {task.state}, and a finished task is not rewound; "
            f"fork it: coatcheck fork {task.task_id} --at {at}",
        )
    if order.epoch is not None and order.epoch != task.epoch:
        raise NotOrdered("moved", f"task {task.task_id} has moved on since: it stands at epoch {task.epoch}")
    if order.same_keys and task.state is TaskState.FAILED:
        raise NotOrdered(
            "same_keys",
            f"task {task.task_id} has failed and said so: what it sends from now on has to be told from that. "
            "Leave --same-keys out",
        )
    if order.input is not None and order.to != "start":
        raise NotOrdered("input", "a new input needs a task that begins anew: --to start, or a fork at start")
    if order.sets and order.to is not None:
        raise NotOrdered("set_and_to", "--set goes to just after what it sets; give --to or --set, not both")
    if not order.sets and order.to is None:
        raise NotOrdered("no_target", "say where to: --to N, start, latest, before:NAME or before:last-failure")


def _retry(order: Retry, task: Task, live: Sequence[Place]) -> Deed:
    if task.state in (TaskState.HELD, TaskState.RETRYING):
        after = replace(task, seq=task.seq + 1, is_pausing=False)
        done = _done(order, task, after, checkpoint=task.checkpoint, live=live)
        return Deed(done, after, NOW, drafts=_drafts(order, task, after, done))
    if task.state is not TaskState.FAILED:
        fork = f"; to run it once more, fork it: coatcheck fork {task.task_id} --at start"
        why = fork if task.state.is_final else ": it goes on by itself"
        raise NotOrdered("not_failed", f"task {task.task_id} is {task.state}, not failed{why}")
    cut = Cut(task.checkpoint, [one for one in live if one.is_failure])
    cut = with_given_up(cut, task, live)
    taken = replace(_restarted(task), revision=task.revision + 1)
    return _take_back(order, cut, live, changed=(), taken=taken, before=task)


def _restarted(task: Task) -> Task:
    """The row of a task that goes on from an earlier point: running, its lease over, nothing of an end left."""
    return replace(
        task,
        state=TaskState.RUNNING,
        epoch=task.epoch + 1,
        checkpoint=task.checkpoint + 1,
        attempt=1,
        pickups=0,
        trigger=None,
        value=None,
        traceback=None,
        is_final_sent=False,
        is_pausing=False,
        finished_at=None,
    )


def _take_back(
    order: Rewind | Retry, cut: Cut, live: Sequence[Place], *, changed: Sequence[Place], taken: Task, before: Task
) -> Deed:
    """Forget what lies behind the cut and what a person changes, and write the changed values behind all else."""
    seq, calls, entries = before.seq, list[Forgotten](), list[int]()
    for one in (*cut.gone, *changed):
        if one.call_id is None:
            entries.append(one.seq or 0)
            continue
        closes_at = None
        if one.state is CallState.OPEN:
            seq += one.kind.is_awaited
            closes_at = seq if one.kind.is_awaited else one.seq
        calls.append(Forgotten(one.call_id, closes_at))
    superseding = []
    for one in changed:
        seq += 1
        assert isinstance(order, Rewind)
        call_id = None if one.call_id is None else CallId(uuid.uuid5(one.call_id, f"set:{taken.epoch}"))
        superseding.append(Superseding(one, seq, order.sets[one.key], call_id))
    after = replace(taken, seq=seq)
    gone = {id(one) for one in (*cut.gone, *changed)}
    kept = [one for one in live if id(one) not in gone]
    done = _done(order, before, after, checkpoint=cut.checkpoint, live=kept, gone=cut.gone, changed=changed)
    drafts = _drafts(order, before, after, done)
    return Deed(done, after, NOW, tuple(entries), tuple(calls), tuple(superseding), drafts=drafts)


# --- fork ---


def _fork(order: Fork, task: Task, live: Sequence[Place]) -> Deed:
    if not task.request:
        raise NotOrdered("no_request", f"task {task.task_id} was cancelled before its request came")
    cut = cut_at(order.at, task, live)
    if order.input is not None and order.at != "start":
        raise NotOrdered("input", "a new input needs a task that begins anew: --at start")
    cut = with_given_up(cut, task, live)
    gone = {id(one) for one in cut.gone}
    kept = [one for one in live if id(one) not in gone and one.key != ORIGINS]
    still_open = [one for one in kept if one.is_open_wait]
    copies = [one for one in kept if not one.is_open_wait]
    last = max((one.seq or 0 for one in copies), default=0)
    forked = _forked(order, task, checkpoint=cut.checkpoint, seq=last)
    done = _done(order, task, forked, checkpoint=cut.checkpoint, live=copies, gone=cut.gone)
    warnings = [f"{one.key} is open there and is asked for once more by the fork" for one in still_open]
    done = replace(done, new_task_id=order.new_task_id, warnings=(*warnings, *done.warnings), closed=())
    named = [(one, None if one.call_id is None else _new_call(order, one.call_id)) for one in copies]
    origins = encode([*_origins(live), [str(task.task_id), last]]) if copies else None
    return Deed(done, forked, NOW, copies=tuple(named), origins=origins, drafts=_drafts(order, task, forked, done))


def _forked(order: Fork, task: Task, *, checkpoint: int, seq: int) -> Task:
    """A row of its own: nobody waits for its answer, and no request finds it."""
    return replace(
        _restarted(task),
        task_id=order.new_task_id,
        epoch=1,
        checkpoint=checkpoint,
        seq=seq,
        identity=None,
        correlation_id=None,
        addresses=(),
        deadline_at=None,
        progress=None,
        request=task.request if order.input is None else order.input,
        entry_count=0,
        head=None,
        revision=0,
        forked_from=task.task_id,
        forked_at=checkpoint,
    )


def _new_call(order: Fork, call_id: CallId) -> CallId:
    return CallId(uuid.uuid5(order.new_task_id, call_id.hex))


def _origins(live: Iterable[Place]) -> list[list[object]]:
    """Whose numbers a task that is a fork itself replays."""
    for one in live:
        if one.key == ORIGINS and one.value is not None:
            try:
                return [list(pair) for pair in decode(one.value, list[tuple[str, int]])]
            except CorruptBlob:
                raise NotOrdered("damaged", "the note that says what this fork was forked from is damaged") from None
    return []


# --- pause and resume ---


def _pause(order: Pause, found: Found) -> Deed:
    task = found.task
    if task.state.is_final:
        raise NotOrdered("finished", f"task {task.task_id} is {task.state}: there is nothing left to pause")
    if task.state is TaskState.PAUSED or task.is_pausing:
        return Deed(_done(order, task, task, checkpoint=task.checkpoint, warnings=("it was paused before",)), task)
    if task.state is TaskState.RUNNING and not found.is_due:
        after = replace(task, is_pausing=True, seq=task.seq + 1)
        warnings = ("it runs now: it pauses at its next write, unless that is its end",)
        done = _done(order, task, after, checkpoint=task.checkpoint, warnings=warnings)
        return Deed(done, after, drafts=_drafts(order, task, after, done))
    after = replace(
        task,
        state=TaskState.PAUSED,
        epoch=task.epoch + (task.state is TaskState.RUNNING),
        seq=task.seq + 1,
        trigger=None,
    )
    done = _done(order, task, after, checkpoint=task.checkpoint)
    return Deed(done, after, PAUSED_FOR, drafts=_drafts(order, task, after, done))


def _resume(order: Resume, task: Task) -> Deed:
    if task.state is TaskState.PAUSED:
        after = replace(
            task, state=TaskState.RUNNING, epoch=task.epoch + 1, seq=task.seq + 1, pickups=0, is_pausing=False
        )
        due: timedelta | None = NOW
    elif task.is_pausing and not task.state.is_final:
        after, due = replace(task, is_pausing=False, seq=task.seq + 1), None
    else:
        raise NotOrdered("not_paused", f"task {task.task_id} is {task.state}, not paused")
    done = _done(order, task, after, checkpoint=task.checkpoint)
    return Deed(done, after, due, drafts=_drafts(order, task, after, done))


# --- what is told of it ---

VERBS = {Rewind: "rewind", Fork: "fork", Retry: "retry", Pause: "pause", Resume: "resume"}
KINDS = {Rewind: "rewound", Fork: "forked", Retry: "retried", Pause: "paused", Resume: "unpaused"}


def _done(
    order: Order,
    before: Task,
    after: Task,
    *,
    checkpoint: int,
    live: Sequence[Place] = (),
    gone: Sequence[Place] = (),
    changed: Sequence[Place] = (),
    warnings: Sequence[str] = (),
) -> OrderDone:
    failures = [
        f"{one.key} failed and is kept, so it fails again; --to before:{one.key} does it anew"
        for one in live
        if one.is_failure
    ]
    sends = [
        f"the message {one.key} has left, and is sent once more"
        for one in gone
        if one.kind is Kind.SEND and one.state is CallState.OK
    ]
    return OrderDone(
        task_id=before.task_id,
        verb=VERBS[type(order)],
        before=before.state,
        after=after.state,
        checkpoint=checkpoint,
        discarded=tuple(one.key for one in gone),
        set_keys=tuple(one.key for one in changed),
        closed=tuple(one.key for one in (*gone, *changed) if one.is_open_wait),
        replay_count=sum(not one.is_open_wait for one in (*live, *changed) if one.key != ORIGINS),
        warnings=(*warnings, *failures, *(sends if type(order) is not Fork else ())),
        revision=after.revision,
        is_dry_run=order.is_dry_run,
    )


def _drafts(order: Order, before: Task, after: Task, done: OrderDone) -> tuple[NewHistory, ...]:
    """The entry of the history that tells of it."""
    if before.history < HistoryLevel.OUTCOME:
        return ()
    kind, key, told = KINDS[type(order)], None, dict[str, object]()
    if isinstance(order, Rewind | Fork):
        told = {"to": order.to if isinstance(order, Rewind) else order.at, "checkpoint": done.checkpoint}
    if isinstance(order, Rewind) and order.is_damage:
        kind, key = "damaged", str(order.to).removeprefix("before:")
    if isinstance(order, Fork):
        told |= {"from": str(before.task_id), "head": (before.head or b"").hex()}
    told |= {"reason": order.reason, "revision": after.revision, "discarded": list(done.discarded[:MOST_NAMED])}
    told |= {"set": list(done.set_keys)}
    data = {name: value for name, value in told.items() if value not in (None, [], "")}
    return (NewHistory(kind, order.by, key, encode(data)),)


# --- many at once ---


class Filter(Value, frozen=True):
    """Which tasks an order in bulk means. `code` is that of their failure; times are those of their making."""

    states: tuple[TaskState, ...] = ()
    service: str | None = None
    handler: str | None = None
    code: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def has_code(self, value: bytes | None) -> bool:
        """Tell whether a stored failure carries the code that is asked for."""
        if self.code is None:
            return True
        try:
            document = decode(value or b"")
        except (CorruptBlob, ValueError):
            return False
        return isinstance(document, dict) and document.get("code") == self.code


def origins_of(note: Sequence[tuple[str, int]]) -> list[tuple[UUID, int]]:
    """Whose numbers a fork replays, and up to which place in the order each, by what it noted of that."""
    return [(UUID(task_id), seq) for task_id, seq in note]
