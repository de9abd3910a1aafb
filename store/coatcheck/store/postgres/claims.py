"""Taking things up by row lock: replies, resumes and requests. Exactly one replica gets each.

A claim is two statements. The first reads the calls and how their tasks stand, without a lock; `decide` says by that
what to do. The second does all of it: it locks each task, if it is still the version of the row that was read (`xmin`
is the transaction that wrote it), locks the calls, closes them, stores the values, counts whether a group is met,
wakes. Each change of a task's calls writes the task's row too; so where the version holds, all that was read still is
so, and what the statement itself sees of the calls is too. Without a lock and a version from before the count, two
last replies that arrive together would each see the other's call open, and no replica would resume the task. What is
locked elsewhere or has changed is left out, and claimed with the next batch, in the end in a lane of its own, which
locks first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from msgspec.structs import replace
from sqlalchemy import TextClause, text

from coatcheck.store import decide, history
from coatcheck.store.batcher import Busy, Unreadable
from coatcheck.store.decide import Called, Plan, Standing
from coatcheck.store.documents import to_json
from coatcheck.store.history import Author
from coatcheck.store.postgres.connection import Connection, Row
from coatcheck.store.postgres.database import columns, rows
from coatcheck.store.postgres.histories import Told, find_chains, told_values
from coatcheck.store.postgres.records import (
    UNREADABLE,
    addresses_json,
    known_of,
    load_unsent,
    lock_tasks,
    read_tasks,
    task_of,
)
from coatcheck.store.postgres.sql import PARTS, STATEMENTS
from coatcheck.store.postgres.task_inserts import NewTask, birth_values, standing_row
from coatcheck.store.rows import Arrival, Chain, Request, Ruling, Task, TaskId, TaskState, Verdict, Wake

TASK_NAMES = ("id", "version", "seq", "trigger", "takes_over")
CHAIN_NAMES = ("entry_count", "head", "granted_count", "granted_head")
CALL_NAMES = ("c_id", "c_state", "c_seq", "c_value")

Answer = Ruling | Busy | Unreadable | None
Answers = list[Answer]


async def claim(
    connection: Connection,
    arrivals: Sequence[Arrival],
    waits: bool,
    *,
    lease: timedelta,
    max_history: int,
    author: Author,
) -> Answers:
    """Apply replies, progress and timeouts; grant the tasks whose wait they end."""
    ids = [arrival.call_id for arrival in arrivals]
    if waits:
        await connection.begin()
        await rows(connection, STATEMENTS["lock_owners"], ids=ids)
        await rows(connection, STATEMENTS["lock_calls"], ids=ids)
    found = {row[0]: Called._make(row) for row in await rows(connection, STATEMENTS["called"], ids=ids)}
    plan = decide.claim(found, arrivals, has_values=author.has_values)
    busy = await _note_progress(connection, plan) if plan.progress else {}
    answers = await _apply(connection, plan, lease=lease, max_history=max_history, author=author)
    for index, call_id in busy.items():
        answers[index] = Busy(found[call_id].task_id)
    return answers


async def _note_progress(connection: Connection, plan: Plan) -> dict[int, Any]:
    """Move the due times of calls that get on. Gives those whose rows are busy, by the index of their event."""
    values = [to_json(arrival.progress or {}) for _, arrival in plan.progress.values()]
    noted = await connection.execute(STATEMENTS["note_progress"], {"id": list(plan.progress), "progress": values})
    missed = plan.progress.keys() - {row["id"] for row in noted}
    return {plan.progress[call_id][0]: call_id for call_id in missed}


async def resume(
    connection: Connection, wakes: Sequence[Wake], waits: bool, *, lease: timedelta, max_history: int, author: Author
) -> Answers:
    """Grant tasks whose lease or retry time is over, if they still stand at the epoch the message names."""
    if waits:
        await connection.begin()
    found = await read_tasks(connection, [one.task_id for one in wakes], locks=waits)
    return await _apply(connection, decide.resume(found, wakes), lease=lease, max_history=max_history, author=author)


async def create(
    connection: Connection, requests: Sequence[Request], waits: bool, *, lease: timedelta, author: Author
) -> Sequence[Ruling | None]:
    """Give each request a new row, and grant it. None: there is one already, or it was made for an earlier copy."""
    born = await _bear(connection, requests, {}, lease=lease, author=author)
    return [
        None if (task := born.pop(one.birth.task_id, None)) is None else Ruling(Verdict.GRANTED, task)
        for one in requests
    ]


async def _bear(
    connection: Connection,
    requests: Sequence[Request],
    chains: Mapping[TaskId, Chain],
    *,
    lease: timedelta,
    author: Author,
) -> dict[TaskId, Task]:
    """Make rows where there are none. `chains` are the histories that are left of earlier tasks of the same ids."""
    running = standing_row(Standing(TaskState.RUNNING, lease), seq=0)
    births, told = [], list[Told]()
    for task_id, (one, pickups) in decide.first_pickups(requests).items():
        chain = chains.get(task_id, Chain(one.birth.history))
        drafts = history.of_birth(one.birth, has_values=author.has_values)
        entries, chain = author.tell(task_id, drafts, at=chain, epoch=1)
        told += [Told(task_id, entry) for entry in entries]
        births.append(NewTask(one.birth, pickups, running, chain, entries[0].number if entries else None))
    values = birth_values(births, checkpoint=0) | (told_values(told) if told else {})
    made = await connection.execute(STATEMENTS["create_telling" if told else "create"], values)
    return {row["id"]: task_of(row) for row in made}


async def accept(
    connection: Connection,
    requests: Sequence[Request],
    waits: bool,
    *,
    lease: timedelta,
    max_history: int,
    author: Author,
) -> Answers:
    """Let the row of each request answer for itself. None: there is none any more."""
    await connection.begin()
    found, busy = await lock_tasks(connection, (one.birth.task_id for one in requests), waits=waits)
    plan = decide.accept(found, requests)
    answers = await _apply(connection, plan, lease=lease, max_history=max_history, author=author)
    if plan.joined:
        addresses = [addresses_json(task.addresses) for task in plan.joined.values()]
        await connection.execute(STATEMENTS["add_addresses"], {"id": list(plan.joined), "addresses": addresses})
    missing = [one for one in requests if one.birth.task_id not in found and one.birth.task_id not in busy]
    born = await _bear_again(connection, missing, lease=lease, author=author) if missing else {}
    busy = {*busy, *born}
    for index, one in enumerate(requests):
        if (task := born.pop(one.birth.task_id, None)) is not None:
            answers[index] = Ruling(Verdict.GRANTED, task)
        elif one.birth.task_id in busy:
            answers[index] = Busy(one.birth.task_id)
    return answers


async def _bear_again(
    connection: Connection, requests: Sequence[Request], *, lease: timedelta, author: Author
) -> dict[TaskId, Task]:
    """Make rows of requests whose tasks were removed, but not their histories: `create` does not know where to go on.
    The others are its to make.
    """
    chains = await find_chains(connection, [one.birth for one in requests])
    known = [one for one in requests if chains[one.birth.task_id].count]
    return await _bear(connection, known, chains, lease=lease, author=author) if known else {}


# --- writing what was decided ---


@dataclass(slots=True)
class _Written:
    """What `apply_plan` gives back: the tasks that are written, the rows of those granted, and their histories."""

    tasks: set[TaskId] = field(default_factory=set)
    granted: list[Row] = field(default_factory=list)
    known: dict[TaskId, list[Row]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        if row["h_key"] is not None:
            self.known.setdefault(row["id"], []).append(row)
            return
        self.tasks.add(row["id"])
        if row["service"] is not None:
            self.granted.append(row)


async def _apply(connection: Connection, plan: Plan, *, lease: timedelta, max_history: int, author: Author) -> Answers:
    """Write what was decided, where it still holds, and tell the granted runs what they need."""
    answers: Answers = list(plan.rulings)
    if plan.versions:
        options = {"lease_s": lease.total_seconds(), "max_history": max_history}
        written = await _write(connection, plan, options, author)
        if len(written.tasks) < len(plan.versions):
            _leave(answers, plan.versions.keys() - written.tasks)
        for row in written.granted:
            grant = plan.grants.get(row["id"]) or plan.if_met[row["id"]]
            answers[grant.event] = _granted(answers[grant.event], row, written.known.get(row["id"], ()), plan)
    if plan.came_back:
        await _find_unsent(connection, plan, answers)
    return answers


async def _write(connection: Connection, plan: Plan, options: dict[str, Any], author: Author) -> _Written:
    tasks = []
    for task_id, version in plan.versions.items():
        grant = plan.grants.get(task_id) or plan.if_met.get(task_id)
        trigger = None if grant is None else grant.trigger
        tasks.append((task_id, version, plan.seqs.get(task_id), trigger, task_id in plan.grants))
    values = columns(TASK_NAMES, tasks) | columns(CALL_NAMES, list(plan.closing.values()))
    if plan.telling:
        values |= _history_values(plan, author)
    written = _Written()
    for row in await connection.execute(APPLY_PLAN[bool(plan.telling)], values | options):
        written.add(row)
    return written


def _history_values(plan: Plan, author: Author) -> dict[str, Any]:
    """The entries that the plan appends, and where each history stands after it: if its task is granted, and if not."""
    told, chains = list[Told](), list[tuple[Any, ...]]()
    for task_id in plan.versions:
        telling = plan.telling.get(task_id)
        if telling is None:
            chains.append((None, None, None, None))
            continue
        entries, chain = telling.entries(task_id, author, is_granted=True)
        sure = len(telling.drafts)
        told += [Told(task_id, entry, if_granted=number >= sure) for number, entry in enumerate(entries)]
        before = telling.chain if sure == 0 else Chain(chain.level, entries[sure - 1].number, entries[sure - 1].hash)
        chains.append((before.count, before.head, chain.count, chain.head))
    return told_values(told) | columns(CHAIN_NAMES, chains)


def _apply_plan(*, is_telling: bool) -> TextClause:
    """The statement with what histories need, or without."""
    statement = PARTS["apply_plan"]
    for hole in ("chain_arrays", "chain_names", "recorded_chain", "granted_chain", "told"):
        statement = statement.replace(f"{{{hole}}}", PARTS[f"plan_{hole}"] if is_telling else "")
    return text(statement)


APPLY_PLAN = {is_telling: _apply_plan(is_telling=is_telling) for is_telling in (False, True)}


def _granted(ruling: Answer, row: Row, about: Iterable[Row], plan: Plan) -> Ruling | Unreadable:
    """A grant with all the run needs. It is committed by now: were the whole batch to fail for one row that this code
    cannot read, such as one of a newer release, it would be repeated, and each item taken for a duplicate of itself.
    """
    assert isinstance(ruling, Ruling)
    try:
        task, known = task_of(row), known_of(about, plan.closing)
    except UNREADABLE as error:
        return Unreadable(error)
    return replace(ruling, verdict=Verdict.GRANTED, task=task, known=known)


def _leave(answers: Answers, busy: Collection[TaskId]) -> None:
    """An event of a task that could not be written is tried again."""
    for index, ruling in enumerate(answers):
        if isinstance(ruling, Ruling):
            task_id = ruling.task_id if ruling.task is None else ruling.task.task_id
            if task_id is not None and task_id in busy:
                answers[index] = Busy(task_id)


async def _find_unsent(connection: Connection, plan: Plan, answers: Answers) -> None:
    """Look up what the tasks of redelivered messages have perhaps never sent. A claim has not read their rows yet."""
    came_back = {index: one for index in plan.came_back if isinstance(one := answers[index], Ruling)}
    tasks = {ruling.task.task_id: ruling.task for ruling in came_back.values() if ruling.task is not None}
    missing = [task_id for index in came_back if (task_id := plan.came_back[index]) not in tasks]
    if missing:
        found = await read_tasks(connection, missing, locks=False)
        tasks |= {task_id: seen.task for task_id, seen in found.items()}
    try:
        unsent = await load_unsent(connection, tasks.values())
    except UNREADABLE as error:
        for index in came_back:
            answers[index] = Unreadable(error)
        return
    for index, ruling in came_back.items():
        task = tasks.get(plan.came_back[index])
        if task is not None:
            answers[index] = replace(ruling, task=ruling.task or task, unsent=unsent[task.task_id])
