"""Every write of a run, put after put: the tables are locked for all of them at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

from msgspec.structs import replace

from coatcheck.store import decide
from coatcheck.store.batcher import Busy
from coatcheck.store.decide import REQUEST_TRIGGER, Fence, Writing
from coatcheck.store.history import Author
from coatcheck.store.memory.tables import Tables, TaskRow, as_json, check_birth, check_bytes, check_text, refuse
from coatcheck.store.rows import (
    Again,
    CallState,
    Chain,
    Park,
    Peer,
    Put,
    PutDone,
    PutRefused,
    Recorded,
    Task,
    TaskId,
    TaskState,
)

BIRTH_LEASE = timedelta(minutes=1)


def put(
    tables: Tables, puts: Sequence[Put], waits: bool, *, author: Author
) -> list[PutDone | PutRefused | Busy | None]:
    """Write the puts whose rows stand as their runs believe, the first one of each task."""
    first: dict[TaskId, int] = {}
    for index, one in enumerate(puts):
        first.setdefault(one.task_id, index)
    standing = [index for index in first.values() if _stands_as_believed(tables, puts[index])]
    answers = put_locked(tables, [puts[index] for index in standing], waits, author=author)
    found = dict(zip(standing, answers, strict=True))
    return [found.get(index) for index in range(len(puts))]


def _stands_as_believed(tables: Tables, one: Put) -> bool:
    row = tables.tasks.get(one.task_id)
    if one.birth is not None:
        return row is None and not tables.left_chain(one.birth).count  # one that goes on with a history needs its lock
    if row is None:
        return False
    task, states = row.task, tables.states(decide.waits_for(one))
    is_as_seen = (task.state, task.epoch, task.checkpoint, task.seq) == (
        TaskState.RUNNING,
        one.epoch,
        one.follows,
        one.seen,
    )
    return is_as_seen and (not isinstance(one.end, Park) or decide.may_park(one, states))


def put_locked(
    tables: Tables, puts: Sequence[Put], waits: bool, *, author: Author
) -> list[PutDone | PutRefused | Busy]:
    answers: dict[int, PutDone | PutRefused | Busy] = {}
    taken: set[TaskId] = set()
    for index, one in sorted(enumerate(puts), key=lambda pair: pair[1].task_id):  # as Postgres makes and locks them
        if one.task_id in taken:
            answers[index] = Busy(one.task_id)  # two puts of one task in a batch: the second one waits its turn
            continue
        answers[index] = answer = _put(tables, one, author)
        if isinstance(answer, PutDone):
            taken.add(one.task_id)
    return [answers[index] for index in range(len(puts))]


def _put(tables: Tables, one: Put, author: Author) -> PutDone | PutRefused:
    row = tables.tasks.get(one.task_id)
    task = None if row is None else row.task
    if one.birth is not None:
        check_birth(one.birth)
    fence = decide.fence(one, task)
    if fence is Fence.WRITE:
        return _write(tables, one, row, author)
    if fence is Fence.PERHAPS_IN and task is not None and _is_in(tables, one, task):
        return _answer_again(tables, one, task)
    return PutRefused(task)


def _write(tables: Tables, one: Put, row: TaskRow | None, author: Author) -> PutDone:
    addresses = () if row is None else row.task.addresses
    if row is None:
        assert one.birth is not None
        row = tables.insert_birth(one.birth, trigger=REQUEST_TRIGGER, pickups=0, lease=BIRTH_LEASE)
    is_parked = decide.may_park(one, tables.states(decide.waits_for(one)))
    chain = _chain(tables, one, row.task)
    before = tables.news(one.task_id, seen=one.seen)
    writing = Writing(one, row.task.seq, is_parked, before, chain=chain, is_pausing=row.task.is_pausing)
    entries = writing.history(author)
    tables.append_history(row, entries, writing.chain)
    cancels = _close_calls(tables, writing)
    signed = writing.signatures(author.replica)
    for entry, seq, _ in writing.entries:
        tables.insert_entry(one.task_id, entry, checkpoint=writing.checkpoint, seq=seq, by=next(signed))
    for call, place in writing.opens:
        tables.insert_call(one.task_id, call, checkpoint=writing.checkpoint, seq=place, by=next(signed))
    last = writing.seq
    if writing.standing.state.is_final:
        last, leftover = close_leftovers(tables, one.task_id, last)
        cancels += leftover
    if isinstance(one.end, Again):
        _forget(tables, one.task_id, one.end.forget)
    _update_task(tables, writing, row, seq=last)
    news = () if writing.is_parked else tuple(writing.news)
    return PutDone(
        writing.epoch, writing.checkpoint, last, writing.is_parked, news, tuple(cancels), addresses, writing.chain
    )


def _chain(tables: Tables, one: Put, task: Task) -> Chain:
    """Where the history stands: as the run believes, where the row stands as it believes, too."""
    if one.birth is not None:
        return tables.left_chain(one.birth)
    return one.chain if one.seen == task.seq else task.chain


def close_leftovers(tables: Tables, task_id: TaskId, seq: int) -> tuple[int, list[Peer]]:
    """Close what is open, numbered on from `seq`; give the last number and the calls whose peers should hear of it."""
    leftover = [call for call in tables.calls_of[task_id] if call.is_open_wait]
    leftover.sort(key=lambda call: call.new.call_id)
    for call in leftover:
        seq += 1
        tables.change(call, state=CallState.CLOSED, seq=seq, closed_at=tables.now, look_at=None)
    return seq, [tables.peer(call) for call in leftover if call.new.kind.has_listener]


def _close_calls(tables: Tables, writing: Writing) -> list[Peer]:
    cancels = []
    for call_id, seq in writing.closes:
        call = tables.calls.get(call_id)
        if call is not None and call.state is CallState.OPEN:
            tables.change(call, state=CallState.CLOSED, seq=seq, closed_at=tables.now, look_at=None)
            if call.new.kind.has_listener:
                cancels.append(tables.peer(call))
    return cancels


def _forget(tables: Tables, task_id: TaskId, keys: Collection[str]) -> None:
    check_text(*keys)
    for call in tables.calls_of[task_id]:
        if call.new.key in keys and call.state not in (CallState.OPEN, CallState.OK):
            tables.change(call, is_forgotten=True)
    for entry in tables.entries_of[task_id]:
        if entry.new.key in keys and not entry.new.is_ok:
            tables.change(entry, is_forgotten=True)


def _update_task(tables: Tables, writing: Writing, row: TaskRow, *, seq: int) -> None:
    put, task, standing, now = writing.put, row.task, writing.standing, tables.now
    if standing.state is TaskState.PARKED and not any(group.calls for group in standing.groups):
        refuse("task_parked_waits_for_something")
    if standing.value is not None:
        check_bytes(standing.value)
    updated = replace(
        task,
        state=standing.state,
        checkpoint=task.checkpoint + 1,
        seq=seq,
        attempt=task.attempt + standing.ends_attempt,
        is_pausing=False,
        pickups=0 if decide.shows_progress(put) else task.pickups,
        trigger=standing.trigger_after(task.trigger),
        value=task.value if standing.value is None else standing.value,
        traceback=task.traceback if standing.traceback is None else standing.traceback,
        progress=task.progress if put.progress is None else as_json(put.progress),
        due_at=None if standing.due is None else tables.later(standing.due),
        updated_at=now,
        finished_at=now if standing.state.is_final else None,
    )
    look = standing.look_after(task.trigger)
    tables.change(row, task=updated, look_at=None if look is None else now + look, waits=standing.groups)


# --- a put that comes again ---


def _is_in(tables: Tables, one: Put, task: Task) -> bool:
    keys = [entry.key for entry in _own_entries(tables, task)]
    calls = {call.new.call_id for call in tables.calls_of[task.task_id] if call.checkpoint == task.checkpoint}
    return decide.is_in(one, task, keys=keys, calls=calls)


def _answer_again(tables: Tables, one: Put, task: Task) -> PutDone:
    is_parked = decide.is_put_down(task)
    news = [] if is_parked else [*tables.news(task.task_id, seen=one.seen), *_own_entries(tables, task)]
    closed = [
        (call.seq, tables.peer(call))
        for call in tables.calls_of[task.task_id]
        if call.state is CallState.CLOSED and call.new.kind.has_listener and (call.seq or 0) > one.seen
    ]
    cancels = tuple(peer for _, peer in sorted(closed, key=lambda pair: pair[0] or 0))
    return PutDone(task.epoch, task.checkpoint, task.seq, is_parked, tuple(news), cancels, task.addresses, task.chain)


def _own_entries(tables: Tables, task: Task) -> list[Recorded]:
    return [entry.recorded() for entry in tables.entries_of[task.task_id] if entry.checkpoint == task.checkpoint]
