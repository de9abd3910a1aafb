"""What the sweeper reads and moves. Nothing is ever locked elsewhere, so nothing is passed by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import UUID

from msgspec.structs import replace

from coatcheck.store import decide, history
from coatcheck.store.blobs import is_damaged
from coatcheck.store.history import Author
from coatcheck.store.memory.tables import CallRow, Tables, TaskRow, check_text, earliest
from coatcheck.store.rows import ALONE, MOST_ADDRESSES, Address, Answered, CallId, CallState, TaskId, TaskState
from coatcheck.store.views import LookedAt, Renewal, Renewed, Retention

Seen = TypeVar("Seen", CallRow, TaskRow)


def look(tables: Tables, *, limit: int, again: timedelta) -> LookedAt:
    calls = _whose_time_has_come(tables, _open_calls(tables), limit)
    rows = _whose_time_has_come(tables, tables.tasks.values(), limit)
    tasks = [row.task for row in rows]
    never_left = [call for call in calls if not call.is_sent and call.new.kind.is_published]
    damaged = [call for call in never_left if is_damaged(call.new.body)]
    due = [call for call in calls if tables.is_over(call.due_at) and call not in damaged]
    unsent = [call for call in never_left if call not in due]
    due_ats = [call.due_at for call in calls] + [task.due_at for task in tasks]
    for call in calls:
        pause = decide.look_at_call_again(
            waits=_until(tables, call.due_at), since=tables.now - call.opened_at, is_sent=call.is_sent, again=again
        )
        tables.change(call, look_at=None if pause is None else tables.now + pause)
    for row in rows:
        since = tables.now - (row.task.finished_at or tables.now)
        pause = decide.look_at_task_again(
            is_final=row.task.state.is_final, waits=_until(tables, row.task.due_at), since=since, again=again
        )
        tables.change(row, look_at=None if pause is None else tables.now + pause)
    return LookedAt(
        due=tuple(map(tables.peer, due)),
        unsent=tuple(map(tables.peer, unsent)),
        overdue=tuple(task for task in tasks if not task.state.is_final),
        unsent_finals=tuple(task for task in tasks if task.state.is_final and not task.is_final_sent),
        oldest=max([timedelta(), *(tables.now - due_at for due_at in due_ats if due_at is not None)]),
    )


def next_look(tables: Tables) -> timedelta | None:
    calls = (call.look_at for call in _open_calls(tables))
    first = earliest(*calls, *(row.look_at for row in tables.tasks.values()))
    return None if first is None else first - tables.now


def retire(tables: Tables, *, limit: int, keep: Retention, author: Author) -> int:
    over = [row.task for row in tables.tasks.values() if _may_go(tables, row, keep)]
    over.sort(key=lambda task: (task.state, task.finished_at or tables.now))
    for task in over[:limit]:
        drafts = history.of_pruning(task.history, task.state)
        told = author.tell(task.task_id, drafts, at=task.chain, epoch=task.epoch)
        tables.append_history(tables.tasks[task.task_id], *told)
        tables.delete_task(task.task_id)
    return len(over[:limit])


def forget_histories(tables: Tables, *, limit: int, before: datetime) -> int:
    over = [task_id for task_id, told in tables.history.items() if told and _is_left(tables, task_id, before)][:limit]
    for task_id in over:
        tables.delete_history(task_id)
    return len(over)


def _is_left(tables: Tables, task_id: TaskId, before: datetime) -> bool:
    """Whether a task was removed so long ago; and once there are seals, whether the newest says that it may be gone."""
    last = tables.history[task_id][-1]
    if last.kind != history.PRUNED or last.at > before:
        return False
    if not tables.seals:
        return True
    trimmed = (leaf for leaves in tables.leaves[: tables.seals[-1].trimmed_to] for leaf in leaves)
    return any(leaf.task_id == task_id and leaf.entry_count >= last.number for leaf in trimmed)


def repair(tables: Tables, *, after: UUID, limit: int, quiet: timedelta) -> tuple[int, UUID | None]:
    since = tables.now - quiet
    found = [
        row
        for task_id, row in sorted(tables.tasks.items())
        if task_id > after and row.task.state is TaskState.PARKED and row.task.updated_at < since
    ][:limit]
    stuck = [row for row in found if not _has_open_wait(tables, row) or tables.is_met(row.waits)]
    for row in stuck:
        task = replace(row.task, state=TaskState.RUNNING, due_at=tables.now, trigger=None, updated_at=tables.now)
        tables.change(row, task=task, look_at=tables.now, waits=())
    return len(stuck), found[-1].task.task_id if found else None


def without_waker(tables: Tables, *, limit: int = 100) -> list[TaskId]:
    stuck = []
    for task_id, row in tables.tasks.items():
        if row.task.state is TaskState.PARKED:
            is_stuck = not _has_open_wait(tables, row)
        else:
            is_stuck = not row.task.state.is_final and (row.task.due_at is None or row.look_at is None)
        if is_stuck:
            stuck.append(task_id)
    return stuck[:limit]


def renew(
    tables: Tables, renewals: Sequence[Renewal], *, lease: timedelta, detaches: bool, uncounted: int = 0
) -> Renewed:
    mine = set()
    for one in renewals:
        row = tables.tasks.get(one.task_id)
        if row is None or row.task.state is not TaskState.RUNNING or row.task.epoch != one.epoch or one.task_id in mine:
            continue
        mine.add(one.task_id)
        due_at, task = tables.now + lease, row.task
        trigger = None if detaches else task.trigger
        task = replace(task, due_at=due_at, pickups=_recounted(task.pickups, uncounted), trigger=trigger)
        tables.change(row, task=task, look_at=due_at)
    return Renewed(mine, set())


def _recounted(pickups: int, uncounted: int) -> int:
    if uncounted == 0:
        return pickups
    return pickups % ALONE - uncounted if uncounted < 0 else max(0, pickups % ALONE - uncounted % ALONE)


def hasten_held(tables: Tables, service: str) -> int:
    held = [row for row in tables.tasks.values() if row.task.state is TaskState.HELD and row.task.service == service]
    for row in held:
        tables.change(row, task=replace(row.task, due_at=tables.now), look_at=tables.now)
    return len(held)


def hasten_unsent(tables: Tables, queue: str, *, limit: int) -> int:
    check_text(queue)
    longest_at = tables.now + max(decide.LONGEST_RESEND, decide.RESEND_AFTER)
    from_at = tables.now - decide.HASTENED_FROM
    calls = [
        call
        for call in _open_calls(tables)
        if call.new.peer == queue
        and not call.is_sent
        and call.new.kind.is_published
        and call.opened_at <= from_at
        and _is_between(tables.now, call.look_at, longest_at)
    ]
    finals = [
        row
        for row in tables.tasks.values()
        if row.task.state.is_final
        and not row.task.is_final_sent
        and (row.task.finished_at or tables.now) <= from_at
        and any(queue in (address.reply_to, address.correlation_id) for address in row.task.addresses)
        and _is_between(tables.now, row.look_at, longest_at)
    ]
    calls.sort(key=lambda call: call.opened_at)
    finals.sort(key=lambda row: row.task.finished_at or tables.now)
    for call in calls[:limit]:
        tables.change(call, look_at=tables.now)
    for row in finals[:limit]:
        tables.change(row, look_at=tables.now)
    return len(calls[:limit]) + len(finals[:limit])


def _is_between(now: datetime, look_at: datetime | None, longest_at: datetime) -> bool:
    return look_at is not None and now < look_at < longest_at


def mark_sent(tables: Tables, calls: Sequence[CallId]) -> None:
    for call_id in calls:
        call = tables.calls.get(call_id)
        if call is None or call.state is not CallState.OPEN or call.is_sent:
            continue
        tables.change(call, is_sent=True, look_at=call.due_at)
        if not call.new.kind.is_awaited:
            tables.change(call, state=CallState.OK, closed_at=tables.now)


def mark_final_sent(tables: Tables, told: Mapping[TaskId, Answered]) -> None:
    for task_id, (addresses, revision) in told.items():
        row = tables.tasks.get(task_id)
        if row is None or not row.task.state.is_final or row.task.revision != revision:
            continue
        if {*row.task.addresses} <= {*addresses}:
            tables.change(row, task=replace(row.task, is_final_sent=True), look_at=None)


def resend_calls(tables: Tables, calls: Sequence[CallId], *, after: timedelta) -> None:
    for call_id in calls:
        call = tables.calls.get(call_id)
        if call is not None and call.state is CallState.OPEN and not call.is_sent:
            tables.change(call, look_at=earliest(call.look_at, tables.now + after))


def resend_to(tables: Tables, task_id: TaskId, address: Address, *, after: timedelta) -> bool:
    row = tables.tasks.get(task_id)
    if row is None or not row.task.state.is_final or tables.is_over(row.task.due_at):
        return False
    addresses = tuple(dict.fromkeys((*row.task.addresses, address)))
    if len(addresses) > max(MOST_ADDRESSES, len(row.task.addresses)):
        return False
    task = replace(row.task, addresses=addresses, is_final_sent=False)
    tables.change(row, task=task, look_at=earliest(row.look_at, tables.now + after))
    return True


def _open_calls(tables: Tables) -> list[CallRow]:
    return [call for call in tables.calls.values() if call.state is CallState.OPEN]


def _whose_time_has_come(tables: Tables, rows: Iterable[Seen], limit: int) -> list[Seen]:
    found = [row for row in rows if tables.is_over(row.look_at)]
    found.sort(key=lambda row: row.look_at or tables.now)
    return found[:limit]


def _until(tables: Tables, due_at: datetime | None) -> timedelta | None:
    return None if due_at is None else due_at - tables.now


def _may_go(tables: Tables, row: TaskRow, keep: Retention) -> bool:
    ended_at = row.task.finished_at
    if not row.task.state.is_final or ended_at is None or row.look_at is not None:
        return False
    return tables.is_over(ended_at + keep.of(row.task.state)) and not any(
        call.state is CallState.OPEN for call in tables.calls_of[row.task.task_id]
    )


def _has_open_wait(tables: Tables, row: TaskRow) -> bool:
    waited = {call_id for group in row.waits for call_id in group.calls}
    calls = tables.calls_of[row.task.task_id]
    return any(
        call.new.call_id in waited and call.state is CallState.OPEN and call.due_at and call.look_at for call in calls
    )
