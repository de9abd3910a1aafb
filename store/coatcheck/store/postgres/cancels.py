"""Cancelling: first commit wins. A task nobody knows yet gets a tombstone, which whoever meets it answers for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace
from sqlalchemy import text

from coatcheck.store.batcher import Busy
from coatcheck.store.postgres.connection import Connection
from coatcheck.store.postgres.database import columns, rows
from coatcheck.store.postgres.records import PEER_COLUMNS, lock_tasks, peer_of
from coatcheck.store.postgres.task_inserts import RESEND_AFTER_S
from coatcheck.store.rows import (
    CancelAsk,
    Kind,
    Peer,
    Ruling,
    Task,
    TaskId,
    TaskState,
    Unsent,
    Verdict,
)

# An unfinished task before a finished one; but a finished one too, so that a cancel that comes back finds what it did.
FIND_BY_CORRELATION = text("""
    SELECT DISTINCT ON (service, correlation_id) id, service, correlation_id FROM coatcheck.task
     WHERE correlation_id = ANY(CAST(:ids AS text[]))
     ORDER BY service, correlation_id, state IN ('done', 'failed', 'cancelled'), created_at DESC, id DESC
""")
INSERT_TOMBSTONES = text("""
    INSERT INTO coatcheck.task (id, service, version, state, epoch, digest, request, value, is_final_sent, due_at,
                                finished_at, created_at)
    SELECT id, service, '', 'cancelled', 0, '', '', value, true, clock_timestamp() + keep_s * interval '1 s',
           clock_timestamp(), statement_timestamp()
      FROM unnest(CAST(:id AS uuid[]), CAST(:service AS text[]), CAST(:value AS bytea[]), CAST(:keep_s AS float8[]))
        AS u(id, service, value, keep_s)
     WHERE NOT EXISTS (SELECT FROM coatcheck.task t WHERE t.id = u.id)
     ORDER BY id
    ON CONFLICT (id) DO NOTHING
    RETURNING id
""")
CANCEL = text("""
    UPDATE coatcheck.task t
       SET state = 'cancelled', epoch = t.epoch + 1, checkpoint = t.checkpoint + 1, seq = u.seq, value = u.value,
           trigger = NULL, wait_calls = NULL, wait_groups = NULL, wait_needs = NULL,
           due_at = clock_timestamp() + u.keep_s * interval '1 s',
           look_at = clock_timestamp() + CAST(:resend_after_s AS float8) * interval '1 s',
           finished_at = clock_timestamp(), updated_at = clock_timestamp()
      FROM unnest(CAST(:id AS uuid[]), CAST(:value AS bytea[]), CAST(:keep_s AS float8[]), CAST(:seq AS integer[]))
        AS u(id, value, keep_s, seq)
     WHERE t.id = u.id
""")
CLOSE_LEFTOVERS = text(f"""
    UPDATE coatcheck.call c
       SET state = 'closed', seq = leftover.seq, closed_at = clock_timestamp(), look_at = NULL
      FROM (SELECT held.id, u.seq + row_number() OVER (PARTITION BY u.id ORDER BY held.id) AS seq
              FROM (SELECT id, task_id FROM coatcheck.call
                     WHERE task_id = ANY(CAST(:id AS uuid[])) AND state = 'open' AND kind <> 'send'
                     ORDER BY id FOR UPDATE) AS held
              JOIN unnest(CAST(:id AS uuid[]), CAST(:seq AS integer[])) AS u(id, seq) ON u.id = held.task_id
           ) AS leftover, coatcheck.task t
     WHERE c.id = leftover.id AND t.id = c.task_id
    RETURNING {PEER_COLUMNS}
""")
CLOSED_CALLS = text(f"""
    SELECT {PEER_COLUMNS} FROM coatcheck.call c JOIN coatcheck.task t ON t.id = c.task_id
     WHERE c.task_id = ANY(CAST(:ids AS uuid[])) AND c.state = 'closed'
""")


async def cancel(connection: Connection, asks: Sequence[CancelAsk], waits: bool) -> Sequence[Ruling | Busy]:
    """End unfinished tasks as cancelled. RECORDED: cancelled now; FINISHED: it had ended before; UNKNOWN: tombstone, or
    a task of another service, which is left alone.
    """
    await connection.begin()
    targets = await _targets(connection, asks)
    asked = list(zip(targets, asks, strict=True))
    buried = await _bury(connection, _first(asked))
    locked = await lock_tasks(connection, (target for target in targets if target not in buried), waits=waits)
    first = _first((target, ask) for target, ask in asked if _is_own(ask, locked.tasks.get(target)))
    own = [locked.tasks[target] for target in first]
    ending = {task.task_id: task for task in own if not task.state.is_final}
    cancels = await _end(connection, ending, first)
    already = [task for task in own if task.task_id not in ending]
    await _find_peers_again(connection, already, cancels)
    rulings: list[Ruling | Busy] = []
    for target, ask in asked:
        task = locked.tasks.get(target)
        if target in buried or (task is not None and not _is_own(ask, task)):
            rulings.append(Ruling(Verdict.UNKNOWN))
        elif task is None:
            rulings.append(Busy(target))
        else:
            by = first[target] if target in ending else None
            rulings.append(_ruling(task, by, is_first=by is ask, cancels=tuple(cancels.get(target, ()))))
    return rulings


def _first(asked: Iterable[tuple[TaskId, CancelAsk]]) -> dict[TaskId, CancelAsk]:
    """Of several asks for one task the first one counts."""
    first: dict[TaskId, CancelAsk] = {}
    for target, ask in asked:
        first.setdefault(target, ask)
    return first


def _is_own(ask: CancelAsk, task: Task | None) -> bool:
    return task is not None and task.service == ask.service


async def _bury(connection: Connection, asks: Mapping[TaskId, CancelAsk]) -> set[TaskId]:
    """Put a tombstone where there is no row."""
    items = [(target, ask.service, ask.failure(target), ask.keep.total_seconds()) for target, ask in asks.items()]
    values = columns(("id", "service", "value", "keep_s"), items)
    return {row.id for row in await connection.execute(INSERT_TOMBSTONES, values)}


async def _end(
    connection: Connection, ending: Mapping[TaskId, Task], asks: Mapping[TaskId, CancelAsk]
) -> dict[TaskId, list[Peer]]:
    """End these tasks, which are locked, as their first ask says. Gives the calls whose peers should hear of it."""
    cancels: dict[TaskId, list[Peer]] = defaultdict(list)
    if not ending:
        return cancels
    seqs = {task.task_id: task.seq for task in ending.values()}
    for row in await connection.execute(CLOSE_LEFTOVERS, {"id": list(seqs), "seq": list(seqs.values())}):
        seqs[row.task_id] += 1
        if row.kind == Kind.CALL:
            cancels[row.task_id].append(peer_of(row))
    items = [(one, asks[one].failure(one), asks[one].keep.total_seconds(), seqs[one]) for one in ending]
    values = columns(("id", "value", "keep_s", "seq"), items)
    await connection.execute(CANCEL, values | {"resend_after_s": RESEND_AFTER_S})
    return cancels


async def _targets(connection: Connection, asks: Sequence[CancelAsk]) -> list[TaskId]:
    """The row each ask means: its requester may know the task only by its own correlation id."""
    wanted = sorted({ask.correlation_id for ask in asks if ask.correlation_id})
    if not wanted:
        return [ask.task_id for ask in asks]
    found = {
        (row.service, row.correlation_id): row.id for row in await rows(connection, FIND_BY_CORRELATION, ids=wanted)
    }
    return [found.get((ask.service, ask.correlation_id or ""), ask.task_id) for ask in asks]


async def _find_peers_again(connection: Connection, already: Sequence[Task], cancels: dict[TaskId, list[Peer]]) -> None:
    """If we die between the commit and the cancels, the redelivered message sends them: they are read from the rows."""
    ids = sorted(task.task_id for task in already if task.state is TaskState.CANCELLED and not task.is_final_sent)
    if ids:
        for row in await rows(connection, CLOSED_CALLS, ids=ids):
            if row.kind == Kind.CALL:
                cancels[row.task_id].append(peer_of(row))


def _ruling(task: Task, by: CancelAsk | None, *, is_first: bool, cancels: tuple[Peer, ...]) -> Ruling:
    if by is None:
        is_unsent = bool(task.addresses) and not task.is_final_sent
        return Ruling(Verdict.FINISHED, task, cancels=cancels, unsent=Unsent((), is_unsent))
    task = replace(task, state=TaskState.CANCELLED, epoch=task.epoch + 1, value=by.failure(task.task_id))
    if is_first:
        return Ruling(Verdict.RECORDED, task, cancels=cancels, unsent=Unsent((), True))
    return Ruling(Verdict.FINISHED, task)  # the ask before this one, in the same batch, did it and tells everyone
