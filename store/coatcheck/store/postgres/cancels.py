"""Cancelling: first commit wins. A task without a row gets a tombstone, which answers its request when that comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from coatcheck.store import decide, history
from coatcheck.store.batcher import Busy
from coatcheck.store.history import Author
from coatcheck.store.kinds import KINDS
from coatcheck.store.postgres.connection import Connection
from coatcheck.store.postgres.database import columns, rows
from coatcheck.store.postgres.histories import Told, tell
from coatcheck.store.postgres.records import lock_tasks, peer_of
from coatcheck.store.postgres.sql import STATEMENTS
from coatcheck.store.rows import CancelAsk, Peer, Ruling, Task, TaskId


async def cancel(
    connection: Connection, asks: Sequence[CancelAsk], waits: bool, *, author: Author
) -> Sequence[Ruling | Busy]:
    """End unfinished tasks as cancelled; bury those that no row knows."""
    await connection.begin()
    asked = list(zip(await _targets(connection, asks), asks, strict=True))
    buried = await _bury(connection, decide.cancel({}, asked).buried)
    found, _ = await lock_tasks(connection, (target for target, _ in asked if target not in buried), waits=waits)
    plan = decide.cancel({target: seen.task for target, seen in found.items()}, asked)
    cancels = await _end(connection, plan.ending, author)
    await _find_peers_again(connection, plan.ended.values(), cancels)
    return [
        Busy(target)
        if target not in found and target not in buried
        else decide.answer_cancel(plan, target, ask, cancels.get(target, ()))
        for target, ask in asked
    ]


async def _targets(connection: Connection, asks: Sequence[CancelAsk]) -> list[TaskId]:
    """The row each ask means: its requester may know the task only by its own correlation id."""
    wanted = sorted({ask.correlation_id for ask in asks if ask.correlation_id})
    if not wanted:
        return [ask.task_id for ask in asks]
    found = {
        (row["service"], row["correlation_id"]): row["id"]
        for row in await rows(connection, STATEMENTS["find_by_correlation"], ids=wanted)
    }
    return [found.get((ask.service, ask.correlation_id or ""), ask.task_id) for ask in asks]


async def _bury(connection: Connection, asks: Mapping[TaskId, CancelAsk]) -> set[TaskId]:
    """Put a tombstone where there is no row."""
    items = [(target, ask.service, ask.failure(target), ask.keep.total_seconds()) for target, ask in asks.items()]
    values = columns(("id", "service", "value", "keep_s"), items)
    return {row["id"] for row in await connection.execute(STATEMENTS["insert_tombstones"], values)}


async def _end(
    connection: Connection, ending: Mapping[TaskId, tuple[Task, CancelAsk]], author: Author
) -> defaultdict[TaskId, list[Peer]]:
    """End these tasks, which are locked, as their asks say. Gives the calls whose peers should hear of it."""
    cancels: defaultdict[TaskId, list[Peer]] = defaultdict(list)
    if not ending:
        return cancels
    seqs = {task.task_id: task.seq for task, _ in ending.values()}
    values = {"id": list(seqs), "seq": list(seqs.values())}
    for row in await connection.execute(STATEMENTS["close_leftovers"], values):
        seqs[row["task_id"]] += 1
        if KINDS[row["kind"]].has_listener:
            cancels[row["task_id"]].append(peer_of(row))
    items, told = [], list[Told]()
    for one, (task, ask) in ending.items():
        entries, chain = author.tell(one, history.of_cancel(task, ask), at=task.chain, epoch=task.epoch + 1)
        told += [Told(one, entry) for entry in entries]
        items.append((one, ask.failure(one), ask.keep.total_seconds(), seqs[one], chain.count, chain.head))
    cancelled = columns(("id", "value", "keep_s", "seq", "entry_count", "head"), items) | {
        "resend_after_s": decide.RESEND_AFTER.total_seconds()
    }
    await connection.execute(STATEMENTS["cancel_tasks"], cancelled)
    await tell(connection, told)
    return cancels


async def _find_peers_again(
    connection: Connection, ended: Iterable[Task], cancels: defaultdict[TaskId, list[Peer]]
) -> None:
    """If we die between the commit and the cancels, the redelivered message sends them: they are read from the rows."""
    ids = sorted(task.task_id for task in ended if decide.tells_peers_again(task))
    if ids:
        for row in await rows(connection, STATEMENTS["closed_calls"], ids=ids):
            if KINDS[row["kind"]].has_listener:
                cancels[row["task_id"]].append(peer_of(row))
