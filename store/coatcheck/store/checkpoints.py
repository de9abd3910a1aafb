"""A task's checkpoints as things, found from the rows they wrote. Pure: both stores hand their rows in.

A journal entry or a call carries the number of the commit that wrote it. A call that a commit gave up does not; it goes
with the commit of the same moment. The task's row knows the last number and, of a task that has ended, its time. So a
commit that only put the task down, renewed it or gave calls up is not known, unless it is the last.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from coatcheck.store.kinds import Kind
from coatcheck.store.rows import CallId, CallState, Task, Value

FORMAT = b"coatcheck.checkpoint.1"
ONE_COMMIT = timedelta(seconds=1)
"""Rows of one commit are written within so much of each other."""

_LENGTH = struct.Struct(">I")
_ENDED_FROM_OUTSIDE = frozenset({CallState.OK, CallState.FAILED, CallState.TIMED_OUT})


class Stored(Value, frozen=True):
    """A row of the journal or of the calls, with its bytes as they are. `body` is None for an entry of the journal."""

    key: str
    kind: Kind
    state: CallState
    seq: int | None
    digest: bytes
    value: bytes | None
    body: bytes | None
    call_id: CallId | None
    checkpoint: int
    epoch: int | None
    replica: str | None
    opened_at: datetime
    """When it was recorded, for an entry of the journal."""
    closed_at: datetime | None
    is_forgotten: bool

    @property
    def written(self) -> bytes:
        """The bytes that its commit wrote: an entry's value, a call's body. A call's value comes later."""
        return (self.value if self.body is None else self.body) or b""

    @property
    def place(self) -> int | None:
        """The number in the order that its commit gave it. A call that is waited for gets one when it ends."""
        return None if self.kind.is_awaited else self.seq


def in_order(row: Stored) -> tuple[int, bool, int, str, str]:
    """By checkpoint; in it what has a number in the order first. Sorted here, as databases differ in sorting texts."""
    return row.checkpoint, row.seq is None, row.seq or 0, row.key, str(row.call_id)


class CheckpointInfo(Value, frozen=True):
    """One commit of a run. `at`, `replica` and `epoch` are None where the rows do not tell."""

    number: int
    at: datetime | None
    replica: str | None
    epoch: int | None
    recorded: tuple[str, ...]
    """Keys of the steps and notes that it recorded."""
    opened: tuple[str, ...]
    """Keys of the calls, timers and sends that it opened."""
    closed: tuple[str, ...]
    """Keys of the calls that it gave up."""
    size: int
    """Bytes of the values and bodies that it wrote, as they are stored."""
    checksum: bytes
    """SHA-256 over what it wrote; `checksum_of` says how it is made."""
    event_count: int
    """Replies and timeouts that arrived since the checkpoint before it in this list."""
    is_discarded: bool
    """All that it recorded is forgotten: a retry or a rewind does it again."""


def checkpoints_of(task: Task, rows: Sequence[Stored]) -> list[CheckpointInfo]:
    """The checkpoints of a task that are known, by number."""
    wrote: dict[int, list[Stored]] = defaultdict(list)
    for row in rows:
        wrote[row.checkpoint].append(row)
    numbers = sorted({*wrote, *([task.checkpoint] if task.checkpoint else [])})
    spans = {number: _span_of(task, number, wrote.get(number, ())) for number in numbers}
    closed = _closed_by(spans, rows)
    events = _event_times(rows)
    found, before = list[CheckpointInfo](), None
    for number in numbers:
        span = spans[number]
        at = None if span is None else span.first
        count = _count_events(events, after=before, until=at)
        rows_of = wrote.get(number, ())
        found.append(_info(task, number, at=at, wrote=rows_of, closed=closed[number], event_count=count))
        before = at or before
    return found


def checksum_of(rows: Iterable[Stored]) -> bytes:
    """SHA-256 over a format name and, for each row, its key, kind, number in the order, digest of arguments and bytes.

    Each field is preceded by its length in four bytes. Entries and sends come first, in their order; then calls and
    timers by key, whose number is left out because they get it later. So the checksum of a checkpoint never changes.
    """
    hashed = hashlib.sha256(FORMAT)
    for row in sorted(rows, key=lambda row: (row.place is None, row.place or 0, row.key)):
        place = b"" if row.place is None else str(row.place).encode()
        for field in (row.key.encode(), row.kind.value.encode(), place, row.digest, row.written):
            hashed.update(_LENGTH.pack(len(field)) + field)
    return hashed.digest()


def _info(
    task: Task, number: int, *, at: datetime | None, wrote: Sequence[Stored], closed: Sequence[Stored], event_count: int
) -> CheckpointInfo:
    by = next(((row.epoch, row.replica) for row in wrote if row.epoch is not None), (None, None))
    is_last_run = number == task.checkpoint and not wrote and task.state.is_final
    return CheckpointInfo(
        number=number,
        at=at,
        replica=by[1],
        epoch=task.epoch if is_last_run else by[0],
        recorded=tuple(row.key for row in wrote if row.kind.is_entry),
        opened=tuple(row.key for row in wrote if not row.kind.is_entry),
        closed=tuple(row.key for row in closed),
        size=sum(len(row.written) for row in wrote),
        checksum=checksum_of(wrote),
        event_count=event_count,
        is_discarded=bool(wrote) and all(row.is_forgotten for row in wrote),
    )


class _Span(NamedTuple):
    """When the rows of a commit were written. Postgres's clock goes on between the first and the last of them."""

    first: datetime
    last: datetime

    def distance(self, at: datetime) -> timedelta:
        return max(self.first - at, at - self.last, timedelta())


def _span_of(task: Task, number: int, wrote: Sequence[Stored]) -> _Span | None:
    times = [row.opened_at for row in wrote]
    if number == task.checkpoint and task.finished_at is not None:
        times.append(task.finished_at)
    return _Span(min(times), max(times)) if times else None


def _closed_by(spans: Mapping[int, _Span | None], rows: Sequence[Stored]) -> dict[int, list[Stored]]:
    """Which commit gave up which calls: the nearest in time, if there is one of the same moment."""
    closed: dict[int, list[Stored]] = defaultdict(list)
    known = {number: span for number, span in spans.items() if span is not None}
    for row in rows:
        if row.state is not CallState.CLOSED or row.closed_at is None or not known:
            continue
        distances = {number: span.distance(row.closed_at) for number, span in known.items()}
        nearest = min(distances, key=lambda number: distances[number])
        if distances[nearest] <= ONE_COMMIT:
            closed[nearest].append(row)
    return closed


def _event_times(rows: Iterable[Stored]) -> list[datetime]:
    """When answers from outside came, in order."""
    return sorted(
        row.closed_at
        for row in rows
        if row.kind.is_awaited and row.state in _ENDED_FROM_OUTSIDE and row.closed_at is not None
    )


def _count_events(events: Sequence[datetime], *, after: datetime | None, until: datetime | None) -> int:
    """How many came in between. A commit of unknown time is the last: all came before it."""
    first = 0 if after is None else bisect_right(events, after)
    last = len(events) if until is None else bisect_right(events, until)
    return max(0, last - first)
