"""What an audit reads: pages of chains with what seals and rows say of them, and entries by what they tell."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from coatcheck.store.chain import HistoryEntry
from coatcheck.store.rows import Value
from coatcheck.store.seals import Seal, SinkMark

LAST_TASK = UUID(int=2**128 - 1)


class Chained(NamedTuple):
    """An entry without its data, which was compared with its digest where it is: `is_whole`."""

    task_id: UUID
    entry: HistoryEntry
    xid: int
    is_whole: bool


class TaskLeaf(NamedTuple):
    """What a seal says of a task."""

    task_id: UUID
    seal: int
    entry_count: int
    head: bytes


class Standing(NamedTuple):
    """What a task's row says of its chain."""

    task_id: UUID
    entry_count: int
    head: bytes | None


class ChainPage(NamedTuple):
    """Entries by task and number. `leaves` and `standings` are of all tasks up to `upto`, with entries or without."""

    entries: list[Chained]
    leaves: list[TaskLeaf]
    standings: list[Standing]
    upto: UUID
    is_last: bool


class EntryFilter(Value, frozen=True):
    """Which entries are looked for; None: any. `after` is where an earlier page ended: time, task and number."""

    task_id: UUID | None = None
    service: str | None = None
    kind: str | None = None
    actor: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    after: tuple[datetime, UUID, int] | None = None


class FoundEntry(NamedTuple):
    """An entry and whose it is; `service` None: the task's row is gone."""

    task_id: UUID
    service: str | None
    entry: HistoryEntry


class SealLag(Value, frozen=True):
    """How far seals are behind histories, and sinks behind seals."""

    newest: Seal | None
    oldest_unsealed_at: datetime | None
    now: datetime
    sinks: tuple[SinkMark, ...] = ()

    @property
    def lag(self) -> timedelta:
        """For how long an entry has been waiting to be sealed."""
        oldest = self.oldest_unsealed_at
        return max(self.now - oldest, timedelta()) if oldest is not None else timedelta()
