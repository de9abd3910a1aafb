"""Histories in Postgres: how entries are written, and where the histories of tasks that are gone stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from coatcheck.store.chain import HistoryEntry
from coatcheck.store.postgres.connection import Connection, Row
from coatcheck.store.postgres.database import columns, rows
from coatcheck.store.postgres.sql import STATEMENTS
from coatcheck.store.rows import Birth, Chain, HistoryLevel, TaskId

TOLD_NAMES = (
    *("t_task_id", "t_number", "t_at", "t_epoch", "t_kind", "t_actor", "t_key", "t_data", "t_digest", "t_hash"),
    "t_if_granted",
)


class Told(NamedTuple):
    """An entry on its way into the rows; some only if their task is granted."""

    task_id: TaskId
    entry: HistoryEntry
    if_granted: bool = False


def told_values(told: Sequence[Told]) -> dict[str, Any]:
    """What `insert_history` takes."""
    items = [
        (
            task_id,
            entry.number,
            entry.at,
            entry.epoch,
            entry.kind,
            entry.actor,
            entry.key,
            entry.data,
            entry.digest,
            entry.hash,
            if_granted,
        )
        for task_id, entry, if_granted in told
    ]
    return columns(TOLD_NAMES, items) | {"t_replica": told[0].entry.replica}


async def tell(connection: Connection, told: Sequence[Told]) -> None:
    """Append entries to histories whose tasks are locked."""
    if told:
        await connection.execute(STATEMENTS["tell"], told_values(told))


async def find_chains(connection: Connection, births: Sequence[Birth]) -> dict[TaskId, Chain]:
    """Where the histories of new tasks begin: a task that retention removed may be asked for again, and goes on with
    the history that is left of it. Until the transaction ends, no other one goes on with it, and no sweeper removes it.
    """
    levels = {birth.task_id: birth.history for birth in births}
    chains = {task_id: Chain(level) for task_id, level in levels.items()}
    ids = sorted(task_id for task_id, level in levels.items() if level is not HistoryLevel.OFF)
    if ids:
        await rows(connection, STATEMENTS["lock_chains"], ids=ids)
        for row in await rows(connection, STATEMENTS["last_entries"], ids=ids):
            chains[row["task_id"]] = Chain(levels[row["task_id"]], row["number"], row["hash"])
    return chains


async def read_history(connection: Connection, task_id: UUID) -> list[HistoryEntry]:
    """The entries of a task's history, in order."""
    return [entry_of(row) for row in await rows(connection, STATEMENTS["history"], id=task_id)]


def entry_of(row: Row) -> HistoryEntry:
    return HistoryEntry(
        number=row["number"],
        kind=row["kind"],
        at=row["at"],
        replica=row["replica"],
        epoch=row["epoch"],
        actor=row["actor"],
        key=row["key"],
        data=row["data"],
        digest=row["digest"],
        hash=row["hash"],
    )
