"""Reading histories for people who audit them: page by page, or by what they look for. None of it locks anything."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import text

from coatcheck.store.audits import LAST_TASK, Chained, ChainPage, EntryFilter, FoundEntry, SealLag, Standing, TaskLeaf
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.postgres.connection import Connection, Row
from coatcheck.store.postgres.database import rows
from coatcheck.store.postgres.seals import read_sinks, seal_of_row
from coatcheck.store.postgres.sql import STATEMENTS

SNAPSHOT = text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
# A time that Python cannot hold is no time: NULL. Data is compared where it is, and does not travel.
CHAINS = text("""
    SELECT task_id, number, kind, CASE WHEN at BETWEEN '0002-01-01' AND '9999-01-01' THEN at END AS at, replica, epoch,
           actor, key, digest, hash, xid, data IS NULL OR sha256(data) = digest AS is_whole
      FROM coatcheck.history
     WHERE (task_id, number) > (CAST(:task_id AS uuid), CAST(:number AS integer)) AND task_id <= CAST(:last AS uuid)
     ORDER BY task_id, number LIMIT CAST(:limit AS integer)
""")
LEAVES = text("""
    SELECT task_id, seal, entry_count, head FROM coatcheck.seal_leaf
     WHERE task_id >= CAST(:first AS uuid) AND task_id <= CAST(:last AS uuid) AND seal <= CAST(:sealed AS bigint)
     ORDER BY task_id, seal
""")
STANDINGS = text("""
    SELECT id, history, entry_count, head FROM coatcheck.task
     WHERE id >= CAST(:first AS uuid) AND id <= CAST(:last AS uuid) AND entry_count > 0 ORDER BY id
""")
UNCHAINED = text("SELECT count(*) FROM coatcheck.task WHERE entry_count = 0 AND epoch > 0")
FILTERED = """
    SELECT h.task_id, t.service, h.number, h.kind, h.at, h.replica, h.epoch, h.actor, h.key, h.data, h.digest, h.hash
      FROM coatcheck.history h LEFT JOIN coatcheck.task t ON t.id = h.task_id
     {where} ORDER BY h.at, h.task_id, h.number LIMIT CAST(:limit AS integer)
"""
_CONDITIONS = {
    "task_id": "h.task_id = CAST(:task_id AS uuid)",
    "service": "t.service = CAST(:service AS text)",
    "kind": "h.kind = CAST(:kind AS text)",
    "actor": "h.actor = CAST(:actor AS text)",
    "since": "h.at >= CAST(:since AS timestamptz)",
    "until": "h.at < CAST(:until AS timestamptz)",
}
_AFTER = (
    "(h.at, h.task_id, h.number) > (CAST(:after_at AS timestamptz), CAST(:after_id AS uuid), CAST(:after_n AS integer))"
)


async def read_chains(
    connection: Connection, *, after: tuple[UUID, int], last: UUID = LAST_TASK, sealed: int, limit: int
) -> ChainPage:
    """The next entries by task and number, with all that seals and rows say of the tasks up to the last of them. One
    snapshot: what belongs together was read together.
    """
    await connection.begin()
    await connection.read(SNAPSHOT)
    found = await rows(connection, CHAINS, task_id=after[0], number=after[1], last=last, limit=limit)
    upto = found[-1]["task_id"] if len(found) == limit else last
    leaves = await rows(connection, LEAVES, first=after[0], last=upto, sealed=sealed)
    standings = await rows(connection, STANDINGS, first=after[0], last=upto)
    return ChainPage(
        entries=[_chained_of(row) for row in found],
        leaves=[TaskLeaf(row["task_id"], row["seal"], row["entry_count"], row["head"]) for row in leaves],
        standings=[Standing(row["id"], row["entry_count"], row["head"]) for row in standings],
        upto=upto,
        is_last=len(found) < limit,
    )


async def find_entries(connection: Connection, *, wanted: EntryFilter, limit: int) -> list[FoundEntry]:
    """The entries that fit, the oldest first. A service is known only of tasks whose rows are still there."""
    await connection.begin_survey()
    values: dict[str, Any] = {name: value for name in _CONDITIONS if (value := getattr(wanted, name)) is not None}
    conditions = [_CONDITIONS[name] for name in values]
    if wanted.after is not None:
        conditions.append(_AFTER)
        values |= dict(zip(("after_at", "after_id", "after_n"), wanted.after, strict=True))
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    found = await rows(connection, text(FILTERED.format(where=where)), limit=limit, **values)
    return [FoundEntry(row["task_id"], row["service"], _entry_of(row)) for row in found]


async def count_unchained(connection: Connection) -> int:
    """How many tasks have a row and no history."""
    await connection.begin_survey()
    count: int = await connection.scalar(UNCHAINED)
    return count


async def find_seal_lag(connection: Connection) -> SealLag:
    """How far seals and sinks are behind."""
    await connection.begin()
    newest = await rows(connection, STATEMENTS["newest_seal"])
    seal = seal_of_row(newest[0]) if newest else None
    floor = seal.horizon if seal else 0
    (at,) = await rows(connection, STATEMENTS["seal_horizon"])
    oldest = await connection.scalar(STATEMENTS["oldest_unsealed"], {"floor": floor})
    return SealLag(
        newest=seal,
        oldest_unsealed_at=oldest,
        now=at["now"],
        sinks=tuple(await read_sinks(connection)),
    )


def _chained_of(row: Row) -> Chained:
    task_id, number, kind, at, replica, epoch, actor, key, digest, hash_, xid, is_whole = row
    return Chained(
        task_id, HistoryEntry(number, kind, at, replica, epoch, actor, key, None, digest, hash_), xid, is_whole
    )


def _entry_of(row: Row) -> HistoryEntry:
    names = ("number", "kind", "at", "replica", "epoch", "actor", "key", "data", "digest", "hash")
    return HistoryEntry(*[row[name] for name in names])
