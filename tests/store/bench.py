"""The workbench on Postgres. `MemoryBench` and what both promise are public: `coatcheck.testing.store_conformance`."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from coatcheck.store import CallId, Store, TaskId
from coatcheck.testing.store_conformance import Bench, MemoryBench, Row, Rows

__all__ = ["TIMES", "Bench", "MemoryBench", "PostgresBench", "Row", "Rows"]

TIMES = {
    "task": ("due_at", "look_at", "created_at", "updated_at", "finished_at"),
    "call": ("due_at", "look_at", "hard_due_at", "opened_at", "closed_at"),
    "journal": ("recorded_at",),
}
_DOCUMENTS = ("addresses", "progress", "headers", "caller_claims")


class PostgresBench:
    def __init__(self, url: str, connection: asyncpg.Connection) -> None:
        self._url = url
        self._connection = connection

    def replica(self, **options: Any) -> Store:
        return Store(self._url, **options)

    async def set_calls(self, *ids: CallId, **values: Any) -> None:
        await self._set("call", ids, values)

    async def set_tasks(self, *ids: TaskId, **values: Any) -> None:
        await self._set("task", ids, values)

    async def let_pass(self, time: timedelta) -> None:
        for table, columns in TIMES.items():
            moves = ", ".join(f"{column} = {column} - $1::interval" for column in columns)
            await self._connection.execute(f"UPDATE coatcheck.{table} SET {moves}", time)

    async def empty(self) -> None:
        for table in ("history", "journal", "call", "task"):
            await self._connection.execute(f"DELETE FROM coatcheck.{table}")

    async def read(self) -> Rows:
        tasks, calls, entries, told = [
            [_decoded(row) for row in await self._connection.fetch(f"SELECT * FROM coatcheck.{table}")]
            for table in ("task", "call", "journal", "history")
        ]
        return {
            "task": {row["id"]: row for row in tasks},
            "call": {row["id"]: row for row in calls},
            "journal": {(row["task_id"], row["seq"]): row for row in entries},
            "history": {(row["task_id"], row["number"]): row for row in told},
        }

    async def _set(self, table: str, ids: Collection[UUID], values: dict[str, Any]) -> None:
        now = datetime.now(UTC)
        moved = {name: now + it if isinstance(it, timedelta) else it for name, it in values.items()}
        changes = ", ".join(f"{name} = ${number}" for number, name in enumerate(moved, start=2))
        statement = f"UPDATE coatcheck.{table} SET {changes} WHERE $1::uuid[] IS NULL OR id = ANY($1)"
        await self._connection.execute(statement, list(ids) or None, *moved.values())


def _decoded(row: asyncpg.Record) -> Row:
    return {
        name: json.loads(it) if name in _DOCUMENTS and it is not None else it
        for name, it in row.items()
        if name not in ("labels", "xid")
    }
