"""The workbench of a store test: replicas on shared rows, and hands that reach into the rows and move the time.

A time is given by its distance from now. What a bench reads is alike for both kinds of rows: by table and id, with the
columns' names and values as Postgres has them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from msgspec.structs import asdict, replace

from coatcheck.store import CallId, MemoryStore, Store, Tables, TaskId
from coatcheck.store.memory.tables import CallRow, EntryRow, TaskRow

Row = dict[str, Any]
Rows = dict[str, dict[Any, Row]]


class Bench(Protocol):
    def replica(self, **options: Any) -> Store:
        """A store of one more replica; the test closes it."""

    async def set_calls(self, *ids: CallId, **values: Any) -> None:
        """Change these calls by hand, or all."""

    async def set_tasks(self, *ids: TaskId, **values: Any) -> None: ...

    async def let_pass(self, time: timedelta) -> None:
        """Let everything be nearer by that much."""

    async def read(self) -> Rows: ...


class MemoryBench:
    def __init__(self) -> None:
        self.passed = timedelta()
        self.tables = Tables(lambda: datetime.now(UTC) + self.passed)

    def replica(self, **options: Any) -> MemoryStore:
        return MemoryStore(self.tables, **options)

    async def set_calls(self, *ids: CallId, **values: Any) -> None:
        for call_id in ids or self.tables.calls:
            for name, value in self._moved(values).items():
                setattr(self.tables.calls[call_id], name, value)

    async def set_tasks(self, *ids: TaskId, **values: Any) -> None:
        for task_id in ids or self.tables.tasks:
            row, moved = self.tables.tasks[task_id], self._moved(values)
            row.look_at = moved.pop("look_at", row.look_at)
            row.task = replace(row.task, **moved)

    async def let_pass(self, time: timedelta) -> None:
        self.passed += time

    async def read(self) -> Rows:
        entries = [_journal_row(task_id, row) for task_id, found in self.tables.entries_of.items() for row in found]
        told = [asdict(row) | {"task_id": task_id} for task_id, found in self.tables.history.items() for row in found]
        return {
            "task": {task_id: self._shift(_task_row(row)) for task_id, row in self.tables.tasks.items()},
            "call": {call_id: self._shift(_call_row(row)) for call_id, row in self.tables.calls.items()},
            "journal": {(row["task_id"], row["seq"]): self._shift(row) for row in entries},
            "history": {(row["task_id"], row["number"]): row for row in told},
        }

    def _moved(self, values: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC) + self.passed
        return {name: now + it if isinstance(it, timedelta) else it for name, it in values.items()}

    def _shift(self, row: Row) -> Row:
        """Times as they would read had the rows been moved and not the clock. A deadline is the requester's to say."""
        is_ours = {name: isinstance(it, datetime) and name != "deadline_at" for name, it in row.items()}
        return {name: it - self.passed if is_ours[name] else it for name, it in row.items()}


def _task_row(row: TaskRow) -> Row:
    columns = asdict(row.task)
    columns["id"] = columns.pop("task_id")
    del columns["caller"]
    columns["caller_subject"] = row.task.caller and row.task.caller.subject
    columns["caller_claims"] = row.task.caller and row.task.caller.claims
    columns["addresses"] = [[address.reply_to, address.correlation_id] for address in row.task.addresses]
    waits = [(call_id, number) for number, group in enumerate(row.waits, start=1) for call_id in group.calls]
    columns["wait_calls"] = [call_id for call_id, _ in waits] or None
    columns["wait_groups"] = [number for _, number in waits] or None
    columns["wait_needs"] = [group.need for group in row.waits] or None
    return columns | {"look_at": row.look_at}


def _call_row(row: CallRow) -> Row:
    new = asdict(row.new)
    columns = {name: getattr(row, name) for name in CallRow.__slots__ if name != "new"}
    columns |= {name: new[name] for name in ("key", "kind", "name", "digest", "peer", "body", "handler", "idle")}
    return columns | {"id": row.new.call_id, "headers": dict(row.new.headers)}


def _journal_row(task_id: TaskId, row: EntryRow) -> Row:
    columns = asdict(row.new) | {name: getattr(row, name) for name in EntryRow.__slots__ if name != "new"}
    return columns | {"task_id": task_id}
