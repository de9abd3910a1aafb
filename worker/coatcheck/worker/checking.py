"""Whether all that is stored of a task can be read: each value's head, checksum and codec, and the history's chain.

Nothing here does I/O or runs user code. Each finding names where the bytes are, what is wrong, and what helps.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

from msgspec.structs import replace

from coatcheck.store import blobs, chain
from coatcheck.store.blobs import CorruptBlob
from coatcheck.store.chain import HistoryEntry
from coatcheck.store.checkpoints import Stored
from coatcheck.store.rows import CallState, Task, Value

__all__ = ["Checked", "Finding", "check_task"]


class Finding(Value, frozen=True):
    """Something stored that is wrong. `value` are its bytes as they are; None for a broken chain."""

    table: str
    row: str
    """The row in its table: the task's id, `seq 4`, the call's id, `number 7`."""
    column: str
    key: str | None
    what: str
    fix: str
    is_live: bool
    """A run or a reader still needs it. Forgotten entries and bodies of answered calls are kept, and not needed."""
    value: bytes | None = None

    @property
    def place(self) -> str:
        return f"coatcheck.{self.table}, {self.row}, {self.column}"


class Checked(Value, frozen=True):
    """What was looked at, and what is wrong with it."""

    task: Task
    findings: tuple[Finding, ...]
    value_count: int
    """How many stored values were read."""
    entry_count: int
    """How many entries and calls the next run would begin with."""
    history_count: int
    took: timedelta = timedelta()

    @property
    def is_ok(self) -> bool:
        return not any(finding.is_live for finding in self.findings)


def check_task(task: Task, rows: Sequence[Stored], history: Sequence[HistoryEntry] = ()) -> Checked:
    """Read everything that is stored of a task."""
    values = [*_values_of_task(task), *_values_of_rows(task, rows)]
    damaged = [replace(value, what=what) for value in values if (what := complaint(value.value or b"")) is not None]
    return Checked(
        task=task,
        findings=(*damaged, *_broken_chain(task, history)),
        value_count=len(values),
        entry_count=sum(not row.is_forgotten for row in rows),
        history_count=len(history),
    )


def complaint(blob: bytes) -> str | None:
    """Why a stored value cannot be read; None: it can."""
    try:
        blobs.decode(blob)
    except CorruptBlob as error:
        return str(error)
    except (ValueError, RecursionError, EOFError) as error:
        return f"its body is not valid: {type(error).__name__}"
    return None


def _values_of_task(task: Task) -> Iterator[Finding]:
    """The request and the answer. A cancel that met no task left a row without a request."""
    row, backup = str(task.task_id), "restore the row from a backup"
    if task.epoch:
        again = f"coatcheck rewind {task.task_id} --to start --input JSON"
        fix = backup if task.state.is_final else f"{backup}, or give it anew: {again}"
        yield Finding("task", row, "request", None, "", fix, is_live=True, value=task.request)
    if task.value is not None:
        again = f"coatcheck fork {task.task_id} --at {max(0, task.checkpoint - 1)}"
        fix = (
            f"{backup}, or have a new task end again: {again}" if task.state.is_final else "the next write replaces it"
        )
        yield Finding("task", row, "value", None, "", fix, is_live=task.state.is_final, value=task.value)


def _values_of_rows(task: Task, rows: Iterable[Stored]) -> Iterator[Finding]:
    for row in rows:
        fix = _fix(task, row)
        if row.body is None:
            place = f"seq {row.seq}"
            yield Finding("journal", place, "value", row.key, "", fix, is_live=not row.is_forgotten, value=row.value)
            continue
        place = str(row.call_id)
        if row.kind.is_published:
            is_live = row.state is CallState.OPEN and not row.is_forgotten
            yield Finding("call", place, "body", row.key, "", fix, is_live=is_live, value=row.body)
        if row.value is not None:
            yield Finding("call", place, "value", row.key, "", fix, is_live=not row.is_forgotten, value=row.value)


def _fix(task: Task, row: Stored) -> str:
    """The order that takes the task back to before this row. A task that has ended is forked, not rewound."""
    if row.is_forgotten:
        return "nothing: it is forgotten, and no run reads it"
    if task.state.is_final:
        return f"coatcheck fork {task.task_id} --at {row.checkpoint - 1}"
    return f"coatcheck rewind {task.task_id} --to {shlex.quote(f'before:{row.key}')}"


def _broken_chain(task: Task, history: Sequence[HistoryEntry]) -> list[Finding]:
    """Whether each entry follows from the one before it, and the last is the one that the task's row names."""
    verify = f"coatcheck audit verify {task.task_id}"
    bad = chain.first_bad(task.task_id, history)
    if bad is not None:
        what = f"entry {bad} does not follow from the one before it: it was altered, removed or put in"
        return [Finding("history", f"number {bad}", "hash", None, what, verify, is_live=True)]
    if not history and not task.entry_count:
        return []
    head = history[-1].hash if history else None
    if (len(history), head) != (task.entry_count, task.head):
        what = f"there are {len(history)} entries, and the task's row names {task.entry_count} with another last one"
        return [Finding("task", str(task.task_id), "head", None, what, verify, is_live=True)]
    return []
