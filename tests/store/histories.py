"""Chained history rows for tests, as a store writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
from msgspec.structs import replace
from tests.store.bench import Bench, MemoryBench, PostgresBench

from coatcheck.store import TaskId
from coatcheck.store.chain import GENESIS, HistoryEntry, digest_of, hash_of

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
INSERT = """
    INSERT INTO coatcheck.history (task_id, number, kind, at, replica, epoch, actor, key, data, digest, hash)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
"""


def entry_of(task_id: UUID, number: int, previous: bytes = GENESIS, **given: Any) -> HistoryEntry:
    """One entry; what is not given is alike for all."""
    data = given.pop("data", f"data {number}".encode())
    values: dict[str, Any] = {
        "kind": "accepted" if number == 1 else "recorded",
        "at": NOON + timedelta(seconds=number),
        "replica": "r1",
        "epoch": 1,
        "actor": None,
        "key": f"step#{number}",
    }
    unhashed = HistoryEntry(number=number, data=data, digest=digest_of(data), hash=b"", **(values | given))
    return replace(unhashed, hash=hash_of(task_id, unhashed, previous))


def chain_of(task_id: UUID, count: int, *, after: Sequence[HistoryEntry] = (), **given: Any) -> list[HistoryEntry]:
    """The next `count` entries of a chain."""
    chain = list(after)
    for _ in range(count):
        chain.append(entry_of(task_id, len(chain) + 1, chain[-1].hash if chain else GENESIS, **given))
    return chain[len(after) :]


async def insert(sql: asyncpg.Connection, task_id: UUID, entries: Sequence[HistoryEntry]) -> None:
    """Write entries in a transaction of its own, as the writer of a task does."""
    names = ("number", "kind", "at", "replica", "epoch", "actor", "key", "data", "digest", "hash")
    await sql.executemany(INSERT, [(task_id, *(getattr(entry, name) for name in names)) for entry in entries])


async def settle(sql: asyncpg.Connection) -> None:
    """Wait until no transaction of this server, of any test, is older than the newest entry: it can be sealed then."""
    while not await sql.fetchval(
        "SELECT coalesce(max(xid) < pg_snapshot_xmin(pg_current_snapshot()), true) FROM coatcheck.history"
    ):
        await asyncio.sleep(0.01)


async def write(bench: Bench, task_id: TaskId, entries: Sequence[HistoryEntry]) -> None:
    """The same on either kind of rows."""
    if isinstance(bench, MemoryBench):
        bench.tables.history.setdefault(task_id, []).extend(entries)
    else:
        assert isinstance(bench, PostgresBench)
        await insert(bench._connection, task_id, entries)
        await settle(bench._connection)
