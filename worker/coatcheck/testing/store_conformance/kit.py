"""Makers of what a run writes and what arrives, so that a test names only what it is about."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from coatcheck.store import Store, chain, encode
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.kinds import Kind
from coatcheck.store.rows import (
    Address,
    Again,
    Arrival,
    Birth,
    CallId,
    CallState,
    CancelAsk,
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
    PutDone,
    Ruling,
    Task,
    TaskId,
    TaskState,
    Verdict,
)
from coatcheck.store.views import Retention
from coatcheck.testing.store_conformance.bench import Bench, Row, Rows

MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
AT_ONCE = Retention(timedelta(), timedelta())
A_SECOND_AGO = timedelta(seconds=-1)
CANCELLED = encode({"code": "cancelled"})


def new_id() -> TaskId:
    return TaskId(uuid.uuid4())


def birth(task_id: TaskId | None = None, **options: Any) -> Birth:
    """A request's row to be; `body` and `reply_to` may be given."""
    body = options.pop("body", 1)
    reply_to = options.pop("reply_to", "asker")
    correlation_id = options.pop("correlation_id", "r1")
    return Birth(
        task_id=task_id or new_id(),
        service=options.pop("service", "svc"),
        handler="handler",
        version="1",
        request=encode(body),
        digest=encode(body),
        identity="identity",
        address=Address(reply_to, correlation_id) if reply_to else None,
        correlation_id=correlation_id,
        **options,
    )


def call(key: str = "search#1", **options: Any) -> NewCall:
    if "idle" not in options:
        options.setdefault("hard", MINUTE)
    peer = options.pop("peer", "search")
    return NewCall(CallId(uuid.uuid4()), key, Kind.CALL, "search", b"digest", peer, encode(key), **options)


def calls(count: int) -> list[NewCall]:
    return [call(f"search#{number}") for number in range(1, count + 1)]


def timer(key: str = "sleep#1", hard: timedelta = MINUTE) -> NewCall:
    return NewCall(CallId(uuid.uuid4()), key, Kind.TIMER, "sleep", b"digest", hard=hard)


def send(key: str = "send#1") -> NewCall:
    return NewCall(CallId(uuid.uuid4()), key, Kind.SEND, "audit", b"digest", "audit", encode("note"))


def entry(key: str = "plan#1", value: Any = 1, *, is_ok: bool = True) -> NewEntry:
    return NewEntry(key, Kind.STEP, key.partition("#")[0], b"digest", is_ok, encode(value))


def all_of(members: Sequence[NewCall]) -> Group:
    return need(len(members), members)


def need(count: int | None, members: Sequence[NewCall]) -> Group:
    return Group(tuple(one.call_id for one in members), count)


def ok(one: NewCall, value: Any = "ok", *, is_redelivered: bool = False) -> Arrival:
    return Arrival(one.call_id, CallState.OK, encode(value), is_redelivered)


def failed(one: NewCall) -> Arrival:
    return Arrival(one.call_id, CallState.FAILED, encode({"code": "refused"}))


def timeout(one: NewCall, *, is_redelivered: bool = False) -> Arrival:
    return Arrival(one.call_id, CallState.TIMED_OUT, encode({"code": "timeout"}), is_redelivered)


def progress(one: NewCall) -> Arrival:
    return Arrival(one.call_id, None, b"", progress={"done": 1})


def parking(*groups: Group) -> Park:
    return Park(groups, MINUTE)


def done(value: Any = "result", **options: Any) -> Finish:
    return Finish(TaskState.DONE, encode(value), options.pop("keep", DAY), **options)


def going(**options: Any) -> Going:
    return Going(MINUTE, **options)


def again(*forget: str, delay: timedelta = timedelta()) -> Again:
    return Again(delay, encode({"code": "failed"}), "traceback", forget)


def hold(delay: timedelta = MINUTE) -> Hold:
    return Hold(delay, encode({"code": "unknown_handler"}))


def cancel_of(
    task_id: TaskId, *, correlation_id: str | None = None, value: bytes = CANCELLED, keep: timedelta = DAY
) -> CancelAsk:
    return CancelAsk("svc", task_id, lambda _: value, keep, correlation_id)


def put_of(task: Task, end: Going | Park | Finish | Again | Hold, **changes: Any) -> Put:
    """The put of a run that saw the row like this."""
    return Put(task.task_id, task.epoch, task.checkpoint, task.seq, Changes(**changes), end, chain=task.chain)


def birth_put(newborn: Birth, end: Going | Park | Finish | Again | Hold, **changes: Any) -> Put:
    return Put(newborn.task_id, 0, 0, 0, Changes(**changes), end, birth=newborn)


def parking_put(newborn: Birth, members: Sequence[NewCall], *groups: Group, **changes: Any) -> Put:
    return birth_put(newborn, parking(*(groups or (all_of(members),))), opens=tuple(members), **changes)


async def park(store: Store, members: Sequence[NewCall], *groups: Group, **changes: Any) -> TaskId:
    """A parked task that waits for all of its calls, unless told otherwise."""
    newborn = changes.pop("newborn", None) or birth()
    answer = await store.put(parking_put(newborn, members, *groups, **changes))
    assert isinstance(answer, PutDone)
    assert answer.is_parked
    return newborn.task_id


async def start(store: Store, newborn: Birth | None = None) -> Task:
    """A running task that has a row and nothing else."""
    newborn = newborn or birth()
    answer = await store.put(birth_put(newborn, going()))
    assert isinstance(answer, PutDone)
    return await get(store, newborn.task_id)


async def wake(store: Store, one: NewCall) -> Ruling:
    """Answer a call that ends a wait."""
    ruling = await store.claim(ok(one))
    assert ruling.verdict is Verdict.GRANTED
    return ruling


async def resumed(store: Store, one: NewCall) -> Task:
    ruling = await wake(store, one)
    assert ruling.task is not None
    return ruling.task


async def get(store: Store, task_id: TaskId) -> Task:
    task = await store.find_task(task_id)
    assert task is not None
    return task


async def written(store: Store, put: Put) -> PutDone:
    answer = await store.put(put)
    assert isinstance(answer, PutDone)
    return answer


async def make_due(bench: Bench, *members: NewCall) -> None:
    """Let the time of these calls be over."""
    await bench.set_calls(*(one.call_id for one in members), due_at=A_SECOND_AGO, look_at=A_SECOND_AGO)


async def end_lease(bench: Bench, task_id: TaskId) -> None:
    await bench.set_tasks(task_id, due_at=A_SECOND_AGO, look_at=A_SECOND_AGO)


async def assert_sound(bench: Bench) -> None:
    """What holds for the rows at every instant."""
    check_rows(await bench.read())


def check_rows(rows: Rows) -> None:
    tasks, calls = rows["task"], rows["call"]
    numbered = [(row["task_id"], row["seq"]) for row in (*calls.values(), *rows["journal"].values())]
    given = [number for number in numbered if number[1] is not None]
    assert len(given) == len(set(given)), f"sequence numbers given twice: {Counter(given).most_common(3)}"
    assert all(seq <= tasks[task_id]["seq"] for task_id, seq in given), "a sequence number is beyond its task's"
    for row in calls.values():
        is_over = TaskState(tasks[row["task_id"]]["state"]).is_final
        is_left = row["state"] == CallState.OPEN and row["kind"] != Kind.SEND
        assert not (is_over and is_left), "a finished task has open calls"
    for row in tasks.values():
        if row["state"] == TaskState.PARKED:
            assert not any(_is_met(group, calls) for group in _groups(row)), "a task is parked though its wait is over"
        assert _has_waker(row, calls), "nothing would ever move an unfinished task"
    check_histories(rows)


def check_histories(rows: Rows) -> None:
    """Every chain holds, and every task stands at the end of its own."""
    told: dict[TaskId, list[HistoryEntry]] = defaultdict(list)
    for (task_id, _), row in sorted(rows["history"].items()):
        told[task_id].append(HistoryEntry(**{name: row[name] for name in HistoryEntry.__struct_fields__}))
    for task_id, entries in told.items():
        assert chain.first_bad(task_id, entries) is None, "a chain is broken"
    for task_id, row in rows["task"].items():
        if row["history"] != HistoryLevel.OFF:
            last = told[task_id][-1]
            assert (row["entry_count"], row["head"]) == (last.number, last.hash), (
                "a task does not stand at its last entry"
            )
        else:
            assert (row["entry_count"], row["head"]) == (0, None)


def _has_waker(row: Row, calls: dict[Any, Row]) -> bool:
    state = TaskState(row["state"])
    waited = [calls[call_id] for call_id in row["wait_calls"] or () if calls[call_id]["state"] == CallState.OPEN]
    wakers = waited if state is TaskState.PARKED else [row]
    return state.is_final or any(waker["due_at"] and waker["look_at"] for waker in wakers)


def _groups(row: Row) -> list[Group]:
    members = list(zip(row["wait_calls"], row["wait_groups"], strict=True))
    return [
        Group(tuple(call_id for call_id, number in members if number == index), count)
        for index, count in enumerate(row["wait_needs"], start=1)
    ]


def _is_met(group: Group, calls: dict[Any, Row]) -> bool:
    states = [calls[call_id]["state"] if call_id in calls else None for call_id in group.calls]
    succeeded, still_open = states.count(CallState.OK), states.count(CallState.OPEN)
    is_out_of_reach = group.need is not None and succeeded + still_open < group.need
    return still_open == 0 or is_out_of_reach or (group.need is not None and succeeded >= group.need)
