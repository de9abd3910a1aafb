"""Every write of a run, set-based: births, entries, new calls, and how the run goes on or ends.

A put is ONE statement, which carries what it depends on: there is no row yet, or the row stands exactly as the run last
saw it (epoch, checkpoint, sequence number), and what a park waits for is not over. Every reply that is claimed takes
the next sequence number under the task's lock; so a row at the number the run has seen has no news, and the calls are
as the run knows them. The row is locked in the statement, with SKIP LOCKED.

If the row changed since the run last read it, the put is repeated in a transaction that locks it first (`put_locked`):

    1. lock the tasks by id                             (epoch or checkpoint differ: refused; nothing is written)
    2. read what ended since the run last looked        (the news; they decide whether a park holds)
    3. the same statement, which now holds true

A crash before the commit leaves nothing; after it, the rows say all, and the unacked trigger or the lease brings the
task back. A put whose outcome is unknown is simply put again: the rows tell whether it is in already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import TextClause, text

from coatcheck.store import decide
from coatcheck.store.batcher import Busy
from coatcheck.store.decide import Fence, Writing
from coatcheck.store.documents import to_json
from coatcheck.store.history import Author
from coatcheck.store.kinds import KINDS
from coatcheck.store.postgres.connection import Connection
from coatcheck.store.postgres.database import columns, rows
from coatcheck.store.postgres.histories import Told, find_chains, told_values
from coatcheck.store.postgres.records import CALL_STATES, addresses_of, lock_tasks, peer_of, recorded_of
from coatcheck.store.postgres.sql import PARTS, STATEMENTS
from coatcheck.store.postgres.task_inserts import STANDING_COLUMNS, NewTask, birth_values, standing_row
from coatcheck.store.rows import (
    CallId,
    CallState,
    Chain,
    NewCall,
    NewEntry,
    Park,
    Put,
    PutDone,
    PutRefused,
    Recorded,
    Task,
    TaskId,
)

ENTRY_NAMES = (
    *("e_task_id", "e_seq", "e_key", "e_kind", "e_name", "e_digest", "e_is_ok", "e_value", "e_checkpoint"),
    *("e_is_forgotten", "e_epoch", "e_replica", "e_took"),
)
CALL_NAMES = (
    *("c_id", "c_task_id", "c_key", "c_kind", "c_name", "c_digest", "c_peer", "c_handler", "c_headers", "c_body"),
    *("c_seq", "c_idle_s", "c_hard_s", "c_checkpoint", "c_epoch", "c_replica"),
)
CLOSE_NAMES = ("x_id", "x_task_id", "x_seq")
WAIT_NAMES = ("m_id", "m_number", "m_need", "m_call_id")
FORGET_NAMES = ("f_task_id", "f_key")
CHAIN_NAMES = ("u_entry_count", "u_head")
UPDATE_NAMES = tuple(f"u_{it}" for it in ("id", "epoch", "follows", "seen", "is_progress", *STANDING_COLUMNS))


async def put(connection: Connection, puts: Sequence[Put], waits: bool, *, author: Author) -> Sequence[PutDone | None]:
    """Write the puts whose rows stand as their runs believe; None: not written, `put_locked` will know why."""
    first: dict[TaskId, Writing] = {}
    for one in puts:
        if one.task_id not in first:
            chain = one.chain if one.birth is None else Chain(one.birth.history)
            first[one.task_id] = Writing(one, one.seen, is_parked=decide.may_park(one, {}), chain=chain)
    done = await _write(connection, first, author)
    return [done.pop(one.task_id, None) for one in puts]  # of two puts of one task, the second one waits its turn


async def put_locked(
    connection: Connection, puts: Sequence[Put], waits: bool, *, author: Author
) -> Sequence[PutDone | PutRefused | Busy]:
    """Write a batch of puts under their tasks' locks; the answers come in the order of the puts."""
    await connection.begin()
    answers: dict[int, PutDone | PutRefused | Busy] = {}
    pausing: set[TaskId] = set()
    passed, chains = await _fence(connection, puts, waits, answers, pausing)
    news = await _read_news(connection, passed.values())
    states = await _read_states(connection, [one for one, _ in passed.values()])
    chains |= await find_chains(connection, [one.birth for one, _ in passed.values() if one.birth is not None])
    writing = {
        one.task_id: Writing(
            one,
            seen,
            decide.may_park(one, states),
            news.get(one.task_id, []),
            chain=chains[one.task_id],
            is_pausing=one.task_id in pausing,
        )
        for one, seen in passed.values()
    }
    done = await _write(connection, writing, author)
    for index, (one, _) in passed.items():
        # A birth that waited for another one of its id finds that one's row at its next turn.
        answers[index] = done.get(one.task_id) or Busy(one.task_id)
    return [answers[index] for index in range(len(puts))]


# --- under the lock ---


async def _fence(
    connection: Connection,
    puts: Sequence[Put],
    waits: bool,
    answers: dict[int, PutDone | PutRefused | Busy],
    pausing: set[TaskId],
) -> tuple[dict[int, tuple[Put, int]], dict[TaskId, Chain]]:
    """Lock the tasks, and let through only what follows the rows as they stand: each put with the number it follows.
    Besides, where the tasks' histories stand.
    """
    found, busy = await lock_tasks(connection, (one.task_id for one in puts), waits=waits)
    passed: dict[int, tuple[Put, int]] = {}
    taken: set[TaskId] = set()
    for index, one in enumerate(puts):
        seen = found.get(one.task_id)
        task = None if seen is None else seen.task
        if one.task_id in taken or one.task_id in busy:
            answers[index] = Busy(one.task_id)  # two puts of one task in a batch: the second one waits its turn
            continue
        fence = decide.fence(one, task)
        if fence is Fence.WRITE:
            passed[index] = (one, 0 if task is None else task.seq)
            if task is not None and task.is_pausing:
                pausing.add(one.task_id)
        elif fence is Fence.PERHAPS_IN and task is not None and await _is_in(connection, one, task):
            answers[index] = await _answer_again(connection, one, task)
        else:
            answers[index] = PutRefused(task)
            continue
        taken.add(one.task_id)
    return passed, {task_id: seen.task.chain for task_id, seen in found.items()}


async def _is_in(connection: Connection, one: Put, task: Task) -> bool:
    place = {"id": one.task_id, "checkpoint": task.checkpoint}
    keys = [row["h_key"] for row in await rows(connection, STATEMENTS["entries_of_checkpoint"], **place)]
    calls = {row["id"] for row in await rows(connection, STATEMENTS["calls_of_checkpoint"], **place)}
    return decide.is_in(one, task, keys=keys, calls=calls)


async def _answer_again(connection: Connection, one: Put, task: Task) -> PutDone:
    """Answer a put that is in: with the news, read again, and with what it closed, for no run has heard of that yet."""
    is_parked = decide.is_put_down(task)
    news = (await _read_news(connection, [(one, task.seq)])).get(one.task_id, [])
    place = {"id": one.task_id, "checkpoint": task.checkpoint}
    news += [recorded_of(row) for row in await rows(connection, STATEMENTS["entries_of_checkpoint"], **place)]
    closed = await rows(connection, STATEMENTS["closed_since"], id=one.task_id, seen=one.seen)
    cancels = tuple([peer_of(row) for row in closed])
    told = () if is_parked else tuple(news)
    return PutDone(task.epoch, task.checkpoint, task.seq, is_parked, told, cancels, task.addresses, task.chain)


async def _read_news(connection: Connection, passed: Iterable[tuple[Put, int]]) -> dict[TaskId, list[Recorded]]:
    """Replies may have been claimed while the run was live: all that ended since it last looked."""
    known = {one.task_id: one.seen for one, seen in passed if seen > one.seen}
    news: dict[TaskId, list[Recorded]] = {}
    if known:
        for row in await rows(connection, STATEMENTS["news"], id=list(known), seen=list(known.values())):
            news.setdefault(row["task_id"], []).append(recorded_of(row))
    return news


async def _read_states(connection: Connection, puts: Iterable[Put]) -> Mapping[CallId, CallState]:
    wanted = [call_id for one in puts for call_id in decide.waits_for(one)]
    if not wanted:
        return {}
    found = await rows(connection, STATEMENTS["call_states"], ids=wanted)
    return {row["id"]: CALL_STATES[row["state"]] for row in found}


# --- the statement ---


async def _write(connection: Connection, writing: Mapping[TaskId, Writing], author: Author) -> dict[TaskId, PutDone]:
    """Write what its precondition lets pass. Gives the answers to what was written."""
    parts, values = _parts(writing.values(), author)
    if not parts:
        return {}
    seqs: dict[TaskId, int] = {}
    addresses: dict[TaskId, Any] = {}
    cancels: dict[TaskId, list[Any]] = {}
    for row in await connection.execute(_statement(parts), values):
        task_id = row["task_id"]
        if row["id"] is None:
            seqs[task_id] = writing[task_id].seq if row["seq"] is None else row["seq"]
            addresses[task_id] = row["addresses"]
        elif KINDS[row["kind"]].has_listener:
            cancels.setdefault(task_id, []).append(peer_of(row))
    return {
        task_id: PutDone(
            epoch=one.epoch,
            checkpoint=one.checkpoint,
            seq=seqs[task_id],
            is_parked=one.is_parked,
            news=() if one.is_parked else tuple(one.news),
            cancels=tuple(cancels.get(task_id, ())),
            addresses=() if addresses[task_id] is None else addresses_of(addresses[task_id]),
            chain=one.chain,
        )
        for task_id, one in writing.items()
        if task_id in seqs
    }


def _parts(writing: Iterable[Writing], author: Author) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The parts that have something to write, and the values they take."""
    rows_of: dict[str, list[Any]] = {
        name: [] for name in ("birth", "update", "chain", "wait", "close", "entry", "call", "forget", "told")
    }
    for one in writing:
        _add_rows(rows_of, one, author)
    births, updates, forgets = rows_of["birth"], rows_of["update"], rows_of["forget"]
    has = {"born": births, "met": rows_of["wait"], "held": updates, "closed": rows_of["close"]}
    has |= {"entries": rows_of["entry"], "calls": rows_of["call"], "leftover": updates, "forgotten": forgets}
    has |= {"forgotten_entries": forgets, "history": rows_of["told"], "updated": updates}
    values: dict[str, Any] = {"closing": [close[0] for close in rows_of["close"]], "f_task_id": [], "f_key": []}
    values["resend_after_s"] = decide.RESEND_AFTER.total_seconds()
    if births:
        values |= birth_values(births, checkpoint=1)
    if rows_of["told"]:
        values |= told_values(rows_of["told"]) | columns(CHAIN_NAMES, rows_of["chain"])
    for column_names, items in (
        (UPDATE_NAMES, updates),
        (ENTRY_NAMES, rows_of["entry"]),
        (CALL_NAMES, rows_of["call"]),
        (CLOSE_NAMES, rows_of["close"]),
        (WAIT_NAMES, rows_of["wait"]),
        (FORGET_NAMES, forgets),
    ):
        if items:
            values |= columns(column_names, items)
    return tuple([part for part, items in has.items() if items]), values


def _add_rows(rows_of: dict[str, list[Any]], one: Writing, author: Author) -> None:
    put = one.put
    task_id = put.task_id
    standing = standing_row(one.standing, seq=one.seq, progress=put.progress)
    told = one.history(author)
    rows_of["told"] += [Told(task_id, entry) for entry in told]
    if put.birth is not None:
        rows_of["birth"].append(NewTask(put.birth, 0, standing, one.chain, told[0].number if told else None))
    else:
        fence = (task_id, put.epoch, put.follows, one.seen, decide.shows_progress(put))
        rows_of["update"].append((*fence, *standing))
        rows_of["chain"].append((one.chain.count, one.chain.head) if told else (None, None))
        if one.is_parked and not one.is_pausing:
            rows_of["wait"] += [(task_id, *member) for member in _members(put)]
    rows_of["close"] += [(call_id, task_id, seq) for call_id, seq in one.closes]
    signed = one.signatures(author.replica)
    rows_of["entry"] += [(*_entry_row(one, *entry), *next(signed), entry[0].took) for entry in one.entries]
    rows_of["call"] += [(*_call_row(one, *call), *next(signed)) for call in one.opens]
    rows_of["forget"] += [(task_id, key) for key in decide.forgotten(put)]


def _members(put: Put) -> list[tuple[int, int | None, CallId]]:
    """The members of the groups that a task is parked with, if any of them was opened before this put."""
    if not decide.waits_for(put) or not isinstance(put.end, Park):
        return []
    groups = enumerate(put.end.groups)
    return [(number, group.need, call_id) for number, group in groups for call_id in group.calls]


def _entry_row(one: Writing, entry: NewEntry, seq: int, is_forgotten: bool) -> tuple[Any, ...]:
    return (
        one.put.task_id,
        seq,
        entry.key,
        entry.kind,
        entry.name,
        entry.digest,
        entry.is_ok,
        entry.value,
        one.checkpoint,
        is_forgotten,
    )


def _call_row(one: Writing, call: NewCall, seq: int | None) -> tuple[Any, ...]:
    return (
        call.call_id,
        one.put.task_id,
        call.key,
        call.kind,
        call.name,
        call.digest,
        call.peer,
        call.handler,
        to_json(dict(call.headers)) if call.headers else None,
        call.body,
        seq,
        call.idle.total_seconds() if call.idle is not None else None,
        call.hard.total_seconds() if call.hard is not None else None,
        one.checkpoint,
    )


ANSWERING = ("born", "updated", "closed", "leftover")


@cache
def _statement(parts: tuple[str, ...]) -> TextClause:
    """One statement of the parts that have something to write."""
    written = " UNION ALL ".join(f"SELECT id FROM {one}" for one in ("born", "held") if one in parts)
    last_fence = "held" if "held" in parts else "born"
    unless_met = "AND t.id NOT IN (SELECT id FROM met)" if "met" in parts else ""
    clauses = []
    for one in parts:
        body = PARTS[f"put_{one}"].replace("{unless_met}", unless_met)
        for hole in ("chain_arrays", "chain_names", "chain_set"):
            body = body.replace(f"{{{hole}}}", PARTS[f"put_{hole}"] if "history" in parts else "")
        clauses.append(f"{one} AS {'MATERIALIZED ' if one == 'held' else ''}({body})")
        if one == last_fence:
            clauses.append(f"writing AS MATERIALIZED ({written})")
    answers = "\n UNION ALL\n".join(PARTS[f"answer_{one}"] for one in ANSWERING if one in parts)
    return text("WITH " + ",\n".join(clauses) + "\n" + answers)
