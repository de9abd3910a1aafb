"""Seals and audits on plain Python rows. An operation is one step here, so all that is there is over: no horizons."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from uuid import UUID

from coatcheck.store.audits import LAST_TASK, Chained, ChainPage, EntryFilter, FoundEntry, SealLag, Standing, TaskLeaf
from coatcheck.store.chain import digest_of
from coatcheck.store.memory.tables import Tables
from coatcheck.store.seals import Leaf, Seal, SinkMark, Unsealed


def read_unsealed(tables: Tables, *, limit: int, keep: timedelta | None = None) -> Unsealed:
    last = tables.seals[-1] if tables.seals else None
    sealed = {leaf.task_id: leaf.entry_count for leaves in tables.leaves for leaf in leaves}
    chains = sorted(tables.history.items())
    newer = {it: [entry for entry in chain if entry.number > sealed.get(it, 0)] for it, chain in chains}
    new = {it: entries for it, entries in newer.items() if entries}
    leaves = tuple([Leaf(it, entries[-1].number, entries[-1].hash) for it, entries in new.items()])
    trimmed_to = last.trimmed_to if last else 0
    if keep is not None:
        trimmed_to = max([trimmed_to, *(it.number for it in tables.seals if it.sealed_at <= tables.now - keep)])
    return Unsealed(
        last=last,
        now=tables.now,
        horizon=0,
        entry_count=sum(map(len, new.values())),
        leaves=leaves,
        trimmed_to=trimmed_to,
        oldest_at=min((entries[0].at for entries in new.values()), default=None),
    )


def add_seal(tables: Tables, seal: Seal, leaves: Sequence[Leaf]) -> bool:
    if seal.number != len(tables.seals) + 1:
        return False
    tables.append(tables.seals, seal)
    tables.append(tables.leaves, tuple(leaves))
    return True


def read_seals(tables: Tables, *, after: int, limit: int) -> list[Seal]:
    return [seal for seal in tables.seals if seal.number > after][:limit]


def read_leaves(tables: Tables, *, after: int, last: int, limit: int) -> list[tuple[int, Leaf]]:
    numbered = enumerate(tables.leaves, start=1)
    return [(number, leaf) for number, leaves in numbered if after < number <= last for leaf in leaves][:limit]


def read_sinks(tables: Tables) -> list[SinkMark]:
    return sorted(tables.sinks.values(), key=lambda mark: mark.sink)


def mark_sink(tables: Tables, sink: str, number: int) -> None:
    before = tables.sinks.get(sink)
    tables.undo(partial(tables.sinks.pop, sink) if before is None else partial(tables.sinks.__setitem__, sink, before))
    tables.sinks[sink] = SinkMark(sink, max(number, before.number if before else 0), tables.now)


def read_chains(
    tables: Tables, *, after: tuple[UUID, int], last: UUID = LAST_TASK, sealed: int, limit: int
) -> ChainPage:
    """All in one page, whatever its limit."""
    first = after[0]
    return ChainPage(
        entries=[
            Chained(task_id, entry, 0, entry.data is None or digest_of(entry.data) == entry.digest)
            for task_id, chain in sorted(tables.history.items())
            for entry in chain
            if after < (task_id, entry.number) and task_id <= last
        ],
        leaves=sorted(
            TaskLeaf(leaf.task_id, number, leaf.entry_count, leaf.head)
            for number, leaves in enumerate(tables.leaves, start=1)
            for leaf in leaves
            if first <= leaf.task_id <= last and number <= sealed
        ),
        standings=[
            Standing(task_id, row.task.entry_count, row.task.head)
            for task_id, row in sorted(tables.tasks.items())
            if first <= task_id <= last and row.task.entry_count
        ],
        upto=last,
        is_last=True,
    )


def find_entries(tables: Tables, *, wanted: EntryFilter, limit: int) -> list[FoundEntry]:
    found = [
        FoundEntry(task_id, tables.tasks[task_id].task.service if task_id in tables.tasks else None, entry)
        for task_id, chain in tables.history.items()
        for entry in chain
    ]
    fitting = [it for it in found if _fits(it, wanted)]
    return sorted(fitting, key=_place)[:limit]


def _fits(found: FoundEntry, wanted: EntryFilter) -> bool:
    entry = found.entry
    asked = (wanted.task_id, wanted.service, wanted.kind, wanted.actor)
    is_one = zip(asked, (found.task_id, found.service, entry.kind, entry.actor), strict=True)
    return (
        all(value is None or value == it for value, it in is_one)
        and (wanted.since is None or entry.at >= wanted.since)
        and (wanted.until is None or entry.at < wanted.until)
        and (wanted.after is None or _place(found) > wanted.after)
    )


def _place(found: FoundEntry) -> tuple[object, UUID, int]:
    return (found.entry.at, found.task_id, found.entry.number)


def count_unchained(tables: Tables) -> int:
    return sum(1 for row in tables.tasks.values() if not row.task.entry_count and row.task.epoch)


def find_seal_lag(tables: Tables) -> SealLag:
    unsealed = read_unsealed(tables, limit=0)
    return SealLag(unsealed.last, unsealed.oldest_at, tables.now, tuple(read_sinks(tables)))
